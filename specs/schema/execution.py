"""Resources of a run, its records and trackers, retries of failed stages, and notifications. Nothing here changes a
result.
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
    """auto: cuda if the machine has a GPU, else cpu."""
    when_taken: Literal["wait", "fail"] = "wait"
    """If other runs hold the machine's GPUs: wait until enough are free, or fail. Leases are per machine."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory of one rank's device in GiB, which the plan compares with its estimate. 0 means that of this machine's
    smallest GPU if ranks run here, else that of an H100 if the model is large."""
    threads: int = Field(0, ge=0)
    """CPU threads of a rank. 0 divides the machine's cores among the ranks and the concurrent runs."""


class Record(Spec):
    """Rows that training records, and how long token rows are kept. Metrics, events and evaluations are always
    recorded.

    `rpg replay` needs all rows of `rollouts` and `tokens`.
    """

    rollouts: Literal["all", "none"] = execution("all")
    """Table `rollouts`: a row for each response of training, with its text. none: no texts are kept, not even the texts
    of tokens.
    """
    tokens: Literal["all", "sampled", "none"] = execution("all")
    """Table `tokens`: a row for each token of all responses, of a sampled share of each step's responses, or no
    rows."""
    sampled_share: float = execution(0.1, gt=0, lt=1)
    """Share of each step's responses whose tokens are recorded with `tokens: sampled`, rounded up. The run's id and the
    step determine which responses."""
    keep_days: float = execution(0.0, ge=0)
    """Days from a run's end until `rpg gc` frees its token rows. 0 keeps them."""

    @property
    def share(self) -> float:
        """Returns the share of a step's responses whose tokens are recorded: 0 to 1."""
        return {"all": 1.0, "sampled": self.sampled_share, "none": 0.0}[self.tokens]


def _without_password(value: str) -> str:
    if looks_secret("", value):
        hint = "a spec is stored and shared: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        raise IssueError(Issue("holds a secret", (), HIDDEN, "an address without a password", hint, snippet=HIDDEN))
    return value


class _Sink(Spec):
    """A tracker that receives a run's records: metrics, evaluations, the resolved spec and the final status."""

    package: ClassVar[str] = ""
    """Name of the package that the sink needs. Empty if it needs only this distribution's packages."""
    extra: ClassVar[str] = ""
    """Extra of this distribution that installs the package."""


class TensorboardSink(_Sink):
    """TensorBoard: event files under `tensorboard/` in the home, a directory for each run."""

    package = "tensorboard"
    extra = "tensorboard"

    type: Literal["tensorboard"]
    """tensorboard: event files, shown by `tensorboard --logdir .rpg/tensorboard`."""


class WandbSink(_Sink):
    """Weights & Biases: a W&B run for each run, with the same id, in the experiment's group. WANDB_API_KEY or `wandb
    login` sets the account, WANDB_BASE_URL the server."""

    package = "wandb"
    extra = "wandb"

    type: Literal["wandb"]
    """wandb: Weights & Biases."""
    project: str = Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")
    """Project of the runs."""
    entity: str = ""
    """User or team that owns the project. Empty means the default of the key's owner."""
    mode: Literal["online", "offline"] = "online"
    """offline: writes a directory `wandb/offline-run-...` in the home for each run, which you can upload with `wandb
    sync`."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of each run, added to the objective's type and the seed."""


class MlflowSink(_Sink):
    """MLflow: an MLflow run for each run. MLflow cannot withdraw a value, so a step is sent once a checkpoint contains
    it."""

    package = "mlflow"
    extra = "mlflow"

    type: Literal["mlflow"]
    """mlflow: MLflow Tracking."""
    tracking_uri: Annotated[str, AfterValidator(_without_password)] = ""
    """Address of the tracking server or store. Empty means MLFLOW_TRACKING_URI, or if that is not set, the file
    mlflow.db in the home."""
    experiment: str = ""
    """MLflow experiment of the runs. Empty means the name of this experiment."""


class TrackioSink(_Sink):
    """Trackio: a Trackio run for each run, with the same id, in the experiment's group."""

    package = "trackio"
    extra = "trackio"

    type: Literal["trackio"]
    """trackio: Trackio, in files under TRACKIO_DIR, or if that is not set, under `trackio/` in the home."""
    project: str = Field("", max_length=128, pattern=r"^[A-Za-z0-9_-]*$")
    """Project of the runs. Empty means the name of this experiment."""


