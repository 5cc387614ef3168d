"""Exported checkpoints are measured while training goes on, in ranks that do nothing else."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rpg.evaluation.policies import evaluating_ranks, policies_answers
from rpg.evaluation.records import Recorder
from rpg.evaluation.results import ConcurrentResults, MeasuredPolicy, digests_of
from rpg.processes import ranks
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Place
from specs.machine.fence import Fence
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class ExportedPolicy:
    """Weights that training has exported, or the base model."""

    step: int
    """0: the base model."""
    weights: Path
    attempt: int
    """Which start of the trainer exported them; of the base model any."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """From plain data."""
        return cls(int(fields["step"]), Path(fields["weights"]), int(fields["attempt"]))

    @property
    def inode(self) -> int:
        """Inode of the directory: weights that are exported again have another."""
        return self.weights.stat().st_ino

    def measured(self) -> MeasuredPolicy:
        """The measured checkpoint as it is on disk now."""
        return MeasuredPolicy(self.step, self.weights, digests_of(self.weights) if self.step else {})


def evaluate_exported(
    spec: Experiment,
    inputs: Mapping[str, Path],
    exported: Sequence[ExportedPolicy],
    *,
    run_id: str,
    fingerprint: str,
    fence: Fence,
) -> None:
    """Measures policies, and gives each its result and its rows as soon as it is measured. All ranks call it.

    Weights that were measured already, under an attempt of training that a later one has superseded, only get their
    rows anew. Weights that are exported again meanwhile get no result: they are measured once more.

    Args:
        spec: the run's, its ranks and launcher those of this process.
        inputs: data, base and run, as of the evaluate stage.
        fingerprint: of the evaluate stage.
        fence: of the run.
    Raises:
        SpecError: see `evaluation_inputs`.
        SupersededError: the run was taken over.
    """
    results = ConcurrentResults(inputs["run"], fingerprint)
    by_step = {policy.step: policy for policy in exported}
    with evaluating_ranks(spec) as device:
        first = ranks.rank() == 0
        inodes = {policy.step: policy.inode for policy in exported} if first else {}
        policies = ranks.from_first([policy.measured() for policy in exported] if first else [])
        known = ranks.from_first([each.step for each in policies if results.summary(each) is not None] if first else [])
        for step in known if first else ():
            _record_again(results, by_step[step], run_id, fence)
        start = time.monotonic()
        place = Place.of_run(inputs["run"], device.type)
        missing = [policy for policy in policies if policy.step not in known]
        for policy, answered in policies_answers(missing, spec, inputs, device, place=place):
            if not first:
                continue
            step = policy.step
            aside = results.path(step).with_name(f".step-{step:06}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            writer = SegmentWriter(aside, run_id, attempt=1)
            recorder = Recorder(writer, spec.evaluation, run_id, fingerprint, worst=spec.worst_at)
            summary = recorder.record(step, answered)
            recorder.writer.flush()
            fence.check()
            if by_step[step].inode != inodes[step]:
                print(f"step {step}: exported again meanwhile; to be measured again", flush=True)
                continue
            results.publish(aside, policy, by_step[step].attempt, summary)
            results.record(step, run_id, by_step[step].attempt)
            print(f"step {step}: done in {time.monotonic() - start:.1f} s", flush=True)
            start = time.monotonic()


def _record_again(results: ConcurrentResults, policy: ExportedPolicy, run_id: str, fence: Fence) -> None:
    """Puts a result's rows on record as rows of the attempt that exported its weights last, where they are not yet."""
    if results.attempt(policy.step) != policy.attempt:
        fence.check()
        results.note_attempt(policy.step, policy.attempt)
        results.record(policy.step, run_id, policy.attempt)
