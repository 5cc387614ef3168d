"""Results of checkpoints that were measured while training went on, one each, which the evaluate stage takes.

A result is a directory `concurrent/FINGERPRINT/step-N` of the run's: the segments that the evaluate stage would write,
and result.json. It is of the weights whose digests are in it, and of the attempt of training that exported them. Its
rows are in the run's own segments as well, as rows of that attempt. So they are on record at once; they count no more
once the evaluate stage has ended, whose result has all checkpoints, or where a later attempt exports the step again.
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
from specs.records import TABLES

_SUMMARY = "result.json"
_TABLES = ("evaluations", "evaluation_samples")


@message
@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy to measure."""

    step: int
    """0: the base model."""
    weights: Path
    digests: Mapping[str, str] = field(default_factory=dict)
    """File -> SHA-256 of its content. Of the base model none: the stage's fingerprint stands for it."""


def digests_of(weights: Path) -> dict[str, str]:
    """File -> SHA-256 of exported weights, as train.json has them. Reads all of them."""
    files = (file for file in files_under(weights) if file.name != NOTES)
    return {str(file.relative_to(weights)): digest(file) for file in files}


@dataclass(frozen=True, slots=True)
class ConcurrentResults:
    """Results of a run's concurrent evaluation for one evaluate stage."""

    run: Path
    """The run's directory."""
    fingerprint: str
    """Fingerprint of the stage."""

    @property
    def directory(self) -> Path:
        """Where they lie."""
        return self.run / "concurrent" / self.fingerprint[:16]

    def path(self, step: int) -> Path:
        """Directory of the result of a step."""
        return self.directory / f"step-{step:06}"

    def attempt(self, step: int) -> int:
        """The attempt of training of which the result's rows are on record; 0: there is no result."""
        return int(read_json(self.path(step) / _SUMMARY).get("attempt", 0))

    def summary(self, policy: MeasuredPolicy) -> list[dict[str, Any]] | None:
        """The policy's part of the stage's summary; None where there is no whole result of these weights."""
        path = self.path(policy.step)
        result = read_json(path / _SUMMARY)
        is_of_policy = bool(result) and result["weights"] == dict(policy.digests)
        return result["summary"] if is_of_policy and not find_damage(path, result["files"], full=True) else None

    def copy_rows(self, step: int, out: Path) -> None:
        """Copies the segments of a result to where the evaluate stage writes its own."""
        shutil.copytree(self.path(step) / "segments", out / "segments", dirs_exist_ok=True)

    def publish(self, aside: Path, policy: MeasuredPolicy, attempt: int, summary: list[dict[str, Any]]) -> None:
        """Gives a result its name. `aside`: a directory beside it, with its segments."""
        files = list_files(aside, [str(file.relative_to(aside)) for file in files_under(aside)])
        result = {"attempt": attempt, "weights": dict(policy.digests), "summary": summary, "files": files}
        write_json(aside / _SUMMARY, result)
        publish_directory(aside, self.path(policy.step))

    def note_attempt(self, step: int, attempt: int) -> None:
        """Notes that a later attempt has exported the same weights."""
        path = self.path(step) / _SUMMARY
        write_json(path, read_json(path) | {"attempt": attempt})

    def record(self, step: int, run_id: str, attempt: int) -> None:
        """Puts the rows of a result among those of the run, as rows of an attempt of training. Once for each attempt.

        Killed before it has, they are on record when the evaluate stage has ended.
        """
        writer = SegmentWriter(self.run, run_id, attempt)
        for table in _TABLES:
            for file in sorted((self.path(step) / "segments" / table).glob("*.parquet")):
                rows = pq.read_table(file).to_pylist()
                writer.rows(TABLES[table](**row | {"attempt": attempt}) for row in rows)
        try:
            writer.flush()
        except FileExistsError:
            print(f"step {step}: measured with other settings before; on record once the evaluate stage has ended")
