"""Builds a problem's prompt: a template with fields, or chat messages."""

import json
import string

from rpg.data.problems import Message, SourceProblem, StagedProblem, content_id, text_of
from specs.errors import Issue, SpecError
from specs.schema.data import ChatPrompt, TemplatePrompt
from specs.schema.fields import nearest

_TEMPLATE_PATH = ("data", "prompt", "template")
_METADATA = "metadata."
_ASSISTANTS = ("assistant", "model", "gpt", "bot", "chatbot", "ai")
"""Names of the policy's role in published sets."""


def staged(problem: SourceProblem, prompt: TemplatePrompt | ChatPrompt) -> StagedProblem:
    """Returns the problem with its prompt. Raises SpecError if the template uses a field that the problem lacks."""
    text = text_of(problem.prompt)
    if isinstance(prompt, ChatPrompt):
        rendered = json.dumps(_messages(problem, prompt), ensure_ascii=False)
        content = text + _beside_text(problem.prompt)
    else:
        rendered = content = _fill(prompt.template, problem)
    known = (problem.answer, problem.dataset, problem.metadata, problem.cluster, problem.shown)
    return StagedProblem(content_id(content), rendered, *known, text, problem.where, _is_answered(problem.prompt))


def _is_answered(prompt: str | list[Message]) -> bool:
    return not isinstance(prompt, str) and prompt[-1]["role"].lower() in _ASSISTANTS


def _beside_text(prompt: str | list[Message]) -> str:
    """Returns, as JSON, the keys of messages other than role and content; empty if there are no others."""
    messages = [] if isinstance(prompt, str) else prompt
    beside = [{key: message[key] for key in message.keys() - {"role", "content"}} for message in messages]
    return json.dumps(beside, sort_keys=True) if any(beside) else ""


def _messages(problem: SourceProblem, prompt: ChatPrompt) -> list[Message]:
    given = problem.prompt
    messages = [{"role": "user", "content": _fill(prompt.template, problem)}] if isinstance(given, str) else given
    return [{"role": "system", "content": prompt.system}, *messages] if prompt.system else messages


def check_template(template: str) -> None:
    """Raises SpecError unless the template is well-formed and has a field."""
    if not any(field is not None for _, field in _parts(template)):
        raise _template_error("the template has no field, so every prompt would be the same", template, "{prompt}")


def _fill(template: str, problem: SourceProblem) -> str:
    return "".join(
        text + (_value(field, problem, template) if field is not None else "") for text, field in _parts(template)
    )


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Returns pairs of literal text and the field that follows it, if any. str.format is not used: it would reach into
    attributes."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _template_error(f"malformed template: {error}", template, hint="write {{ and }} for braces") from None
    for _, field, format_spec, conversion in parts:
        if format_spec or conversion:
            raise _template_error(f"the field {{{field}}} takes no format", template, hint=f"write {{{field}}}")
    return [(text, field) for text, field, _, _ in parts]


def _value(field: str, problem: SourceProblem, template: str) -> str:
    if field == "prompt":
        return text_of(problem.prompt)
    name = field.removeprefix(_METADATA)
    if field.startswith(_METADATA) and name in problem.fields:
        return str(problem.fields[name])
    allowed = ["prompt", *(_METADATA + known for known in sorted(problem.fields))]
    raise _template_error(
        f"set `{problem.dataset}` has no field {{{field}}}",
        template,
        ", ".join(f"{{{known}}}" for known in allowed),
        nearest(field, allowed),
    )


def _template_error(message: str, template: str, allowed: str = "", hint: str = "") -> SpecError:
    return SpecError(Issue(message, path=_TEMPLATE_PATH, given=template, allowed=allowed, hint=hint))
