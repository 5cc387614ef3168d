"""Shapes of a record's JSON documents. Keys that are not told here may hold anything."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Required, TypedDict

from specs.documents.names import is_portable_name


def _is_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and text.isprintable()


def _is_fingerprint(text: str) -> bool:
    return not text or is_portable_name(text)


def _is_moment(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _has_both_policies(findings: Sequence["Finding"]) -> bool:
    return {finding["policy"] for finding in findings if finding["reference"] == "apart"} >= {"on_policy", "off_policy"}


Name = Annotated[str, _is_name, "a name"]
PortableName = Annotated[str, is_portable_name, "a name of letters, digits and _ . = + -"]
Fingerprint = Annotated[str, _is_fingerprint, "a fingerprint"]
Moment = Annotated[str, _is_moment, "a time with its zone, ISO-8601"]
Values = dict[str, Any]


class RunDocument(TypedDict, total=False):
    """run.json: what a run is."""

    run_id: Name
    experiment: str
    name: str
    kind: str
    seed: int
    values: Values
    question: str
    created_at: Moment
    fingerprints: dict[str, Fingerprint]
    objective: str | Values | None
    """A text; the first versions wrote the objective itself."""


class Stage(TypedDict, total=False):
    """One stage in state.json."""

    fingerprint: Fingerprint
    status: str
    cached: bool
    started_at: Moment | None
    ended_at: Moment | None
    reason: str | None
    output: str | None
    cause: str | None


class State(TypedDict, total=False):
    """state.json: how a run stands."""

    status: str
    started_at: Moment | None
    ended_at: Moment | None
    reason: str
    cause: str | None
    pid: int | None
    pid_started: str | None
    host: str | None
    flow_run_id: str | None
    api_url: str | None
    evaluation: Fingerprint | None
    stages: dict[str, Stage]


class Progress(TypedDict, total=False):
    """progress.json: how far the trainer is."""

    step: int | None
    steps: int | None
    phase: str | None


class PlannedStage(TypedDict, total=False):
    """One stage in plan.json."""

    fingerprint: Fingerprint
    identity: Values
    inputs: dict[str, str]
    code: dict[str, str]
    results: int


class Plan(TypedDict, total=False):
    """plan.json: what a run's stages are made from."""

    stages: dict[str, PlannedStage]


class Finding(TypedDict, total=False):
    """One situation of a certificate."""

    policy: Required[str]
    reference: Required[str]
    error: Required[float]
    cosine: Required[float]
    variance: Required[float]
    divergence_error: Required[Values | None]
    divergence_gradient_of: Required[str | None]


class Certificate(TypedDict, total=False):
    """certificate.json: how an objective's gradient compares with the exact one."""

    claim: Required[Literal["always", "on_policy", "never"]]
    claimed: Required[str]
    holds: Required[bool]
    tolerance: Required[float]
    num_cases: Required[int]
    turns: Literal["one", "outcome", "turn"]
    findings: Required[Annotated[list[Finding], _has_both_policies, "findings on and off policy"]]
    not_covered: Values


class Certificates(TypedDict, total=False):
    """Certificates of an objective that schedules change: one for each step at which they do."""

    steps: Required[dict[str, Certificate]]


class ListedFile(TypedDict, total=False):
    """One file in a manifest."""

    sha256: Required[str]
    bytes: int


class Manifest(TypedDict, total=False):
    """manifest.json and train.json: a stage's result, and its files."""

    stage: str
    fingerprint: Fingerprint
    identity: Values
    files: dict[str, ListedFile | str]
    created_at: Moment
    versions: dict[str, Any]
    weights: dict[str, str]
    steps: int


class ListedVersion(TypedDict, total=False):
    """One version in experiment.json."""

    version: Required[int]
    recipes: Required[list[str]]
    runs: Required[list[Name]]


class ExperimentDocument(TypedDict, total=False):
    """experiment.json: an experiment's runs."""

    name: Name
    question: str
    runs: list[Name]
    current: list[Name]
    labels: dict[str, str]
    versions: list[ListedVersion]
    last_version: int
    fingerprint: str
    created_at: Moment
    updated_at: Moment


