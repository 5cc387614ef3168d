"""What a run may use of a machine, and what happens when a stage fails. Nothing here changes a result."""

from typing import Literal

from pydantic import Field

from specs.schema.base import Spec


class Resources(Spec):
    """What a training rank may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    when_taken: Literal["wait", "fail"] = "wait"
    """Where other runs hold the machine's GPUs: wait until enough are free, or fail. Leases are held per machine."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory of one rank's device in GiB, against which the plan's estimate is held; 0: not checked."""
    threads: int = Field(0, ge=0)
    """CPU threads of a rank; 0: the machine's cores divided by the ranks, and by the runs at a time."""


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
