"""The report of a study: the best values and how sure they are, then the search that found them."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipelines.home import Home
from pipelines.report.charts import Line, line_chart
from pipelines.report.evidence import accuracies, load_run, show
from pipelines.report.page import publish, render
from pipelines.report.plots import Dot, Mark, Upright, bar_chart, interval_chart, parallel_chart, slice_chart
from pipelines.report.statistics import Interval, arms_against_first
from pipelines.studies import space
from rpg.files import read_json
from specs.errors import Issue, SpecError
from storage import Store

Record = dict[str, Any]


def write_study_report(home: Home, name: str, path: Path | None = None) -> Path:
    """Writes the page of a study (to its `report.html` by default) and returns its path.

    Raises:
        SpecError: no study has that name.
    """
    record = read_record(home, name)
    finished = finished_trials(record)
    best, baseline = best_trial(record), baseline_trial(record)
    page = render(
        "study.html",
        name=name,
        question=record["question"],
        facts=_facts(record, finished),
        answer=answer(home, record),
        method=_method(best),
        best=best,
        command=command(record, best) if best else "",
        comparison=_comparison(best, baseline),
        history=_history(record, finished),
        importances=bar_chart(importances(home, record), title="Importance of the parameters", unit=" %"),
        slices=[_slice(path, searched, finished) for path, searched in record["parameters"].items()],
        parallel=_parallel(record, finished),
        parameters=list(record["parameters"]),
        trials=record["trials"],
        show=show,
    )
    return publish(path or home.study(name) / "report.html", page)


def read_record(home: Home, name: str) -> Record:
    """A study's record. Raises SpecError where there is none."""
    record = read_json(home.study(name) / "study.json")
    if not record:
        raise SpecError(Issue("no such study", given=name, hint="`rpg study list` lists them"))
    return record


def finished_trials(record: Record) -> list[Record]:
    """The trials that have a value, in their order."""
    return [trial for trial in record["trials"] if trial["state"] == "finished"]


def best_trial(record: Record) -> Record | None:
    """The finished trial with the best value, the first of equals."""
    sign = 1 if record["direction"] == "maximize" else -1
    return max(finished_trials(record), key=lambda trial: (sign * trial["value"], -trial["number"]), default=None)


def baseline_trial(record: Record) -> Record | None:
    """The finished trial with the experiment's own values."""
    return next((trial for trial in finished_trials(record) if trial["baseline"]), None)


def answer(home: Home, record: Record) -> str:
    """The best value in a sentence, against the experiment's own."""
    best, baseline = best_trial(record), baseline_trial(record)
    if best is None:
        return "No trial has finished yet."
    result = f"{record['goal'].split(' ', 1)[1]} is {best['value']:.3f}"
    if baseline is None:
        return f"The best {result}, with {_values(best)}."
    if baseline["number"] == best["number"]:
        return f"Nothing found beats the experiment's own values: {result}."
    against = f"{best['value'] - baseline['value']:+.3f} against the experiment's own values"
    if gap := _difference(home, record, baseline, best):
        seeds = len(best["run_ids"]) + len(baseline["run_ids"])
        sure = "" if gap.excludes(0) and seeds > 2 else ", which may be chance"
        ends = f" [{gap.low:+.3f}, {gap.high:+.3f}]" if gap.known else ""
        against = f"{gap.value:+.3f}{ends} against the experiment's own values{sure}"
    return f"The best {result}, with {_values(best)}: {against}."


def _difference(home: Home, record: Record, baseline: Record, best: Record) -> Interval | None:
    """Of mean@k, on the same problems; None for other measures."""
    goal, dataset = record["goal"].split(" ")[1], record["goal"].split(" ")[3]
    if not goal.startswith("mean@"):
        return None
    with Store.open(home.root) as store:
        scores = accuracies(store, [*baseline["run_ids"], *best["run_ids"]])[dataset]
    sides = [[scores[run_id][max(scores[run_id])] for run_id in trial["run_ids"]] for trial in (baseline, best)]
    shared = sorted(set.intersection(*(set(run) for side in sides for run in side)))
    first, second = ([[run[problem] for problem in shared] for run in side] for side in sides)
    confidence = load_run(home, best["run_ids"][0]).spec["evaluation"]["confidence"]
    return arms_against_first([first, second], confidence=confidence)[0]


def command(record: Record, trial: Record) -> str:
    """The line that runs the experiment with a trial's values."""
    values = {**record["overrides"], **trial["params"]}
    settings = " ".join(f"--set {shlex.quote(_plainly(setting))}" for setting in space.overrides(values))
    return f"rpg run {shlex.quote(record['experiment'])} {settings}"


def _plainly(setting: str) -> str:
    """`a.b="word"` as `a.b=word`, where it is the same word without its quotes."""
    path, _, text = setting.partition("=")
    bare = text.strip('"')
    is_word = text == f'"{bare}"' and re.fullmatch(r"[A-Za-z_]\w*", bare) and bare not in ("true", "false", "null")
    return f"{path}={bare}" if is_word else setting


