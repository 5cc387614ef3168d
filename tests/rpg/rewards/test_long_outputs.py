"""A program's output costs the training process no more than a right output does."""

import time
import tracemalloc
from typing import Any

import pytest

from rpg.rewards import Problem, Reward, Score, open_scorer
from rpg.rewards.functions.code import same_output

CALL: dict[str, Any] = {"kind": "call", "hidden": [([1], [[1, "a"], {"b": 2}])], "function": "f"}
STDIN: dict[str, Any] = {"kind": "stdin", "hidden": [("1", "1 2\n3")]}
ASSERT: dict[str, Any] = {"kind": "assert", "hidden": ["assert f(1) == [1]"]}
WRITES = "import os\ntext = {text}\nwhile text: text = text[os.write(1, text[:1 << 16]):]\nos._exit(0)"


def scored(tests: dict[str, Any], *programs: str) -> list[Score]:
    whole = {"shown": [], "function": "", "setup": "", "grader": "apps", **tests}
    problem = Problem("p", "?", "", "d", {"tests": whole})
    with open_scorer(Reward.model_validate({"type": "code", "extract": "whole"})) as scorer:
        return scorer.score([problem] * len(programs), programs)


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("tests", [CALL, STDIN, ASSERT], ids=lambda tests: tests["kind"])
@pytest.mark.parametrize(
    "text", ["b'[' * 200_000", "b'{\"a\":' * 200_000", "b'9' * 200_000", "b'\\n' * 200_000", "b'(' * 9"]
)
def test_what_nobody_can_parse_is_the_programs_wrong_answer(text: str, tests: dict[str, Any]) -> None:
    (score,) = scored(tests, WRITES.format(text=text))
    assert score == Score(0.0, False, score.extracted)


@pytest.mark.more
@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("tests", [CALL, STDIN, ASSERT], ids=lambda tests: tests["kind"])
@pytest.mark.parametrize("text", ["b'[' + b'[],' * 5_592_000 + b'0]'", "b'1\\n' * 8_388_000", "b'1 ' * 8_388_000"])
def test_an_output_of_16_mib_costs_no_second_and_no_400_mb(text: str, tests: dict[str, Any]) -> None:
    scored(tests, "")  # the sandbox starts
    tracemalloc.start()
    begun = time.process_time()
    (score,) = scored(tests, WRITES.format(text=text))
    took, most = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert score == Score(0.0, False, score.extracted)
    assert most < 200e6
    assert took < 0.7  # 1.1 to 4 s where it was parsed


@pytest.mark.needs("bubblewrap")
def test_right_values_are_right_however_they_are_written() -> None:
    right = "def f(n):\n    return ([1.0000000001, 'a'], {'b': 2.0})"
    wrapped = CALL | {"hidden": [([1], [[[1, "a"], {"b": 2}]])]}
    assert [score.value for score in (*scored(CALL, right), *scored(wrapped, right))] == [1.0, 1.0]


def test_an_output_has_no_more_lines_and_words_than_the_expected_one() -> None:
    assert same_output("  1   2.0 \n3\n\n ", "1 2\n3", close=False)
    assert not same_output("1 2\n3\n4", "1 2\n3", close=False)
    assert not same_output("1 2 3\n3", "1 2\n3", close=True)
    assert not same_output("1\n2\n3", "1 2\n3", close=True)
    assert not same_output("9" * 5000, "9" * 5001, close=True)
    assert same_output("9" * 5000, "9" * 5000, close=True)
