"""The tool `python`, whose interpreter may use so much of the processor and no more."""

import pytest

from rpg.sandbox import Limits, Sandbox
from rpg.tools import ToolError
from rpg.tools.functions.python import _Interpreter

BURNS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        while time.process_time() < 0.7: pass
        os._exit(0)
for _ in range(3): os.wait()
n = 1
"""


@pytest.mark.needs("bubblewrap")
def test_the_policy_is_told_that_its_processes_have_used_too_much() -> None:
    with Sandbox(Limits(seconds=60.0, cpu_seconds=1, processes=8), at_once=1) as sandbox:
        interpreter = _Interpreter(sandbox.session())
        assert interpreter.call({"code": BURNS}) == ""
        with pytest.raises(ToolError, match=r"have used [23] s of CPU time, and may use 1 s a call"):
            interpreter.call({"code": "print(n)"})
        assert interpreter.call({"code": "print(n)"}) == "1"
        interpreter.close()
