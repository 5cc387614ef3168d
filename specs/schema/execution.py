"""Resources of a run on a machine, what it records and where that is sent, what happens when a stage fails, and
who is told. Nothing here changes a result.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from specs.errors import Issue, IssueError
from specs.schema.base import Spec, execution
from specs.secrets import HIDDEN, is_reference, looks_secret


class Resources(Spec):
    """Resources of a training rank."""

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
    """Share of each step's responses whose tokens are recorded with `tokens: sampled`; rounded up. Which ones follows
    from the run's id and the step alone."""
    keep_days: float = execution(0.0, ge=0)
    """Days from a run's end until `rpg gc` frees its token rows; 0: they are kept."""

    @property
    def share(self) -> float:
        """Share of a step's responses whose tokens are recorded: 0 to 1."""
        return {"all": 1.0, "sampled": self.sampled_share, "none": 0.0}[self.tokens]


def _without_password(value: str) -> str:
    if looks_secret("", value):
        hint = "a spec is stored and shared: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        raise IssueError(Issue("holds a secret", (), HIDDEN, "an address without a password", hint, snippet=HIDDEN))
    return value


class _Sink(Spec):
    """A tracker that is sent what a run records: metrics, evaluations, the resolved spec and how the run ended."""

    package: ClassVar[str] = ""
    """The installed package that it needs; empty: none beside this one's."""
    extra: ClassVar[str] = ""
    """The extra of this distribution that brings the package."""


class TensorboardSink(_Sink):
    """Event files under `tensorboard/` in the home, a directory for each run."""

    package = "tensorboard"
    extra = "tensorboard"

    type: Literal["tensorboard"]
    """tensorboard: `tensorboard --logdir .rpg/tensorboard` shows them."""


class WandbSink(_Sink):
    """A W&B run for each run, of its id, in the group of the experiment. WANDB_API_KEY or `wandb login` says who sends
    it, WANDB_BASE_URL to which server."""

    package = "wandb"
    extra = "wandb"

    type: Literal["wandb"]
    """wandb: Weights & Biases."""
    project: str = Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")
    """The project that the runs are in."""
    entity: str = ""
    """The user or team whose project it is; empty: the default of whose key it is."""
    mode: Literal["online", "offline"] = "online"
    """offline: a directory `wandb/offline-run-...` in the home for each run, which `wandb sync` sends when you want."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of each run, beside the objective's type and the seed."""


class MlflowSink(_Sink):
    """An MLflow run for each run. MLflow takes no value back, so that a step is sent once a checkpoint holds it."""

    package = "mlflow"
    extra = "mlflow"

    type: Literal["mlflow"]
    """mlflow: MLflow Tracking."""
    tracking_uri: Annotated[str, AfterValidator(_without_password)] = ""
    """Address of the tracking server or store; empty: MLFLOW_TRACKING_URI, without it the file mlflow.db in the
    home."""
    experiment: str = ""
    """MLflow's experiment that the runs are in; empty: the name of this one."""


Sink = Annotated[TensorboardSink | WandbSink | MlflowSink, Field(discriminator="type")]


def not_installed(sink: Sink) -> str:
    """Empty where the package that a sink needs is on this machine; else what is wrong, and what installs it."""
    if not sink.package or find_spec(sink.package) is not None:
        return ""
    return f"{sink.package} is not installed: {_install(sink)}"


def missing_packages(sinks: Sequence[Sink]) -> Iterator[Issue]:
    """Issues of packages that sinks need and that are not installed, each at its place in the spec."""
    for index, sink in enumerate(sinks):
        if not_installed(sink):
            yield Issue(f"{sink.package} is not installed", ("sinks", index), given=sink.type, hint=_install(sink))


def _install(sink: Sink) -> str:
    return f'pip install "rpg-experiments[{sink.extra}]"'


_RETRIES = (
    "Further attempts after a failure that another one may get past (out of memory once, with half the microbatch, but"
    " not where it was the sampler's; a lost rank; preemption; the time limit; causes unknown, but not an exception"
    " that would happen again); training goes on from its last checkpoint."
)


class StagePolicy(Spec):
    """Retries and time limit of one stage."""

    retries: int = Field(0, ge=0, le=10, description=_RETRIES)
    retry_delay_seconds: float = Field(5.0, ge=0)
    """Between a failure and the next attempt."""
    timeout_seconds: float = Field(0.0, ge=0)
    """The stage is stopped after so long; 0: no limit."""


class RetriedPolicy(StagePolicy):
    """Retries and time limits of a stage that is worth another attempt."""

    retries: int = Field(1, ge=0, le=10, description=_RETRIES)
    standstill_seconds: float = Field(10800.0, ge=0)
    """The stage is stopped, the stacks of its ranks in its log, once none of them has worked for so long: no token
    sampled, no pass of the model begun, no response scored, no part of a checkpoint written, no exchange between ranks;
    0: no limit. Loading a model and starting an engine show no work until they are done."""


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


Occasion = Literal["failure", "completion", "guard"]
"""failure: a run failed or crashed; completion: one finished; guard: a guard of one acted."""


def _reference(value: str) -> str:
    if not is_reference(value):
        allowed = "env:NAME or file:/PATH, read where it is used"
        hint = "a spec is stored and shared; keep it in a variable or a file"
        raise IssueError(
            Issue("a secret's place belongs here, not the secret", (), HIDDEN, allowed, hint, snippet=HIDDEN)
        )
    return value


SecretReference = Annotated[str, AfterValidator(_reference)]
"""Where a secret is: `env:NAME` or `file:/PATH`."""


class _Notice(Spec):
    """Fields of every notice. The Prefect server that the experiment is submitted to sends it; `rpg run` sends none."""

    on: tuple[Occasion, ...] = Field(("failure", "guard"), min_length=1)
    """failure: a run failed or crashed. completion: a run finished. guard: a guard acted."""


class WebhookNotice(_Notice):
    """A POST of JSON: event, experiment, run, message, link."""

    type: Literal["webhook"]
    """webhook: a request to an address of yours."""
    url: SecretReference
    """env:NAME or file:/PATH of the address."""


class SlackNotice(_Notice):
    """A message in a Slack channel."""

    type: Literal["slack"]
    """slack: an incoming webhook of Slack's, or of a service that takes the same."""
    url: SecretReference
    """env:NAME or file:/PATH of the webhook's address."""


class EmailNotice(_Notice):
    """An e-mail."""

    type: Literal["email"]
    """email: through a mail server."""
    server: SecretReference
    """env:NAME or file:/PATH of smtp://HOST:PORT, smtps://USER:PASSWORD@HOST:PORT (TLS from the start) or
    smtp+starttls://USER:PASSWORD@HOST:PORT."""
    sender: str = Field(pattern=r"^[^@\s]+@[^@\s]+$")
    """Address that it comes from."""
    to: tuple[Annotated[str, Field(pattern=r"^[^@\s,]+@[^@\s,]+$")], ...] = Field(min_length=1)
    """Addresses that it goes to."""


Notice = Annotated[WebhookNotice | SlackNotice | EmailNotice, Field(discriminator="type")]
