"""A stage's log has the time before each line; a process whose output goes elsewhere prints as ever."""

import os
import re
import subprocess
import sys

from specs.machine.timed_output import TIMED, without_time

PRINTS = """
import sys
from specs.machine.timed_output import time_output

time_output()
print("step", 1, end=" ")
print("of 2", flush=True)
print()
print("step 2\\nlast step")
sys.stdout.flush()
raise ValueError("wrong")
"""
SAID = [
    *("step 1 of 2", "", "step 2", "last step", "Traceback (most recent call last):"),
    *('  File "<string>", line 11, in <module>', "ValueError: wrong"),
]


def printed(**environment: str) -> list[str]:
    """The lines of stdout and stderr together, as in a log."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_each_line_of_a_log_has_its_time_and_can_be_shown_without_it() -> None:
    lines = printed(**{TIMED: "1"})
    assert [without_time(line) for line in lines] == SAID
    timed = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    assert timed == [line for line in lines if line]


def test_output_that_goes_elsewhere_has_no_times() -> None:
    assert printed(**{TIMED: ""}) == SAID
