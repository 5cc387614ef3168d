"""Data that `rpg gc` deletes: artifacts (published results that runs share) that no run uses any more, token rows and
checkpoints older than their run's `keep_days`, and judges' verdicts that no run has used for long."""

import contextlib
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipelines.home.home import Home
from specs.errors import SpecError
from specs.machine.files import now, read_json, write_json
from specs.reading.recorded import recorded_spec, unreadable
from specs.schema.experiment import Experiment
from storage import Store
from storage.catalogue import FREED

_ENDED = ("finished", "failed", "cancelled")
VERDICT_DAYS = 90
"""Days for which a judge's verdict is kept after its last use by any run."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The published result of a data or base stage."""

    stage: str
    path: Path
    num_bytes: int


def unreferenced(home: Home) -> list[Artifact]:
    """Returns the artifacts that no run's documents name."""
    used = _used_names(home)
    directories = (path for path in sorted(home.root.glob("artifacts/*/*")) if not path.name.startswith("."))
    return [Artifact(path.parent.name, path, size_of(path)) for path in directories if path.name not in used]


def remove(home: Home, artifacts: list[Artifact]) -> tuple[list[Artifact], list[Artifact]]:
    """Removes artifacts. Returns those that were removed, and those that have come into use meanwhile."""
    removed = []
    for artifact in artifacts:
        lock = home.locked(f"{artifact.stage}-{artifact.path.name}", waiting=_keep)
        with contextlib.suppress(_InUseError), lock:
            if artifact.path.name in _used_names(home):
                raise _InUseError
            # Renamed first: a partly removed directory must not look whole.
            aside = artifact.path.with_name(f".{artifact.path.name}.removed")
            artifact.path.rename(aside)
            shutil.rmtree(aside)
            removed.append(artifact)
    return removed, [artifact for artifact in artifacts if artifact not in removed]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The expired token rows of a run."""

    run: Path
    """The run's directory."""
    keep_days: float
    """The run's `record.keep_days`."""
    num_bytes: int

    @property
    def path(self) -> Path:
        """Returns the path of the rows."""
        return self.run / "segments" / "tokens"


def expired_tokens(home: Home) -> list[TokenRows]:
    """Returns the token rows of runs that ended more than their `record.keep_days` ago."""
    runs = (_expired(run) for run in sorted(home.root.glob("runs/*")))
    return [rows for rows in runs if rows]


def free_tokens(home: Home, expired: list[TokenRows]) -> list[TokenRows]:
    """Deletes token rows. Returns those of runs that have not restarted meanwhile.

    The deletion is recorded first: if this process is killed, the record still says why rows are missing.
    """
    freed = []
    with home.locked("ingest", waiting=lambda: None):  # no indexing and no compaction meanwhile
        for rows in expired:
            if _expired(rows.run):
                write_json(rows.run / FREED, {"tokens": {"freed_at": now(), "keep_days": rows.keep_days}})
                for segment in rows.path.glob("*.parquet"):
                    segment.unlink()
                freed.append(rows)
    if freed:
        with Store.open(home.root) as store:
            store.ingest()
    return freed


def _expired(run: Path) -> TokenRows | None:
    spec = _spec(run)
    if spec is None or not _is_over(run, keep_days := spec.record.keep_days, _ENDED):
        return None
    num_bytes = size_of(run / "segments" / "tokens")
    return TokenRows(run, keep_days, num_bytes) if num_bytes else None


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The expired checkpoints of a finished run."""

    path: Path
    """Their directory."""
    num_bytes: int


def expired_checkpoints(home: Home) -> list[SavedStates]:
    """Returns the checkpoints of runs that finished more than their `training.checkpoint.keep_days` ago."""
    runs = [run for run in sorted(home.root.glob("runs/*")) if _has_expired_checkpoints(run)]
    return [SavedStates(run / "checkpoints", size_of(run / "checkpoints")) for run in runs]


def free_checkpoints(expired: list[SavedStates]) -> list[SavedStates]:
    """Deletes checkpoints. Returns those of runs that have not restarted meanwhile."""
    freed = [states for states in expired if _has_expired_checkpoints(states.path.parent)]
    for states in freed:
        aside = states.path.with_name(".checkpoints.removed")
        shutil.rmtree(aside, ignore_errors=True)
        states.path.rename(aside)
        shutil.rmtree(aside)
    return freed


def _has_expired_checkpoints(run: Path) -> bool:
    spec = _spec(run)
    if spec is None or not any(run.glob("checkpoints/step-*")):
        return False
    return _is_over(run, spec.training.checkpoint.keep_days, ("finished",))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Judges' replies that no run has requested for `VERDICT_DAYS`."""

    path: Path
    """Their directory."""
    files: tuple[Path, ...]
    num_bytes: int


