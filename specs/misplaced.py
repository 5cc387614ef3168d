"""A field of an experiment that was given to a study."""

from dataclasses import replace

from pydantic import BaseModel

from specs.errors import Problem
from specs.schema.experiment import Experiment
from specs.schema.study import Study


def misplaced(problem: Problem, schema: type[BaseModel]) -> Problem:
    """The problem, saying where the field belongs if that is what is wrong."""
    name = str(problem.path[0]) if len(problem.path) == 1 else ""
    if schema is not Study or problem.message != "unknown field" or name not in Experiment.model_fields:
        return problem
    return replace(problem, hint=f"a field of the study's experiment: write it under `overrides`, as overrides.{name}")
