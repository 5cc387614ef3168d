"""Problems that reasoning-gym generates."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.data import ReasoningGymSource
from specs.schema.fields import nearest

Path = tuple[str | int, ...]


def read(source: ReasoningGymSource, path: Path) -> Iterator[SourceProblem]:
    """The task's problems, in the generator's order; `path` is the source's place in the spec, for errors."""
    task = _open(source, path)
    name = source.name or source.task
    for index in range(source.size):
        try:
            entry = task[index]
        except Exception as error:
            raise SpecError(
                Issue(
                    f"reasoning_gym cannot generate item {index} of {source.task}: {type(error).__name__}: {error}",
                    path=(*path, "config"),
                    hint="the task's settings may contradict each other",
                )
            ) from error
        answer = entry["answer"] if entry["answer"] is not None else ""
        origin = {"task": source.task, "config": dict(source.config), "entry": entry}
        yield SourceProblem(entry["question"], str(answer), name, fields=entry["metadata"], metadata=origin)


def _open(source: ReasoningGymSource, path: Path) -> Any:
    # Imported here: reasoning-gym takes a second, and only this source needs it.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.task not in DATASETS:
        raise SpecError(_unknown("task", source.task, list(DATASETS), (*path, "task")))
    known = [f.name for f in dataclasses.fields(DATASETS[source.task][1]) if f.name not in ("seed", "size")]
    unknown = [key for key in source.config if key not in known]
    if unknown:
        raise SpecError(*(_unknown(f"setting of {source.task}", key, known, (*path, "config", key)) for key in unknown))
    try:
        return reasoning_gym.create_dataset(source.task, size=source.size, seed=source.seed, **source.config)
    except (AssertionError, ValueError, TypeError) as error:
        reason = str(error) or "a value is out of its range"
        raise SpecError(
            Issue(
                f"reasoning_gym rejects the settings of {source.task}: {reason}",
                path=(*path, "config"),
                given=", ".join(f"{key}: {value}" for key, value in source.config.items()),
            )
        ) from error


def _unknown(what: str, given: str, known: list[str], path: Path) -> Issue:
    return Issue(
        f"unknown {what}",
        path=path,
        given=given,
        allowed=f"one of reasoning_gym's {len(known)} tasks" if what == "task" else ", ".join(sorted(known)),
        hint=nearest(given, known),
    )
