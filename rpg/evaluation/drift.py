"""Measures how far a policy has moved from the policy before training, with intervals.

drift/reverse is KL(policy || policy before training), from responses that the policy sampled; drift/forward is
KL(policy before training || policy), from responses that the policy before training sampled. Both are of whole
responses, up to the longest that an evaluation allows: the mean log-ratio of a response's sampled tokens. It is
unbiased; its estimate of a small divergence may be negative. Per token it is the sum over all responses divided by
their tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rpg.evaluation.measures import EvaluationMeasure, ratio_values
from rpg.evaluation.sequences import TokenSequence, decode_sequences
from rpg.messages import message
from rpg.processes import ranks
from rpg.recording.run_directory import RunDirectory
from rpg.statistics.intervals import mean_interval
from rpg.types import Problem

Direction = Literal["reverse", "forward"]
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")
LogprobsOf = Callable[[Sequence[TokenSequence]], list[NDArray[np.float64]]]
"""Function that returns the logprobs of each sequence's scored tokens under one policy, nats."""


@message
@dataclass(frozen=True, slots=True)
class SampledResponse:
    """A response to a problem that a policy sampled at temperature 1."""

    problem: Problem
    sample: int
    """Index among the problem's responses, from 0."""
    sequences: tuple[TokenSequence, ...]


def keep_responses(run: RunDirectory, responses: Sequence[SampledResponse]) -> None:
    """Stores responses of the policy before training in the run's directory. All ranks call it; rank 0 writes."""
    if ranks.rank() == 0:
        run.keep_initial_responses(
            [
                {
                    "dataset": each.problem.dataset,
                    "problem_id": each.problem.problem_id,
                    "sample": each.sample,
                    "sequences": [[part.token_ids, part.scored] for part in each.sequences],
                }
                for each in responses
            ]
        )


def kept_responses(run: RunDirectory, problems: Iterable[Problem]) -> list[SampledResponse]:
    """Returns the stored responses to these problems; empty if they belong to another evaluate stage, or if none are
    stored. All ranks call it."""
    kept = ranks.from_first(run.initial_responses() if ranks.rank() == 0 else [])
    known = {(problem.dataset, problem.problem_id): problem for problem in problems}
    return [
        SampledResponse(
            known[fields["dataset"], fields["problem_id"]], fields["sample"], decode_sequences(fields["sequences"])
        )
        for fields in kept
        if (fields["dataset"], fields["problem_id"]) in known
    ]


@dataclass(frozen=True, slots=True)
class DriftSample:
    """A response under the policy and under the policy before training."""

    problem: Problem
    sample: int
    direction: Direction
    """reverse: the policy sampled the response. forward: the policy before training did."""
    num_tokens: int
    """Number of sampled tokens of the response."""
    logprob: float
    """Logprob of these tokens under the policy, nats."""
    initial_logprob: float
    """Logprob of these tokens under the policy before training, nats."""

    @property
    def divergence(self) -> float:
        """Returns the response's part of the divergence, nats: the log-ratio of the policy that sampled it to the other
        policy."""
        difference = self.logprob - self.initial_logprob
        return difference if self.direction == "reverse" else -difference


def response_logprobs(responses: Sequence[SampledResponse], logprobs: LogprobsOf) -> list[float]:
    """Returns the logprob of each response's sampled tokens under a policy, nats."""
    of_sequences = iter(logprobs([sequence for each in responses for sequence in each.sequences]))
    return [sum(float(next(of_sequences).sum()) for _ in each.sequences) for each in responses]


def drift_samples(
    responses: Sequence[SampledResponse],
    direction: Direction,
    policy_logprobs: Sequence[float],
    initial_logprobs: Sequence[float],
) -> list[DriftSample]:
    """Returns the responses with their logprobs under both policies."""
    return [
        DriftSample(
            each.problem, each.sample, direction, sum(part.num_scored for part in each.sequences), policy, initial
        )
        for each, policy, initial in zip(responses, policy_logprobs, initial_logprobs, strict=True)
    ]


def drift_measures(
    samples: Iterable[DriftSample], *, confidence: float, clusters: bool = False
) -> list[EvaluationMeasure]:
    """Returns drift per token and per response in each direction that has samples, with intervals for new problems.

    Args:
        samples: the responses to one set.
        confidence: level of the intervals, in (0, 1).
        clusters: whether problems of one cluster are not independent.
    """
    found, samples = list[EvaluationMeasure](), list(samples)
    for direction in DIRECTIONS:
        by_problem: dict[str, list[DriftSample]] = {}
        for each in samples:
            if each.direction == direction:
                by_problem.setdefault(each.problem.problem_id, []).append(each)
        if not by_problem:
            continue
        problems = [group[0].problem for group in by_problem.values()]
        labels = [problem.cluster or problem.problem_id for problem in problems] if clusters else None
        divergence = np.array([np.mean([each.divergence for each in group]) for group in by_problem.values()])
        tokens = np.array([np.mean([each.num_tokens for each in group]) for group in by_problem.values()])
        values = {f"drift/{direction}": ratio_values(divergence, tokens), f"drift/{direction}_response": divergence}
        for metric, of_problems in values.items():
            interval = mean_interval(of_problems, confidence=confidence, clusters=labels, shares=False)
            found.append(EvaluationMeasure(metric, interval.value, interval.low, interval.high))
    return found


def drift_figures(samples: Iterable[DriftSample]) -> dict[str, float]:
    """Returns drift per token and per response over all sets, by metric, for each direction that has samples."""
    found: dict[str, float] = {}
    samples = list(samples)
    for direction in DIRECTIONS:
        if own := [each for each in samples if each.direction == direction]:
            total = sum(each.divergence for each in own)
            found[f"drift/{direction}"] = total / sum(each.num_tokens for each in own)
            found[f"drift/{direction}_response"] = total / len(own)
    return found


def no_drift() -> list[EvaluationMeasure]:
    """Returns the measures of the policy before training itself."""
    names = [f"drift/{direction}{of}" for direction in DIRECTIONS for of in ("", "_response")]
    return [EvaluationMeasure(name, 0.0, 0.0, 0.0) for name in names]
