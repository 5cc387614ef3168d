"""Problems that reasoning-gym generates."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from rpg.data.problems import SourceProblem
from specs.errors import Issue, Path, SpecError
from specs.schema.data import Source
from specs.schema.fields import nearest
from specs.schema.model import ConfigValue


class ReasoningGymSource(Source):
    """Problems that reasoning-gym generates, with its own scorer."""

    libraries: ClassVar[tuple[str, ...]] = ("reasoning-gym",)
    generated: ClassVar[bool] = True

    task: str
    """A task of reasoning-gym, e.g. chain_sum."""
    config: dict[str, ConfigValue] = Field(default_factory=dict)
    """Settings of the task, e.g. {min_terms: 2, max_terms: 2}."""
    size: int = Field(ge=1)
    """Problems to generate, before deduplication."""
    seed: int = Field(0, ge=0)
    """Seed of the generator. Item i of seed s is item i+1 of seed s-1: keep the seeds of two sets further apart than
    their sizes."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source; yields the problems in the generator's order."""
        task = self._open()
        for index in range(self.size):
            try:
                entry = task[index]
            except Exception as error:
                raise SpecError(
                    Issue(
                        f"reasoning_gym cannot generate item {index} of {self.task}: {type(error).__name__}: {error}",
                        path=("config",),
                        hint="the task's settings may contradict each other",
                    )
                ) from error
            answer = entry["answer"] if entry["answer"] is not None else ""
            origin = {"task": self.task, "config": dict(self.config), "entry": entry}
            name = self.name or self.task
            yield SourceProblem(entry["question"], str(answer), name, fields=entry["metadata"], metadata=origin)

    def shared_with(self, other: Source) -> Issue | None:
        """See Source; sources of one task share problems if their seeds differ by less than the size of a set."""
        if not isinstance(other, ReasoningGymSource) or (self.task, self.config) != (other.task, other.config):
            return None
        if not -self.size < self.seed - other.seed < other.size:
            return None
        return Issue(
            "shares problems with a training set",
            ("seed",),
            given=f"seeds {other.seed} and {self.seed}, sizes {other.size} and {self.size}",
            hint="item i of seed s is item i+1 of seed s-1: keep the seeds further apart than the sizes",
        )

    def _open(self) -> Any:
        from rpg.data.reasoning_gym_imported import reasoning_gym

        tasks = reasoning_gym.factory.DATASETS
        if self.task not in tasks:
            raise SpecError(_unknown("task", self.task, list(tasks), ("task",)))
        known = [f.name for f in dataclasses.fields(tasks[self.task][1]) if f.name not in ("seed", "size")]
        unknown = [key for key in self.config if key not in known]
        if unknown:
            raise SpecError(*(_unknown(f"setting of {self.task}", key, known, ("config", key)) for key in unknown))
        try:
            return reasoning_gym.create_dataset(self.task, size=self.size, seed=self.seed, **self.config)
        except (AssertionError, ValueError, TypeError) as error:
            reason = str(error) or "a value is out of its range"
            raise SpecError(
                Issue(
                    f"reasoning_gym rejects the settings of {self.task}: {reason}",
                    path=("config",),
                    given=", ".join(f"{key}: {value}" for key, value in self.config.items()),
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
