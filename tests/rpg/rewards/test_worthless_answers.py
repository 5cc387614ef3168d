"""Answers that solve nothing, and what reasoning-gym's tasks give them."""

from collections.abc import Iterator
from typing import Any

import pytest

from rpg.rewards import Score
from rpg.rewards.functions.reasoning_gym import REFUSED, ReasoningGym
from rpg.types import Problem

factory = pytest.importorskip("reasoning_gym.factory")
REWARD = ReasoningGym(type="reasoning_gym")
RAISE = ("boxnet", "game_of_life", "prime_factorization")
"""Tasks whose scorers raise on answers of a form that they do not expect."""
WORTHLESS = (
    *(
        "nan",
        "NaN",
        "-nan",
        "nan+nanj",
        "nani",
        "nan,nan",
        "inf",
        "-Infinity",
        "1e999",
        "0",
        "-0",
        "1",
        "junk",
        "C",
        "x",
    ),
    *("{}", "null", "true", "True", "false", "None", "[]", "[[]]", "{'a': 1}", "", "\0", "\ud800", "\u00b2"),
    *("1/0", "9" * 5000, "9 " * 30_000, "a" * 200_000, "[" * 3000),
)


def problem(task: str, seed: int = 3) -> tuple[Problem, Any]:
    """A problem of the task, and its entry."""
    entry = factory.create_dataset(task, size=1, seed=seed)[0]
    fields = {"task": task, "config": {}, "entry": entry}
    return Problem("p", entry["question"], str(entry["answer"]), task, fields), entry


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def is_gold(answer: str, gold: str) -> bool:
    """Whether the answer is the gold one: the same text in any case, or the same number."""
    number = as_number(answer)
    return answer.strip().lower() == gold.strip().lower() or (number is not None and number == as_number(gold))


def worthless(entry: Any) -> Iterator[str]:
    """Answers that are never right, but by chance."""
    yield from WORTHLESS
    yield entry["question"]
    gold = str(entry["answer"])
    for count in {len(gold.split(",")), len(gold.split()), len(gold.splitlines())}:
        for filler in ("NaN", '"nan"', "Infinity", "0"):
            yield f"[{', '.join([filler] * count)}]"
            yield " ".join([filler] * count)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")  # the tasks' libraries warn
@pytest.mark.parametrize("task", sorted(factory.DATASETS.keys() - REFUSED.keys()))
def test_no_worthless_answer_gets_the_full_mark_and_none_is_a_failure_of_the_reward(task: str) -> None:
    asked, entry = problem(task)
    for answer in worthless(entry):
        score = REWARD.score(asked, answer)
        assert 0 <= score.value <= 1, answer[:80]
        assert score.value < 1 or is_gold(answer, asked.answer), answer[:80]


RIGHT = [
    ("number_sorting", "['-3', '1.5', '10']", {"direction": "ascending"}, "[-3, 1.5, 10]", 1.0),
    ("number_sorting", "['-3', '1.5', '10']", {"direction": "ascending"}, "['NaN', 'NaN', 'NaN']", 0.0),
    ("number_sorting", "['-3', '1.5', '10']", {"direction": "ascending"}, "[-3, NaN, 10]", 0.0),
    ("number_sorting", "['-3', '1.5', '10']", {"direction": "ascending"}, "[1.5, -3, 10]", 0.0),
    ("complex_arithmetic", "3.0 - 4.0i", {"result": (3.0, -4.0)}, "(3 - 4i)", 1.0),
    ("complex_arithmetic", "3.0 - 4.0i", {"result": (3.0, -4.0)}, "3 - NaNj", 0.0),
    ("complex_arithmetic", "3.0 - 4.0i", {"result": (3.0, -4.0)}, "Infinity", 0.0),
    ("game_of_life_halting", "False", {}, "false", 1.0),
    ("game_of_life_halting", "False", {}, "True", 0.0),
    ("game_of_life_halting", "True", {}, "it halts", 0.0),
    ("coin_flip", "0.234375", {}, "0.2344", 1.0),
    ("coin_flip", "0.234375", {}, "15/64", 1.0),
    ("coin_flip", "0.234375", {}, "0.2", 0.0),
    ("coin_flip", "3.051757812e-05", {}, "1/32,768", 1.0),
    ("coin_flip", "3.051757812e-05", {}, "0", 0.0),
    ("coin_flip", "1", {}, "1.0", 1.0),
    ("coin_flip", "0.5", {}, "5e-99/0", 0.0),
    ("coin_flip", "0.5", {}, ".", 0.0),
    ("coin_flip", "0.5", {}, "1e999999999", 0.0),
    ("puzzle24", "", {"numbers": [2, 4, 6, 8]}, "(4*6)+(2/8)", 0.01),
    ("puzzle24", "", {"numbers": [3, 3, 8, 8]}, "8/(3-8/3)", 1.0),
    ("puzzle24", "", {"numbers": [4, 4, 10, 10]}, "(10*10-4)/4", 1.0),
    ("puzzle24", "", {"numbers": [1, 2, 4, 6]}, "4*6+1/2", 0.01),
]


@pytest.mark.parametrize(("task", "gold", "fields", "answer", "value"), RIGHT)
def test_right_answers_keep_the_full_mark_and_those_that_only_look_so_lose_it(
    task: str, gold: str, fields: dict[str, Any], answer: str, value: float
) -> None:
    entry = {"answer": gold, "metadata": fields}
    asked = Problem("p", "?", gold, task, {"task": task, "config": {}, "entry": entry})
    assert REWARD.score(asked, f"<answer>{answer}</answer>").value == value


@pytest.mark.parametrize("task", RAISE)
def test_an_answer_on_which_a_task_raises_is_worth_nothing_and_no_failure(task: str) -> None:
    asked, entry = problem(task)
    answer = "{}" if task == "game_of_life" else "null"
    with pytest.raises((TypeError, KeyError, ValueError)):
        factory.create_dataset(task, size=1, seed=3).score_answer(answer, entry)
    assert REWARD.score(asked, answer) == Score.of(0.0, answer)


@pytest.mark.parametrize("value", [float("nan"), 1.5, -0.5, float("inf")])
def test_a_mark_of_a_task_that_is_none_counts_nothing(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = problem("chain_sum")
    dataset = type(factory.create_dataset("chain_sum", size=1, seed=3))
    monkeypatch.setattr(dataset, "score_answer", lambda *_: value)
    monkeypatch.setattr("rpg.rewards.functions.reasoning_gym.why_not", lambda *_: "")
    assert REWARD.score(asked, "42").value == 0.0


def test_half_a_surrogate_in_an_answer_is_replaced() -> None:
    asked, _ = problem("chain_sum")
    assert REWARD.score(asked, "<answer>a\ud800\u00e9</answer>").extracted == "a?\u00e9"
