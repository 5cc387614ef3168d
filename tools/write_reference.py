"""Writes the reference pages under docs/ from the code, so that they stay up to date: spec.md from the schema,
metrics.md, tables.md from the store, commands.md from the command line, the tables of objectives.md from the equations,
and the list of the decisions. It also writes the JSON Schemas that the shipped specs name.
"""

import inspect
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from specs.bounds import BOUNDS
from specs.errors import Issue
from specs.extensions import variants
from specs.json_schema import json_schema
from specs.loader import SCHEMAS
from specs.metrics import METRICS, Metric
from specs.schema.base import documentation, is_open
from specs.schema.fields import members
from specs.schema.objective import Divergence, Objective, PublishedObjective, SummedOver

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = "<!-- written by tools/write_reference.py -->\n"


def main() -> None:
    """Writes the pages; with --check prints the outdated ones and exits with 1."""
    stale = []
    for name, text in pages().items():
        path = (ROOT if name.startswith("specs/") else DOCS) / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python tools/write_reference.py")


def pages() -> dict[str, str]:
    """Returns file name -> text."""
    return {
        "spec.md": spec_page(),
        "metrics.md": metrics_page(),
        "tables.md": tables_page(),
        "objectives.md": objectives_page(),
        "commands.md": command_page(),
        "decisions/index.md": decisions_page(),
        **{f"specs/json/{kind}.json": json.dumps(json_schema(kind, installed=False)) + "\n" for kind in SCHEMAS},
    }


EXTENDING = """
## Extending another file

`extends: FILE` merges a spec over another, whose path is relative to this file. The other file may extend a third.
`--set` overrides both. Keys that both files have are merged:

| in both files | result |
|---|---|
| sections, including `matrix`, its `product` and its `zip` | one section with the keys of both |
| lists, including `seeds`, `data.train` and the values of a field that varies | the list of this file |
| a section with another `source` or `type` in this file | this file's keys, and the other's that both kinds have |
| any other value | the value of this file |

- A path is relative to the file that contains it.
- `key: null` clears a key that is none by default (`warm_up`, `matrix`, `training.lora`), and empties a text, list or
  mapping that is empty by default (`question`, `notify`, `training.guards`). For any other key null is an error.
- Fields that vary in the other file vary in this file too, in combination with its own `matrix`; a warning names them.
  `objective.kl_coef: null` in this file's `product` or `zip` removes such a field, `matrix: null` removes all.

```yaml
# spec
extends: ../experiments/quickstart.yaml
name: rates
matrix:
  product:
    training.optimizer.learning_rate: [1.0e-4, 1.0e-3]
```

`rpg plan FILE --resolved` shows each value of each run, with the file and line of its origin.
"""


def spec_page() -> str:
    """Returns the page with every field of an experiment, a study and an evaluation."""
    lines = [
        "# The spec file",
        MADE,
        "Every key, its type, default and meaning. Keys marked *execution* affect where and how work runs and never",
        "change a result or its fingerprint. `rpg schema` prints the same as JSON Schema, for completion in an editor.",
    ]
    lines += ["", "## Bounds", "", "Larger values are refused, so that any file is checked quickly.", ""]
    lines += ["| of | at most |", "|---|---|", *(f"| {of} | {most:,} |" for of, most in BOUNDS.items())]
    lines += EXTENDING.splitlines()
    seen: set[type[BaseModel]] = set()
    for root in SCHEMAS.values():
        lines += _section(root, seen)
    return "\n".join(lines).rstrip() + "\n"


def _section(model: type[BaseModel], seen: set[type[BaseModel]]) -> list[str]:
    if model in seen:
        return []
    seen.add(model)
    lines = ["", f"## {model.__name__}", "", _flat(model.__doc__), ""]
    nested: list[type[BaseModel]] = []
    kind = next((base for base in model.__mro__[1:] if is_open(base)), None)
    if is_open(model):
        ours = variants(model, installed=False)
        nested += ours.values()
        links = ", ".join(f"[`{name}`](#{variant.__name__.lower()})" for name, variant in ours.items())
        lines += [f"`{model.tag}` is {links}, or what an [installed package](extending.md) offers; each has", ""]
        lines[-2] += " keys of its own beside these."
    fields = {name: field for name, field in model.model_fields.items() if not kind or name not in kind.model_fields}
    if kind:
        lines[-2] += f" {'Beside the' if fields else 'The'} keys of [{kind.__name__}](#{kind.__name__.lower()})"
        lines[-2] += ":" if fields else "."
    if fields:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        lines.append(_row(name, field, documentation(model, name)))
        nested += _models(field.annotation)
    for child in nested:
        lines += _section(child, seen)
    return lines


