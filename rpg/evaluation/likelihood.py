"""Scores evaluation sets by the likelihood of their texts under a policy, without sampling answers.

A question with choices is right if the right choice has the largest logprob, divided as the set says. A text's bits per
byte are minus the logprob of all its tokens to the base 2, over its bytes. Spaces at the end of a prompt belong to the
choice, and a text's first token follows the tokenizer's token for the beginning of a text, or its token for the end of
a text if it has no other, as in lm-eval.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpg.data.unanswered import Item
from rpg.evaluation.drift import LogprobsOf
from rpg.evaluation.measures import EvaluationMeasure, ratio_values
from rpg.evaluation.sequences import TokenSequence
from rpg.statistics.intervals import mean_interval
from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ScoredItem:
    """The value of a metric on one item of a set."""

    item_id: str
    value: float
    """1 or 0 for accuracy; for bits_per_byte the value of this item's text."""
    text: str
    num_bytes: int | None = None
    """Number of bytes of a text, by which it is weighted."""
    response: str | None = None
    """Likeliest choice."""
    answer: str | None = None
    """Right choice."""


@dataclass(frozen=True, slots=True)
class ScoredSet:
    """The value of a metric on each item of a set."""

    dataset: str
    metric: str
    items: tuple[ScoredItem, ...]
    known: EvaluationMeasure | None = None
    """The metric on the set, if it is not computed from `items`."""
    num_known: int = 0
    """Number of items that `known` was computed from."""

    @property
    def size(self) -> int:
        """Number of items of the set."""
        return self.num_known or len(self.items)

    def measure(self, confidence: float) -> EvaluationMeasure:
        """Returns the metric on the set, with its interval for new items."""
        if self.known:
            return self.known
        values = np.array([item.value for item in self.items])
        if all(item.num_bytes for item in self.items):
            sizes = np.array([item.num_bytes for item in self.items], dtype=np.float64)
            values = ratio_values(values * sizes, sizes)
        interval = mean_interval(values, confidence=confidence, shares=self.metric == "accuracy")
        return EvaluationMeasure(self.metric, interval.value, interval.low, interval.high)


@dataclass(frozen=True, slots=True)
class TokenizedSet:
    """A set's items as token sequences: a sequence for each choice of a question, or for each window of a text."""

    dataset: str
    items: tuple[Item, ...]
    sequences: tuple[tuple[TokenSequence, ...], ...]
    """Sequences of each item."""
    starts: tuple[NDArray[np.int64], ...] = ()
    """Byte at which each token of each text begins; empty for questions."""

    def scored(self, logprobs: LogprobsOf) -> list[ScoredSet]:
        """Returns the set's scores under a policy. All ranks call it."""
        found = iter(logprobs([sequence for each in self.sequences for sequence in each]))
        of_items = [[next(found) for _ in each] for each in self.sequences]
        if self.starts:
            alone = len(self.items) == 1
            texts = [
                scored
                for item, values, starts in zip(self.items, of_items, self.starts, strict=True)
                for scored in _pieces(item, np.concatenate(values), starts, whole=not alone)
            ]
            return [ScoredSet(self.dataset, "bits_per_byte", tuple(texts))]
        questions = [_answered(item, values) for item, values in zip(self.items, of_items, strict=True)]
        return [ScoredSet(self.dataset, "accuracy", tuple(questions))]


def tokenized_sets(
    items: Sequence[Item], tokenizer: "PreTrainedTokenizerBase", context: int | None
) -> list[TokenizedSet]:
    """Returns the sets of these items, in their order.

    Args:
        context: longest context of the model, in tokens; None if the model has no limit.
    Raises:
        SpecError: a question, together with one of its choices, is longer than the context.
    """
    found = []
    for dataset in dict.fromkeys(item.dataset for item in items):
        of_set = tuple(item for item in items if item.dataset == dataset)
        if of_set[0].kind == "multiple_choice":
            sequences = tuple(tuple(_choices(item, tokenizer, context)) for item in of_set)
            found.append(TokenizedSet(dataset, of_set, sequences))
        else:
            texts = [_windows(item, tokenizer, context) for item in of_set]
            windows, starts = (tuple(part) for part in zip(*texts, strict=True))
            found.append(TokenizedSet(dataset, of_set, windows, starts))
    return found


