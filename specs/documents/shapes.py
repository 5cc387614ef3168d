"""Shapes of a record's JSON documents. Keys that are not named here may have any value, and null counts as missing."""

from datetime import datetime
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, FailFast, Field, Strict
from typing_extensions import TypedDict

from specs.documents.names import PORTABLE


def _named(text: str) -> str:
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise ValueError("a name")
    return text


def _zoned(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time with its zone")
    return text


def _of_both_policies(findings: "list[Finding]") -> "list[Finding]":
    on_and_off = {finding["policy"] for finding in findings if finding["reference"] == "apart"}
    if not on_and_off >= {"on_policy", "off_policy"}:
        raise ValueError("findings for both the on-policy and the off-policy case")
    return findings


Text = Annotated[str, Strict()]
Truth = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
"""A whole number that fits into a column."""
Number = Annotated[float, Strict()]
Name = Annotated[Text, AfterValidator(_named)]
PortableName = Annotated[Text, Field(pattern=f"^{PORTABLE}$")]
Fingerprint = Annotated[Text, Field(pattern=f"^({PORTABLE})?$")]
Moment = Annotated[Text, AfterValidator(_zoned)]
Values = dict[str, Any]


class RunDocument(TypedDict, total=False):
    """run.json: the identity of a run."""

    run_id: Name
    experiment: Text
    name: Text
    kind: Text
    seed: Whole
    values: Values
    question: Text
    created_at: Moment
    fingerprints: dict[str, Fingerprint]
    objective: Text | Values | None
    """A text; the first versions wrote the objective itself."""


class Stage(TypedDict, total=False):
    """One stage in state.json."""

    fingerprint: Fingerprint
    status: Text
    cached: Truth
    started_at: Moment | None
    ended_at: Moment | None
    reason: Text | None
    output: Text | None
    cause: Text | None


class State(TypedDict, total=False):
    """state.json: the status of a run."""

    status: Text
    started_at: Moment | None
    ended_at: Moment | None
    reason: Text
    cause: Text | None
    pid: Whole | None
    pid_started: Text | None
    host: Text | None
    flow_run_id: Text | None
    api_url: Text | None
    evaluation: Fingerprint | None
    stages: dict[str, Stage]


class Progress(TypedDict, total=False):
    """progress.json: the trainer's progress."""

    step: Whole | None
    steps: Whole | None
    phase: Text | None


class PlannedStage(TypedDict, total=False):
    """One stage in plan.json."""

    fingerprint: Fingerprint
    identity: Values
    inputs: dict[str, Text]
    code: dict[str, Text]
    results: Whole


class Plan(TypedDict, total=False):
    """plan.json: the inputs of a run's stages."""

    stages: dict[str, PlannedStage]


class Finding(TypedDict, total=False):
    """One situation of a certificate."""

    policy: Required[Text]
    reference: Required[Text]
    error: Required[Number]
    cosine: Required[Number]
    variance: Required[Number]
    divergence_error: Required[Values | None]
    divergence_gradient_of: Required[Text | None]


class Certificate(TypedDict, total=False):
    """certificate.json: the comparison of an objective's gradient with the exact one."""

    claim: Required[Literal["always", "on_policy", "never"]]
    claimed: Required[Text]
    holds: Required[Truth]
    tolerance: Required[Number]
    num_cases: Required[Whole]
    turns: Literal["one", "outcome", "turn"]
    findings: Required[Annotated[list[Finding], AfterValidator(_of_both_policies)]]
    not_covered: Values
    closed_loops: dict[str, Number]


class Certificates(TypedDict, total=False):
    """Certificates of an objective with schedules: one for each step at which these change it."""

    steps: Required[dict[str, Certificate]]


class ListedFile(TypedDict, total=False):
    """One file in a manifest."""

    sha256: Required[Text]
    bytes: Whole


class Manifest(TypedDict, total=False):
    """manifest.json and train.json: a stage's result, and its files."""

    stage: Text
    fingerprint: Fingerprint
    identity: Values
    files: dict[str, ListedFile | Text]
    created_at: Moment
    versions: dict[str, Any]
    weights: dict[str, Text]
    steps: Whole


class ListedVersion(TypedDict, total=False):
    """One version in experiment.json."""

    version: Required[Whole]
    recipes: Required[list[Text]]
    runs: Required[list[Name]]


class ExperimentDocument(TypedDict, total=False):
    """experiment.json: an experiment's runs."""

    name: Name
    question: Text
    runs: list[Name]
    current: list[Name]
    labels: dict[str, Text]
    versions: list[ListedVersion]
    last_version: Whole
    fingerprint: Text
    created_at: Moment
    updated_at: Moment


class ExportedExperiment(TypedDict, total=False):
    """The run's experiment in export.json."""

    name: Required[PortableName]
    question: Text
    created_at: Moment
    fingerprint: Text
    recipes: list[Text]
    runs: list[PortableName]
    labels: dict[str, Text]


class Export(TypedDict, total=False):
    """export.json: an exported run in its own directory."""

    format: Required[Whole]
    run_id: Required[PortableName]
    experiment: Required[ExportedExperiment]
    files: Required[dict[str, ListedFile | Text]]


class Unit(TypedDict, total=False):
    """One run of an arm in study.json."""

    run_id: Name | None
    seed: Whole | None


class Arm(TypedDict, total=False):
    """One arm in study.json."""

    units: Required[list[Unit]]


class Confirmation(TypedDict, total=False):
    """The confirmation of a study's answer."""

    arms: list[Arm]


class Rung(TypedDict, total=False):
    """A trial's value at a rung."""

    value: Required[Number]
    low: Number | None
    high: Number | None


class Trial(TypedDict, total=False):
    """One trial in study.json."""

    number: Required[Whole]
    state: Text
    run_ids: list[Name] | None
    run_id: Name | None
    params: Values
    baseline: Truth | None
    value: Number | None
    values: list[Number] | None
    value_low: Number | None
    value_high: Number | None
    rung: Whole | None
    rungs: dict[str, Rung] | None
    constraints: dict[str, Number | None] | None
    reason: Text | None
    tokens: Number | None
    gpu_hours: Number | None
    seconds: Number | None
    attempts: Whole | None


class StudyDocument(TypedDict, total=False):
    """study.json: a study's trials and their confirmation."""

    name: Name
    question: Text | None
    experiment: Text
    goal: Text
    goals: list[Values] | None
    constraints: list[Values] | None
    sampler: Text | None
    pruner: Values | None
    trials_wanted: Whole | None
    seeds: list[Whole] | None
    confidence: Number | None
    status: Text | None
    parameters: dict[str, Values] | None
    overrides: Values | None
    outside: Values | None
    spent: dict[str, Number] | None
    trials: list[Trial]
    confirmation: Confirmation | None


class Recorded(TypedDict, total=False):
    """The kinds of rows that an attempt records."""

    tokens: Text
    rollouts: Text
    sampled_share: Number


class Attempt(TypedDict, total=False):
    """attempts/NUMBER.json: one start of the trainer."""

    attempt: Whole
    resumed_from_step: Whole
    started_at: Moment
    lease: Whole | None
    code: Values | None
    machine: Values | None
    environment: Values | None
    packages: list[Text] | None
    lock: Text
    record: Recorded


class LeaseDocument(TypedDict, total=False):
    """leases/NUMBER.json: the holder of a run."""

    number: Whole
    host: Text
    pid: Whole
    pid_started: Text
    worker: Text
    since: Text
    beat: Whole
    at: Text
    released: Truth
    pid_namespace: Text
    settles: Truth
    place: Text
    is_copied: Truth


class Origins(TypedDict, total=False):
    """provenance.json: the origin of each value of a run's spec: path, kind, file and line."""

    origins: list[Annotated[tuple[list[Text | Whole], Text, Text | None, Whole | None], FailFast()]]


class Freed(TypedDict, total=False):
    """A table in freed.json."""

    freed_at: Required[Text]
    keep_days: Required[Number]


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
"""File -> its shape."""
NUMBERED: dict[str, Any] = {"attempts": Attempt, "leases": LeaseDocument}
"""Directory -> the shape of its files."""
WHOLE = (Manifest, Export)
"""Documents that are not used in part: a list of files without one of them would make an incomplete result look
complete."""
