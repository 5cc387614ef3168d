"""Reading of recorded specs through the schema: a run's spec, and an experiment's spec as of its last run."""

from dataclasses import replace
from pathlib import Path

from specs.documents.reading import read_checked
from specs.errors import Issue, SpecError, dotted, shortened
from specs.model_evaluation import schema_of
from specs.reading.validate import parse
from specs.schema.experiment import Experiment

_HINTS = {
    "runs": "the record is damaged, or of another version, which can read it; `rpg rm {}` removes it",
    "experiments": "the record is damaged, or of another version; running the experiment's file again renews it",
}


def recorded_spec(directory: Path) -> Experiment:
    """Returns the resolved spec of a run or of an experiment. A section of a package that is not installed keeps its
    keys and does no work.

    Raises:
        SpecError: the spec is missing, or the schema does not accept it; each key is named.
    """
    data, problems = read_checked(directory / "spec.json")
    frozen = data.get("experiment")  # an experiment's spec is frozen with its source
    data = frozen if isinstance(frozen, dict) else data
    experiment, issues = parse(schema_of(data), data, recorded=True) if data else (None, [])
    if isinstance(experiment, Experiment):
        return experiment
    file = f"{directory.parent.name}/{directory.name}/spec.json"
    issues = issues or [Issue(problem) for problem in problems or ["missing"]]
    hint = _HINTS.get(directory.parent.name, "").format(directory.name)
    raise SpecError(*shortened([replace(issue, file=file, hint=hint or issue.hint) for issue in issues]))


def unreadable(directory: Path) -> list[str]:
    """Returns why `recorded_spec` cannot read a directory's spec, with a line for each key."""
    try:
        recorded_spec(directory)
    except SpecError as error:
        return [": ".join(filter(None, (dotted(issue.path), issue.message))) for issue in error.issues]
    return []
