"""The scored part of a response: with or without its thought, and which of several answers."""

from typing import Any

import pytest
from judge_endpoint import answer_in, judging, verdict

from rpg.rewards import open_scorer
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.schema.reward import Reward


def scored(fields: dict[str, Any], answer: str, *responses: str) -> list[Score]:
    problem = Problem(problem_id="p", prompt="?", answer=answer, dataset="d", metadata={})
    with open_scorer(Reward.model_validate(fields)) as scorer:
        return scorer.score([problem] * len(responses), responses)


@pytest.mark.parametrize(
    ("response", "given"),
    [
        ("<think>6 * 7</think>\n\n42", "42"),
        ("6 * 7</think> 42", "42"),
        ("<think>1</think> no <think>2</think> 42", "42"),
        ("42", "42"),
        ("<think>6 * 7 is 42", None),
        ("<think>6</think> 41 <think>no, 42", None),
        ("<think>6 * 7 is 42</think>", None),
    ],
)
def test_a_reward_that_strips_thoughts_is_given_what_follows_the_last_one(response: str, given: str | None) -> None:
    (score,) = scored({"type": "exact_match", "strip_thinking": True}, "42", response)
    assert (score.extracted, score.correct) == (given, given == "42")
    assert scored({"type": "exact_match"}, "42", response)[0].extracted == response


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"type": "math_dapo"}, "<think>Answer: 41</think> Answer: 42", "<think>Answer: 42</think> It is 42."),
        ({"type": "math_verify"}, r"<think>\boxed{41}</think> so 42", r"<think>\boxed{42}</think> so 41"),
        (
            {"type": "weighted_sum", "terms": [{"reward": {"type": "exact_match"}}]},
            "<think>41</think>42",
            "<think>42",
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_answers_within_a_thought_count_only_where_thoughts_are_not_stripped(
    fields: dict[str, Any], right: str, wrong: str
) -> None:
    after = scored({**fields, "strip_thinking": True}, "42", right, wrong)
    assert [score.correct for score in after] == [True, False]
    assert [score.correct for score in scored(fields, "42", right, wrong)] != [True, False]


@pytest.mark.parametrize("last", [{"type": "exact_match"}, {"type": "reasoning_gym"}], ids=lambda last: last["type"])
def test_a_term_of_a_sum_strips_thoughts_for_itself(last: dict[str, Any]) -> None:
    """With a term that is sealed each term has a scorer of its own, else one worker scores all."""
    after = {"reward": {"type": "exact_match", "strip_thinking": True}, "name": "after"}
    whole = {"reward": {"type": "exact_match"}, "name": "whole"}
    terms = [after, whole, {"reward": last, "weight": 0.0, "name": "last"}]
    problem = Problem(
        problem_id="p",
        prompt="?",
        answer="42",
        dataset="d",
        metadata={"task": "chain_sum", "config": {}, "entry": {"question": "?", "answer": "42", "metadata": {}}},
    )
    with open_scorer(Reward.model_validate({"type": "weighted_sum", "terms": terms})) as scorer:
        (score,) = scorer.score([problem], ["<think>41</think>42"])
    assert score.error is None
    assert (score.terms["after"], score.terms["whole"]) == (1.0, 0.0)


def test_a_judge_is_not_shown_a_thought_that_its_reward_strips() -> None:
    shown: list[str] = []

    def note(request: dict[str, Any]) -> str:
        shown.append(answer_in(request))
        return verdict(request, 5)

    with judging(note) as endpoint:
        fields = {"type": "judge", "model": "fair", "rubric": "?", "scale": {"low": 1, "high": 5}}
        scored({**fields, "endpoint": endpoint.url, "strip_thinking": True}, "42", "<think>41</think>42")
        scored({**fields, "endpoint": endpoint.url}, "42", "<think>41</think>42")
    assert shown[0] == "42"
    assert "41" in shown[1]


def test_a_reward_that_strips_no_thoughts_keeps_its_identity() -> None:
    plain = Reward.model_validate({"type": "exact_match"}).identity()
    assert plain == {"type": "exact_match"}
    stripping = Reward.model_validate({"type": "exact_match", "strip_thinking": True})
    assert stripping.identity() == {"type": "exact_match", "strip_thinking": True}


FAR = " Here follows a longer sentence without a word that joins the numbers to one set. "


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "response", "answer"),
    [
        ("exact_match", "1\n2", "1\n2"),
        ("math_dapo", "Answer: 1\nAnswer: 2 dollars", "2"),
        ("math_dapo", "Answer: 2" + "\n" * 290 + "Answer: 1", "1"),
        ("math_verify", rf"$\boxed{{1}}${FAR}$\boxed{{2}}$", "2"),
        ("math_verify", r"\boxed{1} and \boxed{2}", r"\{1, 2\}"),
        ("math_verify", r"$x=\boxed{1}$ or $x=\boxed{2}$", r"\{1, 2\}"),
        ("math_verify", r"\boxed{0}. No: \[\boxed{1}\], and \[\boxed{2}\]", r"\{1, 2\}"),
        ("math_verify", r"\boxed{1}: \boxed{2}", "2"),
        ("math_verify", r"\boxed{1}, which is wrong. So it is \boxed{2}", "2"),
        ("math_verify", r"\boxed{1} is wrong. So it is \boxed{2}", "2"),
        ("math_verify", r"\boxed{1} then 2", "1"),
        ("math_verify", rf"The final answer is $1$.{FAR}$\boxed{{2}}$", "2"),
        ("math_verify", rf"$\boxed{{2}}$. The final answer is $1$. I hope it is correct.{FAR}", "1"),
        ("math_verify", rf"The final answer is $1$. I hope it is correct.{FAR}$\boxed{{2}}$", "2"),
        ("math_verify", f"The answer is 1.{FAR}$2$", "1"),
        ("math_verify", "it is 1, 2, 3", "3"),
        ("math_verify", r"\boxed{B}, no: \boxed{C}", "C"),
    ],
)
def test_the_answer_that_counts_is_the_one_that_the_docs_name(kind: str, response: str, answer: str) -> None:
    assert scored({"type": kind}, answer, response)[0].correct
