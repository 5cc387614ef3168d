"""What an agent's program is given of its problem: neither a gold answer nor a hidden test, by any way."""

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

from rpg.data.sources.expressions import ExpressionsSource
from rpg.data.sources.jsonl import JsonlSource
from rpg.data.sources.products import ProductsSource
from rpg.data.sources.reasoning_gym import ReasoningGymSource
from rpg.rollouters import Problem
from rpg.rollouters.agents.command import Command
from rpg.rollouters.environments.agent import Agent
from specs.schema.data import Source
from tests.rpg.rollouters.test_agent import agent, chat, client, work

__all__ = ["chat"]
GOLD = "the-gold-answer"
ROW = {
    "prompt": "6*7",
    "answer": GOLD,
    "level": 3,
    "solution": GOLD,
    "tests": [{"arguments": [1], "value": 2, "shown": True}, {"arguments": [2], "value": GOLD}],
    "function": "f",
}
SEALED = pytest.param(True, marks=pytest.mark.needs("bubblewrap"))
LOOKS = """
import json, os, stat, subprocess, sys
from openai import OpenAI

OpenAI().chat.completions.create(model="m", messages=[dict(role="user", content="a")])
kind = stat.S_IFMT(os.fstat(0).st_mode)
given = sys.stdin.read()
again = [sys.executable, "-c", "import os; os.lseek(0, 0, 0); print(os.read(0, 99))"]
rest = subprocess.run(again, capture_output=True)
files = []
for descriptor in range(3, 99):
    try:
        files += [descriptor] * stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        pass
told = {"given": given, "pipe": kind == stat.S_IFIFO, "rest": rest.stdout.decode(), "files": files}
print(json.dumps(told | {"variables": str(dict(os.environ)), "words": sys.argv}))
"""


def source_problem(source: Source) -> Problem:
    """The source's first problem, as a run has it."""
    (found,) = source.peek(1)
    return Problem("p", found.prompt, found.answer, "set", found.metadata, shown=found.shown)


def of_a_table(directory: Path, **columns: Any) -> Problem:
    """The problem of a table with a gold answer in several columns."""
    file = directory / "set.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    return source_problem(
        JsonlSource(source="jsonl", path=str(file), tests="cases", columns={"answer": "answer", **columns})
    )


@pytest.mark.parametrize("sealed", [False, SEALED])
def test_a_commands_input_is_a_pipe_without_gold(sealed: bool, chat: Any, tmp_path: Path) -> None:
    problem = of_a_table(tmp_path, keep=["solution"], shown=["level"])
    assert problem.metadata["solution"] == problem.answer == GOLD
    program = Command(type="command", command=("python", "-c", LOOKS, "{question}"), sealed=sealed)
    rollout = work(Agent(type="agent", program=program, answer="returned"), chat, "42", problem=problem)
    assert GOLD not in (rollout.answer or "")
    told = json.loads(rollout.answer or "")
    assert json.loads(told["given"]) == {
        "question": "6*7",
        "messages": [{"role": "user", "content": "6*7"}],
        "metadata": {"level": 3, "tests": {"kind": "call", "function": "f", "shown": [[[1], 2]]}},
    }
    assert (told["pipe"], told["rest"], told["files"]) == (True, "", [])


def test_a_function_is_given_no_gold(chat: Any, tmp_path: Path) -> None:
    given: list[Problem] = []

    def notes(problem: Problem, base_url: str, api_key: str) -> None:
        given.append(problem)
        with client(base_url, api_key) as asked:
            asked.chat.completions.create(model="any", messages=[{"role": "user", "content": problem.prompt}])

    work(agent(notes), chat, "42", problem=of_a_table(tmp_path, keep=["solution"]))
    assert GOLD not in repr(given)
    assert (given[0].prompt, given[0].answer, given[0].metadata.keys()) == ("6*7", "", {"tests"})


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (ReasoningGymSource(source="reasoning_gym", task="chain_sum", size=1), {}),
        (ProductsSource(source="products", size=1), {}),
        (ExpressionsSource(source="expressions", size=1), {"tests": {"kind", "function", "shown"}}),
    ],
)
def test_nothing_of_our_own_sources_that_scores_is_public(source: Source, kept: dict[str, set[str]]) -> None:
    problem = source_problem(source)
    public = problem.public()
    assert public.conversation() == problem.conversation()
    assert problem.answer
    assert public.answer == ""
    assert {name: set(value) for name, value in public.metadata.items()} == kept


@pytest.mark.parametrize("reads", [True, False])
def test_a_long_problem_keeps_no_program_waiting(reads: bool, chat: Any) -> None:
    problem = Problem("p", "6*7", "42", "set", {"page": "x" * (4 << 20)}, shown=("page",))
    asked = "model='m', messages=[dict(role='user', content='a')]"
    asks = f"from openai import OpenAI; OpenAI().chat.completions.create({asked})"
    counts = "import sys; print(len(sys.stdin.read()) > 4 << 20)" if reads else "print('unread')"
    program = Command(type="command", command=(sys.executable, "-c", f"{asks}\n{counts}"), sealed=False)
    rollout = work(Agent(type="agent", program=program, answer="returned"), chat, "42", problem=problem)
    assert rollout.answer == ("True" if reads else "unread")


LEAVES = """
import os, sys
from openai import OpenAI

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "while True: pass", sys.argv[1]])
    os._exit(0)
OpenAI().chat.completions.create(model="m", messages=[dict(role="user", content="a")])
"""


@pytest.mark.parametrize("sealed", [False, SEALED])
def test_what_a_program_has_started_ends_with_it(sealed: bool, chat: Any) -> None:
    mark = uuid.uuid4().hex
    program = Command(type="command", command=("python", "-c", LEAVES, mark), sealed=sealed)
    work(Agent(type="agent", program=program), chat, "42")
    wait_for(lambda: not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])])