Sink = Annotated[TensorboardSink | WandbSink | MlflowSink | TrackioSink, Field(discriminator="type")]


def not_installed(sink: Sink) -> str:
    """Returns a message with the install command if the package that a sink needs is missing; else an empty text."""
    if not sink.package or find_spec(sink.package) is not None:
        return ""
    return f"{sink.package} is not installed: {_install(sink)}"


def missing_packages(sinks: Sequence[Sink]) -> Iterator[Issue]:
    """Yields an issue for each sink whose package is not installed, at the sink's place in the spec."""
    for index, sink in enumerate(sinks):
        if not_installed(sink):
            yield Issue(f"{sink.package} is not installed", ("sinks", index), given=sink.type, hint=_install(sink))


def _install(sink: Sink) -> str:
    return f'pip install "rpg-experiments[{sink.extra}]"'


_RETRIES = (
    "Further attempts after a failure that may not recur; training resumes from its last checkpoint. Retried are:"
    " running out of memory, once and with half the microbatch, unless the sampler ran out; a lost rank; preemption;"
    " the time limit; unknown causes, unless an exception would recur."
)


class StagePolicy(Spec):
    """Retries and time limit of one stage."""

    retries: int = Field(0, ge=0, le=10, description=_RETRIES)
    retry_delay_seconds: float = Field(5.0, ge=0)
    """Seconds between a failure and the next attempt."""
    timeout_seconds: float = Field(0.0, ge=0)
    """Seconds after which the stage is stopped. 0 means no limit."""


class RetriedPolicy(StagePolicy):
    """Retries and time limits of a stage that is retried by default."""

    retries: int = Field(1, ge=0, le=10, description=_RETRIES)
    standstill_seconds: float = Field(10800.0, ge=0)
    """Seconds without progress on any rank after which the stage is stopped, with the ranks' stacks in its log.
    Progress is a token sampled, a pass of the model begun, a response scored, a part of a checkpoint written, or an
    exchange between ranks. 0 means no limit. Loading a model and starting an engine show no progress until they are
    done."""


class Stages(Spec):
    """Retries and time limits, stage by stage."""

    data: StagePolicy = StagePolicy()
    """Policy for fetching, filtering and staging problems."""
    base: StagePolicy = StagePolicy()
    """Policy for fetching or creating the model, including the warm-up."""
    train: RetriedPolicy = RetriedPolicy()
    """Policy for training. A further attempt resumes from the last checkpoint."""
    evaluate: RetriedPolicy = RetriedPolicy()
    """Policy for evaluating checkpoints."""
    report: StagePolicy = StagePolicy()
    """Policy for writing the run's page."""


Occasion = Literal["failure", "completion", "guard"]
"""failure: a run failed or crashed; completion: a run finished; guard: a guard acted."""


def _reference(value: str) -> str:
    if not is_reference(value):
        allowed = "env:NAME or file:/PATH, which is read when it is used"
        hint = "a spec is stored and shared; keep it in a variable or a file"
        raise IssueError(
            Issue("give a reference to the secret, not the secret itself", (), HIDDEN, allowed, hint, snippet=HIDDEN)
        )
    return value


SecretReference = Annotated[str, AfterValidator(_reference)]
"""Reference to a secret: `env:NAME` or `file:/PATH`."""


class _Notice(Spec):
    """Fields of every notice. The Prefect server that the experiment is submitted to sends it; `rpg run` sends none."""

    on: tuple[Occasion, ...] = Field(("failure", "guard"), min_length=1)
    """Events that send the notice. failure: a run failed or crashed. completion: a run finished. guard: a guard
    acted."""


class WebhookNotice(_Notice):
    """A POST of JSON: event, experiment, run, message, link."""

    type: Literal["webhook"]
    """webhook: a POST request to your address."""
    url: SecretReference
    """env:NAME or file:/PATH of the address."""


class SlackNotice(_Notice):
    """A message in a Slack channel."""

    type: Literal["slack"]
    """slack: an incoming webhook of Slack, or of a compatible service."""
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
    """Sender's address."""
    to: tuple[Annotated[str, Field(pattern=r"^[^@\s,]+@[^@\s,]+$")], ...] = Field(min_length=1)
    """Recipients' addresses."""


Notice = Annotated[WebhookNotice | SlackNotice | EmailNotice, Field(discriminator="type")]
