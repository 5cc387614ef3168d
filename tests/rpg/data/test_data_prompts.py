"""From problems to prompts, and what makes two problems the same."""

import json

import pytest

from rpg.data import metadata
from rpg.data.problems import SourceProblem, content_id
from rpg.data.prompts import check_template, staged
from specs.errors import Issue, SpecError
from specs.schema.data import ChatPrompt, TemplatePrompt

PATH = ("data", "prompt", "template")
SUM = SourceProblem("What is 1 + 1?", "2", "sums", fields={"expression": "1 + 1", "num_terms": 2})
CHAT = SourceProblem([{"role": "user", "content": "Hello"}, {"role": "user", "content": "1 + 1?"}], "2", "chat")


def prompt_of(problem: SourceProblem, template: str) -> str:
    return staged(problem, TemplatePrompt(template=template)).prompt


def wrong(problem: SourceProblem, template: str) -> Issue:
    with pytest.raises(SpecError) as caught:
        prompt_of(problem, template)
    (found,) = caught.value.issues
    return found


def test_a_template_fills_in_the_text_and_the_metadata() -> None:
    assert prompt_of(SUM, "{prompt}") == "What is 1 + 1?"
    assert prompt_of(SUM, "{{{metadata.num_terms}}} {metadata.expression} =") == "{2} 1 + 1 ="
    assert prompt_of(CHAT, "Q: {prompt}") == "Q: Hello\n\n1 + 1?"


def test_a_field_that_is_not_there_names_those_that_are() -> None:
    assert wrong(SUM, "{metadata.expresion} =") == Issue(
        "set `sums` has no field {metadata.expresion}",
        path=PATH,
        given="{metadata.expresion} =",
        allowed="{prompt}, {metadata.expression}, {metadata.num_terms}",
        hint="did you mean `metadata.expression`?",
    )
    assert wrong(CHAT, "{metadata.expression}").allowed == "{prompt}"


@pytest.mark.parametrize("template", ["{prompt.__class__}", "{0}", "{}", "{prompt[0]}"])
def test_a_template_reaches_into_nothing_else(template: str) -> None:
    assert wrong(SUM, template).message == f"set `sums` has no field {{{template[1:-1]}}}"


def test_an_unbalanced_brace_and_a_format() -> None:
    problem = wrong(SUM, "{prompt} }")
    assert problem.message == "malformed template: Single '}' encountered in format string"
    assert problem.hint == "write {{ and }} for braces"
    assert wrong(SUM, "{prompt!r}").message == "the field {prompt} takes no format"
    assert wrong(SUM, "{prompt:>9}").message == "the field {prompt} takes no format"


def test_a_template_without_a_field() -> None:
    with pytest.raises(SpecError, match="the template has no field, so every prompt would be the same"):
        check_template("What is the answer?")
    check_template("{prompt}")


def test_chat_keeps_the_messages_and_puts_the_system_message_first() -> None:
    assert json.loads(staged(SUM, ChatPrompt()).prompt) == [{"role": "user", "content": "What is 1 + 1?"}]
    assert json.loads(staged(CHAT, ChatPrompt(system="Be brief.")).prompt) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": "1 + 1?"},
    ]


def test_the_id_is_of_the_content_and_not_of_the_system_message() -> None:
    assert staged(SUM, ChatPrompt()).problem_id == staged(SUM, ChatPrompt(system="Be brief.")).problem_id
    assert content_id("é  x\n") == content_id("e\u0301 x")
    assert content_id("angle A") != content_id("angle a")


def test_metadata_comes_back_as_it_was() -> None:
    value = {"a": (1, (2.5, "x")), "b": {3: [None, True], (1, 2): {}}, "c": {"__tuple__": 1, "d": []}}
    assert metadata.load(metadata.dump(value)) == value
    with pytest.raises(TypeError):
        metadata.dump({"a": object()})