def old_verdicts(home: Home) -> Verdicts | None:
    """Returns the verdicts that were last used more than `VERDICT_DAYS` ago. None if there are no such verdicts."""
    files = tuple(file for file in sorted(home.verdicts.glob("*/*.json")) if _is_old(file))
    return Verdicts(home.verdicts, files, sum(map(_length, files))) if files else None


def free_verdicts(old: Verdicts) -> Verdicts:
    """Deletes verdicts. Returns those that have not been used again meanwhile."""
    freed = tuple(file for file in old.files if _is_old(file))
    num_bytes = sum(map(_length, freed))
    for file in freed:
        file.unlink(missing_ok=True)
    return Verdicts(old.path, freed, num_bytes)


def _is_old(file: Path) -> bool:
    """Returns whether a verdict was last used long ago: each use renews its modification time."""
    try:
        said = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    except OSError:  # deleted meanwhile
        return False
    return said + timedelta(days=VERDICT_DAYS) <= datetime.now(UTC)


def _length(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def unreadable_specs(home: Home) -> Iterator[str]:
    """Yields the runs whose specs cannot be read, each with the reason. Their artifacts and rows are kept."""
    for run in sorted(home.root.glob("runs/*")):
        if (run / "run.json").is_file() and (why := unreadable(run)):
            yield f"{run.name}: its spec cannot be read, so its rows and checkpoints are kept: {'; '.join(why)}"


def _spec(run: Path) -> Experiment | None:
    """Returns a run's spec. None if it cannot be read: the run's files are then kept."""
    with contextlib.suppress(SpecError):
        return recorded_spec(run)
    return None


def _is_over(run: Path, keep_days: float, statuses: Collection[str]) -> bool:
    """Returns whether a run ended with one of the statuses more than `keep_days` ago. False if `keep_days` is 0."""
    state = read_json(run / "state.json")
    if not keep_days or state.get("status") not in statuses or not state.get("ended_at"):
        return False
    return datetime.fromisoformat(state["ended_at"]) + timedelta(days=keep_days) <= datetime.now(UTC)


class _InUseError(Exception):
    """Error for an artifact that a process is making again, or that a run has begun to use."""


def _keep() -> None:
    raise _InUseError


def _used_names(home: Home) -> set[str]:
    """Returns the names of the artifacts that runs use, and of the artifacts that their files link to: an evaluated
    model may be another run's base model."""
    names = set(_names_in_documents(home))
    used = (file for name in names for file in home.root.glob(f"artifacts/base/{name}/*") if file.is_symlink())
    return names | {file.readlink().parent.name for file in used}


def _names_in_documents(home: Home) -> Iterator[str]:
    """Yields the directory names of all artifacts that the documents of runs refer to."""
    for run in home.root.glob("runs/*"):
        for fingerprint in read_json(run / "run.json").get("fingerprints", {}).values():
            yield str(fingerprint)[:16]
        for name in ("plan.json", "state.json"):
            for stage in (read_json(run / name).get("stages") or {}).values():
                yield str(stage.get("fingerprint", ""))[:16]
        inputs = read_json(run / "inputs.json")
        yield from (Path(str(inputs[name])).name for name in ("data", "base") if name in inputs)


def size_of(path: Path) -> int:
    """Returns the bytes of all files below a directory. Files deleted meanwhile count as 0.

    A file with several names (hard links, for example of training that one run takes from another) counts in equal
    parts at each.
    """
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            status = file.lstat()
            size += status.st_size // status.st_nlink if file.is_file() else 0
    return size
