"""The JSON documents of a record: what each may hold, and the one way to read them.

A document may be damaged, of another version, or made by somebody else. Whoever reads one gets what has the shape that
is told here and never learns of the rest, so that nothing behind the reading has to doubt types. What a document has
beside the keys told here is handed on as it is.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Required, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,254}")
_LARGEST = 2**63
"""Whole numbers of that size fit into no column."""
_MISFIT = object()


def is_portable_name(text: str) -> bool:
    """Whether a text can be the name of a file or a run in any home: no separator, no glob sign, no leading dot."""
    return bool(_NAME.fullmatch(text))


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
    objective: str | None


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


class Plan(TypedDict, total=False):
    """plan.json: what a run's stages are made from."""

    stages: dict[str, PlannedStage]


class Data(TypedDict, total=False):
    """The section `data` of a spec."""

    train: list[Values]
    evaluation: list[Values]


class KeptCheckpoints(TypedDict, total=False):
    """The section `training.checkpoint` of a spec."""

    keep_days: float
    keep_best: Values | None


class Training(TypedDict, total=False):
    """The section `training` of a spec."""

    steps: int
    checkpoint: KeptCheckpoints


class Model(TypedDict, total=False):
    """The section `model` of a spec."""

    path: str
    source: str


class Evaluation(TypedDict, total=False):
    """The section `evaluation` of a spec."""

    confidence: float
    seed: int


class RecordSection(TypedDict, total=False):
    """The section `record` of a spec."""

    keep_days: float


class SpecDocument(TypedDict, total=False):
    """spec.json of a run, its resolved spec; of an experiment, the frozen document with the spec as `experiment`."""

    kind: str
    name: str
    model: Model
    data: Data
    training: Training
    evaluation: Evaluation
    record: RecordSection
    warm_up: Values | None
    experiment: Values


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
    findings: Required[Annotated[list[Finding], _has_both_policies, "findings on and off policy"]]


class Certificates(TypedDict, total=False):
    """The same of an objective that schedules change: a certificate for each step at which it does."""

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


class Unit(TypedDict, total=False):
    """One run of an arm in study.json."""

    run_id: Name | None
    seed: int | None


class Arm(TypedDict, total=False):
    """One arm in study.json."""

    units: Required[list[Unit]]


class Confirmation(TypedDict, total=False):
    """What a study confirms its answer by."""

    arms: list[Arm]


class Trial(TypedDict, total=False):
    """One trial in study.json."""

    number: Required[int]
    run_ids: list[Name] | None
    run_id: Name | None
    params: Values
    baseline: bool | None


class StudyDocument(TypedDict, total=False):
    """study.json: a study's trials and what confirmed them."""

    name: Name
    question: str
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


class Origins(TypedDict, total=False):
    """provenance.json: where the values of a run's spec come from: path, kind, file and line."""

    origins: list[tuple[list[str | int], str, str | None, int | None]]


class Freed(TypedDict, total=False):
    """A table in freed.json."""

    freed_at: Required[Moment]
    keep_days: Required[float]


_SHAPES: dict[str, Any] = {
    "run.json": RunDocument,
    "state.json": State,
    "progress.json": Progress,
    "plan.json": Plan,
    "spec.json": SpecDocument,
    "certificate.json": Certificate,
    "train.json": Manifest,
    "data.json": Manifest,
    "base.json": Manifest,
    "manifest.json": Manifest,
    "experiment.json": ExperimentDocument,
    "study.json": StudyDocument,
    "provenance.json": Origins,
    "freed.json": dict[str, Freed],
}
"""File -> what it may hold."""
_NUMBERED: dict[str, Any] = {"attempts": Attempt, "leases": LeaseDocument}
"""Directory -> what its files may hold."""
_WHOLE = (Manifest,)
"""Documents of which a part says nothing: a list of files that lacks one would call a result whole that is not."""


def read_document(path: Path) -> dict[str, Any]:
    """What the object in a file has of the shape of its documents; {} where the file is missing or holds no object."""
    return read_checked(path)[0]


