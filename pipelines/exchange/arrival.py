"""Import of an export into another home. Every file is checked; the import happens as a whole or not at all."""

import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.exchange.export import FORMAT, MANIFEST, is_of_run
from pipelines.home.home import Home
from pipelines.home.versions import versions_in, with_runs
from specs.documents.names import is_portable_name
from specs.documents.reading import read_checked
from specs.errors import RpgError
from specs.machine.files import files_under, now, read_json, sync, sync_tree, write_json
from specs.machine.liveness import FINAL
from specs.machine.manifests import find_damage
from specs.reading.recorded import unreadable
from storage import Store

_NEEDED = {"run.json", "state.json"}
_MOST_NAMED = 3
"""Largest number of problems in an export's documents that an error names."""
_TELL_APART = ("status", "started_at", "ended_at", "evaluation")
"""Fields of a run's state that change from one execution to the next, or during an execution."""


class NoExportError(RpgError):
    """Error for a directory that has no export, or an export that cannot be imported."""


class ExportRefusedError(Exception):
    """Refusal of an export that is damaged, or whose id belongs to another run of this home. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Export:
    """A run in a directory, as written by `write_export`."""

    directory: Path
    run_id: str
    files: Mapping[str, Any]
    """Name -> sha256 and bytes."""
    experiment: Mapping[str, Any]
    """The entry for this run in its experiment's record."""


def exports_in(directory: Path) -> list[Export]:
    """Returns the exports in a directory: the directory itself, or its subdirectories (an experiment's runs).

    Raises:
        NoExportError: the directory has no export, or one written by a later version or while the run was executing.
    """
    manifests = [directory / MANIFEST] if (directory / MANIFEST).is_file() else sorted(directory.glob(f"*/{MANIFEST}"))
    if not manifests:
        raise NoExportError(f"{directory} contains no export: `rpg export RUN DIR` writes one, with {MANIFEST}")
    return [_read(manifest.parent) for manifest in manifests]


def import_run(home: Home, export: Export) -> bool:
    """Imports a run into a home, with its experiment.

    If the process is killed midway, the run is either whole or absent, and the next call finishes.

    Returns:
        True if the run was imported, False if it was here already.
    Raises:
        ExportRefusedError: a file is missing or has other content, is a link or no regular file, or is a document of
            another shape; or the home has another run with that id.
    """
    final = home.run(export.run_id)
    try:
        if damage := _strange_file(export) or find_damage(export.directory, export.files, full=True):
            raise ExportRefusedError(f"{export.directory} is damaged: {damage}; nothing was imported")
        with home.locked("import", waiting=lambda: None):
            if is_new := not final.exists():
                _bring(export, home.root / ".import" / "runs" / export.run_id, final)
            elif difference := _difference(export.directory, final):
                raise ExportRefusedError(f"{export.run_id} exists here already as a different run: {difference}")
            _join_experiment(home, export)
    except OSError as error:
        raise ExportRefusedError(f"{export.run_id} was not imported: {error}") from error
    with Store.open(home.root) as store:
        store.ingest()
    return is_new


def _read(directory: Path) -> Export:
    manifest, problems = read_checked(directory / MANIFEST)
    if problems or not manifest:
        said = "; ".join(problems[:_MOST_NAMED]) or "it is empty"
        raise NoExportError(f"{directory / MANIFEST} is not what `rpg export` writes: {said}")
    export = Export(directory, manifest["run_id"], manifest["files"], manifest["experiment"])
    if manifest["format"] > FORMAT:
        raise NoExportError(f"{directory} was exported by a later version of the program")
    if read_json(directory / "run.json").get("run_id") != export.run_id or not export.files.keys() >= _NEEDED:
        raise NoExportError(f"{directory} does not contain the run that its {MANIFEST} names")
    if (status := read_json(directory / "state.json").get("status")) not in FINAL:
        raise NoExportError(f"{export.run_id} was {status} when it was exported; export it again when it has ended")
    return export


