"""A run's spec with another objective in the place of its own: what `rpg replay` works under."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from specs.errors import Problem, SpecError
from specs.positions import Position, in_file_order, locate
from specs.reading import override, read_tree
from specs.schema.experiment import Experiment
from specs.translate import parse
from specs.tree import positions_of
from specs.yaml_text import Node, parse_bytes, parse_text

_SECTIONS = ("objective", "advantage")


def with_objective(spec: Mapping[str, Any], given: str, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a run's resolved spec under another objective.

    The advantage is the one that comes with the objective: what a spec file says of it, else the run's own where the
    objective is of the run's type, else the objective's published setting; overrides last.

    Args:
        given: a mapping (`{type: grpo}`), a file that holds one, or an experiment's spec file. Empty: the run's own.
        overrides: `objective.kl_coef=0.1`, `advantage.scale=none`.
    Raises:
        SpecError: every problem with what was given.
    """
    own = _tree(json.dumps(spec), "the run's spec")
    assert isinstance(own.value, dict)
    sections = _given(given) if given else {}
    kept = dict(own.value)
    if "objective" in sections and _type(sections["objective"]) != _type(own.value["objective"]):
        del kept["advantage"]
    root = Node({**kept, **sections}, own.at)
    for setting in overrides:
        if setting.partition(".")[0] not in _SECTIONS:
            message, allowed = "a replay changes these alone", "objective.FIELD=VALUE, advantage.FIELD=VALUE"
            raise SpecError(Problem(message, file=f"--set {setting}", allowed=allowed))
        root = override(root, setting, Experiment)
    experiment, problems = parse(Experiment, root.plain())
    if problems:
        raise SpecError(*in_file_order([locate(problem, positions_of(root)) for problem in problems]))
    assert isinstance(experiment, Experiment)
    return experiment


def _given(text: str) -> dict[str, Node]:
    """The sections that a mapping or a file gives."""
    if text.lstrip().startswith("{"):
        return {"objective": _tree(text, f"--objective {text}")}
    if os.path.isfile(text):
        with open(text, "rb") as file:
            root = parse_bytes(file.read(), text)
        if isinstance(root.value, dict) and "type" in root.value:
            return {"objective": root}
    root = read_tree(text, Experiment)
    assert isinstance(root.value, dict)
    if "objective" not in root.value:
        raise SpecError(
            Problem("has no objective", file=text, allowed="an experiment's spec, or the fields of an objective")
        )
    return {name: root.value[name] for name in _SECTIONS if name in root.value}


def _tree(text: str, name: str) -> Node:
    at = Position(name, 0, "")
    node = parse_text(text, lambda _line: at)
    return node if node else Node({}, at)


def _type(objective: Node) -> Any:
    plain = objective.plain()
    return plain.get("type", "rpg") if isinstance(plain, dict) else None
