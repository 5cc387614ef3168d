"""Samples and scores a policy's answers to the evaluation sets, during training and after it."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from rpg.evaluation.drift import SampledResponse
from rpg.evaluation.inputs import EvaluationInputs
from rpg.evaluation.kept import KeptAnswers
from rpg.evaluation.records import Answered
from rpg.evaluation.sequences import sequences_of
from rpg.processes import ranks
from rpg.rewards import Scorer
from rpg.rollouters.rollouter import SeededPrompt, check_rollouts
from rpg.rollouters.scoring import Scoring
from rpg.samplers.base import Sampler
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import own_samplers, samplers_of_ranks
from rpg.types import OnResponse, Problem, RolloutGroup, Sampling
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


def answers(
    spec: Experiment,
    asked: EvaluationInputs,
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    scorer: Scorer,
    device: torch.device,
    kept: KeptAnswers | None = None,
) -> list[list[Answered]]:
    """Returns each problem's scored responses, in the order of the problems.

    All ranks call it and get all responses; ranks with a sampler share the work.

    A response depends only on the policy, the problem and `evaluation.seed`. Nothing else is drawn, so the random state
    of this process is unchanged.

    Args:
        sampler: holds the policy's weights and is idle.
        device: device of the sampler.
        kept: store of the policy's answers from earlier attempts, which also receives the answers of this one.
    Raises:
        SamplerOutOfMemoryError: the sampler ran out of memory.
        RuntimeError: another rank failed.
    """
    return _shared(spec, asked, lambda share: list(_answers(spec, share, tokenizer, sampler, scorer, device, kept)))


def drift_responses(
    spec: Experiment,
    asked: EvaluationInputs,
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    device: torch.device,
    answered: Sequence[list[Answered]] | None = None,
) -> list[SampledResponse]:
    """Returns responses that the sampler draws from the policy's full distribution, by problem: at temperature 1,
    without top_p or top_k.

    If the spec has the answers drawn that way, the result is these answers; otherwise as many further responses are
    sampled. All
    ranks call it and get all responses.

    Args:
        answered: the policy's answers; None if it has not answered.
    """
    samples = spec.evaluation.samples_per_problem
    if answered is not None and spec.evaluation.samples_policy:
        return [SampledResponse(each.problem, each.sample, each.sequences) for group in answered for each in group]
    sampling = replace(_sampling(spec, asked), temperature=1.0, top_p=1.0, top_k=0)

    def sample(share: EvaluationInputs) -> list[list[SampledResponse]]:
        found: list[list[SampledResponse]] = []
        for problems, prompts in _parts(spec, share):
            groups = _rollouts(spec, problems, prompts, tokenizer, sampler, sampling, device)
            found += [
                [
                    SampledResponse(problem, number, sequences_of(group.prompt_ids, rollout))
                    for number, rollout in enumerate(group.rollouts)
                ]
                for problem, group in zip(problems, groups, strict=True)
            ]
        return found

    drawn = _shared(spec, asked, sample)
    assert all(len(group) == samples for group in drawn)
    return [each for group in drawn for each in group]


def _shared(spec: Experiment, asked: EvaluationInputs, make: Callable[[EvaluationInputs], list[T]]) -> list[T]:
    """Returns the result of `make` for each problem, in their order. The ranks with a sampler share the work."""
    samplers = samplers_of_ranks(spec.sampling)
    rank_of = [rank for rank, count in enumerate(samplers) for _ in range(count)]
    dealt = [rank_of[index % len(rank_of)] for index in range(len(asked.problems))]

    def of_rank() -> list[T]:
        return make(asked.share([index for index, rank in enumerate(dealt) if rank == ranks.rank()]))

    parts = [iter(part) for part in ranks.gather_made(of_rank, what="evaluation")]
    return [next(parts[rank]) for rank in dealt]


def _sampling(spec: Experiment, asked: EvaluationInputs) -> Sampling:
    return Sampling(
        temperature=spec.evaluation.temperature,
        top_p=spec.evaluation.top_p,
        max_response_length=asked.max_response_length,
        top_k=spec.evaluation.top_k,
        stop=spec.evaluation.stop,
    )


def _parts(spec: Experiment, asked: EvaluationInputs) -> Iterator[tuple[list[Problem], list[list[int]]]]:
    """Yields problems and prompts in parts that are large enough to keep the engine full and small enough for regular
    progress lines."""
    engines = len(own_samplers(spec.sampling))
    size = max(1, 8 * spec.rollout.max_concurrent * engines // spec.evaluation.samples_per_problem)
    for first in range(0, len(asked.problems), size):
        yield asked.problems[first : first + size], asked.prompts[first : first + size]


def _rollouts(
    spec: Experiment,
    problems: list[Problem],
    prompts: list[list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    sampling: Sampling,
    device: torch.device,
    on_response: OnResponse | None = None,
) -> list[RolloutGroup]:
    samples = spec.evaluation.samples_per_problem
    seeded = [
        SeededPrompt(problem, tuple(token_ids), _seed(spec.evaluation.seed, problem))
        for problem, token_ids in zip(problems, prompts, strict=True)
    ]
    with memory_of_sampler(spec.rollout, device):
        groups: list[RolloutGroup] = spec.rollout.rollouter.generate(
            seeded, sampler, tokenizer, group_size=samples, sampling=sampling, on_response=on_response
        )
    check_rollouts(groups, seeded, group_size=samples, sampling=sampling)
    return groups


def _answers(
    spec: Experiment,
    asked: EvaluationInputs,
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    scorer: Scorer,
    device: torch.device,
    kept: KeptAnswers | None,
) -> Iterator[list[Answered]]:
    samples, sampling = spec.evaluation.samples_per_problem, _sampling(spec, asked)
    keeps_tokens = spec.measures_drift and spec.evaluation.samples_policy

    def sample(problems: list[Problem], prompts: list[list[int]]) -> list[Answered]:
        owners = [problem for problem in problems for _ in range(samples)]
        with_turns = spec.rollout.rollouter.gives_tokens
        scoring = Scoring(
            tokenizer, scorer, owners, group_size=samples, reward_at=spec.reward_at, with_turns=with_turns
        )
        groups = _rollouts(spec, problems, prompts, tokenizer, sampler, sampling, device, scoring.begin)
        rollouts = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
        return [
            Answered(
                problem,
                index % samples,
                response,
                len(rollout.rollout_logprobs),
                rollout.finish_reason,
                score,
                turns,
                sequences_of(prompt_ids, rollout) if keeps_tokens else (),
            )
            for index, (problem, response, (prompt_ids, rollout), score, turns) in enumerate(
                zip(
                    owners,
                    scoring.texts(),
                    rollouts,
                    scoring.scores(),
                    scoring.turns(len(owners)) or [()] * len(owners),
                    strict=True,
                )
            )
        ]

    done = 0
    for problems, prompts in _parts(spec, asked):
        answered = kept.read(problems) if kept else None
        if answered is None:
            answered = sample(problems, prompts)
            if kept:
                kept.write(problems, answered)
        if ranks.rank() == 0:
            done += len(problems)
            print(f"{done} of {len(asked.problems)} problems answered", flush=True)
        yield from (answered[at : at + samples] for at in range(0, len(answered), samples))


def _seed(seed: int, problem: Problem) -> int:
    """Returns a problem's seed. It is the same at every checkpoint and does not depend on the other problems, so that
    only the policy differs."""
    text = f"{seed} {problem.dataset} {problem.problem_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
