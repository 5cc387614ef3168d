"""Errors in sets that are not answered, and in studies with drift or such sets as goals."""

import pytest
from spec_text import GOOD, message, warnings, write

from specs import load_experiment, load_study

HELD_OUT = "    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 50, seed: 1000}\n"
QUIZ = "    - {name: quiz, source: multiple_choice, path: quiz.jsonl}\n"
PROSE = "    - {name: prose, source: text, path: prose.txt}\n"
ALL = GOOD.replace(HELD_OUT, HELD_OUT + QUIZ + PROSE)
STUDY = """\
name: clip
experiment: base.yaml
overrides: {seeds: [0, 1, 2]}
parameters: {objective.clip.low: {float: [0.1, 0.4]}}
trials: 20
"""


@pytest.fixture(autouse=True)
def _files():
    write("", "quiz.jsonl")
    write("", "prose.txt")
    write(ALL, "base.yaml")


def test_they_are_evaluation_sets_and_no_reward_scores_them():
    sources = load_experiment("base.yaml").data.evaluation
    assert [source.answered for source in sources] == [True, False, False]
    assert load_experiment("base.yaml", ("evaluation.datasets=[prose]",)).evaluation.datasets == ("prose",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ALL.replace("  train:\n", "  train:\n" + QUIZ),
            "spec.yaml:7: data.train.0: only an evaluation can use such a set\n",
        ),
        (
            ALL.replace("path: quiz.jsonl", "path: quiz.jsonl, reward: {type: exact_match}"),
            "spec.yaml:10: data.evaluation.1.reward: the set is scored by likelihood: there are no responses for a"
            " reward to score\n",
        ),
        (ALL.replace("name: prose, ", ""), "spec.yaml:11: data.evaluation.2.name: missing\n"),
        (
            ALL.replace("path: prose.txt", "path: prosa.txt"),
            "spec.yaml:11: data.evaluation.2.path: no such file\n",
        ),
        (
            ALL.replace("{name: quiz, source: multiple_choice,", "{name: quiz, source: lm_eval, task: quiz,"),
            "data.evaluation.1.path: is not a directory\n",
        ),
        (
            ALL.replace("{name: quiz, source: multiple_choice,", "{name: quiz, source: lm_eval, task: quiz,"),
            "hint: write its directory: ",
        ),
        (ALL.replace("path: quiz.jsonl", "path: quiz.jsonl, per: word"), "allowed: byte, token, choice\n"),
        (ALL.replace("path: prose.txt", "path: ."), "hint: name a file in /"),
    ],
)
def test_what_is_wrong_with_such_a_set_is_told_at_its_line(text, expected):
    assert expected in message(text)


def test_a_study_takes_drift_and_retention_as_goals_and_constraints():
    study = load_study(
        write(
            STUDY
            + "goals:\n  - {metric: mean@8, dataset: held_out}\n"
            + "  - {metric: drift/reverse, dataset: held_out, direction: minimize}\n"
            + "constraints:\n  - {metric: drift/forward_response, max: 3}\n"
            + "  - {metric: bits_per_byte, dataset: prose, max: 1}\n  - {metric: accuracy, dataset: quiz, min: 0.5}\n"
        )
    )
    assert [goal.metric for goal in study.goals] == ["mean@8", "drift/reverse"]
    assert len(study.constraints) == 3


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        ("{metric: bits_per_byte}", "goal.dataset: missing\n"),
        (
            "{metric: accuracy, dataset: prose}",
            'goal: {metric: accuracy, dataset: prose}\n  given: "accuracy"    allowed: bits_per_byte\n',
        ),
        ("{metric: mean@8, dataset: quiz}", "is not measured on a set of source multiple_choice\n"),
        ("{metric: bits_per_byte, dataset: held_out}", "goal.metric: is not measured on a set that is answered\n"),
        (
            "{metric: mean@8, dataset: held_out}\nconstraints: [{metric: accuracy, dataset: quiz, min: 2}]",
            "never above",
        ),
        (
            "{metric: mean@8, dataset: held_out}\nconstraints: [{metric: bits_per_byte, dataset: prose, max: -1}]",
            "constraints.0.max: no trial can satisfy it\n",
        ),
        ("{metric: drift/reverse, dataset: nowhere}", "goal.dataset: no such evaluation set\n"),
        ("{metric: drift/reverse_token, dataset: held_out}", "goal.metric: no such measure\n"),
    ],
)
def test_what_a_study_cannot_take_is_told_at_its_line(goal, expected):
    assert expected in message(f"{STUDY}goal: {goal}\n")


def test_a_goal_whose_smaller_values_are_better_says_its_direction():
    said = "goal: smaller values are better, and the goal maximizes them\n"
    for goal in ("metric: bits_per_byte, dataset: prose", "metric: drift/reverse"):
        assert said in warnings(f"{STUDY}goal: {{{goal}}}\n")
        assert warnings(f"{STUDY}goal: {{{goal}, direction: maximize}}\n") == "0 warnings"
    assert warnings(f"{STUDY}goal: {{metric: accuracy, dataset: quiz}}\n") == "0 warnings"


def test_drift_without_a_set_that_gets_responses_is_no_goal():
    write(ALL.replace(HELD_OUT, ""), "base.yaml")
    text = f"{STUDY}goal: {{metric: drift/reverse, direction: minimize}}\n"
    assert "goal.metric: needs responses to an evaluation set, and no set gets any\n" in message(text)


@pytest.mark.parametrize("dataset", ["", ", dataset: held_out"])
def test_drift_that_is_not_measured_is_no_goal(dataset):
    write(ALL + "evaluation: {drift: false}\n", "base.yaml")
    text = f"{STUDY}goal: {{metric: drift/reverse{dataset}, direction: minimize}}\n"
    assert "goal.metric: is recorded only with evaluation.drift\n" in message(text)
