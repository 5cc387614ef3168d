"""Checkpoints: written aside, listed with their digests, published by a rename, verified before they are used."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg import ranks
from rpg.records import sync_directory
from rpg.run_directory import digest, files_under, replace_json, sync_files

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of a run. All ranks make the same calls; rank 0 publishes, verifies and deletes."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def path(self, step: int) -> Path:
        """Where the checkpoint after a step lies."""
        return self._directory / f"step-{step:06}"

    def write(self, step: int, save: Callable[[Path], None]) -> int:
        """Lets `save` fill a directory that nobody reads yet, and lists it with digests. Returns its size in bytes.

        Publish it once the rows of that step are on disk, so that no checkpoint outruns the records.
        """
        aside = self._aside(step)
        if ranks.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        ranks.wait_for_all()
        save(aside)
        ranks.wait_for_all()
        if ranks.rank() > 0:
            return 0
        written = files_under(aside)
        files = {
            str(path.relative_to(aside)): {"sha256": digest(path), "bytes": path.stat().st_size} for path in written
        }
        replace_json(aside / MANIFEST, {"step": step, "files": files}, durable=True)
        sync_files(aside)
        return sum(path.stat().st_size for path in written)

    def publish(self, step: int) -> None:
        """Gives what `write` made its name, and deletes checkpoints beyond the last few."""
        if ranks.rank() == 0:
            final = self.path(step)
            if final.exists():
                shutil.rmtree(final)
            self._aside(step).rename(final)
            sync_directory(self._directory)
            for old in self._published()[: -self._keep_last]:
                shutil.rmtree(self.path(old))
        ranks.wait_for_all()

    def latest(self) -> int:
        """The step of the newest checkpoint that agrees with its manifest; 0 where none does. The same on all ranks.

        Broken ones lose their name, so that they count no more among the last few.
        """
        found = 0
        if ranks.rank() == 0:
            for leftover in self._directory.glob(".step-*.partial"):
                shutil.rmtree(leftover)
            for step in reversed(self._published()):
                path = self.path(step)
                if not (wrong := self._defect(path)):
                    found = step
                    break
                print(f"checkpoint {path} is broken ({wrong}): passed over for the one before", file=sys.stderr)
                set_aside = path.with_name(f".{path.name}.broken")
                shutil.rmtree(set_aside, ignore_errors=True)
                path.rename(set_aside)
        return ranks.from_first(found)

    def _published(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self._directory.glob("step-*"))

    def _aside(self, step: int) -> Path:
        return self._directory / f".step-{step:06}.partial"

    @staticmethod
    def _defect(checkpoint: Path) -> str:
        try:
            files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        except (OSError, ValueError, KeyError) as error:
            return f"its manifest cannot be read: {error}"
        for name, entry in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if digest(path) != entry["sha256"]:
                return f"{name} does not match its digest"
        return ""


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's random generators of this process, as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to what `random_states` saw."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
