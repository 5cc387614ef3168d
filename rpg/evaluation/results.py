"""Stores the result of each checkpoint that was measured during training, for reuse by the evaluate stage.

A result is a directory `concurrent/FINGERPRINT/step-N` of the run: the segments that the evaluate stage would write,
and result.json. It holds the digests of the measured weights and the attempt of training that exported them. Its rows
are also in the run's own segments, as rows of that attempt, so they are visible at once. They no longer count once the
evaluate stage has ended, because its result has all checkpoints, or once a later attempt exports the step again.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rpg.messages import message
from rpg.recording.segments import SegmentWriter
from specs.machine.files import digest, files_under, publish_directory, read_json, write_json
from specs.machine.manifests import NOTES, find_damage, list_files
from specs.records import EVALUATED, TABLES

_SUMMARY = "result.json"
_TABLES = EVALUATED


@message
@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy to measure."""

    step: int
    """Step of the policy; 0 is the base model."""
    weights: Path
    digests: Mapping[str, str] = field(default_factory=dict)
    """File -> SHA-256 of its content. Empty for the base model, which the stage's fingerprint identifies."""


def digests_of(weights: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of exported weights, as in train.json. Reads all files."""
    files = (file for file in files_under(weights) if file.name != NOTES)
    return {str(file.relative_to(weights)): digest(file) for file in files}


@dataclass(frozen=True, slots=True)
class ConcurrentResults:
    """The results of a run's concurrent evaluation for one evaluate stage."""

    run: Path
    """The run's directory."""
    fingerprint: str
    """Fingerprint of the stage."""

    @property
    def directory(self) -> Path:
        """Directory of the results."""
        return self.run / "concurrent" / self.fingerprint[:16]

    def path(self, step: int) -> Path:
        """Returns the directory of a step's result."""
        return self.directory / f"step-{step:06}"

    def attempt(self, step: int) -> int:
        """Returns the attempt of training under which the result's rows are recorded; 0 if there is no result."""
        return int(read_json(self.path(step) / _SUMMARY).get("attempt", 0))

    def summary(self, policy: MeasuredPolicy) -> list[dict[str, Any]] | None:
        """Returns the policy's part of the stage's summary; None if there is no complete result of these weights."""
        path = self.path(policy.step)
        result = read_json(path / _SUMMARY)
        is_of_policy = bool(result) and result["weights"] == dict(policy.digests)
        return result["summary"] if is_of_policy and not find_damage(path, result["files"], full=True) else None

    def copy_rows(self, step: int, out: Path) -> None:
        """Copies the segments of a result to the directory of the evaluate stage's own segments."""
        shutil.copytree(self.path(step) / "segments", out / "segments", dirs_exist_ok=True)

    def publish(self, aside: Path, policy: MeasuredPolicy, attempt: int, summary: list[dict[str, Any]]) -> None:
        """Publishes a result under its name. `aside`: a sibling directory with its segments."""
        files = list_files(aside, [str(file.relative_to(aside)) for file in files_under(aside)])
        result = {"attempt": attempt, "weights": dict(policy.digests), "summary": summary, "files": files}
        write_json(aside / _SUMMARY, result)
        publish_directory(aside, self.path(policy.step))

    def note_attempt(self, step: int, attempt: int) -> None:
        """Records that a later attempt has exported the same weights."""
        path = self.path(step) / _SUMMARY
        write_json(path, read_json(path) | {"attempt": attempt})

    def record(self, step: int, run_id: str, attempt: int) -> None:
        """Adds the rows of a result to the run's rows, under an attempt of training. Does so once per attempt.

        After a kill before this, the end of the evaluate stage records them.
        """
        writer = SegmentWriter(self.run, run_id, attempt)
        for table in _TABLES:
            for file in sorted((self.path(step) / "segments" / table).glob("*.parquet")):
                rows = pq.read_table(file).to_pylist()
                writer.rows(TABLES[table](**row | {"attempt": attempt}) for row in rows)
        try:
            writer.flush()
        except FileExistsError:
            print(f"step {step}: measured before with other settings; recorded when the evaluate stage ends")
