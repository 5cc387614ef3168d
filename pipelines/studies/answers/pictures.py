"""The charts of a study's page, made from the record for the trials that the page shows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.home.home import Home
from pipelines.report.charts import Chart, Row, line, line_chart
from pipelines.report.evidence import show
from pipelines.report.plots import (
    Mark,
    ParallelAxis,
    Scale,
    bar_chart,
    dot_chart,
    interval_chart,
    mark,
    parallel_chart,
    surface_chart,
)
from pipelines.report.statistics import Interval
from pipelines.studies.answers.answer import ArmResult, amount, answer
from pipelines.studies.answers.importances import Importance
from pipelines.studies.answers.results import StudyRecord, Trial, last_value, pareto_front

_PRUNED, _BASELINE = 7, 1
"""Colours of pruned trials and of the baseline."""
_MOST_NAMED = 6
"""Largest number of lines that a chart's hover box names."""
_NOT_SET = -0.09
"""Height at which a path crosses the axis of a parameter that the trial does not have."""
Searched = Mapping[str, Any]
"""A parameter's range in the form of the record."""


def confirmation_chart(record: StudyRecord, arms: Sequence[ArmResult]) -> Chart | None:
    """Returns the arms' means on fresh seeds with their intervals; None without an arm."""
    rows = [
        (result.arm.label, [Mark(result.arm.label, result.mean, _BASELINE if result.arm.baseline else 0)])
        for result in arms
    ]
    dataset = record.confirmation.dataset if record.confirmation else ""
    measure = f"{record.first.metric} on {dataset}".removesuffix(" on ")
    title = f"{measure} on fresh seeds"
    return interval_chart(rows, title=title, name="confirmation", share=record.first.is_share)


def study_figures(home: Home, record: StudyRecord) -> dict[str, Chart]:
    """Returns the figures of a study for a paper: each trial's value by its number, and the arms on fresh seeds."""
    values = [(float(trial.number), trial.value) for trial in record.finished]
    title = f"{record.first.measure} by trial"
    history = line_chart([line(values, dots=True)], title=title, name="history", x_label="trial")
    arms = confirmation_chart(record, answer(home, record).arms)
    return {chart.name: chart for chart in (history, arms) if chart}


def history_chart(record: StudyRecord, trials: Sequence[Trial]) -> Chart | None:
    """Returns a chart of each trial's value with its interval, and of the best so far. Pruned trials have the value at
    which they stopped."""
    goal = record.first
    dots = []
    for trial in trials:
        if trial.last is None or trial.state not in ("finished", "pruned"):
            continue
        stopped = trial.state == "pruned"
        interval = None if stopped else trial.last
        dots.append(_dot(record, trial, trial.number, trial.last.value, interval, shade=0.4 if stopped else 1.0))
    best_so_far = [(float(trial.number), believed(trial)) for trial in leaders(record)]
    if best_so_far:
        best_so_far.append((float(max(trial.number for trial in record.trials)), best_so_far[-1][1]))
    stairs = line(best_so_far, color=2, steps=True)
    return dot_chart(dots, title=f"{goal.measure} by trial", x_label="trial", scale=Scale(whole=True), lines=[stairs])


def leaders(record: StudyRecord) -> list[Trial]:
    """Returns the trials that were better than all before them, in order: by the present expectation of the sampler's
    model, or without a model by their own values."""
    found: list[Trial] = []
    for trial in record.finished:
        known = trial.feasible and (not record.has_model or trial.expected is not None)
        if known and (not found or record.first.better(believed(trial)) > record.first.better(believed(found[-1]))):
            found.append(trial)
    return found


def believed(trial: Trial) -> float:
    """Returns the value of a finished trial: the model's expectation, else its own value."""
    return trial.expected.value if trial.expected else trial.value


def rung_chart(record: StudyRecord, trials: Sequence[Trial], horizon: int) -> Chart | None:
    """Returns a chart of values over the steps at which trials were evaluated. Trials that were trained to their end
    are drawn stronger.

    Args:
        horizon: the step at which a trial ends; 0 if unknown, and then only rungs are drawn.
    """
    if not any(trial.rungs for trial in trials):
        return None
    curves = [(trial, points) for trial in trials if (points := _rungs(trial, horizon))]
    ended = [trial for trial, _ in curves if trial.finished]
    ranked = sorted(ended, key=lambda trial: -record.first.better(trial.value))
    named = {trial.number for trial in ranked[:_MOST_NAMED]}
    lines = [
        line(
            points,
            label=f"trial {trial.number}" if trial.number in named else "",
            color=_BASELINE if trial.baseline else 0 if trial.finished else _PRUNED,
            faint=not trial.finished,
        )
        for trial, points in curves
    ]
    return line_chart(lines, title=f"{record.first.measure} over the steps")


