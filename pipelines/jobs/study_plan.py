"""The plan of a study, for `rpg plan`: its space, its estimated cost, and its progress."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipelines.home.home import Home
from pipelines.planning.plan import Plan
from pipelines.studies import space
from pipelines.studies.answers.results import StudyRecord, cost_words
from pipelines.studies.confirmation import rounds
from pipelines.studies.cost import study_cost
from specs.machine.files import read_json
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    from rich.console import Console

_COSTS = {
    "runs": "runs",
    "trained_to_end": "trained to the end",
    "steps": "steps of training",
    "tokens": "response tokens",
    "evaluation_samples": "responses evaluated",
    "gpu_hours": "GPU hours",
}
SMALL_GPU_HOURS = 1.0
"""GPU hours below which the cost gets no row: such a model trains on any machine."""


def study_plan_data(document: StudyDocument, made: Plan, home: Home) -> dict[str, Any]:
    """Returns the plan as JSON data.

    Args:
        made: plan of the study's experiment; its data and base model serve every trial.
    """
    study, cost = document.study, study_cost(document)
    own, outside = document.own_params()
    record = read_json(home.study(study.name) / "study.json")
    return {
        "study": study.name,
        "question": study.question,
        "experiment": study.experiment,
        "parameters": space.plain(study.parameters),
        "own": own,
        "own_outside": outside,
        "trials": cost.trials,
        "seeds": list(cost.seeds),
        "sampler": study.sampler.type,
        "pruner": study.pruner.model_dump(mode="json"),
        "search": {"best": asdict(cost.best), "worst": asdict(cost.worst)},
        "confirmation": asdict(cost.confirmation),
        "rounds": rounds(study.confirm.seeds) if study.confirm else [],
        "budget": study.budget.model_dump(mode="json"),
        "varying_cost": list(cost.varying),
        "shared": {stage.stage: stage.action for stage in made.runs[0].stages if stage.stage in ("data", "base")},
        "done": _done(StudyRecord.of(record)) if record else None,
    }


def print_study_plan(document: StudyDocument, data: dict[str, Any], console: "Console") -> None:
    """Prints a study's plan for a reader."""
    from rich.markup import escape

    console.print(f"[bold]{data['study']}[/]  {escape(data['question'])}", end="\n\n")
    console.print(_space_table(data))
    console.print()
    console.print(_cost_table(data))
    console.print()
    for line in _lines(document, data):
        console.print(line, markup=False)


