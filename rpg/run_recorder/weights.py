"""Exports the policy's weights after some steps, as directories that transformers reads."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from rpg.components import TrainerComponents
from rpg.processes import ranks
from rpg.recording.run_directory import best_step
from specs.machine.fence import Fence
from specs.machine.files import files_under, publish_directory


class ExportedWeights:
    """The exported weights of the steps that the spec names and, if the spec keeps it, of the best step."""

    def __init__(self, components: TrainerComponents, fence: Fence) -> None:
        self._components = components
        self._directory = components.run.weights
        self._training = components.spec.training
        self._fence = fence
        keep_best = self._training.checkpoint.keep_best
        self.best_on = keep_best.accuracy_on if keep_best else ""
        """Evaluation set whose accuracy selects the best checkpoint; empty if accuracy does not select it."""

    def of(self, step: int) -> Path:
        """Returns the directory of the weights after a step, whether or not it exists."""
        return self._directory / f"step-{step:06}"

    def by_step(self) -> dict[int, Path]:
        """Returns the existing directories by step."""
        return {int(path.name.removeprefix("step-")): path for path in sorted(self._directory.glob("step-*"))}

    def due_at(self, step: int) -> bool:
        """Returns whether the weights after a step are exported regardless of their accuracy."""
        every = self._training.export_every_steps
        return step == self._training.steps or (every > 0 and step % every == 0)

    def best_step(self, evaluated: Mapping[int, Mapping[str, float]], *, up_to: int) -> int:
        """Returns, on rank 0, the most accurate step whose weights exist. Those of `up_to` itself need not exist
        yet."""
        candidates = {
            step: measured
            for step, measured in evaluated.items()
            if step <= up_to and (step == up_to or self.of(step).is_dir())
        }
        return best_step(candidates, self.best_on)

    def export(self, step: int, *, attempt: int) -> int:
        """Exports the current policy's weights as those after a step. All ranks call it.

        Returns:
            Bytes of the directory; 0 on all ranks except the first.
        """
        final, first = self.of(step), ranks.rank() == 0
        aside = final.with_name(f".{self._fence.number}-{final.name}.partial")
        if first:
            aside.mkdir(parents=True, exist_ok=True)
            self._components.tokenizer.save_pretrained(aside)
        self._components.learner.export(aside)
        if not first:
            return 0
        self._fence.check()
        publish_directory(aside, final)
        self._components.run.note_exported(step, attempt)
        return sum(file.stat().st_size for file in files_under(final))

    def drop_superseded(self, evaluated: Mapping[int, Mapping[str, float]], *, saved: int) -> None:
        """Deletes, on rank 0, weights that were exported as the best but no longer are.

        Args:
            saved: step of the newest checkpoint; a run that resumes from an earlier one must still find its best
                weights.
        """
        if not self.best_on:
            return
        best = self.best_step(evaluated, up_to=saved)
        for step, path in self.by_step().items():
            if step <= saved and step != best and not self.due_at(step):
                self._fence.check()
                shutil.rmtree(path)
