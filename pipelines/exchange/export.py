"""An export: a run in its own directory, which others can read without this platform and which `rpg import` imports.

Beside the run's own files, laid out as in its home, an export has README.md, spec.yaml and the valid rows as one
Parquet file a table. `export.json` lists every file with its digest, and the run's entry in its experiment's record.
Checkpoints and the logs of this machine's processes are left out; data and base model are named by digest.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.exchange.account import account_of, render
from pipelines.home.home import Home
from pipelines.home.versions import versions_in
from pipelines.remote.record_files import is_recorded, read_listings
from specs.errors import RpgError
from specs.machine.files import digest, files_under, now, read_json, versions_of
from storage.export import export_run
from storage.provenance import input_manifest

MANIFEST = "export.json"
FORMAT = 1
"""Format of the manifest. An import refuses later formats."""
_OF_THIS_HOME = ("leases", "exits", "process.json", "cancel.json", MANIFEST)
"""Parts of a run's record that are meaningful only in its own home."""


def is_of_run(name: str) -> bool:
    """Returns whether a file of an export was copied from the run's directory.

    Args:
        name: its path in the export.
    """
    weights = name.startswith("weights/step-")
    return name.partition("/")[0] not in _OF_THIS_HOME and (weights or is_recorded(f"runs/run/{name}"))


def write_export(home: Home, run_id: str, directory: Path) -> dict[str, int]:
    """Writes a run to a directory, which must be new or empty.

    Returns:
        The number of rows of each table that has any.
    Raises:
        RpgError: the directory is not empty, or a file of the run is a link out of the home.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RpgError(f"{directory} exists and is not an empty directory")
    source, inside = home.run(run_id), home.root.resolve()
    for path in [source / "report.html", source / "weights", *(source / "weights").rglob("*")]:
        if not path.resolve().is_relative_to(inside):
            raise RpgError(f"{path} is a link to a place outside {home.root}: it is not exported")
    directory.mkdir(parents=True, exist_ok=True)
    # Without this lock, segments could be merged into others meanwhile.
    with home.locked("ingest", waiting=lambda: None):
        for name in _names(home, run_id):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, directory / name)
    for stage in ("data", "base"):
        if manifest := input_manifest(home.root, source, stage):
            _write(directory / f"{stage}.json", json.dumps(manifest, indent=1))
    counts = export_run(home.root, run_id, directory)
    account = account_of(home, run_id)
    _write(directory / "spec.yaml", account.spec)
    _write(directory / "README.md", render("export.md", account, counts=counts, directory=directory.name))
    files = {
        str(path.relative_to(directory)): {"sha256": digest(path), "bytes": path.stat().st_size}
        for path in files_under(directory)
    }
    manifest = {
        "format": FORMAT,
        "run_id": run_id,
        "exported_at": now(),
        "versions": versions_of("rpg-experiments"),
        "experiment": _of_experiment(home, run_id, account.run.experiment),
        "files": files,
    }
    _write(directory / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))
    return counts


def _names(home: Home, run_id: str) -> Iterator[str]:
    """Yields the paths of the files that are copied unchanged, relative to the run's directory."""
    unit = f"runs/{run_id}"
    recorded = read_listings(home.root, [unit])[unit].files
    yield from (name for path in recorded if is_of_run(name := path.removeprefix(f"{unit}/")))
    directory = home.run(run_id)
    for weights in sorted(directory.glob("weights/step-*")):
        yield from (str(path.relative_to(directory)) for path in files_under(weights) if path.name[0] != ".")
    if (directory / "report.html").is_file():
        yield "report.html"


def _of_experiment(home: Home, run_id: str, name: str) -> dict[str, Any]:
    """Returns the run's experiment from its record: the cells of its version, and all runs of that version in order."""
    record = read_json(home.experiment(name) / "experiment.json") if name else {}
    versions = [version for version in versions_in(record) if run_id in version.runs]
    label = record.get("labels", {}).get(run_id)
    return {
        **{key: record[key] for key in ("question", "created_at", "fingerprint") if key in record},
        "name": name,
        "recipes": sorted(versions[-1].recipes) if versions else [],
        "runs": list(versions[-1].runs) if versions else [run_id],
        "labels": {run_id: label} if label else {},
    }


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