def read_checked(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The same, and what of the file had to be passed over: `stages: a list; expected an object`.

    A file that is not there has nothing wrong.
    """
    try:
        text = _text(path)
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character, as "\ud800", fits into no column
    except (FileNotFoundError, NotADirectoryError):
        return {}, []
    except (OSError, ValueError, RecursionError):
        return {}, ["no JSON object"]
    if not isinstance(value, dict):
        return {}, ["no JSON object"]
    shape = shape_of(path, value)
    problems: list[str] = []
    fitted = value if shape is None else _fit(value, shape, "", problems)
    if fitted is _MISFIT or (problems and shape in _WHOLE):
        return {}, problems
    return fitted, problems


def _text(path: Path) -> str:
    """The content of a regular file; a named pipe would keep its reader waiting."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        return file.read()


def shape_of(path: Path, value: dict[str, Any]) -> Any:
    """What a document may hold, by its file's name; None: anything."""
    if path.name == "certificate.json" and "steps" in value:
        return Certificates
    return _SHAPES.get(path.name) or (_NUMBERED.get(path.parent.name) if path.stem.isdecimal() else None)


def _fit(value: Any, shape: Any, at: str, problems: list[str]) -> Any:
    """What of a value has the shape, or _MISFIT. `at`: the place in the document, for `problems`, which is added to."""
    if shape is Any:
        return value
    kind, arguments = get_origin(shape), get_args(shape)
    if kind is UnionType:
        return _fit_one(value, arguments, at, problems)
    if kind is Annotated:
        return _fit_tested(value, *arguments, at, problems)
    if kind is Literal:
        return value if value in arguments else _misfit(value, f"one of {', '.join(arguments)}", at, problems)
    if is_typeddict(shape):
        return _fit_object(value, shape, at, problems)
    if kind is dict and isinstance(value, dict):
        return _kept({key: _fit(item, arguments[1], f"{at}.{key}", problems) for key, item in value.items()})
    if kind is list and isinstance(value, list):
        items = [_fit(item, arguments[0], f"{at}[{index}]", problems) for index, item in enumerate(value)]
        return [item for item in items if item is not _MISFIT]
    if kind is tuple and isinstance(value, list) and len(value) == len(arguments):
        parts = [_fit(*part, at, problems) for part in zip(value, arguments, strict=True)]
        return _MISFIT if any(part is _MISFIT for part in parts) else parts
    if kind is None and _is_plain(value, shape):
        return value
    return _misfit(value, _called(kind or shape), at, problems)


def _fit_one(value: Any, shapes: tuple[Any, ...], at: str, problems: list[str]) -> Any:
    """What of a value has one of several shapes."""
    if value is None and NoneType in shapes:
        return None
    shapes = tuple(shape for shape in shapes if shape is not NoneType)
    for shape in shapes:
        found: list[str] = []
        fitted = _fit(value, shape, at, found)
        if not found or len(shapes) == 1:
            problems += found
            return fitted
    return _misfit(value, " or ".join(_called(get_origin(shape) or shape) for shape in shapes), at, problems)


def _fit_tested(
    value: Any, shape: Any, test: Callable[[Any], bool], wanted: str, at: str, problems: list[str]
) -> Any:
    """What of a value has the shape and passes the test."""
    fitted = _fit(value, shape, at, problems)
    return fitted if fitted is _MISFIT or test(fitted) else _misfit(value, wanted, at, problems)


def _fit_object(value: Any, shape: Any, at: str, problems: list[str]) -> Any:
    """What of a value has the shape of an object with these keys. Keys that are null count as missing."""
    if not isinstance(value, dict):
        return _misfit(value, "an object", at, problems)
    kept = dict(value)
    for key, inner in _keys(shape).items():
        if key in kept and (kept[key] is not None or _may_be_null(inner)):
            kept[key] = _fit(kept[key], inner, f"{at}.{key}" if at else key, problems)
        else:
            kept[key] = _MISFIT
    kept = _kept(kept)
    if missing := shape.__required_keys__ - kept.keys():
        said = f"{at}: " if at else ""
        problems.append(f"{said}without {', '.join(sorted(missing))}")
        return _MISFIT
    return kept


def _kept(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in items.items() if item is not _MISFIT}


@cache
def _keys(shape: Any) -> dict[str, Any]:
    """The shapes of an object's keys."""
    return {
        key: get_args(hint)[0] if get_origin(hint) is Required else hint
        for key, hint in get_type_hints(shape, include_extras=True).items()
    }


def _may_be_null(shape: Any) -> bool:
    return shape is Any or NoneType in get_args(shape)


def _is_plain(value: Any, shape: Any) -> bool:
    """Whether a value is a text, number or truth value as the shape says. A whole number is a number, and `true` none."""
    if isinstance(value, bool) or shape is bool:
        return isinstance(value, bool) and shape is bool
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return False
    return isinstance(value, (int, float) if shape is float else shape)


def _misfit(value: Any, wanted: str, at: str, problems: list[str]) -> Any:
    problems.append(f"{at}: {_called(type(value))}; expected {wanted}" if at else f"{_called(type(value))}; expected {wanted}")
    return _MISFIT


def _called(kind: Any) -> str:
    """A type in words."""
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    if is_typeddict(kind):
        return "an object"
    return names.get(kind) or {dict: "an object", list: "a list", tuple: "a list of its kind"}.get(kind, "another text")
