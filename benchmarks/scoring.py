"""Cost of a sealed score: of tasks that only compare, of those whose responses are scored in a process each, and of
programs by their tests.

    python benchmarks/scoring.py [--scores 300] [--tasks chain_sum string_insertion countdown] [--programs asserts ...]

One worker of `reward: reasoning_gym`, and as many threads of `reward: code` as there are cores, with groups of 8
responses to a problem of three tests (`check`: one of 500 calls). CPU milliseconds are those of the workers and the
sandbox; wall time has the pool as well. The process alone costs what copying and freeing the worker's page tables does.
"""

import argparse
import time
from contextlib import suppress
from typing import Any

import psutil

from rpg.rewards import open_scorer
from rpg.rewards.pool import WorkerPool
from rpg.types import Problem
from specs.schema.reward import Reward

GROUP = 8
FUNCTION = "def double(n):\n    return n + n"
CLASS = "class Double:\n    def of(self, n):\n        return n + n"
CHECK = "def check(candidate):\n    for n in range(500):\n        assert candidate(n) == 2 * n\ncheck(double)"
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "asserts": (FUNCTION, {"kind": "assert", "hidden": [f"assert double({n}) == {2 * n}" for n in range(3)]}),
    "check": (FUNCTION, {"kind": "assert", "hidden": [CHECK]}),
    "classes": (CLASS, {"kind": "assert", "hidden": [f"assert Double().of({n}) == {2 * n}" for n in range(3)]}),
    "calls": (FUNCTION, {"kind": "call", "hidden": [([n], 2 * n) for n in range(3)], "function": "double"}),
    "stdin": ("print(2 * int(input()))", {"kind": "stdin", "hidden": [(str(n), str(2 * n)) for n in range(3)]}),
}
"""Name -> program, and its tests."""


def item(task: str) -> Problem:
    """The first problem of a task."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    return Problem("p", entry["question"], str(entry["answer"]), task, {"task": task, "config": {}, "entry": entry})


def cpu_seconds() -> float:
    """CPU seconds of all descendants, those that have ended included."""
    total = 0.0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])
    return total


def score_programs(name: str, scores: int) -> None:
    """Prints a line for programs of one kind."""
    program, tests = PROGRAMS[name]
    whole = {"shown": [], "function": "", "setup": "", "grader": "apps", **tests}
    problems = [
        Problem(str(n), "?", "", name, {"tests": {**whole, "setup": f"# problem {n // GROUP}"}}) for n in range(scores)
    ]
    with open_scorer(Reward.model_validate({"type": "code", "extract": "whole"})) as scorer:
        scorer.score(problems[:4], [program] * 4)  # the sandbox starts
        busy, start = cpu_seconds(), time.perf_counter()
        values = {score.value for score in scorer.score(problems, [program] * scores)}
        wall, busy = time.perf_counter() - start, cpu_seconds() - busy
    assert values == {1.0}
    cost = f"{busy / scores * 1e3:.2f} CPU ms, {wall / scores * 1e3:.2f} ms a score"
    print(f"{name:20} {'in the sandbox':18} {cost}")


def main() -> None:
    """Prints a line a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=300)
    parser.add_argument("--tasks", nargs="*", default=["chain_sum", "string_insertion", "countdown"])
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    given = parser.parse_args()
    for name in given.programs:
        score_programs(name, given.scores)
    reward = Reward.model_validate({"type": "reasoning_gym"})
    with WorkerPool(reward, workers=1) as pool:
        for task in given.tasks:
            problem = item(task)
            pool.score([problem], ["x"])  # the worker starts
            busy, start = cpu_seconds(), time.perf_counter()
            pool.score([problem] * given.scores, ["x"] * given.scores)
            wall, busy = time.perf_counter() - start, cpu_seconds() - busy
            alone = "in a process alone" if reward.runs(problem) else "in the worker"
            cost = f"{busy / given.scores * 1e3:.2f} CPU ms, {wall / given.scores * 1e3:.2f} ms a score"
            print(f"{task:20} {alone:18} {cost}")


if __name__ == "__main__":
    main()
