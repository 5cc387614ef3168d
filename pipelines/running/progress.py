"""Progress on stderr: a live line on a terminal, plain lines elsewhere. Other modules write results to stdout."""

import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from pipelines.processes.supervisor import log_tail
from pipelines.running.time_left import TimeLeft, training_seconds_left
from pipelines.terminal.console import SafeConsole
from specs.machine.timed_output import without_time
from specs.metrics import progress_text

_PLAIN_SECONDS = 10.0
"""Shortest time in seconds between two lines about the same stage if stderr is not a terminal."""


_RECORDED = {"done": "finished", "stopped": "cancelled", "busy": "running"}
"""Word shown for the end of a stage or a run -> the record's word, if they differ."""


class ProgressReporter(Protocol):
    """Receiver of the events of a run."""

    def stage_started(self, stage: str, reason: str) -> None: ...
    def training(self, progress: dict[str, Any]) -> None: ...
    def waiting(self, text: str) -> None: ...
    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None: ...
    def note(self, text: str) -> None: ...


class RunsReporter(Protocol):
    """Receiver of the beginnings and ends of a command's runs."""

    def run_started(self, run_id: str, name: str, position: int, total: int, /) -> ProgressReporter: ...
    def run_ended(self, run_id: str, status: str, /) -> None: ...


class Silent:
    """A receiver that shows nothing."""

    def run_started(self, *_told: object) -> ProgressReporter:
        """Does nothing."""
        return self

    def run_ended(self, run_id: str, status: str) -> None:
        """Does nothing."""

    def stage_started(self, stage: str, reason: str) -> None:
        """Does nothing."""

    def training(self, progress: dict[str, Any]) -> None:
        """Does nothing."""

    def waiting(self, text: str) -> None:
        """Does nothing."""

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""


class ConsoleProgress:
    """Progress with a line for each stage of each run. While a stage works, it shows a live line on a terminal, or
    plain lines at intervals.

    Args:
        left: remaining time of the command's runs. With None, or a single run, the time of all runs is not shown.
    """

    def __init__(self, console: Console | None = None, *, left: TimeLeft | None = None) -> None:
        self._console = console or _stderr()
        self._left = left if left is not None and left.total > 1 else None
        self._run_id = ""
        self._live: Status | None = None
        self._stage = ""
        self._last_line = 0.0
        self._last_step = -1
        self._last_text = ""

    def run_started(self, run_id: str, name: str, position: int, total: int) -> ProgressReporter:
        """Prints a heading, with the expected time of this run and those after it."""
        self._run_id = run_id
        self._console.print(f"[bold]\\[{position}/{total}] {run_id}[/]  {escape(name)}{self._estimate()}")
        return self

    def run_ended(self, run_id: str, _status: str) -> None:
        """Prints nothing: the lines of its stages have shown how it ended."""
        if self._left is not None:
            self._left.run_ended(run_id)

    def _estimate(self) -> str:
        words = self._left.words() if self._left is not None else ""
        return f"  (all runs: {words})" if words else ""

    def stage_started(self, stage: str, reason: str) -> None:
        """Shows the stage that works now."""
        if self._left is not None:
            self._left.stage_started(self._run_id, stage)
        self._stage, self._last_line, self._last_step = stage, time.monotonic(), -1
        if self._console.is_terminal:
            self._live = self._console.status(escape(f"{stage}  {_beginning(reason)}"))
            self._live.start()

    def training(self, progress: dict[str, Any]) -> None:
        """Shows step, metrics and time left, from the trainer's progress.json."""
        if not progress.get("steps"):
            return
        step = int(progress.get("step", 0))
        if self._left is not None:
            self._left.training(self._run_id, progress)
        text = f"{self._stage}  {training_line(progress)}{self._estimate()}"
        if self._live is not None:
            self._live.update(escape(text))
        elif step != self._last_step and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._last_line, self._last_step = time.monotonic(), step
            self._console.print(f"  {text}", markup=False)

    def waiting(self, text: str) -> None:
        """Shows the stage's latest message, or the reason why it waits."""
        if self._live is not None:
            self._live.update(escape(f"{self._stage}  {text}"))
        elif text != self._last_text and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._last_line, self._last_text = time.monotonic(), text
            self._console.print(f"  {self._stage}  {text}", markup=False)

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """Prints a permanent line: the stage, how it ended, and how long it took."""
        if self._left is not None:
            self._left.stage_ended(self._run_id, stage, outcome, seconds)
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print(f"  {_ending(stage, outcome, seconds)}")

    def note(self, text: str) -> None:
        """Prints a separate line."""
        self._console.print(text, markup=False)


