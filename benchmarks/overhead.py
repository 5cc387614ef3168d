"""Cost of watching a run: the shares of a step that logging, recording and the sentinel take, in one run.

    python benchmarks/overhead.py [--lengths tailed] [--steps 10]

The step is that of benchmarks/step_time.py with the vLLM engine. Seconds are counted where the loop spends them, so
that waiting for a disk counts; the first three steps do not. `recording` is every row of every token, metric and event,
written and synced; `logging` the line and the progress file; `sentinel` the probe in the engine and in the learner.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 3


def timed(owner: Any, name: str, what: str, seconds: Counter[str]) -> None:
    """Adds the time of each call of owner.name to seconds[what]."""
    function: Callable[..., Any] = getattr(owner, name)

    def measured(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[what] += time.perf_counter() - start

    setattr(owner, name, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="tailed", choices=["tailed", "equal"])
    parser.add_argument("--steps", type=int, default=10, help="counted steps")
    arguments = parser.parse_args()

    from specs.machine.parent import share_cores

    share_cores()  # before anything imports torch
    from step_time_worker import make_base, make_run

    from rpg import train
    from rpg.recording.progress import ProgressFile
    from rpg.run_recorder.recorder import RunRecorder
    from rpg.samplers.sentinel import Sentinel
    from rpg.trainer import Trainer

    seconds: Counter[str] = Counter()
    for owner, name, what in (
        (RunRecorder, "rollouts", "recording"),
        (RunRecorder, "finish_step", "recording"),
        (ProgressFile, "step", "logging"),
        (Sentinel, "check", "sentinel"),
        (Trainer, "step", "step"),
    ):
        timed(owner, name, what, seconds)
    each: list[Counter[str]] = []
    step = Trainer.step

    def counted(*given: Any) -> bool:
        seconds.clear()
        stopping = step(*given)
        each.append(seconds.copy())
        return stopping

    Trainer.step = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_base(directory / "base", arguments.lengths)
        steps = SKIPPED_STEPS + arguments.steps + 1  # the last one saves, and waits for it
        if code := train.main(make_run(directory, arguments.lengths, "all", 0, steps, "vllm")):
            raise SystemExit(code)
    shares = {
        what: statistics.median(took[what] / took["step"] for took in each[SKIPPED_STEPS:-1])
        for what in ("recording", "logging", "sentinel")
    }
    whole = statistics.median(took["step"] for took in each[SKIPPED_STEPS:-1])
    print(f"{arguments.lengths}: a step of {whole:.2f} s")
    for what, share in (*shares.items(), ("together", sum(shares.values()))):
        print(f"{what:10}{share:7.2%}")


if __name__ == "__main__":
    main()
