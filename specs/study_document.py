"""StudyDocument: a study's file as read, its experiment, and the checks that the two fit together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from specs.bounds import MAX_TRIED_VALUES
from specs.cells import FIXED, num_values_of
from specs.document import Document
from specs.errors import (
    Issue,
    Path,
    Position,
    Positions,
    SpecError,
    dotted,
    in_file_order,
    locate,
    plain_positions,
    read_issue,
    read_positions,
    refuse,
)
from specs.reading.files import misplaced
from specs.reading.validate import parse, show
from specs.rules import search_space
from specs.rules import study as study_rules
from specs.schema.experiment import Experiment
from specs.schema.fields import item_at, no_such_item, split, unknown
from specs.schema.study import Cases, Choice, FloatRange, Range, Study
from specs.study_space import (
    Params,
    allowed_by_conditions,
    bounds,
    build,
    candidates,
    holds,
    in_order,
    is_active,
    is_same,
    num_candidates,
    settings,
    values_by_name,
)

MOST_TRIED = 16
"""Largest number of candidates of a finite range for which all are tried. If there are more, only the ends and the
second lowest are tried."""


@dataclass(frozen=True)
class StudyDocument:
    """A study with the places of its fields, and the experiment that its trials vary."""

    study: Study
    experiment: Document
    """Experiment of the study, with `overrides` applied."""
    source: dict[str, Any]
    """Data of the study's file, with absolute paths."""
    positions: Positions
    """Positions in the study's own file."""

    warnings: tuple[Issue, ...] = ()
    """Warnings about settings that have no effect, in every trial or in the study itself, each at its place."""

    def locate(self, issue: Issue) -> Issue:
        """Returns the issue with file, line and snippet from the study's file."""
        return locate(issue, self.positions)

    def trial(self, values: Mapping[str, Any]) -> Document:
        """Returns the experiment with a trial's values (path -> value), checked like a file. Raises SpecError."""
        return self.experiment.with_values(values, self.positions.get(("parameters",), Position("", 0, "")))

    def own_value(self, path: str) -> Any:
        """Returns the experiment's own value at a path; None if it has no value there."""
        return item_at(self.experiment.experiment.model_dump(mode="json"), split(path))

    def own_params(self) -> tuple[Params, list[str]]:
        """Returns the params that reproduce the experiment, and the paths whose own value is outside the space."""
        space = self.study.parameters
        params: Params = {}
        outside: list[str] = []
        for path in in_order(space):
            if not is_active(space[path], params):
                continue
            own = self._own_param(path, params)
            if own is None:
                outside.append(path)
            else:
                params[path] = own[0]
        return {path: params[path] for path in space if path in params}, outside

    def _own_param(self, path: str, params: Params) -> tuple[Any] | None:
        """Returns the param that reproduces the experiment's value at the path; None if the value is outside the range.

        Args:
            params: the params of earlier parameters.
        """
        searched, own = self.study.parameters[path], self.own_value(path)
        if not isinstance(searched, (Choice, Cases)):
            return (own,) if holds(searched, own) else None
        for name, value in values_by_name(searched):
            if is_same(value, own) or self._changes_nothing(path, value, {**params, path: name}):
                return (name,)
        return None

    def _changes_nothing(self, path: str, value: Any, params: Params) -> bool:
        """Returns whether a section means the same as the experiment's own. Left-out fields have their defaults, and
        parameters that are searched inside the section have the experiment's values."""
        if not isinstance(value, dict):
            return False
        inside = {
            other: self.own_value(other)
            for other, searched in self.study.parameters.items()
            if other != path and _containing([path], split(other)) and is_active(searched, params)
        }
        try:
            return self.trial({path: value, **inside}).experiment == self.experiment.experiment
        except SpecError:
            return False

    def refused(self, check: Callable[[Experiment], Iterable[Issue]], below: Iterable[str]) -> list[Issue]:
        """Returns the issues that a check finds with a parameter's candidates (of a range, with its ends), each at its
        parameter. The other parameters have the experiment's own values. Empty if the check refuses the experiment
        itself.

        Args:
            below: paths of fields; parameters below them are tried.
        """
        space = self.study.parameters
        searched = [path for path in space if _containing(below, split(path))]
        if not searched or [*check(self.experiment.experiment)]:
            return []
        tried = {path: _candidates_or_ends(each) for path, each in space.items()}
        found: list[Issue] = []
        for path, params in _varied(self, tried):
            if path in searched:
                for issue in check(self.trial(settings(params, space)).experiment):
                    hinted = replace(issue, hint="; or ".join(filter(None, ["search other values", issue.hint])))
                    found.append(self.locate(_at_candidate(hinted, path, params, self.study)))
        return in_file_order(found)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that `from_json` reads."""
        return {
            "source": self.source,
            "study": self.study.model_dump(mode="json"),
            "experiment": self.experiment.to_json(),
            "positions": plain_positions(self.positions),
            "warnings": [asdict(warning) for warning in self.warnings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StudyDocument":
        """Returns the document that `to_json` wrote. Raises SpecError if this version's schema no longer accepts it."""
        positions = read_positions(data["positions"])
        study = _study(data["source"], positions)
        warnings = tuple(read_issue(plain) for plain in data.get("warnings", ()))
        return cls(study, Document.from_json(data["experiment"]), data["source"], positions, warnings)