def _row(name: str, field: FieldInfo, meaning: str) -> str:
    bounds = ", ".join(
        f"{sign} {getattr(item, key)}"
        for item in field.metadata
        for key, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(item, key, None) is not None
    )
    kind = _type(field.annotation) + (f" {bounds}" if bounds else "")
    extra = field.json_schema_extra
    mark = "*execution* " if isinstance(extra, dict) and extra.get("identity") is False else ""
    return _table_row(f"`{name}`", kind, _default(field), mark + _flat(meaning))


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default_factory() if field.default is PydanticUndefined else field.default  # type: ignore[misc, call-arg]
    if isinstance(value, BaseModel) or (isinstance(value, dict) and value):
        said = value.model_dump() if isinstance(value, BaseModel) else value
        tag = next((said[key] for key in ("type", "source", "engine") if key in said), None)
        return f"`{tag}`" if tag else "its defaults"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return "none" if value is None or value in ("", {}) else f"`{value}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin in (list, tuple, dict):
        kinds = [_type(argument) for argument in arguments if argument is not ...]
        return f"list of {' and '.join(dict.fromkeys(kinds))}" if origin is not dict else f"mapping to {kinds[1]}"
    if arguments:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, "any value" if annotation is Any else str(annotation))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


def metrics_page() -> str:
    """Returns the page with every metric that a step of training records."""
    lines = [
        "# Metrics",
        MADE,
        "A step of training records one value of each in the table `metrics` (run_id, step, name, value, recorded_at):",
        "`rpg sql \"select step, value from metrics where name = 'reward/mean'\"`.",
        "",
        "Means over tokens are over the response tokens that count, of all ranks; a token counts once for each update",
        "that trains on it. Times are the first rank's. π is the policy being trained, π_old the same at the start of",
        "the batch, π_ref the reference, π_rollout the engine's policy.",
        "",
        "*better*: the better direction, other things equal; empty if neither is better. *guard*: `training.guards`"
        " can watch",
        "it, `training.checkpoint.keep_best` can choose by it. *chart*: reports draw it, `rpg compare --all` shows it.",
        "",
        "With `reward.type: weighted_sum` each term is recorded too, as `reward/NAME/mean`: the mean of its scores",
        "over the step, not weighted. With several training sets the mean of each is `reward/mean/SET`, and that of a",
        "term `reward/NAME/mean/SET`, in the steps that have a problem of the set. The view",
        "[`metric_names`](tables.md#metric_names) has this page's table in SQL.",
        "",
        "| name | unit | range | better | guard | chart | meaning |",
        "|---|---|---|---|---|---|---|",
        *(_metric_row(metric) for metric in METRICS),
    ]
    return "\n".join(lines) + "\n"


def _metric_row(metric: Metric) -> str:
    guarded, charted = ("yes" if used else "" for used in (metric.guardable, metric.charted))
    only = f" Recorded only with {metric.recorded_with}." if metric.recorded_with else ""
    meaning = f"{metric.title}. {metric.meaning}{only}"
    return _table_row(f"`{metric.name}`", metric.unit, _range(metric), metric.better, guarded, charted, meaning)


def _range(metric: Metric) -> str:
    if metric.least == -math.inf:
        return ""
    return f"≥ {metric.least:g}" if metric.most == math.inf else f"{metric.least:g} to {metric.most:g}"


