"""Calibration of a judge against labels: the judge scores answers whose value is already known."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rpg.rewards.functions.judge import Judge
from rpg.rewards.score import Place, scored_text
from rpg.statistics.agreement import Judgements
from rpg.statistics.intervals import mean_interval
from rpg.statistics.variance import Interval
from rpg.types import Problem
from specs.bounds import read_within
from specs.documents.strict_json import parse_json
from specs.errors import Issue, SpecError

_FIELDS = ("prompt", "response", "label")
_MOST_ISSUES = 5


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer with its label."""

    prompt: str
    response: str
    label: float
    """Label on the judge's scale. For a judge that compares, a number in any unit, where higher is better."""
    answer: str = ""
    """The problem's right answer."""
    author: str = ""
    """Name of the model that wrote the answer; empty if not known."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Results of the questions to the judge."""

    judgements: Judgements
    position: Interval | None
    """Share of comparisons won by the answer shown first, minus the share won by the other; None if the judge rates
    each answer alone."""
    unread: int
    """Number of answers or pairs without a verdict, because no vote could be read."""


def labelled_in(judge: Judge) -> list[Labelled]:
    """Returns the labels in the file that a judge names. Raises SpecError if the file has another content."""
    path, found, issues = judge.labels, list[Labelled](), list[Issue]()
    try:
        lines = read_within(path).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SpecError(Issue(f"cannot be read: {error}", ("reward", "labels"), path)) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _row(judge, line)
            if isinstance(row, Labelled):
                found.append(row)
            else:
                issues.append(Issue(row, (), line[:80], file=path, line=number, snippet=line[:120]))
    if issues:
        raise SpecError(*issues[:_MOST_ISSUES])
    if len({row.prompt for row in found}) < 2:
        raise SpecError(Issue("there are labels of fewer than two problems", ("reward", "labels"), path))
    return found


def _row(judge: Judge, line: str) -> Labelled | str:
    """Returns the row, or a message about its error."""
    try:
        row = parse_json(line)
    except ValueError as error:
        return f"cannot be read: {error}"
    if not isinstance(row, dict) or any(name not in row for name in _FIELDS):
        return "a row has prompt, response and label; it may have answer and author"
    label, texts = row["label"], [row[name] for name in ("prompt", "response")]
    texts += [row.get(name, "") for name in ("answer", "author")]
    if not all(isinstance(text, str) for text in texts):
        return "prompt, response, answer and author are texts"
    if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
        return "the label is not a number"
    if not judge.compares() and not judge.scale.low <= label <= judge.scale.high:
        return f"the label is not on the judge's scale from {judge.scale.low:g} to {judge.scale.high:g}"
    return Labelled(texts[0], scored_text(judge, texts[1]), float(label), texts[2], texts[3])


def judged(judge: Judge, rows: Sequence[Labelled], verdicts: Path) -> Judged:
    """Asks the judge about all answers, or about all pairs with different labels, several at once.

    Args:
        verdicts: the directory of earlier verdicts.
    """
    questions: list[tuple[Labelled, ...]] = list(_pairs(rows)) if judge.compares() else [(row,) for row in rows]
    problems = [Problem("", row.prompt, row.answer, "labels") for row, *_ in questions]
    with judge.open(Place(verdicts=verdicts)) as scorer:
        asked = [
            [scorer.ask(problem, [row.response for row in shown]) for shown in _orders(question)]
            for problem, question in zip(problems, questions, strict=True)
        ]
        replies = [[each.result() for each in orders] for orders in asked]
    first_won: dict[tuple[Labelled, ...], float] = {}
    kept: list[tuple[Any, float]] = []
    for question, orders in zip(questions, replies, strict=True):
        # For a single answer its numbers; for a pair, the result of the first one in either order.
        scores = [[each.score for each in order[0] if each.score is not None] for order in orders]
        mine = [*scores[0], *(1 - score for order in scores[1:] for score in order)]
        if mine:
            kept.append((question, float(np.mean(mine))))
        if len(question) > 1 and all(scores):
            first_won[question] = float(np.mean([2 * np.mean(each) - 1 for each in scores]))
    prompts = [question[0].prompt for question in first_won]
    enough = len(set(prompts)) > 1
    position = mean_interval(list(first_won.values()), clusters=prompts, shares=False) if enough else None
    return Judged(_judgements(judge, kept), position, len(questions) - len(kept))


def _pairs(rows: Sequence[Labelled]) -> Iterator[tuple[Labelled, ...]]:
    for prompt in dict.fromkeys(row.prompt for row in rows):
        yield from (
            pair
            for pair in itertools.combinations([row for row in rows if row.prompt == prompt], 2)
            if pair[0].label != pair[1].label
        )


def _orders(question: tuple[Labelled, ...]) -> list[tuple[Labelled, ...]]:
    return [question] if len(question) == 1 else [question, question[::-1]]


def _judgements(judge: Judge, kept: Sequence[tuple[tuple[Labelled, ...], float]]) -> Judgements:
    alone = not judge.compares()
    lengths = [[math.log2(max(1, len(row.response))) for row in question] for question, _ in kept]
    return Judgements(
        judged=np.array([value for _, value in kept]),
        labels=np.array([q[0].label if alone else float(q[0].label > q[1].label) for q, _ in kept]),
        length=np.array([of[0] if alone else of[0] - of[1] for of in lengths]),
        own=np.array(
            [q[0].author == judge.model and (alone or q[1].author != judge.model) for q, _ in kept], dtype=bool
        ),
        clusters=[question[0].prompt for question, _ in kept],
    )
