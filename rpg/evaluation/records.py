"""Records an evaluation's results: a row for every response and measure, and the summary."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rpg.control.plateau import SetScores
from rpg.evaluation.drift import DriftSample, drift_measures, no_drift
from rpg.evaluation.likelihood import ScoredItem, ScoredSet
from rpg.evaluation.measures import EvaluationMeasure, mean_at_k, measures, score_measure
from rpg.evaluation.sequences import TokenSequence
from rpg.messages import message
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Score
from rpg.statistics.variance import THESE_WEIGHTS
from rpg.types import FinishReason, Problem, RecordedTurn
from specs.records import DriftSampleRow, EvaluationRow, EvaluationSampleRow, EvaluationScoreRow, Int32
from specs.schema.evaluation import Evaluation


@message
@dataclass(frozen=True, slots=True)
class Answered:
    """A response and its verdict."""

    problem: Problem
    sample: int
    """Index among the problem's responses, from 0."""
    response: str
    num_tokens: int
    """Number of sampled tokens of the response."""
    finish_reason: FinishReason
    score: Score
    turns: tuple[RecordedTurn, ...] = ()
    """Turns of the response; empty if no environment gives turns."""
    sequences: tuple[TokenSequence, ...] = ()
    """The response as sequences of tokens, each after its context; empty if nothing is measured on them."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of one policy."""

    answered: Sequence[list[Answered]]
    """Answers to each problem."""
    drift: Sequence[DriftSample] | None = None
    """Responses with which drift was measured; empty for the policy before training; None if it was not measured."""
    unanswered: Sequence[ScoredSet] = ()
    """Scores of the sets that are scored by likelihood."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """A recorder that passes an evaluation's rows to a writer, which puts them on disk at its next flush."""

    writer: SegmentWriter
    spec: Evaluation
    run_id: str
    fingerprint: str
    attempt: Int32 | None = None
    """See EvaluationRow."""
    worst: Callable[[str], float | None] = lambda _: None
    """Returns the least value of a set's reward, by the set's path in the spec; None if the reward is not graded or has
    no bound."""

    def record(self, step: int, evaluated: Evaluated) -> list[dict[str, Any]]:
        """Records one policy's results, and returns its part of the summary, set by set."""
        summary: list[dict[str, Any]] = []
        answered, drift = evaluated.answered, evaluated.drift
        self.writer.rows(self._drift_sample(step, each) for each in drift or ())
        for dataset in dict.fromkeys(group[0].problem.dataset for group in answered):
            groups = [group for group in answered if group[0].problem.dataset == dataset]
            problems = [group[0].problem for group in groups]
            measured, means = self._measures(groups, clusters_of(groups))
            if drift is not None:
                of_set = [each for each in drift if each.problem.dataset == dataset]
                named = any(each.cluster for each in problems)
                confidence = self.spec.confidence
                measured += drift_measures(of_set, confidence=confidence, clusters=named) if drift else no_drift()
            self.writer.rows(self._sample(step, each) for group in groups for each in group)
            worst = self.worst(problems[0].source)
            self.writer.rows(self._measure(step, dataset, len(groups), each, worst) for each in measured)
            summary.append(_summary(step, dataset, groups, measured, means))
            first = measured[0]
            _print(step, dataset, first)
        return summary + [self._unanswered(step, each) for each in evaluated.unanswered]

    def _unanswered(self, step: int, scored: ScoredSet) -> dict[str, Any]:
        """Records a set that is scored by likelihood, and returns its part of the summary."""
        measured = scored.measure(self.spec.confidence)
        self.writer.rows(self._score(step, scored, each) for each in scored.items)
        self.writer.rows([self._measure(step, scored.dataset, scored.size, measured, None, samples=1)])
        _print(step, scored.dataset, measured)
        return {
            "step": step,
            "dataset": scored.dataset,
            "num_problems": scored.size,
            "metrics": _values([measured]),
        }

    def _measures(
        self, groups: Sequence[list[Answered]], clusters: Sequence[object] | None
    ) -> tuple[list[EvaluationMeasure], list[float]]:
        """Returns every measure of a set's answers, the most important first, and that measure's value on each
        problem."""
        confidence = self.spec.confidence
        if any(each.score.correct is None for group in groups for each in group):
            scores = np.array([[each.score.value for each in group] for group in groups])
            return [score_measure(scores, confidence=confidence, clusters=clusters)], scores.mean(axis=1).tolist()
        correct = np.array([[bool(each.score.correct) for each in group] for group in groups])
        votes = [[each.score.extracted for each in group] for group in groups]
        measured = measures(correct, votes, confidence=confidence, seed=self.spec.seed, clusters=clusters)
        return measured, mean_at_k(correct).tolist()

    def _measure(
        self,
        step: int,
        dataset: str,
        num_problems: int,
        measure: EvaluationMeasure,
        worst: float | None,
        samples: int = 0,
    ) -> EvaluationRow:
        return EvaluationRow(
            run_id=self.run_id,
            fingerprint=self.fingerprint,
            step=Int32(step),
            dataset=dataset,
            **asdict(measure),
            num_problems=Int32(num_problems),
            samples_per_problem=Int32(samples or self.spec.samples_per_problem),
            attempt=self.attempt,
            worst=worst if measure.metric.startswith("score@") else None,
        )

    def _score(self, step: int, scored: ScoredSet, item: ScoredItem) -> EvaluationScoreRow:
        return EvaluationScoreRow(
            run_id=self.run_id,
            fingerprint=self.fingerprint,
            step=Int32(step),
            dataset=scored.dataset,
            metric=scored.metric,
            item_id=item.item_id,
            value=item.value,
            num_bytes=None if item.num_bytes is None else Int32(item.num_bytes),
            text=item.text,
            response=item.response,
            answer=item.answer,
            attempt=self.attempt,
        )

    def _drift_sample(self, step: int, sample: DriftSample) -> DriftSampleRow:
        return DriftSampleRow(
            run_id=self.run_id,
            fingerprint=self.fingerprint,
            step=Int32(step),
            dataset=sample.problem.dataset,
            problem_id=sample.problem.problem_id,
            sample=Int32(sample.sample),
            direction=sample.direction,
            logprob=sample.logprob,
            initial_logprob=sample.initial_logprob,
            num_tokens=Int32(sample.num_tokens),
            attempt=self.attempt,
            cluster=sample.problem.cluster or None,
        )

    def _sample(self, step: int, answered: Answered) -> EvaluationSampleRow:
        problem, score = answered.problem, answered.score
        return EvaluationSampleRow(
            run_id=self.run_id,
            fingerprint=self.fingerprint,
            step=Int32(step),
            dataset=problem.dataset,
            problem_id=problem.problem_id,
            sample=Int32(answered.sample),
            prompt=problem.prompt,
            response=answered.response,
            answer=problem.answer,
            extracted=score.extracted,
            score=score.value,
            correct=score.correct,
            num_tokens=Int32(answered.num_tokens),
            finish_reason=answered.finish_reason,
            reward_error=score.error,
            attempt=self.attempt,
            cluster=problem.cluster or None,
            verdicts=score.verdicts,
            turns=_turns(answered.turns),
        )


