"""Distributions of lengths, rewards and ratios over training: their quantiles at each step, computed in SQL."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.report.charts import Chart, line, line_chart
from pipelines.report.marks import StepMarks
from pipelines.report.palette import DrawnGroup
from storage import Store

MOST_GROUPS = 4
"""Largest number of groups whose distributions a page shows."""
_MOST_BINS = 60
_MOST_RATIO_STEPS = 120
"""Largest number of steps, over all runs, whose tokens are read. One step may have a million tokens."""
_OF_ROLLOUTS = """
    SELECT g.place, (r.step - 1) // $width * $width + ($width + 1) / 2 AS middle,
           quantile_disc(r.num_tokens, [0.1, 0.25, 0.5, 0.75, 0.9]) AS length,
           quantile_disc(r.reward, [0.1, 0.25, 0.5, 0.75, 0.9]) AS reward
    FROM rollouts AS r JOIN (SELECT unnest($runs) AS run_id, unnest($places) AS place) AS g USING (run_id)
    WHERE list_contains($runs, r.run_id) GROUP BY ALL ORDER BY ALL
"""
_OF_TOKENS = """
    SELECT g.place, t.step::DOUBLE AS middle, approx_quantile(t.ratio, [0.01, 0.1, 0.5, 0.9, 0.99]) AS ratio
    FROM tokens AS t JOIN (SELECT unnest($runs) AS run_id, unnest($places) AS place) AS g USING (run_id)
    WHERE list_contains($runs, t.run_id) AND (t.step - 1) % $width = $width - 1 AND isfinite(t.ratio)
    GROUP BY ALL ORDER BY ALL
"""


@dataclass(frozen=True, slots=True)
class Distributions:
    """The charts, and notes on them."""

    charts: list[Chart]
    notes: list[str]


def distributions(store: Store, drawn: Sequence[DrawnGroup], marks: StepMarks) -> Distributions:
    """Returns charts of length, reward and ratio for each of the first groups that have a colour. The charts of one
    quantity share a scale. Runs without recorded rollouts have no charts."""
    chosen = [each for each in drawn if not each.pale][:MOST_GROUPS]
    runs = [run.run_id for each in chosen for run in each.group.runs]
    places = [place for place, each in enumerate(chosen) for _ in each.group.runs]
    (last,) = store.query("SELECT max(step) FROM rollouts WHERE list_contains(?, run_id)", [runs]).rows[0]
    if last is None:
        return Distributions([], [])
    width = -(-last // _MOST_BINS)
    rollouts = store.query(_OF_ROLLOUTS, {"runs": runs, "places": places, "width": width}).rows
    # Every `apart`-th step; with few steps all of them.
    apart = max(1, -(-last * len(runs) // _MOST_RATIO_STEPS))
    tokens = store.query(_OF_TOKENS, {"runs": runs, "places": places, "width": min(apart, last)}).rows
    notes = ["bands: 10 to 90 % and 25 to 75 % of the responses; for ratios, 1 to 99 % and 10 to 90 % of the tokens"]
    if width > 1:
        notes.append(f"each point of lengths and rewards pools {width} steps")
    if len(chosen) < len(drawn):
        notes.append(f"{len(chosen)} of {len(drawn)} cells are shown")
    rewards = [(row[0], row[1], row[3]) for row in rollouts]
    levels = {value for _, _, quantiles in rewards for value in quantiles}
    charts = _charts("Response length, tokens", [(row[0], row[1], row[2]) for row in rollouts], chosen, marks)
    if len(levels) > 2:
        charts += _charts("Reward of a response", rewards, chosen, marks)
    else:
        notes.append("rewards take at most two values, so their mean above shows everything")
    charts += _charts("Ratio of a token", tokens, chosen, marks)
    return Distributions(charts, notes)


def _charts(
    title: str, rows: Sequence[tuple[int, float, Sequence[float]]], chosen: Sequence[DrawnGroup], marks: StepMarks
) -> list[Chart]:
    """Returns a chart for each group, on one scale.

    Args:
        rows: (index of the group among the chosen ones, step, five rising quantiles).
    """
    ends = [quantiles[end] for _, _, quantiles in rows for end in (0, -1)]
    charts = []
    for place, drawn in enumerate(chosen):
        own = [(step, quantiles) for group, step, quantiles in rows if group == place]
        lowest, low, median, high, highest = ([quantiles[rank] for _, quantiles in own] for rank in range(5))
        points = [(step, middle) for (step, _), middle in zip(own, median, strict=True)]
        curve = line(points, label="median", color=drawn.color, bands=[(lowest, highest), (low, high)])
        named = f"{title}: {drawn.group.named}" if len(chosen) > 1 else title
        if chart := line_chart([curve], title=named, holds=ends):
            charts.append(chart.over(marks.of(drawn.color).layers()))
    return charts
