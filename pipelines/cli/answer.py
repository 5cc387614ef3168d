"""The final output of `rpg run`: accuracy before and after with intervals, the path of the report, and
next commands."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.home.home import Home
from pipelines.home.versions import names_of_others
from pipelines.prefect.flows.experiment import RunOutcome

if TYPE_CHECKING:
    from pipelines.report.answer import Outcome
    from pipelines.report.statistics import Interval
    from specs.loader import Document

_SET = "--set "
_LONGEST_COMMAND = 80
"""Characters. Longer commands are ignored when commands are aligned."""


def answer_lines(document: "Document", home: Home) -> list[str]:
    """Returns the answer of an experiment, from all its evaluated runs, pooled over seeds."""
    from pipelines.report.answer import outcomes_of
    from pipelines.report.answer.whole import answered
    from pipelines.report.evidence import experiment_groups
    from storage import Store

    name = document.experiment.name
    groups = experiment_groups(home, name)
    with Store.open(home.root) as store:
        text, found = answered(home, store, name, groups)
    lines = ["", document.experiment.question] if document.experiment.question else [""]
    lines += [text, ""]
    lines += [outcome_line(result, several=len(groups) > 1) for result in outcomes_of(found)]
    lines += ["", f"report  {home.experiment(name) / 'report.html'}"]
    if others := names_of_others(home, name):
        lines.append(f"        also run with other values: {', '.join(others)} (rpg report, rpg compare)")
    return lines


def answer_data(document: "Document", outcomes: Sequence[RunOutcome], home: Home) -> dict[str, Any]:
    """Returns the printed answer as plain data, with each run's ending."""
    from pipelines.report.compare import compare

    name = document.experiment.name
    runs = [
        {"run_id": each.run.run_id, "name": each.run.name, "status": each.status, "error": str(each.error or "")}
        for each in outcomes
    ]
    if not any(each.status == "finished" for each in outcomes):
        return {"experiment": name, "runs": runs}
    return {
        "experiment": name,
        "runs": runs,
        **compare(home, [name]).to_json(),
        "report": str(home.experiment(name) / "report.html"),
    }


def outcome_line(outcome: "Outcome", *, several: bool) -> str:
    """Formats `held_out  before 0.464 [0.42, 0.51]  after 0.802 [0.76, 0.84]  gain +0.338 [+0.29, +0.38]  (...)`."""
    parts = [f"{outcome.label}  {outcome.dataset}" if several else outcome.dataset]
    if outcome.before is not None:
        parts.append(f"before {_interval(outcome.before)}")
    parts.append(f"{outcome.measure if outcome.as_is else 'after'} {_interval(outcome.after)}")
    if outcome.gain is not None:
        parts.append(f"gain {_interval(outcome.gain, sign='+')}")
    problems = f"{outcome.num_problems} problem{'' if outcome.num_problems == 1 else 's'}"
    if outcome.as_is:
        if outcome.against_first is not None:
            parts.append(f"against the first {_interval(outcome.against_first, sign='+')}")
        return "  ".join([*parts, f"({problems})"])
    seeds = f"{outcome.num_seeds} seed{'' if outcome.num_seeds == 1 else 's'}"
    seeds += f" of which {outcome.num_failed} failed" if outcome.num_failed else ""
    parts.append(f"({problems}, {seeds}, {outcome.step} steps)")
    return "  ".join([*parts, outcome.after.holds_for] if outcome.num_seeds == 1 else parts)


def _interval(interval: "Interval", sign: str = "") -> str:
    ends = f" [{interval.low:{sign}z.3f}, {interval.high:{sign}z.3f}]" if interval.known else ""
    return f"{interval.value:{sign}z.3f}{ends}"