class ExportedExperiment(TypedDict, total=False):
    """The run's experiment in export.json."""

    name: Required[PortableName]
    question: str
    created_at: Moment
    fingerprint: str
    recipes: list[str]
    runs: list[PortableName]
    labels: dict[str, str]


class Export(TypedDict, total=False):
    """export.json: a run in a directory of its own."""

    format: Required[int]
    run_id: Required[PortableName]
    experiment: Required[ExportedExperiment]
    files: Required[dict[str, ListedFile | str]]


class Unit(TypedDict, total=False):
    """One run of an arm in study.json."""

    run_id: Name | None
    seed: int | None


class Arm(TypedDict, total=False):
    """One arm in study.json."""

    units: Required[list[Unit]]


class Confirmation(TypedDict, total=False):
    """The confirmation of a study's answer."""

    arms: list[Arm]


class Rung(TypedDict, total=False):
    """How a trial stood at a rung."""

    value: Required[float]
    low: float | None
    high: float | None


class Trial(TypedDict, total=False):
    """One trial in study.json."""

    number: Required[int]
    state: str
    run_ids: list[Name] | None
    run_id: Name | None
    params: Values
    baseline: bool | None
    value: float | None
    values: list[float] | None
    value_low: float | None
    value_high: float | None
    rung: int | None
    rungs: dict[str, Rung] | None
    constraints: dict[str, float | None] | None
    reason: str | None
    parent: int | None
    parent_step: int | None
    tokens: float | None
    gpu_hours: float | None
    seconds: float | None
    attempts: int | None


class StudyDocument(TypedDict, total=False):
    """study.json: a study's trials and what confirmed them."""

    name: Name
    question: str | None
    experiment: str
    goal: str
    goals: list[Values] | None
    constraints: list[Values] | None
    sampler: str | None
    pruner: Values | None
    trials_wanted: int | None
    seeds: list[int] | None
    confidence: float | None
    status: str | None
    parameters: dict[str, Values] | None
    overrides: Values | None
    outside: Values | None
    spent: dict[str, float] | None
    trials: list[Trial]
    confirmation: Confirmation | None


class Recorded(TypedDict, total=False):
    """Which rows an attempt was told to record."""

    tokens: str
    rollouts: str
    sampled_share: float


class Attempt(TypedDict, total=False):
    """attempts/NUMBER.json: one start of the trainer."""

    attempt: int
    resumed_from_step: int
    started_at: Moment
    lease: int | None
    code: Values | None
    machine: Values | None
    environment: Values | None
    packages: list[str] | None
    lock: str
    record: Recorded


class LeaseDocument(TypedDict, total=False):
    """leases/NUMBER.json: who holds a run."""

    number: int
    host: str
    pid: int
    pid_started: str
    worker: str
    since: str
    beat: int
    at: str
    released: bool
    pid_namespace: str
    settles: bool
    place: str
    is_copied: bool


class Origins(TypedDict, total=False):
    """provenance.json: where the values of a run's spec come from: path, kind, file and line."""

    origins: list[tuple[list[str | int], str, str | None, int | None]]


class Freed(TypedDict, total=False):
    """A table in freed.json."""

    freed_at: Required[str]
    keep_days: Required[float]


SHAPES: dict[str, Any] = {
    "run.json": RunDocument,
    "state.json": State,
    "progress.json": Progress,
    "plan.json": Plan,
    "certificate.json": Certificate,
    "train.json": Manifest,
    "data.json": Manifest,
    "base.json": Manifest,
    "manifest.json": Manifest,
    "experiment.json": ExperimentDocument,
    "export.json": Export,
    "study.json": StudyDocument,
    "provenance.json": Origins,
    "freed.json": dict[str, Freed],
}
"""File -> what it may hold."""
NUMBERED: dict[str, Any] = {"attempts": Attempt, "leases": LeaseDocument}
"""Directory -> what its files may hold."""
WHOLE = (Manifest, Export)
"""Documents of which a part says nothing: a list of files that lacks one would call a result whole that is not."""
