"""The files in a run's directory that the trainer reads and writes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.document import experiment_of
from specs.documents.reading import numbered
from specs.machine.fence import Fence
from specs.machine.files import create_json, now, read_json, write_json
from specs.schema.experiment import Experiment

INITIAL_RESPONSES = "initial_responses.json"
"""File of responses to the evaluation sets by the policy before training."""
Accuracies = Mapping[int, Mapping[str, float]]
"""Step after which training evaluated its policy -> evaluation set -> accuracy, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout of a run's directory."""

    path: Path

    def spec(self) -> Experiment:
        """Returns the run's resolved spec. Raises SpecError if a package that it needs is not installed."""
        return experiment_of(json.loads((self.path / "spec.json").read_bytes()), {})

    def inputs(self) -> dict[str, Any]:
        """Returns run_id, fingerprint, and the directories of staged data and base model.

        Optional: until: a step at which to pause; evaluation: fingerprint of the evaluate stage, without which training
        evaluates nothing; sharing: keys of the spec by which learner and sampler share a GPU, as the plan chose them;
        lease: number of the lease under which this trainer works. A later holder of the run replaces them."""
        return dict(json.loads((self.path / "inputs.json").read_bytes()))

    @property
    def checkpoints(self) -> Path:
        """Directory of full states from which training can resume."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Directory of exported policies."""
        return self.path / "weights"

    @property
    def cancel(self) -> Path:
        """File that asks the trainer to stop after the current step. The process that starts the trainer removes it."""
        return self.path / "cancel"

    @property
    def guards(self) -> Path:
        """File with the roll-backs by the run's guards. It exists after the first roll-back."""
        return self.path / "guards.json"

    @property
    def manifest(self) -> Path:
        """File that is written last, when training is done."""
        return self.path / "train.json"

    def trained(self, fingerprint: str) -> bool:
        """Returns whether training with this fingerprint is done."""
        return self.manifest.exists() and json.loads(self.manifest.read_bytes())["fingerprint"] == fingerprint

    def new_attempt(self, resumed_from_step: int, fence: Fence, **provenance: Any) -> int:
        """Records that a trainer starts, before it writes any row. Returns its unique number, from 1.

        Args:
            provenance: plain data about the trainer's environment and the rows that it records.
        Raises:
            SupersededError: another trainer took over the run.
        """
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        while True:
            fence.check()
            number = 1 + max((int(file.stem) for file in numbered(attempts)), default=0)
            record = {"attempt": number, "resumed_from_step": resumed_from_step, "started_at": now("microseconds")}
            with suppress(FileExistsError):  # otherwise another trainer, superseded or superseding, was first
                create_json(attempts / f"{number:04}.json", record | {"lease": fence.number} | provenance)
                return number

    def evaluated(self) -> Accuracies:
        """Returns training's evaluations whose rows are on disk and that match the current evaluate stage."""
        noted = read_json(self.path / "evaluated.json")
        return accuracies_in(noted) if noted and noted["evaluation"] == self.inputs().get("evaluation") else {}

    def note_evaluated(self, evaluated: Accuracies) -> None:
        """Replaces evaluated.json."""
        record = {
            "evaluation": self.inputs().get("evaluation", ""),
            "accuracies": {str(step): measured for step, measured in sorted(evaluated.items())},
        }
        write_json(self.path / "evaluated.json", record)

    def initial_responses(self) -> list[dict[str, Any]]:
        """Returns the responses of the policy before training, if they match the current evaluate stage."""
        kept = read_json(self.path / INITIAL_RESPONSES)
        matches = bool(kept) and kept["evaluation"] == self.inputs().get("evaluation")
        return list(kept["responses"]) if matches else []

    def keep_initial_responses(self, responses: list[dict[str, Any]]) -> None:
        """Replaces these responses."""
        record = {"evaluation": self.inputs().get("evaluation", ""), "responses": responses}
        write_json(self.path / INITIAL_RESPONSES, record)

    def exported(self) -> dict[int, int]:
        """Returns the steps whose exported weights count, with the attempt that exported each. Steps that a later
        attempt repeats do not count."""
        noted = {int(step): attempt for step, attempt in read_json(self.path / "exported.json").items()}
        files = numbered(self.path / "attempts")
        origins = {int(file.stem): read_json(file).get("resumed_from_step", 0) for file in files}

        def is_gone_through_again(step: int, attempt: int) -> bool:
            return any(later > attempt and origin < step for later, origin in origins.items())

        return {step: attempt for step, attempt in noted.items() if not is_gone_through_again(step, attempt)}

    def note_exported(self, step: int, attempt: int) -> None:
        """Records in exported.json that the weights after a step are complete, and the attempt that exported them."""
        path = self.path / "exported.json"
        write_json(path, read_json(path) | {str(step): attempt})

    def report_progress(self, record: dict[str, Any]) -> None:
        """Replaces progress.json."""
        write_json(
            self.path / "progress.json", {**record, "updated_at": now("microseconds")}, durable=False, allow_nan=True
        )


def accuracies_in(noted: Mapping[str, Any]) -> Accuracies:
    """Returns the accuracies in an evaluated.json."""
    return {int(step): measured for step, measured in noted.get("accuracies", {}).items()}


def best_step(accuracies: Accuracies, dataset: str) -> int:
    """Returns the step with the best accuracy on a set; of equal steps, the latest. 0 if no step was measured on it.

    Example:
        >>> best_step({20: {"aime": 0.3}, 40: {"aime": 0.3}, 60: {"aime": 0.1}}, "aime")
        40
    """
    rated = ((measured[dataset], step) for step, measured in accuracies.items() if dataset in measured)
    return max(rated, default=(0.0, 0))[1]