def checked_study(
    source: dict[str, Any], positions: Positions, load_document: Callable[[str], Document]
) -> StudyDocument:
    """Returns the document of a study's source. Raises SpecError with every issue, located."""
    study = _study(source, positions)
    issues = _path_issues(study, "overrides", lambda path: unknown(Experiment, split(path)))
    issues += _path_issues(study, "parameters", lambda path: unknown(Experiment, split(path)) or _fixed(path))
    refuse(issues + search_space.issues_of(study.parameters), positions)
    experiment = load_document(study.experiment)
    refuse(_path_issues(study, "overrides", lambda path: no_such_item(experiment.source, split(path))), positions)
    if study.overrides:
        experiment = _with_overrides(experiment, study, positions)
    refuse(_path_issues(study, "parameters", lambda path: _no_item_to_search(study, experiment, path)), positions)
    refuse(_too_many_candidates(study, experiment), positions)
    refuse(study_rules.issues_of(study, experiment.experiment), positions)
    document = StudyDocument(study, experiment, source, positions)
    tried, issues = _try_candidates(document)
    refuse(issues, positions)
    warnings = [
        *_shared_warnings(study, tried),
        *search_space.warnings_of(study.parameters),
        *_own_values_outside(document),
        *study_rules.warnings_of(study, experiment.experiment),
    ]
    located = in_file_order(locate(warning, positions) for warning in warnings)
    return replace(document, warnings=tuple(located))


def _with_overrides(experiment: Document, study: Study, positions: Positions) -> Document:
    """Returns the experiment with the study's overrides. Raises SpecError with each issue at the override that causes
    it."""
    try:
        return experiment.with_values(study.overrides, positions[("overrides",)])
    except SpecError as error:
        issues = []
        for issue in error.issues:
            path = _containing(study.overrides, issue.path)
            place = ("overrides", path, *issue.path[len(split(path)) :])
            issues.append(replace(issue, path=place, file="", line=0, snippet="") if path else issue)
        refuse(issues, positions)
        raise


def _path_issues(study: Study, section: str, check: Callable[[str], Issue | None]) -> list[Issue]:
    """Returns the issues that `check` finds with the paths in a section of the study, each placed at its path."""
    return [replace(issue, path=(section, path)) for path in getattr(study, section) if (issue := check(path))]


