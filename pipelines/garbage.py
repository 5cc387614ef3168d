"""Published stages that no run refers to any more."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.home import Home
from rpg.files import read_json


@dataclass(frozen=True, slots=True)
class Artifact:
    """A shared stage's directory."""

    stage: str
    path: Path
    num_bytes: int


def unreferenced(home: Home) -> list[Artifact]:
    """Artifacts that no run's record, plan or state names."""
    referred = set(_references(home))
    artifacts = (path for path in sorted(home.root.glob("artifacts/*/*")) if not path.name.startswith("."))
    return [Artifact(path.parent.name, path, _size(path)) for path in artifacts if path.name not in referred]


def remove(home: Home, artifacts: list[Artifact]) -> tuple[list[Artifact], list[Artifact]]:
    """Removes artifacts, each under its stage's lock. Returns those removed, and those in use by now."""
    removed = []
    for artifact in artifacts:
        lock = home.locked(f"{artifact.stage}-{artifact.path.name}", waiting=_leave)
        with contextlib.suppress(_InUseError), lock:
            if artifact.path.name in set(_references(home)):
                raise _InUseError
            # Renamed first: a half removed directory must not look whole.
            aside = artifact.path.with_name(f".{artifact.path.name}.removed")
            artifact.path.rename(aside)
            shutil.rmtree(aside)
            removed.append(artifact)
    return removed, [artifact for artifact in artifacts if artifact not in removed]


class _InUseError(Exception):
    """A process makes the artifact again at this moment, or a run has come to refer to it."""


def _leave() -> None:
    raise _InUseError


def _references(home: Home) -> Iterator[str]:
    """Directory names of all artifacts that some run's documents name."""
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