def importances(home: Home, record: Record) -> list[tuple[str, float]]:
    """PED-ANOVA's share of each parameter in percent, the largest first; empty where there is too little to tell."""
    from optuna.importance import get_param_importances

    from pipelines.studies.storage import load_study

    if len({trial["value"] for trial in finished_trials(record)}) < 4:
        return []
    try:
        by_path = get_param_importances(load_study(home, record["name"]))
    except (ValueError, RuntimeError):
        return []
    shares = [(path, round(100 * share, 1)) for path, share in by_path.items()]
    return shares if all(math.isfinite(share) for _, share in shares) else []


def _facts(record: Record, finished: Sequence[Record]) -> list[str]:
    failed = sum(trial["state"] == "failed" for trial in record["trials"])
    facts = [record["name"], record["goal"], f"{len(finished)} of {record['trials_wanted']} trials finished"]
    facts += [f"{failed} failed"] if failed else []
    return [*facts, f"sampler {record['sampler']}", Path(record["experiment"]).name]


def _method(best: Record | None) -> str:
    if best is None or best["value_low"] is None:
        return ""
    interval = f"[{best['value_low']:.3f}, {best['value_high']:.3f}]"
    picked = "It is the best of several, so it flatters itself a little"
    test = "a run with new seeds is the test"
    return f"95 % interval of the best trial (number {best['number']}): {interval}. {picked}; {test}."


def _comparison(best: Record | None, baseline: Record | None) -> Markup:
    shown = [("best", best), ("the file's own values", baseline)]
    rows = [
        (label, [Mark(label, _interval(trial), color)])
        for color, (label, trial) in enumerate(shown)
        if trial is not None
    ]
    return interval_chart(rows, title="Best trial and baseline", share=True) if len(rows) == 2 else Markup("")


def _history(record: Record, finished: Sequence[Record]) -> Markup:
    better = max if record["direction"] == "maximize" else min
    points = [(float(trial["number"]), float(trial["value"])) for trial in finished]
    best_so_far = [(x, better(y for _, y in points[: index + 1])) for index, (x, _) in enumerate(points)]
    lines = [Line(points, label="trial", dots=True), Line(best_so_far, label="best so far", color=1, steps=True)]
    return line_chart(lines, title="Value by trial", x_label="trial")


def _slice(path: str, searched: Mapping[str, Any], finished: Sequence[Record]) -> Markup:
    names = [show(value) for value in searched["choice"]] if "choice" in searched else []
    log = bool(searched.get("log"))
    last = max((trial["number"] for trial in finished), default=0) or 1
    dots = [
        Dot(
            x=_place(trial["params"][path], searched),
            y=trial["value"],
            label=f"trial {trial['number']}: {path}={show(trial['params'][path])}, {trial['value']:.4f}",
            shade=trial["number"] / last,
        )
        for trial in finished
        if path in trial["params"]
    ]
    return slice_chart(dots, title=path, names=names, log=log, whole="int" in searched)


def _place(value: Any, searched: Mapping[str, Any]) -> float:
    """Where a value lies: the logarithm to base 10 of a logarithmic range, the position of a choice."""
    if "choice" in searched:
        return float(searched["choice"].index(value))
    return math.log10(value) if searched.get("log") else float(value)


def _parallel(record: Record, finished: Sequence[Record]) -> Markup:
    whole = [trial for trial in finished if set(trial["params"]) == set(record["parameters"])]
    values = [trial["value"] for trial in whole]
    if len(whole) < 2 or min(values) == max(values):
        return Markup("")
    uprights = [_upright(path, searched, whole) for path, searched in record["parameters"].items()]
    scaled = [(value - min(values)) / (max(values) - min(values)) for value in values]
    marks = [(0.0, f"{min(values):.3f}"), (1.0, f"{max(values):.3f}")]
    shades = scaled if record["direction"] == "maximize" else [1 - place for place in scaled]
    return parallel_chart([*uprights, Upright("value", scaled, marks)], shades, title="All trials, the best strongest")


def _upright(path: str, searched: Mapping[str, Any], trials: Sequence[Record]) -> Upright:
    places = [_place(trial["params"][path], searched) for trial in trials]
    if "choice" in searched:
        low, high = 0.0, float(len(searched["choice"]) - 1)
        marks = [(index / high, show(value)) for index, value in enumerate(searched["choice"])]
    else:
        ends = searched.get("float") or searched["int"]
        # A range may have been narrowed since a trial was drawn from it.
        low, high = min(*places, _place(ends[0], searched)), max(*places, _place(ends[1], searched))
        marks = [(0.0, show(ends[0])), (1.0, show(ends[1]))]
    return Upright(path.removeprefix("objective."), [(place - low) / (high - low) for place in places], marks)


def _values(trial: Record) -> str:
    return ", ".join(f"{path} {show(value)}" for path, value in trial["params"].items())


def _interval(trial: Record) -> Interval:
    low, high = (math.nan if trial[end] is None else trial[end] for end in ("value_low", "value_high"))
    return Interval(trial["value"], low, high)