def _choices(item: Item, tokenizer: Any, context: int | None) -> Iterator[TokenSequence]:
    """Yields prompt and choice for each choice, with the choice's tokens scored."""
    prompt = item.text.rstrip()
    between = item.text[len(prompt) :] + item.settings["delimiter"]
    before = list(tokenizer(prompt)["input_ids"]) if prompt else []
    for choice in item.settings["choices"]:
        ids = list(tokenizer(prompt + between + choice)["input_ids"])
        begin = min(len(before), len(ids) - 1)
        if not begin:
            ids, begin = [first_token(tokenizer), *ids], 1
        if context is not None and len(ids) > context:
            raise SpecError(
                Issue(
                    f"a question of `{item.dataset}` and one of its choices are longer than the model's context",
                    ("data", "evaluation"),
                    given=f"{len(ids)} tokens: {item.text[:80]!r}",
                    allowed=f"at most {context} tokens",
                    hint="leave the question out, or take a model with a longer context",
                )
            )
        yield TokenSequence(tuple(ids), ((begin, len(ids)),))


def first_token(tokenizer: Any) -> int:
    """Returns the token to put before the first token of a text. Raises SpecError if the tokenizer has none."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        hint = "take a model whose tokenizer has a BOS or EOS token, or give every question a prompt"
        raise SpecError(Issue("the tokenizer has no token that can begin a text", ("data", "evaluation"), hint=hint))
    return int(first)


def _windows(item: Item, tokenizer: Any, context: int | None) -> tuple[tuple[TokenSequence, ...], NDArray[np.int64]]:
    """Returns a text's windows, in which each token is scored once, and the byte at which each token begins."""
    encoded = tokenizer(item.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [first_token(tokenizer), *encoded["input_ids"]]
    width = min(item.settings["window"], context or item.settings["window"])
    windows = [
        TokenSequence(tuple(part), ((1, len(part)),))
        for first in range(0, len(ids) - 1, width - 1)
        for part in [ids[first : first + width]]
    ]
    # Characters -> bytes: a text's first characters are as long as their UTF-8.
    ends = np.cumsum([0, *(len(character.encode()) for character in item.text)])
    starts = np.array([ends[begin] for begin, _ in encoded["offset_mapping"]], dtype=np.int64)
    return tuple(windows), starts


def _answered(item: Item, logprobs: Sequence[NDArray[np.float64]]) -> ScoredItem:
    choices, per = item.settings["choices"], item.settings["per"]
    sizes = {
        "byte": [len(choice.encode()) for choice in choices],
        "token": [len(values) for values in logprobs],
        "choice": [1] * len(choices),
    }[per]
    scores = [float(values.sum()) / size for values, size in zip(logprobs, sizes, strict=True)]
    chosen = max(range(len(choices)), key=scores.__getitem__)
    right = chosen == item.settings["right"]
    return ScoredItem(item.item_id, float(right), item.text, response=choices[chosen], answer=item.answer)


def _pieces(
    item: Item, logprobs: NDArray[np.float64], starts: NDArray[np.int64], *, whole: bool
) -> Iterator[ScoredItem]:
    """Yields a text's pieces, cut between tokens. `whole`: the text is one piece."""
    text = item.text.encode()
    numbers = starts // (len(text) + 1 if whole else item.settings["piece"])
    for number in np.unique(numbers):
        inside = np.flatnonzero(numbers == number)
        begin = 0 if inside[0] == 0 else int(starts[inside[0]])
        end = len(text) if inside[-1] == len(starts) - 1 else int(starts[inside[-1] + 1])
        bits = -float(logprobs[inside].sum()) / math.log(2)
        if end > begin:
            piece = text[begin:end].decode(errors="replace")
            yield ScoredItem(f"{item.item_id}-{number:06}", bits / (end - begin), piece, end - begin)
