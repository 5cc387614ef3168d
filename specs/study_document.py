"""StudyDocument: a study's file as read, its experiment, and the checks that the two fit each other."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specs.document import Document
from specs.errors import Issue, Path, Position, Positions, SpecError, locate, plain_positions, read_positions, refuse
from specs.metrics import BY_NAME
from specs.reading.files import misplaced
from specs.reading.validate import parse, show
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest, no_such_item, split, unknown
from specs.schema.study import Cases, Choice, Constraint, FloatRange, Goal, IntRange, Study

EVALUATED = re.compile(r"(mean|pass|maj)@[1-9][0-9]{0,3}")
"""What an evaluation measures; other measures are training metrics."""


@dataclass(frozen=True)
class StudyDocument:
    """A study with the places its fields come from, and the experiment that its trials are variants of."""

    study: Study
    experiment: Document
    """The study's experiment, `overrides` applied."""
    source: dict[str, Any]
    """What the study's file says, paths absolute."""
    positions: Positions
    """Of the study's own file."""

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """The experiment's, less those about a field that the study varies."""
        varied = [split(path) for path in self.study.parameters]
        return tuple(
            warning
            for warning in self.experiment.warnings
            if not any(warning.path[: len(path)] == path[: len(warning.path)] for path in varied)
        )

    def locate(self, issue: Issue) -> Issue:
        """The issue with file, line and snippet of the study's file."""
        return locate(issue, self.positions)

    def trial(self, values: Mapping[str, Any]) -> Document:
        """The experiment with a trial's values (path -> value), checked like a file. Raises SpecError."""
        return self.experiment.with_values(values, self.positions.get(("parameters",), Position("", 0, "")))

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return {
            "source": self.source,
            "study": self.study.model_dump(mode="json"),
            "experiment": self.experiment.to_json(),
            "positions": plain_positions(self.positions),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StudyDocument":
        """The document that `to_json` wrote. Raises SpecError where this version's schema no longer takes it."""
        positions = read_positions(data["positions"])
        study = _study(data["source"], positions)
        return cls(study, Document.from_json(data["experiment"]), data["source"], positions)


def checked_study(
    source: dict[str, Any], positions: Positions, load_document: Callable[[str], Document]
) -> StudyDocument:
    """The document of a study's source. Raises SpecError with every issue, located."""
    study = _study(source, positions)
    refuse(
        _path_issues(study, lambda section, path: unknown(Experiment, split(path)) or _fixed(section, path)),
        positions,
    )
    experiment = load_document(study.experiment)
    refuse(_path_issues(study, lambda _, path: no_such_item(experiment.source, split(path))), positions)
    if study.overrides:
        experiment = experiment.with_values(study.overrides, positions[("overrides",)])
    document = StudyDocument(study, experiment, source, positions)
    refuse(list(_goals(study, experiment.experiment)) or list(_ends(document)), positions)
    return document


def places_of_goals(study: Study) -> Iterator[tuple[Path, Goal | Constraint]]:
    """Each goal and constraint with its place in the file."""
    if study.goal is not None:
        yield ("goal",), study.goal
    yield from ((("goals", index), goal) for index, goal in enumerate(study.goals))
    yield from ((("constraints", index), constraint) for index, constraint in enumerate(study.constraints))


def _path_issues(study: Study, check: Callable[[str, str], Issue | None]) -> list[Issue]:
    """What `check(section, path)` finds wrong with the paths that a study names, told at those paths."""
    return [
        dataclasses.replace(issue, path=(section, path))
        for section, paths in (("overrides", study.overrides), ("parameters", study.parameters))
        for path in paths
        if (issue := check(section, path))
    ]


def _study(source: dict[str, Any], positions: Positions) -> Study:
    study, issues = parse(Study, source)
    refuse([misplaced(issue, Study) for issue in issues], positions)
    assert isinstance(study, Study)
    return study


def _fixed(section: str, path: str) -> Issue | None:
    if section == "parameters" and split(path)[0] in ("name", "question", "seeds", "matrix"):
        return Issue("cannot be searched", hint="it belongs to the experiment as a whole")
    return None


def _goals(study: Study, experiment: Experiment) -> Iterator[Issue]:
    if experiment.matrix is not None:
        hint = "a study varies fields itself; write overrides: {matrix: null}"
        yield Issue("the experiment has a matrix", ("experiment",), hint=hint)
    for place, goal in places_of_goals(study):
        yield from _measured(place, goal, experiment)


def _measured(place: Path, goal: Goal | Constraint, experiment: Experiment) -> Iterator[Issue]:
    """What is wrong with what a goal or a constraint measures."""
    if not EVALUATED.fullmatch(goal.metric):
        yield from _trained(place, goal)
        return
    evaluated = experiment.evaluation.datasets or tuple(source.name for source in experiment.data.evaluation)
    if goal.dataset not in evaluated:
        allowed = ", ".join(evaluated) or "none: data.evaluation is empty"
        yield Issue("no such evaluation set", (*place, "dataset"), show(goal.dataset), allowed)
    measure, _, digits = goal.metric.partition("@")
    k, samples = int(digits), experiment.evaluation.samples_per_problem
    at = (*place, "metric")
    if k > samples:
        hint = "raise evaluation.samples_per_problem"
        yield Issue("more samples than are taken", at, goal.metric, f"k at most {samples}", hint)
    elif measure != "mean" and k != samples and k & (k - 1):
        powers = [2**exponent for exponent in range(samples.bit_length())]
        allowed = ", ".join(f"{measure}@{size}" for size in sorted({*powers, samples}))
        yield Issue("is not among the measures that are taken", at, goal.metric, allowed)


def _trained(place: Path, goal: Goal | Constraint) -> Iterator[Issue]:
    """What is wrong with a goal that is a training metric."""
    known = list(BY_NAME)
    if goal.metric not in known:
        allowed = "mean@k, pass@k, maj@k or a metric of training (docs/metrics.md)"
        yield Issue("no such measure", (*place, "metric"), show(goal.metric), allowed, nearest(goal.metric, known))
    elif goal.dataset:
        yield Issue("a training metric is of no evaluation set", (*place, "dataset"), show(goal.dataset))


def _ends(document: StudyDocument) -> Iterator[Issue]:
    """Each range's ends and each choice, tried alone and all lowest or all highest together."""
    candidates = {path: _candidates(item) for path, item in document.study.parameters.items()}
    lowest = {path: values[0] for path, values in candidates.items()}
    highest = {path: values[-1] for path, values in candidates.items()}
    trials = [{**lowest, path: value} for path, values in candidates.items() for value in values] + [highest]
    seen: set[tuple[Path, str]] = set()
    for values in trials:
        try:
            document.trial(values)
        except SpecError as error:
            for issue in error.issues:
                if (issue.path, issue.message) not in seen:
                    seen.add((issue.path, issue.message))
                    yield _at_parameter(issue, values)


def _candidates(item: FloatRange | IntRange | Choice | Cases) -> list[Any]:
    if isinstance(item, Choice):
        return list(item.choice)
    if isinstance(item, Cases):
        return list(item.cases.values())
    return list(item.float if isinstance(item, FloatRange) else item.int)


def _at_parameter(issue: Issue, values: Mapping[str, Any]) -> Issue:
    path = next((path for path in values if issue.path[: len(split(path))] == split(path)), "")
    where: Path = ("parameters", path) if path else ("parameters",)
    message = issue.message
    if not path:
        message += f" (for {', '.join(f'{name}={show(value)}' for name, value in values.items())})"
    return Issue(message, where, issue.given, issue.allowed, issue.hint)
