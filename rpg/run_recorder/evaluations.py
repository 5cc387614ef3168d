"""Tracks the steps whose policy was evaluated during training."""

from collections.abc import Mapping

from rpg.checkpoints.checkpoint import Checkpoints
from rpg.checkpoints.retention import accuracy_on
from rpg.processes import ranks
from rpg.recording.run_directory import Accuracies, RunDirectory


class EvaluatedSteps:
    """The accuracies, or scores of graded rewards, by step and evaluation set. They are in memory and on disk, and are
    passed to the checkpoints, so that the best checkpoint is kept.

    Rank 0 has the accuracies; the other ranks have only the steps.
    """

    def __init__(self, run: RunDirectory, checkpoints: Checkpoints) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._first = ranks.rank() == 0
        self._noted: Accuracies = {}
        """Part of `accuracies` that is on disk."""
        self.accuracies: dict[int, Mapping[str, float]] = {}

    def __contains__(self, step: int) -> bool:
        """Returns whether the policy of the step was evaluated, in this attempt or before."""
        return step in self.accuracies

    def add(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Adds an evaluation whose rows are not yet on disk."""
        self.accuracies[step] = accuracies
        self._rate_checkpoints()

    def recall(self, up_to: int) -> None:
        """Reads the evaluated steps up to `up_to` from disk. The rows of later steps no longer count."""
        self._noted = ranks.from_first(self._run.evaluated() if self._first else {})
        self.accuracies = {step: measured for step, measured in self._noted.items() if step <= up_to}
        self._rate_checkpoints()
        self.note()

    def note(self) -> None:
        """Records on disk the steps whose evaluations are among the rows on disk."""
        if self._first and self.accuracies != self._noted:
            self._run.note_evaluated(self.accuracies)
        self._noted = dict(self.accuracies)

    def _rate_checkpoints(self) -> None:
        self._checkpoints.rate(
            {
                step: {accuracy_on(dataset): accuracy for dataset, accuracy in measured.items()}
                for step, measured in self.accuracies.items()
            }
        )
