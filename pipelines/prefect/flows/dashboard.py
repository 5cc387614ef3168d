"""Artifacts on the dashboard beside the graph: the plan, progress while training, the learning curve and the results.

The dashboard draws Mermaid in Markdown but drops embedded images, so the curve is a Mermaid xychart.
"""

import math
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipelines.planning.plan import RunPlan
from pipelines.running.experiment_page import experiment_markdown
from pipelines.running.run import RunExecution
from pipelines.terminal.cells import markdown_cell
from rpg.statistics import THESE_WEIGHTS
from specs.metrics import BY_NAME, METRICS, REWARD
from storage import Store

_CURVES = tuple(metric for metric in METRICS if metric.short_name)
_MOST_STEPS = 20
"""Largest number of steps that are listed for a repeated event."""
_PAGE_SECONDS = 10.0
"""Seconds between two renewals of an experiment's page because runs began: the page of 1,000 runs is long."""
_CURVE_POINTS = 60
_TICKS = 10
"""If there are fewer points than this, each gets a label. Mermaid puts about this many marks on an axis of numbers."""
_CURVE_THEME = '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#2563eb"}}}}%%'
"""Theme of the curve: Mermaid's own colour is invisible on the dashboard's light background."""
_COLOURS = {"CACHED": "#cfe8d5", "RUN": "#fde9c8", "RESUME": "#cfe3f7"}


def publish_plan(execution: RunExecution) -> None:
    """Shows the stages, their inputs, and why each stage runs."""
    execution.outbox.artifact(key(execution, "plan"), "markdown", plan_markdown(execution.plan), "Plan")


def plan_markdown(run: RunPlan) -> str:
    """Returns a Mermaid graph of the stages and a table of reasons."""
    lines = [f"# {run.name}", "", "```mermaid", "graph LR"]
    lines += [f'  {stage.stage}["{stage.stage}<br/>{stage.action}"]' for stage in run.stages]
    lines += [f"  {source} --> {stage.stage}" for stage in run.stages for source in stage.inputs]
    lines += [f"  style {stage.stage} fill:{_COLOURS[stage.action]},color:#111" for stage in run.stages]
    lines += ["```", "", "| stage | action | fingerprint | why |", "|---|---|---|---|"]
    lines += [f"| {s.stage} | {s.action} | `{s.fingerprint[:12]}` | {markdown_cell(s.reason)} |" for s in run.stages]
    if run.values:
        lines += ["", "| varies | value |", "|---|---|"]
        lines += [f"| `{path}` | {markdown_cell(str(value))} |" for path, value in run.values.items()]
    return "\n".join(lines)


def publish_experiment(execution: RunExecution) -> None:
    """Shows the page of the run's experiment, with the present state of its runs. A study's trial has no page."""
    if execution.in_study:
        return
    experiment = execution.plan.experiment.name
    renewed = _renewal(execution)
    renewed.parent.mkdir(parents=True, exist_ok=True)
    renewed.touch()  # Before the record is read: changes during the reading are not on the page.
    if page := experiment_markdown(execution.home, experiment, execution.outbox.record_url or ""):
        execution.outbox.page(experiment, page, f"Runs of {experiment}")


def publish_begin(execution: RunExecution) -> None:
    """Updates the experiment's page if it does not yet show that the run has begun. Called at intervals.

    Does nothing before the server has the reports' address, to which the page links, or shortly after another renewal.
    """
    if execution.in_study:
        return
    renewed = _renewal(execution)
    renewed_at = renewed.stat().st_mtime if renewed.exists() else 0.0
    is_shown = renewed_at > (execution.directory / "plan.json").stat().st_mtime
    if not is_shown and execution.outbox.record_url is not None and time.time() - renewed_at > _PAGE_SECONDS:
        publish_experiment(execution)


def _renewal(execution: RunExecution) -> Path:
    """Returns the path of an empty file whose modification time says when a run of this home last renewed the
    experiment's page."""
    return execution.home.prefect / "pages" / execution.plan.experiment.name


def publish_progress(execution: RunExecution, percent: float) -> None:
    """Shows the progress of training as a bar on the dashboard's graph."""
    description = f"Training steps of {execution.run_id}"
    execution.outbox.artifact(key(execution, "training"), "progress", percent, description)


