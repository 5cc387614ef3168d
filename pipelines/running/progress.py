"""Progress on stderr: a live line on a terminal, plain lines elsewhere. Results go to stdout, elsewhere."""

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from specs.metrics import progress_text

_PLAIN_SECONDS = 10.0
"""Least time between two lines about the same stage where stderr is no terminal."""


class ProgressReporter(Protocol):
    """Is called with what happens while an experiment runs."""

    def run_started(self, run_id: str, name: str, position: int, total: int) -> None: ...
    def stage_started(self, stage: str, reason: str) -> None: ...
    def training(self, progress: dict[str, Any]) -> None: ...
    def waiting(self, text: str) -> None: ...
    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """For callers that show nothing."""

    def run_started(self, run_id: str, name: str, position: int, total: int) -> None:
        """Nothing."""

    def stage_started(self, stage: str, reason: str) -> None:
        """Nothing."""

    def training(self, progress: dict[str, Any]) -> None:
        """Nothing."""

    def waiting(self, text: str) -> None:
        """Nothing."""

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class ConsoleProgress:
    """Lines per run and stage; while a stage works, a live line on a terminal or a plain one now and then."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live: Status | None = None
        self._stage = ""
        self._last_line = 0.0
        self._last_step = -1
        self._last_text = ""

    def run_started(self, run_id: str, name: str, position: int, total: int) -> None:
        """Prints a heading."""
        self._console.print(f"[bold]\\[{position}/{total}] {run_id}[/]  {name}")

    def stage_started(self, stage: str, reason: str) -> None:
        """Shows which stage works now."""
        self._stage, self._last_line, self._last_step = stage, time.monotonic(), -1
        if self._console.is_terminal:
            self._live = self._console.status(f"{stage}  {reason}")
            self._live.start()

    def training(self, progress: dict[str, Any]) -> None:
        """Shows step, metrics and time left, from the trainer's progress.json."""
        if not progress.get("steps"):
            return
        step = int(progress.get("step", 0))
        text = f"{self._stage}  {training_line(progress)}"
        if self._live is not None:
            self._live.update(text)
        elif step != self._last_step and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._last_line, self._last_step = time.monotonic(), step
            self._console.print(f"  {text}")

    def waiting(self, text: str) -> None:
        """Shows what the stage says of itself, or what it waits for."""
        if self._live is not None:
            self._live.update(escape(f"{self._stage}  {text}"))
        elif text != self._last_text and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._last_line, self._last_text = time.monotonic(), text
            self._console.print(f"  {self._stage}  {text}", markup=False)

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """Prints a line that stays: the stage, how it ended and how long it took."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        colour = {"done": "green", "cached": "cyan", "paused": "yellow"}.get(outcome, "red")
        took = "" if outcome == "cached" else f"  {seconds:.1f} s"
        self._console.print(f"  {stage:<9} [{colour}]{outcome}[/]{took}")

    def note(self, text: str) -> None:
        """Prints a line of its own."""
        self._console.print(text, markup=False)


def training_line(progress: dict[str, Any]) -> str:
    """`step 12/60  reward 0.43  kl 0.0012  3.1 s left`."""
    step, steps = int(progress.get("step", 0)), int(progress.get("steps", 0))
    metrics = progress.get("metrics") or {}
    parts = [f"step {step}/{steps}", *filter(None, [progress_text(metrics)])]
    if evaluation := progress.get("evaluation"):
        parts.append(evaluation)
    seconds = (metrics.get("time/step") or 0.0) - (metrics.get("time/evaluate") or 0.0)
    if seconds and steps > step:
        parts.append(f"{seconds * (steps - step):.0f} s left")
    return "  ".join(parts)
