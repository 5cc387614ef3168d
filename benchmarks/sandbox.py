"""Short programs per second in the sandbox, and the cost of one.

    python benchmarks/sandbox.py [--programs 600] [--at-once 2]

A program that prints a sum, a C++ one that does, and a call of a session. CPU milliseconds are those of this process
and of all that came of it; a program's own are a part of them.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from rpg.sandbox import Limits, Program, Sandbox
from rpg.sandbox.room import cores, has_compiler

PYTHON = Program("print(sum(map(int, input().split())))", "1 2 3")
CPP = Program(
    "#include <iostream>\nint main() { int a, n = 0; while (std::cin >> a) n += a; std::cout << n; }",
    "1 2 3",
    language="c++",
)


def cpu_seconds() -> float:
    """CPU seconds of this process and all descendants, those that have ended included."""
    this = psutil.Process()
    times = [this.cpu_times()[:2], *(each.cpu_times()[:4] for each in this.children(recursive=True))]
    return sum(map(sum, times))


def measure(name: str, run: Callable[[int], object], programs: int, at_once: int) -> None:
    """Prints a line."""
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(run, range(2 * at_once)))  # the seals start
        busy, start = cpu_seconds(), time.perf_counter()
        list(threads.map(run, range(programs)))
        wall, busy = time.perf_counter() - start, cpu_seconds() - busy
    print(f"{name:10} {programs / wall:6.0f} a second, {busy / programs * 1e3:.2f} CPU ms each")


def main() -> None:
    """Prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=cores())
    given = parser.parse_args()
    with Sandbox(Limits(processes=8, memory_bytes=1 << 30), at_once=given.at_once) as sandbox:
        measure("python", lambda _: sandbox.run(PYTHON), given.programs, given.at_once)
        if has_compiler("c++"):
            measure("c++", lambda _: sandbox.run(CPP), given.programs, given.at_once)
        with sandbox.session() as session:
            measure("session", lambda n: session.execute(f"{n} + 1"), given.programs, 1)


if __name__ == "__main__":
    main()
