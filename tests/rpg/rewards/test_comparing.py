"""Which scorers may be shared by responses: those whose source reaches nothing that runs a text."""

import subprocess
from decimal import Decimal
from typing import Any

import pytest
from scoring_attacks import THAT_EVALUATE, item

from rpg.rewards.comparing import only_compares
from rpg.rewards.worker import _may_run
from rpg.types import Problem
from specs.schema.reward import Reward


def helper(text: str) -> Any:
    return eval(text)


def plain(text: str) -> Decimal:
    return Decimal(text)


class Parsed:
    def __init__(self, text: str) -> None:
        self.value = eval(text)


class Evaluating:
    def scores(self, text: str) -> Any:
        return eval(text)


CHOSEN = {
    "plain": lambda text: eval(text),  # the line is no statement that Python reads
}


class Tasks(Evaluating):
    run = eval

    def __init__(self, parts: Any) -> None:
        self.config = {}
        self.parts = parts

    def own(self, text: str) -> Any:
        return helper(text)

    def compares(self, text: str) -> bool:
        return plain(text) == Decimal(1) and self.config.get("a") is None and self._more(text)

    def _more(self, text: str) -> bool:
        return text.strip().lower() == "x"

    def evaluates(self, text: str) -> Any:
        return eval(text)

    def through_a_function(self, text: str) -> Any:
        return helper(text)

    def through_a_method(self, text: str) -> Any:
        return self.own(text)

    def through_a_class(self, text: str) -> Any:
        return Parsed(text).value

    def through_what_it_holds(self, text: str) -> Any:
        return self.parts.score(text)

    def through_what_the_class_holds(self, text: str) -> Any:
        return self.run(text)

    def through_a_base(self, text: str) -> Any:
        return super().scores(text)

    def through_a_table(self, text: str) -> Any:
        return CHOSEN["plain"](text)

    def scores(self, text: str) -> bool:
        return text == "1"

    def through_itself(self, text: str) -> Any:
        return plain.__call__(self, text)

    def through_a_dunder(self, text: str) -> Any:
        return text.__class__.__base__

    def through_an_import(self, text: str) -> Any:
        import os

        return os.system(text)

    def through_another_library(self, text: str) -> Any:
        return subprocess.run(text)

    def through_its_own_name(self, text: str) -> Any:
        return getattr(text, "x")  # noqa: B009


def only(method: str) -> bool:
    return only_compares(Tasks, method, frozenset({"config"}))


def test_a_scorer_that_compares_is_known() -> None:
    assert only("compares")


@pytest.mark.parametrize("method", [name for name in vars(Tasks) if name == "evaluates" or name.startswith("through")])
def test_a_scorer_that_may_evaluate_is_known_however_it_does(method: str) -> None:
    assert not only(method)


def test_a_scorer_without_source_may_do_anything() -> None:
    made: dict[str, Any] = {}
    exec("class Made:\n def score(self, text): return text", made)
    assert not only_compares(made["Made"], "score", frozenset())


def test_the_tasks_that_evaluate_are_scored_alone_and_most_others_together() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    together = {
        name
        for name, (task, _) in factory.DATASETS.items()
        if only_compares(task, "score_answer", frozenset({"config"}))
    }
    assert not together & {*THAT_EVALUATE, "composite"}  # which hands on to others
    assert len(together) >= 0.75 * len(factory.DATASETS)


def test_a_worker_keeps_a_response_alone_where_any_part_may_run_it() -> None:
    tasks = Reward.model_validate({"type": "reasoning_gym"})
    both = Reward.model_validate(
        {"type": "weighted_sum", "terms": [{"reward": {"type": "exact_match"}}, {"reward": tasks}]}
    )
    for reward in (tasks, both):
        assert not _may_run(reward, item("chain_sum"))
        assert _may_run(reward, item("string_insertion"))
        assert _may_run(reward, Problem("p", "?", "1", "other", {}))  # which has no task: the reward says so
