"""Writes checkpoints to a temporary directory during training, publishes them by a rename, and verifies them on use.

On each rank a thread writes the rank's copy, with digests. Once all ranks are done, the thread of rank 0 lists the
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
from rpg.processes import ranks
from specs.machine.fence import Fence
from specs.machine.files import DiskError, explained, read_json, sync, write_json
from specs.machine.manifests import find_damage

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of a run. All ranks make the same calls; rank 0 publishes, verifies and deletes."""

    def __init__(self, directory: Path, retention: Retention, fence: Fence) -> None:
        """Opens a run's checkpoints. `fence`: the run's fence, which keeps a trainer that lost the run from publishing
        and deleting."""
        self._directory = directory
        self._retention = retention
        self._fence = fence
        self._channel = ranks.Channel()
        self._rated: Mapping[int, Mapping[str, float]] = {}
        self._writing: _Background | None = None

    def path(self, step: int) -> Path:
        """Returns the directory under which the checkpoint after a step is published."""
        return self._directory / f"step-{step:06}"

    def write(self, step: int, copy: StateCopy, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to write and publish a copy of the state in the background. Waits only for an earlier copy that is
        still being written.

        Call it once the rows of that step are on disk, so that no checkpoint is ahead of the records.

        Args:
            metrics: metrics to save in the manifest; `Retention` may choose the best checkpoint by one of them.
        Raises:
            DiskError: an earlier copy could not be written.
        """
        self.wait()
        aside = self._aside(step)
        with explained(aside):
            if ranks.rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        ranks.wait_for_all()
        self._writing = _Background(lambda: self._write(step, copy, dict(metrics or {})))

    def rate(self, rated: Mapping[int, Mapping[str, float]]) -> None:
        """Sets further metrics of steps, in addition to those saved with their checkpoints. `Retention` may choose by
        them.

        Args:
            rated: step -> metric -> value. Only rank 0's argument is used.
        """
        self._rated = rated

    def check(self) -> None:
        """Raises DiskError on all ranks if the current checkpoint failed on one rank. Does not wait for it."""
        if self._writing:
            failed, unfinished = self._writing.error is not None, not self._writing.done
            if ranks.largest(torch.tensor([failed, unfinished], dtype=torch.int32)).any():
                failed = ranks.any_rank(failed)
                if not failed:
                    return
            self.wait()

    def wait(self) -> None:
        """Waits until no rank is writing a checkpoint. Raises DiskError if one failed."""
        if writing := self._writing:
            self._writing = None
            writing.join()
            if ranks.any_rank(writing.error is not None):
                raise writing.error or DiskError("another rank could not write its part of the checkpoint")

    def close(self) -> None:
        """Waits until this rank has written its part, and ignores errors. For use when exiting after another
        failure."""
        if self._writing:
            self._writing.join()

    def latest(self, *, up_to: int = sys.maxsize) -> int:
        """Returns, on all ranks, the step of the newest checkpoint that agrees with its manifest, or 0 if none does.

        Damaged ones are renamed, so that retention does not count them. Call it while no checkpoint is being written.

        Args:
            up_to: last step to consider.
        """
        newest = 0
        if ranks.rank() == 0:
            self._fence.check()
            for leftover in self._directory.glob(".*step-*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)  # a trainer that lost the run may still write
            for step in reversed([step for step in self.published() if step <= up_to]):
                path = self.path(step)
                if not (damage := defect(path) or self._superseded(path, step)):
                    newest = step
                    break
                print(f"checkpoint {path} is broken ({damage}); an earlier checkpoint is used", file=sys.stderr)
                set_aside = path.with_name(f".{path.name}.broken")
                shutil.rmtree(set_aside, ignore_errors=True)
                path.rename(set_aside)
        return ranks.from_first(newest)

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps."""
        if ranks.rank() == 0:
            self._fence.check()
            for later in self.published():
                if later > step:
                    shutil.rmtree(self.path(later))
        ranks.wait_for_all()

    def published(self) -> list[int]:
        """Returns the steps that have a checkpoint, whole or damaged."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._directory.glob("step-*"))

    def _write(self, step: int, copy: StateCopy, metrics: dict[str, float]) -> None:
        """Writes and publishes in the background, on all ranks."""
        aside, written, failure = self._aside(step), {}, ""
        try:
            with explained(aside):
                written = copy.write(aside)
        except Exception as error:  # sent to the other ranks, which wait for this one
            failure = str(error)
        parts = self._channel.gather((written, failure))
        if failures := [failure for _, failure in parts if failure]:
            if ranks.rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise DiskError(failures[0])
        if ranks.rank() == 0:
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            with explained(aside):
                record = {"step": step, "lease": self._fence.number, "figures": metrics, "files": files}
                write_json(aside / MANIFEST, record, allow_nan=True)
                self._publish(step)

    def _superseded(self, checkpoint: Path, step: int) -> str:
        """Returns why an undamaged checkpoint does not count; empty if it counts.

        As with rows, a file system that was unreachable may publish it after another trainer took over the run at an
        earlier step.
        """
        lease = read_json(checkpoint / MANIFEST).get("lease", 0)
        attempts = map(read_json, (self._fence.run_directory / "attempts").glob("[0-9]*.json"))
        went_back = any(
            attempt.get("lease", 0) > lease and attempt.get("resumed_from_step", step) < step for attempt in attempts
        )
        return "a trainer wrote it after another one had taken over the run" if lease and went_back else ""

    def _publish(self, step: int) -> None:
        """Gives the written directory its final name, and deletes the checkpoints that are not kept."""
        final = self.path(step)
        self._fence.check()
        if final.exists():
            shutil.rmtree(final)
        self._aside(step).rename(final)
        sync(self._directory)
        rated = self._rated
        published = {step: {**_metrics_of(self.path(step)), **rated.get(step, {})} for step in self.published()}
        for old in published.keys() - self._retention.kept(published):
            shutil.rmtree(self.path(old))

    def _aside(self, step: int) -> Path:
        # The name is unique to this trainer: a trainer that lost the run may still have files of that step open.
        return self._directory / f".{self._fence.number}-step-{step:06}.partial"


class _Background:
    """A task in its own thread. The thread ends with the process, unless `join` waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        """Exception that ended the task; None if it succeeded or is still running."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the task has ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits until the task has ended."""
        self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error


def defect(checkpoint: Path) -> str:
    """Returns how a checkpoint differs from its manifest; empty if it agrees."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read: {error}"
    return find_damage(checkpoint, files, full=True)


def _metrics_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the metrics that were saved with a checkpoint; empty if its manifest cannot be read."""
    try:
        return dict(json.loads((checkpoint / MANIFEST).read_bytes())["figures"])
    except (OSError, ValueError, KeyError):
        return {}