def _space_table(data: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("parameter", "range", "only if", "own value", box=None, pad_edge=False)
    for path, searched in data["parameters"].items():
        conditions = [f"{other} is {_either(wanted)}" for other, wanted in (searched.get("when") or {}).items()]
        own = _text(data["own"][path]) if path in data["own"] else "outside" if path in data["own_outside"] else "-"
        table.add_row(*map(Text, (path, _range(searched), " and ".join(conditions), own)))
    return table


def _cost_table(data: dict[str, Any]) -> Any:
    from rich.table import Table

    columns = [("search, at best", data["search"]["best"]), ("at worst", data["search"]["worst"])]
    if data["confirmation"]["runs"]:
        total = {name: _sum(data["search"]["worst"][name], data["confirmation"][name]) for name in _COSTS}
        columns += [("confirmation, at worst", data["confirmation"]), ("all, at worst", total)]
    table = Table(box=None, pad_edge=False)
    for title in ("", *(title for title, _ in columns)):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, title in _COSTS.items():
        if name != "gpu_hours" or _shows_gpu_hours(data):
            table.add_row(title, *(_number(cost[name]) for _, cost in columns))
    return table


def _shows_gpu_hours(data: dict[str, Any]) -> bool:
    return (data["search"]["worst"]["gpu_hours"] or 0) >= SMALL_GPU_HOURS


def _lines(document: StudyDocument, data: dict[str, Any]) -> list[str]:
    study = document.study
    seeds = f"seed {data['seeds'][0]}" if len(data["seeds"]) == 1 else f"seeds {', '.join(map(str, data['seeds']))}"
    sized = data["search"]["worst"]["evaluation_samples"] is not None
    evaluation = "evaluation included" if sized else "without evaluation, because the size of a set is not known yet"
    lines = [
        "bounds    tokens are upper bounds: every response has its full length, and every group that"
        " may be sampled again is counted",
    ]
    if _shows_gpu_hours(data):
        lines.append(f"          GPU hours are estimates for that number of tokens, {evaluation}")
    lines += [f"search    {data['trials']} trials, each with {seeds}; sampler {data['sampler']}, {_pruner(data)}"]
    if study.confirm:
        number = study.confirm.candidates
        arms = f"the baseline and the best {'trial' if number == 1 else f'{number} trials'}"
        *before, most = map(str, data["rounds"])
        looks = f" in rounds, compared after {', '.join(before)} and {most}" if before else ""
        lines.append(f"confirm   {arms}, each on at most {most} fresh seeds{looks}")
        if before:
            lines.append(
                "          a candidate that can no longer win gets no further seed; the first winner ends the"
                " confirmation"
            )
    units = {"tokens": "response tokens", "gpu_hours": "GPU hours", "hours": "hours"}
    limits = [f"{_number(limit)} {units[name]}" for name, limit in data["budget"].items() if limit]
    if limits:
        aside = ", minus the largest cost of the confirmation, estimated from the baseline's, but at most half"
        ends = f"the search ends after {' or '.join(limits)}{aside if study.confirm else ''}"
        lines.append(f"budget    {ends}; trials in progress are finished")
    lines.append(f"shared    {', '.join(f'{stage} {action}' for stage, action in data['shared'].items())}")
    if data["varying_cost"]:
        lines.append(f"varies    {', '.join(data['varying_cost'])}: counted at the experiment's own value")
    if data["done"]:
        states = ", ".join(f"{count} {state}" for state, count in data["done"]["trials"].items())
        confirmed = data["done"]["confirmation"]
        runs = f"; {confirmed['ended']} of {confirmed['runs']} runs of the confirmation" if confirmed else ""
        spent = f"; spent {words}" if (words := cost_words(**data["done"]["spent"])) else ""
        lines.append(f"done      trials: {states or 'none'}{runs}{spent}")
    return lines


def _done(record: StudyRecord) -> dict[str, Any]:
    """Returns the study's progress from its record."""
    states = dict.fromkeys(trial.state for trial in record.trials)
    units = record.confirmation.units if record.confirmation else ()
    ended = sum(unit.state in ("finished", "failed") for unit in units)
    return {
        "status": record.status,
        "trials": {state: record.count(state) for state in states},
        "confirmation": {"runs": len(units), "ended": ended} if units else None,
        "spent": dict(record.spent),
    }


def _pruner(data: dict[str, Any]) -> str:
    pruner = data["pruner"]
    if pruner["type"] == "none":
        return "every trial to its end"
    settings = [f"{name} {value}" for name, value in pruner.items() if name not in ("type", "rungs")]
    return f"{pruner['type']} at steps {', '.join(map(str, pruner['rungs']))} ({', '.join(settings)})"


def _range(searched: dict[str, Any]) -> str:
    if "choice" in searched:
        return " | ".join(_text(value) for value in searched["choice"])
    if "cases" in searched:
        return " | ".join(searched["cases"])
    whole, step = "int" in searched, searched["step"]
    low, high = searched["int" if whole else "float"]
    parts = ["whole"] if whole else []
    parts += [f"{_text(low)} to {_text(high)}"]
    parts += ["log"] if searched["log"] else []
    parts += [f"step {_text(step)}"] if step != whole else []
    return ", ".join(parts)


def _either(wanted: Any) -> str:
    return " or ".join(_text(value) for value in (wanted if isinstance(wanted, list) else [wanted]))


def _text(value: Any) -> str:
    from pipelines.report.evidence import show

    return show(value)


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.3g}"


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
