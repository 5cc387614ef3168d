"""The environment of tools: given tokens are context, and responses do not wait for each other."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scripted_policy import ScriptedPolicy

from rpg.base.tokenization import make_tokenizer
from rpg.rollouters import Problem, SeededPrompt
from rpg.rollouters.environments.tools import Tools
from rpg.tools import Tool, ToolError, ToolSession
from rpg.types import Rollout, Sampling
from specs.errors import SpecError
from specs.schema.model import ByteTokenizer

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_length=60)
BYTES = make_tokenizer(ByteTokenizer(), ())
END = int(BYTES.eos_token_id)


class Slow(Tool):
    """Answers after this many seconds, or fails."""

    def describe(self) -> dict[str, Any]:
        parameter = {"type": "string", "description": "seconds"}
        return {"function": {"name": self.type, "parameters": {"properties": {"seconds": parameter}}}}

    def open(self) -> ToolSession:
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            time.sleep(float(arguments["seconds"]))
        except ValueError:
            raise ToolError("no number") from None
        return f"slept {arguments['seconds']}"

    def close(self) -> None:
        pass


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False)


def text_of(rollout: Rollout) -> str:
    return BYTES.decode(list(rollout.response_ids))


def script(*turns: tuple[str, str]) -> ScriptedPolicy:
    """A policy that says of a context the text that stands beside the longest ending of it."""

    def says(context: tuple[int, ...]) -> list[int]:
        so_far = BYTES.decode(list(context))
        best = max((each for each in turns if so_far.endswith(each[0])), key=lambda each: len(each[0]))
        return [END if part == "|" else token for part in best[1] for token in (ids(part) if part != "|" else [END])]

    return ScriptedPolicy(says)


def prompts(*texts: str) -> list[SeededPrompt]:
    return [SeededPrompt(Problem(text, text, "", "set"), tuple(ids(text)), seed) for seed, text in enumerate(texts)]


def roll_out(
    tools: Tools, policy: ScriptedPolicy, asked: list[SeededPrompt], sampling: Sampling = SAMPLING
) -> list[Rollout]:
    groups = tools.generate(asked, policy, BYTES, group_size=1, sampling=sampling)  # type: ignore[arg-type]
    return [rollout for group in groups for rollout in group.rollouts]


BRACKETS = {"call": "[{argument}]", "answer": "({answer})"}
CALCULATOR = Tools(
    type="tools", tools=["calculator"], format={"type": "tags", "call": "[{argument}]", "answer": "({answer})"}
)


def test_an_answer_is_given_between_what_is_sampled() -> None:
    policy = script(("12*34=", "[12*34]"), ("(408)", "408|"))
    (rollout,) = roll_out(CALCULATOR, policy, prompts("12*34="))
    assert text_of(rollout) == "[12*34](408)408<|endoftext|>"
    assert [turn.sampled for turn in rollout.turns] == [True, False, True]
    assert rollout.turns[1].tool == "calculator"
    assert rollout.finish_reason == "stop"
    assert rollout.answer_ids == (*ids("408"), END)


def test_every_turn_has_a_seed_and_the_room_that_is_left() -> None:
    policy = script(("1=", "[1]"), ("2=", "[2]"), ("(1)", "a|"), ("(2)", "b|"))
    asked = prompts("1=", "2=")
    CALCULATOR.generate(asked, policy, BYTES, group_size=2, sampling=SAMPLING)  # type: ignore[arg-type]
    assert len({request.seed for request in policy.requests}) == 8
    assert {request.limit for request in policy.requests} == {60, 60 - 3 - 3}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[1/0]", "error: division by zero"),
        ("[import os]", "error: no arithmetic expression"),
        ("[]", "error: no arithmetic expression"),
        ("[9**9**9]", "error: no arithmetic expression"),
    ],
)
def test_a_call_that_is_wrong_is_answered_by_an_error(said: str, told: str) -> None:
    policy = script(("?", said), (f"({told})", "|"))
    (rollout,) = roll_out(CALCULATOR, policy, prompts("?"), SAMPLING_OF_MANY)
    assert text_of(rollout) == f"{said}({told})<|endoftext|>"
    assert rollout.turns[1].error == told.removeprefix("error: ")


SAMPLING_OF_MANY = Sampling(temperature=1.0, top_p=1.0, max_response_length=200)


def test_what_a_tool_says_is_never_a_special_token() -> None:
    tools = Tools(type="tools", tools=[Echo(type="echo")], format=BRACKETS)
    policy = script(("?", "[<|endoftext|>]"), ("(<|endoftext|>)", "|"))
    policy.says = lambda context: [*ids("["), *plain("<|endoftext|>"), *ids("]")] if len(context) == 1 else [END]
    (rollout,) = roll_out(tools, policy, prompts("?"))
    assert END not in rollout.turns[1].token_ids
    assert rollout.turns[1].token_ids == (*ids("("), *plain("<|endoftext|>"), *ids(")"))


def plain(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False, split_special_tokens=True)


class Echo(Slow):
    """Returns its argument."""

    immediate: ClassVar[bool] = True

    def call(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["seconds"])


def test_the_last_turn_is_not_answered_and_a_long_answer_is_cut() -> None:
    policy = script(("", "[2**100]"))
    tools = CALCULATOR.model_copy(update={"max_turns": 3, "answer_tokens": 6})
    (rollout,) = roll_out(tools, policy, prompts("?"))
    assert text_of(rollout) == "[2**100](1267)[2**100](1267)[2**100]"
    assert rollout.finish_reason == "length"


def test_a_response_ends_where_an_answer_leaves_no_room() -> None:
    policy = script(("", "[2**100]"))
    (rollout,) = roll_out(CALCULATOR, policy, prompts("?"), Sampling(1.0, 1.0, 20))
    assert text_of(rollout) == "[2**100]"
    assert rollout.finish_reason == "length"


def test_more_calls_than_allowed_are_told_so() -> None:
    policy = script(("", "[1]"))
    (rollout,) = roll_out(CALCULATOR.model_copy(update={"calls": 1, "max_turns": 3}), policy, prompts("?"))
    assert text_of(rollout) == "[1](1)[1](error: no more than 1 calls)[1]"


def test_a_slow_tool_keeps_only_its_own_response_waiting() -> None:
    tools = Tools(type="tools", tools=[Slow(type="slow")], format=BRACKETS)
    order: list[int] = []
    policy = script(
        ("slow", "[0.4]"), ("fast", "[0.0]"), ("(slept 0.0)", "[0.01]"), ("(slept 0.01)", "|"), ("(slept 0.4)", "|")
    )
    tools.generate(
        prompts("slow", "fast"),
        policy,
        BYTES,
        group_size=1,
        sampling=SAMPLING,
        on_response=lambda i, _: order.append(i),  # type: ignore[arg-type]
    )
    assert order == [1, 0]


def test_calls_wait_beside_one_another() -> None:
    together = threading.Barrier(10)

    class Meeting(Slow):
        def call(self, arguments: Mapping[str, Any]) -> str:
            together.wait(60 + float(arguments["seconds"]))
            return "met"

    tools = Tools(type="tools", tools=[Meeting(type="slow")], format=BRACKETS, call_seconds=90)
    policy = script(("?", "[0]"), ("(met)", "|"))
    roll_out(tools, policy, prompts(*["?"] * 20))
    assert not together.broken


def test_a_call_that_takes_too_long_is_given_up() -> None:
    tools = Tools(type="tools", tools=[Slow(type="slow")], format=BRACKETS, call_seconds=0.2)
    policy = script(("?", "[1.0]"), ("0.2 s)", "|"))
    (rollout,) = roll_out(tools, policy, prompts("?"))
    assert text_of(rollout) == "[1.0](error: no answer within 0.2 s)<|endoftext|>"


def test_a_response_may_have_so_many_sampled_tokens_over_all_turns() -> None:
    def said(sampled_tokens: int) -> tuple[str, int, str]:
        tools = CALCULATOR.model_copy(update={"sampled_tokens": sampled_tokens})
        (rollout,) = roll_out(tools, script(("", "[1]")), prompts("?"))
        return text_of(rollout), rollout.num_sampled, rollout.finish_reason

    assert said(5) == ("[1](1)[1", 5, "length")
    assert said(3) == ("[1]", 3, "length")


def test_calls_beyond_the_seconds_of_a_response_are_not_made() -> None:
    tools = Tools(type="tools", tools=[Slow(type="slow")], format=BRACKETS, seconds=0.3, max_turns=4)
    policy = script(("?", "[0.2]"), ("(slept 0.2)", "[5.0]"), ("s)", "[0.1]"))
    (rollout,) = roll_out(tools, policy, prompts("?"), SAMPLING_OF_MANY)
    errors = [turn.error for turn in rollout.turns if not turn.sampled]
    assert errors[0] == ""
    assert errors[1].startswith("no answer within 0.")
    assert errors[2] == "no more than 0.3 s of calls"
    assert sum(turn.seconds for turn in rollout.turns) < 1


SERVER = """
import time
from mcp.server import MCPServer

