"""Verdicts are checked in one place, whatever their origin; one that a response wrote decides on its own value
alone."""

import json
import math
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from scoring_attacks import ANSWERS, PROBLEM, code, evaluating

from rpg.metrics import rollout_metrics
from rpg.rewards import Problem, Score, open_scorer, prove
from rpg.rewards.functions.weighted_sum import Term, WeightedSum
from rpg.rewards.judges.verdicts import Verdict
from rpg.rewards.score import LONGEST_VERDICT, RewardFailedError, Scorer, checked, failures_at_worst, scores_vary
from specs.schema.reward import Reward
from tests.rpg.batches.test_batch import example

SAID = Verdict("a judge", 0, "5", 5.0, None, 10, 1, 0.0, "key")
INVALID = "the reward returned an invalid score: "
MANY = dict.fromkeys(map(str, range(1001)), 0.0)


class Says(Reward):
    """Returns its own argument."""

    in_process: ClassVar[bool] = True
    says: ClassVar[Any] = None

    def score(self, problem: Problem, response: str) -> Any:  # noqa: ARG002
        return type(self).says


class Large(Says):
    """Declares scores beyond the usual bound."""

    largest: ClassVar[float] = 1e9


class Waits(Says):
    """Has a scorer of its own, which checks nothing."""

    in_process: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    def open(self, place: Any) -> Scorer:  # noqa: ARG002
        return _Unchecked()


class _Unchecked(Scorer):
    def submit(self, problem: Problem, response: str, member: Any = None) -> "Future[Score]":  # noqa: ARG002
        found: Future[Score] = Future()
        found.set_result(Waits.says)
        return found

    def close(self) -> None:
        pass


def scored(kind: type[Says], says: Any, monkeypatch: pytest.MonkeyPatch) -> Score:
    monkeypatch.setattr(kind, "says", says)
    with open_scorer(kind(type="says")) as scorer:
        return scorer.score([PROBLEM], ["a response"])[0]


def with_verdicts(**changes: Any) -> Score:
    return Score(1.0, True, verdicts=json.dumps([asdict(SAID) | changes]))


