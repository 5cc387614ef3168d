"""The page of a study: the answer first, then the search behind it and its cost."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.report.answer import digits_of, figure_and_interval
from pipelines.report.charts import number
from pipelines.report.evidence import short_names, show
from pipelines.report.page import publish, render
from pipelines.studies.answers import pictures
from pipelines.studies.answers.answer import Answer, answer, difference, rise, study_best, with_interval
from pipelines.studies.answers.importances import Importance, importances
from pipelines.studies.answers.results import COSTS, Best, StudyRecord, Trial, cost_words, pareto_front, read_study
from specs.reading.recorded import recorded_spec
from specs.schema.study import measure_label

MOST_TRIALS = 500
"""Largest number of trials that charts and tables show one by one."""
_NEXT_TO_NOTHING = 0.05
"""If the newest trial's expected gain is below this share of that of the model's first trial, the study may as well
stop."""


def study_table(home: Home, name: str, digits: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Returns the study's results as columns and rows of texts: its arms on fresh seeds, else each trial with a value.
    Intervals have their own columns.

    Args:
        digits: digits after the decimal point; None: by the interval's width.
    Raises:
        SpecError: no study has that name.
    """
    record = read_study(home, name)
    return results_table(record, answer(home, record), digits)


def results_table(record: StudyRecord, found: Answer, digits: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Returns the results behind an answer, in the form of `study_table`. A trial has a value for each goal."""
    goal, others = record.first, record.goals[1:]
    if digits is None:
        of_arms = [interval for each in found.arms for interval in (each.mean, each.against_baseline)]
        digits = digits_of(of_arms or [each.last for each in record.trials], share=goal.is_share)
    cells = partial(figure_and_interval, digits=digits, share=goal.is_share)
    measure = f"{goal.measure}, %" if goal.is_share else goal.measure
    if arms := found.arms:
        columns = ["fresh seeds", measure, "interval", "against the baseline", "its interval"]
        rows = []
        for result in arms:
            gap = cells(result.against_baseline, sign="+") if result.against_baseline else ("", "")
            rows.append([result.arm.label, *cells(result.mean), gap[0] + " *" * result.differs, gap[1]])
        return columns, rows
    trials = [trial for trial in record.trials if trial.finished]
    of_trial = [(trial, record.params_of(trial)) for trial in trials]
    paths = list(dict.fromkeys(path for _, params in of_trial for path in params))
    rows = [
        [
            f"{trial.number} (baseline)" if trial.baseline else str(trial.number),
            *(show(params[path]) if path in params else "" for path in paths),
            *(cells(trial.last) if trial.last else (number(trial.value), "")),
            *(number(value) for value in trial.values[1:]),
        ]
        for trial, params in of_trial
    ]
    return ["trial", *paths, measure, "interval", *(other.measure for other in others)], rows


def write_study_report(home: Home, name: str, path: Path | None = None) -> Path:
    """Writes the page of a study (to its `report.html` by default) and returns its path.

    Raises:
        SpecError: no study has that name.
    """
    record = read_study(home, name)
    conclusion, ranked, best = answer(home, record), importances(record), study_best(home, record)
    shown = shown_trials(record)
    page = render(
        "study.html",
        record=record,
        names=short_names(record.parameters),
        facts=_facts(record),
        answer=conclusion,
        best=best,
        confirmation=pictures.confirmation_chart(record, conclusion.arms),
        shown=shown,
        history=pictures.history_chart(record, shown),
        rungs=pictures.rung_chart(record, shown, _horizon(home, record)),
        rung_rows=_rung_rows(record),
        stopped=[trial for trial in shown if trial.state in ("pruned", "failed", "cancelled")],
        importances=pictures.importance_chart(ranked),
        chance=_chance(ranked, record.finished),
        gain=_gain(record),
        slices=pictures.slice_charts(record, shown),
        modelled=record.has_model,
        surface=pictures.surface(record, shown, ranked),
        parallel=pictures.parallel(record, shown),
        goals=pictures.goals_chart(record, shown),
        front=pareto_front(record) if len(record.goals) > 1 else [],
        constraints=_constraints(record, best),
        costs=_costs(record),
        saved=_saved(record),
        show=show,
        number=number,
        difference=difference,
        with_interval=with_interval,
    )
    return publish(path or home.study(name) / "report.html", page)


def shown_trials(record: StudyRecord) -> list[Trial]:
    """Returns the trials that a page shows one by one, in order: all trials or, if there are very many, the important
    ones and a sample.

    The important ones are the baseline, the Pareto front, the confirmed ones, each that was the best so far, and the
    best of all.
    """
    trials = record.trials
    if len(trials) <= MOST_TRIALS:
        return list(trials)
    ranked = sorted(record.finished, key=lambda trial: -record.first.better(trial.value))
    kept = {trial.number for trial in ranked[: MOST_TRIALS // 5]}
    kept |= {trial.number for trial in trials if trial.baseline}
    kept |= {arm.trial for arm in record.confirmation.arms} if record.confirmation else set()
    kept |= {trial.number for trial in (pareto_front(record)[: MOST_TRIALS // 5] if len(record.goals) > 1 else [])}
    rest = [trial for trial in trials if trial.number not in kept]
    stride = -(-len(rest) // (MOST_TRIALS - len(kept)))
    kept |= {trial.number for trial in rest[::stride]}
    return [trial for trial in trials if trial.number in kept]


def _horizon(home: Home, record: StudyRecord) -> int:
    """Returns the step at which a trial ends, from the spec of a run; 0 if no run exists any more."""
    run_ids = [run_id for trial in record.finished for run_id in trial.run_ids]
    there = (home.run(run_id) for run_id in run_ids if home.run(run_id).exists())
    return next((recorded_spec(directory).training.steps for directory in there), 0)


def _facts(record: StudyRecord) -> list[str]:
    facts = [record.name, record.goal, f"{len(record.finished)} of {record.trials_wanted} trials finished"]
    states = ("pruned", "failed", "cancelled", "running", "paused")
    facts += [f"{count} {state}" for state in states if (count := record.count(state))]
    facts += [f"sampler {record.sampler}"]
    facts += [f"pruner {record.pruner['type']}"] if record.pruner["type"] != "none" else []
    facts += [record.status] if record.status != "finished" else []
    cost = cost_words(**record.spent)
    return [*facts, Path(record.experiment).name, *([cost] if cost else [])]


def _chance(ranked: Sequence[Importance], finished: Sequence[Trial]) -> str:
    """Returns a sentence on the parameters that the chart of importances leaves out."""
    hidden = [item.path for item in ranked if not item.above_chance]
    if not ranked:
        return "Importances need eight finished trials with different values."
    if len(hidden) == len(ranked):
        return f"With {len(finished)} trials, no parameter's importance is above chance."
    return f"Not above chance, and not shown: {', '.join(hidden)}." if hidden else ""


def _gain(record: StudyRecord) -> str:
    """Returns how much the newest trial that the model chose is expected to improve the best."""
    chosen = [(trial, trial.gain) for trial in record.trials if trial.gain is not None]
    if not chosen:
        return ""
    (first, most), (last, least) = chosen[0], chosen[-1]
    tense = "was" if last.state in ("finished", "pruned", "failed") else "is"
    said = f"Trial {last.number}, the newest, {tense} expected to improve the best by {rise(record.first, least)}"
    if least <= _NEXT_TO_NOTHING * most or rise(record.first, least) == rise(record.first, 0.0):
        return f"{said}: stopping is reasonable."
    return f"{said}; trial {first.number}, the model's first, by {rise(record.first, most)}."


@dataclass(frozen=True, slots=True)
class RungRow:
    """What happened at one rung, a step at which trials are evaluated."""

    step: int
    reached: int
    stopped: int
    best: float
    """The best value at the step."""


def _rung_rows(record: StudyRecord) -> list[RungRow]:
    rows = []
    for step in sorted({step for trial in record.trials for step in trial.rungs}):
        reached = [trial for trial in record.trials if step in trial.rungs]
        stopped = sum(trial.state == "pruned" and max(trial.rungs) == step for trial in reached)
        best = max((trial.rungs[step].value for trial in reached), key=record.first.better)
        rows.append(RungRow(step, len(reached), stopped, best))
    return rows


def _constraints(record: StudyRecord, best: Best | None) -> list[dict[str, Any]]:
    """Returns, for each constraint, its bounds, the number of finished trials that satisfy it, and the values of the
    best trial and the baseline."""
    rows = []
    by_number = {trial.number: trial for trial in record.trials}
    for bound in record.constraints:
        metric = measure_label(bound["metric"], bound.get("dataset", ""))
        low, high = bound.get("min"), bound.get("max")
        words = [f"{sign} {end:g}" for sign, end in (("at least", low), ("at most", high)) if end is not None]
        measured = [trial.constraints[metric] for trial in record.finished if metric in trial.constraints]
        kept = sum((low is None or value >= low) and (high is None or value <= high) for value in measured)
        rows.append(
            {
                "metric": metric,
                "bound": " and ".join(words),
                "kept": f"{kept} of {len(measured)}",
                "best": _measured(by_number.get(best.trial) if best and best.trial is not None else None, metric),
                "baseline": _measured(record.baseline, metric),
            }
        )
    return rows


def _measured(trial: Trial | None, metric: str) -> str:
    return number(trial.constraints[metric]) if trial and metric in trial.constraints else "-"


def _costs(record: StudyRecord) -> list[tuple[str, str, str, str]]:
    """Returns (name, total, per finished trial, per pruned trial) for each recorded cost."""
    titles = {"tokens": "response tokens", "gpu_hours": "GPU hours", "seconds": "seconds"}
    pruned = [trial for trial in record.trials if trial.state == "pruned"]
    return [
        (titles[name], number(record.spent[name]), _mean_cost(record.finished, name), _mean_cost(pruned, name))
        for name in COSTS
        if record.spent[name]
    ]


def _mean_cost(trials: Sequence[Trial], name: str) -> str:
    return number(statistics.fmean(getattr(trial, name) for trial in trials)) if trials else "-"


def _saved(record: StudyRecord) -> str:
    """Returns the cost that pruning saved: the further cost of the pruned trials if they had been trained to their
    end."""
    pruned = [trial for trial in record.trials if trial.state == "pruned"]
    if not pruned or not record.finished:
        return ""
    # The baseline's cost includes the study's data, base model and first evaluation.
    ended = [trial for trial in record.finished if not trial.baseline] or record.finished
    saved = {}
    for name in COSTS:
        whole = statistics.fmean(getattr(trial, name) for trial in ended)
        saved[name] = sum(max(0.0, whole - getattr(trial, name)) for trial in pruned)
    words = cost_words(**saved)
    trials = "1 trial" if len(pruned) == 1 else f"{len(pruned)} trials"
    return f"Pruning {trials} saved about {words}, estimated from the cost of finished trials." if words else ""
