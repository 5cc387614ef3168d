"""A campaign of measurements: each step is a process of its own with a time limit, and each row is kept as it comes.

`python benchmarks/campaign.py JOB.json` makes one step, in the process that is it. No torch here.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from specs.machine.parent import die_with_parent  # noqa: E402

Row = dict[str, Any]
"""step, part, device, seconds, and `figures` or why it `failed`."""
_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER."""
_CLEANING_SECONDS = 5.0
"""Part of a limit, for the end of a step's processes."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement."""

    part: str
    name: str
    """No other step has it."""
    function: str
    """`MODULE:FUNCTION`; it takes the kind of device, cpu or cuda, and the arguments, and returns figures by name. The
    module's `prepare`, if it has one, gets the same arguments before, and computes nothing on the device."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    """It needs this optional package."""
    needs_gpu: bool = False
    memory_gib: float = 0.0
    """Memory that it needs if it runs on a GPU."""
    alone: bool = True
    """Nothing else computes meanwhile, so that its times count."""

    def lacks(self, device: str) -> str:
        """Returns the reason why it cannot run here; empty if it can."""
        if self.needs_gpu and device == "cpu":
            return "needs a GPU"
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if device == "cuda" and self.memory_gib > (there := _memory_gib()):
            return f"needs {self.memory_gib:g} GiB, the GPU has {there:.0f}"
        return ""


@cache
def _memory_gib() -> float:
    """Returns the memory of the smallest GPU here, from nvidia-smi; 0 without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(float(line) for line in listing.split()) / 1024
    return 0.0