FAULTS = [
    (1.0, "1.0 is not a Score"),
    (Score(math.nan, True), "value is nan; allowed: a number from -1e+06 to 1e+06"),
    (Score(math.inf, True), "value is inf; allowed"),
    (Score(1e300, True), "value is 1e+300; allowed"),
    (Score(-1e7, False), "value is -10000000.0; allowed"),
    (Score(10**400, True), "value is 1000"),
    (Score("1", True), "value is '1'; allowed"),
    (Score(None, True), "value is None; allowed"),
    (Score([1.0], True), "value is [1.0]; allowed"),
    (Score(1.0, "yes"), "correct is 'yes' and away is False; allowed: True or False, and for correct also None"),
    (Score(1.0, True, away="no"), "correct is True and away is 'no'"),
    (Score(1.0, True, extracted=1), "extracted is 1; allowed: a text or None"),
    (Score(1.0, True, extracted="\ud800"), "'utf-8' codec can't encode"),
    (Score(1.0, True, extracted="x" * (LONGEST_VERDICT + 1)), "extracted has 16777217 characters; allowed: at most"),
    (Score(1.0, True, error={}), "error is {}; allowed"),
    (Score(1.0, True, penalty=math.nan), "penalty is nan"),
    (Score(1.0, True, penalty=5.0), "penalty is 5.0; allowed: a number of at most 0"),
    (Score(1.0, True, turns=math.nan), "turns is nan"),
    (Score(1.0, True, turns=1e300), "turns is 1e+300"),
    (Score(1.0, True, terms={"a": 1.0}), "terms and weights must be mappings from the same names to numbers"),
    (Score(1.0, True, weights={"a": 1.0}), "terms and weights must be mappings from the same names to numbers"),
    (Score(1.0, True, terms=[1.0], weights=[1.0]), "terms and weights must be mappings"),
    (Score(1.0, True, terms={"a": math.nan}, weights={"a": 1.0}), "the term a is nan"),
    (Score(1.0, True, terms={"a": 1.0}, weights={"a": math.inf}), "a term's weight is inf; allowed: a finite number"),
    (Score(1.0, True, terms={"a": {}}, weights={"a": 1.0}), "the term a is {}"),
    (Score(1.0, True, terms={1: 1.0}, weights={1: 1.0}), "a term's name is 1; allowed"),
    (Score(1.0, True, terms={"a" * 201: 1.0}, weights={"a" * 201: 1.0}), "a term's name is 'aaa"),
    (Score(1.0, True, terms=MANY, weights=MANY), "it has 1001 terms; allowed: at most 1000"),
    (Score(1.0, True, verdicts="{"), "verdicts is not a JSON list of verdicts: Invalid JSON"),
    (Score(1.0, True, verdicts="[" * 300_000), "verdicts is not a JSON list of verdicts: Invalid JSON"),
    (Score(1.0, True, verdicts='{"judge": "me"}'), "verdicts is not a JSON list of verdicts: Input should be a valid"),
    (Score(1.0, True, verdicts="[1]"), "verdicts is not a JSON list of verdicts: 0 Input should be"),
    (Score(1.0, True, verdicts=[SAID]), "verdicts is [Verdict("),
    (with_verdicts(vote="first"), "verdicts is not a JSON list of verdicts: 0 vote Input should be a valid integer"),
    (with_verdicts(tokens=2**40), "a verdict's vote, place and tokens are"),
    (with_verdicts(cost=math.nan), "a verdict's score and cost are (5.0, nan); allowed: finite numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("says", "why"), FAULTS, ids=[why[:40] for _, why in FAULTS])
@pytest.mark.parametrize("kind", [Says, Waits])
def test_an_invalid_score_is_a_failure_that_says_why(
    kind: type[Says], says: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = scored(kind, says, monkeypatch)
    assert (score.value, score.correct, score.turns, score.penalty, score.terms) == (0.0, False, 0.0, 0.0, {})
    assert (score.error or "").startswith(INVALID + why)
    assert len(score.error or "") < 500


VALID = [
    Score(1e6, True),
    Score(-0.5, None, extracted="a\u00e9\x00"),
    Score(0.0, False, error="why"),
    Score(1.0, True, penalty=-1.0, turns=2.5),
    Score(1.0, True, terms={"a": 1.0}, weights={"a": -2.0}),
    with_verdicts(),
    with_verdicts(score=None, error="unread", text="\u00e9"),
]


@pytest.mark.parametrize("says", VALID)
def test_a_valid_score_stays_as_it_is(says: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored(Says, says, monkeypatch) == says


def test_numbers_of_numpy_become_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (np.float32(0.5), np.float64(0.5), np.array(0.5)):
        score = scored(Says, Score(value, np.bool_(True)), monkeypatch)
        assert (type(score.value), score.value, score.correct) == (float, 0.5, True)


def test_a_reward_declares_a_larger_bound_and_a_sum_has_that_of_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored(Large, Score(1e8, True), monkeypatch).value == 1e8
    assert scored(Large, Score(1e10, True), monkeypatch).error == (
        INVALID + "value is 10000000000.0; allowed: a number from -1e+09 to 1e+09"
    )
    both = WeightedSum(
        type="weighted_sum",
        terms=(Term(reward=Large(type="large"), weight=-2.0), Term(reward=Says(type="says"), name="b")),
    )
    assert both.largest_value() == 2e9 + 1e6
    monkeypatch.setattr(Large, "says", Score(1e8, True))
    monkeypatch.setattr(Says, "says", Score(math.nan, True))
    with open_scorer(both) as scorer:
        (score,) = scorer.score([PROBLEM], [""])
    assert (score.error or "").startswith(f"b: {INVALID}value is nan")


class Bounded(Says):
    """Declares the least value."""

    graded: ClassVar[bool] = True
    worst: ClassVar[float | None] = -1.0


def test_a_value_below_the_least_that_the_reward_declares_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    below = scored(Bounded, Score(-1.5, None), monkeypatch)
    assert (below.value, below.error) == (
        -1.0,
        INVALID + "value is -1.5; allowed: at least -1, the lowest value that the reward declares",
    )
    assert scored(Bounded, Score(-1.0 - 1e-12, None), monkeypatch).error is None  # a sum that was rounded
    assert scored(Bounded, Score.failed("why"), monkeypatch).error == "why"


@pytest.mark.parametrize("kind", ["reasoning_gym", "code", "exact_match", "math_dapo", "math_verify"])
def test_a_reward_that_gives_at_most_one_says_so_and_turns_may_add_more(kind: str) -> None:
    reward = Reward.model_validate({"type": kind})
    assert "allowed: a number from -1 to 1" in (checked(reward, Score(1.5, True)).error or "")
    assert checked(reward, Score(1.0, True, turns=2.5, penalty=-3.0)).error is None


def test_a_long_error_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(scored(Says, Score.failed("x" * 10**6), monkeypatch).error or "") == 1 << 14


def test_rows_with_invalid_scores_count_as_failed_and_most_of_them_stop_the_run() -> None:
    reward = Says(type="says")
    scores = [checked(reward, Score(value, True)) for value in (math.nan, 1e300, 1.0)]
    step = replace(example(), scores=tuple(scores[index % 3] for index in range(len(example().scores))))
    metrics = rollout_metrics(step)
    failed = sum(score.error is not None for score in step.scores)
    assert metrics["reward/error_fraction"] == failed / len(step.scores) > 0
    assert math.isfinite(metrics["reward/mean"])
    with pytest.raises(RewardFailedError, match="2 of 3 responses: the reward returned an invalid score: value is nan"):
        prove(scores)


def forges(**fields: Any) -> str:
    """An answer that writes a verdict of these fields when it is run, and ends its process."""
    line = json.dumps({"value": 1.0, "correct": True} | fields).encode()
    return code(f"{ANSWERS}\nimport os\nos.write(ANSWERS, {line!r}); os._exit(0)")


FORGED = [
    ({"turns": math.nan}, Score(1.0, True)),
    ({"turns": 1e5, "penalty": 1e5}, Score(1.0, True)),
    ({"terms": {"a": 1.0}}, Score(1.0, True)),
    ({"terms": {"a": 1.0}, "weights": {"a": 5.0}}, Score(1.0, True)),
    ({"verdicts": "no JSON"}, Score(1.0, True)),
    ({"verdicts": json.dumps([asdict(SAID)])}, Score(1.0, True)),
    ({"value": 0.5, "correct": True, "away": True}, Score(0.5, False)),
    ({"value": 0.5, "error": "why", "away": True}, Score.failed("why")),
    ({"value": 1e300}, Score.failed(INVALID + "value is 1e+300; allowed: a number from -1e+06 to 1e+06")),
    ({"value": math.nan}, Score.failed(INVALID + "value is nan; allowed: a number from -1e+06 to 1e+06")),
    ({"value": "1"}, Score.failed("the scorer's output is not a verdict")),
    ({"extracted": ["x"]}, Score.failed("the scorer's output is not a verdict")),
]


@pytest.mark.needs("bubblewrap")
def test_a_response_that_is_run_writes_no_more_than_value_answer_and_error() -> None:
    answers = [forges(**fields) for fields, _ in FORGED]
    with open_scorer(evaluating(30.0)) as scorer:
        scores = scorer.score([PROBLEM] * len(answers), answers)
    for (fields, expected), score in zip(FORGED, scores, strict=True):
        assert score == expected, fields


@pytest.mark.needs("bubblewrap")
def test_a_response_that_is_run_changes_no_other_term_of_a_sum() -> None:
    terms = (
        Term(reward=Reward.model_validate({"type": "exact_match"}), weight=10.0),
        Term(reward=evaluating(), weight=0.5, name="runs"),
    )
    whole = {"terms": {"exact_match": 1.0, "runs": 1.0}, "weights": {"exact_match": 1e4, "runs": 1.0}}
    with open_scorer(WeightedSum(type="weighted_sum", terms=terms, timeout_seconds=30.0)) as scorer:
        honest, forged = scorer.score([PROBLEM] * 2, [PROBLEM.answer, forges(value=7.0, **whole)])
    weights = {"exact_match": 10.0, "runs": 0.5}
    assert honest == Score(10.5, True, "right", terms={"exact_match": 1.0, "runs": 1.0}, weights=weights)
    assert (forged.value, forged.correct) == (3.5, False)
    assert (forged.terms, forged.weights) == ({"exact_match": 0.0, "runs": 7.0}, weights)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-5.0, None, -2.0], [-5.0, -5.0, -2.0]),
        ([3.0, None, 9.0], [3.0, 0.0, 9.0]),  # never better than the rewards that there could be
        ([None, None], [0.0, 0.0]),
    ],
)
def test_a_failure_is_never_the_best_of_its_group(values: list[float | None], expected: list[float]) -> None:
    scores = [Score.failed("it raised") if value is None else Score.of(value, None) for value in values]
    assert [score.value for score in failures_at_worst(scores)] == expected


def test_a_failure_is_not_better_than_responses_that_are_too_long() -> None:
    long, failed = replace(Score.of(0.0, None), penalty=-1.0), Score.failed("it raised")
    assert [score.reward for score in failures_at_worst([long, failed])] == [-1.0, -1.0]
    assert [score.reward for score in failures_at_worst([long, replace(failed, penalty=-0.5)])] == [-1.0, -1.0]
    assert [score.reward for score in failures_at_worst([long, replace(failed, penalty=-2.0)])] == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("values", "vary"),
    [
        ([0.1 + 0.2, 0.3], False),
        ([-1.0, None], False),
        ([1.0, None], True),
        ([20_000_000.0, 20_000_001.0], True),
        ([None, None], False),
        ([0.0, 1e-12], True),
    ],
)
def test_a_group_varies_if_its_advantages_would_not_be_zero(values: list[float | None], vary: bool) -> None:
    scores = [Score.failed("it raised") if value is None else Score.of(value, None) for value in values]
    named = [replace(score, terms={"a": score.value}, weights={"a": 1.0}) for score in scores]
    assert scores_vary(scores, by_term=False) is vary
    assert scores_vary(named, by_term=True) is (vary and None not in values)
