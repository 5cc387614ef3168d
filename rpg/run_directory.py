"""A run's directory as the trainer sees it: what it is told, and where it says how far it is."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpg.disk import aside_of
from rpg.records import sync_directory
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout under a run's directory."""

    path: Path

    def spec(self) -> Experiment:
        """The run's spec, resolved."""
        return Experiment.model_validate_json((self.path / "spec.json").read_bytes())

    def inputs(self) -> dict[str, Any]:
        """run_id, fingerprint, where the staged data and the base model are; until: a step to stop after, if given."""
        return dict(json.loads((self.path / "inputs.json").read_bytes()))

    @property
    def checkpoints(self) -> Path:
        """Full states to go on from."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Exported policies."""
        return self.path / "weights"

    @property
    def cancel(self) -> Path:
        """A file that asks the trainer to stop after the step under way; whoever starts the trainer clears it."""
        return self.path / "cancel"

    @property
    def guards(self) -> Path:
        """The roll-backs of the run's guards, once there is one."""
        return self.path / "guards.json"

    @property
    def manifest(self) -> Path:
        """Written last, when training is done."""
        return self.path / "train.json"

    def trained(self, fingerprint: str) -> bool:
        """Whether training with this fingerprint is done."""
        return self.manifest.exists() and json.loads(self.manifest.read_bytes())["fingerprint"] == fingerprint

    def new_attempt(self, resumed_from_step: int) -> int:
        """Notes that a trainer starts, before it writes any row. Returns its number, from 1."""
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        number = 1 + max((int(file.stem) for file in attempts.glob("[0-9]*.json")), default=0)
        record = {"attempt": number, "resumed_from_step": resumed_from_step, "started_at": now()}
        replace_json(attempts / f"{number:04}.json", record, durable=True)
        return number

    def report_progress(self, record: dict[str, Any]) -> None:
        """Replaces progress.json."""
        replace_json(self.path / "progress.json", {**record, "updated_at": now()}, durable=False)


def replace_json(path: Path, value: Any, *, durable: bool) -> None:
    """Writes JSON so that a reader sees the old or the new, never a part; durable: it also survives a power cut."""
    with aside_of(path) as aside:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    if durable:
        sync_directory(path.parent)


def now() -> str:
    """The time, ISO-8601, UTC."""
    return datetime.now(UTC).isoformat()


def digest(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_under(directory: Path) -> list[Path]:
    """Every file, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync_files(directory: Path) -> None:
    """Makes every file and directory under a directory durable."""
    for path in files_under(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        sync_directory(path)


def publish_directory(aside: Path, final: Path) -> None:
    """Makes a filled directory durable and gives it its name, in the place of one that may have it."""
    sync_files(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_directory(final.parent)
