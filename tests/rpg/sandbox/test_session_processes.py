"""Between its calls nothing of a session runs, as root and as an ordinary user, and its CPU time is counted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from as_users import ROOT, USERS, as_user

from tests.rpg.sandbox.session_processes import LEAVES, WINDOW

SCRIPT = Path(__file__).with_name("session_processes.py")

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture(scope="module", params=USERS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What came of each session."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = as_user(request.param, [sys.executable, str(SCRIPT)])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    came: dict[str, Any] = json.loads(done.stdout)
    return came


@pytest.mark.more
@pytest.mark.parametrize("leaves", LEAVES)
def test_nothing_of_a_session_runs_between_its_calls(found: dict[str, Any], leaves: str) -> None:
    came = found[leaves]
    assert came["said"] == ["exited", ""], came
    assert came["between"] < WINDOW / 10, came
    assert came["new"] == 0, came
    assert came["then"] in ("True", ""), came


def test_what_a_session_left_goes_on_in_its_next_call(found: dict[str, Any]) -> None:
    assert sum(found[leaves]["then"] == "True" for leaves in LEAVES) == 3


def test_calls_are_refused_while_a_session_has_used_more_than_its_share(found: dict[str, Any]) -> None:
    burnt, *later, last = found["burns"]
    assert (burnt, last) == (["exited", "", ""], ["exited", "1\n", ""])
    for ended, stdout, stderr in later:
        assert (ended, stdout) == ("timeout", "")
        assert stderr.startswith("the processes of this session have used ")
        assert stderr.endswith(" s of CPU time, and may use 1 s a call: this call was not run")


def test_no_cgroup_is_left(found: dict[str, Any]) -> None:
    assert found.get("cgroups left", []) == []
