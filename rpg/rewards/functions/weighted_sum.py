"""Weighted sum of several rewards."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import Field, model_validator

from rpg.rewards.score import Score, verdict
from rpg.types import Problem
from specs.errors import Issue, IssueError
from specs.schema.base import PathKind, Spec
from specs.schema.data import Source
from specs.schema.reward import Reward


class Term(Spec):
    """One reward of a sum."""

    reward: Reward
    """The reward of this term. A penalty on long responses and the time limit are set on the sum."""
    weight: float = 1.0
    """Factor on the term's score."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the term, whose metric is reward/NAME/mean. Empty means the reward's type."""

    @property
    def label(self) -> str:
        """Returns the name, or the label that replaces it."""
        return self.name or self.reward.type


class WeightedSum(Reward):
    """The sum of the terms' scores, each times its weight. The first term decides whether a response is correct, and
    which answer it has; if that term is graded, so is the sum. If a term fails, the sum fails."""

    terms: tuple[Term, ...] = Field(min_length=1)
    """The terms that are added up. The mean of a term's scores over a step, not weighted, is the metric
    reward/NAME/mean."""

    def parts(self) -> tuple[Reward, ...]:
        """See Reward."""
        return tuple(part for term in self.terms for part in term.reward.parts())

    def paths(self) -> Iterator[tuple[tuple[str | int, ...], PathKind, str]]:
        """See Spec."""
        for index, term in enumerate(self.terms):
            yield from ((("terms", index, "reward", *where), kind, path) for where, kind, path in term.reward.paths())

    def grades(self) -> bool:
        """See Reward."""
        return self.terms[0].reward.grades()

    def worst_value(self) -> float | None:
        """See Reward. Known if each term's worst value is known and no weight is negative."""
        worst = [term.reward.worst_value() for term in self.terms]
        known = [value for value, term in zip(worst, self.terms, strict=True) if value is not None and term.weight >= 0]
        if len(known) < len(worst):
            return None
        return sum(term.weight * value for term, value in zip(self.terms, known, strict=True))

    def may_be_negative(self) -> bool:
        """See Reward."""
        return any(term.weight < 0 or term.reward.may_be_negative() for term in self.terms)

    def largest_value(self) -> float:
        """See Reward. It is the sum of the terms' largest values."""
        return sum(abs(term.weight) * term.reward.largest_value() for term in self.terms)

    def prepare(self) -> None:
        """See Reward."""
        for term in self.terms:
            term.reward.prepare()

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward."""
        return self.together({term.label: verdict(term.reward, problem, response) for term in self.terms})

    def together(self, scores: Mapping[str, Score]) -> Score:
        """Returns the sum, given each term's score by its label."""
        verdicts = [said for score in scores.values() for said in json.loads(score.verdicts or "[]")]
        said = json.dumps(verdicts, ensure_ascii=False) if verdicts else None
        for label, score in scores.items():
            if score.error is not None:
                return replace(Score.failed(f"{label}: {score.error}", away=score.away), verdicts=said)
        first = scores[self.terms[0].label]
        return Score(
            value=sum(term.weight * scores[term.label].value for term in self.terms),
            correct=first.correct,
            extracted=first.extracted,
            terms={label: score.value for label, score in scores.items()},
            weights={term.label: term.weight for term in self.terms},
            verdicts=said,
        )

    def refuses(self, source: Source) -> Issue | None:
        """See Reward."""
        return next((issue for term in self.terms if (issue := term.reward.refuses(source))), None)

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        return next((issue for term in self.terms if (issue := term.reward.objects_to(problem))), None)

    @model_validator(mode="after")
    def _check(self) -> "WeightedSum":
        if issue := next(self._issues(), None):
            raise IssueError(issue)
        return self

    def _issues(self) -> Iterator[Issue]:
        shared = ("overlong", "timeout_seconds")
        labels: list[str] = []
        for index, term in enumerate(self.terms):
            for field in shared:
                if getattr(term.reward, field) != type(term.reward).model_fields[field].default:
                    where = ("terms", index, "reward", field)
                    yield Issue("belongs to the sum, not to a term", where, hint=f"write it as reward.{field}")
            if term.label in labels:
                hint = "give each term of one type a `name` of its own"
                yield Issue("two terms have this name", ("terms", index, "name"), term.label, hint=hint)
            labels.append(term.label)
