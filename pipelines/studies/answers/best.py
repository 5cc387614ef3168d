"""The best spec of a study, or the spec of any of its trials, as an experiment's file for `rpg run`."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.home.home import Home
from pipelines.report.evidence import differences, show
from pipelines.studies.answers.answer import standing, study_best
from pipelines.studies.answers.results import Best, StudyRecord, Trial, pareto_front
from specs.document import Document
from specs.errors import Issue, Position, SpecError
from specs.loader import load_document
from specs.reading.recorded import recorded_spec, unreadable
from specs.reading.yaml import dump
from specs.schema.experiment import Experiment

_SUFFIX = "-best"
_LONGEST_NAME = 63
_NO_DIFFERENCE = ("name", "question", "seeds", "matrix", "evaluation.checkpoints")
"""Fields that a study's trials change in the experiment by design."""


@dataclass(frozen=True, slots=True)
class BestSpec:
    """An experiment's file with a trial's settings in it."""

    text: str
    """The file's YAML. Paths are absolute, so that the file can be anywhere."""
    warnings: tuple[str, ...]
    """Warnings about possible differences from the trial as it was executed."""


def best_spec(home: Home, record: StudyRecord, number: int | None = None) -> BestSpec:
    """Returns the experiment of the study's best, or of the trial with a number.

    Raises:
        SpecError: nothing has finished; no trial was chosen although there are several goals; the trial has not
            finished; or the experiment's file is gone or no longer accepts the settings.
    """
    best = _best(home, record) if number is None else _of_trial(record, number)
    title = "The best of" if number is None else f"Trial {number} of"
    document = _document(record, best)
    warnings = _changes_since(home, record, best, document.experiment)
    source = {key: value for key, value in document.source.items() if value is not None}
    comment = [f"{title} study {record.name}: {_ground(home, record, best)}", *_setting_lines(best), *warnings]
    return BestSpec(dump(source, comment="\n".join(comment)), tuple(warnings))


def _best(home: Home, record: StudyRecord) -> Best:
    if best := study_best(home, record):
        return best
    if len(record.goals) > 1 and (front := pareto_front(record)):
        allowed = "; ".join(f"{trial.number} ({_values(record, trial)})" for trial in front)
        message = "a study with several goals has no single best trial"
        raise SpecError(Issue(message, given=record.name, allowed=allowed, hint="choose one with --trial N"))
    hint = "no finished trial satisfies the constraints" if record.finished else "no trial has finished"
    raise SpecError(Issue("the study has no best trial yet", given=record.name, hint=hint))


def _of_trial(record: StudyRecord, number: int) -> Best:
    finished = {trial.number: trial for trial in record.finished}
    if number not in finished:
        allowed = ", ".join(map(str, finished)) or "none yet"
        raise SpecError(Issue("no such finished trial", given=f"--trial {number}", allowed=allowed))
    trial = finished[number]
    return Best(number, trial.params, trial.value, trial.baseline, "candidate")


def _document(record: StudyRecord, best: Best) -> Document:
    name = record.name[: _LONGEST_NAME - len(_SUFFIX)].rstrip("-") + _SUFFIX
    named = {"name": name} | ({"question": record.question} if record.question else {})
    at = Position(f"study {record.name}", 0, "")
    document = load_document(record.experiment).with_values(record.overrides, at)
    return document.with_values({**record.settings(best.params), **named}, at)


def _ground(home: Home, record: StudyRecord, best: Best) -> str:
    """Returns the trial's value, and whether fresh seeds confirm it."""
    who = "the experiment's own values" if best.baseline else f"trial {best.trial}"
    if best.standing == "confirmed" and record.confirmation:
        measure = replace(record.first, dataset=record.confirmation.dataset).measure
        arm = next(arm for arm in record.measured if arm.trial == best.trial)
        lost = f", of which {len(arm.failed)} failed" if arm.failed else ""
        runs = f"{measure} is {best.value:.4g} over {len(arm.units)} fresh seeds{lost}"
        told = "confirmed" if standing(home, record, best) == "confirmed" else "no difference from the baseline found"
        if best.baseline:
            told = told.replace("from the baseline", "from the candidates")
        return f"{who}, {told}: {runs}" + (", and no candidate beat it." if best.baseline else ".")
    trial = next(trial for trial in record.trials if trial.number == best.trial)
    return f"{who}, a candidate: {_values(record, trial)}, not confirmed on fresh seeds."


def _setting_lines(best: Best) -> list[str]:
    return [f"{path}: {show(value)}" for path, value in best.params.items()]


def _values(record: StudyRecord, trial: Trial) -> str:
    """Returns `mean@4 on held_out 0.65 [0.6, 0.7], kl/reverse 0.03`."""
    parts = [f"{goal.measure} {value:.4g}" for goal, value in zip(record.goals, trial.values, strict=True)]
    if trial.interval is not None and not math.isnan(trial.interval.low):
        parts[0] += f" [{trial.interval.low:.4g}, {trial.interval.high:.4g}]"
    return ", ".join(parts)


def _changes_since(home: Home, record: StudyRecord, best: Best, experiment: Experiment) -> list[str]:
    """Returns a line if the file has changed and no longer describes the experiment that the trial was trained with."""
    trial = next((trial for trial in record.trials if trial.number == best.trial), None)
    for run_id in trial.run_ids if trial else ():
        if not (directory := home.run(run_id)).exists():
            continue
        if why := unreadable(directory):
            return [f"cannot tell whether {Path(record.experiment).name} has changed: the spec of {run_id}: {why[0]}"]
        trained = recorded_spec(directory)
        changed = differences([trained.identity(), experiment.identity()], ignore=_NO_DIFFERENCE)
        if changed:
            file, number = Path(record.experiment).name, best.trial
            return [f"{file} has changed since trial {number} was trained: {', '.join(changed)}"]
    return []