class ParallelProgress:
    """Progress of concurrent runs. On a terminal there is a live line for each run and one for all, elsewhere plain
    lines at intervals.

    A context manager: the live lines exist within the block.
    """

    def __init__(self, left: TimeLeft, console: Console | None = None) -> None:
        self.left = left
        self.console = console or _stderr()
        self.live: dict[str, str] = {}
        """Run -> its present line, in the order in which the runs began."""
        self._headings: dict[str, str] = {}
        self._display = Live(get_renderable=self._lines, console=self.console, transient=True)

    def __enter__(self) -> "ParallelProgress":
        if self.console.is_terminal:
            self._display.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._display.stop()

    def run_started(self, run_id: str, name: str, position: int, total: int) -> ProgressReporter:
        """Adds a line for the run."""
        self._headings[run_id] = f"[{position}/{total}] {run_id}  {name}"
        self.live[run_id] = ""
        if not self.console.is_terminal:
            self.console.print(self._headings[run_id], markup=False)
        return _RunLine(self, run_id)

    def run_ended(self, run_id: str, status: str) -> None:
        """Removes the run's line and prints a permanent one: how it ended, and the remaining time."""
        self.live.pop(run_id, None)
        self.left.run_ended(run_id)
        self.console.print(f"{self._headings[run_id]}  {_RECORDED.get(status, status)}", style="bold", markup=False)
        if not self.console.is_terminal:
            self.console.print(self._summary(), markup=False)

    def _summary(self) -> str:
        words = self.left.words()
        return f"{self.left.ended} of {self.left.total} runs have ended{', ' if words else ''}{words}"

    def _lines(self) -> Group:
        lines = [f"{self._headings[run_id]}  {text}" for run_id, text in list(self.live.items())]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in [*lines, self._summary()]))


class _RunLine:
    """The line of one of several concurrent runs."""

    def __init__(self, shown: ParallelProgress, run_id: str) -> None:
        self._shown = shown
        self._run_id = run_id
        self._stage = ""
        self._last_line = 0.0
        self._last_text = ""

    def stage_started(self, stage: str, reason: str) -> None:
        """Shows the stage that works now."""
        self._stage, self._last_line = stage, time.monotonic()
        self._shown.left.stage_started(self._run_id, stage)
        self._shown.live[self._run_id] = f"{stage}  {_beginning(reason)}"

    def training(self, progress: dict[str, Any]) -> None:
        """Shows step, metrics and time left, from the trainer's progress.json."""
        if progress.get("steps"):
            self._shown.left.training(self._run_id, progress)
            self.waiting(training_line(progress))

    def waiting(self, text: str) -> None:
        """Shows the stage's latest message, or the reason why it waits."""
        self._shown.live[self._run_id] = f"{self._stage}  {text}"
        late = time.monotonic() - self._last_line >= _PLAIN_SECONDS
        if not self._shown.console.is_terminal and late and text != self._last_text:
            self._last_line, self._last_text = time.monotonic(), text
            self.note(f"{self._stage}  {text}")

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """Prints how the stage ended and how long it took, if there is no live line."""
        self._shown.left.stage_ended(self._run_id, stage, outcome, seconds)
        if not self._shown.console.is_terminal:
            self._shown.console.print(f"  {self._run_id}  {_ending(stage, outcome, seconds)}")

    def note(self, text: str) -> None:
        """Prints a separate line."""
        self._shown.console.print(f"  {self._run_id}  {text.strip()}", markup=False)


def _stderr() -> Console:
    return SafeConsole(stderr=True, soft_wrap=True)


def _beginning(reason: str) -> str:
    """Returns the text for a stage until its first message. It includes the reason why the stage runs, unless that is
    the usual one."""
    return "starting" if reason == "new" else f"starting: {reason}"


def _ending(stage: str, outcome: str, seconds: float) -> str:
    colour = {"done": "green", "cached": "cyan", "paused": "yellow"}.get(outcome, "red")
    took = "" if outcome == "cached" else f"  {seconds:.1f} s"
    return f"{stage:<9} [{colour}]{_RECORDED.get(outcome, outcome)}[/]{took}"


def logged_line(log: Path, stage: str, *, since: int = 0) -> str:
    """Returns the last log line of a stage that has no steps. Leaves out the time and the stage's name.

    Empty if the log has nothing after its first `since` bytes, or if the line says that the stage is done: its outcome
    and duration are about to be shown.
    """
    line = without_time(log_tail(log, 1, since=since)).removeprefix(f"{stage}: ")
    return "" if line.startswith("done in ") else line


def training_line(progress: dict[str, Any]) -> str:
    """Returns `step 12/60  reward 0.43  kl 0.0012  3.1 s left`."""
    step, steps = int(progress.get("step", 0)), int(progress.get("steps", 0))
    metrics = progress.get("metrics") or {}
    parts = [f"step {step}/{steps}", *filter(None, [progress_text(metrics)])]
    if not_scored := progress.get("not_scored"):
        parts.append(f"not scored: {not_scored}")
    if evaluation := progress.get("evaluation"):
        parts.append(evaluation)
    if seconds := training_seconds_left(progress):
        parts.append(f"{seconds:.0f} s left")
    return "  ".join(parts)
