"""Tools of an MCP server, a real one, which the package mcp serves by stdio."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from spec_text import changed, message, write
from waiting import wait_for

from rpg.rewards import refusals
from rpg.rollouters.environments.tools import Tools
from rpg.tools import ToolError
from rpg.tools.mcp_server import ServerEndedError
from specs.errors import SpecError, render
from specs.loader import load_document
from tests.rpg.tiny_run import make_run, rows, train

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
SERVER = """
import os, subprocess, sys, time
from mcp.server import MCPServer

server = MCPServer("for tests")

@server.tool()
def add(first: int, second: int) -> str:
    "Adds two numbers."
    return str(first + second)

@server.tool()
def fail(why: str) -> str:
    "Fails."
    raise ValueError(why)

@server.tool()
def variables(prefix: str) -> str:
    "Names of environment variables."
    return " ".join(sorted(name for name in os.environ if name.startswith(prefix)))

@server.tool()
def start(seconds: int) -> str:
    "Starts a process that would go on, and says both ids."
    child = subprocess.Popen(["sleep", str(seconds)], start_new_session=True)
    return f"{os.getpid()} {child.pid}"

@server.tool()
def leave(code: int) -> str:
    "Ends the server."
    os._exit(code)

server.run("stdio")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return path


def tools_of(server: Path, **options: Any) -> Tools:
    section = {"type": "mcp", "command": [sys.executable, str(server)], **options}
    return Tools(type="tools", tools=[section], format="hermes")


def call(server: Path, name: str, environment: tuple[str, ...] = (), **arguments: Any) -> str:
    (tool,) = tools_of(server, tools=[name], environment=list(environment)).offered
    return str(tool.open().call(arguments))


def test_a_servers_tools_are_listed_and_called(server: Path) -> None:
    (shown, *others) = tools_of(server).shown_tools
    assert [tool["function"]["name"] for tool in others] == ["fail", "variables", "start", "leave"]
    assert (shown["function"]["name"], shown["function"]["description"]) == ("add", "Adds two numbers.")
    assert shown["function"]["parameters"]["required"] == ["first", "second"]
    assert call(server, "add", first=2, second=40) == "42"


def test_what_a_tool_raises_and_wrong_arguments_are_told_to_the_policy(server: Path) -> None:
    with pytest.raises(ToolError, match="Error executing tool fail"):
        call(server, "fail", why="no luck")
    with pytest.raises(ToolError, match="second"):
        call(server, "add", first=2)


def test_a_server_gets_the_variables_that_are_named(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SECRET", "1")
    monkeypatch.setenv("MCP_NAMED", "1")
    assert call(server, "variables", environment=("MCP_NAMED",), prefix="MCP_") == "MCP_NAMED"


def test_a_server_that_ends_is_no_fault_of_the_policys(tmp_path: Path) -> None:
    own = tmp_path / "server.py"
    own.write_text(SERVER)
    with pytest.raises(ServerEndedError, match="has ended"):
        call(own, "leave", code=3)


def test_a_server_ends_with_all_that_it_started_where_its_run_is_killed(server: Path) -> None:
    script = (
        "import sys, time; from rpg.tools.mcp_server import server_of\n"
        f"server = server_of((sys.executable, {str(server)!r}), ())\n"
        "print(server.begin('start', {'seconds': 600}).result(), flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    ids = [int(number) for number in run.stdout.readline().split()]
    assert all(map(psutil.pid_exists, ids))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    wait_for(lambda: not any(map(psutil.pid_exists, ids)), what="the server's end")


def test_a_server_that_does_not_start_is_named_with_its_place(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(1)")
    with pytest.raises(SpecError, match="the MCP server does not start") as caught:
        _ = tools_of(broken).offered
    assert caught.value.issues[0].path == ("rollout", "rollouter", "tools", 0, "command")


def test_a_tool_that_a_server_has_not_is_named_with_those_that_it_has(server: Path) -> None:
    with pytest.raises(SpecError, match="has no such tool") as caught:
        _ = tools_of(server, tools=["multiply"]).offered
    assert caught.value.issues[0].path == ("rollout", "rollouter", "tools", 0, "tools")
    assert caught.value.issues[0].allowed == "add, fail, variables, start, leave"


def with_tool(tool: str) -> str:
    rollouter = f"{{type: tools, tools: [{tool}], answer_tokens: 8, format: hermes}}"
    return changed(
        "rollout: {max_response_length: 32}", f"rollout:\n  max_response_length: 32\n  rollouter: {rollouter}"
    )


@pytest.mark.parametrize(
    ("tool", "said"),
    [("{type: mcp}", "tools.0.command: missing"), ("{type: mcp, command: []}", "at least 1")],
)
def test_a_server_without_a_command_is_said_at_its_line(
    tool: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = message(with_tool(tool))
    assert said in found
    assert "spec.yaml:13" in found


@pytest.mark.parametrize(
    ("first_line", "said"),
    [
        (None, "there is no such program"),
        ("#!/no/such/python", "server begins with #!/no/such/python"),
        ("#!/usr/bin/env no-such-python", "a program on the PATH that env searches"),
    ],
)
def test_a_server_whose_program_or_interpreter_is_not_here_is_said_at_its_line(
    first_line: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if first_line:
        (tmp_path / "server").write_text(f"{first_line}\n")
        (tmp_path / "server").chmod(0o755)
    document = load_document(write(with_tool(f"{{type: mcp, command: [{tmp_path / 'server'}]}}")))
    found = render([document.locate(issue) for issue in refusals(document.experiment)])
    assert said in found
    assert "spec.yaml:13" in found


ODD_SERVER = """
import os, pathlib, random, sys
from mcp.server import MCPServer

server = MCPServer("for tests")
pathlib.Path(sys.argv[1], str(os.getpid())).touch()

@server.tool(name="0")
def draw(digits: str) -> str:
    "Draws as many digits."
    return "".join(random.choices("01", k=len(digits) + 1))

server.run("stdio")
"""


@pytest.mark.more
def test_a_training_calls_the_tools_of_a_server_which_ends_with_it(inputs: Path, tmp_path: Path) -> None:
    server, pids = tmp_path / "server.py", tmp_path / "pids"
    server.write_text(ODD_SERVER)
    pids.mkdir()
    rollouter = {
        "type": "tools",
        "tools": [{"type": "mcp", "command": [sys.executable, str(server), str(pids)]}],
        "format": {"type": "tags", "call": "1{tool}{argument}=", "answer": "={answer}="},
        "max_turns": 3,
        "answer_tokens": 6,
    }
    rollout = {"rollouter": rollouter, "max_response_length": 20}
    run = make_run(inputs, tmp_path / "run", rollout=rollout, training={"steps": 2})
    train(run)
    answers = [row for row in rows(run, "turns") if not row["sampled"]]
    assert {row["tool"] for row in answers} == {"0"}
    assert {row["error"] for row in answers} == {None}
    assert len({row["text"] for row in answers}) > 3
    assert all(set(row["text"]) <= set("01=") for row in answers)
    (pid,) = pids.iterdir()
    wait_for(lambda: not psutil.pid_exists(int(pid.name)), what="the server's end")
