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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement."""

    part: str
    name: str
    """No other step has it."""
    function: str
    """`MODULE:FUNCTION`; it takes the kind of device, cpu or cuda, and the arguments, and returns figures by name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    """It needs this optional package."""
    needs_gpu: bool = False

    def lacks(self, device: str) -> str:
        """Why it cannot be made here; empty where it can."""
        if self.needs_gpu and device == "cpu":
            return "needs a GPU"
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


def rows_of(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each step on each kind of device. A line that was cut off as it was written is none."""
    rows: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows[row["device"], row["step"]] = row
    return rows


def run(steps: Sequence[Step], *, device: str, rows: Path, limit: float, again: bool = False) -> bool:
    """Makes the steps of which the file has no row, in their order. Returns whether none of all has failed.

    For this process to end all that a step leaves, it becomes the parent of its orphans: it should have no children of
    other kinds.

    Args:
        rows: JSON lines, written on. It is of one kind of GPU.
        limit: seconds that a step has, its end included.
        again: whether steps that failed are made again.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    known = rows_of(rows)
    passed = True
    for step in steps:
        row = known.get((device, step.name))
        if row is None or (again and "failed" in row):
            if reason := step.lacks(device):
                print(f"  {step.name}: not made, {reason}", flush=True)
                continue
            row = _made(step, device, limit)
            _append(rows, row)
            print(f"  {step.name}, {row['seconds']:.0f} s: {_said(row)}", flush=True)
        passed &= "failed" not in row
    return passed


def _append(path: Path, row: Row) -> None:
    """On the disk before the next step begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        cut_off = file.tell() and not path.read_bytes().endswith(b"\n")
        file.write(b"\n" * bool(cut_off) + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _made(step: Step, device: str, limit: float) -> Row:
    """The row of a step."""
    start = time.monotonic()
    row: Row = {"step": step.name, "part": step.part, "device": device}
    with tempfile.TemporaryDirectory(prefix="rpg-step-", ignore_cleanup_errors=True) as directory:
        job, out, log = (Path(directory) / name for name in ("job.json", "figures.json", "log"))
        work = {"function": step.function, "arguments": dict(step.arguments), "device": device, "out": str(out)}
        job.write_text(json.dumps(work))
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, str(job)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": directory},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            try:
                code = process.wait(max(1.0, limit - _CLEANING_SECONDS))
                failure = f"exited with {code}"
            except subprocess.TimeoutExpired:
                failure = f"longer than {limit:g} s"
            finally:
                _end_descendants()
        if out.exists():
            row["figures"] = json.loads(out.read_text())
        else:
            row |= {"failed": failure, "log": log.read_bytes()[-4000:].decode(errors="replace").strip()}
    return {**row, "seconds": round(time.monotonic() - start, 1)}


def _end_descendants() -> None:
    """Kills all processes that descend from this one, orphans of sessions of their own among them."""
    until = time.monotonic() + _CLEANING_SECONDS
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)


def make(job: Mapping[str, Any]) -> None:
    """Makes one step in this process, and leaves its figures."""
    if job["device"] == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed reads as it is imported
    module, _, name = job["function"].partition(":")
    figures = getattr(import_module(module), name)(job["device"], **job["arguments"])
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
    """`campaign` with its options; returns 1 where a step failed."""
    parts = list(dict.fromkeys(step.part for step in steps))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["campaign"])
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="these alone, by their names")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=Path, default=Path("gpu-figures.jsonl"), help="where rows are kept")
    parser.add_argument("--step-limit", type=float, default=540.0, help="seconds that a step has")
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
        passed = run(chosen, device=asked.device, rows=asked.rows, limit=asked.step_limit, again=asked.again)
    print("\n".join(tables(list(rows_of(asked.rows).values()), derive)))
    return int(not passed)


if __name__ == "__main__":
    make(json.loads(Path(sys.argv[1]).read_text()))
