"""Programs that attack the sandbox, as root and as an ordinary user: nothing gets through, and nothing stays behind."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from as_users import ROOT, USERS, as_user

ATTACKS = Path(__file__).with_name("room_attacks.py")
DENIED = "Operation not permitted"

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture(scope="module", params=USERS)
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What came of each attack."""
    directory = Path(tempfile.mkdtemp())  # everybody may write there, and reach it
    directory.chmod(0o777)
    (directory / "secret").write_text("the secret")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    command = as_user(request.param, [sys.executable, str(ATTACKS), str(directory)])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    try:
        assert done.returncode == 0, done.stderr[-3000:]
        yield json.loads(done.stdout)
    finally:
        shutil.rmtree(directory)


@pytest.mark.more
def test_a_program_reaches_nothing_of_the_machine(found: dict[str, Any]) -> None:
    assert found["evidence"] == {
        "environment": ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "TMPDIR"],
        "capabilities": [0],
        "rights": 1,  # can never gain more
        "descriptors": [0, 1, 2],
        "parent": 0,  # outside its namespace
        "session": True,
        "wrote": "FileNotFoundError",
        "wrote the runtime": found["evidence"]["wrote the runtime"],
        "wrote the root": "OSError",
        "read": "FileNotFoundError",
        "home": "FileNotFoundError",
        "users": "FileNotFoundError",
        "processes": "FileNotFoundError",
        "system": "FileNotFoundError",
        "symlink": "FileNotFoundError",
        "hard link": "FileNotFoundError",
        "device": "PermissionError",
        "connected": "OSError",  # there is no such socket
        "raw": "OSError",
        "netlink": "OSError",
        "abstract": "ConnectionRefusedError",  # of a network of its own
        "local": "FileNotFoundError",
        "signal to a stranger": "ProcessLookupError",
        **dict.fromkeys(("ptrace", "memory of another", "mount", "unshare", "clone", "setns", "keyctl"), DENIED),
        **dict.fromkeys(("bpf", "perf", "userfaultfd", "io_uring", "kexec", "module"), DENIED),
        **dict.fromkeys(("shared memory", "memory file"), DENIED),
        "clone3": "Function not implemented",
    }
    assert found["evidence"]["wrote the runtime"] in ("PermissionError", "OSError")
    assert found["files"] == ["secret", "socket"]


@pytest.mark.parametrize(
    ("name", "ended", "stdout"),
    [
        ("forks", "timeout", ""),
        ("takes memory", "memory", ""),
        ("takes memory in many", "memory", ""),
        ("writes without end", "output", None),
        ("writes errors without end", "output", ""),
        ("burns", "timeout", ""),
        ("sleeps", "timeout", ""),
        ("closes its outputs and sleeps", "timeout", ""),
        ("ignores signals", "timeout", ""),
        ("leaves grandchildren", "exited", "left\n"),
        ("leaves grandchildren with its output", "exited", "left\n"),
        ("kills all", "exited", ""),
        ("kills the first", "killed", ""),
        ("crashes", "killed", ""),
        ("fills its directory", "exited", "No space left on device True\n"),
        ("makes a long file", "exited", "1048576\n"),
        ("makes many files", "exited", "No space left on device\n"),
        ("nests directories", "exited", "No space left on device\n"),
        ("finds what was left", "exited", "[]\n"),
    ],
)
def test_a_program_that_misbehaves_ends_alone_and_leaves_nothing(
    found: dict[str, Any], name: str, ended: str, stdout: str | None
) -> None:
    came = found[name]
    assert came["ended"] == ended, came
    assert stdout is None or came["stdout"] == stdout, came
    assert max(len(came["stdout"]), len(came["stderr"])) <= 1 << 16
    assert ended == "memory" or came["took"] < 6.0, came  # the limit is 3 s
    assert came["next"] == "the next\n"
    assert came["left"] == 0


def test_a_program_cannot_forge_its_outcome_or_anothers(found: dict[str, Any]) -> None:
    came = found["forges its outcome"]
    assert (came["exit_status"], came["ended"], came["next"]) == (7, "exited", "the next\n")
    assert came["stdout"].endswith("no")  # on its own output alone


def test_a_program_finds_nothing_of_an_earlier_one_in_its_memory(found: dict[str, Any]) -> None:
    assert (found["search"]["stdout"], found["search"]["stderr"]) == ("[0]\n", "")  # what it hid itself, and no more


def test_nothing_is_left_when_the_room_is_closed(found: dict[str, Any]) -> None:
    assert found["left"] == []
    sleeping = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [""])[0] == "sleep"]
    assert not [each for each in sleeping if each.info["cmdline"][-1] == found["nap"]]
