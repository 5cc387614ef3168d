"""The report of a run and of an experiment: the answer first, then what it rests on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipelines.home import Home
from pipelines.report import evidence
from pipelines.report.answer import (
    Outcome,
    accuracies_by_step,
    headline,
    only_these_weights,
    outcomes,
    outcomes_of_other_measures,
)
from pipelines.report.curves import accuracy_curves, learning_curves
from pipelines.report.endings import LAST_STEPS, FinalMetric, final_metrics
from pipelines.report.evidence import Group, Run, trouble_of
from pipelines.report.page import publish, render
from pipelines.report.plots import Mark, interval_chart
from specs.metrics import BY_NAME
from storage import Store

STAGES = ("data", "base", "train", "evaluate")


def write_run_report(home: Home, run_id: str, path: Path | None = None) -> Path:
    """Writes the page of one run (to its `report.html` by default) and returns its path."""
    run = evidence.load_run(home, run_id)
    page = _page(home, "run", f"{run.experiment} {run.name}".strip(), [Group(run.name or run_id, (run,))])
    return publish(path or home.run(run_id) / "report.html", page)


def write_experiment_report(home: Home, experiment: str, path: Path | None = None) -> Path:
    """Writes the page of an experiment, its seeds pooled, and returns its path.

    Raises:
        SpecError: the experiment has no runs.
    """
    page = _page(home, "experiment", experiment, evidence.experiment_groups(home, experiment))
    return publish(path or home.experiment(experiment) / "report.html", page)


def _page(home: Home, kind: str, name: str, groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    run_ids = [run.run_id for run in runs]
    confidence = runs[0].spec.get("evaluation", {}).get("confidence", 0.95)
    with Store.open(home.root) as store:
        evaluated = evidence.accuracies(store, run_ids)
        results = outcomes(groups, evaluated, confidence=confidence)
        others = outcomes_of_other_measures(store, groups, results, confidence=confidence) if len(runs) > 1 else []
        curves = evidence.metric_curves(store, run_ids)
        measures = _measures(store, runs)
        trouble = trouble_of(store, run_ids)
        best, worst = (evidence.sample_responses(store, run_ids, best=side) for side in (True, False))
    on_the_way = accuracy_curves(accuracies_by_step(groups, evaluated, confidence=confidence))
    charts, flat = learning_curves(groups, curves)
    return render(
        "experiment.html",
        kind=kind,
        name=name,
        question=runs[0].question,
        facts=_facts(name, groups),
        answer=headline(results),
        method=_method(results, confidence),
        warnings=[*_warnings(runs), *_trouble_lines(trouble, runs)],
        answer_charts=_answer_charts(results),
        outcomes=results,
        many=len(groups) > 1,
        other_measures=others,
        measures=measures,
        endings=_endings(final_metrics(groups, curves, confidence=confidence)) if len(groups) > 1 else {},
        last_steps=LAST_STEPS,
        charts=[*on_the_way, *charts],
        flat=flat,
        legend=[(group.label, index % 8) for index, group in enumerate(groups)],
        faint=any(len(group.runs) > 1 for group in groups),
        best=best,
        worst=worst,
        **_appendix(groups, runs),
    )


def _appendix(groups: Sequence[Group], runs: Sequence[Run]) -> dict[str, Any]:
    """Spec, stages and certificates."""
    varied = evidence.differences([group.runs[0].spec for group in groups])
    return {
        "columns": [group.label for group in groups],
        "varied": {path: [evidence.show(value) for value in values] for path, values in varied.items()},
        "spec": json.dumps(runs[0].spec, indent=2, ensure_ascii=False),
        "stages": STAGES,
        "runs": [_row(run) for run in runs],
        "certificates": _certificates(groups),
    }


def _certificates(groups: Sequence[Group]) -> list[tuple[str, dict[str, Any]]]:
    """(the cells that share it, certificate) of each objective that was trained to the end, and of each step at which
    one that schedules change was certified."""
    labels: dict[str, list[str]] = {}
    for group in groups:
        recorded = next((recorded for run in group.runs if (recorded := run.read("certificate.json"))), {})
        for step, certificate in recorded.get("steps", {"": recorded} if recorded else {}).items():
            label = f"{group.label}, step {step}" if step else group.label
            labels.setdefault(json.dumps(certificate), []).append(label)
    return [("; ".join(sharing), json.loads(text)) for text, sharing in labels.items()]


def _endings(measures: Sequence[FinalMetric]) -> dict[str, list[tuple[str, FinalMetric]]]:
    """Title -> (label, measure) of each group, for the metrics that differ between groups."""
    by_heading: dict[str, list[tuple[str, FinalMetric]]] = {}
    for measure in measures:
        metric = BY_NAME[measure.metric]
        if metric.tells_outcome:
            by_heading.setdefault(metric.heading, []).append((measure.label, measure))
    return {title: rows for title, rows in by_heading.items() if any(measure.against_first for _, measure in rows)}


def _row(run: Run) -> dict[str, Any]:
    fingerprint = run.stages.get("train", {}).get("fingerprint", "")[:12]
    times = {name: _time(run.stages.get(name, {})) for name in STAGES}
    return {"run_id": run.run_id, "name": run.name, "status": run.status, "times": times, "fingerprint": fingerprint}


def _time(stage: dict[str, Any]) -> str:
    if stage.get("cached"):
        return "cached"
    taken = evidence.seconds(stage)
    if taken != taken:
        return str(stage.get("status", "-"))
    if taken < 60:
        return f"{taken:.1f} s"
    minutes, left = divmod(round(taken), 60)
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _facts(name: str, groups: Sequence[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    facts = [name, f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"]
    if len(groups) > 1:
        facts.append(f"{len(groups)} cells")
    statuses = sorted({run.status for run in runs})
    facts.append(statuses[0] if len(runs) == 1 else f"{len(runs)} runs, {'/'.join(statuses)}")
    if created := min((run.created_at for run in runs if run.created_at), default=""):
        facts.append(f"begun {created[:16].replace('T', ' ')} UTC")
    return facts


def _method(results: Sequence[Outcome], confidence: float) -> str:
    if not results:
        return ""
    first = results[0]
    level, problems = f"{100 * confidence:g} %", f"{first.num_problems} held-out problems"
    if only_these_weights(results):
        return f"Brackets are {level} intervals for these weights on new problems, from {problems} and one seed."
    together = "; those of differences hold together (Dunnett)" if len(results) > 2 else ""
    return (
        f"Brackets are {level} intervals for new seeds on new problems, from {problems} and {first.num_seeds} seeds,"
        f" paired by problem{together}."
    )


def _warnings(runs: Sequence[Run]) -> list[str]:
    not_finished = [run for run in runs if run.status != "finished"]
    # A report is the last stage of a run that is still under way: it is no news there.
    unfinished = [
        run for run in not_finished if run.status not in ("running", "pending") or "evaluate" not in _finished(run)
    ]
    return [
        f"{run.name or run.run_id} is {run.status}{_why(run)}: what is shown of it is not the whole."
        for run in unfinished
    ]


def _trouble_lines(trouble: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    """A line for each thing that went wrong on the way."""
    names = {run.run_id: run.name or run.run_id for run in runs}
    return [f"{names[event['run_id']]}: {event['kind'].replace('_', ' ')}: {event['message']}." for event in trouble]


def _finished(run: Run) -> set[str]:
    return {name for name, stage in run.stages.items() if stage.get("status") == "finished"}


def _why(run: Run) -> str:
    reason = run.read("state.json").get("reason")
    return f" ({reason})" if reason else ""


def _answer_charts(results: Sequence[Outcome]) -> list[Markup]:
    charts = []
    for dataset in dict.fromkeys(result.dataset for result in results):
        rows = []
        for color, result in enumerate([result for result in results if result.dataset == dataset]):
            marks = [Mark("after", result.after, color)]
            if result.before is not None:
                marks.insert(0, Mark("before", result.before, color, hollow=True))
            rows.append((result.label, marks))
        charts.append(interval_chart(rows, title=f"Accuracy on {dataset}", share=True))
    return charts


def _measures(store: Store, runs: Sequence[Run]) -> list[dict[str, Any]]:
    names = {run.run_id: run.name or run.run_id for run in runs}
    result = store.query(
        "SELECT run_id, step, dataset, metric, value, ci_low, ci_high FROM evaluations WHERE list_contains(?, run_id) "
        "ORDER BY dataset, run_id, step, metric",
        [list(names)],
    )
    return [dict(zip(result.columns, row, strict=True)) | {"run": names[row[0]]} for row in result.rows]
