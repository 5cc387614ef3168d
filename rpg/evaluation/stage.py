"""The evaluate stage: chosen checkpoints answer the evaluation sets; rows and a summary come out."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpg.evaluation.inputs import EvaluationInputs, evaluation_inputs
from rpg.evaluation.records import Answered, Recorder
from rpg.processes.device import choose_device, use_threads
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Scorer, open_scorer
from rpg.rollouters.rollouter import SeededPrompt, check_rollouts
from rpg.rollouters.scoring import Scoring
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.types import Problem, Sampling
from specs.schema.evaluation import Evaluation
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    summary: list[dict[str, Any]] = []
    if asked.problems:
        with open_scorer(spec.reward) as scorer:
            for checkpoint, sampler in _samplers(spec, checkpoints, asked.max_length):
                start = time.monotonic()
                answered = list(_answers(spec, asked, tokenizer, sampler, scorer))
                summary += recorder.record(checkpoint.step, answered)
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


def _answers(
    spec: Experiment,
    asked: EvaluationInputs,
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    scorer: Scorer,
) -> Iterator[list[Answered]]:
    """Each problem's responses, scored, in the order of the problems."""
    samples = spec.evaluation.samples_per_problem
    sampling = Sampling(
        temperature=spec.evaluation.temperature,
        top_p=spec.evaluation.top_p,
        max_response_length=asked.max_response_length,
        top_k=spec.evaluation.top_k,
        stop=spec.evaluation.stop,
    )
    # Large enough to keep the engine full, small enough that a progress line comes now and then.
    size = max(1, 8 * spec.rollout.max_concurrent // samples)
    for first in range(0, len(asked.problems), size):
        problems = asked.problems[first : first + size]
        prompts = [
            SeededPrompt(problem, tuple(token_ids), _seed(spec.evaluation.seed, problem))
            for problem, token_ids in zip(problems, asked.prompts[first : first + size], strict=True)
        ]
        owners = [problem for problem in problems for _ in range(samples)]
        scoring = Scoring(tokenizer, scorer, owners)
        with memory_of_sampler(spec.rollout, choose_device(spec.resources)):
            groups = spec.rollout.rollouter.generate(
                prompts,
                sampler,
                tokenizer,
                group_size=samples,
                sampling=sampling,
                on_response=scoring.begin,
            )
        check_rollouts(groups, prompts, group_size=samples, sampling=sampling)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        answered = [
            Answered(problem, index % samples, response, rollout, score)
            for index, (problem, response, rollout, score) in enumerate(
                zip(owners, scoring.texts(), rollouts, scoring.scores(), strict=True)
            )
        ]
        print(f"{first + len(problems)} of {len(asked.problems)} problems answered", flush=True)
        yield from (answered[at : at + samples] for at in range(0, len(answered), samples))


def _samplers(
    spec: Experiment, checkpoints: Sequence[MeasuredPolicy], max_length: int
) -> Iterator[tuple[MeasuredPolicy, Sampler]]:
    """One engine, holding each checkpoint's weights in turn."""
    from transformers import AutoModelForCausalLM

    settings = SamplerSettings(
        weights_dir=checkpoints[0].weights,
        device=choose_device(spec.resources),
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


def _seed(seed: int, problem: Problem) -> int:
    """The same for a problem at every checkpoint and in any company: what differs then is the policy."""
    text = f"{seed} {problem.dataset} {problem.problem_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
