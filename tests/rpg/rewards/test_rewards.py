"""Each reward, their sum, and that none of them can end a run."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import faulty_scorers
import psutil
import pytest
from faulty_scorers import AsksAService, Faulty, Unprepared
from hypothesis import given
from hypothesis import strategies as st
from places import TESTS
from waiting import is_gone, wait_for

from rpg.metrics import rollout_metrics
from rpg.rewards import Score, failures, open_scorer, prove, worker
from rpg.rewards import pool as worker_pool
from rpg.rewards.functions import math_dapo
from rpg.rewards.functions.weighted_sum import Term, WeightedSum
from rpg.rewards.pool import WorkerPool
from rpg.rewards.score import RewardAwayError, RewardFailedError
from rpg.types import Problem
from specs.schema.reward import Reward
from tests.rpg.batches.test_batch import example


def problem(answer: str, **metadata: object) -> Problem:
    return Problem(problem_id="p", prompt="?", answer=answer, dataset="d", metadata=dict(metadata))


def one(kind: str, answer: str, response: str) -> Score:
    with open_scorer(Reward.model_validate({"type": kind})) as scorer:
        return scorer.score([problem(answer)], [response])[0]


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", "Answer: 42"),
        ("42", r"answer : \boxed{42}"),
        ("42", "Answer: $42$."),
        ("42", "Answer: x=42"),
        ("1000", "Answer: 1,000"),
        ("42", "Answer: 42 dollars"),
        ("42", "Answer:\n42"),
        ("42", "Final Answer: 42"),
        ("336^\\circ", "Answer: 336"),
        ("336", r"Answer: 336^{\circ}"),
        (r"\frac12", r"Answer: \frac{1}{2}"),
        ("42", "Answer: 41\nno, wait\nAnswer: 42"),
        ("42", "x" * 1000 + "Answer: 42"),
        ("42", "Answer: 42\n" + "x" * 289),  # 300 characters
    ],
)
def test_math_dapo_accepts(gold: str, response: str) -> None:
    assert one("math_dapo", gold, response) == Score(1.0, True, one("math_dapo", gold, response).extracted)


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{42}",
        "Answer: 42.",
        "**Answer:** 42",
        "Answer: **42**",
        r"Answer: \(42\)",
        "Answer: 042",
        "Answer: 42.0",
        "The answer is: 42",
        "Answer: 42\nAnswer: see above",
        "Answer: 42\n" + "x" * 290,  # 301 characters
        "",
    ],
)
def test_math_dapo_rejects_with_minus_one(response: str) -> None:
    score = one("math_dapo", "42", response)
    assert (score.value, score.correct, score.error) == (-1.0, False, None)


def test_math_dapo_reports_the_normalised_answer_or_none() -> None:
    assert one("math_dapo", "7", "Answer: $1,234$ dollars").extracted == "1234"
    assert one("math_dapo", "7", "I give up").extracted is None


PUBLISHED_REWRITES = (
    (r"(.*?)\$(.*?)\$(.*)", r"$\2$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)
"""Those of DAPO's released scorer, which take a time that grows with the square of a text's length."""
PIECES = ["$", "{", "}", "\\text{", "\\textbf{", "\\overline{", "\\boxed{", "frac", "sqrt", "\n", "1", "x", "\\"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_math_dapo_rewrites_as_its_published_patterns_do(pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = text
    for pattern, replacement in PUBLISHED_REWRITES:
        expected = re.sub(pattern, replacement, expected)
    assert math_dapo.rewritten(text) == expected


@pytest.mark.more
@pytest.mark.parametrize("piece", [*PIECES, "=", " ", "\\text{}", "\\boxed{\\boxed{", "\\text{\n", "$\n"])
def test_math_dapo_takes_a_time_that_grows_with_the_length_of_the_answer(piece: str) -> None:
    def seconds(length: int) -> float:
        answer = piece * (length // len(piece))
        taken = []
        for _ in range(3):
            start = time.thread_time()
            math_dapo.normalise(answer)
            taken.append(time.thread_time() - start)
        return min(taken)

    short = seconds(3_000)
    # With the square of the length it would be 100 times and 10,000 times as long.
    assert seconds(30_000) < 40 * short + 0.005
    assert seconds(300_000) < 400 * short + 0.05


@pytest.fixture(scope="module")
def verifier() -> Iterator[object]:
    with open_scorer(Reward.model_validate({"type": "math_verify"})) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("42", r"so \boxed{42}", 1.0),
        ("1/2", "it is 0.5", 1.0),
        (r"\frac{1}{2}", r"$\frac{2}{4}$", 1.0),
        ("336^\\circ", "Answer: 336", 1.0),
        ("-1", "Answer: -1", 1.0),
        ("42", r"\boxed{43}", 0.0),
        ("42", "I do not know", 0.0),
        ("42", "", 0.0),
        # Numbers are compared exactly, however small or long they are.
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", 0.0),
        (r"2^{-98}", r"\boxed{2^{-99}}", 0.0),
        (r"2^{-98}", r"\boxed{\frac{1}{2^{98}}}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.333333}", 0.0),
        ("6.02e23", r"\boxed{6.02\times10^{23}}", 1.0),
        (r"\sqrt{2}", r"\boxed{1.41421356237}", 0.0),
        (r"\sqrt{2}", r"$\frac{2}{\sqrt{2}}$", 1.0),
        (r"50\%", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{0}", r"\boxed{1}", 0.0),
        # Wherever they stand.
        (r"(1/2004!, 1)", r"\boxed{(1/2006!, 1)}", 0.0),
        (r"[0, 2^{-98}]", r"\boxed{[0, 2^{-99}]}", 0.0),
        (r"\{2^{-98}\}", r"\boxed{\{2^{-99}\}}", 0.0),
        (r"x = 2^{-98}", r"\boxed{x = 2^{-99}}", 0.0),
        (r"x > 2^{-98}", r"\boxed{x > 2^{-99}}", 0.0),
        (r"\begin{pmatrix}2^{-98}\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}2^{-99}\\1\end{pmatrix}}", 0.0),
        (r"x + 2^{-98}", r"\boxed{x + 2^{-99}}", 0.0),
        (r"\{0.1, 0.2\}", r"\boxed{\{1/5, 1/10\}}", 1.0),
        (r"0.1x + 0.2x", r"\boxed{0.3x}", 1.0),
        ("0", r"\boxed{\sin(\pi)}", 1.0),
        ("0", r"\boxed{\sqrt{3 + 2\sqrt2} - 1 - \sqrt2}", 1.0),
        (r"\sqrt{2} + 10^{-60}", r"\boxed{\sqrt{2}}", 0.0),
        ("10^{300} + 1", r"\boxed{10^{300}}", 0.0),
        ("-1", r"\boxed{e^{i\pi}}", 1.0),
        # Symbols whose roots and logarithms are real are positive.
        (r"\sqrt{1/n}", r"\boxed{\frac{1}{\sqrt{n}}}", 1.0),
        (r"\sqrt{\frac{x}{y}}", r"\boxed{\frac{\sqrt{x}}{\sqrt{y}}}", 1.0),
        ("x", r"\boxed{\sqrt{x^2}}", 0.0),
        (r"2\log x", r"\boxed{\log(x^2)}", 0.0),
        (r"\sqrt{n}", r"\boxed{\sqrt{m}}", 0.0),
        # Spellings that the library alone does not read.
        ("x^2", "x^2", 1.0),
        ("2x + 1", "The answer is 2x+1.", 1.0),
        ("x^2", "x^3", 0.0),
        ("3", "Answer: 3 m", 1.0),
        ("7/2", "The answer is 3 1/2.", 1.0),
        ("-3 1/2", r"\boxed{-3.5}", 1.0),
        ("31/2", r"\boxed{3 1/2}", 0.0),
        ("12", "The answer is twelve.", 1.0),
        ("-2005", r"\boxed{\text{minus two thousand and five}}", 1.0),
        ("twenty-one", "21", 1.0),
        ("1", "The answer is one of these", 0.0),
        ("12", "thirteen", 0.0),
        (r"\frac{\pi}{2}", "The answer is pi/2.", 1.0),
        (r"2\sqrt{3}", "**Answer:** 2√3", 1.0),
        (r"\sqrt{2}", "√2", 1.0),
        ("-5", "\u22125", 1.0),
        ("1/2", "½", 1.0),
        ("x^2", "x²", 1.0),
        ("6", "2\u00d73", 1.0),
        ("12", "١٢", 1.0),
        ("0.00001", "1e-5", 1.0),
        ("1000", r"\boxed{1\,000}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.\overline{3}}", 1.0),
        (r"\infty", r"\boxed{∞}", 1.0),
        ("30", r"\boxed{30\degree}", 1.0),
        (r"\sqrt{\frac{1}{3}}", r"\boxed{√(1/3)}", 1.0),
        (r"\frac{\pi}{2}", r"\boxed{pi/2}", 1.0),
        ("3", r"\fbox{3}", 1.0),
        ("90", r"\boxed{90°}", 1.0),
        ("12", "\\boxed{\uff11\uff12}", 1.0),
        ("5.", r"\boxed{5}", 1.0),
        ("(3,4).", r"\boxed{(3,4)}", 1.0),
        ("5", r"\boxed{5.}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.\bar{3}}", 1.0),
        (r"\frac{1}{6}", r"\boxed{0.1\dot{6}}", 1.0),
        ("-5", "\\boxed{\u20135}", 1.0),
        ("1024", "2**10", 1.0),
        ("x^2", r"\boxed{x**2}", 1.0),
        ("42", "The answer is **42**", 1.0),
        (r"\sqrt{3}", r"\boxed{sqrt3}", 1.0),
        (r"\sqrt[3]{-8}", r"\boxed{-2}", 1.0),
        (r"\emptyset", r"\boxed{\varnothing}", 1.0),
        ("1000", r"\boxed{1 000}", 1.0),
        ("3 100/200", r"\boxed{3.5}", 1.0),
        (r"2\,3/4", r"\boxed{2.75}", 1.0),
        ("€10", r"\boxed{10}", 1.0),
        ("10", r"It costs \$10.", 1.0),
        ("7", r"\boxed{\textcolor{red}{7}}", 1.0),
        ("7", r"\boxed{~7~}", 1.0),
        ("7", r"\boxed{7\\}", 1.0),
        # Degrees in a function of angles are angles, other degrees are their number.
        (r"\sin 30^\circ", r"\boxed{\frac{1}{2}}", 1.0),
        ("1", r"\boxed{\tan(45^{\circ})}", 1.0),
        (r"\sin^2 30°", r"\boxed{0.25}", 1.0),
        (r"\sin 30", r"\boxed{0.5}", 0.0),
        # Times and other divisions by zero are compared as texts.
        ("3:00", r"\boxed{4:00}", 0.0),
        ("3:00", r"\boxed{3:00}", 1.0),
        # Inequalities that are solved are intervals.
        (r"[5,\infty)", r"\boxed{x \ge 5}", 1.0),
        ("[1,2)", r"\boxed{1 \le x < 2}", 1.0),
        ("(1,2)", r"\boxed{2 > x > 1}", 1.0),
        ("[1,2)", r"\boxed{1 \le x \le 2}", 0.0),
        (r"[5,\infty)", r"\boxed{x - 5 \ge 0}", 0.0),
        (r"\{1,2\}", r"\boxed{1 < x < 2}", 0.0),
        # An answer between tags.
        ("42", "<answer>42</answer>", 1.0),
        ("1/2", r"<answer> \frac12 </answer>", 1.0),
        ("(1,2)", "<answer>(1, 2)</answer>", 1.0),
        ("12", "<answer>12 m</answer>", 1.0),
        ("7", "<answer>8</answer><answer>The answer is 7.</answer>", 1.0),
        ("7", "<answer>8</answer> or 7", 0.0),
        # Choices.
        ("B", "B", 1.0),
        ("(B)", r"so \boxed{\text{B}}", 1.0),
        ("B", "The answer is (B).", 1.0),
        ("B", r"B looks right, but \boxed{C}", 0.0),
        ("A", "A fool may say so", 0.0),
        ("B", "The answer is B because option C is wrong.", 1.0),
        ("B", r"\boxed{\mathrm{B}}", 1.0),
        ("B", r"\boxed{\textbf{(B)} 42}", 1.0),
        ("B", r"\boxed{B + C}", 0.0),
        ("B", "**B**", 1.0),
        ("B", "B) 42", 1.0),
        ("B", "Answer: $B$", 1.0),
        ("B", "**Answer:** B", 1.0),
        ("A", "The answer is A or B", 0.0),
    ],
)
def test_math_verify_compares_as_mathematics(verifier, gold: str, response: str, value: float) -> None:  # type: ignore[no-untyped-def]
    score = verifier.score([problem(gold)], [response])[0]
    assert (score.value, score.correct, score.error) == (value, value == 1.0, None)


READ = [
    ("So $7$.\nAnswer: 42", "42", 1.0),
    ("We have 3+4=7. Then $x=9$.\nAnswer: 8 meters", "8", 1.0),
    ("Answer: $4\\sqrt{2}$", "\\sqrt{32}", 1.0),
    ("Answer: \\frac{1}{2}", "0.5", 1.0),
    ("Answer: $y = 2x + 1$", "y=2x+1", 1.0),
    ("Answer: $(3,4)$", "(3,4)", 1.0),
    ("Answer: $1.5 \\times 10^{5}$", "150000", 1.0),
    ("Answer: $x^{2}+1$", "x^{2}+1", 1.0),
    # What it cannot read: no number, and no formula between dollars; and what is boxed comes before what stands last.
    ("Answer: (3, 4)", "(3,4)", 0.0),
    ("Answer: 4\\sqrt{2}", "\\sqrt{32}", 0.0),
    ("First $\\boxed{5}$.\nAnswer: 4", "4", 0.0),
    ("I give up", "4", 0.0),
]
"""Responses to a prompt that asks for a line with Answer:, the gold answer, and the score."""


@pytest.mark.parametrize(("response", "gold", "value"), READ)
def test_math_verify_reads_the_line_that_the_papers_prompt_asks_for_as_the_papers_scorer_does(
    response: str, gold: str, value: float
) -> None:
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    targets = {"gold_extraction_target": (LatexExtractionConfig(),)}
    scorer = math_metric(**targets, pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()))
    assert scorer([f"\\boxed{{{gold}}}"], [response])[0] == value
    reward = Reward.model_validate({"type": "math_verify"})
    assert reward.score(Problem("p", "?", gold, "d"), response).value == value


def test_math_verify_survives_a_power_tower() -> None:
    with open_scorer(Reward.model_validate({"type": "math_verify", "timeout_seconds": 1.0})) as scorer:
        scores = scorer.score([problem("42")] * 2, [r"$9^{9^{9^{9^{9}}}}$", r"\boxed{42}"])
    assert scores[0].value == 0.0
    assert scores[1] == Score(1.0, True, "42")


def test_exact_match_ignores_only_surrounding_white_space() -> None:
    assert one("exact_match", "a b", " a b\n") == Score(1.0, True, "a b")
    assert one("exact_match", "a b", "a  b") == Score(0.0, False, "a  b")
    assert one("exact_match", "a b", " ") == Score(0.0, False, None)


def test_reasoning_gym_uses_the_tasks_own_scorer_and_its_partial_credit() -> None:
    entry = {"question": "12 + 30 =", "answer": "42", "metadata": {}}
    item = problem("42", task="chain_sum", config={}, entry=entry)
    begun = [replace(item, prefill=prefill) for prefill in ("Answer: ", "<answer>")]
    with open_scorer(Reward.model_validate({"type": "reasoning_gym"})) as scorer:
        exact, tagged, longer, wrong = scorer.score([item] * 4, [" 42", "so <answer>42</answer>", "1420", "7"])
        prefilled = scorer.score(begun, ["Answer: 42", "<answer>42</answer>"])
    assert prefilled == [Score(1.0, True, "42")] * 2
    assert exact == Score(1.0, True, "42")
    assert tagged == Score(1.0, True, "42")
    assert longer == Score(0.5, False, "1420")  # chain_sum: the share of the answer's characters in the response
    assert wrong == Score(0.0, False, "7")


def test_reasoning_gym_on_a_problem_of_another_source_is_a_recorded_error() -> None:
    error = one("reasoning_gym", "42", "42").error
    assert re.fullmatch(FOREIGN_PROBLEM, error)


FOREIGN_PROBLEM = (
    r"ValueError: problem p does not come from reasoning_gym: it has no task to score it \(.*/reasoning_gym\.py:\d+\)"
)


def weighted_sum(*terms: dict[str, object]) -> Reward:
    return Reward.model_validate({"type": "weighted_sum", "terms": terms})


def test_a_weighted_sum_adds_up_and_its_first_term_decides_what_is_correct() -> None:
    reward = weighted_sum({"reward": {"type": "math_dapo"}}, {"reward": {"type": "exact_match"}, "weight": -0.25})
    with open_scorer(reward) as scorer:
        right, both, neither = scorer.score(
            [problem("42"), problem("Answer: 7"), problem("1")], ["Answer: 42", "Answer: 7", "2"]
        )
    weights = {"math_dapo": 1.0, "exact_match": -0.25}
    assert right == Score(1.0, True, "42", terms={"math_dapo": 1.0, "exact_match": 0.0}, weights=weights)
    assert both == Score(-1.25, False, "7", terms={"math_dapo": -1.0, "exact_match": 1.0}, weights=weights)
    assert neither == Score(-1.0, False, None, terms={"math_dapo": -1.0, "exact_match": 0.0}, weights=weights)


def test_a_term_that_fails_makes_the_sum_fail_and_is_named() -> None:
    reward = weighted_sum({"reward": {"type": "exact_match"}}, {"reward": {"type": "reasoning_gym"}, "name": "task"})
    with open_scorer(reward) as scorer:
        score = scorer.score([problem("42")], ["42"])[0]
    assert (score.value, score.correct) == (0.0, False)
    assert re.fullmatch(f"task: {FOREIGN_PROBLEM}", score.error)


def test_a_part_that_needs_the_machine_is_scored_beside_one_that_runs_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "rpg"), os.environ.get("PYTHONPATH", "")]))
    runs = Reward.model_validate(
        {"type": "python", "path": "f.py", "code": "def score(response): return len(response)"}
    )
    mixed = WeightedSum(type="weighted_sum", terms=(Term(reward=runs), Term(reward=Faulty(type="faulty"), weight=0.1)))
    with open_scorer(mixed) as scorer:
        (score,) = scorer.score([problem("a")], ["environment"])
    assert score.terms == {"python": 11.0, "faulty": 1.0}
    assert score.error is None


def test_the_step_records_the_mean_of_each_term() -> None:
    scores = [
        Score(1.5, True, terms={"a": 1.0, "b": 0.5}),
        Score(0.0, False, terms={"a": 0.0, "b": 0.0}),
        Score.failed("b: no"),
    ]
    step = replace(example(), scores=tuple(scores[index % 3] for index in range(len(example().scores))))
    having = [score.terms for score in step.scores if score.terms]
    metrics = rollout_metrics(step)
    assert metrics["reward/a/mean"] == sum(terms["a"] for terms in having) / len(having)
    assert metrics["reward/b/mean"] == metrics["reward/a/mean"] / 2


@pytest.fixture
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Its parameter: seconds that a response may take."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "rpg"), os.environ.get("PYTHONPATH", "")]))
    _of_others.clear()
    _of_others.update(workers())
    with WorkerPool(Faulty(type="faulty", timeout_seconds=getattr(request, "param", 0.5)), workers=2) as pool:
        yield pool


_of_others: set[int] = set()
"""Watchers that other fixtures of this file have started before the pool."""


def workers() -> set[int]:
    """Processes of the faulty scorers, as the pool has started them: each watches a process that scores."""
    children = psutil.Process().children()
    found = {child.pid for child in children if child.is_running() and "rpg.rewards.worker" in child.cmdline()}
    return found - _of_others


def watched(pids: set[int]) -> set[int]:
    """Returns the states of these processes."""
    return {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}


def run(pool: WorkerPool, *responses: str) -> list[Score]:
    return pool.score([problem("a")] * len(responses), responses)


def test_each_kind_of_failure_costs_its_sample_only(pool: WorkerPool) -> None:
    good, raised, hung, deaf, died, ate, swallowed, printed, last = run(
        pool, "x", "raise", "hang", "hang deaf to signals", "die", "eat memory", "swallow", "print", "y"
    )
    assert good == Score(1.0, True, "a {} x")
    line = (
        Path(faulty_scorers.__file__)
        .read_text()
        .splitlines()
        .index('            raise ZeroDivisionError("no such number")')
    )
    place = f"{faulty_scorers.__file__}:{line + 1}"
    assert raised == Score(0.0, False, None, f"ZeroDivisionError: no such number ({place})")
    assert hung == Score(0.0, False, None, "no verdict after 0.5 s")
    assert deaf == Score(0.0, False, None, "no verdict after 0.5 s; the scorer was killed")
    assert died == Score(0.0, False, None, "the scorer's process died (exit 7)")
    assert str(ate.error).startswith("MemoryError:  (")
    assert swallowed == Score(0.0, False, None, "no verdict after 0.5 s")
    assert printed == Score(1.0, True, "a {} print")
    assert last == Score(1.0, True, "a {} y")


def test_a_service_that_is_away_is_asked_again(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_PAUSES", (0.01, 0.02))
    back, other, gone = run(pool, f"away {tmp_path}/back 3", "x", f"away {tmp_path}/gone")
    assert back == Score(1.0, True, "answered")
    assert other == Score(1.0, True, "a {} x")
    assert (gone.value, gone.away) == (0.0, True)
    assert str(gone.error).startswith("RuntimeError: the service (")
    assert (tmp_path / "gone").read_text() == "..."


def test_a_reward_is_proved_by_the_first_responses() -> None:
    good, own, away = Score.of(1.0, None), Score.failed("KeyError: 'x' (mine.py:7)"), Score.failed("gone", away=True)
    prove([good, own])
    prove([good, own, own, good, away])
    with pytest.raises(RewardFailedError, match=r"failed on 2 of 3 responses: KeyError: 'x' \(mine.py:7\)"):
        prove([good, own, own])
    with pytest.raises(RewardAwayError, match=r"did not answer for 3 of 3 responses: gone \(2\); KeyError: .* \(1\)"):
        prove([away, own, away])
    with pytest.raises(
        RewardFailedError, match=r"failed on 60% of the responses .*; among the responses that were kept: 1 of 3"
    ):
        prove([good, good, own], of_sampled=0.6)
    assert failures([good]) == ""


def test_the_step_records_the_share_of_responses_that_could_not_be_scored() -> None:
    count = len(example().scores)
    step = replace(example(), scores=(Score.failed("no"), *[Score.of(1.0, None)] * (count - 1)))
    assert rollout_metrics(step)["reward/error_fraction"] == 1 / count
    assert rollout_metrics(example())["reward/error_fraction"] == 0


def test_a_worker_is_given_all_of_a_problem() -> None:
    whole = Problem("p", "?", "42", "d", {"level": 3}, "theme", "data.train.0", "[]", ("level",), "<think>\n")
    assert all(getattr(whole, each.name) for each in fields(whole))
    assert worker._read(worker_pool._request(whole, "x")) == (whole, "x")


@pytest.mark.parametrize("pool", [30.0], indirect=True)
def test_a_worker_stays_for_the_next_call(pool: WorkerPool) -> None:
    run(pool, "x", "y")
    before = workers()
    assert len(before) == 2
    assert all(score.correct for score in run(pool, *["x"] * 100))
    assert workers() == before


@pytest.mark.parametrize("pool", [30.0], indirect=True)
def test_a_worker_killed_while_idle_costs_no_sample(pool: WorkerPool) -> None:
    run(pool, "x", "y")
    pids = workers()
    wait_for(lambda: len(watched(pids)) == 2, what="both workers")
    for pid in (killed := watched(pids)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, killed | pids)), what="the workers' end")
    assert all(score.correct for score in run(pool, *["x"] * 6))


@pytest.mark.parametrize("pool", [30.0], indirect=True)
def test_metadata_reaches_the_scorer_as_it_was(pool: WorkerPool) -> None:
    item = problem("a", at=(1, 2), edges={3: [4]})
    assert pool.score([item], ["x"])[0].extracted == "a {'at': (1, 2), 'edges': {3: [4]}} x"


def test_closing_leaves_no_process(pool: WorkerPool) -> None:
    run(pool, "x", "y")
    pids = workers()
    assert len(pids) == 2
    family = pids | watched(pids)
    assert len(family) > 2
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in family)


def test_a_daemon_that_a_scorer_started_ends_with_the_pool(pool: WorkerPool) -> None:
    pid = int(str(run(pool, "start a daemon")[0].extracted))
    assert psutil.pid_exists(pid)
    pool.close()
    assert not psutil.pid_exists(pid)


def test_a_daemon_that_a_scorer_started_ends_with_the_scorer(pool: WorkerPool) -> None:
    error = str(run(pool, "start a daemon and die")[0].error)
    assert error.startswith("the scorer's process died (exit 7) ")
    assert not psutil.pid_exists(int(error.split()[-1]))


def test_a_daemon_that_a_scorer_started_ends_where_the_trainer_is_killed() -> None:
    code = (
        "import time; from faulty_scorers import Faulty; from rpg.rewards.pool import WorkerPool\n"
        "from rpg.types import Problem\n"
        "pool = WorkerPool(Faulty(type='faulty'))\n"
        "print(pool.score([Problem('p', '?', 'a', 'd')], ['start a daemon'])[0].extracted, flush=True)\n"
        "time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "rpg")}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout
        pid = int(trainer.stdout.readline())
        assert psutil.pid_exists(pid)
        trainer.kill()
    wait_for(lambda: not psutil.pid_exists(pid), what="the daemon's end")


def test_a_scorer_gets_no_environment_but_that_of_a_list(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SERVICE_KEY", "key")
    plain = str(run(pool, "environment")[0].extracted).split()
    assert {"HOME", "PATH", "PYTHONPATH"} <= set(plain)
    assert not {"HF_TOKEN", "SERVICE_KEY"} & set(plain)
    with WorkerPool(AsksAService(type="asks")) as asking:
        named = str(run(asking, "environment")[0].extracted).split()
    assert set(named) - set(plain) == {"SERVICE_KEY"}


def test_a_scorer_has_limits(pool: WorkerPool) -> None:
    memory, processes, length, files, core = map(int, str(run(pool, "limits")[0].extracted).split())
    assert (memory, length, core) == (8 << 30, 1 << 30, 0)
    assert files <= 4096
    # The kernel counts all that the user has, other programs too: a limit of ours would end programs that have room.
    assert processes == resource.getrlimit(resource.RLIMIT_NPROC)[1]


def test_a_request_longer_than_a_pipe_holds_is_scored(pool: WorkerPool) -> None:
    answer = "x" * 3_000_000
    assert run(pool, answer)[0].extracted == "a {} " + answer


def test_a_scorer_that_cannot_be_prepared_is_our_failure_not_the_samples() -> None:
    with (
        WorkerPool(Unprepared(type="unprepared")) as pool,
        pytest.raises(RuntimeError, match="did not start"),
    ):
        run(pool, "x")
