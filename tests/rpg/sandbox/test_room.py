"""The room in which programs run: their input, their reported results, and failures of the sandbox itself."""

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rpg.sandbox import Limits, Outcome, Program, Sandbox, SandboxError, filter, room

pytestmark = pytest.mark.needs("bubblewrap")
compiler = pytest.mark.needs("g++")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(seconds=2.0, memory_bytes=1 << 30, processes=8), at_once=2) as opened:
        yield opened


def said(outcome: Outcome) -> tuple[str, str, int, str]:
    return outcome.stdout, outcome.stderr, outcome.exit_status, outcome.ended


@pytest.mark.parametrize(("ranks", "at_once"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_ranks_share_the_cores_of_their_machine_evenly(
    ranks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert room.cores() == at_once


def test_a_program_gets_its_input_and_its_arguments(sandbox: Sandbox) -> None:
    source = "import sys\nprint(__name__, sys.argv[1:], input(), sys.stdin.read(), end='')"
    assert said(sandbox.run(Program(source, "one\ntwo Ω", ("a", "b")))) == (
        "__main__ ['a', 'b'] one two Ω",
        "",
        0,
        "exited",
    )


@pytest.mark.parametrize(
    ("source", "status", "stderr"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import atexit; atexit.register(print, 'late'); print('early')", 0, ""),
        ("import threading; threading.Thread(target=print, args=('in a thread',)).start()", 0, ""),
    ],
)
def test_a_program_ends_as_python_ends_it(sandbox: Sandbox, source: str, status: int, stderr: str) -> None:
    outcome = sandbox.run(Program(source))
    assert (outcome.exit_status, outcome.stderr, outcome.ended) == (status, stderr, "exited")
    assert outcome.stdout == {"import a": "early\nlate\n", "import t": "in a thread\n"}.get(source[:8], "")


def test_an_error_names_the_programs_own_lines_alone(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("def f():\n    return 1 / 0\nf()"))
    assert re.findall(r"line \d+, in \S+", outcome.stderr) == ["line 3, in <module>", "line 2, in f"]
    assert "return 1 / 0" in outcome.stderr
    assert "SyntaxError" in sandbox.run(Program("def")).stderr


def test_a_program_imports_what_is_installed(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("import numpy; print(numpy.arange(3).sum())")).stdout == "3\n"


def test_long_input_and_long_output_pass(sandbox: Sandbox) -> None:
    text = "x" * 1_000_000
    assert sandbox.run(Program("print(input(), end='')", text)).stdout == text


def test_what_a_program_prints_depends_on_what_it_is_given_alone() -> None:
    source = "import random\nprint(random.random(), {'a', 'b', 'c', 'd', 'e'}, hash('x'))"
    with Sandbox(Limits()) as first, Sandbox(Limits()) as second:
        assert first.run(Program(source)).stdout == second.run(Program(source)).stdout != ""


def test_time_is_over_by_the_clock_and_by_the_processor() -> None:
    with Sandbox(Limits(seconds=0.3)) as sandbox:
        outcome = sandbox.run(Program("print('begun', flush=True)\nwhile True: pass"))
        assert (outcome.ended, outcome.stdout) == ("timeout", "begun\n")
        assert 0.3 <= outcome.seconds < 2.0
    with Sandbox(Limits(seconds=30.0, cpu_seconds=1)) as sandbox:
        outcome = sandbox.run(Program("while True: pass"))
        assert outcome.ended == "timeout"
        assert outcome.seconds < 20.0


def test_programs_run_beside_each_other_and_no_more_than_may() -> None:
    with Sandbox(Limits(), at_once=2) as sandbox, ThreadPoolExecutor(4) as threads:
        sandbox.run(Program(""))
        source = "import time\nprint(time.time())\ntime.sleep(1)\nprint(time.time())"
        outcomes = threads.map(lambda _: sandbox.run(Program(source)), range(4))
        spans = [[float(line) for line in outcome.stdout.split()] for outcome in outcomes]
        beside = [sum(begun <= at < ended for begun, ended in spans) for at, _ in spans]
        assert max(beside) == 2
        assert len(sandbox._idle) == 2


def test_a_program_ends_what_it_started_as_everywhere(sandbox: Sandbox) -> None:
    source = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nchild.terminate()\nprint(child.wait())"
    assert said(sandbox.run(Program(source))) == ("-15\n", "", 0, "exited")


def test_a_process_with_many_descriptors_may_have_a_sandbox() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Sandbox(Limits()) as sandbox:
            assert sandbox.run(Program("print(1)")).stdout == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_whose_text_is_no_unicode_fails_alone(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("print('\ud800')")).ended == "exited"
    assert sandbox.run(Program("import os; os.write(1, b'\\xff')")).stdout == "\ufffd"
    assert sandbox.run(Program("print(0)\0")).exit_status == 1


@compiler
def test_a_compiled_program_runs_as_a_python_one_does(sandbox: Sandbox) -> None:
    main = "int main(int, char** argv) { int n; std::cin >> n; std::cout << argv[1] << 2 * n; return 5; }"
    source = f"#include <iostream>\n{main}"
    assert said(sandbox.run(Program(source, "21", ("=",), "c++"))) == ("=42", "", 5, "exited")
    wrong = sandbox.run(Program("int main() { return x; }", language="c++"))
    assert (wrong.exit_status, wrong.ended, wrong.stdout) == (1, "exited", "")
    assert re.search("error: .*x.* was not declared", wrong.stderr)
    crash = sandbox.run(Program("int main() { volatile int* p = 0; return *p; }", language="c"))
    assert (crash.ended, crash.exit_status) == ("killed", -signal.SIGSEGV)
    bomb = "int main() { char* volatile taken; for (;;) taken = new char[1 << 26]; }"  # touches none of it
    assert sandbox.run(Program(bomb, language="c++")).ended == "memory"


def test_a_session_keeps_its_names_until_it_is_closed(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert said(session.execute("a = 20\nprint('set')\na + 1")) == ("set\n21\n", "", 0, "exited")
        outcome = session.execute("1 / 0")
        assert (outcome.exit_status, outcome.ended) == (1, "exited")
        assert "ZeroDivisionError" in outcome.stderr
        assert session.execute("def f(n):\n    return a * n").stdout == ""
        assert session.execute("f(2)").stdout == "40\n"
        assert session.execute("raise SystemExit(2)").exit_status == 1
        assert session.execute("a").stdout == "20\n"
    with sandbox.session() as session:
        assert "NameError" in session.execute("a").stderr


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import os; os._exit(0)", "exited"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nfor fd in range(3, 64):\n try: os.close(fd)\n except OSError: pass", "exited"),
    ],
)
def test_a_call_that_ends_its_session_begins_the_next_one_without_names(
    sandbox: Sandbox, code: str, ended: str
) -> None:
    with sandbox.session() as session:
        session.execute("a = 1")
        assert session.execute(code).ended == ended
        assert "NameError" in session.execute("a").stderr


def test_a_session_cannot_say_that_another_thing_came_of_it(sandbox: Sandbox) -> None:
    forged = "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'?')\n except OSError: pass\nprint('x')"
    with sandbox.session() as session:
        for _ in range(3):
            assert session.execute(forged).ended == "exited"
    assert sandbox.run(Program("print(1)")).stdout == "1\n"


def test_a_sessions_threads_do_nothing_between_calls(sandbox: Sandbox) -> None:
    counting = "import threading\nn = 0\ndef count():\n    global n\n    while True: n += 1\n"
    with sandbox.session() as session:
        session.execute(counting + "threading.Thread(target=count, daemon=True).start()")
        before = int(session.execute("n").stdout)
        time.sleep(1.0)
        after = int(session.execute("n").stdout)
        free = sandbox.run(
            Program(
                counting + "import time\nthreading.Thread(target=count, daemon=True).start(); time.sleep(1.0); print(n)"
            )
        )
        assert after - before < int(free.stdout) / 3


def test_no_process_can_have_the_kernel_wake_it(sandbox: Sandbox) -> None:
    asked = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    wakes = ("libc.timer_create(1, None, ctypes.byref(ctypes.c_long()))", "libc.fcntl(0, 10, 18)")
    for call in wakes:
        assert sandbox.run(Program(f"{asked}print({call}, errno.errorcode[ctypes.get_errno()])")).stdout == "-1 EPERM\n"


def test_sessions_wait_for_no_program() -> None:
    with Sandbox(Limits(seconds=30.0), at_once=1) as sandbox, sandbox.session() as one, sandbox.session() as other:
        one.execute("a = 1")
        other.execute("a = 2")
        assert sandbox.run(Program("print(3)")).stdout == "3\n"
        assert (one.execute("a").stdout, other.execute("a").stdout) == ("1\n", "2\n")


def keepers() -> set[psutil.Process]:
    """Keepers of the seals of this process, which themselves run in them."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if each.cmdline()[1:2] == ["-P"]:
                found.add(each)
    return found


@pytest.mark.more
def test_a_seal_that_dies_is_replaced_and_the_program_runs_again() -> None:
    others = keepers()
    with Sandbox(Limits(seconds=10.0), at_once=1) as sandbox, ThreadPoolExecutor(1) as thread:
        sandbox.run(Program(""))
        outcome = thread.submit(sandbox.run, Program("import time; time.sleep(2); print('done')"))
        time.sleep(0.7)
        killed = keepers() - others
        assert killed
        for each in killed:  # a keeper that sees its program die would say so
            each.suspend()
        for each in killed:
            each.kill()
        assert outcome.result().stdout == "done\n"
        idle = keepers() - others
        for each in idle:
            each.kill()
        assert sandbox.run(Program("print('and again')")).stdout == "and again\n"


def test_a_sandbox_that_cannot_begin_is_no_fault_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert room.missing() is None
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Sandbox(Limits()) as sandbox, pytest.raises(SandboxError, match=r"failed 3 times in a row.*no space left"):
        sandbox.run(Program("print(1)"))


def test_the_filter_knows_calls_by_the_numbers_of_the_kernel() -> None:
    for column, header in enumerate(("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")):
        path = Path("/usr/include", header)
        if not path.exists():
            pytest.skip(f"no {path}")
        numbers = {name: int(number) for name, number in re.findall(r"__NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())}
        calls = {**filter._REFUSED, "clone": filter._CLONE, "clone3": filter._CLONE3, "socket": filter._SOCKET}
        for name, by_machine in {**calls, "ioctl": filter._IOCTL}.items():
            assert by_machine[column] == numbers.get(name), name