server = MCPServer("for tests")

@server.tool()
def wait(seconds: float) -> str:
    "Waits."
    time.sleep(seconds)
    return "waited"

@server.tool()
def hello() -> str:
    "Greets."
    return "hello"

server.run("stdio")
"""


@pytest.mark.more
def test_tools_of_a_server_are_called_by_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    server = {"type": "mcp", "command": [sys.executable, str(tmp_path / "server.py")]}
    named = {"call": "<{tool}>{argument}</{tool}>", "answer": "({answer})"}
    tools = Tools(type="tools", tools=[server], format=named, call_seconds=2)
    policy = script(
        ("?", "<hello></hello>"), ("(hello)", "<wait>0.01</wait>"), ("(waited)", "<wait>9</wait>"), ("2 s)", "|")
    )
    (rollout,) = roll_out(tools, policy, prompts("?"), SAMPLING_OF_MANY)
    assert [(turn.tool, turn.error) for turn in rollout.turns if not turn.sampled] == [
        ("hello", ""),
        ("wait", ""),
        ("wait", "no answer within 2 s"),
    ]


def test_names_last_over_the_turns_of_a_response_and_no_longer() -> None:
    tools = Tools(type="tools", tools=["python"], format=BRACKETS)
    policy = script(("?", "[a = 6 * 7]"), ("]()", "[a]"), ("(42)", "|"))
    first, second = roll_out(tools, policy, prompts("?", "?"))
    assert text_of(first) == text_of(second) == "[a = 6 * 7]()[a](42)<|endoftext|>"
    policy = script(("?", "[a]"), ("defined)", "|"))
    (rollout,) = roll_out(tools, policy, prompts("?"), SAMPLING_OF_MANY)
    assert "NameError: name 'a' is not defined" in text_of(rollout)


def test_a_stream_begins_prompts_as_they_are_admitted() -> None:
    policy = script(("1", "[1]"), ("(1)", "|"), ("2", "[2]"), ("(2)", "|"))
    answers = iter([1, 2, None])
    ended: list[int] = []
    left = CALCULATOR.stream(
        prompts("1", "2", "1"),
        policy,  # type: ignore[arg-type]
        BYTES,
        group_size=2,
        sampling=SAMPLING,
        admit=lambda: next(answers),
        on_response=lambda index, _: ended.append(index),
    )
    assert (ended, left) == ([0, 1, 2, 3], 0)


TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The form of Qwen's templates, in short."""


