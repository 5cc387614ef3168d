"""Shows the progress of training: a live line on a terminal, one line per step elsewhere, and progress.json for
programs."""

import shutil
import sys
from collections.abc import Mapping

from rpg.recording.run_directory import RunDirectory
from specs.machine.fence import Fence
from specs.machine.files import now
from specs.metrics import progress_text


class ProgressFile:
    """A reporter of progress to stderr and to the run's directory."""

    def __init__(self, run: RunDirectory, fence: Fence, *, steps: int, speaks: bool) -> None:
        """Starts the report. `speaks`: whether this rank reports anything; only rank 0 does."""
        self._run = run
        self._fence = fence
        self._steps = steps
        self._speaks = speaks
        self._started_at = now("microseconds")
        self._live = sys.stderr.isatty()
        self._evaluation = ""

    def say(self, message: str) -> None:
        """Prints a separate line."""
        if self._speaks:
            print(f"train: {message}", file=sys.stderr, flush=True)

    def evaluated(self, step: int, means: Mapping[str, float]) -> None:
        """Adds an evaluation to the reports of all later steps: the accuracy on each set, named `mean@k on SET`."""
        figures = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        self._evaluation = f"{figures} at step {step}"

    def step(self, step: int, metrics: Mapping[str, float], *, not_scored: str = "") -> None:
        """Reports a step whose records are on disk. Raises SupersededError if another trainer took over the run.

        Args:
            not_scored: number of responses on which the reward failed, and why; empty if it failed on none.
        """
        if not self._speaks:
            return
        self._fence.check()
        line = self.line(step, metrics)
        if not_scored:
            line += f"  not scored: {not_scored}"
        if self._live:
            end = "\n" if step == self._steps else ""
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[2K{line[:width]}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._run.report_progress(
            {
                "step": step,
                "steps": self._steps,
                "started_at": self._started_at,
                "metrics": dict(metrics),
                "phase": "training",
                "evaluation": self._evaluation,
                "not_scored": not_scored,
            }
        )

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Returns a line about the step."""
        width = len(str(self._steps))
        clipped = "/".join(
            f"{100 * metrics[name]:.1f}" if name in metrics else "-"
            for name in ("clip_fraction/low", "clip_fraction/high", "clip_fraction/dual")
        )
        return (
            f"step {step:>{width}}/{self._steps}  {progress_text(metrics)}  clipped {clipped} %"
            f"  {metrics['tokens_per_second/rollout']:,.0f} sampled and"
            f" {metrics['tokens_per_second/train']:,.0f} trained tokens/s  {metrics['time/step']:.2f} s"
        )
