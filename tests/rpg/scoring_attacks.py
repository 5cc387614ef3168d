"""Answers that attack the process which scores them, and what came of each as JSON. Run by test_scoring_sandbox.py.

    python scoring_attacks.py evaluated|misbehaviour DIRECTORY

DIRECTORY is writable for everybody and holds `secret`.
"""

import base64
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from rpg.rewards import Score, open_scorer
from rpg.types import Problem
from specs.schema.reward import Reward

EVALUATES = """
def score(response, answer):
    try:
        eval(response)
    except Exception:
        pass
    return float(answer == response)
"""
"""A reward that runs a response's text."""
PROBLEM = Problem("p", "?", "right", "d")
THAT_EVALUATE = (
    *("countdown", "puzzle24", "string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
)
EVIDENCE = """
import ctypes, json, os, socket, threading
def tried(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__
def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
evidence = {
    "environment": dict(os.environ),
    "user": os.getuid(),
    "rights": ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
    "wrote": tried(lambda: open(DIRECTORY + "/written", "w")),
    "wrote its own code": tried(lambda: open(RUNTIME, "a")),
    "read": tried(lambda: open(DIRECTORY + "/secret").read()),
    "home": tried(lambda: os.listdir(HOME)),
    "users": tried(lambda: open("/etc/passwd").read()),
    "processes": tried(lambda: os.listdir("/proc")),
    "connected": tried(lambda: socket.create_connection(("127.0.0.1", PORT), 2)),
    "forked": tried(fork),
    "shell": tried(lambda: os.system("true")),
    "thread": tried(lambda: threading.Thread(target=int).start()),
    "attached to its parent": tried(lambda: ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)),
    "read the next request": tried(lambda: os.read(0, 1)),
}
os.write(2, json.dumps(evidence).encode())
os._exit(3)
"""


def main(what: str, directory: Path) -> None:
    if what == "evaluated":
        print(json.dumps(attacked(directory)))
    else:
        print(json.dumps(misbehaved()))
    left = psutil.Process().children(recursive=True)
    assert not left, left


def item(task: str) -> Problem:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    return Problem("p", entry["question"], str(entry["answer"]), task, {"task": task, "config": {}, "entry": entry})


def code(text: str) -> str:
    """An answer that runs the code when it is evaluated, by Python or by sympy."""
    return f"exec(__import__('base64').b64decode('{base64.b64encode(text.encode()).decode()}'), {{}})"


def attacked(directory: Path) -> Any:
    """Effect that the answer could have."""
    os.environ["HF_TOKEN"] = "hf_secret"
    with socket.create_server(("127.0.0.1", 0)) as server, scorer(10.0) as pool:
        known = {
            "DIRECTORY": str(directory),
            "RUNTIME": json.__file__,
            "HOME": str(Path.home()),
            "PORT": server.getsockname()[1],
        }
        attack = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + EVIDENCE
        (score,) = pool.score([PROBLEM], [code(attack)])
    return evidence(score)


def evidence(score: Score) -> Any:
    """Returns the attack's output on standard error before it ended the process."""
    told = (score.error or "").removeprefix("the scorer's process died (exit 3) ")
    return json.loads(told) if told.startswith("{") else {"not run": str(score)}


MISBEHAVIOUR = {
    "loops": "while True: pass",
    "takes memory": "a = []\nwhile True: a.append(bytearray(1 << 28))",
    "fills the disk": "import os\nn = 0\nwhile True:\n n += 1\n open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
    "forks": "import os\nwhile True: os.fork()",
    "writes without end": "import os\nwhile True: os.write(ANSWERS, b'x' * 65536)",
    "drips": "import os, time\nwhile True: os.write(ANSWERS, b'x'); time.sleep(0.01)",
    "drips to the end": (
        "import os, time\nwhile True:\n try:\n  while True: os.write(ANSWERS, b'x'); time.sleep(0.01)\n"
        " except BaseException: pass"
    ),
    "writes on standard error": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "is no verdict": "import os\nos.write(ANSWERS, b'[1, 2]\\n')",
    "is a pickle": "import os, pickle\nos.write(ANSWERS, pickle.dumps(print) + b'\\n')",
    "is not a number": 'import os\nos.write(ANSWERS, b\'{"value": NaN, "correct": true}\\n\')',
    "is nested": "import os\nos.write(ANSWERS, b'[' * 100000 + b'\\n')",
    "says it twice": (
        'import os\nline = b\'{"value": 0.0, "correct": false}\\n\'\nos.write(ANSWERS, line + line); os._exit(0)'
    ),
    "closes its output": "import os, time\nos.close(ANSWERS); time.sleep(60)",
    "kills": "import os, signal\ntry: os.kill(1, signal.SIGKILL)\nexcept OSError: pass\nos.kill(-1, signal.SIGKILL)",
}
# The pipe of verdicts: the one descriptor above standard error that can be written.
ANSWERS = """
import fcntl, os
def writes(fd):
    try:
        return not os.get_inheritable(fd) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_WRONLY
    except OSError:
        return False
ANSWERS = next(fd for fd in range(3, 64) if writes(fd))
"""


def misbehaved() -> dict[str, Any]:
    """What came of each answer, and of a right one after it."""
    found = {}
    with scorer(1.0, workers=1) as pool:
        for name, text in MISBEHAVIOUR.items():
            bad, good = pool.score([PROBLEM] * 2, [code(ANSWERS + text), PROBLEM.answer])
            found[name] = {"value": bad.value, "error": bad.error, "next": good.value}
    return found


def evaluating(timeout_seconds: float = 10.0) -> Reward:
    """The reward that runs a response's text."""
    fields = {"type": "python", "path": "evaluates.py", "code": EVALUATES, "timeout_seconds": timeout_seconds}
    return Reward.model_validate(fields)


def scorer(timeout_seconds: float, workers: int = 2) -> Any:
    from rpg.rewards.pool import WorkerPool

    reward = evaluating(timeout_seconds)
    return open_scorer(reward) if workers > 1 else WorkerPool(reward, workers=workers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
