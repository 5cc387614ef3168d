"""What a run may use of a machine, what it records, what happens when a stage fails. Nothing here changes a result."""

from typing import Literal

from pydantic import Field

from specs.schema.base import Spec, execution


class Resources(Spec):
    """What a training rank may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    when_taken: Literal["wait", "fail"] = "wait"
    """Where other runs hold the machine's GPUs: wait until enough are free, or fail. Leases are held per machine."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory of one rank's device in GiB, against which the plan's estimate is held; 0: that of this machine's smallest
    GPU where ranks run here, else of an H100 where the model is large."""
    threads: int = Field(0, ge=0)
    """CPU threads of a rank; 0: the machine's cores divided by the ranks, and by the runs at a time."""


class Record(Spec):
    """Which rows training records, and how long token rows stay. Metrics, events and evaluations always are recorded.

    `rpg replay` needs all rows of `rollouts` and `tokens`.
    """

    rollouts: Literal["all", "none"] = execution("all")
    """Table `rollouts`: a row for each response of training, with its text. none: no texts are kept, of tokens neither.
    """
    tokens: Literal["all", "sampled", "none"] = execution("all")
    """Table `tokens`: a row for each token of all responses, of a share of each step's responses, or of none."""
    sampled_share: float = execution(0.1, gt=0, lt=1)
    """Of each step's responses, those whose tokens are recorded with `tokens: sampled`; rounded up. Which ones follows
    from the run's id and the step alone."""
    keep_days: float = execution(0.0, ge=0)
    """Days from a run's end until `rpg gc` frees its token rows; 0: they are kept."""

    @property
    def share(self) -> float:
        """Of a step's responses, those whose tokens are recorded: 0 to 1."""
        return {"all": 1.0, "sampled": self.sampled_share, "none": 0.0}[self.tokens]


_RETRIES = (
    "Further attempts after a failure that another one may get past (out of memory once, with half the microbatch, but"
    " not where it was the sampler's; a lost rank; preemption; the time limit; causes unknown); training goes on from"
    " its last checkpoint."
)


class StagePolicy(Spec):
    """Retries and time limit of one stage."""

    retries: int = Field(0, ge=0, le=10, description=_RETRIES)
    retry_delay_seconds: float = Field(5.0, ge=0)
    """Between a failure and the next attempt."""
    timeout_seconds: float = Field(0.0, ge=0)
    """The stage is stopped after so long; 0: no limit."""


class RetriedPolicy(StagePolicy):
    """Retries and time limit of a stage that is worth another attempt."""

    retries: int = Field(1, ge=0, le=10, description=_RETRIES)


class Stages(Spec):
    """Retries and time limits, stage by stage."""

    data: StagePolicy = StagePolicy()
    """Fetching, filtering and staging problems."""
    base: StagePolicy = StagePolicy()
    """Fetching or making the model, the warm-up included."""
    train: RetriedPolicy = RetriedPolicy()
    """Reinforcement; a further attempt goes on from the last checkpoint."""
    evaluate: RetriedPolicy = RetriedPolicy()
    """Measuring checkpoints."""
    report: StagePolicy = StagePolicy()
    """The page that shows the run."""