def _strange_file(export: Export) -> str:
    """Returns the first of an export's files that `rpg export` never writes; empty if there is no such file."""
    for name in export.files:
        if not all(map(is_portable_name, name.split("/"))):
            return f"{name if name.isprintable() else repr(name)} is not a file of an export"
        for path in (export.directory / name, *(export.directory / name).parents):
            if path == export.directory:
                break
            if path.is_symlink():
                return f"{name} is a link, or lies behind one: export the run again, or copy the files themselves"
        found = (export.directory / name).lstat() if (export.directory / name).exists() else None
        if found and not stat.S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        if found and found.st_nlink > 1:
            return f"{name} is a hard link: its content may change with another file's; copy the export (`cp -r`)"
    return ""


def _bring(export: Export, aside: Path, final: Path) -> None:
    """Copies the run's files to a temporary directory, checks the documents, and renames the directory to the run's
    name."""
    shutil.rmtree(aside.parents[1], ignore_errors=True)
    try:
        for name in filter(is_of_run, export.files):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export.directory / name, aside / name, follow_symlinks=False)
            shutil.copystat(export.directory / name, aside / name, follow_symlinks=False)
        names = [path.relative_to(aside) for path in files_under(aside)]
        found = [f"{name}: {line}" for name in names for line in _problems(aside, name)]
        if found:
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            said = "; ".join(found[:_MOST_NAMED]) + more
            raise ExportRefusedError(
                f"{export.directory} has documents of an unexpected form: {said}; nothing was imported"
            )
        elsewhere = {"pid": None, "pid_started": None, "flow_run_id": None, "api_url": None}
        write_json(aside / "state.json", read_json(aside / "state.json") | elsewhere)
        sync_tree(aside)
        final.parent.mkdir(exist_ok=True)
        aside.rename(final)  # fails if another process has started the run meanwhile
        sync(final.parent)
    finally:
        shutil.rmtree(aside.parents[1], ignore_errors=True)


def _problems(run: Path, name: Path) -> list[str]:
    """Returns the problems of a document of the run; empty if the file is not a document."""
    if name == Path("spec.json"):
        return unreadable(run)
    return read_checked(run / name)[1] if name.suffix == ".json" and name.parts[0] != "weights" else []


def _difference(export: Path, here: Path) -> str:
    """Returns the difference between the run of the export and that of the home; empty if they are the same."""
    for name in ("run.json", "train.json"):
        if read_json(export / name) != read_json(here / name):
            return f"{name} differs"
    there, ours = read_json(export / "state.json"), read_json(here / "state.json")
    for field in _TELL_APART:
        if there.get(field) != ours.get(field):
            return f"{field} is {ours.get(field)} here and {there.get(field)} in the export"
    attempts = [sorted(path.name for path in (place / "attempts").glob("*.json")) for place in (export, here)]
    return "" if attempts[0] == attempts[1] else "it was started at other times"


def _join_experiment(home: Home, export: Export) -> None:
    """Adds the run to its experiment, in the version with its cells. The experiment's current version stays current."""
    name = export.experiment["name"]
    with home.locked(f"experiment-{name}", waiting=lambda: None):
        path = home.experiment(name) / "experiment.json"
        before = read_json(path)
        if export.run_id in before.get("runs", []):
            return
        known, recipes = versions_in(before), export.experiment.get("recipes") or [export.run_id]
        here = {export.run_id, *(run_id for version in known for run_id in version.runs)}
        runs = [run_id for run_id in export.experiment.get("runs", [export.run_id]) if run_id in here]
        versions = with_runs(known, recipes, runs, last_number=before.get("last_version", 0))
        if known:
            versions.sort(key=lambda version: version.number == known[-1].number)
        record = {
            "name": name,
            "question": "",
            "created_at": now(),
            **{key: value for key, value in export.experiment.items() if key != "recipes"},
            **before,
            "runs": [*before.get("runs", []), export.run_id],
            "current": list(versions[-1].runs),
            "versions": [version.to_json() for version in versions],
            "labels": export.experiment.get("labels", {}) | before.get("labels", {}),
            "updated_at": now(),
        }
        write_json(path, record)
        frozen = home.run(export.run_id) / "document.json"
        if frozen.is_file() and not (path.parent / "spec.json").exists():
            write_json(path.parent / "spec.json", read_json(frozen))
