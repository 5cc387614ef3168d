"""Programs scored by their tests: rows of our own in the columns of each set, with right and with wrong solutions."""

import base64
import json
import os
import pickle
import zlib
from math import comb
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stage_jobs import run_stage

from rpg.data.test_cases import FORMATS, cases_of
from rpg.rewards import Problem, Reward, Score, open_scorer
from rpg.rewards.functions.code import same_output, same_result, same_value
from rpg.sandbox import room
from specs.errors import SpecError
from specs.schema.data import Source
from tests.rpg.tiny_run import PROBLEMS, SPEC

TYPED = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "5 6", "output": "11", "testtype": "stdin"},
]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TYPED)))).decode()
CALLS = [{"input": '[1, 2]\n"a"', "output": '["a", 3]', "testtype": "functional"}]
ADDS = "print(sum(map(int, input().split())))"
STDIN = [(ADDS, 1.0), ("print(3)", 0.0), ("", 0.0), ("1 / 0", 0.0), (f"{ADDS}\nraise SystemExit(1)", 0.0)]
JOINS = "def join(numbers, name):\n    return [name, sum(numbers)]"
METHOD = "class Solution:\n    def join(self, numbers: List[int], name: str):\n        return (name, sum(numbers))"
CALLED = [(JOINS, 1.0), (METHOD, 1.0), ("def join(numbers, name): print(name)", 0.0), ("def other(): pass", 0.0)]
DOUBLES = "def double(n):\n    return n + n"
ASSERTED = [
    (DOUBLES, 1.0),
    ("def double(n): return n * n", 0.0),
    ("def double(n): raise SystemExit(0)", 0.0),
    (f"{DOUBLES}\nraise SystemExit(0)", 0.0),
    ("import os\ndef double(n): os._exit(0)", 0.0),
    ("def double(n) return n", 0.0),
]
ROWS: list[tuple[str, str, dict[str, Any], list[tuple[str, float]]]] = [
    ("taco", "stdin", {"input_output": json.dumps({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]})}, STDIN),
    ("taco", "lines", {"input_output": {"inputs": [["1 2"], ["5 6"]], "outputs": [["3"], ["11"]]}}, STDIN),
    (
        "taco",
        "call",
        {
            "input_output": {"inputs": [[[1, 2], "a"]], "outputs": [[["a", 3]]], "fn_name": "join"}
        },  # wrapped, as APPS is
        CALLED,
    ),
    ("livecodebench", "packed", {"public_test_cases": json.dumps(TYPED[:1]), "private_test_cases": PACKED}, STDIN),
    (
        "livecodebench",
        "call",
        {
            "public_test_cases": json.dumps(CALLS),
            "private_test_cases": json.dumps(CALLS),
            "metadata": json.dumps({"func_name": "join"}),
        },
        CALLED,
    ),
    (
        "verification_info",
        "PrimeIntellect",
        {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}] * 2}
                | {
                    "test_cases": [
                        {"type": "stdin_stdout", "input": f"{n} 2\n", "output": f"{n + 2}\n"} for n in (1, 9)
                    ]
                }
            )
        },
        STDIN,
    ),
    (
        "verification_info",
        "open-r1",
        {
            "verification_info": {
                "language": "python",
                "test_cases": [
                    {"fn_name": "join", "input": '[[1, 2], "a"]', "output": '[["a", 3]]', "type": "function_call"}
                ],
            }
        },
        CALLED,
    ),
    ("deepcoder", "typed", {"tests": json.dumps(TYPED)}, STDIN),
    ("deepcoder", "taco", {"tests": json.dumps({"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]})}, STDIN),
    ("codeforces", "official", {"official_tests": [{"input": "1 2", "output": "3"}], "examples": TYPED[1:]}, STDIN),
    (
        "mbpp",
        "asserts",
        {"test_list": ["assert double(2) == 4", "assert double(3) == 6"], "test_imports": []},
        ASSERTED,
    ),
    (
        "mbpp",
        "MBPP+",
        {
            "test_list": ["assert double(2) == 4"],
            "test_imports": ["import math"],
            "test": "for n in range(9):\n    assert double(n) == math.floor(2 * n)",
        },
        ASSERTED,
    ),
    (
        "humaneval",
        "HumanEval+",
        {
            "prompt": 'def double(n):\n    """Twice n."""\n',
            "entry_point": "double",
            "test": "def check(candidate):\n    for n in range(9):\n        assert candidate(n) == 2 * n\n",
        },
        [*ASSERTED, ("    return 2 * n", 1.0)],  # the body alone, as a base model writes it
    ),
    (
        "cases",
        "stdin",
        {"tests": [{"input": "1 2", "output": "3", "shown": True}, {"input": "5 6", "output": "11"}]},
        STDIN,
    ),
    ("cases", "call", {"tests": [{"arguments": [[1, 2], "a"], "value": ["a", 3]}], "function": "join"}, CALLED),
    ("cases", "asserts", {"tests": ["assert double(2) == 4", "assert double(3) == 6"]}, ASSERTED),
]


def problem(form: str, row: dict[str, Any]) -> Problem:
    return Problem("p", "?", "", "d", {"tests": cases_of(form, row).as_data()})


def fenced(code: str) -> str:
    return f"First ```\nprint('not this')\n```, then\n```python\n{code}\n```\nand that is it."


def scored(problem: Problem, *responses: str, **options: Any) -> list[Score]:
    with open_scorer(Reward.model_validate({"type": "code", "seconds_per_test": 2.0, **options})) as scorer:
        return scorer.score([problem] * len(responses), responses)


def test_rows_of_each_form_are_tried() -> None:
    assert {form for form, *_ in ROWS} == set(FORMATS)


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(("form", "row", "solutions"), [pytest.param(f, r, s, id=f"{f} {n}") for f, n, r, s in ROWS])
def test_right_solutions_pass_and_wrong_ones_do_not(
    form: str, row: dict[str, Any], solutions: list[tuple[str, float]]
) -> None:
    scores = scored(problem(form, row), *(fenced(code) for code, _ in solutions))
    assert [(score.value, score.error) for score in scores] == [(value, None) for _, value in solutions]
    assert [score.extracted for score in scores] == [f"{code}\n" for code, _ in solutions]


CASES = {"tests": [{"input": f"{n} 2", "output": f"{n + 2}", "shown": n == 1} for n in range(1, 5)]}


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"credit": "all"}, 0.0),
        ({"credit": "share"}, 0.25),
        ({"credit": "all", "tests": "shown"}, 1.0),
        ({"credit": "share", "tests": "hidden"}, 0.0),
        ({"credit": "share", "max_tests": 2}, 0.5),
    ],
)
def test_what_counts_is_what_the_spec_says(options: dict[str, Any], value: float) -> None:
    (score,) = scored(problem("cases", CASES), fenced("print(3)"), **options)
    assert (score.value, score.correct) == (value, value == 1.0)