def _no_item_to_search(study: Study, experiment: Document, path: str) -> Issue | None:
    """Returns an issue if a path leads to a missing item of a list. Items inside a section that the study sets are
    checked when a candidate is tried."""
    inside = any(other != path and _containing([other], split(path)) for other in study.parameters)
    return None if inside else no_such_item(experiment.source, split(path))


def _study(source: dict[str, Any], positions: Positions) -> Study:
    study, issues = parse(Study, source)
    refuse([misplaced(issue, Study) for issue in issues], positions)
    assert isinstance(study, Study)
    return study


def _fixed(path: str) -> Issue | None:
    if split(path)[0] in FIXED:
        return Issue("cannot be searched", hint="it belongs to the experiment as a whole")
    if split(path)[0] == "evaluation" or split(path)[:2] == ("data", "evaluation"):
        return Issue("cannot be searched", hint="trials would be judged by different measures")
    if split(path)[0] in ("launcher", "resources", "stages"):
        return Issue("cannot be searched", hint="it sets where and how work runs, and cannot change a result")
    return None


def _too_many_candidates(study: Study, experiment: Document) -> Iterator[Issue]:
    """Yields an issue, placed at the longest list, if there are too many candidates to try each of them."""
    counts = {path: _num_tried(searched) for path, searched in study.parameters.items()}
    num_values = num_values_of(experiment.source)
    if sum(counts.values()) * num_values > MAX_TRIED_VALUES:
        longest = max(counts, key=counts.__getitem__)
        given = f"{sum(counts.values())} candidates, each tried with the {num_values} values of the spec"
        allowed = f"at most {MAX_TRIED_VALUES} values in all that are tried"
        yield Issue("too many candidates", ("parameters", longest), given, allowed, "search a range instead")


def _num_tried(searched: Range) -> int:
    """Returns the largest number of candidates that `_tried` returns."""
    return num_candidates(searched) if isinstance(searched, (Choice, Cases)) else MOST_TRIED


def _try_candidates(document: StudyDocument) -> tuple[list[Document], list[Issue]]:
    """Returns trials that together contain each candidate of each parameter (of a range, its ends), and the issues of
    impossible candidates.

    A candidate is tried with the experiment's own values of the other parameters, or their lowest if the own value is
    outside the space. A conditional parameter is tried with values of the others under which it is searched. Two more
    trials have all lowest and all highest values.
    """
    space = document.study.parameters
    tried = {path: _tried(searched) for path, searched in space.items()}
    trials = [*_varied(document, tried)]
    trials += [("", build(space, {path: values[end] for path, values in tried.items()}.__getitem__)) for end in (0, 1)]
    documents: list[Document] = []
    refused: list[tuple[bool, Issue, Issue]] = []
    for varied, params in trials:
        try:
            documents.append(document.trial(settings(params, space)))
        except SpecError as error:
            for issue in error.issues:
                blamed = _at_candidate(issue, varied, params, document.study)
                refused.append((blamed.path[:2] == ("parameters", varied), issue, blamed))
    issues: dict[tuple[Path, str], dict[Path, Issue]] = {}
    # In the candidate's own trial the message names no other parameter.
    for own_turn, issue, blamed in sorted(refused, key=lambda item: not item[0]):
        places = issues.setdefault((issue.path, issue.message), {})
        if own_turn or not places:
            places.setdefault(blamed.path, blamed)
    return documents, [issue for places in issues.values() for issue in places.values()]


def _varied(document: StudyDocument, tried: Mapping[str, list[Any]]) -> Iterator[tuple[str, Params]]:
    """Yields, for each parameter and each of its candidates, the path and the params of a trial that varies only this
    parameter."""
    space = document.study.parameters
    own, _ = document.own_params()
    nearest_own = {path: own.get(path, values[0]) for path, values in tried.items()}
    for path, values in tried.items():
        others = {parent: allowed[0] for parent, allowed in allowed_by_conditions(space, path).items()}
        for value in values:
            yield path, build(space, {**nearest_own, **others, path: value}.__getitem__)


