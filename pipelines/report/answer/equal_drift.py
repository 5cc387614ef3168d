"""Gains at equal drift: what groups have learned where all of them are equally far from the policy before training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipelines.report import evidence
from pipelines.report.answer.answers import answers
from pipelines.report.answer.costs import drifts
from pipelines.report.answer.outcome import Answer
from pipelines.report.answer.scores import BySteps
from pipelines.report.evidence import Group, Scores
from storage import Store

MEASURE = "drift/reverse"
_LEAST_EVALUATIONS = 2
"""Evaluations of each run after training began; with fewer, the interpolation would be one straight line."""


def gains_at_equal_drift(
    store: Store,
    groups: Sequence[Group],
    evaluated: Mapping[str, BySteps],
    costs: Sequence[Answer],
    *,
    confidence: float,
    graded: evidence.Graded | None = None,
) -> list[Answer]:
    """Returns an answer for each evaluation set on which all finished runs of several groups have drifted.

    A run's scores at a drift are interpolated linearly between the two evaluations between which the run last has that
    drift. The drift is the largest that every run reaches. The intervals take it as known.

    Args:
        evaluated: result of `evidence.accuracies`.
        costs: answers of `costs_of`; without drift among them nothing is read.
        confidence: level of the intervals, which hold jointly, like the intervals of `answers_of`.
        graded: result of `evidence.graded`.
    """
    runs = [run for group in groups for run in group.runs]
    finished = [run.run_id for run in runs if run.trains and run.has_ended]
    if len(groups) < 2 or not finished or not any(cost.measure == MEASURE for cost in costs):
        return []
    drift, clusters = drifts(store, finished)
    levels: dict[str, float] = {}
    at_level: dict[str, BySteps] = {}
    for dataset, by_run in evaluated.items():
        of_dataset = drift.get(MEASURE, {}).get(dataset, {})
        if found := at_equal_drift({run_id: by_run.get(run_id, {}) for run_id in finished}, of_dataset):
            levels[dataset], at_level[dataset] = found
    together = any(len(run.spec.data.train) > 1 for run in runs)
    compared = answers(groups, at_level, confidence=confidence, clusters=clusters, graded=graded, together=together)
    return [_named(answer, levels[answer.dataset], groups[0].key) for answer in compared if answer.verdict]


def at_equal_drift(evaluated: BySteps, drift: BySteps) -> tuple[float, BySteps] | None:
    """Returns the largest drift that every run reaches, and each run's scores before training and at that drift, the
    latter at its last step; None if a run has too few evaluations or has not drifted.

    Args:
        evaluated: scores of each run on one dataset.
        drift: the drift of each run on the dataset, by step and problem.
    """
    paths = {}
    for run_id, scores in evaluated.items():
        of_run = drift.get(run_id, {})
        path = [(step, float(np.mean([*of_run[step].values()]))) for step in sorted(scores) if step in of_run]
        if len(path) <= _LEAST_EVALUATIONS or path[0][0] != 0:
            return None
        paths[run_id] = path
    level = min((max(value for _, value in path) for path in paths.values()), default=0.0)
    if level <= 0:
        return None
    found = {}
    for run_id, path in paths.items():
        scores = evaluated[run_id]
        found[run_id] = {0: scores[0], path[-1][0]: _scores_at(level, path, scores)}
    return level, found


def _scores_at(level: float, path: Sequence[tuple[int, float]], scores: Mapping[int, Scores]) -> Scores:
    """Returns a run's scores at the last point of its path with this drift."""
    (before, first), (after, second) = next(
        (one, other)
        for one, other in reversed(list(pairwise(path)))
        if min(one[1], other[1]) <= level <= max(one[1], other[1])
    )
    share = 1.0 if first == second else (level - first) / (second - first)
    return {
        problem: (1 - share) * scores[before][problem] + share * score
        for problem, score in scores[after].items()
        if problem in scores[before]
    }


def _named(answer: Answer, level: float, key: str) -> Answer:
    """Returns the answer with the drift in its words."""
    assert answer.verdict is not None
    at = f"at {MEASURE} {level:.3g}"
    measure, by = f"{answer.measure} {at}", f", by {key}" * bool(key)
    said = f"On {answer.dataset} {at}, interpolated with drift taken as known{by}: {answer.verdict.text}"
    return replace(
        answer,
        measure=measure,
        outcomes=tuple(replace(outcome, measure=measure) for outcome in answer.outcomes),
        sentences=(said, *answer.sentences[1:]),
    )
