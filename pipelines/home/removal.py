"""Deletion of runs and experiments with all their records. Shared artifacts stay: `rpg gc` frees them."""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb

from pipelines.home.garbage import size_of
from pipelines.home.home import STORE, Home
from pipelines.home.runs import find_run, is_study, status_of, study_runs
from pipelines.home.state import RunState
from pipelines.home.state import run_ids as run_ids_in
from pipelines.home.versions import is_experiment, runs_of, split_name, versions_in
from specs.errors import RpgError, SpecError
from specs.machine.files import now, read_json, write_json
from specs.machine.lease import RunBusyError, acquire
from specs.machine.liveness import newest_lease
from specs.reading.recorded import recorded_spec
from storage import Store


@dataclass(frozen=True, slots=True)
class Removal:
    """The runs, and the experiment if any, that a name selects for deletion."""

    runs: tuple[str, ...]
    """Ids of the runs that are recorded here."""
    experiment: str = ""
    """Experiment whose record is deleted too. Empty if only runs are deleted."""
    num_bytes: int = 0
    needed_by: tuple[str, ...] = ()
    """Ids of the remaining runs whose base model is a deleted run's weights: evaluations of these weights, or trainings
    that began with them. Their own records stay."""


class NotRemovableError(RpgError):
    """Error for a run that cannot be deleted, because it is still in use or shared."""


def removal_of(home: Home, name: str) -> Removal:
    """Returns what `remove` would delete for a name. Deletes nothing.

    Args:
        name: a run; an experiment, all its versions; or NAME@VERSION, the runs that no other version has.
    Raises:
        NoSuchRunError, NoSuchVersionError: the name matches nothing.
        NotRemovableError: a run is executing, waits on a server, belongs to a study, or to a home that machines share;
            or every run of the version belongs to another version too.
    """
    experiment, version = split_name(name)
    if is_study(home, name):
        raise NotRemovableError(f"{name} is a study: its trials cannot be removed, because its answer needs them")
    if not is_experiment(home, name):
        runs = [find_run(home, name)]
    elif version:
        record = read_json(home.experiment(experiment) / "experiment.json")
        kept = {run_id for other in versions_in(record) if other.number != version for run_id in other.runs}
        runs = [run_id for run_id in runs_of(home, name) if run_id not in kept]
        if not runs:
            raise NotRemovableError(f"every run of {name} also belongs to another version; `rpg rm RUN` deletes one")
    else:
        runs = read_json(home.experiment(name) / "experiment.json").get("runs", [])
    whole = experiment if is_experiment(home, name) and not version else ""
    recorded = [run_id for run_id in runs if (home.run(run_id) / "run.json").is_file()]
    if refusals := [why for run_id in recorded if (why := _refusal(home, run_id))]:
        raise NotRemovableError("\n".join(refusals))
    places = [home.run(run_id) for run_id in recorded] + ([home.experiment(whole)] if whole else [])
    return Removal(
        tuple(recorded), whole, sum(size_of(place) for place in places), tuple(_needing_weights(home, recorded))
    )


def remove(home: Home, removal: Removal) -> bool:
    """Deletes the runs, and their names in the records of experiments. Skips what another call has deleted meanwhile.

    If the process is killed midway, the remaining runs are whole, and the next call deletes the hidden remains.

    Returns:
        Whether the index was updated. False if, for example, the disk is full: the next ingest updates it.
    Raises:
        NotRemovableError: a run has started meanwhile; those before it are deleted.
    """
    with home.locked("removal", waiting=lambda: None):
        aside = home.root / ".removed"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for run_id in removal.runs:
            if home.run(run_id).is_dir():
                _move_away(home, run_id, aside)
            for copy in home.sent_copies(run_id):
                shutil.rmtree(copy, ignore_errors=True)
        for name in _experiments_of(home, removal.runs):
            _forget(home, name, removal.runs)
        if removal.experiment and (record := home.experiment(removal.experiment)).is_dir():
            record.rename(aside / f"experiment {removal.experiment}")
        try:
            with Store.open(home.root) as store:
                store.ingest()
            is_indexed = True
        except (OSError, duckdb.Error):
            is_indexed = False  # readers skip missing runs
        shutil.rmtree(aside)  # last: if an earlier step fails, the home no longer lists the runs
    return is_indexed


