"""The evaluate stage: chosen checkpoints answer the evaluation sets; rows and a summary come out."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpg.evaluation.answers import answers
from rpg.evaluation.inputs import evaluation_inputs
from rpg.evaluation.records import Recorder
from rpg.processes.device import choose_device, use_threads
from rpg.recording.segments import SegmentWriter
from rpg.rewards import open_scorer
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from specs.schema.evaluation import Evaluation
from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy to measure."""

    step: int
    """0: the base model."""
    weights: Path


def evaluate(spec: Experiment, inputs: dict[str, Path], out: Path, *, run_id: str, fingerprint: str) -> None:
    """Fills `out` with segments of evaluations and evaluation_samples, and summary.json.

    Args:
        spec: the run's.
        inputs: data, base and run: the staged data, the base model, the run's directory.
        out: an empty directory.
        run_id: of the run.
        fingerprint: of this stage; every row carries it.
    Raises:
        SpecError: see `evaluation_inputs`.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    use_threads(spec.resources)
    tokenizer = AutoTokenizer.from_pretrained(inputs["base"])
    asked = evaluation_inputs(spec, inputs["data"], inputs["base"], tokenizer)
    checkpoints = chosen(spec.evaluation, inputs["base"], inputs.get("run"))
    recorder = Recorder(SegmentWriter(out, run_id, attempt=1), spec.evaluation, run_id, fingerprint)
    device = choose_device(spec.resources)
    summary: list[dict[str, Any]] = []
    if asked.problems:
        with open_scorer(spec.reward) as scorer:
            for checkpoint, sampler in _samplers(spec, checkpoints, asked.max_length, device):
                start = time.monotonic()
                answered = answers(spec, asked, tokenizer, sampler, scorer, device)
                summary += recorder.record(checkpoint.step, answered)
                recorder.writer.flush()
                print(f"step {checkpoint.step}: done in {time.monotonic() - start:.1f} s", flush=True)
    else:
        print("there is no evaluation set: nothing to measure", flush=True)
    (out / "summary.json").write_text(json.dumps({"checkpoints": summary}, indent=1))


def chosen(evaluation: Evaluation, base: Path, run: Path | None) -> list[MeasuredPolicy]:
    """The checkpoints that the spec asks for, by step."""
    weights = json.loads((run / "train.json").read_text())["weights"] if run is not None else {}
    trained = [MeasuredPolicy(int(step), run / path) for step, path in weights.items()] if run is not None else []
    trained.sort(key=lambda checkpoint: checkpoint.step)
    if evaluation.checkpoints == "all":
        return [MeasuredPolicy(0, base), *trained]
    return trained[-1:] if evaluation.checkpoints == "final" else [MeasuredPolicy(0, base), *trained[-1:]]


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
