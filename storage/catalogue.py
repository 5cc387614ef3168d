"""The catalogue: the rows of the tables in catalogue.sql, read from the JSON documents of a home."""

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from specs.documents.reading import numbered, read_checked
from specs.machine.liveness import status_of
from specs.records import EVALUATION

Row = dict[str, Any]
Rows = dict[str, list[Row]]
TABLES = ("experiments", "runs", "stages", "attempts", "studies", "trials", "confirmations", "artifacts", "provenance")
FREED = "freed.json"
"""File in a run's directory that says which tables' rows were freed: table -> freed_at and keep_days."""


class Documents:
    """Reader of a home's documents, with a list of their unreadable parts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.problems: list[str] = []
        """Problems found, as lines that begin with the document's path in the home."""

    def read(self, path: Path) -> Row:
        """Returns the readable part of a document."""
        document, problems = read_checked(path)
        self.problems += [f"{path.relative_to(self._root).as_posix()}: {problem}" for problem in problems]
        return document


def read_unit(root: Path, unit: str, documents: Documents, read_segments: Callable[[str], None]) -> Rows:
    """Returns the rows from a unit's documents. Unreadable parts become NULL and never cause an error.

    Args:
        unit: path of its directory in the home: `runs/ID`, `artifacts/STAGE/FINGERPRINT`, ...
        read_segments: called with the id of a run between its state and its attempts, whose order matters.
    """
    directory, kind = root / unit, unit.partition("/")[0]
    rows: Rows
    match kind:
        case "runs":
            state = documents.read(directory / "state.json")
            run = _run(documents, directory, state)
            rows = {"runs": [run], "stages": _stages(directory.name, state, run["status"])}
            rows["artifacts"] = list(_artifacts_of_run(documents, root, directory))
            read_segments(directory.name)
            rows["attempts"] = read_attempts(documents, directory)
        case "experiments":
            path = directory / "experiment.json"
            rows = {"experiments": [_experiment(documents, path)] if path.is_file() else []}
        case "studies":
            path = directory / "study.json"
            rows = _study(documents.read(path) | {"name": directory.name}) if path.is_file() else {}
        case _:
            path = directory / "manifest.json"
            rows = {"artifacts": [_artifact(documents, root, path, run_id=None)] if path.is_file() else []}
    return {table: [row | {"unit": unit} for row in listed] for table, listed in rows.items()}


def read_attempts(documents: Documents, directory: Path) -> list[Row]:
    """Returns a run's rows of `attempts`: every start of its trainer, with the last step whose rows still count.

    A row counts if no attempt after the row's own resumed from an earlier step than the row's. If an attempt's lease
    has a lower number than an earlier attempt's lease, another worker had already taken over the run when the attempt
    began: none of its rows counts, and it supersedes no rows.
    """
    rows = []
    attempts = [_attempt(documents, path) for path in numbered(directory / "attempts")]
    highest = list(accumulate((attempt["lease"] for attempt in attempts), max))
    limit: int | None = None
    for attempt, lease in zip(reversed(attempts), reversed(highest), strict=True):
        fenced = 0 < attempt["lease"] < lease  # 0 means: started by hand, or by a batch job, which outlives a lease
        rows.append(attempt | {"run_id": directory.name, "valid_through": -1 if fenced else limit})
        if not fenced:
            resumed = attempt["resumed_from_step"]
            limit = resumed if limit is None else min(limit, resumed)
    return rows


def _run(documents: Documents, directory: Path, state: Row) -> Row:
    identity, progress = documents.read(directory / "run.json"), documents.read(directory / "progress.json")
    return {
        **{key: identity.get(key) for key in ("experiment", "name", "objective", "question", "created_at")},
        "seed": None if identity.get("kind") == EVALUATION else identity.get("seed"),
        **{key: state.get(key) for key in ("started_at", "ended_at", "reason", "cause", "flow_run_id", "evaluation")},
        "run_id": directory.name,
        "cell": identity.get("values"),
        "setting": _setting(documents.read(directory / "plan.json")),
        "status": status_of(directory, state),
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "path": f"runs/{directory.name}",
    }


def _setting(plan: Row) -> str | None:
    """Returns a digest of a run's training and evaluation inputs, without its seed; None for a run without a plan.

    Args:
        plan: the run's plan.json: the fields of each stage's fingerprint, and those of the stages that it reads.
    """
    stages = plan.get("stages") or {}
    try:
        if "train" not in stages:  # a model that was measured without training
            return str(stages["evaluate"]["fingerprint"][:16])
        train, evaluate = stages["train"], stages["evaluate"]
        trained = {path: value for path, value in train["identity"].items() if path.partition(".")[0] != "seeds"}
        made_from = [trained, train["inputs"], evaluate["identity"], evaluate["inputs"]["data"]]
        made_from += [[stage["results"], stage.get("code", {})] for stage in (train, evaluate)]
    except (KeyError, TypeError, AttributeError):
        return None
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def _stages(run_id: str, state: Row, run_status: str) -> list[Row]:
    rows = [stage | {"run_id": run_id, "stage": name} for name, stage in state.get("stages", {}).items()]
    for row in rows:
        if row.get("status") == "running" and run_status == "crashed":
            row["status"] = "crashed"
    return rows


def _experiment(documents: Documents, path: Path) -> Row:
    document = documents.read(path)
    return document | {"name": path.parent.name, "num_runs": len(document.get("runs", ()))}


def _study(study: Row) -> Rows:
    trials = study.get("trials", [])
    return {
        "studies": [study | {"num_trials": len(trials)}],
        "trials": [trial | {"study": study["name"]} for trial in trials],
        "confirmations": list(_confirmations(study)),
    }


def _confirmations(study: Row) -> Iterator[Row]:
    for arm in (study.get("confirmation") or {}).get("arms", ()):
        yield from (arm | unit | {"study": study["name"]} for unit in arm["units"])


def _attempt(documents: Documents, path: Path) -> Row:
    """Returns the row of one start. If its document cannot be read, the number comes from the file's name, and the
    start supersedes nothing."""
    document = documents.read(path)
    return {
        "attempt": int(path.stem),
        "resumed_from_step": document.get("resumed_from_step", 2**31 - 1),
        "started_at": document.get("started_at"),
        "lease": document.get("lease") or 0,
    }


def _artifacts_of_run(documents: Documents, root: Path, directory: Path) -> Iterator[Row]:
    for path in (directory / "train.json", *sorted(directory.glob("evaluate/*/manifest.json"))):
        if path.is_file():
            yield _artifact(documents, root, path, run_id=directory.name)


def _artifact(documents: Documents, root: Path, path: Path, run_id: str | None) -> Row:
    manifest = documents.read(path)
    files = manifest.get("files", {})
    sizes = [entry["bytes"] for entry in files.values() if isinstance(entry, dict) and "bytes" in entry]
    return {
        **{key: manifest.get(key) for key in ("stage", "fingerprint", "identity", "created_at")},
        "run_id": run_id,
        "path": path.parent.relative_to(root).as_posix(),
        "num_files": len(files),
        "num_bytes": sum(sizes) if len(sizes) == len(files) else None,
    }