@pytest.mark.needs("bubblewrap")
def test_each_test_has_its_time_and_a_response_has_its_own() -> None:
    slow = fenced("import time\nn = int(input().split()[0])\ntime.sleep(3 if n == 2 else 0)\nprint(n + 2)")
    assert scored(problem("cases", CASES), slow, credit="share", seconds_per_test=0.5)[0].value == 0.75
    assert scored(problem("cases", CASES), slow, credit="share", timeout_seconds=0.001)[0].value == 0.25


@pytest.mark.needs("bubblewrap")
@pytest.mark.needs("g++")
def test_programs_in_cpp_are_scored_by_the_same_tests() -> None:
    right = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"
    scores = scored(
        problem("cases", CASES), fenced(right), fenced(right.replace("+", "-")), fenced("no"), language="c++"
    )
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]


@pytest.mark.needs("bubblewrap")
def test_a_short_response_is_a_program_with_what_stands_around_it() -> None:
    call = {"tests": [{"arguments": [2], "value": 5}, {"arguments": [3], "value": 7}], "function": "f"}
    options = {"extract": "whole", "frame": "def f(x): return {code}", "credit": "share"}
    scores = scored(problem("cases", call), " 2 * x + 1\n", "x + 3", "", "import os", **options)
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.needs("bubblewrap")
def test_a_program_cannot_learn_what_a_call_should_give() -> None:
    spies = (
        "import sys\ndef join(numbers, name):\n    frame, found = sys._getframe(), []\n"
        "    while frame:\n        found.append(str(frame.f_locals) + str(frame.f_globals)); frame = frame.f_back\n"
        "    return ['a', 3] if 'the value' in ''.join(found) else None"
    )
    row = {"tests": [{"arguments": [[1, 2], "a"], "value": "the value" + " is known"}], "function": "join"}
    assert scored(problem("cases", row), fenced(spies))[0].value == 0.0