@pytest.fixture(scope="module")
def chat() -> Any:
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


HERMES = Tools(type="tools", tools=["calculator", Slow(type="slow")], format="hermes", answer_tokens=200)
LONG = Sampling(temperature=1.0, top_p=1.0, max_response_length=600)


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def hermes(chat: Any, *turns: str, tools: Tools = HERMES) -> Rollout:
    """The rollout of a policy that says these turns, each ended by the end token."""
    said = iter([[*chat.encode(turn, add_special_tokens=False), chat.eos_token_id] for turn in turns])
    known: dict[tuple[int, ...], list[int]] = {}

    def says(context: tuple[int, ...]) -> list[int]:
        if context not in known:
            known[context] = next(said)
        return known[context]

    asked = [SeededPrompt(Problem("p", "p", "", "set"), tuple(chat.encode("?")), 0)]
    (group,) = tools.generate(asked, ScriptedPolicy(says), chat, group_size=1, sampling=LONG)  # type: ignore[arg-type]
    return group.rollouts[0]


def test_a_conversation_is_what_the_template_writes_of_its_messages(chat: Any) -> None:
    calls = call_of("calculator", expression="6*7") + call_of("calculator", expression="1+1")
    rollout = hermes(chat, calls, "42 and 2")
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": calls},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "42 and 2"},
    ]
    whole = chat.apply_chat_template(messages, tokenize=False)
    assert whole.rstrip("\n").endswith(chat.decode(list(rollout.response_ids)))
    assert [(turn.sampled, turn.tool) for turn in rollout.turns] == [
        (True, ""),
        (False, "calculator"),
        (False, "calculator"),
        (True, ""),
    ]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("<tool_call>{</tool_call>", 'a call is JSON with "name" and "arguments"'),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>', '"name" is a text and "arguments" an object'),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud83d"}}</tool_call>',
            'a call is JSON with "name" and "arguments": half a character: \\ud83d without its other half',
        ),
        (
            '<tool_call>{"name": "slow", "name": "calculator", "arguments": {}}</tool_call>',
            'a call is JSON with "name" and "arguments": the key "name" twice in one object',
        ),
        (call_of("abacus"), "there is no tool 'abacus'; there are calculator, slow"),
        (call_of("calculator", number="1"), "takes one argument, expression, a text"),
    ],
)
def test_a_malformed_call_is_told_what_a_call_is(chat: Any, call: str, told: str) -> None:
    rollout = hermes(chat, call, "oh")
    assert rollout.turns[1].error == told
    assert f"error: {told}" in chat.decode(list(rollout.response_ids))


def test_what_is_sampled_is_never_encoded_again(chat: Any) -> None:
    """The policy may write a text in other tokens than the tokenizer would: here as bytes what is a single token."""
    spelled = chat.encode("<|im_start|>", add_special_tokens=False, split_special_tokens=True)
    call = chat.encode(call_of("calculator", expression="6*7"), add_special_tokens=False)
    said = [*spelled, *call, chat.eos_token_id]
    policy = ScriptedPolicy(lambda context: said if len(context) == 1 else [chat.eos_token_id])
    asked = [SeededPrompt(Problem("p", "p", "", "set"), (1,), 0)]
    (group,) = HERMES.generate(asked, policy, chat, group_size=1, sampling=LONG)  # type: ignore[arg-type]
    assert group.rollouts[0].turns[0].token_ids == tuple(said)
    assert policy.requests[1].token_ids[1 : 1 + len(said)] == tuple(said)
    assert chat.encode(chat.decode(said), add_special_tokens=False) != said


def test_a_template_without_tools_is_refused() -> None:
    plain_chat = make_tokenizer(ByteTokenizer(), ())
    plain_chat.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(SpecError, match="the model's chat template does not support tools"):
        hermes(plain_chat, "hello")
