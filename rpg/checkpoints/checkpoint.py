"""Checkpoints: copied at once, written aside while training goes on, published by a rename, verified before use.

A thread of each rank writes what its rank copied, with digests; once all ranks are done, that of rank 0 lists the
files and gives the directory its name. A kill at any moment leaves a whole checkpoint or none of that name.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rpg.checkpoints.pieces import StateCopy
from rpg.checkpoints.retention import Retention
from rpg.files import DiskError, explained, sync, write_json
from rpg.manifests import find_damage
from rpg.processes import ranks

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of a run. All ranks make the same calls; rank 0 publishes, verifies and deletes."""

    def __init__(self, directory: Path, retention: Retention) -> None:
        self._directory = directory
        self._retention = retention
        self._channel = ranks.Channel()
        self._writing: _Background | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint after a step lies."""
        return self._directory / f"step-{step:06}"

    def write(self, step: int, copy: StateCopy, metrics: Mapping[str, float] | None = None) -> None:
        """Begins to write and publish a copy of the state; waits only for one that is still being written.

        Call it once the rows of that step are on disk, so that no checkpoint outruns the records.

        Args:
            metrics: what `Retention` may choose the best by.
        Raises:
            DiskError: an earlier one could not be written.
        """
        self.wait()
        aside = self._aside(step)
        with explained(aside):
            if ranks.rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        ranks.wait_for_all()
        self._writing = _Background(lambda: self._write(step, copy, dict(metrics or {})))

    def check(self) -> None:
        """Raises DiskError on all ranks if what is being written failed on one. Costs nothing while nothing is."""
        if self._writing:
            failed, unfinished = self._writing.error is not None, not self._writing.done
            if ranks.largest(torch.tensor([failed, unfinished], dtype=torch.int32)).any():
                failed = ranks.any_rank(failed)
                if not failed:
                    return
            self.wait()

    def wait(self) -> None:
        """Returns once nothing is being written on any rank. Raises DiskError if that failed."""
        if writing := self._writing:
            self._writing = None
            writing.join()
            if ranks.any_rank(writing.error is not None):
                raise writing.error or DiskError("another rank could not write its part of the checkpoint")

    def close(self) -> None:
        """Lets what is being written come to its end, on a way out where nobody asks how."""
        if self._writing:
            self._writing.join()

    def latest(self, *, up_to: int = sys.maxsize) -> int:
        """The step of the newest checkpoint that agrees with its manifest; 0 where none does. The same on all ranks.

        Broken ones lose their name, so that they count no more among the last few. Call it while none is being written.

        Args:
            up_to: later ones are not looked at.
        """
        found = 0
        if ranks.rank() == 0:
            for leftover in self._directory.glob(".step-*.partial"):
                shutil.rmtree(leftover)
            for step in reversed([step for step in self.published() if step <= up_to]):
                path = self.path(step)
                if not (wrong := defect(path)):
                    found = step
                    break
                print(f"checkpoint {path} is broken ({wrong}): passed over for the one before", file=sys.stderr)
                set_aside = path.with_name(f".{path.name}.broken")
                shutil.rmtree(set_aside, ignore_errors=True)
                path.rename(set_aside)
        return ranks.from_first(found)

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps."""
        if ranks.rank() == 0:
            for later in self.published():
                if later > step:
                    shutil.rmtree(self.path(later))
        ranks.wait_for_all()

    def published(self) -> list[int]:
        """The steps that have one, whole or broken."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._directory.glob("step-*"))

    def _write(self, step: int, copy: StateCopy, metrics: dict[str, float]) -> None:
        """Runs in the background, on all ranks."""
        aside, written, wrong = self._aside(step), {}, ""
        try:
            with explained(aside):
                written = copy.write(aside)
        except Exception as error:  # told to the other ranks, who wait for this one
            wrong = str(error)
        parts = self._channel.gather((written, wrong))
        if told := [wrong for _, wrong in parts if wrong]:
            if ranks.rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise DiskError(told[0])
        if ranks.rank() == 0:
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            with explained(aside):
                write_json(aside / MANIFEST, {"step": step, "figures": metrics, "files": files}, allow_nan=True)
                self._publish(step)

    def _publish(self, step: int) -> None:
        """Gives what was written its name, and deletes checkpoints that need not stay."""
        final = self.path(step)
        if final.exists():
            shutil.rmtree(final)
        self._aside(step).rename(final)
        sync(self._directory)
        published = {step: _metrics(self.path(step)) for step in self.published()}
        for old in published.keys() - self._retention.kept(published):
            shutil.rmtree(self.path(old))

    def _aside(self, step: int) -> Path:
        return self._directory / f".step-{step:06}.partial"


class _Background:
    """A piece of work in a thread of its own. It ends with the process, unless somebody waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        """What ended it early."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error


def defect(checkpoint: Path) -> str:
    """How a checkpoint differs from its manifest; empty where it does not."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read: {error}"
    return find_damage(checkpoint, files, full=True)


def _metrics(checkpoint: Path) -> dict[str, Any]:
    """Those saved with the checkpoint: `figures` in its manifest. Empty where it cannot be read."""
    try:
        return dict(json.loads((checkpoint / MANIFEST).read_bytes())["figures"])
    except (OSError, ValueError, KeyError):
        return {}