def tables_page() -> str:
    """Returns the page with every table and view that a query may name, with its columns."""
    from storage import Store
    from storage.documentation import descriptions

    described = descriptions()
    lines = [
        "# Tables and views",
        MADE,
        "The tables of `rpg sql`; another page has [queries to start from](sql.md). Times are UTC. `run_id`",
        "joins everything, and a step's responses and tokens by (`run_id`, `step`, `rollout_id`) too. A run that was",
        "resumed counts each step once: rows that a later attempt trained again are left out. Metric names and units",
        "are in [Metrics](metrics.md).",
    ]
    with tempfile.TemporaryDirectory() as empty, Store.open(Path(empty)) as store:
        listed = "select table_name from information_schema.tables where table_schema = 'main' order by table_name"
        for (name,) in store.query(listed).rows:
            text = described[name]
            lines += ["", f"## {name}", "", text.about, "", "| column | type | meaning |", "|---|---|---|"]
            for column, kind, *_ in store.query(f"describe {name}").rows:
                lines.append(_table_row(f"`{column}`", kind, text.columns[column]))
    return "\n".join(lines) + "\n"


def objectives_page() -> str:
    """Returns the current page with its tables rewritten."""
    page = (DOCS / "objectives.md").read_text(encoding="utf-8")
    written = {"divergences": _divergences(), "sums": _sums(), "rivals": _rivals(), "gallery": _gallery()}
    for name, lines in written.items():
        mark = f"<!-- {name}: written by tools/write_reference.py -->"
        table = "\n".join([mark, *lines, "<!-- end -->"])
        page, count = re.subn(f"{mark}.*?<!-- end -->", table, page, flags=re.DOTALL)
        assert count == 1, name
    return page


def _divergences() -> list[str]:
    from rpg.objectives.divergence import LOSSES, WEIGHTS

    rows = ["| `divergence` | of | K | D |", "|---|---|---|---|"]
    for name, weight in WEIGHTS.items():
        of = _paragraphs(weight)[1].partition(".")[0].removeprefix("K of ")
        rows.append(_table_row(f"`{name}`", of, _paragraphs(weight)[0], _paragraphs(LOSSES[name])[0]))
    return rows


def _sums() -> list[str]:
    """A table of the levels, sums and divergences of RPG: which of them the schema and the rules of a spec accept."""
    from specs import SpecError, load_experiment, parse_objective
    from specs.rules import issues_of

    shipped = ROOT / "specs" / "experiments"
    columns = {
        "LoRA": load_experiment(shipped / "quickstart.yaml", ["training.lora={rank: 8}"]),
        "ZeRO 3": load_experiment(shipped / "quickstart.yaml", ["training.zero_stage=3"]),
        "sequence parallel": load_experiment(
            shipped / "quickstart.yaml", ["training.ranks=2", "training.sequence_parallel_size=2"]
        ),
        "agents": load_experiment(shipped / "agent.yaml"),
        "several turns": load_experiment(shipped / "tool-use.yaml"),
    }
    reasons: dict[str, int] = {}

    def cells(**settings: str) -> tuple[str, ...]:
        try:
            objective = parse_objective({"type": "rpg", **settings})
        except SpecError as error:
            return (_refused(error.issues[0], reasons),) * len(columns)
        found = []
        for experiment in columns.values():
            issues = issues_of(experiment.model_copy(update={"objective": objective}))
            refused = [issue for issue in issues if issue.path[:1] == ("objective",)]
            found.append(_refused(refused[0], reasons) if refused else "works")
        return tuple(found)

    rows = [_table_row("`level`", "`kl`", "`divergence`", *columns), "|---" * (3 + len(columns)) + "|"]
    for level, kl in itertools.product(("token", "to_go", "sequence"), get_args(SummedOver)):
        alike: dict[tuple[str, ...], list[str]] = {}
        for divergence in get_args(Divergence):
            if divergence != "none":
                alike.setdefault(cells(level=level, kl=kl, divergence=divergence), []).append(divergence)
        for outcome, divergences in alike.items():
            named = ", ".join(f"`{each}`" for each in divergences) if len(alike) > 1 else "each"
            rows.append(_table_row(f"`{level}`", f"`{kl}`", named, *outcome))
    return [*rows, "", *(f"{number}. {reason}" for reason, number in reasons.items())]


