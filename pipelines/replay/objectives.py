"""The objectives that are compared with a run's own: each objective that the user names, with each combination of swept
values."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rpg.replay.step import Sum, sum_of
from specs.errors import Issue, Position, SpecError
from specs.loader import with_objective
from specs.reading.yaml import parse_text
from specs.schema.base import set_fields
from specs.schema.experiment import Experiment

MOST_OBJECTIVES = 100
"""Largest number of objectives in one replay. Each recorded step is evaluated under every objective."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One objective for comparison with the run's own."""

    named: str
    """The file or mapping that the user named. Empty means the run's own objective, possibly with overrides."""
    experiment: Experiment
    """The run's experiment, with this objective and its advantage."""
    swept: dict[str, Any] = field(default_factory=dict)
    """Path -> the value that a sweep sets here."""

    @property
    def label(self) -> str:
        """Label that distinguishes the objective from the others: the user's name for it, and the swept values."""
        return self.label_without("")

    def label_without(self, path: str) -> str:
        """Returns the label without one of the swept values."""
        rest = {swept: value for swept, value in self.swept.items() if swept != path}
        return " ".join(filter(None, [self.named, *_settings(rest)])) or "replayed"

    @property
    def setting(self) -> str:
        """Returns the objective and its advantage in one line: the values that are not defaults."""
        objective = set_fields(self.experiment.objective)
        advantage = self.experiment.advantage.model_dump(mode="json")
        return f"{json.dumps({'type': self.experiment.objective.type, **objective})}, advantage {json.dumps(advantage)}"

    @property
    def sum(self) -> Sum | None:
        """The divergence that it sums over tokens, which no record has; None if it sums none."""
        return sum_of(self.experiment.objective)

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {
            "objective": self.experiment.objective.model_dump(mode="json"),
            "advantage": self.experiment.advantage.model_dump(mode="json"),
        }


def own_objective(spec: Experiment) -> Alternative:
    """Returns the objective that a run was trained with, from its resolved spec."""
    return Alternative("", with_objective(spec.model_dump(mode="json"), ""))


def alternatives(
    spec: Experiment,
    objectives: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    sweeps: Iterable[str] = (),
) -> list[Alternative]:
    """Returns every named objective with every combination of the swept values, in the given order.

    Args:
        spec: the run's spec, resolved.
        objectives: in the form of `with_objective`; empty means the run's own.
        overrides: `objective.kl_coef=0.1`, applied to each objective.
        sweeps: `objective.clip.low=0.1,0.2,0.3`: a list of values, its brackets may be left out.
    Raises:
        SpecError: nothing was trained, an objective or a sweep is wrong, or there are more than MOST_OBJECTIVES.
    """
    if not spec.trains:
        raise SpecError(Issue("the run only evaluated a model: there is no training to replay"))
    plain, swept = spec.model_dump(mode="json"), dict[str, list[Any]]()
    for sweep in sweeps:
        path, each = _sweep(sweep)
        if path in swept:
            raise SpecError(Issue("the field is swept twice", file=f"--sweep {sweep}", hint="give all values at once"))
        swept[path] = each
    given = objectives or ("",)
    number = len(given) * math.prod(map(len, swept.values()))
    if number > MOST_OBJECTIVES:
        counts = " x ".join([f"{len(given)} objectives", *(f"{len(values)} values" for values in swept.values())])
        allowed = f"at most {MOST_OBJECTIVES}"
        raise SpecError(Issue("too many objectives", given=f"{counts} = {number}", allowed=allowed))
    found: list[Alternative] = []
    issues: list[Issue] = []
    for objective, values in itertools.product(given, itertools.product(*swept.values())):
        cell = dict(zip(swept, values, strict=True))
        settings = _settings(cell)
        try:
            experiment = with_objective(plain, objective, [*overrides, *settings])
        except SpecError as error:
            issues += [_of_sweep(issue, settings) for issue in error.issues]
            continue
        found.append(Alternative(objective, experiment, cell))
    if issues:
        raise SpecError(*dict.fromkeys(issues))
    return found


def _settings(values: Mapping[str, Any]) -> list[str]:
    """Returns an override for each value."""
    return [f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in values.items()]


def _sweep(text: str) -> tuple[str, list[Any]]:
    """Returns the path and the values of `PATH=VALUE,VALUE`."""
    path, equals, values = text.partition("=")
    at = Position(f"--sweep {text}", 0, "")
    node = parse_text(values if values.lstrip().startswith("[") else f"[{values}]", lambda _line: at)
    plain = node.plain() if node else None
    if not equals or not isinstance(plain, list) or not plain:
        allowed = "path.to.field=value,value,..."
        raise SpecError(Issue("a sweep needs values", file=at.file, allowed=allowed))
    return path.strip(), plain


def _of_sweep(issue: Issue, settings: Sequence[str]) -> Issue:
    """Returns an override's issue, with the command-line option as its path."""
    if issue.file.removeprefix("--set ") not in settings:
        return issue
    return replace(issue, file=issue.file.replace("--set", "--sweep", 1))
