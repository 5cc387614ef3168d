"""Weights that a run keeps: the base model and its checkpoints; and the divergences over tokens that they give."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pipelines.replay.objectives import Alternative
from pipelines.replay.rows import RunRows
from rpg.checkpoints.checkpoint import defect
from rpg.data.loading import encode_prompts
from rpg.pretrained import tokenizer_of
from rpg.processes.device import device_at_hand
from rpg.recording.run_directory import RunDirectory
from rpg.replay.kept import KeptPolicy, summed_states
from rpg.replay.step import RecordedStep, Sum
from specs.errors import RpgError
from specs.schema.experiment import Experiment


class NoWeightsError(RpgError):
    """The requested weights are not kept."""


@dataclass(frozen=True)
class KeptWeights:
    """The base model and the checkpoints of a run."""

    rows: RunRows
    experiment: Experiment
    """The run's own experiment."""

    @cached_property
    def run(self) -> RunDirectory:
        """Returns the run's directory."""
        return RunDirectory(self.rows.home.run(self.rows.run_id))

    @cached_property
    def base(self) -> Path:
        """Returns the directory of the base model."""
        return self.run.path / str(self.run.inputs()["base"])

    @cached_property
    def steps(self) -> list[int]:
        """Returns the steps after which a checkpoint is kept."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.run.checkpoints.glob("step-*"))

    @property
    def listed(self) -> str:
        """Returns which checkpoints are kept, as part of a sentence."""
        steps = ", ".join(map(str, self.steps))
        return f"checkpoints are kept at steps {steps}" if steps else "no checkpoint is kept"

    def check_base(self) -> None:
        """Raises NoWeightsError if the base model is gone."""
        if not (self.base / "config.json").is_file():
            raise NoWeightsError(f"{self.run.path.name}: the base model is no longer at {self.base}")

    def after(self, step: int) -> Path | None:
        """Returns the checkpoint after a step; None for step 0, after which the weights are those of the base model.

        Raises:
            NoWeightsError: the checkpoint is not kept, or damaged.
        """
        if step == 0:
            return None
        directory = self.run.checkpoints / f"step-{step:06}"
        if step not in self.steps:
            raise NoWeightsError(f"{self.run.path.name}: the checkpoint of step {step} is needed; {self.listed}")
        if damage := defect(directory):
            raise NoWeightsError(f"{self.run.path.name}: the checkpoint of step {step} is damaged: {damage}")
        return directory

    def whole_step(self, step: int) -> RecordedStep:
        """Returns a recorded step with the model's whole input."""
        encode = partial(encode_prompts, tokenizer_of(self.base), data=self.experiment.data)
        return self.rows.whole_step(step, encode)

    def policy(self, step: int, now: Experiment, *, with_reference: bool) -> KeptPolicy:
        """Returns the policy after a step. `now`, `with_reference`: as in `KeptPolicy.load`."""
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # A run of a machine with GPUs may be replayed on one without.
        device = device_at_hand(self.experiment.resources)
        return KeptPolicy.load(self.base, self.after(step), now, device, with_reference=with_reference)


def keeps_updates(experiment: Experiment) -> bool:
    """Returns whether a step's only update starts from weights that a checkpoint has.

    Otherwise the step has several updates, or the gradient was computed at other weights, as in schedule_free_adamw.
    """
    training = experiment.training
    return training.minibatches * training.epochs == 1 and training.optimizer.type == "adamw"


@dataclass
class SummedSteps:
    """The steps whose divergences over tokens could be computed from kept weights, and those without."""

    kept: KeptWeights
    sums: Sequence[Sum]
    """Divergences that the compared objectives sum over tokens; may be empty."""
    computed: list[dict[str, Any]] = field(default_factory=list)
    """An entry for each computed step: step; checkpoint: step of the weights, 0 for the base model; logprob_change: as
    in `rpg.replay.kept.summed_states`."""
    missing: list[int] = field(default_factory=list)
    """Steps that could not be computed."""
    reason: str = ""
    """Reason why the last of them could not."""

    @classmethod
    def of(cls, kept: KeptWeights, objectives: Sequence[Alternative]) -> "SummedSteps":
        """Returns the sums of these objectives, before the first step."""
        return cls(kept, list(dict.fromkeys(each.sum for each in objectives if each.sum)))

    def add_to(self, step: RecordedStep, now: Experiment) -> RecordedStep:
        """Returns a step with the divergences over tokens, or as it is if its weights are not kept."""
        if not self.sums:
            return step
        try:
            self._check_updates()
            self.kept.check_base()
            policy = self.kept.policy(step.step - 1, now, with_reference=True)
        except NoWeightsError as error:
            self.missing.append(step.step)
            self.reason = str(error)
            return step
        states, change = summed_states(policy, self.kept.whole_step(step.step), now, self.sums)
        self.computed.append({"step": step.step, "checkpoint": step.step - 1, "logprob_change": change})
        return replace(step, states=states)

    def _check_updates(self) -> None:
        """Raises NoWeightsError if the weights of a step's updates differ from those of all checkpoints."""
        if not keeps_updates(self.kept.experiment):
            training = self.kept.experiment.training
            updates = f"{training.minibatches * training.epochs} updates a step by {training.optimizer.type}"
            raise NoWeightsError(
                f"{self.kept.run.path.name}: a sum over tokens needs the weights of each update, but checkpoints have"
                f" only those between steps; the run has {updates} instead of one by adamw"
            )

    @property
    def sentence(self) -> str:
        """Returns which steps were computed at which weights; empty if nothing was computed."""
        if not self.computed:
            return ""
        of = ["base model" if each["checkpoint"] == 0 else str(each["checkpoint"]) for each in self.computed]
        steps = ", ".join(f"{each['step']} ({weights})" for each, weights in zip(self.computed, of, strict=True))
        change = max(each["logprob_change"] for each in self.computed)
        return (
            f"computed at the kept weights, step (checkpoint): {steps}; logprobs differ from the recorded ones by"
            f" {change:.2g} nats at most"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"computed": self.computed, "missing": self.missing, "reason": self.reason}
