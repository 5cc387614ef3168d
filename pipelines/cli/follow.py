"""Runs under way: their logs and their progress, read from the run's directory as it grows."""

import sys
import time
from pathlib import Path

from pipelines.home import Home
from pipelines.running.progress import training_line
from pipelines.runs import log_files, log_stage, read_state, status_of
from rpg.files import read_json
from specs.errors import RpgError

_POLL_SECONDS = 0.5
_LIVE = ("pending", "running")


def print_logs(home: Home, run_id: str, *, stage: str | None, follow: bool) -> None:
    """Writes the logs to stdout, each under its name if there are several; with `follow` until the run ends."""
    offsets: dict[Path, int] = {}
    last: Path | None = None
    while True:
        live = follow and status_of(home, run_id) in _LIVE  # asked before reading: what it writes last is read too
        files = _chosen(home, run_id, stage)
        if not files and not live:
            raise RpgError(_no_log(home, run_id, stage))
        for path in files:
            last = _print_new(path, offsets, last, headed=stage is None or len(files) > 1)
        sys.stdout.flush()
        if not live:
            return
        time.sleep(_POLL_SECONDS)


def watch_run(home: Home, run_id: str) -> str:
    """Shows stage and step on stderr until the run ends. Returns the status it ended with."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    shown = ""
    with console.status("") as live:
        while True:
            status = status_of(home, run_id)
            line = _progress(home, run_id, status)
            if console.is_terminal:
                live.update(line)
            if status not in _LIVE:
                break
            if line != shown and not console.is_terminal:
                console.print(line, markup=False)
            shown = line
            time.sleep(_POLL_SECONDS)
    print(line)
    return status


def _chosen(home: Home, run_id: str, stage: str | None) -> list[Path]:
    return [path for path in log_files(home, run_id) if stage is None or stage in (path.stem, log_stage(path))]


def _print_new(path: Path, offsets: dict[Path, int], last: Path | None, *, headed: bool) -> Path | None:
    """Writes what a log has gained; a shorter file was begun again. Returns the file that was written from last."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        start = offsets.get(path, 0)
        file.seek(start if start <= size else 0)
        gained = file.read()
        offsets[path] = file.tell()
    if not gained:
        return last
    if headed and path != last:
        print(f"==> {path.stem} <==")
    sys.stdout.write(gained.decode("utf-8", "replace"))
    return path


def _no_log(home: Home, run_id: str, stage: str | None) -> str:
    there = [path.stem for path in log_files(home, run_id)]
    if stage is not None and there:
        return f"{run_id} has no log of `{stage}`; there are: {', '.join(there)}"
    return f"{run_id} has no log yet"


def _progress(home: Home, run_id: str, status: str) -> str:
    """One line: the status, the stage under way, and while training the step."""
    state = read_state(home, run_id)
    running = [name for name, stage in (state.get("stages") or {}).items() if stage.get("status") == "running"]
    parts = [status, *running] if status in _LIVE else [status]
    progress = read_json(home.run(run_id) / "progress.json")
    if progress and (running == ["train"] or status not in _LIVE):
        parts.append(training_line(progress))
    if reason := state.get("reason"):
        parts.append(str(reason))
    return "  ".join(parts)
