"""What a run keeps: rows, checkpoints and exported weights, in an order in which a crash leaves no gap and no double.

Rows of a step are on disk, those of all ranks, before a checkpoint of that step gets its name, so a run that goes on
from a checkpoint has every row up to it; rows after it belong to an attempt that the new one supersedes. Responses and
tokens are written by the rank that holds them. A kill between two ranks leaves no half step: what one rank wrote counts
once all have written.
"""

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rpg.batches.batch import StepRollouts
from rpg.batches.ledger import TokenLedger
from rpg.certificate.certificate import certificate_record, certify_over_training
from rpg.checkpoints.checkpoint import Checkpoints
from rpg.checkpoints.pieces import StateCopy, load_values
from rpg.checkpoints.retention import Means, accuracy_on
from rpg.evaluation.records import Answered, Recorder
from rpg.parts import Parts
from rpg.processes import ranks
from rpg.recording.provenance import provenance_of
from rpg.recording.rows import chosen_responses, write_metrics, write_rollouts, write_tokens
from rpg.recording.run_directory import Accuracies, RunDirectory, best_step
from rpg.recording.segments import SegmentWriter
from rpg.rollouts.source import RolloutSource
from specs.machine.fence import Fence
from specs.machine.files import DiskError, files_under, publish_directory, versions_of, write_json
from specs.machine.manifests import list_files
from specs.records import CheckpointRow, Int32
from specs.schema.experiment import Experiment

_COUNTERS = "trainer.json"
_PACKAGES = ("torch", "transformers", "deepspeed", "numpy", "pyarrow")
"""Packages whose versions may change the result of training."""
_RANDOM = "random"


@dataclass
class TrainingState:
    """Counters of a run; the rest of its state lies with the parts that it belongs to."""

    step: int = 0
    """Steps begun; between two steps, steps done."""
    updates: int = 0
    """Optimizer updates done, those that were skipped included."""
    skipped_in_a_row: int = 0
    """How many of the last updates were skipped since their gradients were not finite."""
    policy_version: int = 0
    """Number of times that the sampler has loaded weights."""

    def copy(self, parts: Parts, source: RolloutSource) -> StateCopy:
        """The whole state of training, copied to host memory. All ranks call; each gets the part that it writes.

        That is: weights and optimizer (in pieces), the reference's weights and schedule, the random states, the data
        cursor, the rollouts sampled but not yet trained on and the counters, from which the learning rate follows.
        """
        copied = StateCopy()
        parts.learner.save(copied)
        if parts.reference:
            parts.reference.save(copied)
        copied.values(_RANDOM, random_states())
        record = {**asdict(self), "position": source.save(self.step, copied), "reference": parts.schedule.state_dict()}
        record["guards"] = parts.guards.state_dict()
        copied.document(_COUNTERS, record)
        return copied

    def load(self, parts: Parts, source: RolloutSource, directory: Path) -> None:
        """Restores what a `copy` wrote, and gives the sampler the policy. All ranks call it.

        In the middle of a run too: nothing remains of the state that the parts had.
        """
        record = json.loads((directory / _COUNTERS).read_bytes())
        parts.learner.load(directory)
        if parts.reference:
            parts.reference.load(directory)
        if states := load_values(directory, _RANDOM):
            restore_random_states(states)
        source.load(directory, record["position"])
        parts.schedule.load_state_dict(record["reference"])
        parts.guards.load_state_dict(record.get("guards", {}))
        self.step, self.updates, self.policy_version = record["step"], record["updates"], record["policy_version"]
        self.skipped_in_a_row = record.get("skipped_in_a_row", 0)  # older checkpoints did not count them
        parts.give_sampler_weights(self.policy_version)


def open_writer(run: RunDirectory, resumed_from_step: int, fence: Fence, spec: Experiment) -> SegmentWriter:
    """Begins an attempt, and gives this rank what it writes the attempt's rows with. All ranks call it.

    Raises:
        SupersededError: the run was taken over.
    """
    attempt = ranks.from_first(
        run.new_attempt(resumed_from_step, fence, **provenance_of(spec)) if ranks.rank() == 0 else 0
    )
    share = {"rank": ranks.rank(), "ranks": ranks.world_size()}
    return SegmentWriter(run.path, run.inputs()["run_id"], attempt, **share)