def slice_charts(record: StudyRecord, trials: Sequence[Trial]) -> list[Chart]:
    """Returns a chart of the value over each parameter. Later trials are darker."""
    finished = [trial for trial in trials if trial.finished]
    last = max((trial.number for trial in finished), default=0) or 1
    charts = []
    for path in record.parameters:
        dots = [
            _dot(record, trial, place, trial.value, shade=trial.number / last)
            for trial in finished
            if (place := _place_of(record, trial, path)) is not None
        ]
        charts.append(dot_chart(dots, title=path, scale=_scale(_with_own(record, path))))
    return [chart for chart in charts if chart]


def surface(record: StudyRecord, trials: Sequence[Trial], ranked: Sequence[Importance]) -> Chart | None:
    """Returns a chart of the value over both clip bounds, or over the two most important numeric parameters, and the
    path of the best. If the sampler has a model, the chart shows the model's expectation and its uncertainty."""
    chosen = _two_numeric(record, ranked)
    if chosen is None:
        return None
    across, upward = (_with_own(record, path) for path in chosen)
    places = {trial.number: tuple(_place_of(record, trial, path) for path in chosen) for trial in record.trials}
    known_places = {number: (x, y) for number, (x, y) in places.items() if x is not None and y is not None}
    both = [
        trial
        for trial in trials
        # The model expects nothing outside the ranges; a baseline there counts with its measured value.
        if trial.finished
        and trial.number in known_places
        and (not record.has_model or trial.expected or trial.baseline)
    ]
    dots = [_dot(record, trial, *known_places[trial.number], shade=0.6) for trial in both]
    values = [record.first.better(believed(trial)) for trial in both]
    known = [trial.expected or trial.interval for trial in both] if record.has_model and len(both) > 1 else []
    path = [known_places[trial.number] for trial in leaders(record) if trial.number in known_places]
    return surface_chart(
        dots,
        values,
        title=f"{chosen[1]} over {chosen[0]}",
        scales=(_scale(across), _scale(upward)),
        x_label=chosen[0],
        doubts=[interval.high - interval.low if interval and interval.known else 0.0 for interval in known],
        path=path,
    )


def parallel(record: StudyRecord, trials: Sequence[Trial]) -> Chart | None:
    """Returns a chart with one path for each trial across all parameters and its value. The best is drawn strongest."""
    finished = [trial for trial in trials if trial.finished]
    values = [trial.value for trial in finished]
    if len(finished) < 2 or min(values) == max(values):
        return None
    parallel_axes = [_parallel_axis(record, path, finished) for path in record.parameters]
    scaled = [(value - min(values)) / (max(values) - min(values)) for value in values]
    marks = [(place, amount(record.first, value)) for place, value in ((0.0, min(values)), (1.0, max(values)))]
    shades = scaled if record.first.direction == "maximize" else [1 - place for place in scaled]
    every = [*parallel_axes, ParallelAxis(record.first.metric, scaled, marks)]
    return parallel_chart(every, shades, title="All trials, the best strongest")


def importance_chart(ranked: Sequence[Importance]) -> Chart | None:
    """Returns a chart of the parameters whose importance is above chance."""
    bars = [(item.path, round(100 * item.share, 1)) for item in ranked if item.above_chance]
    return bar_chart(bars, title="Importance of the parameters", unit=" %")


def goals_chart(record: StudyRecord, trials: Sequence[Trial]) -> Chart | None:
    """Returns a chart of the first two of several goals against each other. A line joins the Pareto front."""
    if len(record.goals) < 2:
        return None
    front = {trial.number for trial in pareto_front(record)}
    dots = [
        _dot(record, trial, trial.values[0], trial.values[1], shade=1.0 if trial.number in front else 0.3)
        for trial in trials
        if trial.finished
    ]
    first, second = record.goals[:2]
    title = f"{second.measure} over {first.measure}"
    edge = sorted(trial.values[:2] for trial in record.finished if trial.number in front)
    joined = [line([(x, y) for x, y in edge], color=2)] if len(record.goals) == 2 and len(edge) > 1 else []
    return dot_chart(dots, title=title, x_label=first.measure, lines=joined)


def _dot(
    record: StudyRecord, trial: Trial, x: float, y: float, interval: Interval | None = None, *, shade: float
) -> Row:
    """Returns a trial's dot. `shade`: from 0 (pale) to 1."""
    pruned = trial.state == "pruned"
    color = _PRUNED if pruned else _BASELINE if trial.baseline else 0
    hollow, text = pruned or not trial.feasible, _label(record, trial)
    return mark(x, y, text, interval, color=color, hollow=hollow, opacity=round(0.25 + 0.75 * shade, 2))