def _refusal(home: Home, run_id: str) -> str:
    status = status_of(home, run_id)
    if status == "running":
        return f"{run_id} is running; `rpg cancel {run_id}` stops it"
    if RunState(home, run_id).waits:
        return f"{run_id} waits on a server; `rpg cancel {run_id}` withdraws it"
    for study in sorted(home.root.glob("studies/*/study.json")):
        if run_id in study_runs(home, study.parent.name):
            return f"{run_id} is a trial of the study {study.parent.name}; the study's answer needs it"
    if os.environ.get(STORE):
        return f"{run_id} is in an object store that several machines share; this command cannot delete it"
    return ""


def _needing_weights(home: Home, run_ids: Collection[str]) -> Iterator[str]:
    """Yields the other runs that use the exported weights of one of the given runs as their model."""
    for other in run_ids_in(home):
        try:
            model = recorded_spec(home.run(other)).model
        except SpecError:
            if other not in run_ids:
                yield f"{other} (perhaps: its spec cannot be read)"
            continue
        match Path(getattr(model, "path", "")).parts:
            # Under any root: the home may have been moved, or the run imported.
            case (*_, "runs", run_id, "weights", _) if run_id in run_ids and other not in run_ids:
                yield other


def _move_away(home: Home, run_id: str, aside: Path) -> None:
    """Moves a run that no process executes out of the home in one step: no reader sees half of it."""
    directory, there = home.run(run_id), aside / run_id
    try:
        lease = acquire(directory)
    except RunBusyError as error:
        raise NotRemovableError(str(error)) from None
    # Released before the directory goes: its heartbeat would create the directory again.
    lease.release()
    with home.locked("ingest", waiting=lambda: None):  # no indexing and no compaction meanwhile
        directory.rename(there)
        newest = newest_lease(there)
        if newest is None or newest.number != lease.number:
            there.rename(directory)
            raise NotRemovableError(f"{run_id} has started meanwhile; `rpg cancel {run_id}` stops it")


def _experiments_of(home: Home, run_ids: Collection[str]) -> Iterator[str]:
    for path in sorted(home.root.glob("experiments/*/experiment.json")):
        if not set(run_ids).isdisjoint(read_json(path).get("runs", [])):
            yield path.parent.name


def _forget(home: Home, name: str, run_ids: Sequence[str]) -> None:
    """Removes runs from an experiment's record, and deletes the pages that show them.

    Versions without a remaining run are removed; the others keep their numbers, and no number is used twice.
    """
    with home.locked(f"experiment-{name}", waiting=lambda: None):
        path = home.experiment(name) / "experiment.json"
        record = read_json(path)
        versions = [
            replace(version, runs=tuple(run_id for run_id in version.runs if run_id not in run_ids))
            for version in versions_in(record)
        ]
        left = [version for version in versions if version.runs]
        before = versions_in(record)
        pages = {f"report@{version.number}.html": version.runs for version in before}
        pages |= {"report.html": before[-1].runs} if before else {}
        for page, shown in pages.items():
            if not set(shown).isdisjoint(run_ids):
                (home.experiment(name) / page).unlink(missing_ok=True)
        record |= {
            "runs": [run_id for run_id in record.get("runs", []) if run_id not in run_ids],
            "current": list(left[-1].runs) if left else [],
            "labels": {run_id: label for run_id, label in record.get("labels", {}).items() if run_id not in run_ids},
            "versions": [version.to_json() for version in left],
            "last_version": max(record.get("last_version", 0), *(version.number for version in versions), 0),
            "updated_at": now(),
        }
        write_json(path, record)
