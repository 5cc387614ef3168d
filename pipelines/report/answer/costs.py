"""Costs of a gain: drift from the policy before training, and scores on sets that are scored by likelihood."""

from collections.abc import Collection, Sequence

import numpy as np

from pipelines.report.answer.answers import answers
from pipelines.report.answer.outcome import Answer, Outcome
from pipelines.report.answer.scores import BySteps, Scale
from pipelines.report.answer.wording import change
from pipelines.report.charts import Chart
from pipelines.report.evidence import Group
from pipelines.report.palette import DrawnGroup
from pipelines.report.plots import dot_chart, mark
from rpg.evaluation.measures import ratio_values
from specs.metrics import is_share, lower_is_better
from specs.rules.study import EVALUATED
from storage import Store

_COMPARED = ("drift/reverse", "drift/forward")
"""Measures of drift that reports and comparisons show. The table `evaluations` also has those per response."""
_DRIFT = """
    SELECT direction, dataset, run_id, step, problem_id, avg(logprob - initial_logprob), avg(num_tokens), min(cluster)
    FROM drift_samples WHERE list_contains(?, run_id) GROUP BY ALL ORDER BY ALL
"""
_SCORES = """
    SELECT metric, dataset, run_id, step, item_id, value, num_bytes FROM evaluation_scores
    WHERE list_contains(?, run_id) ORDER BY ALL
"""
Measured = dict[str, dict[str, dict[str, dict[int, dict[str, float]]]]]
"""Measure -> dataset -> run -> step -> value by problem, whose mean is the measure."""


def costs_of(
    store: Store, groups: Sequence[Group], *, confidence: float, metrics: Collection[str] | None = None
) -> list[Answer]:
    """Returns the answers on drift and on each set that is scored by likelihood, with the conclusions of `verdict`.

    Args:
        confidence: level of the intervals; those of differences hold jointly, for each measure and set separately.
        metrics: metrics of these runs' evaluations, if the caller has them: without any of these costs among them
            nothing is read.
    """
    if metrics is not None and all(map(EVALUATED.fullmatch, metrics)):
        return []
    run_ids = [run.run_id for group in groups for run in group.runs]
    drift, clusters = drifts(store, run_ids)
    measured = {name: drift[name] for name in _COMPARED if name in drift} | retention(store, run_ids)
    found = []
    for measure, by_dataset in measured.items():
        scale = Scale(is_share(measure), None, not lower_is_better(measure))
        found += answers(groups, by_dataset, measure=measure, confidence=confidence, clusters=clusters, scale=scale)
    return found


def drifts(store: Store, run_ids: Sequence[str]) -> tuple[Measured, dict[str, dict[str, str]]]:
    """Returns drift per token and per response in both directions, which is 0 before training. Also returns, by dataset
    and problem, the clusters of problems that share something."""
    found: Measured = {}
    clusters: dict[str, dict[str, str]] = {}
    rows = store.query(_DRIFT, [list(run_ids)]).rows
    tables: dict[tuple[str, str, str, int], list[tuple[str, float, float]]] = {}
    for direction, dataset, run_id, step, problem, difference, tokens, cluster in rows:
        divergence = difference if direction == "reverse" else -difference
        tables.setdefault((direction, dataset, run_id, step), []).append((problem, divergence, tokens))
        if cluster is not None:
            clusters.setdefault(dataset, {})[problem] = cluster
    for (direction, dataset, run_id, step), table in tables.items():
        problems, divergence, tokens = (list(column) for column in zip(*table, strict=True))
        values = ratio_values(np.array(divergence), np.array(tokens, dtype=np.float64)).tolist()
        for name, of_problems in ((f"drift/{direction}", values), (f"drift/{direction}_response", divergence)):
            steps = found.setdefault(name, {}).setdefault(dataset, {}).setdefault(run_id, {})
            steps.setdefault(0, {}).update(dict.fromkeys(problems, 0.0))
            steps[step] = dict(zip(problems, of_problems, strict=True))
    return found, clusters


def retention(store: Store, run_ids: Sequence[str]) -> Measured:
    """Returns the scores of sets that are scored by likelihood, by metric. The pieces of a text are weighted by their
    bytes."""
    tables: dict[tuple[str, str, str, int], list[tuple[str, float, int | None]]] = {}
    for metric, dataset, run_id, step, item, value, num_bytes in store.query(_SCORES, [list(run_ids)]).rows:
        tables.setdefault((metric, dataset, run_id, step), []).append((item, value, num_bytes))
    found: Measured = {}
    for (metric, dataset, run_id, step), table in tables.items():
        items, values, sizes = zip(*table, strict=True)
        weighted = np.array(values, dtype=np.float64)
        if all(sizes):
            weights = np.array(sizes, dtype=np.float64)
            weighted = ratio_values(weighted * weights, weights)
        steps = found.setdefault(metric, {}).setdefault(dataset, {}).setdefault(run_id, {})
        steps[step] = dict(zip(items, weighted.tolist(), strict=True))
    return found


def measured_by(store: Store, run_ids: Sequence[str], metric: str, dataset: str) -> BySteps:
    """Returns one measure on one set: run -> step -> value by problem."""
    measured = drifts(store, run_ids)[0] if metric.startswith("drift/") else retention(store, run_ids)
    return measured.get(metric, {}).get(dataset, {})


def frontier_charts(gains: Sequence[Answer], costs: Sequence[Answer], drawn: Sequence[DrawnGroup]) -> list[Chart]:
    """Returns a chart for each cost, which shows the gain on the first evaluation set over the cost: a dot per group,
    with the interval of its gain."""
    gained = {outcome.label: outcome for outcome in gains[0].outcomes} if gains else {}
    colors = {each.group.label: each.color for each in drawn if not each.pale}
    charts = []
    for answer in costs:
        dots = [
            mark(cost.gain.value, gain.gain.value, _words(gain, cost), gain.gain, color=colors[cost.label])
            for cost in answer.outcomes
            if (gain := gained.get(cost.label)) and gain.gain and cost.gain and cost.label in colors
        ]
        name = f"{answer.measure} on {answer.dataset}"
        what = name if answer.measure.startswith("drift/") else f"change of {name}"
        title = f"Gain on {gains[0].dataset} over {what}" if gains else ""
        charts.append(dot_chart(dots, title=title, x_label=what) if len(dots) > 1 else None)
    return [chart for chart in charts if chart]


def _words(gain: Outcome, cost: Outcome) -> str:
    share, price = change(gain.gain, share=gain.is_share) if gain.gain else "", ""
    if cost.gain:
        price = change(cost.gain, share=cost.is_share)
    return f"{gain.label}: {share} at {cost.measure} {price}"
