"""Measures exported checkpoints during training, in separate ranks."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rpg.evaluation.policies import evaluating_ranks, policies_results
from rpg.evaluation.records import Recorder
from rpg.evaluation.results import ConcurrentResults, MeasuredPolicy, digests_of
from rpg.processes import ranks
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Place
from specs.machine.fence import Fence
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class ExportedPolicy:
    """The weights of one export of training, or the base model."""

    step: int
    """Step of the export; 0 is the base model."""
    weights: Path
    attempt: int
    """Number of the training attempt that exported them; arbitrary for the base model."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the policy from plain data."""
        return cls(int(fields["step"]), Path(fields["weights"]), int(fields["attempt"]))

    @property
    def inode(self) -> int:
        """Inode of the directory. A new export has another one."""
        return self.weights.stat().st_ino

    def measured(self) -> MeasuredPolicy:
        """Returns the measured checkpoint as it is on disk now."""
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
    """Measures policies, and publishes result and rows of each as soon as it is measured. All ranks call it.

    If weights were already measured under an attempt of training that a later one superseded, only their rows are
    recorded again. Weights that are exported again during the measurement get no result: they are measured once more.

    Args:
        spec: the run's spec, with the ranks and launcher of this process.
        inputs: data, base and run, as in the evaluate stage.
        fingerprint: fingerprint of the evaluate stage.
        fence: the run's fence.
    Raises:
        SpecError: see `evaluation_inputs`.
        SupersededError: another trainer took over the run.
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
        for policy, evaluated in policies_results(missing, spec, inputs, device, place=place):
            if not first:
                continue
            step = policy.step
            aside = results.path(step).with_name(f".step-{step:06}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            writer = SegmentWriter(aside, run_id, attempt=1)
            recorder = Recorder(writer, spec.evaluation, run_id, fingerprint, worst=spec.worst_at)
            summary = recorder.record(step, evaluated)
            recorder.writer.flush()
            fence.check()
            if by_step[step].inode != inodes[step]:
                print(f"step {step}: exported again during the measurement; will be measured again", flush=True)
                continue
            results.publish(aside, policy, by_step[step].attempt, summary)
            results.record(step, run_id, by_step[step].attempt)
            print(f"step {step}: done in {time.monotonic() - start:.1f} s", flush=True)
            start = time.monotonic()


def _record_again(results: ConcurrentResults, policy: ExportedPolicy, run_id: str, fence: Fence) -> None:
    """Records a result's rows as rows of the last attempt that exported its weights, unless that is already done."""
    if results.attempt(policy.step) != policy.attempt:
        fence.check()
        results.note_attempt(policy.step, policy.attempt)
        results.record(policy.step, run_id, policy.attempt)
