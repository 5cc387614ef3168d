"""A study on disk: Optuna's journal, which is the truth, and study.json, made from it for others to read."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from pipelines.home import Home
from pipelines.studies import space
from rpg.files import now, read_json, write_json
from specs.errors import Issue, RpgError, SpecError
from specs.schema.study import Study
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    import optuna

_STATES = {"RUNNING": "running", "WAITING": "pending", "COMPLETE": "finished", "FAIL": "failed", "PRUNED": "failed"}


class StudyBusyError(RpgError):
    """Another process runs this study."""


@contextlib.contextmanager
def held(home: Home, name: str) -> Iterator[None]:
    """Holds a study: one process at a time. Raises StudyBusyError."""
    owner = home.study(name) / "owner.json"

    def refuse() -> None:
        since = read_json(owner)
        raise StudyBusyError(
            f"study {name} is being run by process {since.get('pid', '?')} since {since.get('started_at', '?')}"
        )

    with home.locked(f"study-{name}", waiting=refuse):
        try:
            write_json(owner, {"pid": os.getpid(), "started_at": now()})
            yield
        finally:
            owner.unlink(missing_ok=True)


def open_study(home: Home, document: StudyDocument) -> "optuna.Study":
    """The stored study, made where there is none. The caller holds it.

    Raises:
        SpecError: the stored one has another search space, goal or experiment.
    """
    study = document.study
    stored = load_study(home, study.name, direction=study.targets[0].direction)
    about = {
        "parameters": space.plain(study.parameters),
        "goal": study.targets[0].model_dump(mode="json"),
        "experiment": experiment_digest(document),
    }
    before = stored.user_attrs
    if not before:
        stored.set_user_attr("created_at", now())
    elif issues := _changes(before, about, study):
        raise SpecError(*(document.locate(issue) for issue in issues))
    for key, value in about.items():
        if before.get(key) != value:
            stored.set_user_attr(key, value)
    return stored


def load_study(home: Home, name: str, direction: Literal["maximize", "minimize"] = "maximize") -> "optuna.Study":
    """Opens the journal of a study, made where there is none."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = home.study(name) / "journal.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(home, name)
    # Optuna's own lock is a link that outlives a killed process; the kernel takes this one back.
    lock: Any = _KernelLock(f"{path}.lock")
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    return optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)


def write_record(home: Home, study: Study, stored: "optuna.Study") -> dict[str, Any]:
    """Writes study.json, from which the tables `studies` and `trials` come, and returns it."""
    goal = study.targets[0]
    record = {
        "name": study.name,
        "question": study.question,
        "experiment": study.experiment,
        "goal": f"{goal.direction} {goal.metric} on {goal.dataset}",
        "direction": goal.direction,
        "sampler": study.sampler.type,
        "trials_wanted": study.trials,
        "parameters": space.plain(study.parameters),
        "overrides": study.overrides,
        "created_at": stored.user_attrs.get("created_at"),
        "updated_at": now(),
        "trials": [_trial(trial, study) for trial in stored.get_trials(deepcopy=False)],
    }
    write_json(home.study(study.name) / "study.json", record)
    return record


def experiment_digest(document: StudyDocument) -> str:
    """Of all that makes a trial's result, the searched fields left out: only trials of one experiment compare."""
    identity = document.experiment.experiment.identity()
    for name in ("name", "question"):
        identity.pop(name, None)
    for path in document.study.parameters:
        *parents, last = path.split(".")
        node: Any = identity
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _changes(before: Mapping[str, Any], about: Mapping[str, Any], study: Study) -> list[Issue]:
    issues = space.changes(before["parameters"], study.parameters)
    hint = f"trials judged otherwise do not compare: give the study another name than {study.name!r}"
    if before["goal"] != about["goal"]:
        given, allowed = (json.dumps(side["goal"]) for side in (about, before))
        issues.append(Issue("differs from the stored study", ("goal",), given=given, allowed=allowed, hint=hint))
    if before["experiment"] != about["experiment"]:
        issues.append(Issue("is not the experiment of the stored study any more", ("experiment",), hint=hint))
    return issues


def _trial(trial: "optuna.trial.FrozenTrial", study: Study) -> dict[str, Any]:
    known = trial.user_attrs
    return {
        "number": trial.number,
        "state": _STATES[trial.state.name],
        "run_ids": known.get("run_ids", []),
        "run_id": next(iter(known.get("run_ids", [])), None),
        "value": trial.value if trial.state.name == "COMPLETE" else None,
        "value_low": known.get("value_low"),
        "value_high": known.get("value_high"),
        "baseline": known.get("baseline", False),
        "params": {path: space.restored(value, study.parameters[path]) for path, value in trial.params.items()},
        "reason": known.get("reason", ""),
        # Optuna's own times are local and do not say so.
        "started_at": known.get("started_at"),
        "ended_at": known.get("ended_at"),
    }


def _drop_torn_line(home: Home, name: str) -> None:
    """A process killed while writing may leave half a line, and Optuna cannot read what follows one."""
    path = home.study(name) / "journal.log"
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class _KernelLock:
    """Optuna's lock interface over a lock that the kernel releases when its holder dies."""

    def __init__(self, path: str) -> None:
        self._lock = FileLock(path)

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()