class Keeper:
    """All ranks make the same calls; each writes the rows of its responses, rank 0 all others, and rank 0 publishes.

    Everything that is published raises SupersededError where the run was taken over by another trainer.
    """

    def __init__(
        self, parts: Parts, source: RolloutSource, checkpoints: Checkpoints, writer: SegmentWriter, fence: Fence
    ) -> None:
        self._parts = parts
        self._source = source
        self._checkpoints = checkpoints
        self._writer = writer
        self._fence = fence
        self._first = ranks.rank() == 0
        self._copy: StateCopy | None = None
        self._means = Means()
        self._ending = False
        self._evaluated: dict[int, Mapping[str, float]] = {}
        """Accuracies by step and evaluation set; on ranks but the first the steps alone."""
        self._noted: Accuracies = {}
        """The part of `_evaluated` that is on disk."""

    def event(self, step: int, kind: str, message: str) -> None:
        """Records an event of the run, written with the step's other rows."""
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
        """Records the responses that this rank holds and their tokens, as far as the spec's `record` says.

        Args:
            advantage: the mean of each. [b]
        """
        record = self._parts.spec.record
        if record.rollouts == "all":
            write_rollouts(
                self._writer,
                step,
                rollouts,
                self._parts.problems,
                advantage,
                trained_version=trained_version,
                reference_version=reference_version,
            )
        if record.share:
            table = ledger.on_host()
            if self._parts.reference is None:
                table["ref_logprobs"] = table["old_logprobs"]
            chosen = chosen_responses(self._writer.run_id, step, len(rollouts.lengths), record.share)
            write_tokens(self._writer, step, rollouts, table, chosen)
        failed = [score.error for score in rollouts.scores if score.error]
        if failed:
            self.event(step, "reward_failed", f"{len(failed)} of {len(rollouts.scores)} responses: {failed[0]}")

    def evaluation(self, step: int, answered: list[list[Answered]]) -> dict[str, float]:
        """Records the present policy's answers to the evaluation problems, written with the step's other rows, and
        exports its weights if it is the best so far and the spec keeps that one.

        Returns:
            The accuracy on each set, by `mean@k on SET`, on rank 0; nothing on the others.
        """
        metric = f"mean@{self._parts.spec.evaluation.samples_per_problem}"
        self._evaluated[step] = {
            measured["dataset"]: measured["metrics"][metric]["value"] for measured in self._measured(step, answered)
        }
        self._rate_checkpoints()
        if self._best_on and not self._exports_at(step) and ranks.from_first(self._best_step(up_to=step)) == step:
            self._export(step)
        return {f"{metric} on {dataset}": accuracy for dataset, accuracy in self._evaluated[step].items()}

    def _measured(self, step: int, answered: list[list[Answered]]) -> list[dict[str, Any]]:
        """The summary of an evaluation, whose rows are now with the writer; empty on ranks but the first."""
        if not self._first:
            return []
        inputs, writer = self._parts.run.inputs(), self._writer
        evaluation, attempt = self._parts.spec.evaluation, Int32(writer.attempt)
        return Recorder(writer, evaluation, inputs["run_id"], inputs["evaluation"], attempt).record(step, answered)

    def has_evaluated(self, step: int) -> bool:
        """Whether the policy of the step was evaluated, in this attempt or before."""
        return step in self._evaluated

    def recall_evaluations(self, up_to: int) -> None:
        """Takes from disk which steps were evaluated, without those after `up_to`, whose rows no longer count."""
        self._noted = ranks.from_first(self._parts.run.evaluated() if self._first else {})
        self._evaluated = {step: measured for step, measured in self._noted.items() if step <= up_to}
        self._rate_checkpoints()
        self._note_evaluated()

    def flush(self) -> None:
        """Puts the rows so far on disk, then notes the steps whose evaluations are among them. All ranks call it.

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
        self._note_evaluated()

    def save(self, state: TrainingState, *, stopping: bool) -> None:
        """Exports weights and copies the state where that is due; `finish_step` then has the copy written."""
        training = self._parts.spec.training
        last = state.step == training.steps
        if self._exports_at(state.step):
            self._export(state.step)
        if last or stopping or state.step % training.checkpoint.every_steps == 0:
            self._checkpoints.wait()
            self._copy = state.copy(self._parts, self._source)
            size = int(ranks.total(torch.tensor(self._copy.num_bytes)))
            self._note_saved(state.step, self._checkpoints.path(state.step), "full", size)
        self._ending = last or stopping
        if self._ending:
            self.event(state.step, "finished" if last else "stopped", "" if last else "asked to, after this step")

    def finish_step(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Puts the step's rows on disk, then has the copied state written; waits only for the run's last.

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

    def roll_back(self, state: TrainingState, *, up_to: int) -> int:
        """Sets a run back to its newest undamaged checkpoint of a step up to `up_to`. All ranks call it between steps.

        Parts and state are then as they were at that step. A new attempt begins, which supersedes the rows of later
        steps, and later checkpoints are deleted, so that no later start goes on from them.

        Returns:
            The step of the checkpoint; 0 where there is none, in which case nothing is changed.
        Raises:
            DiskError: a checkpoint that was still being written could not be.
        """
        self._checkpoints.wait()
        step = self._checkpoints.latest(up_to=up_to)
        if not step:
            return 0
        self._checkpoints.delete_after(step)
        run = self._parts.run
        self.flush()
        self._writer = open_writer(run, step, self._fence, self._parts.spec)
        self.recall_evaluations(step)
        state.load(self._parts, self._source, self._checkpoints.path(step))
        self._copy, self._means, self._ending = None, Means(), False
        return step

    def finish(self, state: TrainingState, fingerprint: str) -> None:
        """Writes the objective's certificate, and train.json, which says that training is done. All ranks call it."""
        run = self._parts.run
        if not ranks.from_first(self._weights_of(state.step).is_dir()):
            self._export(state.step)  # lost or damaged since an earlier attempt wrote it with the last checkpoint
        self.flush()
        self._drop_superseded_weights()
        if not self._first:
            return
        certificates = certify_over_training(self._parts.spec.objective)
        self._fence.check()
        write_json(run.path / "certificate.json", certificate_record(certificates), allow_nan=True)
        exported = sorted(path for path in run.weights.glob("step-*"))
        files = [str(file.relative_to(run.path)) for path in exported for file in files_under(path)]
        record = {
            "stage": "train",
            "fingerprint": fingerprint,
            "steps": state.step,
            "weights": {
                str(int(path.name.removeprefix("step-"))): str(path.relative_to(run.path)) for path in exported
            },
            "files": {name: entry["sha256"] for name, entry in list_files(run.path, files).items()},
            "versions": versions_of(*_PACKAGES),
        }
        write_json(run.manifest, record)

    def close(self) -> None:
        """Writes the rows that an unfinished step left; on this rank, whether the others still answer or not."""
        self._checkpoints.close()
        self._fence.check()
        self._writer.flush()
        self._note_evaluated()

    def _note_evaluated(self) -> None:
        if self._first and self._evaluated != self._noted:
            self._parts.run.note_evaluated(self._evaluated)
        self._noted = dict(self._evaluated)

    def _rate_checkpoints(self) -> None:
        """Tells the checkpoints how accurate they are, that the best can be kept."""
        self._checkpoints.rate(
            {
                step: {accuracy_on(dataset): accuracy for dataset, accuracy in measured.items()}
                for step, measured in self._evaluated.items()
            }
        )

    @property
    def _best_on(self) -> str:
        """The evaluation set that the best checkpoint is chosen on; empty where accuracy does not choose."""
        keep_best = self._parts.spec.training.checkpoint.keep_best
        return keep_best.accuracy_on if keep_best else ""

    def _exports_at(self, step: int) -> bool:
        """Whether the weights after a step are exported, however good they are."""
        training = self._parts.spec.training
        every = training.export_every_steps
        return step == training.steps or (every > 0 and step % every == 0)

    def _drop_superseded_weights(self) -> None:
        """Deletes weights that were exported as the best and are it no more, once a checkpoint stands for that: a run
        that goes on from an earlier one finds its best as it was."""
        if not (self._first and self._best_on):
            return
        saved = max(self._checkpoints.published(), default=0)
        best = self._best_step(up_to=saved)
        for path in self._parts.run.weights.glob("step-*"):
            step = int(path.name.removeprefix("step-"))
            if step <= saved and step != best and not self._exports_at(step):
                self._fence.check()
                shutil.rmtree(path)

    def _best_step(self, *, up_to: int) -> int:
        """The most accurate of the steps whose weights are there, or, of `up_to` itself, can be exported; on rank 0."""
        candidates = {
            step: measured
            for step, measured in self._evaluated.items()
            if step <= up_to and (step == up_to or self._weights_of(step).is_dir())
        }
        return best_step(candidates, self._best_on)

    def _weights_of(self, step: int) -> Path:
        return self._parts.run.weights / f"step-{step:06}"

    def _export(self, step: int) -> None:
        final = self._weights_of(step)
        aside = final.with_name(f".{self._fence.number}-{final.name}.partial")
        if self._first:
            aside.mkdir(parents=True, exist_ok=True)
            self._parts.tokenizer.save_pretrained(aside)
        self._parts.learner.export(aside)
        if self._first:
            self._fence.check()
            publish_directory(aside, final)
            self._parts.run.note_exported(step, self._writer.attempt)
            self._note_saved(step, final, "weights", sum(file.stat().st_size for file in files_under(final)))

    def _note_saved(self, step: int, path: Path, kind: str, size: int) -> None:
        if not self._first:
            return
        relative = str(path.relative_to(self._parts.run.path))
        row = {"step": [step], "path": relative, "kind": kind, "num_bytes": size, "recorded_at": datetime.now(UTC)}
        self._writer.columns(CheckpointRow, row)
        self.event(step, "checkpoint_saved" if kind == "full" else "weights_exported", relative)


def random_states() -> dict[str, Any]:
    """The states of this process's random generators (Python, NumPy, torch), as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to states that `random_states` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
