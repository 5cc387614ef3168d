"""An agent: a program written against the `openai` package asks the policy, whose words stand as they were sampled."""

import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from places import ROOT
from scripted_policy import ScriptedPolicy
from spec_text import changed, message

from rpg import sandbox
from rpg.base.tokenization import make_tokenizer
from rpg.rollouters import Problem, SeededPrompt
from rpg.rollouters.agent import FunctionProgram
from rpg.rollouters.agents.command import Command
from rpg.rollouters.agents.function import Function
from rpg.rollouters.endpoint import _endpoint
from rpg.rollouters.environments.agent import Agent
from rpg.types import Rollout, Sampling
from specs.errors import Issue, SpecError
from specs.schema.model import ByteTokenizer
from specs.schema.rollout import Answering
from tests.rpg.rollouters.test_tools import TEMPLATE

ROOM = 600
Program = Callable[[Problem, str, str], str | None]


@pytest.fixture(scope="module")
def chat() -> Any:
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def agent(program: Program, **options: Any) -> Agent:
    kind = type("Programmed", (FunctionProgram,), {"function": staticmethod(program)})
    return Agent(type="agent", program=kind(type="programmed"), **options)


def work(rollouter: Agent, chat: Any, *turns: str, problem: Problem | None = None) -> Rollout:
    """The rollout of a policy that says these turns, each ended by the end token, to the question 6*7."""
    asked = problem or Problem("p", "6*7", "42", "set")
    prompt = chat.apply_chat_template(asked.conversation(), tokenize=False, add_generation_prompt=True)
    said = iter([[*chat.encode(turn, add_special_tokens=False), chat.eos_token_id] for turn in turns])
    known: dict[int, list[int]] = {}

    def says(_: tuple[int, ...]) -> list[int]:
        number = len(policy.requests) - 1
        if number not in known:
            known[number] = next(said)
        return known[number]

    policy: Any = ScriptedPolicy(says)
    prompts = [SeededPrompt(asked, tuple(chat.encode(prompt, add_special_tokens=False)), 0)]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=ROOM)
    (group,) = rollouter.generate(prompts, policy, chat, group_size=1, sampling=sampling)
    rollout = group.rollouts[0]
    contexts = [request.token_ids for request in policy.requests]
    assert contexts == contexts_of(rollout, prompts[0].token_ids)
    return rollout


