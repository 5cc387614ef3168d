"""Finding a run: the one that a user names, how it stands, and its logs."""

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
    """No run, or more than one, goes by that name."""


def find_run(home: Home, text: str) -> str:
    """The id of the run that a user names.

    Args:
        text: the id, its beginning, or the beginning of its last eight characters.
    Raises:
        NoSuchRunError: no run fits, or several do; the message lists the nearest.
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
        together = f"`rpg compare {text}` and `rpg report {text}` are about all of them"
        listed = _listed(sorted(of_experiment))
        raise NoSuchRunError(
            f"`{text}` is an experiment of {len(of_experiment)} runs: {together}; of one, the id:\n{listed}"
        )
    if fitting:
        raise NoSuchRunError(f"`{text}` fits {len(fitting)} runs; write more of the id:\n{_listed(fitting)}")
    raise NoSuchRunError(_unknown(home, text, run_ids(home)))


def _current_runs(home: Home, text: str) -> list[str]:
    """The runs of an experiment of that name; none where it cannot be one's."""
    with suppress(RpgError):
        return runs_of(home, text)
    return []


def find_runs(home: Home, text: str) -> list[str]:
    """The ids of the runs that a user names: all that an experiment has now, or one.

    What is a run's id or an experiment's name means just that, even where other ids begin with it.

    Args:
        text: an experiment's name, NAME@VERSION, or what names a run for `find_run`.
    Raises:
        NoSuchRunError: as for `find_run`.
        NoSuchVersionError: the experiment has other versions.
    """
    if is_run(home, text):
        return [text]
    return runs_of(home, text) or [find_run(home, text)]


def study_runs(home: Home, name: str) -> list[str]:
    """The ids of the runs of a study: of its trials, then of those that confirm; empty where there is no such study."""
    study = read_json(home.study(name) / "study.json")
    arms = (study.get("confirmation") or {}).get("arms", [])
    confirming = [unit["run_id"] for arm in arms for unit in arm["units"] if unit.get("run_id")]
    return [*(run_id for trial in study.get("trials", []) for run_id in trial.get("run_ids") or ()), *confirming]


def status_of(home: Home, run_id: str) -> str:
    """pending, running, finished, failed, cancelled, or crashed: recorded as running, and nobody executes it."""
    from specs.machine import liveness

    return liveness.status_of(home.run(run_id), read_state(home, run_id))


def read_state(home: Home, run_id: str) -> Record:
    """The run's state.json, as it is at this moment."""
    return read_json(home.run(run_id) / "state.json")


def log_files(home: Home, run_id: str) -> list[Path]:
    """The run's logs, in the order of its stages."""
    order = {stage: position for position, stage in enumerate(("data", "base", "train", "evaluate", "report"))}
    logs = (home.run(run_id) / "logs").glob("*.log")
    return sorted(logs, key=lambda path: (order.get(log_stage(path), len(order)), path.stem))


def log_stage(log: Path) -> str:
    """The stage that wrote a log. Training on several machines has a log for each: `train-NODE-HOST.log`."""
    return log.stem.partition("-")[0]


def is_run(home: Home, text: str) -> bool:
    """Whether a run that was ever begun or submitted has this id. The other runs are not looked at."""
    try:
        return (home.run(text) / "run.json").is_file()
    except RpgError:  # no name of anything
        return False


def is_study(home: Home, text: str) -> bool:
    """Whether a study that has ever run has this name."""
    try:
        return (home.study(text) / "study.json").is_file()
    except RpgError:  # no name of anything
        return False


def _directories(home: Home) -> list[str]:
    """The names of the runs' directories: of 5,000 in a hundredth of the time that a look into each takes."""
    try:
        return os.listdir(home.root / "runs")
    except FileNotFoundError:
        return []


def _fits(run_id: str, text: str) -> bool:
    return bool(text) and (run_id.startswith(text) or run_id.rpartition("-")[2].startswith(text))


def _unknown(home: Home, text: str, known: list[str]) -> str:
    if not known:
        hint = home.another() or f"{home.root} holds none yet; `rpg run FILE` makes one"
        return f"there is no run `{text}`: {hint}"
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
    hint = f"the nearest:\n{_listed(near)}" if near else "`rpg runs` lists them"
    return f"there is no run `{text}`; {hint}"


def _listed(run_ids: list[str], most: int = 10) -> str:
    lines = [f"  {run_id}" for run_id in run_ids[:most]]
    if len(run_ids) > most:
        lines.append(f"  and {len(run_ids) - most} more")
    return "\n".join(lines)
