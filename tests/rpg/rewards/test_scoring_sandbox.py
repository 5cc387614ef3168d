"""A model's text is scored in a sandbox in which it can do no harm: attacks as root and as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from as_users import as_user
from places import ROOT, TESTS
from scoring_attacks import PROBLEM, code, evaluating
from waiting import wait_for

from rpg.rewards import Score
from rpg.rewards.pool import WorkerPool
from rpg.sandbox.process import Limits, start

ATTACKS = TESTS / "rpg" / "scoring_attacks.py"
ALLOWED = {
    *("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUTF8"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE", "PYTHONWARNINGS"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("PWD", "MPLCONFIGDIR", "USE_HUB_KERNELS"),  # of bubblewrap, matplotlib and `rpg` itself, in there
}

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Where everybody may write, with a secret that only this user should read."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    (path / "secret").write_text("the secret")
    (path / "secret").chmod(0o644)
    yield path
    shutil.rmtree(path)


def attacked(what: str, user: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, str(ATTACKS), what, str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        as_user(user, command), capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.long), "an ordinary user"])
def test_an_answer_that_is_code_reaches_nothing(user: str, open_directory: Path) -> None:
    evidence = attacked("evaluated", user, open_directory)
    assert evidence.pop("environment").keys() <= ALLOWED
    assert evidence.pop("shell") in ("-1", "32512")  # no process could be made
    assert evidence.pop("wrote its own code") in ("PermissionError", "OSError")
    assert evidence == {
        "user": 65534,
        "rights": 1,  # can never gain more
        "wrote": "FileNotFoundError",
        "read": "FileNotFoundError",
        "home": "FileNotFoundError",
        "users": "FileNotFoundError",
        "processes": "FileNotFoundError",
        "connected": "OSError",  # there is no internet's socket to be had
        "forked": "BlockingIOError",
        "thread": "RuntimeError",
        "attached to its parent": "-1",
        "read the next request": "b''",
    }
    assert not (open_directory / "written").exists()


@pytest.mark.more
@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.long), "an ordinary user"])
def test_an_answer_that_misbehaves_costs_its_own_reward_alone(user: str, open_directory: Path) -> None:
    found = attacked("misbehaviour", user, open_directory)
    late, killed = "no verdict after 1 s", "no verdict after 1 s; the scorer was killed"
    endless, nonsense = "the scorer wrote without end", "the scorer's output is not a verdict"
    died = "the scorer's process died (SIGKILL)"
    expected = {
        "loops": {late},
        "takes memory": {None, late, killed},
        "fills the disk": {None},
        "forks": {None},
        "writes without end": {endless},
        "drips": {nonsense},
        "drips to the end": {killed},
        "writes on standard error": {None},
        "is no verdict": {nonsense},
        "is a pickle": {nonsense},
        "is not a number": {nonsense},
        "is nested": {nonsense},
        "says it twice": {nonsense},
        "closes its output": {killed, "the scorer's process died (exit 1) OSError: [Errno 9] Bad file descriptor"},
        "kills": {died},
    }
    assert found.keys() == expected.keys()
    found["kills"]["error"] = found["kills"]["error"][: len(died)]  # a library's last words follow
    for name, each in found.items():
        assert each["error"] in expected[name], name
        assert (each["value"], each["next"]) == (0.0, 1.0), name


def test_a_response_that_changes_its_scorer_changes_no_later_score() -> None:
    every_mark_is_full = (
        "import rpg.rewards.score as score\n"
        "score.Score.of = classmethod(lambda cls, value, extracted: cls(1.0, True, extracted))"
    )
    with WorkerPool(evaluating(), workers=1) as pool:
        _, wrong, right = pool.score([PROBLEM] * 3, [code(every_mark_is_full), "0", PROBLEM.answer])
    assert wrong == Score(0.0, False, "0")
    assert right == Score(1.0, True, PROBLEM.answer)


def test_what_a_sealed_process_started_ends_with_it() -> None:
    nap = f"3600.{uuid.uuid4().int % 10**9}"
    script = f"setsid sh -c 'sleep {nap} & sleep {nap}' >/dev/null 2>&1 & echo ready; cat"
    process = start(
        ["/bin/sh", "-c", script],
        sealed=True,
        limits=Limits(processes=16),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    wait_for(lambda: len(sleepers(nap)) == 2)
    process.end()
    wait_for(lambda: not sleepers(nap))


def test_a_sealed_process_ends_with_the_one_that_started_it() -> None:
    nap = f"3600.{uuid.uuid4().int % 10**9}"
    code = (
        "import time; from rpg.sandbox import Limits, start\n"
        f"start(['/bin/sh', '-c', 'setsid sleep {nap} & wait'], sealed=True, limits=Limits(processes=16))\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: len(sleepers(nap)) == 1)
    parent.kill()
    parent.wait()
    wait_for(lambda: not sleepers(nap))


def test_a_sealed_process_has_as_many_processes_and_as_long_files_as_it_may() -> None:
    code = (
        "import os, time\nn = 1\nwhile True:\n try:\n  pid = os.fork()\n except OSError: break\n"
        " if pid == 0: time.sleep(60)\n n += 1\n"
        "try:\n open('/tmp/f', 'wb', 0).write(bytes(5000))\nexcept OSError: pass\n"
        "print(n, os.stat('/tmp/f').st_size, flush=True)"
    )
    limits = Limits(processes=20, file_bytes=1000)
    process = start([sys.executable, "-I", "-c", code], sealed=True, limits=limits, stdout=subprocess.PIPE)
    forked, length = map(int, process.stdout.readline().split())
    process.end()
    assert 10 <= forked <= 20
    assert length == 1000


def test_a_sealed_process_reads_what_it_is_given_and_cannot_change_it(open_directory: Path) -> None:
    given = open_directory / "secret"
    given.chmod(0o666)
    script = f"cat {given}; echo changed > {given}; ls {open_directory}"
    process = start(["/bin/sh", "-c", script], sealed=True, limits=Limits(processes=9), readable=[given], stdout=-1)
    assert process.stdout.read() == b"the secretsecret\n"
    process.end()
    assert given.read_text() == "the secret"


def sleepers(nap: str) -> list[psutil.Process]:
    """Returns the processes `sleep` of a unique duration."""
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", nap]]
