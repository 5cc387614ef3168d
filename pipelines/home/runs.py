"""Lookup of a run by the text that a user typed, and its status and logs."""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from pipelines.home.home import Home
from pipelines.home.state import Record, run_ids
from pipelines.home.versions import runs_of
from specs.errors import RpgError
from specs.machine.files import read_json


class NoSuchRunError(RpgError):
    """Error for a name that matches no run, or more than one."""


def find_run(home: Home, text: str) -> str:
    """Returns the id of the run that a user names.

    Args:
        text: the id, a prefix of it, or a prefix of its last eight characters.
    Raises:
        NoSuchRunError: no run matches, or several do; the message lists the nearest.
    """
    if is_run(home, text):
        return text
    if is_study(home, text):
        raise NoSuchRunError(f"`{text}` is a study: `rpg study show {text}`; its runs: `rpg runs --experiment {text}`")
    fitting = sorted(name for name in _directories(home) if _fits(name, text) and is_run(home, name))
    if len(fitting) == 1:
        return fitting[0]
    if len(of_experiment := _current_runs(home, text)) == 1:
        return of_experiment[0]
    if of_experiment:
        together = f"`rpg compare {text}` and `rpg report {text}` show all of them"
        listed = _listed(sorted(of_experiment))
        raise NoSuchRunError(
            f"`{text}` is an experiment of {len(of_experiment)} runs: {together}; for one run, give its id:\n{listed}"
        )
    if fitting:
        raise NoSuchRunError(f"`{text}` matches {len(fitting)} runs; write more of the id:\n{_listed(fitting)}")
    raise NoSuchRunError(_unknown(home, text, run_ids(home)))


def _current_runs(home: Home, text: str) -> list[str]:
    """Returns the runs of an experiment of that name; empty if the text cannot be such a name."""
    with suppress(RpgError):
        return runs_of(home, text)
    return []


def find_runs(home: Home, text: str) -> list[str]:
    """Returns the ids of the runs that a user names: the current runs of an experiment, or a single run.

    A text that equals a run's id or an experiment's name means exactly that, even if other ids begin with it.

    Args:
        text: an experiment's name, NAME@VERSION, or any text that `find_run` accepts.
    Raises:
        NoSuchRunError: as for `find_run`.
        NoSuchVersionError: the experiment has no such version.
    """
    if is_run(home, text):
        return [text]
    return runs_of(home, text) or [find_run(home, text)]


def study_runs(home: Home, name: str) -> list[str]:
    """Returns the ids of a study's runs: those of its trials, then the confirmation runs; empty if
    there is no such study."""
    study = read_json(home.study(name) / "study.json")
    arms = (study.get("confirmation") or {}).get("arms", [])
    confirming = [unit["run_id"] for arm in arms for unit in arm["units"] if unit.get("run_id")]
    return [*(run_id for trial in study.get("trials", []) for run_id in trial.get("run_ids") or ()), *confirming]


def status_of(home: Home, run_id: str) -> str:
    """Returns pending, running, finished, failed, cancelled, or crashed: recorded as running, but
    without a live process."""
    from specs.machine import liveness

    return liveness.status_of(home.run(run_id), read_state(home, run_id))


def read_state(home: Home, run_id: str) -> Record:
    """Returns the current content of the run's state.json."""
    return read_json(home.run(run_id) / "state.json")


def log_files(home: Home, run_id: str) -> list[Path]:
    """Returns the run's logs, in the order of its stages."""
    order = {stage: position for position, stage in enumerate(("data", "base", "train", "evaluate", "report"))}
    logs = (home.run(run_id) / "logs").glob("*.log")
    return sorted(logs, key=lambda path: (order.get(log_stage(path), len(order)), path.stem))


def log_stage(log: Path) -> str:
    """Returns the stage that wrote a log. Training on several machines has a log for each: `train-NODE-HOST.log`."""
    return log.stem.partition("-")[0]


def is_run(home: Home, text: str) -> bool:
    """Returns whether a run with this id was ever started or submitted. Does not read the other runs."""
    try:
        return (home.run(text) / "run.json").is_file()
    except RpgError:  # matches no run
        return False


def is_study(home: Home, text: str) -> bool:
    """Returns whether a study that has ever run has this name."""
    try:
        return (home.study(text) / "study.json").is_file()
    except RpgError:  # matches no study
        return False


def _directories(home: Home) -> list[str]:
    """Returns the names of the runs' directories. For 5,000 runs this takes a hundredth of the time of opening each
    directory."""
    try:
        return os.listdir(home.root / "runs")
    except FileNotFoundError:
        return []


def _fits(run_id: str, text: str) -> bool:
    return bool(text) and (run_id.startswith(text) or run_id.rpartition("-")[2].startswith(text))


def _unknown(home: Home, text: str, known: list[str]) -> str:
    if not known:
        hint = home.another() or f"{home.root} has no runs yet; `rpg run FILE` creates one"
        return f"there is no run `{text}`: {hint}"
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
    hint = f"the nearest:\n{_listed(near)}" if near else "`rpg runs` lists them"
    return f"there is no run `{text}`; {hint}"


def _listed(run_ids: list[str], most: int = 10) -> str:
    lines = [f"  {run_id}" for run_id in run_ids[:most]]
    if len(run_ids) > most:
        lines.append(f"  and {len(run_ids) - most} more")
    return "\n".join(lines)
