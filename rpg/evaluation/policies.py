"""Lets policies on disk answer the evaluation sets, one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rpg.data.chat_template import choose_template
from rpg.evaluation.answers import answers
from rpg.evaluation.inputs import evaluation_inputs
from rpg.evaluation.kept import KeptAnswers
from rpg.evaluation.records import Answered
from rpg.evaluation.results import MeasuredPolicy
from rpg.pretrained import model_of, tokenizer_of
from rpg.processes import ranks
from rpg.processes.device import choose_device, use_threads
from rpg.processes.numa import bind_to_gpu
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


def policies_answers(
    policies: Sequence[MeasuredPolicy],
    spec: Experiment,
    inputs: Mapping[str, Path],
    device: torch.device,
    kept: Path | None = None,
    place: Place | None = None,
) -> Iterator[tuple[MeasuredPolicy, list[list[Answered]]]]:
    """Yields each policy with its answers, a list per problem. All ranks iterate over it; empty without problems.

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
    if not asked.problems:
        print("there is no evaluation set: nothing to measure", flush=True)
        return
    # The engine always opens on the same weights, regardless of what is left to measure: they may set its precision.
    opened_on = policies[0].weights if spec.evaluation.checkpoints == "final" else inputs["base"]
    with open_scorers(spec, place) as scorer:
        for policy, sampler in _samplers(spec, policies, opened_on, asked.max_length, device):
            answers_of_policy = KeptAnswers.of(policy, kept) if kept else None
            yield policy, answers(spec, asked, tokenizer, sampler, scorer, device, answers_of_policy)


def _samplers(
    spec: Experiment, policies: Sequence[MeasuredPolicy], opened_on: Path, max_length: int, device: torch.device
) -> Iterator[tuple[MeasuredPolicy, Sampler]]:
    """Yields one engine, loaded with each policy's weights in turn."""
    settings = SamplerSettings(
        weights_dir=opened_on,
        device=device,
        max_length=max_length,
        seed=spec.evaluation.seed,
    )
    sampler = open_sampler(spec.sampling.model_copy(update={"replay_routing": False}), settings)
    try:
        for policy in policies:
            if policy.weights != opened_on:
                model = model_of(policy.weights, dtype="auto")
                sampler.load_weights(model.named_parameters(), policy_version=sampler.policy_version + 1)
                del model
            yield policy, sampler
    finally:
        sampler.close()
