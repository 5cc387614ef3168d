"""The report of a run and of an experiment: the answer first, then its evidence."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.home.unrecorded import why_incomplete
from pipelines.home.versions import names_of_others, runs_of, split_name
from pipelines.report import evidence
from pipelines.report.answer import (
    SCORE,
    Answer,
    Outcome,
    accuracies_by_step,
    answers_of,
    answers_of_other_measures,
    clusters_of,
    confidence_of,
    left_behind,
    only_these_weights,
    outcomes_of,
)
from pipelines.report.answer.costs import costs_of, frontier_charts
from pipelines.report.answer.equal_drift import gains_at_equal_drift
from pipelines.report.answer.whole import whole_answer
from pipelines.report.charts import Chart
from pipelines.report.curves import accuracy_curves, learning_curves, most_points
from pipelines.report.diagnosis import DIAGNOSED, findings_over, not_scored
from pipelines.report.distributions import distributions
from pipelines.report.endings import (
    LAST_STEPS,
    LEAST_SEEDS,
    FinalMetric,
    compare_with_literature,
    final_metrics,
    notes_of,
)
from pipelines.report.evidence import Curves, Group, Run, trouble_of
from pipelines.report.marks import step_marks
from pipelines.report.page import publish, render
from pipelines.report.palette import DrawnGroup, drawn_groups
from pipelines.report.plots import Mark, interval_chart
from pipelines.report.responses import MOST_CHARACTERS, trained_responses
from rpg.certificate.reading import in_words
from rpg.statistics.wording import CHOSEN, level_words
from specs.metrics import BY_NAME
from storage import Store

STAGES = ("data", "base", "train", "evaluate")
_MADE_WITH = ("code", "package", "lock", "machine", "data", "certificate")
"""Kinds of provenance that describe how a run was made. The others are the spec's values and the environment."""


def write_run_report(home: Home, run_id: str, path: Path | None = None) -> Path:
    """Writes the page of one run (to its `report.html` by default) and returns its path."""
    run = evidence.load_run(home, run_id)
    page = _page(home, "run", f"{run.experiment} {run.name}".strip(), [Group(run.name or run_id, (run,))])
    return publish(path or home.run(run_id) / "report.html", page)


def write_experiment_report(home: Home, experiment: str, path: Path | None = None) -> Path:
    """Writes the page of an experiment, with its seeds pooled, and returns its path.

    Args:
        experiment: NAME for the version that was executed last, or NAME@VERSION.
    Raises:
        RpgError: the experiment has no runs, or no such version.
    """
    page = _page(home, "experiment", experiment, evidence.experiment_groups(home, experiment))
    name, version = split_name(experiment)
    return publish(path or home.experiment(name) / (f"report@{version}.html" if version else "report.html"), page)


