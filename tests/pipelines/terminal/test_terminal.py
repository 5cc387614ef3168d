"""What others recorded cannot command the terminal that shows it; a pipe gets it as it is."""

import errno
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.live import Live

import pipelines
from pipelines.terminal.console import SafeConsole
from pipelines.terminal.streams import shown_safely, stripped
from tests.storage.recording import RecordedRun, write_json

MAIN = "from pipelines.cli import main; main()"
EVIL = (
    "\x1b]52;c;cm0gLXJm\x07"  # writes the clipboard
    "\x1b]0;title\x1b\\"  # renames the window
    "\x1b[8mhidden\x1b[2K\x1b[1A\rover"  # conceals, clears, writes over
    "\x9b31m\x9d52;c;eA==\x9c"  # the same in one character
    "\x1bP+q544e\x1b\\\x05\x08\x7f"  # asks the terminal to answer
    "\u202egnol\u2066"  # turns the direction of text
)
RUN = "evil-s0-aaaa1111"
OUR_OWN = re.compile(rb"\r?\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r?\x1b\[[12]?[AKGHJ]")
"""Styles, and the movements of live lines."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record of a run all of whose texts are hostile."""
    root = tmp_path / "home"
    monkeypatch.setenv("RPG_HOME", str(root))
    for seed in (0, 1):
        run = RecordedRun(root, f"evil-s{seed}-aaaa1111", seed=seed)
        run.start(1)
        run.steps(1, 3)
        run.evaluate()
        (run.path / "logs").mkdir()
        (run.path / "logs" / "train.log").write_bytes(f"a line\n{EVIL}\n".encode() + b"\x9b31m\xff\n")
        progress = {"step": 3, "steps": 3, "phase": "done", "metrics": {"reward/mean": 0.5}, "evaluation": EVIL}
        write_json(run.path / "progress.json", progress)
        state = json.loads((run.path / "state.json").read_text())
        write_json(run.path / "state.json", {**state, "reason": f"failed: {EVIL}", "status": "failed"})
    return root


EACH = """
import json, os, sys
from pipelines.cli import main
for arguments in json.loads(sys.argv[1]):
    os.write(1, BETWEEN)
    sys.argv = ["rpg", *arguments]
    try:
        main()
    except SystemExit:
        pass
"""
BETWEEN = b"\0next\0"


def shown(home: Path, *commands: tuple[str, ...], seconds: float = 120) -> list[bytes]:
    """What each verb sends to the terminal that its three streams are."""
    master, slave = pty.openpty()
    environment = {**os.environ, "RPG_HOME": str(home), "TERM": "xterm-256color", "COLUMNS": "200"}
    code = EACH.replace("BETWEEN", repr(BETWEEN))
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(commands)], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    said, until = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            if select.select([master], [], [], 0.1)[0]:
                said += os.read(master, 1 << 16)
    except OSError as error:
        if error.errno != errno.EIO:  # what a terminal says whose last writer is gone
            raise
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return said.split(BETWEEN)[1:]


def commands_in(said: bytes) -> list[str]:
    """Returns control sequences, except for our own styles and movements, and line ends."""
    text = OUR_OWN.sub(b"", said).replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape")
    return re.findall("\x1b.{0,8}", text) + OBEYED.findall(text) + re.findall("[\udc80-\udcff]", text)


VERBS = {
    "logs": ("logs", RUN),
    "logs of two": ("logs", "sums"),
    "show": ("show", RUN),
    "show --json": ("show", RUN, "--json"),
    "runs": ("runs",),
    "watch": ("watch", RUN),
    "compare": ("compare", "evil-s0-aaaa1111", "evil-s1-aaaa1111"),
    "csv": ("sql", "select run_id, status, reason from runs", "--format", "csv"),
    "json": ("sql", "select run_id, status, reason from runs", "--format", "json"),
    "table": ("sql", "select run_id, status, reason from runs"),
    "a column's name": ("sql", 'select 1 as "\x1b]52;c;eA==\x07"'),
    "an error": ("sql", "select error(reason) from runs"),
    "a mistake": ("show", "\x1b]52;c;eA==\x07"),
    "a file": ("validate", "\x1b]52;c;eA==\x07.yaml"),
    "import": ("import", "evil"),
    "report": ("report", RUN),
    "db check": ("db", "check"),
}


@pytest.mark.more
def test_nothing_recorded_commands_the_terminal(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    write_json(tmp_path / "evil" / "run.json", {"run_id": EVIL, "experiment": EVIL, "name": EVIL})
    answers = dict(zip(VERBS, shown(home, *VERBS.values()), strict=True))
    for verb, said in answers.items():
        assert said, verb
        assert not commands_in(said), (verb, said)
        assert b"Traceback" not in said
    recorded = ("logs", "show", "watch", "csv", "json", "table", "an error")
    assert [verb for verb in recorded if b"52;c;eA==" not in answers[verb]] == []


@pytest.mark.more
def test_a_pipe_gets_what_was_recorded(home: Path) -> None:
    def piped(*arguments: str) -> bytes:
        command = [sys.executable, "-c", MAIN, *arguments]
        return subprocess.run(
            command, env={**os.environ, "RPG_HOME": str(home)}, capture_output=True, check=True
        ).stdout

    assert EVIL.encode() in piped("logs", RUN)
    rows = piped("sql", "select reason from runs order by all limit 1", "--format", "csv")
    assert EVIL.encode() in rows
    assert json.loads(piped("sql", "select reason from runs", "--format", "json"))[0]["reason"] == f"failed: {EVIL}"


@pytest.mark.more
def test_our_own_styles_reach_the_terminal(home: Path) -> None:
    table, help_text = shown(home, ("sql", "select 1 as step"), ("--help",))
    assert b"\x1b[1mstep" in table
    assert b"\x1b[1m" in help_text
    (watched,) = shown(home, ("sql", "select 1 as a", "--watch", "--every", "0.1"), seconds=8)
    assert watched.count(b"\x1b[2J\x1b[H") > 1


def test_a_character_in_two_parts_and_what_is_no_text_command_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    with shown_safely():
        sys.stdout.buffer.write(b"\xc2")
        sys.stdout.buffer.write("\x9b é".encode()[1:] + b"\x9b\xff\n")
        print("a\x1bb", end="")
        print("\r\n\N{RIGHT-TO-LEFT OVERRIDE}")
    assert sys.stdout is terminal
    written = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert written == " é\nab\n\n"


def test_what_is_printed_beside_a_live_line_commands_no_terminal() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=200)
    link = "\x1b]8;;http://example.org\x1b\\here\x1b]8;;\x1b\\"
    with Live("live " + EVIL, console=console, transient=True):
        print(link + EVIL)
        console.print(EVIL, markup=False)
    assert "live" in out.getvalue()
    assert not commands_in(out.getvalue().encode())


def test_no_console_is_made_that_lets_commands_through() -> None:
    sources = Path(pipelines.__file__).parent.rglob("*.py")
    made = [path.name for path in sources if re.search(r"(?<!Safe)\bConsole\(", path.read_text())]
    assert made == []
    assert stripped("a\tb\nc") == "a\tb\nc"
