"""The evaluate stage: samples answers of chosen checkpoints to the evaluation sets, and writes rows and a summary.

It runs in one process, or in the ranks that a launcher starts: each rank answers a share of the problems, the first one
writes. Results measured during training are reused, and so are answers that an interrupted attempt has left.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from rpg.evaluation.policies import evaluating_ranks, policies_results
from rpg.evaluation.records import Recorder
from rpg.evaluation.results import ConcurrentResults, MeasuredPolicy
from rpg.processes import ranks
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Place
from specs.schema.experiment import Experiment


def evaluate(
    spec: Experiment,
    inputs: dict[str, Path],
    out: Path,
    *,
    run_id: str,
    fingerprint: str,
    kept: Path | None = None,
) -> None:
    """Fills `out` with segments of evaluations and evaluation_samples, and summary.json. All ranks call it.

    Args:
        spec: the run's spec.
        inputs: data, base and run: the staged data, the base model, the run's directory.
        out: a directory. Its contents are removed first: a launcher that has lost a rank restarts all of them.
        run_id: id of the run.
        fingerprint: fingerprint of this stage; every row carries it.
        kept: a directory in that of the run for the answers so far, which the next attempt reuses; deleted at the end.
            With None the next attempt starts from scratch.
    Raises:
        SpecError: see `evaluation_inputs`.
    """
    with evaluating_ranks(spec) as device:
        first = ranks.rank() == 0
        if first:
            shutil.rmtree(out)
            out.mkdir(exist_ok=True)  # another rank may have been first
        writer = SegmentWriter(out, run_id, attempt=1)
        recorder = Recorder(writer, spec.evaluation, run_id, fingerprint, worst=spec.worst_at)
        policies = chosen(spec, inputs["base"], inputs.get("run"))
        summaries = ranks.from_first(_taken(policies, inputs.get("run"), fingerprint, out) if first else {})
        start = time.monotonic()
        missing = [policy for policy in policies if policy.step not in summaries]
        kept_here = kept / fingerprint[:16] if kept else None
        place = Place.of_run(kept.parent, device.type) if kept else None
        for policy, evaluated in policies_results(missing, spec, inputs, device, kept_here, place):
            if first:
                summaries[policy.step] = recorder.record(policy.step, evaluated)
                recorder.writer.flush()
                print(f"step {policy.step}: done in {time.monotonic() - start:.1f} s", flush=True)
            start = time.monotonic()
        if first:
            summary = [part for step in sorted(summaries) for part in summaries[step]]
            (out / "summary.json").write_text(json.dumps({"checkpoints": summary}, indent=1), encoding="utf-8")
            if kept:
                shutil.rmtree(kept, ignore_errors=True)


def _taken(
    policies: list[MeasuredPolicy], run: Path | None, fingerprint: str, out: Path
) -> dict[int, list[dict[str, Any]]]:
    """Copies the rows of results that were measured during training. Returns their parts of the summary, by step."""
    results = ConcurrentResults(run, fingerprint) if run is not None else None
    summaries: dict[int, list[dict[str, Any]]] = {}
    for policy in policies:
        summary = results.summary(policy) if results else None
        if results and summary is not None:
            results.copy_rows(policy.step, out)
            summaries[policy.step] = summary
            print(f"step {policy.step}: was measured during training", flush=True)
    return summaries


def chosen(spec: Experiment, base: Path, run: Path | None) -> list[MeasuredPolicy]:
    """Returns the checkpoints that the spec asks for, by step."""
    wanted, every = spec.evaluation.checkpoints, spec.training.export_every_steps
    trained = _exported(run) if run is not None else []
    # Weights may have been exported for another reason, such as being the best so far.
    on_the_way = [each for each in trained[:-1] if wanted == "all" and every and each.step % every == 0]
    return [*([] if wanted == "final" else [MeasuredPolicy(0, base)]), *on_the_way, *trained[-1:]]


def _exported(run: Path) -> list[MeasuredPolicy]:
    """Returns the weights that training has exported, by step."""
    trained = json.loads((run / "train.json").read_text(encoding="utf-8"))
    policies = []
    for step, path in trained["weights"].items():
        files = {name: entry for name, entry in trained.get("files", {}).items() if name.startswith(f"{path}/")}
        digests = {name.removeprefix(f"{path}/"): digest for name, digest in files.items()}
        policies.append(MeasuredPolicy(int(step), run / path, digests))
    return sorted(policies, key=lambda policy: policy.step)