def _page(home: Home, kind: str, name: str, groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    run_ids = [run.run_id for run in runs]
    confidence = confidence_of(groups)
    with Store.open(home.root) as store:
        evaluated, measures = evidence.accuracies(store, run_ids), _measures(store, runs)
        graded = _graded(measures)
        found = answers_of(home, store, groups, [name] if kind == "experiment" else [], evaluated, graded)
        results = outcomes_of(found)
        others = answers_of_other_measures(store, groups, found, confidence=confidence) if len(runs) > 1 else []
        costs = costs_of(store, groups, confidence=confidence, metrics={each["metric"] for each in measures})
        equal_drift = gains_at_equal_drift(store, groups, evaluated, costs, confidence=confidence, graded=graded)
        curves = evidence.metric_curves(store, run_ids, DIAGNOSED)
        drawn = drawn_groups(groups, results)
        marks = step_marks(store, drawn, curves)
        spread = distributions(store, drawn, marks)
        trouble = trouble_of(store, run_ids)
        best, worst = evidence.sample_responses(store, run_ids)
        trained = trained_responses(store, home, runs)
        literature = compare_with_literature(home, store, groups)
        failed = not_scored(store, groups)
        unread = store.query("SELECT 1").warnings
        apart = list(filter(None, [evidence.told_apart(home, store).get(run_ids[0])])) if kind == "run" else []
    by_step = accuracies_by_step(groups, evaluated, confidence=confidence, clusters=clusters_of(found), graded=graded)
    on_the_way = accuracy_curves(by_step, drawn)
    charts, flat = learning_curves(drawn, curves, confidence=confidence)
    colored = [each.group for each in drawn if not each.pale]
    answer = whole_answer(home, name if kind == "experiment" else run_ids[0], groups, found, curves, failed)
    return render(
        "experiment.html",
        kind=kind,
        name=name,
        question=runs[0].question,
        facts=[*_facts(name, groups), *apart, *_other_versions(home, kind, name, runs[0])],
        answer=answer,
        diagnosis=findings_over(runs, curves, answer),
        method=_method(found[0], results, confidence) if results else "",
        warnings=Listed.of(
            [
                *_warnings(runs),
                *(f"{sentence}." for sentence in left_behind(groups, evaluated)),
                *_damage_lines(unread, run_ids),
                *_trouble_lines(trouble, runs),
            ],
            20,
        ),
        answer_charts=answer_charts(results, drawn),
        as_is=not any(run.trains for run in runs),
        outcomes=[result for result in results if result.label in {group.label for group in colored}],
        all_outcomes=Listed.of(results, 200) if len(colored) < len(groups) else None,
        costs=costs,
        equal_drift=equal_drift,
        frontiers=frontier_charts(found, costs, drawn),
        literature=literature,
        chosen=CHOSEN,
        literature_notes=notes_of(literature),
        many=len(groups) > 1,
        first=groups[0].label,
        cell=groups[0].key or ("cell" if any(run.trains for run in runs) else "model"),
        other_measures=Listed.of(outcomes_of(others), 100),
        measures=Listed.of(measures, 200),
        endings=_endings(final_metrics(colored, curves, confidence=confidence)) if len(groups) > 1 else {},
        last_steps=LAST_STEPS,
        least_seeds=LEAST_SEEDS,
        charts=[chart.over(marks.layers()) for chart in (*on_the_way, *charts)],
        flat=list(flat),
        colors={each.group.label: each.color for each in drawn},
        legend=[(each.group.label, each.color) for each in drawn if not each.pale],
        num_pale=len(groups) - len(colored),
        legend_notes=[
            *_how_curves_are_drawn(drawn, curves, confidence),
            *(["the band of an accuracy is its interval"] if on_the_way else []),
            *marks.notes(),
        ],
        distributions=spread,
        best=best,
        worst=worst,
        trained=trained,
        missing=_why_rows_are_missing(runs),
        most_characters=MOST_CHARACTERS,
        **_appendix(home, colored, runs),
    )


@dataclass(frozen=True, slots=True)
class Listed:
    """The first entries of a list that may be long, and the number of further ones."""

    entries: Sequence[Any]
    more: int

    @classmethod
    def of(cls, entries: Sequence[Any], most: int) -> "Listed":
        """Returns at most `most` of the entries."""
        return cls(entries[:most], max(0, len(entries) - most))


def _why_rows_are_missing(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence for each table of responses in which rows of a run are missing, because they were not recorded
    or not kept."""
    return [
        f"Not all {what} are on record: {why}"
        for table, what in (("rollouts", "responses"), ("tokens", "tokens"))
        if (why := next((why for run in runs if (why := why_incomplete(run.path, table))), ""))
    ]


def _how_curves_are_drawn(drawn: Sequence[DrawnGroup], curves: Curves, confidence: float) -> list[str]:
    """Returns notes on the lines of the learning curves."""
    counts = {len(each.group.runs) for each in drawn}
    notes = []
    longest = max((len(curve) for by_run in curves.values() for curve in by_run.values()), default=0)
    if (most := most_points(drawn)) and longest > most:
        notes.append(f"curves of more than {most} steps are averaged to {most} points")
    if any(1 < count < LEAST_SEEDS for count in counts):
        notes.append("thin lines are single seeds, thick ones their mean")
    if max(counts) >= LEAST_SEEDS:
        notes.append(
            f"bands: {100 * confidence:g} % interval of the mean over seeds, Student's, at each step by itself"
        )
    return notes


def _appendix(home: Home, columns: Sequence[Group], runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the appendix: spec, stages, certificates and provenance. `columns`: the groups whose specs are shown side
    by side."""
    varied = evidence.differences([group.runs[0].settings for group in columns])
    return {
        "columns": [group.label for group in columns],
        "varied": {path: [evidence.show(value) for value in values] for path, values in varied.items()},
        "spec": json.dumps(runs[0].settings, indent=2, ensure_ascii=False),
        "stages": [name for name in STAGES if any(name in run.stages for run in runs) or runs[0].trains],
        "runs": Listed.of([_row(run) for run in runs], 100),
        "certificates": _certificates(columns),
        "origins": Listed.of(_origins(home, runs[0]), 200),
        "provenance": _provenance(home, runs),
    }


def _provenance(home: Home, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns the recorded provenance of the runs' results, with the number of runs for each value if runs differ."""
    found: dict[str, Counter[str]] = {}
    for run in runs:
        noted = {
            f"{row['kind']} {row['name']}": row["value"] for row in run.provenance(home) if row["kind"] in _MADE_WITH
        }
        noted |= {f"fingerprint of {name}": run.stages.get(name, {}).get("fingerprint") for name in STAGES}
        for name, value in noted.items():
            if value:
                found.setdefault(name, Counter())[str(value)] += 1
    return [(name, _spread_over_runs(values)) for name, values in found.items()]


def _origins(home: Home, run: Run) -> list[dict[str, Any]]:
    """Returns the values of a run's spec that are not defaults, with the origin of each."""
    rows = [row for row in run.provenance(home) if row["kind"] == "spec" and row["origin"] != "default"]
    return [row | {"place": f"{row['file']}:{row['line']}" if row.get("file") else ""} for row in rows]


def _spread_over_runs(values: Counter[str]) -> str:
    """Returns the value, or, if runs differ, each value with the number of runs that have it."""
    if len(values) == 1:
        return next(iter(values))
    listed = [f"{value[:12]} ({count} {'run' if count == 1 else 'runs'})" for value, count in values.most_common(4)]
    return ", ".join([*listed, *([f"{len(values) - 4} more"] if len(values) > 4 else [])])


def _certificates(groups: Sequence[Group]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (cells, certificate) for each objective that was trained to the end, and for each step at which an
    objective with schedules was certified. The cells are those that share the certificate."""
    labels: dict[str, list[str]] = {}
    for group in groups:
        recorded = next((recorded for run in group.runs if (recorded := run.read("certificate.json"))), {})
        for step, certificate in recorded.get("steps", {"": recorded} if recorded else {}).items():
            label = f"{group.label}, step {step}" if step else group.label
            worded = certificate_in_words(certificate, group.runs[0])
            labels.setdefault(json.dumps(worded), []).append(label)
    return [("; ".join(sharing), json.loads(text)) for text, sharing in labels.items()]


def certificate_in_words(certificate: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Returns a recorded certificate with its meaning for a run."""
    return in_words(certificate, **run.off_policy)


def _endings(measures: Sequence[FinalMetric]) -> dict[str, list[tuple[str, FinalMetric]]]:
    """Returns the metrics that differ between groups: title -> (label, measure) of each group."""
    by_heading: dict[str, list[tuple[str, FinalMetric]]] = {}
    for measure in measures:
        metric = BY_NAME[measure.metric]
        if metric.tells_outcome:
            by_heading.setdefault(metric.heading, []).append((measure.label, measure))
    return {title: rows for title, rows in by_heading.items() if any(measure.against_first for _, measure in rows)}


def _row(run: Run) -> dict[str, Any]:
    fingerprint = run.stages.get("train" if run.trains else "evaluate", {}).get("fingerprint", "")[:12]
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
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    as_is = not any(run.trains for run in runs)
    facts = [name]
    if not as_is:
        facts.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}")
    if len(groups) > 1 and not as_is:
        facts.append(f"{len(groups)} cells")
    statuses = sorted({run.status for run in runs})
    facts.append(statuses[0] if len(runs) == 1 else f"{len(runs)} runs, {'/'.join(statuses)}")
    if created := min((run.created_at for run in runs if run.created_at), default=""):
        facts.append(f"begun {created[:16].replace('T', ' ')} UTC")
    return facts


def _other_versions(home: Home, kind: str, name: str, run: Run) -> list[str]:
    """Returns the other runs under an experiment's name, and their values that differ from these runs."""
    others = names_of_others(home, name) if kind == "experiment" else []
    specs = {name: run.settings}
    for other in others:
        if run_ids := runs_of(home, other):
            specs[other] = evidence.load_run(home, run_ids[0]).settings
    values = evidence.differing(specs)
    named = [f"{other} ({values[other]})" if values.get(other) else other for other in others]
    return [f"also run with other values: {', '.join(named)}"] if named else []


def _method(found: Answer, results: Sequence[Outcome], confidence: float) -> str:
    """Returns a description of how the answer's intervals are computed."""
    sets = found.num_sets
    over_sets = f" The claims hold jointly over the {sets} evaluation sets." if sets > 1 else ""
    return _method_of_one(results, confidence, found.level) + over_sets


def _method_of_one(results: Sequence[Outcome], confidence: float, of_gains: float) -> str:
    """Returns the sentence on the intervals of one set. `of_gains`: level of the intervals of gains and differences."""
    first = results[0]
    level, problems = f"{100 * confidence:g} %", f"{first.num_problems} held-out problems"
    if only_these_weights(results):
        return f"Brackets are {level} intervals for these weights on new problems, from {problems} and one seed."
    if first.as_is:
        at = f" {level_words(of_gains)} intervals," if of_gains != confidence else ""
        together = (
            f"; those of differences are{at} paired by problem and hold together (Tukey)" if len(results) > 1 else ""
        )
        return f"Brackets are {level} intervals for these weights on new problems, from {problems}{together}."
    together = "; those of differences hold together (Tukey)" if len(results) > 2 else ""
    if of_gains != confidence:
        together = f"; those of gains and differences are {level_words(of_gains)} intervals" + (
            " and hold together (Tukey)" if len(results) > 2 else ""
        )
    return (
        f"Brackets are {level} intervals for new seeds on new problems, from {problems} and {first.num_seeds} seeds,"
        f" paired by problem{together}."
    )


def _warnings(runs: Sequence[Run]) -> list[str]:
    not_finished = [run for run in runs if run.status != "finished"]
    # A report is the last stage of a run, which is then still under way: the reader knows that.
    unfinished = [
        run for run in not_finished if run.status not in ("running", "pending") or "evaluate" not in _finished(run)
    ]
    return [f"{run.name or run.run_id} is {run.status}{_why(run)}: only a part of it is shown." for run in unfinished]


def _damage_lines(unread: Sequence[str], run_ids: Sequence[str]) -> list[str]:
    """Returns the parts of these runs that could not be read and are missing on the page. `unread`: the store's
    warnings."""
    return [f"{line}: its rows are missing here." for line in unread if any(f"runs/{run}/" in line for run in run_ids)]


def _trouble_lines(trouble: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    """Returns a line for each problem during the runs."""
    names = {run.run_id: run.name or run.run_id for run in runs}
    return [f"{names[event['run_id']]}: {event['kind'].replace('_', ' ')}: {event['message']}." for event in trouble]


def _finished(run: Run) -> set[str]:
    return {name for name, stage in run.stages.items() if stage.get("status") == "finished"}


def _why(run: Run) -> str:
    reason = run.read("state.json").get("reason")
    return f" ({reason})" if reason else ""


def answer_charts(results: Sequence[Outcome], drawn: Sequence[DrawnGroup]) -> list[Chart]:
    """Returns a chart of before and after for each dataset. If there are many groups, only those with a colour are
    shown."""
    charts = []
    shown = {each.group.label: each.color for each in drawn if not each.pale}
    key = drawn[0].group.key if len(drawn) > 1 else ""
    for dataset, measure in dict.fromkeys((result.dataset, result.measure) for result in results):
        rows = []
        for result in results:
            if (result.dataset, result.measure) == (dataset, measure) and result.label in shown:
                color = shown[result.label]
                marks = [Mark(measure if result.as_is else "after", result.after, color)]
                if result.before is not None:
                    marks.insert(0, Mark("before", result.before, color, hollow=True))
                rows.append((result.label, marks))
        title = f"{measure.capitalize()} on {dataset}" + (f", by {key}" if key else "")
        charts.append(interval_chart(rows, title=title, name=f"{measure}/{dataset}", share=measure != SCORE))
    return [chart for chart in charts if chart]


def _graded(measures: Sequence[Mapping[str, Any]]) -> evidence.Graded:
    """Returns the same as `evidence.graded`, from rows that are already read."""
    found: dict[str, dict[str, float | None]] = {}
    for row in measures:
        if row["metric"].startswith("score@"):
            found.setdefault(row["dataset"], {})[row["run_id"]] = row["worst"]
    return found


def _measures(store: Store, runs: Sequence[Run]) -> list[dict[str, Any]]:
    names = {run.run_id: run.name or run.run_id for run in runs}
    result = store.query(
        "SELECT run_id, step, dataset, metric, value, ci_low, ci_high, worst FROM evaluations "
        "WHERE list_contains(?, run_id) ORDER BY dataset, run_id, step, metric",
        [list(names)],
    )
    return [row | {"run": names[row["run_id"]]} for row in result.table.to_pylist()]