def rows_of(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each step on each kind of device. A line that was cut off during writing is skipped."""
    rows: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows[row["device"], row["step"]] = row
    return rows


def run(steps: Sequence[Step], *, device: str, rows: Path, limit: float, again: bool = False, at_once: int = 2) -> bool:
    """Makes the steps of which the file has no row, in their order. Returns whether none of all has failed.

    A step's process begins before its turn, so that it has imported what it needs when the device is free. For this
    process to end all that a step leaves, it becomes the parent of its orphans: it should have no children of other
    kinds.

    Args:
        rows: JSON lines, written on. It is of one kind of GPU. What the steps print goes to a file beside it.
        limit: seconds that a step has, its end included.
        again: whether steps that failed are made again.
        at_once: processes, of which all but one wait for their turn if a step needs the whole device.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    known = rows_of(rows)
    passed, waiting = True, deque[Step]()
    for step in steps:
        row = known.get((device, step.name))
        if row is not None and not (again and "failed" in row):
            passed &= "failed" not in row
        elif reason := step.lacks(device):
            print(f"  {step.name}: not made, {reason}", flush=True)
        else:
            waiting.append(step)
    begun: list[_Process] = []
    try:
        while waiting or begun:
            while waiting and len(begun) < at_once:
                begun.append(_Process(waiting.popleft(), device, limit))
            for process in begun:
                if not process.has_turn and not _takes_turn(process, begun):
                    break
            for process in [each for each in begun if each.is_over()]:
                begun.remove(process)
                row, log = process.end()
                passed &= "failed" not in row
                _append(rows, json.dumps(row))
                _append(rows.with_suffix(".log"), f"==== {row['step']}\n{log}")
                print(f"  {row['step']}, {row['seconds']:.0f} s: {_said(row)}", flush=True)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in begun:
            process.end()
        _end(lambda: psutil.Process().children(recursive=True))
    return passed


def _append(path: Path, text: str) -> None:
    """Lines that are on the disk before the next step begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        cut_off = file.tell() and not path.read_bytes().endswith(b"\n")
        file.write(b"\n" * bool(cut_off) + text.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _takes_turn(process: "_Process", begun: Sequence["_Process"]) -> bool:
    """Lets the process continue if the measuring processes leave it the device."""
    measuring = [each for each in begun if each.has_turn]
    if measuring and (process.step.alone or any(each.step.alone for each in measuring)):
        return False
    process.go_on()
    return True


class _Process:
    """The process of a step. What it starts has its directory as TMPDIR, by which orphans are known too."""

    def __init__(self, step: Step, device: str, limit: float) -> None:
        self.step = step
        self.has_turn = False
        self._device, self._limit = device, limit
        self._start = time.monotonic()
        self._temporary = tempfile.TemporaryDirectory(prefix="rpg-step-", ignore_cleanup_errors=True)
        job, self._out, self._log = (Path(self._temporary.name) / name for name in ("job.json", "figures.json", "log"))
        work = {"function": step.function, "arguments": dict(step.arguments), "device": device, "out": str(self._out)}
        job.write_text(json.dumps(work))
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(job)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": self._temporary.name},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def go_on(self) -> None:
        """Its time begins."""
        self.has_turn = True
        self._start = time.monotonic()
        assert self._process.stdin
        self._process.stdin.close()

    def is_over(self) -> bool:
        """Whether it has ended, or its time has."""
        return self._process.poll() is not None or (self.has_turn and self._seconds() > self._limit - _CLEANING_SECONDS)

    def end(self) -> tuple[Row, str]:
        """Ends it with all its processes. Returns its row and its output."""
        code = self._process.poll()
        _end(self._descendants)
        row: Row = {"step": self.step.name, "part": self.step.part, "device": self._device}
        log = self._log.read_bytes().decode(errors="replace").strip()
        if self._out.exists():
            row["figures"] = json.loads(self._out.read_text())
        else:
            why = f"longer than {self._limit:g} s" if code is None else f"exited with {code}"
            row |= {"failed": why, "log": log[-4000:]}
        self._temporary.cleanup()
        return {**row, "seconds": round(self._seconds(), 1)}, log

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _descendants(self) -> list[psutil.Process]:
        own = set[psutil.Process]()
        if self._process.poll() is None:  # else its number may be another process's
            with suppress(psutil.Error):
                step = psutil.Process(self._process.pid)
                own = {step, *step.children(recursive=True)}
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                is_left = process.status() != psutil.STATUS_ZOMBIE
                if is_left and (process in own or process.environ().get("TMPDIR") == self._temporary.name):
                    found.append(process)
        return found


def _end(left: Callable[[], Sequence[psutil.Process]]) -> None:
    """Kills all that are left, until none is or the time is over."""
    until = time.monotonic() + _CLEANING_SECONDS
    while (processes := left()) and time.monotonic() < until:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=0.5)


def make(job: Mapping[str, Any]) -> None:
    """Makes one step in this process when its turn has come, and leaves its figures."""
    if job["device"] == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed reads as it is imported
    name, _, function = job["function"].partition(":")
    module = import_module(name)
    if hasattr(module, "prepare"):
        module.prepare(job["device"], **job["arguments"])
    sys.stdin.read()
    figures = getattr(module, function)(job["device"], **job["arguments"])
    unfinished = Path(job["out"]).with_suffix(".part")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(job["out"])


def tables(rows: Sequence[Row], derive: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows) -> Iterator[str]:
    """Lines of Markdown tables: a part has one for each set of figures, and a list of what failed.

    Args:
        derive: gives the rows figures that follow from several of them.
    """
    shown = [row for row in derive(rows) if "figures" in row]
    for part, device in dict.fromkeys((row["part"], row["device"]) for row in rows):
        of_part = [row for row in shown if (row["part"], row["device"]) == (part, device)]
        for names in dict.fromkeys(tuple(row["figures"]) for row in of_part):
            yield f"\n| {part}, {device} | " + " | ".join(names) + " |"
            yield "|---" * (len(names) + 1) + "|"
            for row in of_part:
                if tuple(row["figures"]) == names:
                    yield f"| {row['step']} | " + " | ".join(map(_shown, row["figures"].values())) + " |"
        failed = [row for row in rows if "failed" in row and (row["part"], row["device"]) == (part, device)]
        if failed:
            yield ""
        yield from (f"- {row['step']}: {_said(row)}" for row in failed)


def _said(row: Row) -> str:
    if "failed" in row:
        last = row["log"].splitlines()[-1:] or ["it said nothing"]
        return f"FAILED, {row['failed']}: {last[0]}"
    return ", ".join(f"{key} {_shown(value)}" for key, value in row["figures"].items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def command_line(
    arguments: Sequence[str],
    steps: Sequence[Step],
    *,
    about: str,
    derive: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows,
) -> int:
    """Runs `campaign` with its options; returns 1 if a step failed."""
    parts = list(dict.fromkeys(step.part for step in steps))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["campaign"])
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="these alone, by their names")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=Path, default=Path("gpu-figures.jsonl"), help="where rows are kept")
    parser.add_argument("--step-limit", type=float, default=540.0, help="seconds that a step has")
    parser.add_argument("--at-once", type=int, default=max(2, min(6, (os.cpu_count() or 2) // 2)), help="processes")
    parser.add_argument("--again", action="store_true", help="make steps that failed again")
    parser.add_argument("--show", action="store_true", help="print the tables of the rows, and measure nothing")
    parser.add_argument("--list", action="store_true", help="print the steps")
    asked = parser.parse_args(arguments)
    chosen = [step for step in steps if step.part in asked.parts and (not asked.steps or step.name in asked.steps)]
    if unknown := set(asked.steps or ()) - {step.name for step in chosen}:
        parser.error(f"no step {', '.join(sorted(unknown))}; --list prints them")
    if asked.list:
        print("\n".join(f"{step.part}: {step.name}" for step in chosen))
        return 0
    passed = True
    if not asked.show:
        options = {"limit": asked.step_limit, "again": asked.again, "at_once": asked.at_once}
        passed = run(chosen, device=asked.device, rows=asked.rows, **options)
    print("\n".join(tables(list(rows_of(asked.rows).values()), derive)))
    return int(not passed)


if __name__ == "__main__":
    make(json.loads(Path(sys.argv[1]).read_text()))
