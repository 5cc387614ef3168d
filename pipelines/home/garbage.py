"""Garbage for `rpg gc`: artifacts, the published results that several runs share, once no run uses them any more,
token rows and checkpoints of runs that are to keep them for some days only, and verdicts that were not said for long.
"""

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
"""Days for which a judge's verdict is kept after it was said last, to any run."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The published result of a data or base stage."""

    stage: str
    path: Path
    num_bytes: int


def unreferenced(home: Home) -> list[Artifact]:
    """Artifacts that no run's documents name."""
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
            # Renamed first: a directory that is removed in part must not look whole.
            aside = artifact.path.with_name(f".{artifact.path.name}.removed")
            artifact.path.rename(aside)
            shutil.rmtree(aside)
            removed.append(artifact)
    return removed, [artifact for artifact in artifacts if artifact not in removed]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The token rows of a run, whose time is over."""

    run: Path
    """The run's directory."""
    keep_days: float
    """The run's `record.keep_days`."""
    num_bytes: int

    @property
    def path(self) -> Path:
        """Path of the rows."""
        return self.run / "segments" / "tokens"


def expired_tokens(home: Home) -> list[TokenRows]:
    """Token rows of runs that ended more than their `record.keep_days` ago."""
    runs = (_expired(run) for run in sorted(home.root.glob("runs/*")))
    return [rows for rows in runs if rows]


def free_tokens(home: Home, expired: list[TokenRows]) -> list[TokenRows]:
    """Deletes token rows. Returns those of runs that have not been begun again meanwhile.

    What is freed is written down first: a process that is killed here leaves a record that says why rows are missing.
    """
    freed = []
    with home.locked("ingest", waiting=lambda: None):  # neither indexed nor compacted meanwhile
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
    """The checkpoints of a finished run, whose time is over."""

    path: Path
    """The directory that they lie in."""
    num_bytes: int


def expired_checkpoints(home: Home) -> list[SavedStates]:
    """Checkpoints of runs that finished more than their `training.checkpoint.keep_days` ago."""
    runs = [run for run in sorted(home.root.glob("runs/*")) if _has_expired_checkpoints(run)]
    return [SavedStates(run / "checkpoints", size_of(run / "checkpoints")) for run in runs]


def free_checkpoints(expired: list[SavedStates]) -> list[SavedStates]:
    """Deletes checkpoints. Returns those of runs that have not been begun again meanwhile."""
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
    """Replies of judges that nobody has asked for in a long time."""

    path: Path
    """The directory that they lie in."""
    files: tuple[Path, ...]
    num_bytes: int


def old_verdicts(home: Home) -> Verdicts | None:
    """Verdicts that were said last more than `VERDICT_DAYS` ago; None: there are none."""
    files = tuple(file for file in sorted(home.verdicts.glob("*/*.json")) if _is_old(file))
    return Verdicts(home.verdicts, files, sum(map(_length, files))) if files else None


def free_verdicts(old: Verdicts) -> Verdicts:
    """Deletes verdicts. Returns those that have not been said again meanwhile."""
    freed = tuple(file for file in old.files if _is_old(file))
    num_bytes = sum(map(_length, freed))
    for file in freed:
        file.unlink(missing_ok=True)
    return Verdicts(old.path, freed, num_bytes)


def _is_old(file: Path) -> bool:
    """Whether a verdict was said long ago: its time of change is renewed whenever it is."""
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
    """Yields the runs whose specs cannot be read, each with the reason. What they have is kept."""
    for run in sorted(home.root.glob("runs/*")):
        if (run / "run.json").is_file() and (why := unreadable(run)):
            yield f"{run.name}: its spec cannot be read, so its rows and checkpoints are kept: {'; '.join(why)}"


def _spec(run: Path) -> Experiment | None:
    """A run's spec; None where it cannot be read: what the run has is then kept."""
    with contextlib.suppress(SpecError):
        return recorded_spec(run)
    return None


def _is_over(run: Path, keep_days: float, statuses: Collection[str]) -> bool:
    """Whether a run ended so, and longer ago. `keep_days`: 0 is no limit."""
    state = read_json(run / "state.json")
    if not keep_days or state.get("status") not in statuses or not state.get("ended_at"):
        return False
    return datetime.fromisoformat(state["ended_at"]) + timedelta(days=keep_days) <= datetime.now(UTC)


class _InUseError(Exception):
    """A process is making the artifact again, or a run names it by now."""


def _keep() -> None:
    raise _InUseError


def _used_names(home: Home) -> set[str]:
    """Names of the artifacts that runs use, and of those whose files they link to: a model measured as it is may be
    another run's base model."""
    names = set(_names_in_documents(home))
    used = (file for name in names for file in home.root.glob(f"artifacts/base/{name}/*") if file.is_symlink())
    return names | {file.readlink().parent.name for file in used}


def _names_in_documents(home: Home) -> Iterator[str]:
    """Names of the directories of all artifacts that some run's documents name."""
    for run in home.root.glob("runs/*"):
        for fingerprint in read_json(run / "run.json").get("fingerprints", {}).values():
            yield str(fingerprint)[:16]
        for name in ("plan.json", "state.json"):
            for stage in (read_json(run / name).get("stages") or {}).values():
                yield str(stage.get("fingerprint", ""))[:16]
        inputs = read_json(run / "inputs.json")
        yield from (Path(str(inputs[name])).name for name in ("data", "base") if name in inputs)


def size_of(path: Path) -> int:
    """Bytes of all files below a directory; what is deleted meanwhile has none.

    A file of several names (hard links, as of training that one run takes from another) counts in equal parts at each.
    """
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            status = file.lstat()
            size += status.st_size // status.st_nlink if file.is_file() else 0
    return size
