"""A value of `--set` is YAML, or the whole text as it was given: never a part of it."""

import pytest
from spec_text import GOOD, message, write

from specs import load_experiment

TEXTS = (
    "Which of them is #1?",
    "A or B # decide later",
    "# a comment?",
    "&mine or yours?",
    "&mine",
    "*all* of them",
    "*all",
    "!important",
    "!important or not?",
    "%age of what?",
    "@home or away?",
    "`code` or text?",
    "{prompt} =",
    "[a] or [b]?",
    "{never closed",
    '"quoted" or not?',
    "'quoted' or not?",
    '"never closed',
    "Is it: yes: or no?",
    "--- or +++?",
    "---",
    "...",
    "| or >",
    "|",
    ">",
    "- a: b: c",
    "a\tb # c",
    "two\n\nparagraphs",
    "Solve this.\n{prompt}\n",
    "a\n---\nb",
    "The answer is ",
    "  indented",
    "a line\n",
    "\u2028a",
    "a\n...\nb",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_value_that_yaml_would_cut_is_taken_as_it_is(text: str) -> None:
    assert load_experiment(write(GOOD), overrides=(f"question={text}",)).question == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Does it?", "Does it?"),
        ('"Which is #1?"', "Which is #1?"),
        ("'it''s'", "it's"),
        ("a#b", "a#b"),
        ('"two\n\nparagraphs"', "two\nparagraphs"),
        ("|\n  kept\n  lines\n", "kept\nlines\n"),
        ("", ""),
        ("Prüfung: 1/2", None),
    ],
)
def test_a_value_that_is_yaml_to_its_end_is_read_as_yaml(text: str, value: str | None) -> None:
    if value is None:
        assert "--set question=Prüfung: 1/2: question: " in message(GOOD, f"question={text}")
    else:
        assert (load_experiment(write(GOOD), overrides=(f"question={text}",)).question or "") == value


@pytest.mark.parametrize("text", ["{type: dual, low: 0.1", "0.1 # a tenth", "!!float 0.1", "&a 0.1"])
def test_a_text_where_no_text_can_be_is_refused_with_all_of_it(text: str) -> None:
    said = message(GOOD, f"objective.clip.low={text}")
    assert f"--set objective.clip.low={text}: objective.clip.low: " in said


def test_structures_are_read_with_all_that_yaml_has() -> None:
    given = ("seeds=[1, 2]", "objective.clip={type: dual, low: 0.1}", "data.evaluation.0.size=7", "training.steps=9")
    experiment = load_experiment(write(GOOD), overrides=given)
    assert experiment.seeds == (1, 2)
    assert experiment.training.steps == 9
    assert experiment.data.evaluation[0].size == 7
