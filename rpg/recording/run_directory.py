"""A run's directory as the trainer sees it: what it reads there, and where it writes."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg.files import create_json, now, read_json, write_json
from rpg.processes.fence import Fence
from specs.document import experiment_of
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout under a run's directory."""

    path: Path

    def spec(self) -> Experiment:
        """The run's spec, resolved. SpecError where an installed package that it needs is missing."""
        return experiment_of(json.loads((self.path / "spec.json").read_bytes()), {})

    def inputs(self) -> dict[str, Any]:
        """run_id, fingerprint, where the staged data and the base model are; where they are given, also
        until: a step to pause at; evaluation: fingerprint of the evaluate stage, without which training evaluates
        nothing; lease: number of the lease under which this trainer works. A later holder of the run replaces them."""
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

    def new_attempt(self, resumed_from_step: int, fence: Fence, **provenance: Any) -> int:
        """Notes that a trainer starts, before it writes any row. Returns its number, from 1, which no other has.

        Args:
            provenance: plain data on what the trainer works with and what it records.
        Raises:
            SupersededError: the run was taken over.
        """
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        while True:
            fence.check()
            number = 1 + max((int(file.stem) for file in attempts.glob("[0-9]*.json")), default=0)
            record = {"attempt": number, "resumed_from_step": resumed_from_step, "started_at": now("microseconds")}
            with suppress(FileExistsError):  # else a trainer that was taken over, or has taken over, was first
                create_json(attempts / f"{number:04}.json", record | {"lease": fence.number} | provenance)
                return number

    def evaluated_steps(self) -> list[int]:
        """The steps at which training has evaluated its policy, rows on disk, as the present evaluate stage would."""
        noted = read_json(self.path / "evaluated.json")
        return noted["steps"] if noted and noted["evaluation"] == self.inputs().get("evaluation") else []

    def note_evaluated(self, steps: Iterable[int]) -> None:
        """Replaces evaluated.json."""
        evaluation = self.inputs().get("evaluation", "")
        write_json(self.path / "evaluated.json", {"evaluation": evaluation, "steps": sorted(steps)})

    def report_progress(self, record: dict[str, Any]) -> None:
        """Replaces progress.json."""
        write_json(
            self.path / "progress.json", {**record, "updated_at": now("microseconds")}, durable=False, allow_nan=True
        )