def publish_learning_curve(execution: RunExecution) -> None:
    """Shows curves over the steps of the progress lines' metrics and of the accuracies during training, and the steps
    at which the reference was updated or the run was rolled back. Shows nothing if no step was recorded."""
    metrics = "select name, step, value from metrics where run_id = ? and list_contains(?, name) order by step"
    events = (
        "select kind, list(distinct step order by step) from events"
        " where run_id = ? and kind in ('reference_moved', 'rolled_back') group by kind order by kind"
    )
    accuracies = (
        "select metric || ' on ' || dataset, step, value from evaluations"
        " where run_id = ? and (metric like 'mean@%' or metric like 'score@%') order by dataset, step"
    )
    with Store.open(execution.home.root) as store:
        recorded = store.query(metrics, (execution.run_id, [metric.name for metric in _CURVES])).rows
        measured = store.query(accuracies, (execution.run_id,)).rows
        happened = store.query(events, (execution.run_id,)).rows
    curves: dict[str, list[tuple[int, float]]] = {metric.heading: [] for metric in _CURVES}
    for heading, step, value in [*((BY_NAME[name].heading, *point) for name, *point in recorded), *measured]:
        if math.isfinite(value):
            curves.setdefault(heading, []).append((step, value))
    charts = [curve_mermaid(points, heading) for heading, points in curves.items() if points]
    notes = [f"{kind.replace('_', ' ').capitalize()}: steps {_listed(steps)}." for kind, steps in happened]
    if charts:
        record_url = execution.outbox.record_url
        links = [f"[Report of the run]({record_url}/runs/{execution.run_id})"] if record_url else []
        links += [f"[Live curves]({record_url}/live?of={execution.run_id})"] if record_url else []
        text = "\n\n".join(["# Learning curve", *notes, *charts, *links])
        execution.outbox.artifact(key(execution, "learning-curve"), "markdown", text, REWARD.heading)


def _listed(steps: Sequence[int]) -> str:
    more = [f"{len(steps) - _MOST_STEPS} more"] if len(steps) > _MOST_STEPS else []
    return ", ".join([*map(str, steps[:_MOST_STEPS]), *more])


def curve_mermaid(points: Sequence[tuple[int, float]], heading: str) -> str:
    """Returns an xychart of (step, value). Averages neighbours if there are many points.

    Mermaid spaces the points of a line evenly, so that uneven steps become names on the axis. Few steps do too: Mermaid
    would mark fractions between them.
    """
    width = -(-len(points) // _CURVE_POINTS)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    values = [sum(value for _, value in part) / len(part) for part in parts]
    gaps = {later - earlier for (earlier, _), (later, _) in pairwise(points)}
    names = f"[{', '.join(str(part[-1][0]) for part in parts)}]"
    steps = names if len(gaps) > 1 or len(points) < _TICKS else f"{points[0][0]} --> {points[-1][0]}"
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or 0.1
    return "\n".join(
        [
            "```mermaid",
            _CURVE_THEME,
            "xychart-beta",
            f'  x-axis "step" {steps}',
            f'  y-axis "{heading}" {low - margin:.4f} --> {high + margin:.4f}',
            f"  line [{', '.join(f'{value:.4f}' for value in values)}]",
            "```",
        ]
    )


def publish_results(execution: RunExecution) -> None:
    """Shows the evaluations of the run's checkpoints."""
    sql = (
        "select step, dataset, metric, value, ci_low, ci_high, num_problems, samples_per_problem "
        "from evaluations where run_id = ? order by dataset, metric, step"
    )
    with Store.open(execution.home.root) as store:
        evaluations = store.query(sql, (execution.run_id,))
    if evaluations.rows:
        rows = [
            {name: _shown(value) for name, value in zip(evaluations.columns, row, strict=True)}
            for row in evaluations.rows
        ]
        description = f"Evaluation of {execution.run_id}; intervals: {THESE_WEIGHTS}"
        execution.outbox.artifact(key(execution, "results"), "table", rows, description)


def key(execution: RunExecution, name: str) -> str:
    """Returns an artifact's key: lower-case letters, digits and dashes; one history per run."""
    return f"{re.sub('[^a-z0-9-]+', '-', execution.run_id.lower())}-{name}"


def _shown(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