def _refused(issue: Issue, reasons: dict[str, int]) -> str:
    """A cell that refers to the reason, which is added to the others if it is new."""
    reason = re.sub(r"^`kl: \w+` is", "a divergence over several tokens is", issue.message)
    return f"refused: {reasons.setdefault(reason, len(reasons) + 1)}"


def _gallery() -> list[str]:
    """Returns the table of the published objectives, from the comments at the top of their files."""
    rows = ["| file | source | differs | certificate |", "|---|---|---|---|"]
    for file in sorted((ROOT / "specs" / "objectives").glob("*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        said = dict(line[2:].split(": ", 1) for line in lines if line.startswith(("# Source: ", "# Differs: ")))
        certificate = [line[4:] for line in lines if line.startswith("#   ")]
        rows.append(_table_row(f"`{file.stem}`", said["Source"], said["Differs"], "<br>".join(certificate)))
    return rows


def _rivals() -> list[str]:
    from rpg.objectives.registry import equation

    rows = [
        "| `type` | loss of a token | w of | knobs | divergence | aggregation | published advantage | reference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in members(Objective):
        if not issubclass(kind, PublishedObjective):
            continue
        objective = kind()
        own = [name for name in kind.model_fields if name != "type" and name not in PublishedObjective.model_fields]
        rows.append(
            _table_row(
                f"`{objective.type}`",
                _paragraphs(equation.dispatch(kind))[0],
                objective.ratio_over.replace("_", " "),
                ", ".join(f"`{name}` {_knob(getattr(objective, name))}" for name in own),
                _penalty(objective) if objective.needs_reference else "none",
                f"`{objective.aggregation}`",
                ", ".join(f"{key} `{value}`" for key, value in kind.published["advantage"].items() if value != "none"),
                f"`{kind.published['reference']['source']}`",
            )
        )
    return rows


def _penalty(rival: PublishedObjective) -> str:
    credit = " from each token on" if rival.kl_in == "reward" and rival.kl_credit == "to_go" else ""
    return f"{rival.kl_coef:g} {rival.kl_estimator} in the {rival.kl_in}{credit}"


def _knob(value: Any) -> str:
    """Returns a number, or the numbers of a clip that are not 0."""
    if isinstance(value, BaseModel):
        return ", ".join(f"{name} {number:g}" for name, number in value.model_dump().items() if number)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _paragraphs(function: Callable[..., Any]) -> list[str]:
    return [_flat(paragraph) for paragraph in (inspect.getdoc(function) or "").split("\n\n")]


def command_page() -> str:
    """Returns the page with every verb, its arguments and options."""
    from pipelines.cli import app

    lines = [
        "# Commands",
        MADE,
        "`rpg VERB --help` says the same. Exit codes: 0 done, 1 the run or check failed, 2 the spec, the data or model",
        "it names, or the command line is wrong, 130 interrupted. Results go to stdout, progress and logs to stderr.",
        "`RPG_HOME` (default `.rpg` in the working directory) is where everything lives.",
    ]
    lines += _commands(typer.main.get_command(app), "rpg")
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, prefix: str) -> list[str]:
    lines: list[str] = []
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            lines += _commands(command, f"{prefix} {name}")
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        names = [(p.metavar or p.name or "").upper() for p in arguments]
        shown = " ".join(n if p.required else f"[{n}]" for n, p in zip(names, arguments, strict=True))
        lines += ["", f"## {prefix} {name} {shown}".rstrip(), "", _flat(command.help)]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        if options:
            lines += ["", "| option | meaning |", "|---|---|"]
        lines += [f"| `{', '.join(p.opts)}` | {_flat(p.help)} |".replace("||", "\\|\\|") for p in options]
    return lines


def decisions_page() -> str:
    """Returns the list of the decisions, by their titles."""
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in pages]
    lines = [f"- {int(path.name[:4])}: [{title}]({path.name})" for path, title in zip(pages, titles, strict=True)]
    about = "Each page has a choice, its alternatives, and the costs of the choice."
    return "\n".join(["# Why it is so", MADE, about, "", *lines]) + "\n"


if __name__ == "__main__":
    main()
