"""Generates products that a small model cannot compute, with demonstrations, some of which use a calculator."""

import random
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rpg.data.problems import SourceProblem
from specs.errors import Issue
from specs.schema.data import Source


class ProductsSource(Source):
    """Products of two whole numbers, `37*48=`. The warm-up learns from demonstrations: some give the product directly,
    the others call a tool first. For `rollout: {rollouter: {type: tools, tools: [calculator]}}`."""

    generated: ClassVar[bool] = True

    size: int = Field(ge=1)
    """Problems to generate, before deduplication."""
    seed: int = Field(0, ge=0)
    """Seed of the generator."""
    digits: int = Field(2, ge=1, le=6)
    """Digits of each factor."""
    called: float = Field(0.25, ge=0, le=1)
    """Share of the demonstrations that call the tool."""
    demonstration: str = "<calculator>{question}</calculator><result>{answer}</result>{answer}"
    """Text of a demonstration that calls the tool, in the rollouter's format of call and answer."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        drawn = random.Random(self.seed)
        least, most = 10 ** (self.digits - 1), 10**self.digits - 1
        for _ in range(self.size):
            first, second = drawn.randint(least, most), drawn.randint(least, most)
            question, answer = f"{first}*{second}", str(first * second)
            calls = drawn.random() < self.called
            shown = self.demonstration.replace("{question}", question).replace("{answer}", answer)
            metadata = {"demonstration": shown if calls else answer}
            yield SourceProblem(f"{question}=", answer, self.name or "products", metadata=metadata)

    def shared_with(self, other: Source) -> Issue | None:
        """See Source; two sources with the same seed share products."""
        if not isinstance(other, ProductsSource) or self.seed != other.seed:
            return None
        return Issue("shares problems with a training set", ("seed",), str(self.seed), hint="take another seed")
