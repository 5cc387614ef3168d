"""Artifacts, the published results that several runs share: which of them no run uses any more, and their removal."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.home import Home
from rpg.files import read_json


@dataclass(frozen=True, slots=True)
class Artifact:
    """The published result of a data or base stage."""

    stage: str
    path: Path
    num_bytes: int


def unreferenced(home: Home) -> list[Artifact]:
    """Artifacts that no run's documents name."""
    used = set(_used_names(home))
    directories = (path for path in sorted(home.root.glob("artifacts/*/*")) if not path.name.startswith("."))
    return [Artifact(path.parent.name, path, _size(path)) for path in directories if path.name not in used]


def remove(home: Home, artifacts: list[Artifact]) -> tuple[list[Artifact], list[Artifact]]:
    """Removes artifacts. Returns those that were removed, and those that have come into use meanwhile."""
    removed = []
    for artifact in artifacts:
        lock = home.locked(f"{artifact.stage}-{artifact.path.name}", waiting=_keep)
        with contextlib.suppress(_InUseError), lock:
            if artifact.path.name in set(_used_names(home)):
                raise _InUseError
            # Renamed first: a directory that is removed in part must not look whole.
            aside = artifact.path.with_name(f".{artifact.path.name}.removed")
            artifact.path.rename(aside)
            shutil.rmtree(aside)
            removed.append(artifact)
    return removed, [artifact for artifact in artifacts if artifact not in removed]


class _InUseError(Exception):
    """A process is making the artifact again, or a run names it by now."""


def _keep() -> None:
    raise _InUseError


def _used_names(home: Home) -> Iterator[str]:
    """Names of the directories of all artifacts that some run's documents name."""
    for run in home.root.glob("runs/*"):
        for fingerprint in read_json(run / "run.json").get("fingerprints", {}).values():
            yield str(fingerprint)[:16]
        for name in ("plan.json", "state.json"):
            for stage in (read_json(run / name).get("stages") or {}).values():
                yield str(stage.get("fingerprint", ""))[:16]
        inputs = read_json(run / "inputs.json")
        yield from (Path(str(inputs[name])).name for name in ("data", "base") if name in inputs)


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
