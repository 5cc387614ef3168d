"""Live logs and progress of runs, read from the runs' directories as they grow."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.cli.reading import Reading, print_waiting_elsewhere
from pipelines.home.home import Home
from pipelines.home.runs import log_files, log_stage, read_state, status_of
from pipelines.running.progress import logged_line, training_line
from specs.errors import RpgError
from specs.machine.files import read_json

_LIVE = ("pending", "running")


def print_logs(reading: Reading, run_ids: Sequence[str], *, stage: str | None, follow: bool) -> None:
    """Writes the logs of runs to stdout, each under its name if there are several. `follow`: continues until all runs
    end."""
    home, offsets = reading.home, dict[Path, int]()
    last: Path | None = None
    if follow:
        print_waiting_elsewhere(reading, run_ids)
    while True:
        # Checked before reading, so that a run's last lines are read too.
        live = follow and any(status_of(home, run_id) in _LIVE for run_id in run_ids)
        files = {path: run_id for run_id in run_ids for path in _chosen(home, run_id, stage)}
        if not files and not live:
            raise RpgError("\n".join(_no_log(home, run_id, stage) for run_id in run_ids))
        for path, run_id in files.items():
            heading = f"{run_id} {path.stem}" if len(run_ids) > 1 else path.stem
            last = _print_new(path, offsets, last, heading=heading if stage is None or len(files) > 1 else "")
        sys.stdout.flush()
        if not live:
            return
        reading.wait(run_ids)


def watch_runs(reading: Reading, run_ids: Sequence[str]) -> list[str]:
    """Shows stage and step of runs on stderr, one line each, until all have ended. Returns their last statuses."""
    from rich.text import Text

    from pipelines.terminal.console import SafeConsole

    console = SafeConsole(stderr=True, soft_wrap=True)
    home, shown, ended = reading.home, dict[str, str](), dict[str, str]()
    print_waiting_elsewhere(reading, run_ids)
    with console.status("") as live:
        while True:
            lines = {}
            for run_id in [run_id for run_id in run_ids if run_id not in ended]:
                status = status_of(home, run_id)
                lines[run_id] = (f"{run_id}  " if len(run_ids) > 1 else "") + _progress(home, run_id, status)
                if status not in _LIVE:
                    ended[run_id] = status
                    print(lines.pop(run_id), flush=True)
            if len(ended) == len(run_ids):
                return [ended[run_id] for run_id in run_ids]
            if console.is_terminal:
                live.update(Text("\n".join(lines.values())))
            else:
                for run_id in [run_id for run_id in lines if lines[run_id] != shown.get(run_id)]:
                    console.print(lines[run_id], markup=False)
            shown = lines
            reading.wait(run_ids)


def _chosen(home: Home, run_id: str, stage: str | None) -> list[Path]:
    return [path for path in log_files(home, run_id) if stage is None or stage in (path.stem, log_stage(path))]


def _print_new(path: Path, offsets: dict[Path, int], last: Path | None, *, heading: str) -> Path | None:
    """Writes the new content of a log, under its heading if it has one. A log that has become shorter is read from the
    start.

    Returns:
        The log that was written last.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        start = offsets.get(path, 0)
        file.seek(start if start <= size else 0)
        gained = file.read()
        offsets[path] = file.tell()
    if not gained:
        return last
    if heading and path != last:
        print(f"==> {heading} <==")
    sys.stdout.write(gained.decode("utf-8", "replace"))
    return path


def _no_log(home: Home, run_id: str, stage: str | None) -> str:
    there = [path.stem for path in log_files(home, run_id)]
    if stage is not None and there:
        return f"{run_id} has no log of `{stage}`; there are: {', '.join(there)}"
    return f"{run_id} has no log yet"


def _progress(home: Home, run_id: str, status: str) -> str:
    """Returns one line: the status, the current stage, and the step or the last line of its log."""
    state = read_state(home, run_id)
    running = [name for name, stage in (state.get("stages") or {}).items() if stage.get("status") == "running"]
    parts = [status, *running] if status in _LIVE else [status]
    progress = read_json(home.run(run_id) / "progress.json")
    if progress and (running == ["train"] or status not in _LIVE):
        parts.append(training_line(progress))
    elif status in _LIVE and len(running) == 1:
        parts += filter(None, [logged_line(home.run(run_id) / "logs" / f"{running[0]}.log", running[0])])
    if reason := state.get("reason"):
        parts.append(str(reason))
    return "  ".join(parts)
