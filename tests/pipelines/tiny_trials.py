"""Studies whose trials take no time: the engine as it is, and in the place of training a function of the params."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_study import EXPERIMENT

from pipelines.home.home import Home
from pipelines.studies import study as engine
from pipelines.studies.execution import Result, Task
from pipelines.studies.study import run_study
from pipelines.studies.trials import Score, Trial
from specs import load_study_document
from specs.reading.yaml import dump
from specs.study_document import StudyDocument

LOW, HIGH, DUAL, PACE, SCALE = (
    "objective.clip.low",
    "objective.clip.high",
    "objective.clip.dual",
    "reference.update.every_steps",
    "advantage.scale",
)
NUMBERS: dict[str, Any] = {LOW: {"float": [0.05, 0.5]}, HIGH: {"float": [0.05, 1.0], "log": True}}
MIXED: dict[str, Any] = {
    **NUMBERS,
    PACE: {"int": [1, 4]},
    SCALE: {"choice": ["none", "group_std"]},
    DUAL: {"float": [2.0, 10.0], "when": {SCALE: "none"}},
}
GOAL = {"dataset": "two-terms", "metric": "mean@8"}
LONG = {"training.steps": 8}
Outcome = Callable[[Trial, int], Result]
"""Trial and step (0 for the end) -> its outcome."""


def study_document(directory: Path, **fields: Any) -> StudyDocument:
    """A study of the tiny experiment: eight steps, 12 trials, two numbers searched, unless the fields say otherwise."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tiny.yaml").write_text(EXPERIMENT)
    known = {
        "name": "quick",
        "experiment": "tiny.yaml",
        "overrides": LONG,
        "parameters": NUMBERS,
        "goal": GOAL,
        "trials": 12,
        **fields,
    }
    path = directory / "study.yaml"
    path.write_text(dump({name: value for name, value in known.items() if value is not None}))
    return load_study_document(str(path))


def widest_is_best(trial: Trial, step: int) -> float:
    """A smooth measure: best at a wide upper clip and a low of 0.3, nearer to it with each step."""
    low, high = trial.params.get(LOW, 0.2), trial.params.get(HIGH, 0.28)
    return float(0.9 - (low - 0.3) ** 2 - 0.3 * (1 - high) ** 2 - 0.3 / (step or 8))


def measured(*measures: Callable[[Trial, int], float], constraint: str = "") -> Outcome:
    """Trials that finish with these measures by goal; with a constraint's label, the upper clip is what it bounds."""

    def outcome(trial: Trial, step: int) -> Result:
        values = tuple(Score(measure(trial, step), None, None) for measure in measures)
        bounded = {constraint: trial.params.get(HIGH, 0.28)} if constraint else None
        return Result((f"run-{trial.number}",), values, paused_at=step, constraints=bounded)

    return outcome


def search(
    monkeypatch: pytest.MonkeyPatch, document: StudyDocument, home: Home, outcome: Outcome
) -> list[Mapping[str, Any]]:
    """Runs the study. Returns its trials, as recorded."""

    def run(task: Task, *_: Any) -> Result:
        return outcome(task.trial, task.trial.work.until)

    monkeypatch.setattr(engine, "run_task", run)
    monkeypatch.setattr(engine, "_WAIT_SECONDS", 0.01)
    # What a journal is synced for is a power cut; a killed process loses nothing without.
    monkeypatch.setattr("os.fsync", lambda _file: None)
    trials: list[Mapping[str, Any]] = run_study(document, home, _never)["trials"]
    return trials


def _never(*_: Any) -> Any:
    raise AssertionError("no experiment runs here")
