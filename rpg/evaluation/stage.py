"""The evaluate stage: chosen checkpoints answer the evaluation sets; rows and a summary come out.

One process does it, or the ranks that a launcher has started: each answers a share of the problems, the first writes.
"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpg.evaluation.answers import answers
from rpg.evaluation.inputs import evaluation_inputs
from rpg.evaluation.records import Recorder
from rpg.processes import ranks
from rpg.processes.device import choose_device, use_threads
from rpg.recording.segments import SegmentWriter
from rpg.rewards import open_scorer
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy to measure."""

    step: int
    """0: the base model."""
    weights: Path


def evaluate(spec: Experiment, inputs: dict[str, Path], out: Path, *, run_id: str, fingerprint: str) -> None:
    """Fills `out` with segments of evaluations and evaluation_samples, and summary.json. All ranks call it.

    Args:
        spec: the run's.
        inputs: data, base and run: the staged data, the base model, the run's directory.
        out: a directory. What it holds is removed: a launcher that has lost a rank starts all of them again.
        run_id: of the run.
        fingerprint: of this stage; every row carries it.
    Raises:
        SpecError: see `evaluation_inputs`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = choose_device(spec.resources)
    with ranks.joined(device.type):
        use_threads(spec.resources, processes=ranks.on_this_machine())
        if ranks.rank() == 0:
            shutil.rmtree(out)
            out.mkdir(exist_ok=True)  # another rank may have been first
        recorder = Recorder(SegmentWriter(out, run_id, attempt=1), spec.evaluation, run_id, fingerprint)
        summary = _measured(spec, inputs, recorder, device)
        if ranks.rank() == 0:
            (out / "summary.json").write_text(json.dumps({"checkpoints": summary}, indent=1))


def _measured(
    spec: Experiment, inputs: dict[str, Path], recorder: Recorder, device: torch.device
) -> list[dict[str, Any]]:
    """Has each chosen checkpoint answer. Rank 0 records the answers and returns the summary; the others return none."""
    from transformers import AutoTokenizer

    first = ranks.rank() == 0
    tokenizer = AutoTokenizer.from_pretrained(inputs["base"])
    asked = evaluation_inputs(spec, inputs["data"], inputs["base"], tokenizer)
    checkpoints = chosen(spec, inputs["base"], inputs.get("run"))
    summary: list[dict[str, Any]] = []
    if not asked.problems:
        print("there is no evaluation set: nothing to measure", flush=True)
        return summary
    with open_scorer(spec.reward) as scorer:
        for checkpoint, sampler in _samplers(spec, checkpoints, asked.max_length, device):
            start = time.monotonic()
            answered = answers(spec, asked, tokenizer, sampler, scorer, device)
            if first:
                summary += recorder.record(checkpoint.step, answered)
                recorder.writer.flush()
                print(f"step {checkpoint.step}: done in {time.monotonic() - start:.1f} s", flush=True)
    return summary


def chosen(spec: Experiment, base: Path, run: Path | None) -> list[MeasuredPolicy]:
    """The checkpoints that the spec asks for, by step."""
    wanted, every = spec.evaluation.checkpoints, spec.training.export_every_steps
    weights = json.loads((run / "train.json").read_text())["weights"] if run is not None else {}
    trained = [MeasuredPolicy(int(step), run / path) for step, path in weights.items()] if run is not None else []
    trained.sort(key=lambda checkpoint: checkpoint.step)
    # Weights may have been exported for another reason: as the best so far.
    on_the_way = [each for each in trained[:-1] if wanted == "all" and every and each.step % every == 0]
    return [*([] if wanted == "final" else [MeasuredPolicy(0, base)]), *on_the_way, *trained[-1:]]


def _samplers(
    spec: Experiment, checkpoints: Sequence[MeasuredPolicy], max_length: int, device: torch.device
) -> Iterator[tuple[MeasuredPolicy, Sampler]]:
    """One engine, holding each checkpoint's weights in turn."""
    from transformers import AutoModelForCausalLM

    settings = SamplerSettings(
        weights_dir=checkpoints[0].weights,
        device=device,
        max_length=max_length,
        seed=spec.evaluation.seed,
    )
    sampler = open_sampler(spec.rollout, settings)
    try:
        yield checkpoints[0], sampler
        for version, checkpoint in enumerate(checkpoints[1:], sampler.policy_version + 1):
            model = AutoModelForCausalLM.from_pretrained(checkpoint.weights, dtype="auto")
            sampler.load_weights(model.named_parameters(), policy_version=version)
            del model
            yield checkpoint, sampler
    finally:
        sampler.close()