def contexts_of(rollout: Rollout, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What each turn of the policy was sampled behind, by the turns alone."""
    context, found = prompt, []
    for turn in rollout.turns:
        if turn.sampled:
            found.append(context)
        context = turn.token_ids if turn.restart else (*context, *turn.token_ids)
    return found


def texts(rollout: Rollout, chat: Any) -> list[str]:
    return [str(chat.decode(list(turn.token_ids))) for turn in rollout.turns]


def client(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


def asks_twice(problem: Problem, base_url: str, api_key: str) -> str:
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    with client(base_url, api_key) as asked:
        assert asked.models.list().data[0].id == "policy"
        first = asked.chat.completions.create(model="gpt-5", messages=messages).choices[0].message
        messages += [first, {"role": "user", "content": "sure?"}]
        second = asked.chat.completions.create(model="gpt-5", messages=messages)
    assert second.choices[0].finish_reason == "stop"
    return f"{first.content}, {second.choices[0].message.content}"


def test_a_program_that_goes_on_adds_to_what_the_policy_was_told_and_said(chat: Any) -> None:
    rollout = work(agent(asks_twice), chat, "41", "42")
    assert texts(rollout, chat) == [
        "41<|im_end|>",
        "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n",
        "42<|im_end|>",
    ]
    assert not any(turn.restart for turn in rollout.turns)
    assert (rollout.finish_reason, rollout.answer) == ("stop", None)


def test_a_program_that_writes_its_history_anew_splits_the_response(chat: Any) -> None:
    def rewrites(problem: Problem, base_url: str, api_key: str) -> str:
        with client(base_url, api_key) as asked:
            for content in (problem.prompt, "a summary"):
                messages: list[Any] = [{"role": "user", "content": content}]
                answer = asked.chat.completions.create(model="any", messages=messages).choices[0].message
            return str(answer.content)

    rollout = work(agent(rewrites, answer="returned"), chat, "41", "42")
    assert [turn.restart for turn in rollout.turns] == [False, True, False]
    assert texts(rollout, chat)[1] == "<|im_start|>user\na summary<|im_end|>\n<|im_start|>assistant\n"
    assert rollout.answer == "42"


def test_a_program_that_comes_back_to_an_older_history_goes_on_from_its_tokens(chat: Any) -> None:
    def two_at_once(problem: Problem, base_url: str, api_key: str) -> None:
        threads: list[list[Any]] = [[], []]
        with client(base_url, api_key) as asked:
            for number in range(4):
                thread = threads[number % 2]
                thread.append({"role": "user", "content": f"{problem.prompt} {number}"})
                thread.append(asked.chat.completions.create(model="any", messages=thread).choices[0].message)

    rollout = work(agent(two_at_once, max_turns=8), chat, "a\\u00e9", "b", "c", "d")
    assert [turn.restart for turn in rollout.turns if not turn.sampled] == [True] * 4
    said = [turn.token_ids for turn in rollout.turns if turn.sampled]
    assert contexts_of(rollout, ())[2][: len(rollout.turns[0].token_ids) + len(said[0])] == (
        *rollout.turns[0].token_ids,
        *said[0],
    )


def test_words_that_the_tokenizer_would_write_otherwise_stay_as_they_were_sampled(chat: Any) -> None:
    """A text that spells a special token is one token where it is encoded again; here the policy spelled it out."""
    spelled = chat.encode("<|im_start|>", add_special_tokens=False, split_special_tokens=True)
    assert len(spelled) > 1

    def echoes(problem: Problem, base_url: str, api_key: str) -> None:
        with client(base_url, api_key) as asked:
            messages: list[Any] = [{"role": "user", "content": problem.prompt}]
            answer = asked.chat.completions.create(model="any", messages=messages).choices[0].message
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "<|im_end|>"}]
            asked.chat.completions.create(model="any", messages=messages)

    turns = iter([[*spelled, chat.eos_token_id], [*chat.encode("42"), chat.eos_token_id]])
    known: dict[int, list[int]] = {}

    def says(_: tuple[int, ...]) -> list[int]:
        number = len(policy.requests)
        if number not in known:
            known[number] = next(turns)
        return known[number]

    policy: Any = ScriptedPolicy(says)
    prompt = tuple(chat.encode("anything", add_special_tokens=False))
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=ROOM)
    asked = [SeededPrompt(Problem("p", "6*7", "42", "set"), prompt, 0)]
    (group,) = agent(echoes).generate(asked, policy, chat, group_size=1, sampling=sampling)
    context = policy.requests[1].token_ids
    assert context[: len(prompt) + len(spelled) + 1] == (*prompt, *spelled, chat.eos_token_id)
    assert context.count(chat.eos_token_id) == 2  # the policy's own, and the template's: none of what the client sent
    assert not any(turn.restart for turn in group.rollouts[0].turns)


TOOL = {
    "type": "function",
    "function": {"name": "times", "description": "a product", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_shown_called_and_answered(chat: Any, stream: bool) -> None:
    def uses_tools(problem: Problem, base_url: str, api_key: str) -> str:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        with client(base_url, api_key) as asked:
            options: Any = {"model": "any", "messages": messages, "tools": [TOOL]}
            if stream:
                pieces = list(asked.chat.completions.create(**options, stream=True))
                (call,) = (call for piece in pieces for call in piece.choices[0].delta.tool_calls or ())
                content = "".join(piece.choices[0].delta.content or "" for piece in pieces)
                assert pieces[-1].choices[0].finish_reason == "tool_calls"
            else:
                answered = asked.chat.completions.create(**options).choices[0]
                assert answered.finish_reason == "tool_calls"
                (call,) = answered.message.tool_calls or ()
                content = answered.message.content or ""
            function = {"name": call.function.name, "arguments": call.function.arguments}
            assert json.loads(str(function["arguments"])) == {"a": 6, "b": 7}
            made = [{"id": call.id, "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": content, "tool_calls": made})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
            return str(asked.chat.completions.create(**options).choices[0].message.content)

    said = 'I ask.\n<tool_call>\n{"name": "times", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    rollout = work(agent(uses_tools, answer="returned"), chat, said, "it is 42")
    assert [turn.restart for turn in rollout.turns] == [True, False, False, False]  # the prompt showed no tools
    assert "times" in texts(rollout, chat)[0]
    assert texts(rollout, chat)[2] == (
        "\n<|im_start|>user<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert rollout.answer == "it is 42"


def test_a_program_that_never_asks_is_named(chat: Any) -> None:
    with pytest.raises(SpecError, match="without asking the policy anything") as raised:
        work(agent(lambda *_: "42"), chat)
    assert "rollout.rollouter.program" in str(raised.value)
    assert "programmed" in str(raised.value)


def test_a_program_that_fails_ends_its_response_with_a_reason(chat: Any) -> None:
    def fails(problem: Problem, base_url: str, api_key: str) -> None:
        with client(base_url, api_key) as asked:
            asked.chat.completions.create(model="any", messages=[{"role": "user", "content": problem.prompt}])
        raise LookupError("no such page")

    rollout = work(agent(fails, answer="returned"), chat, "41")
    assert [turn.error for turn in rollout.turns] == ["LookupError: no such page"]
    assert rollout.answer == ""


def test_a_request_beyond_the_turns_is_refused_and_the_response_is_cut(chat: Any) -> None:
    refused, is_over = list[str](), threading.Event()

    def asks_for_ever(problem: Problem, base_url: str, api_key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        with client(base_url, api_key) as asked:
            try:
                while True:
                    messages.append(asked.chat.completions.create(model="any", messages=messages).choices[0].message)
                    messages.append({"role": "user", "content": "more"})
            except openai.APIStatusError as error:
                refused.append(str(error))
                is_over.set()

    rollout = work(agent(asks_for_ever, max_turns=2), chat, "41", "42")
    assert rollout.finish_reason == "length"
    assert sum(turn.sampled for turn in rollout.turns) == 2
    assert is_over.wait(60)
    assert "has had its 2 turns" in refused[0]


def test_what_the_endpoint_has_not_is_said_to_the_client(chat: Any) -> None:
    told: list[str] = []

    def wants_more(problem: Problem, base_url: str, api_key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        with client(base_url, api_key) as asked, client(base_url, "another key") as stranger:
            for wanted in ({"n": 2}, {"response_format": {"type": "json_object"}}, {"stop": ["x"]}):
                with pytest.raises(openai.BadRequestError) as raised:
                    asked.chat.completions.create(model="any", messages=messages, **wanted)  # type: ignore[call-overload]
                told.append(str(raised.value))
            with pytest.raises(openai.AuthenticationError):
                stranger.chat.completions.create(model="any", messages=messages)
            answer = asked.chat.completions.create(model="any", messages=messages, max_completion_tokens=1)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage
            assert answer.usage.completion_tokens == 1

    rollout = work(agent(wants_more), chat, "42")
    assert [turn.error for turn in rollout.turns] == [""]
    assert rollout.finish_reason == "length"
    assert [name in text for name, text in zip(("leave n out", "response_format", "stop"), told, strict=True)]


def test_a_request_that_is_no_json_is_refused_with_the_reason(chat: Any) -> None:
    told: list[tuple[int, str]] = []

    def asks(problem: Problem, base_url: str, api_key: str) -> str:
        head = {"authorization": f"Bearer {api_key}"}
        for content in (r'"\ud83d"', "NaN", "7" * 5000, '"a", "content": "b"'):
            body = f'{{"model": "any", "messages": [{{"role": "user", "content": {content}}}]}}'
            answer = httpx.post(f"{base_url}/chat/completions", content=body, headers=head)
            told.append((answer.status_code, answer.json()["error"]["message"]))
        with client(base_url, api_key) as asked:
            messages: list[Any] = [{"role": "user", "content": problem.prompt}]
            asked.chat.completions.create(model="any", messages=messages)
        return "a half \ud83d"

    rollout = work(agent(asks, answer="returned"), chat, "42")
    assert [status for status, _ in told] == [400] * 4
    reasons = ("half a character", "NaN", "a whole number of 5000 digits", 'the key "content" twice')
    assert [reason in text for reason, (_, text) in zip(reasons, told, strict=True)] == [True] * 4
    assert "its answer holds half a character" in str(rollout)


def test_a_command_asks_unchanged_and_what_it_writes_is_its_answer(chat: Any, tmp_path: Path) -> None:
    page = re.search(r"```python\n(import sys.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert page
    file = tmp_path / "solve.py"
    file.write_text(page[1])
    program = Command(type="command", command=("python", "{file}", "{question}"), file=str(file))
    rollout = work(Agent(type="agent", program=program, answer="returned"), chat, "41", "42")
    assert texts(rollout, chat)[1].startswith("\n<|im_start|>user\nCheck it, and write the number alone.")
    assert rollout.answer == "42"


ATTACK = """
import errno, json, os, pathlib, resource, socket, subprocess, sys
from openai import OpenAI

secret, port, process, home = sys.argv[1:]

def tried(what):
    try:
        return str(what())[:200]
    except BaseException as error:
        return errno.errorcode.get(getattr(error, "errno", None), type(error).__name__)

def names(path):
    return [each.name for each in pathlib.Path(path).iterdir()]

def reach(host, port):
    with socket.create_connection((host, port), timeout=5) as there:
        return there.recv(9)

asked = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "6*7"}])
told = {
    "answer": asked.choices[0].message.content,
    "another's file": tried(lambda: pathlib.Path(secret).read_text()),
    "a file beside": tried(lambda: sorted(names(pathlib.Path(__file__).parent))),
    "home": tried(lambda: names(home)),
    "own file": tried(lambda: pathlib.Path(__file__).write_text("")),
    "the machine's loopback": tried(lambda: reach("127.0.0.1", int(port))),
    "outside": tried(lambda: reach("192.0.2.1", 80)),
    "a variable": os.environ.get("RPG_SECRET", "none"),
    "a process": tried(lambda: os.kill(int(process), 0)),
    "processes": tried(lambda: os.listdir("/proc")),
    "scratch": tried(lambda: pathlib.Path("/tmp/note").write_text("mine")),
    "a program": tried(lambda: subprocess.run(["/bin/echo", "hi"], capture_output=True, text=True).stdout.strip()),
    "children": tried(lambda: os.waitpid(-1, os.WNOHANG)),
    "a file's length": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
}
print(json.dumps(told))
"""


@pytest.mark.needs("bubblewrap")
def test_a_command_reaches_the_endpoint_and_nothing_else_of_the_machine(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, seen = tmp_path / "seen" / "home", tmp_path / "seen"
    home.mkdir(parents=True)
    (home / "record").write_text("s3cret")
    monkeypatch.setenv("RPG_HOME", str(home))
    beneath = tmp_path.joinpath(*["a" * 50] * 2)
    beneath.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(beneath))  # too long a path for a unix socket
    _endpoint.cache_clear()
    secret, file = tmp_path / "secret", tmp_path / "agent.py"
    secret.write_text("s3cret")
    file.write_text(ATTACK)
    file.chmod(0o666)
    monkeypatch.setenv("RPG_SECRET", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = ("python", "{file}", str(secret), str(listening.getsockname()[1]), str(os.getpid()), str(home))
        program = Command(type="command", command=command, file=str(file), readable=(str(seen),))
        rollout = work(Agent(type="agent", program=program, answer="returned"), chat, "42")
    assert json.loads(rollout.answer or "") == {
        "answer": "42",
        "another's file": "ENOENT",
        "a file beside": "['agent.py', 'seen']",
        "home": "[]",
        "own file": "EROFS",
        "the machine's loopback": "ECONNREFUSED",
        "outside": "ENETUNREACH",
        "a variable": "none",
        "a process": "ESRCH",
        "processes": "ENOENT",
        "scratch": "4",
        "a program": "hi",
        "children": "ECHILD",
        "a file's length": 64 << 20,
    }
    assert file.read_text() == ATTACK
    assert not Path("/tmp/note").exists()


def test_a_command_that_writes_without_end_is_ended(chat: Any) -> None:
    asked = "model='m', messages=[dict(role='user', content='a')]"
    asks = f"from openai import OpenAI; OpenAI().chat.completions.create({asked})"
    program = Command(type="command", command=("python", "-c", f"{asks}\nwhile True: print('0' * 4096)"))
    rollout = work(Agent(type="agent", program=program), chat, "42")
    assert [turn.error for turn in rollout.turns] == ["", "RuntimeError: it wrote more than 16 MiB"]


def test_a_command_that_fails_says_why(chat: Any) -> None:
    program = Command(type="command", command=("python", "-c", "raise SystemExit('no way in')"))
    with pytest.raises(SpecError, match="exit 1: no way in"):
        work(Agent(type="agent", program=program), chat)


@pytest.mark.more
def test_a_program_that_takes_too_long_ends_with_its_response(chat: Any) -> None:
    is_over = threading.Event()

    def thinks_for_ever(problem: Problem, base_url: str, api_key: str) -> None:
        with client(base_url, api_key) as asked:
            asked.chat.completions.create(model="any", messages=[{"role": "user", "content": problem.prompt}])
        is_over.wait(600)

    rollout = work(agent(thinks_for_ever, program_seconds=5), chat, "42")
    is_over.set()
    assert [turn.error for turn in rollout.turns] == ["it neither sent a request nor ended within 5 s"]


def test_a_command_can_be_ended() -> None:
    program = Command(type="command", command=("python", "-c", "import time; time.sleep(600)"))
    running = program.begin(Problem("p", "6*7", "42", "set"), "http://127.0.0.1:1/v1", "key")
    running.end()
    with pytest.raises(RuntimeError, match="SIG"):
        running.result()


@pytest.mark.parametrize(
    ("rollouter", "said"),
    [
        ("{type: agent}", "rollout.rollouter.program: missing"),
        ("{type: agent, program: nobody}", "unknown type"),
        ("{type: agent, program: {type: command, command: [python, a.py], file: a.py}}", "no such file"),
        ("{type: agent, program: {type: command, command: []}}", "rollout.rollouter.program.command"),
        ("{type: agent, program: {type: command, command: [x]}, answer: first}", "rollout.rollouter.answer"),
        ("{type: agent, program: {type: command, command: [x]}, max_turns: 1}", "rollout.rollouter.max_turns"),
    ],
)
def test_bad_input_is_named_with_its_line(
    rollouter: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = changed(
        "rollout: {max_response_length: 32}", f"rollout:\n  max_response_length: 32\n  rollouter: {rollouter}"
    )
    found = message(text)
    assert said in found
    assert "spec.yaml:13" in found


def test_a_request_that_leaves_no_room_is_said_before_anything_is_sampled(chat: Any) -> None:
    def says_much(problem: Problem, base_url: str, api_key: str) -> None:
        with client(base_url, api_key) as asked:
            long: Any = [{"role": "user", "content": problem.prompt * ROOM}]
            asked.chat.completions.create(model="any", messages=long)

    with pytest.raises(SpecError, match="leaves the policy no room") as raised:
        work(agent(says_much), chat)
    assert "rollout.max_response_length" in str(raised.value)


def test_the_doctor_has_the_program_begun_and_sees_whether_it_asks() -> None:
    asking, silent = agent(asks_twice), agent(lambda *_: "42")
    assert list(asking.answering(60)) == [Answering("agent", "programmed", "")]
    assert list(silent.answering(60)) == [Answering("agent", "programmed", "it sent no request and returned '42'")]
    nowhere = Agent(type="agent", program=Command(type="command", command=("no-such-program",)))
    assert list(nowhere.answering(60)) == [Answering("agent", "command", "no such program: no-such-program")]
    issue = nowhere.lacks()
    assert issue
    assert issue.path == ("program", "command", 0)


def test_a_function_of_a_file_asks_as_the_shipped_agent_does(chat: Any) -> None:
    program = Function(type="function", file=str(ROOT / "specs/experiments/agent.py"))
    assert program.lacks() is None
    product = Problem("p", "37*48=", "1776", "set")
    rollout = work(Agent(type="agent", program=program), chat, "[37*48]", "1776", problem=product)
    assert "(1776)" in texts(rollout, chat)[1]
    assert [turn.sampled for turn in rollout.turns] == [True, False, True]
    assert [turn.restart for turn in rollout.turns] == [False] * 3
    at_once = work(Agent(type="agent", program=program), chat, "1776", problem=product)
    assert len(at_once.turns) == 1


def test_a_file_without_the_function_or_of_what_is_not_installed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("def other(problem, base_url, api_key): ...\n")
    issue = Function(type="function", file=str(file)).lacks()
    assert issue
    assert (issue.path, issue.given, issue.allowed) == (("function",), "solve", "other")
    missing = tmp_path / "missing.py"
    missing.write_text("import no_such_package\n")
    issue = Function(type="function", file=str(missing)).lacks()
    assert issue
    assert (issue.path, "No module named 'no_such_package'" in issue.given) == (("file",), True)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("raise SystemExit(3)\n", "file", "ImportError: it ends the process as it is loaded: SystemExit: 3"),
        ("async def solve(problem, base_url, api_key): ...\n", "function", "solve"),
    ],
)
def test_a_file_that_ends_the_process_or_an_async_function_is_named(
    text: str, path: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(text)
    issue = Function(type="function", file=str(file)).lacks()
    assert issue
    assert (issue.path, issue.given) == ((path,), said)


def test_a_file_may_have_dataclasses_whose_annotations_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Step:\n    number: int\n\ndef solve(problem, base_url, api_key): ...\n"
    )
    assert Function(type="function", file=str(file)).lacks() is None


@pytest.mark.needs("bubblewrap")
def test_a_program_or_a_path_that_the_sandbox_does_not_show_is_named(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "agent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = Command(type="command", command=(str(program),))
    issue = command.lacks()
    assert issue
    assert (issue.path, issue.given, "readable" in issue.hint) == (("command", 0), str(program), True)
    assert command.model_copy(update={"sealed": False}).lacks() is None
    shown = command.model_copy(update={"readable": (str(program.parent),)})
    assert shown.lacks() is None
    program.chmod(0o600)
    of_python = Command(type="command", command=("python", "{file}"), file=str(program))
    issue = of_python.lacks()
    assert (issue.path if issue else None) == (("file",) if os.geteuid() == 0 else None)


@pytest.mark.parametrize("sealed", [True, False])
def test_the_interpreter_of_a_program_that_is_a_script_is_looked_for(sealed: bool, tmp_path: Path) -> None:
    if sealed and sandbox.missing():
        pytest.skip("this machine can seal nothing")
    (tmp_path / "bin").mkdir()
    program, own = tmp_path / "bin" / "agent", tmp_path / "own" / "sh"
    own.parent.mkdir()
    shutil.copy("/bin/sh", own)
    command = Command(type="command", command=(str(program),), sealed=sealed, readable=(str(program.parent),))
    program.touch()
    program.chmod(0o755)

    def lacks(first_line: str, **changes: Any) -> Issue | None:
        program.write_text(f"{first_line}\n")
        return command.model_copy(update=changes).lacks()

    assert lacks("#!/bin/sh") is None
    assert lacks("#!/usr/bin/env sh") is None
    issue = lacks("#!/usr/bin/env no-such-python")
    assert issue
    assert (issue.path, issue.given) == (("command", 0), f"{program} begins with #!/usr/bin/env no-such-python")
    issue = lacks(f"#!{own}")
    assert (issue and (issue.path, issue.given)) == ((("command", 0), str(own)) if sealed else None)
    assert lacks(f"#!{own}", readable=(str(program.parent), str(own.parent))) is None