@pytest.mark.needs("bubblewrap")
def test_code_and_other_rewards_are_added_up() -> None:
    terms = [{"reward": {"type": "code", "credit": "share"}}, {"reward": {"type": "exact_match"}, "weight": 0.5}]
    for more in ([], [{"reward": {"type": "math_verify"}}]):  # in threads, and in a worker process
        reward = Reward.model_validate({"type": "weighted_sum", "terms": [*terms, *more], "timeout_seconds": 30.0})
        solved = problem("cases", CASES)
        gold = Problem(solved.problem_id, "?", fenced(ADDS), "d", solved.metadata)
        with open_scorer(reward) as scorer:
            (score,) = scorer.score([gold], [fenced(ADDS)])
        assert score.terms["code"] == 1.0
        assert score.error is None


@pytest.mark.needs("bubblewrap")
def test_a_problem_without_tests_is_the_rewards_own_failure() -> None:
    (score,) = scored(Problem("p", "?", "", "d"), fenced(ADDS))
    assert "has no tests" in (score.error or "")


@pytest.mark.needs("bubblewrap")
def test_a_sandbox_that_fails_stops_the_run_and_gives_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    reward = Reward.model_validate({"type": "code", "memory_mb": 777})  # no other test's sandbox
    with open_scorer(reward) as scorer:
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(room.SandboxError, match="failed 3 times"):
            scorer.score([problem("cases", CASES)], [fenced(ADDS)])


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("taco", {"input": "x"}, "no column `input_output`, which tests: taco reads"),
        ("taco", {"input_output": "{"}, "`input_output` is not JSON: "),
        ("taco", {"input_output": {"inputs": ["1"], "outputs": []}}, "no `inputs` and `outputs` of one length"),
        ("taco", {"input_output": {"inputs": [], "outputs": []}}, "there is no test"),
        ("livecodebench", {"public_test_cases": '[{"input": "1"}]'}, "test 1 lacks input or output: {'input': '1'}"),
        ("livecodebench", {"public_test_cases": "[]", "private_test_cases": "!!"}, "cannot be unpacked"),
        ("livecodebench", {"public_test_cases": json.dumps(CALLS)}, "no test names the function"),
        (
            "deepcoder",
            {"tests": [{"input": "", "output": "", "testtype": "interactive"}]},
            "of unknown `testtype`: inter",
        ),
        ("deepcoder", {"tests": [*TYPED, *CALLS], "metadata": {"func_name": "f"}}, "more than one kind"),
        ("verification_info", {"verification_info": {"test_cases": "x"}}, "`verification_info.test_cases` is not JSON"),
        ("codeforces", {"official_tests": TYPED, "generated_checker": "import sys"}, "has its own checker"),
        ("mbpp", {"test_list": 3}, "`test_list` is not a list of texts: 3"),
        ("humaneval", {"test": "assert f(1)", "entry_point": "f"}, "defines no check(candidate)"),
        ("cases", {"tests": [{"arguments": [1]}], "function": "f"}, "test 1 lacks arguments or value"),
        ("cases", {"tests": [{"arguments": 1, "value": 2}], "function": "f"}, "test 1: `arguments` is not a list: 1"),
    ],
)
def test_a_row_whose_tests_are_of_another_form_is_named(
    form: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = next(row for name, _, row, _ in ROWS if name == form)
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": "?", **each}) + "\n" for each in (good, row)))
    source = Source.model_validate({"source": "jsonl", "path": str(path), "tests": form})
    with pytest.raises(SpecError) as refused:
        list(source.read())
    (issue,) = refused.value.issues
    assert issue.message.startswith("tasks.jsonl, line 2: ")
    assert message in issue.message
    assert (issue.path, issue.given) == (("tests",), form)


def test_what_a_data_set_pickles_is_never_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode()
    with pytest.raises(ValueError, match="and a text needs none"):
        cases_of("livecodebench", {"public_test_cases": "[]", "private_test_cases": packed})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("output", "expected", "exact", "close"),
    [
        ("3", "3\n", True, True),
        (" 3 \n\n", "3", True, True),
        ("1 2\n3", "1 2 \n3 ", True, True),
        ("1\n2", "1 2", False, False),
        ("1  2", "1 2", True, True),
        ("yes  sir", "yes sir", False, True),
        ("2.50", "2.5", True, True),
        ("0.3333333", "0.33333331", False, True),
        ("0.3333", "0.3334", False, False),
        ("Yes", "YES", False, False),
        ("", "0", False, False),
        ("nan", "nan", True, True),
        ("1e400", "2e400", False, False),
        ("1e5", "100000", True, True),
    ],
)
def test_outputs_are_compared_as_the_sets_graders_do(output: str, expected: str, exact: bool, close: bool) -> None:
    assert same_output(output, expected, close=False) is exact
    assert same_output(output, expected, close=True) is close


