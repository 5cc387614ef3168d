"""RunRecorder: writes a step's rows, evaluations, weights and checkpoints, in the order that the package describes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpg.batches.batch import StepRollouts
from rpg.batches.ledger import TokenLedger
from rpg.certificate.certificate import certificate_record, certify_experiment
from rpg.checkpoints.checkpoint import Checkpoints
from rpg.checkpoints.pieces import StateCopy
from rpg.checkpoints.retention import Means
from rpg.components import TrainerComponents
from rpg.evaluation.records import Evaluated, Recorder
from rpg.processes import ranks
from rpg.recording.provenance import provenance_of
from rpg.recording.rows import chosen_responses, write_metrics, write_rollouts, write_tokens, write_turns
from rpg.recording.run_directory import RunDirectory
from rpg.recording.segments import SegmentWriter
from rpg.rewards import failures
from rpg.rollouts.source import RolloutSource
from rpg.run_recorder.evaluations import EvaluatedSteps
from rpg.run_recorder.state import TrainingState
from rpg.run_recorder.weights import ExportedWeights
from specs.machine.fence import Fence
from specs.machine.files import DiskError, files_under, versions_of, write_json
from specs.machine.manifests import list_files
from specs.records import CheckpointRow, Int32
from specs.schema.experiment import Experiment

_PACKAGES = ("torch", "transformers", "deepspeed", "numpy", "pyarrow")
"""Packages whose versions may change the result of training."""


def open_writer(run: RunDirectory, resumed_from_step: int, fence: Fence, spec: Experiment) -> SegmentWriter:
    """Begins an attempt and returns this rank's writer of the attempt's rows. All ranks call it.

    Raises:
        SupersededError: another trainer took over the run.
    """
    attempt = ranks.from_first(
        run.new_attempt(resumed_from_step, fence, **provenance_of(spec)) if ranks.rank() == 0 else 0
    )
    share = {"rank": ranks.rank(), "ranks": ranks.world_size()}
    return SegmentWriter(run.path, run.inputs()["run_id"], attempt, **share)


class RunRecorder:
    """The recorder of a run. All ranks make the same calls. Each writes the rows of its responses; rank 0 writes all
    other rows.

    Rank 0 publishes. Publishing raises SupersededError if another trainer took over the run.
    """

    def __init__(
        self,
        components: TrainerComponents,
        source: RolloutSource,
        checkpoints: Checkpoints,
        writer: SegmentWriter,
        fence: Fence,
    ) -> None:
        self._components = components
        self._source = source
        self._checkpoints = checkpoints
        self._writer = writer
        self._fence = fence
        self._first = ranks.rank() == 0
        self._copy: StateCopy | None = None
        self._means = Means()
        self._ending = False
        self._evaluated = EvaluatedSteps(components.run, checkpoints)
        self._weights = ExportedWeights(components, fence)

    def event(self, step: int, kind: str, message: str) -> None:
        """Records an event of the run, which is written with the step's other rows."""
        if self._first:
            self._writer.event(step, kind, message)

    def rollouts(
        self,
        step: int,
        rollouts: StepRollouts,
        advantage: Tensor,
        ledger: TokenLedger,
        *,
        trained_version: int,
        reference_version: int,
    ) -> None:
        """Records the responses that this rank holds and their tokens, as the spec's `record` says.

        Args:
            advantage: mean advantage of each response. [b]
        """
        record = self._components.spec.record
        if record.rollouts == "all":
            write_rollouts(
                self._writer,
                step,
                rollouts,
                self._components.problems,
                advantage,
                trained_version=trained_version,
                reference_version=reference_version,
            )
            if self._components.spec.rollout.rollouter.type != "single_turn":
                write_turns(self._writer, step, rollouts)
        if record.share:
            table = ledger.on_host()
            if self._components.reference is None:
                table["ref_logprobs"] = table["old_logprobs"]
            chosen = chosen_responses(self._writer.run_id, step, len(rollouts.lengths), record.share)
            write_tokens(self._writer, step, rollouts, table, chosen)
        if failed := failures(rollouts.scores):
            self.event(step, "reward_failed", failed)

    def evaluation(self, step: int, evaluated: Evaluated) -> dict[str, float]:
        """Records the current policy's results on the evaluation sets, which are written with the step's other rows.

        Exports the policy's weights if it is the best so far and the spec keeps the best.

        Returns:
            On rank 0 the accuracy on each set, by `mean@k on SET`, or the score for a graded reward; empty on the other
            ranks.
        """
        measured = {each["dataset"]: next(iter(each["metrics"].items())) for each in self._measured(step, evaluated)}
        self._evaluated.add(step, {dataset: figures["value"] for dataset, (_, figures) in measured.items()})
        if self._weights.best_on and not self._weights.due_at(step):
            best = self._weights.best_step(self._evaluated.accuracies, up_to=step) if self._first else 0
            if ranks.from_first(best) == step:
                self._export(step)
        return {f"{metric} on {dataset}": figures["value"] for dataset, (metric, figures) in measured.items()}

    def _measured(self, step: int, evaluated: Evaluated) -> list[dict[str, Any]]:
        """Passes an evaluation's rows to the writer and returns its summary; empty on all ranks except the first."""
        if not self._first:
            return []
        inputs, writer = self._components.run.inputs(), self._writer
        spec, attempt = self._components.spec, Int32(writer.attempt)
        recorder = Recorder(writer, spec.evaluation, inputs["run_id"], inputs["evaluation"], attempt, spec.worst_at)
        return recorder.record(step, evaluated)

    def has_evaluated(self, step: int) -> bool:
        """Returns whether the policy of the step was evaluated, in this attempt or before."""
        return step in self._evaluated

    def recall_evaluations(self, up_to: int) -> None:
        """Reads the evaluated steps up to `up_to` from disk. The rows of later steps no longer count."""
        self._evaluated.recall(up_to)

    def flush(self) -> None:
        """Writes the rows so far to disk, then records the steps whose evaluations are among them. All ranks call it.

        Raises:
            DiskError: the rows of a rank could not be written.
        """
        self._fence.check(ranks.any_rank(self._fence.superseded))
        failure = None
        try:
            self._writer.flush()
        except DiskError as error:
            failure = error
        if ranks.any_rank(failure is not None):
            raise failure or DiskError("another rank could not write its rows")
        self._evaluated.note()

    def save(self, state: TrainingState, *, stopping: bool) -> None:
        """Exports weights and copies the state, if either is due. `finish_step` starts the writing of the copy."""
        training = self._components.spec.training
        last = state.step == training.steps
        if self._weights.due_at(state.step):
            self._export(state.step)
        if last or stopping or state.step % training.checkpoint.every_steps == 0:
            self._checkpoints.wait()
            self._copy = state.copy(self._components, self._source)
            size = int(ranks.total(torch.tensor(self._copy.num_bytes)))
            self._note_saved(state.step, self._checkpoints.path(state.step), "full", size)
        self._ending = last or stopping
        if self._ending:
            self.event(state.step, "finished" if last else "stopped", "" if last else "asked to, after this step")

    def finish_step(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Writes the step's rows to disk, then starts the writing of the copied state. Waits only for the run's last
        state.

        Raises:
            DiskError: the rows, this state or an earlier one could not be written.
        """
        if self._first:
            write_metrics(self._writer, state.step, metrics)
        self.flush()
        self._means.add(metrics)
        self._checkpoints.check()
        self._drop_superseded_weights()
        if self._copy:
            self._checkpoints.write(state.step, self._copy, self._means.take())
            self._copy = None
        if self._ending:
            self._checkpoints.wait()
        self._source.forget(max(self._checkpoints.published(), default=0))

    def roll_back(self, state: TrainingState, *, up_to: int) -> int:
        """Resets a run to its newest undamaged checkpoint of a step up to `up_to`. All ranks call it between steps.

        Components and state are then as they were at that step. A new attempt begins, which supersedes the rows of
        later steps, and later checkpoints are deleted, so that no later start resumes from them.

        Returns:
            The step of the checkpoint; 0 if there is none, in which case nothing changes.
        Raises:
            DiskError: a checkpoint in progress could not be written.
        """
        self._checkpoints.wait()
        step = self._checkpoints.latest(up_to=up_to)
        if not step:
            return 0
        self._checkpoints.delete_after(step)
        run = self._components.run
        self.flush()
        self._writer = open_writer(run, step, self._fence, self._components.spec)
        self.recall_evaluations(step)
        state.load(self._components, self._source, self._checkpoints.path(step))
        self._copy, self._means, self._ending = None, Means(), False
        return step

    def finish(self, state: TrainingState, fingerprint: str) -> None:
        """Writes the objective's certificate, and train.json, which marks training as done. All ranks call it."""
        run = self._components.run
        if not ranks.from_first(self._weights.of(state.step).is_dir()):
            self._export(state.step)  # lost or damaged after an earlier attempt wrote it with the last checkpoint
        self.flush()
        self._drop_superseded_weights()
        if not self._first:
            return
        certificates = certify_experiment(self._components.spec)
        self._fence.check()
        write_json(run.path / "certificate.json", certificate_record(certificates), allow_nan=True)
        exported = self._weights.by_step()
        files = [str(file.relative_to(run.path)) for path in exported.values() for file in files_under(path)]
        record = {
            "stage": "train",
            "fingerprint": fingerprint,
            "steps": state.step,
            "weights": {str(step): str(path.relative_to(run.path)) for step, path in exported.items()},
            "files": {name: entry["sha256"] for name, entry in list_files(run.path, files).items()},
            "versions": versions_of(*_PACKAGES),
        }
        write_json(run.manifest, record)

    def close(self) -> None:
        """Writes the rows of an unfinished step on this rank, whether or not the other ranks still answer."""
        self._checkpoints.close()
        self._fence.check()
        self._writer.flush()
        self._evaluated.note()

    def _export(self, step: int) -> None:
        size = self._weights.export(step, attempt=self._writer.attempt)
        self._note_saved(step, self._weights.of(step), "weights", size)

    def _drop_superseded_weights(self) -> None:
        """Deletes weights that are no longer the best, once a checkpoint records that."""
        if self._first:
            saved = max(self._checkpoints.published(), default=0)
            self._weights.drop_superseded(self._evaluated.accuracies, saved=saved)

    def _note_saved(self, step: int, path: Path, kind: str, size: int) -> None:
        if not self._first:
            return
        relative = str(path.relative_to(self._components.run.path))
        row = {"step": [step], "path": relative, "kind": kind, "num_bytes": size, "recorded_at": datetime.now(UTC)}
        self._writer.columns(CheckpointRow, row)
        self.event(step, "checkpoint_saved" if kind == "full" else "weights_exported", relative)