def _rungs(trial: Trial, horizon: int) -> list[tuple[float, float]]:
    """Returns (step, value) at each rung and at the trial's end."""
    at = {step: interval.value for step, interval in trial.rungs.items()}
    if trial.finished and horizon:
        at[horizon] = trial.value
    return [(float(step), value) for step, value in sorted(at.items())]


def _label(record: StudyRecord, trial: Trial) -> str:
    """Returns `trial 7: 65.0 %, objective.clip.low 0.2, ...`."""
    value = trial.last.value if trial.last else math.nan
    if trial.state == "pruned":
        state = f", pruned at step {trial.rung}"
    else:
        state = "" if trial.feasible else ", breaks a constraint"
    settings = "".join(f", {path} {show(setting)}" for path, setting in record.params_of(trial).items())
    expected = f", expected {amount(record.first, trial.expected.value)}" if trial.expected else ""
    return f"trial {trial.number}: {amount(record.first, value)}{expected}{state}{settings}"


def _names(searched: Searched) -> list[Any]:
    """Returns the choices, or the names of the cases; empty for a range of numbers."""
    return list(searched.get("choice") or searched.get("cases") or ())


def _with_own(record: StudyRecord, path: str) -> Searched:
    """Returns a parameter's range. Choices include the baseline's own value."""
    searched = record.parameters[path]
    names = _names(searched)
    if not names or path not in record.outside:
        return searched
    return {**searched, "cases": None, "choice": [*names, record.outside[path]]}


def _scale(searched: Searched) -> Scale:
    names = tuple(show(value) for value in _names(searched))
    return Scale(names, bool(searched.get("log")), "int" in searched)


def _place(value: Any, searched: Searched) -> float:
    """Returns a value's position on an axis: its logarithm to base 10 in a logarithmic range, its index among choices.
    A schedule has the position of its last value."""
    if names := _names(searched):
        return float(names.index(value))
    value = last_value(value)
    return math.log10(value) if searched.get("log") else float(value)


def _place_of(record: StudyRecord, trial: Trial, path: str) -> float | None:
    """Returns a trial's position on a parameter's axis. None if the trial has no value for it, or a value without a
    position, such as a baseline's 0 on a logarithmic axis."""
    params, searched = record.params_of(trial), _with_own(record, path)
    if path not in params:
        return None
    value = last_value(params[path])
    if not _names(searched) and (not isinstance(value, (int, float)) or (searched.get("log") and value <= 0)):
        return None
    return _place(params[path], searched)


def _two_numeric(record: StudyRecord, ranked: Sequence[Importance]) -> tuple[str, str] | None:
    numeric = [path for path, searched in record.parameters.items() if not _names(searched)]
    low = next((path for path in numeric if path.endswith("clip.low")), None)
    high = next((path for path in numeric if path.endswith("clip.high")), None)
    if low and high:
        return low, high
    ordered = [item.path for item in ranked if item.path in numeric]
    ordered += [path for path in numeric if path not in ordered]
    return (ordered[0], ordered[1]) if len(ordered) > 1 else None


def _parallel_axis(record: StudyRecord, path: str, trials: Sequence[Trial]) -> ParallelAxis:
    searched = _with_own(record, path)
    places = [_place_of(record, trial, path) for trial in trials]
    having = [place for place in places if place is not None]
    if names := _names(searched):
        low, high = 0.0, float(max(1, len(names) - 1))
        marks = [(index / high, show(value)) for index, value in enumerate(names)]
    else:
        ends = searched.get("float") or searched["int"]
        # A range may have been narrowed since a trial was sampled from it.
        crossed = [*having, *(_place(end, searched) for end in ends)]
        low, high = min(crossed), max(crossed)
        marks = [((_place(end, searched) - low) / (high - low), show(end)) for end in ends]
        own = [place for trial, place in zip(trials, places, strict=True) if trial.baseline and place is not None]
        marks += [((own[0] - low) / (high - low), show(record.outside[path]))] if own and path in record.outside else []
    if None in places:
        without = [trial for trial, place in zip(trials, places, strict=True) if place is None]
        unplaced = {show(record.params_of(trial).get(path, "not set")) for trial in without}
        marks.append((_NOT_SET, ", ".join(sorted(unplaced))))
    crossings = [_NOT_SET if place is None else (place - low) / (high - low) for place in places]
    return ParallelAxis(path.removeprefix("objective."), crossings, marks)