def _candidates_or_ends(searched: Range) -> list[Any]:
    return [*candidates(searched)] if isinstance(searched, (Choice, Cases)) else [*bounds(searched)]


def _tried(searched: Range) -> list[Any]:
    """Returns the candidates to try: the lowest, the highest, then others."""
    count = num_candidates(searched)
    if isinstance(searched, (Choice, Cases)) or 0 < count <= MOST_TRIED:
        first, *others = candidates(searched)
        return [first, *reversed(others)]
    low, high = bounds(searched)
    if isinstance(searched, FloatRange) and not searched.step:
        return [low, high, low + (high - low) * 0.381966]  # not a whole number, to test whether the field accepts one
    return [low, high, low + searched.step]


def _at_candidate(issue: Issue, varied: str, params: Params, study: Study) -> Issue:
    """Returns a trial's issue, placed at the parameter that has the value, else at the varied one.

    Args:
        varied: the parameter that the trial varied; empty if all parameters had their lowest or highest value.
    """
    above = _containing(params, issue.path)
    inside = [path for path in params if issue.path and split(path)[: len(issue.path)] == issue.path]
    below = next((path for path in inside if path != above), "")
    path = below or above or varied
    cause = above if below else varied
    message, hint = issue.message, issue.hint
    if not path or path != above:
        message = f"{dotted(issue.path)}: {message}"
    if not path:
        message += f" (with {', '.join(f'{name}={search_space.shown(param)}' for name, param in params.items())})"
        return Issue(message, ("parameters",), issue.given, issue.allowed, hint)
    if cause and cause != path:
        message += f" (with {cause}={search_space.shown(params[cause])})"
        if (below or issue.message in ("unknown field", "no such item")) and cause not in study.parameters[path].when:
            hint = f"search it only while it has an effect: when: {{{cause}: [...]}}"
    elif not above:
        message += f" (with {search_space.shown(params[path])})"
    searched = study.parameters[path]
    if isinstance(searched, FloatRange) and issue.message.startswith("must be a whole number"):
        hint = "search it as {int: [low, high]}"
    place = search_space.place_of(path, searched, params[path])
    if path == above and len(place) > 2:
        place = (*place, *issue.path[len(split(path)) :])
    blamed = Issue(message, place, issue.given, issue.allowed, hint)
    if path != above or not issue.column:
        return blamed
    # The candidate is a text, and the issue is about a character of it.
    at = replace(issue, file="", line=0) if issue.within else issue
    return replace(at, message=message, path=place, hint=hint)


def _containing(paths: Iterable[str], place: Path) -> str:
    """Returns the longest of the paths that lead to the place or to a section that contains it; empty if there is no
    such path."""
    above = [path for path in paths if place[: len(split(path))] == split(path)]
    return max(above, key=lambda path: len(split(path)), default="")


def _shared_warnings(study: Study, tried: list[Document]) -> Iterator[Issue]:
    """Yields the warnings that every trial has. A warning about a varied field is placed at its parameter."""
    everywhere = set.intersection(*({(each.path, each.message) for each in trial.warnings} for trial in tried))
    for warning in tried[0].warnings:
        if (warning.path, warning.message) not in everywhere:
            continue
        path = _containing(study.parameters, warning.path)
        if not path:
            yield warning
            continue
        message = f"{dotted(warning.path)}: {warning.message} in any trial"
        yield Issue(message, ("parameters", path), warning.given, warning.allowed, warning.hint)


def _own_values_outside(document: StudyDocument) -> Iterator[Issue]:
    """Yields a warning for each of the experiment's own values that is outside the space. The baseline is a trial with
    these values."""
    _, outside = document.own_params()
    for path in outside:
        own = document.own_value(path)
        yield Issue(
            "the experiment's own value is not in the range",
            ("parameters", path),
            "nothing" if own is None else show(own),
            search_space.describe(document.study.parameters[path]),
            "the baseline still uses it; widen the range, or set another value under overrides",
        )
