"""Measures of a trial's runs: a goal's measure over the seeds, constraints, and costs."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from pipelines.home.home import Home
from pipelines.report.answer.costs import measured_by
from pipelines.report.evidence import accuracies, clusters, load_run, other_measures
from pipelines.report.statistics import Interval, mean_interval, seed_mean
from pipelines.studies.trials import Score
from specs.metrics import BY_NAME, is_share
from specs.reading.recorded import recorded_spec
from specs.rules.study import EVALUATED, is_evaluated
from specs.schema.study import Goal, Study, measure_label
from storage import Store

LAST_STEPS = 10
"""Number of last steps over which a training metric is averaged."""


def score(
    store: Store,
    home: Home,
    goal: Goal,
    run_ids: Sequence[str],
    step: int = 0,
    *,
    dataset: str = "",
    confidence: float = 0.95,
) -> Score | None:
    """Returns a goal's measure, averaged over the runs' seeds; None if a run lacks it, or if it is not finite.

    mean@k and score@k are means over all samples: their expected values do not depend on k.

    Args:
        step: the checkpoint's step; 0 means the last one.
        dataset: another evaluation set than the goal's.
    """
    if is_evaluated(goal):
        interval, by_seed = _evaluated(store, home, goal, dataset or goal.dataset, run_ids, step, confidence)
    else:
        by_seed = _trained(store, goal.metric, run_ids, step)
        interval = _over_seeds(by_seed, confidence) if by_seed else None
    if interval is None or not math.isfinite(interval.value):
        return None
    cautious = interval.low if goal.direction == "maximize" else interval.high
    value = cautious if goal.over_seeds == "lower_bound" and interval.known else interval.value
    low, high = (end if math.isfinite(end) else None for end in (interval.low, interval.high))
    return Score(value, low, high, tuple(by_seed))


def constraint_values(store: Store, home: Home, study: Study, run_ids: Sequence[str]) -> dict[str, float]:
    """Returns the recorded values that the constraints bound, by `measure_label`."""
    measured: dict[str, float] = {}
    for constraint in study.constraints:
        goal = Goal(metric=constraint.metric, dataset=constraint.dataset)
        if result := score(store, home, goal, run_ids):
            measured[measure_label(constraint.metric, constraint.dataset)] = result.value
    return measured


def sampled_tokens(store: Store, home: Home, run_ids: Sequence[str]) -> float:
    """Returns the number of response tokens that the runs' training has sampled so far."""
    rows = store.query(
        "SELECT run_id, sum(value) FROM metrics WHERE name = 'response_length/mean' AND list_contains(?, run_id) "
        "GROUP BY run_id",
        [list(run_ids)],
    ).rows
    total = 0.0
    for run_id, lengths in rows:
        training = recorded_spec(home.run(run_id)).training
        total += lengths * training.prompts_per_step * training.group_size
    return total


def shared_seconds(store: Store, run_ids: Sequence[str], since: datetime) -> float:
    """Returns the seconds that the runs have spent since then on data and base model, which all trials share."""
    query = (
        "SELECT coalesce(sum(epoch(ended_at - started_at)), 0) FROM stages WHERE list_contains(?, run_id) "
        "AND stage IN ('data', 'base') AND NOT cached AND started_at >= ?"
    )
    return float(store.query(query, [list(run_ids), since]).rows[0][0])


def _evaluated(
    store: Store, home: Home, goal: Goal, dataset: str, run_ids: Sequence[str], step: int, confidence: float
) -> tuple[Interval | None, list[float]]:
    """Returns the measure's interval, and its value by seed."""
    kind = next((kind for kind in ("mean@", "score@") if goal.metric.startswith(kind)), "")
    metric = f"{kind}%" if kind else goal.metric
    rows = store.query(
        "SELECT run_id, step FROM evaluations "
        "WHERE list_contains(?, run_id) AND dataset = ? AND metric LIKE ? AND (? = 0 OR step = ?) "
        "QUALIFY step = max(step) OVER (PARTITION BY run_id) ORDER BY run_id",
        [list(run_ids), dataset, metric, step, step],
    ).rows
    if {row[0] for row in rows} != set(run_ids):
        return None, []
    scores: Mapping[str, Mapping[int, Mapping[str, float]]]
    if kind:
        scores = accuracies(store, run_ids)[dataset]
    elif not EVALUATED.fullmatch(goal.metric):
        scores = measured_by(store, run_ids, goal.metric, dataset)
    else:
        runs = [load_run(home, run_id) for run_id in run_ids]
        scores = other_measures(store, runs, {row[1] for row in rows})[goal.metric][dataset]
    of_runs = [scores[run_id][at] for run_id, at in rows]
    problems = sorted(set.intersection(*(set(run) for run in of_runs)))
    shared = clusters(store, run_ids).get(dataset)
    labels = [shared.get(problem, problem) for problem in problems] if shared else None
    table = [[run[problem] for problem in problems] for run in of_runs]
    answered = EVALUATED.fullmatch(goal.metric)
    shares = False if kind == "score@" or not (answered or is_share(goal.metric)) else None
    return mean_interval(table, confidence=confidence, clusters=labels, shares=shares), [sum(r) / len(r) for r in table]


def _trained(store: Store, metric: str, run_ids: Sequence[str], step: int) -> list[float]:
    """Returns the mean of the metric over each run's last steps, or its value at the last evaluated step; empty if a
    run has none."""
    last = 1 if BY_NAME[metric].at_evaluations else LAST_STEPS
    rows = store.query(
        "SELECT run_id, avg(value) FROM (SELECT run_id, value FROM metrics "
        "WHERE list_contains(?, run_id) AND name = ? AND (? = 0 OR step <= ?) "
        f"QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC) <= {last}) GROUP BY run_id",
        [list(run_ids), metric, step, step],
    ).rows
    return [row[1] for row in rows] if {row[0] for row in rows} == set(run_ids) else []


def _over_seeds(values: Sequence[float], confidence: float) -> Interval:
    if len(values) == 1:
        return Interval(values[0], math.nan, math.nan)
    return seed_mean(values, confidence=confidence)