def test_values_are_the_same_where_their_parts_are() -> None:
    assert same_value([1, [2.0000000001]], [1, [2]])
    assert same_value({"a": 1}, {"a": 1})
    assert not same_value([1], [1, 2])
    assert not same_value("1", 1)
    assert not same_value("1.0", 1.0)


def test_a_call_does_not_pass_with_the_first_part_of_its_answer() -> None:
    assert same_result([0, 1], [0, 1])
    assert same_result([0, 1], [[0, 1]])
    assert same_result(3, [3])
    assert not same_result(0, [0, 1])
    assert not same_result([0, 1], [[0, 1], 2])
    assert not same_result([], [[], 1])


@pytest.mark.more
@pytest.mark.needs("bubblewrap")
def test_pass_at_k_of_programs_is_counted_as_that_of_answers(inputs: Path, tmp_path: Path) -> None:
    """A policy of digits and = writes programs, of which some are none. A program that prints nothing passes."""
    tests = {"tests": cases_of("cases", {"tests": [{"input": "", "output": ""}]}).as_data()}
    rows = [
        {
            "problem_id": f"p{place}",
            "prompt": prompt,
            "answer": "",
            "dataset": "programs",
            "metadata": json.dumps(tests),
        }
        for place, prompt in enumerate(PROBLEMS)
    ]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "evaluation.parquet")
    (tmp_path / "run").mkdir()
    source = {"source": "jsonl", "name": "programs", "path": "programs.jsonl", "tests": "cases"}
    spec = SPEC | {
        "data": {**SPEC["data"], "evaluation": [source]},
        "reward": {"type": "code", "extract": "whole"},
        "rollout": {"engine": "transformers", "max_response_length": 2},
        "evaluation": {"samples_per_problem": 4, "checkpoints": "final"},
        "training": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
    }
    (tmp_path / "run" / "weights").mkdir()
    (tmp_path / "run" / "weights" / "step-000001").symlink_to(inputs / "base")
    (tmp_path / "run" / "train.json").write_text(json.dumps({"weights": {"1": "weights/step-000001"}}))
    left = run_stage("evaluate", tmp_path, spec, data=tmp_path / "data", base=inputs / "base", run=tmp_path / "run")
    assert left.code == 0, left.log
    samples = pq.read_table(left.out / "segments" / "evaluation_samples").to_pylist()
    right = [sum(row["correct"] for row in samples if row["problem_id"] == each["problem_id"]) for each in rows]
    assert 0 < sum(right) < 4 * len(rows)
    assert not any(row["reward_error"] for row in samples)
    (summary,) = json.loads((left.out / "summary.json").read_text())["checkpoints"]
    for k in (1, 2, 4):
        expected = sum(1 - comb(4 - count, k) / comb(4, k) for count in right) / len(rows)
        assert summary["metrics"][f"pass@{k}"]["value"] == pytest.approx(expected)
    assert summary["metrics"]["mean@4"]["value"] == pytest.approx(sum(right) / 4 / len(rows))
