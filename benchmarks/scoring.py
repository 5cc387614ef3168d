"""Cost of a sealed score: of tasks that only compare, and of those whose responses are scored in a process each.

    python benchmarks/scoring.py [--scores 300] [--tasks chain_sum string_insertion countdown]

One worker of `reward: reasoning_gym`. CPU milliseconds are those of the worker and its children; wall time has the pool
as well. The process alone costs what copying and freeing the worker's page tables does.
"""

import argparse
import time

import psutil
import reasoning_gym

from rpg.rewards.pool import WorkerPool
from rpg.types import Problem
from specs.schema.reward import Reward


def item(task: str) -> Problem:
    """The first problem of a task."""
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    return Problem("p", entry["question"], str(entry["answer"]), task, {"task": task, "config": {}, "entry": entry})


def cpu_seconds() -> float:
    """CPU seconds of all descendants, those that have ended included."""
    return sum(sum(each.cpu_times()[:4]) for each in psutil.Process().children(recursive=True))


def main() -> None:
    """Prints a line a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=300)
    parser.add_argument("--tasks", nargs="+", default=["chain_sum", "string_insertion", "countdown"])
    given = parser.parse_args()
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
