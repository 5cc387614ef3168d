"""Samples and scores a policy's answers to the evaluation sets, during training and after it."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rpg.evaluation.inputs import EvaluationInputs
from rpg.evaluation.kept import KeptAnswers
from rpg.evaluation.records import Answered
from rpg.processes import ranks
from rpg.rewards import Scorer
from rpg.rollouters.rollouter import SeededPrompt, check_rollouts
from rpg.rollouters.scoring import Scoring
from rpg.samplers.base import Sampler
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import own_samplers, samplers_of_ranks
from rpg.types import Problem, Sampling
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    samplers = samplers_of_ranks(spec.sampling)
    rank_of = [rank for rank, count in enumerate(samplers) for _ in range(count)]
    dealt = [rank_of[index % len(rank_of)] for index in range(len(asked.problems))]

    def make() -> list[list[Answered]]:
        share = asked.share([index for index, rank in enumerate(dealt) if rank == ranks.rank()])
        return list(_answers(spec, share, tokenizer, sampler, scorer, device, kept))

    parts = [iter(part) for part in ranks.gather_made(make, what="evaluation")]
    return [next(parts[rank]) for rank in dealt]


def _answers(
    spec: Experiment,
    asked: EvaluationInputs,
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    scorer: Scorer,
    device: torch.device,
    kept: KeptAnswers | None,
) -> Iterator[list[Answered]]:
    samples = spec.evaluation.samples_per_problem
    sampling = Sampling(
        temperature=spec.evaluation.temperature,
        top_p=spec.evaluation.top_p,
        max_response_length=asked.max_response_length,
        top_k=spec.evaluation.top_k,
        stop=spec.evaluation.stop,
    )

    def sample(problems: list[Problem], prompts: list[list[int]]) -> list[Answered]:
        seeded = [
            SeededPrompt(problem, tuple(token_ids), _seed(spec.evaluation.seed, problem))
            for problem, token_ids in zip(problems, prompts, strict=True)
        ]
        owners = [problem for problem in problems for _ in range(samples)]
        with_turns = spec.rollout.rollouter.gives_tokens
        scoring = Scoring(
            tokenizer, scorer, owners, group_size=samples, reward_at=spec.reward_at, with_turns=with_turns
        )
        with memory_of_sampler(spec.rollout, device):
            groups = spec.rollout.rollouter.generate(
                seeded,
                sampler,
                tokenizer,
                group_size=samples,
                sampling=sampling,
                on_response=scoring.begin,
            )
        check_rollouts(groups, seeded, group_size=samples, sampling=sampling)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return [
            Answered(
                problem, index % samples, response, len(rollout.rollout_logprobs), rollout.finish_reason, score, turns
            )
            for index, (problem, response, rollout, score, turns) in enumerate(
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

    # Large enough to keep the engine full, small enough for regular progress lines.
    size = max(1, 8 * spec.rollout.max_concurrent * len(own_samplers(spec.sampling)) // samples)
    for first in range(0, len(asked.problems), size):
        problems, prompts = asked.problems[first : first + size], asked.prompts[first : first + size]
        answered = kept.read(problems) if kept else None
        if answered is None:
            answered = sample(problems, prompts)
            if kept:
                kept.write(problems, answered)
        if ranks.rank() == 0:
            print(f"{first + len(problems)} of {len(asked.problems)} problems answered", flush=True)
        yield from (answered[at : at + samples] for at in range(0, len(answered), samples))


def _seed(seed: int, problem: Problem) -> int:
    """Returns a problem's seed, the same at every checkpoint and with any other problems: only the policy differs."""
    text = f"{seed} {problem.dataset} {problem.problem_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