def next_lines(document: "Document", outcomes: Sequence[RunOutcome], *, single: bool = False) -> list[str]:
    """Returns three useful next commands, chosen by the results and quoted for any shell.

    Args:
        single: only one of several runs was requested.
    """
    file = partial(_with_settings, document)
    name = document.experiment.name
    finished = [outcome.run.run_id for outcome in outcomes if outcome.status == "finished"]
    commands: list[tuple[str, str]] = []
    experiment = document.experiment
    of_many = not single and (experiment.matrix is not None or len(experiment.seeds) > 1)
    if of_many and any(outcome.interrupted for outcome in outcomes):
        verb = "run" if experiment.trains else "evaluate"
        commands.append((f"rpg {verb} {file()}", "continue all runs; finished work is reused"))
    for outcome in outcomes:
        if outcome.status == "failed":
            commands.append((f"rpg logs {outcome.run.run_id}", "what went wrong"))
        if outcome.status in ("failed", "cancelled") and not (of_many and outcome.interrupted):
            commands.append((f"rpg resume {outcome.run.run_id}", "resume it"))
    settings = {str(outcome.run.values) for outcome in outcomes if outcome.status == "finished"}
    if document.experiment.trains:
        commands += _after_training(document, file, finished, several=len(settings) > 1)
    elif finished:
        varies = any(outcome.run.experiment.evaluation.temperature for outcome in outcomes)
        commands += _after_measuring(name, file, finished, several=len(settings) > 1, varies=varies)
    # A query over many runs is longer than a line: it does not widen the column.
    width = max((len(command) for command, _ in commands[:3] if len(command) <= _LONGEST_COMMAND), default=0)
    return ["", "next", *(f"  {command:<{width}}  {why}" for command, why in commands[:3])]


def _with_settings(document: "Document", setting: str = "") -> str:
    """Returns the file's name with the `--set` options that it was read with. Each field has one option: `further`,
    else the last."""
    files = dict.fromkeys(at.file for at in document.positions.values() if at.file)
    file = next((each for each in files if not each.startswith(_SET)), "FILE")
    overrides = [each.removeprefix(_SET) for each in files if each.startswith(_SET)]
    given = {each.partition("=")[0].strip(): each for each in overrides}
    if setting:
        field = setting.partition("=")[0]
        given = {name: each for name, each in given.items() if name != field and not name.startswith(f"{field}.")}
        given[field] = setting
    return " ".join([shlex.quote(file), *(f"--set {shlex.quote(each)}" for each in given.values())])


def _after_training(
    document: "Document", file: Callable[..., str], finished: Sequence[str], *, several: bool
) -> Iterator[tuple[str, str]]:
    name = document.experiment.name
    if several:
        yield f"rpg compare {name}", "the settings side by side, seeds pooled"
    elif len(finished) == 1 and len(document.experiment.seeds) == 1:
        yield f"rpg run {file('seeds=[0,1,2]')}", "narrower intervals: three seeds, pooled"
    if finished and (more := more_steps(document)):
        yield more
    if finished:
        query = f"select run, step, reward from learning_curves where {_are(finished)} order by all"
        yield f'rpg sql "{query}"', "the learning curves as rows"
        yield f"rpg show {finished[0]}", "one run whole"
    yield f"rpg plan {file('training.steps=...')}", "what another setting would run again"


def more_steps(document: "Document") -> tuple[str, str] | None:
    """Returns the command that trains twice as many steps, and the step from which it trains; None if the matrix sets
    the number."""
    from pipelines.planning.plan import why_from_the_start

    experiment = document.experiment
    steps, matrix = experiment.training.steps, experiment.matrix
    if matrix and "training.steps" in {*matrix.product, *matrix.zip}:
        return None
    why = why_from_the_start(experiment)
    what = f"more steps, from the start: {why}" if why else f"more steps, continuing from step {steps}"
    return f"rpg run {_with_settings(document, f'training.steps={2 * steps}')}", what


def _are(run_ids: Sequence[str]) -> str:
    """Returns the SQL condition that selects these runs: the experiment may have others, with other values."""
    listed = ", ".join(f"'{run_id}'" for run_id in run_ids)
    return f"run_id = {listed}" if len(run_ids) == 1 else f"run_id in ({listed})"


def _after_measuring(
    name: str, file: Callable[..., str], finished: Sequence[str], *, several: bool, varies: bool
) -> Iterator[tuple[str, str]]:
    """Yields commands after an evaluation. `varies`: responses to a problem differ, unlike greedy ones."""
    if several:
        yield f"rpg compare {name}", "every measure of the models side by side"
    query = f"select run, dataset, accuracy from accuracy_curves where {_are(finished)}"
    yield f'rpg sql "{query}"', "the accuracies as rows"
    if varies:
        more = file("evaluation.samples_per_problem=...")
        yield f"rpg evaluate {more}", "narrower intervals, from more responses to each problem"
    else:
        yield (
            f"rpg evaluate {file()}",
            "narrower intervals, after you add problems to `data.evaluation` (a greedy model has one answer each)",
        )
