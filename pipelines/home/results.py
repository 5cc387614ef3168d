"""A stage's result on disk: the path of its manifest, checks that it is whole, and the publication of a new one.

A result under its final name is whole: it is filled in a temporary directory, hashed, made durable and renamed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from specs.machine.files import files_under, now, publish_directory, read_json, versions_of, write_json
from specs.machine.manifests import find_damage, list_files

_PACKAGES = ("rpg-experiments", "torch", "transformers", "datasets", "reasoning-gym", "deepspeed", "vllm")
_COMPUTING = ("torch", "transformers", "deepspeed", "vllm")
"""Packages that compute a result; another version of them does not change the fingerprint."""


def manifest_of(stage: str, output: Path) -> Path:
    """Returns the path of the manifest of a stage's result. (The report has none.)"""
    return output / ("train.json" if stage == "train" else "manifest.json")


def damage_of(manifest: Path, fingerprint: str, *, full: bool = False) -> str:
    """Describes the damage to a published result; empty if the result can be reused unchanged.

    Plan and run both call this, so that a run never repeats what its plan calls CACHED.

    Args:
        fingerprint: the fingerprint that the result should have.
        full: hash every file; else only those whose size or time changed since they were last hashed.
    """
    recorded = read_json(manifest)
    if recorded.get("fingerprint") != fingerprint:
        return f"{manifest.name} is missing or has another fingerprint"
    return find_damage(manifest.parent, recorded.get("files", {}), full=full)


@lru_cache
def _installed() -> dict[str, str]:
    return versions_of(*_COMPUTING)


def made_with_others(manifest: Path) -> str:
    """Describes the computing packages whose version differs from the one that made the result; empty if none do."""
    made = read_json(manifest).get("versions", {})
    here = _installed()
    others = [name for name in here if name in made and made[name] != here[name]]
    return ", ".join(f"{name} {made[name]} (here {here[name]})" for name in others)


def is_older(path: Path, since_ns: int) -> bool:
    """Returns whether a file or directory was last changed before a time, in ns since 1970. Always False for time 0."""
    return bool(since_ns) and path.stat().st_mtime_ns < since_ns


def is_report_current(state: dict[str, Any], fingerprint: str, inputs: Iterable[str], page: Path) -> bool:
    """Returns whether a run's page has this fingerprint and is newer than the results that it shows.

    Args:
        state: the run's state.json.
        inputs: names of the stages that the page shows.
    """
    stages = state.get("stages", {})
    report = stages.get("report", {})
    newest = max((stages.get(name, {}).get("ended_at") or "" for name in inputs), default="")
    of_this = report.get("fingerprint") == fingerprint and report.get("status") == "finished"
    return of_this and page.is_file() and newest <= (report.get("ended_at") or "")


def check_results(home: Home, *, full: bool = False) -> Iterator[str]:
    """Compares published results with their manifests. One line per damaged result, with its path in the home.

    Args:
        full: hash every file; else only those whose size or time changed since they were last hashed.
    """
    shared = home.root.glob("artifacts/*/*/manifest.json")
    of_runs = (path for name in ("train.json", "evaluate/*/manifest.json") for path in home.root.glob(f"runs/*/{name}"))
    for manifest in sorted([*shared, *of_runs]):
        if any(part.startswith(".") for part in manifest.relative_to(home.root).parts):
            continue  # still being filled
        fingerprint = read_json(manifest).get("fingerprint", "")
        if damage := damage_of(manifest, fingerprint, full=full):
            yield f"{manifest.parent.relative_to(home.root)}: {damage}"


@contextlib.contextmanager
def filling(output: Path) -> Iterator[Path]:
    """Yields a new directory beside `output` for the caller to fill. Deletes it at the end if it was not published. The
    caller holds a lock."""
    output.parent.mkdir(parents=True, exist_ok=True)
    for left_by_a_killed_process in output.parent.glob(f".{output.name}.*"):
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    aside = output.parent / f".{output.name}.{os.getpid()}.{time.monotonic_ns()}"
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, output: Path, manifest: dict[str, Any]) -> None:
    """Gives a filled directory its manifest and its final name.

    Args:
        aside: the directory from `filling`.
        output: the final name; an existing result there (damaged, or the same) is replaced.
        manifest: stage, fingerprint, identity, inputs, code; `files` and `created_at` are added, and `versions` if it
            has none.
    """
    files = list_files(aside, [str(file.relative_to(aside)) for file in files_under(aside)])
    recorded = {"versions": versions_of(*_PACKAGES)} | manifest | {"files": files, "created_at": now()}
    write_json(aside / "manifest.json", recorded)
    publish_directory(aside, output)
