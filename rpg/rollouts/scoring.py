"""Responses are scored while others are still being sampled."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rpg.rewards import Score, Scorer
from rpg.types import Problem, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scoring:
    """The responses of one call of a sampler: their texts and their scores, whatever order they end in."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", scorer: Scorer, problems: Sequence[Problem]) -> None:
        """`problems` has one entry a response, in the order of the sampler's responses."""
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._issues = problems
        self._texts: dict[int, str] = {}
        self._verdicts: dict[int, Future[Score]] = {}

    def begin(self, index: int, rollout: Rollout) -> None:
        """Begins to score a response."""
        text = str(self._tokenizer.decode(list(rollout.response_ids), skip_special_tokens=True))
        self._texts[index] = text
        self._verdicts[index] = self._scorer.submit(self._issues[index], text)

    def texts(self) -> list[str]:
        """Of all responses, in order."""
        return [self._texts[index] for index in range(len(self._issues))]

    def scores(self) -> list[Score]:
        """Of all responses, in order, once they are there."""
        return [self._verdicts[index].result() for index in range(len(self._issues))]
