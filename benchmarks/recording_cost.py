"""Record's share of a run's CPU time: writing rows in the trainer, and ingesting and merging them beside it.

    python benchmarks/recording_cost.py [--steps 60]

The run is that of benchmarks/step_time.py with the transformers engine and long-tailed lengths: 64 responses a step,
every token recorded. CPU time of the trainer's process is counted, all its threads together, so that other processes
on the machine change little. The ingester works in a process of its own, as a flow does: every 30 seconds, and once
more when training has ended, which makes one file a table. The first step, and the imports, do not count.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

INGEST_SECONDS = 30.0
"""Seconds between two ingests, as in flows."""


def counted(owner: Any, name: str, what: str, seconds: Counter[str]) -> None:
    """Adds the CPU time of each call of owner.name to seconds[what]."""
    function: Callable[..., Any] = getattr(owner, name)

    def measured(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds[what] += time.process_time() - start

    setattr(owner, name, measured)


def ingest_now_and_then(home: Path, training: Connection) -> None:
    """Ingests until it is told that training has ended, and answers with its CPU seconds and how often it ingested."""
    from storage.ingest import ingest

    training.recv()
    start, times, ended = time.process_time(), 0, False
    while not ended:
        ended = training.poll(INGEST_SECONDS)
        ingest(home, compact="run", whole=ended)
        times += 1
    training.send((time.process_time() - start, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="counted steps")
    arguments = parser.parse_args()

    from specs.machine.parent import share_cores

    share_cores()  # before anything imports torch
    from step_time_worker import make_base, make_run

    from rpg import train
    from rpg.run_recorder.recorder import RunRecorder
    from rpg.trainer import Trainer

    with tempfile.TemporaryDirectory() as scratch:
        directory, home = Path(scratch), Path(scratch) / "home"
        training, told = multiprocessing.Pipe()
        ingester = multiprocessing.get_context("spawn").Process(target=ingest_now_and_then, args=(home, told))
        ingester.start()
        make_base(directory / "base", "tailed")
        run = make_run(directory, "tailed", "all", 0, arguments.steps + 1, "transformers")
        (home / "runs").mkdir(parents=True)
        (home / "runs" / "run").symlink_to(run)

        seconds: Counter[str] = Counter()
        for owner, name in ((RunRecorder, "rollouts"), (RunRecorder, "finish_step"), (Trainer, "step")):
            counted(owner, name, "step" if owner is Trainer else "rows", seconds)
        step, first = Trainer.step, True

        def first_left_out(*given: Any) -> bool:
            nonlocal first
            stopping: bool = step(*given)
            if first:
                first = False
                seconds.clear()
                training.send("begun")
            return stopping

        Trainer.step = first_left_out  # type: ignore[method-assign]
        if code := train.main(run):
            raise SystemExit(code)
        training.send("ended")
        seconds["index"], times = training.recv()
        ingester.join()
        num_bytes = sum(path.stat().st_size for path in run.glob("segments/*/*.parquet"))
    each = seconds["step"] / arguments.steps
    print(f"{arguments.steps} steps of {each:.2f} CPU s; {num_bytes / 2**20:.1f} MiB recorded")
    seconds["together"] = seconds["rows"] + seconds["index"]
    for what, label in (("rows", "writing rows"), ("index", f"ingesting, {times} times"), ("together", "together")):
        print(f"{label:24}{seconds[what]:8.2f} s{seconds[what] / seconds['step']:8.2%}")


if __name__ == "__main__":
    main()
