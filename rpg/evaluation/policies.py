"""Samples answers to the evaluation sets from policies on disk, one policy after the other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rpg.data.chat_template import choose_template
from rpg.evaluation.answers import answers, drift_responses
from rpg.evaluation.drift import (
    Direction,
    DriftSample,
    LogprobsOf,
    SampledResponse,
    drift_samples,
    keep_responses,
    kept_responses,
    response_logprobs,
)
from rpg.evaluation.inputs import evaluation_inputs
from rpg.evaluation.kept import KeptAnswers
from rpg.evaluation.likelihood import ScoredSet
from rpg.evaluation.records import Answered, Evaluated
from rpg.evaluation.results import MeasuredPolicy
from rpg.evaluation.sequences import token_logprobs_of
from rpg.learner.passes import frozen_passes
from rpg.pretrained import model_of, tokenizer_of
from rpg.processes import ranks
from rpg.processes.device import choose_device, use_threads
from rpg.processes.numa import bind_to_gpu
from rpg.recording.run_directory import RunDirectory
from rpg.rewards import Place, open_scorers
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from specs.schema.experiment import Experiment


@contextmanager
def evaluating_ranks(spec: Experiment) -> Iterator[torch.device]:
    """Makes this process, within the block, one of the ranks that evaluate. Yields its device."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = choose_device(spec.resources)
    with ranks.joined(device.type):
        use_threads(spec.resources, processes=ranks.on_this_machine())
        bind_to_gpu(device)
        yield device


def policies_results(
    policies: Sequence[MeasuredPolicy],
    spec: Experiment,
    inputs: Mapping[str, Path],
    device: torch.device,
    kept: Path | None = None,
    place: Place | None = None,
) -> Iterator[tuple[MeasuredPolicy, Evaluated]]:
    """Yields each policy with its results, or nothing if there are no problems. All ranks iterate over it.

    The sampler answers for all policies before the learner's passes compute logprobs, so their memory is never needed
    at once.

    Args:
        inputs: data and base: the staged data and the base model.
        kept: directory that stores answers until the stage has its result, see `KeptAnswers`; None stores none.
        place: name of the place where responses are scored.
    Raises:
        SpecError: see `evaluation_inputs`.
    """
    if not policies:
        return
    tokenizer = tokenizer_of(inputs["base"])
    choose_template(tokenizer, spec.data.prompt)
    asked = evaluation_inputs(spec, inputs["data"], inputs["base"], tokenizer)
    if not asked.exist:
        print("there is no evaluation set: nothing to measure", flush=True)
        return
    drifts = spec.measures_drift and bool(asked.problems) and any(policy.step for policy in policies)
    base, run = MeasuredPolicy(0, inputs["base"]), RunDirectory(inputs["run"]) if "run" in inputs else None
    answered: dict[int, list[list[Answered]]] = {}
    before = kept_responses(run, asked.problems) if drifts and run else []
    responses: dict[int, list[SampledResponse]] = {0: before} if before else {}
    # The engine always opens on the same weights, regardless of what is left to measure: they may set its precision.
    opened_on = policies[0].weights if spec.evaluation.checkpoints == "final" else inputs["base"]
    lacks_base = drifts and not before and all(policy.step for policy in policies)
    sampled = [*policies, *([base] if lacks_base else ())] if asked.problems else []
    with open_scorers(spec, place) as scorer:
        for policy, sampler in _samplers(spec, sampled, opened_on, asked.max_length, device):
            if policy in policies:
                kept_here = KeptAnswers.of(policy, kept) if kept else None
                answered[policy.step] = answers(spec, asked, tokenizer, sampler, scorer, device, kept_here)
            if drifts and policy.step not in responses:
                own = answered.get(policy.step)
                responses[policy.step] = drift_responses(spec, asked, tokenizer, sampler, device, own)
    if lacks_base and run and (run.path / "inputs.json").is_file():
        keep_responses(run, responses[0])
    initial: dict[int, list[float]] = {}
    if drifts:
        with logprobs_under(base.weights, spec, device) as logprobs:
            initial = {step: response_logprobs(of_policy, logprobs) for step, of_policy in responses.items()}
    for policy in policies:
        drift: list[DriftSample] = []
        scored: list[ScoredSet] = []
        steps: dict[Direction, int] = {"reverse": policy.step, "forward": 0} if drifts and policy.step else {}
        if asked.unanswered or steps:
            with logprobs_under(policy.weights, spec, device) as logprobs:
                scored = [found for each in asked.unanswered for found in each.scored(logprobs)]
                for direction, step in steps.items():
                    of_policy = response_logprobs(responses[step], logprobs)
                    drift += drift_samples(responses[step], direction, of_policy, initial[step])
        yield policy, Evaluated(answered.get(policy.step, []), drift if spec.measures_drift else None, scored)


@contextmanager
def logprobs_under(weights: Path, spec: Experiment, device: torch.device) -> Iterator[LogprobsOf]:
    """Yields, for use within the block, a function that computes logprobs of tokens under a policy on disk with the
    learner's passes. Each rank holds the whole model."""
    whole = {"zero_stage": 0, "sequence_parallel_size": 1, "packing": False}
    held = [frozen_passes(weights, spec.training.model_copy(update=whole), temperature=1.0, device=device)]
    try:
        yield lambda sequences: token_logprobs_of(
            sequences, held[0], device, most_tokens=spec.training.microbatch_tokens
        )
    finally:
        held.clear()  # frees the model, though the caller may still hold the function


def _samplers(
    spec: Experiment, policies: Sequence[MeasuredPolicy], opened_on: Path, max_length: int, device: torch.device
) -> Iterator[tuple[MeasuredPolicy, Sampler]]:
    """Yields the same engine for each policy, loaded with that policy's weights. Opens no engine without policies."""
    if not policies:
        return
    settings = SamplerSettings(
        weights_dir=opened_on,
        device=device,
        max_length=max_length,
        seed=spec.evaluation.seed,
    )
    sampler = open_sampler(spec.sampling.model_copy(update={"replay_routing": False}), settings)
    held = opened_on
    try:
        for policy in policies:
            if policy.weights != held:
                model = model_of(policy.weights, dtype="auto")
                sampler.load_weights(model.named_parameters(), policy_version=sampler.policy_version + 1)
                del model
            held = policy.weights
            yield policy, sampler
    finally:
        sampler.close()