def scores_by_set(answered: Sequence[list[Answered]]) -> dict[str, SetScores]:
    """Returns set -> mean score of each of its problems: the share of right answers, or the mean of graded scores."""
    found: dict[str, SetScores] = {}
    for dataset in dict.fromkeys(group[0].problem.dataset for group in answered):
        groups = [group for group in answered if group[0].problem.dataset == dataset]
        graded = any(each.score.correct is None for group in groups for each in group)
        scores = [[each.score.value if graded else bool(each.score.correct) for each in group] for group in groups]
        found[dataset] = SetScores([sum(each) / len(each) for each in scores], clusters_of(groups))
    return found


def clusters_of(groups: Sequence[list[Answered]]) -> list[str] | None:
    """Returns the cluster of each problem of a set; None if the set names no clusters."""
    problems = [group[0].problem for group in groups]
    named = any(each.cluster for each in problems)
    return [each.cluster or each.problem_id for each in problems] if named else None


def _turns(turns: Sequence[RecordedTurn]) -> str | None:
    """Returns turns in the form that the view `turns` reads."""
    rows = [
        {
            "turn": place,
            **asdict(turn),
            "tool": turn.tool or None,
            "error": turn.error or None,
            "seconds": turn.seconds if turn.tool else None,
        }
        for place, turn in enumerate(turns)
    ]
    return json.dumps(rows, ensure_ascii=False) if rows else None


def _summary(
    step: int,
    dataset: str,
    groups: Sequence[list[Answered]],
    measured: Sequence[EvaluationMeasure],
    means: Sequence[float],
) -> dict[str, Any]:
    responses = [each for group in groups for each in group]
    return {
        "step": step,
        "dataset": dataset,
        "num_problems": len(groups),
        "samples_per_problem": len(groups[0]),
        "metrics": _values(measured),
        "response_length_mean": sum(each.num_tokens for each in responses) / len(responses),
        "truncated_fraction": sum(each.finish_reason == "length" for each in responses) / len(responses),
        "scorer_failures": sum(each.score.error is not None for each in responses),
        "problems": {group[0].problem.problem_id: mean for group, mean in zip(groups, means, strict=True)},
    }


def _values(measured: Sequence[EvaluationMeasure]) -> dict[str, dict[str, float]]:
    return {each.metric: {"value": each.value, "ci_low": each.ci_low, "ci_high": each.ci_high} for each in measured}


def _print(step: int, dataset: str, measure: EvaluationMeasure) -> None:
    interval = f"[{measure.ci_low:.4f}, {measure.ci_high:.4f}] ({THESE_WEIGHTS})"
    print(f"step {step}, {dataset}: {measure.metric} {measure.value:.4f} {interval}")
