"""Studies: Optuna proposes values, each trial is an experiment run like any other, the journal keeps what came out.

Killed at any moment, a study goes on where it stopped. The trial under way keeps its number and its values, its runs go
on from their checkpoints, and it is told once. Every trial has a sampler seeded by the study's seed and its own number:
an interrupted study proposes what an uninterrupted one would.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.home import Home
from pipelines.report.statistics import Interval, mean_interval, seed_mean
from pipelines.running.experiment import RunOutcome
from pipelines.studies import space
from pipelines.studies.journal import StudyBusyError, held, open_study, write_record
from rpg.files import now
from specs.document import Document
from specs.errors import SpecError
from specs.schema.study import Study
from specs.study_document import StudyDocument
from storage import Store

if TYPE_CHECKING:
    import optuna

Execute = Callable[[Document], tuple[RunOutcome, ...]]
"""Runs a trial's experiment, as `execute.execute_experiment` does."""


class StudyInterruptedError(Exception):
    """The command was asked to stop; the trial under way goes on at the next call."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A trial's runs and the value that they give it."""

    run_ids: tuple[str, ...]
    value: Interval | None
    """None: it failed."""
    reason: str = ""
    """Why it failed."""


def run_study(
    document: StudyDocument, home: Home, execute: Execute, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Runs the trials that are still wanted and returns the study's record (study.json).

    Args:
        execute: called once a trial, in this thread.
        say: is given a line for each thing that happens.
    Raises:
        SpecError: the study does not fit what is stored of it, or its experiment names what is not there.
        StudyBusyError: another process runs it, or one of its runs.
        StudyInterruptedError: asked to stop.
    """
    study = document.study
    with held(home, study.name):
        stored = open_study(home, document)
        _enqueue_baseline(stored, document)
        record = write_record(home, study, stored)
        while (done := _num_told(stored)) < study.trials:
            trial = _next_trial(stored, study)
            values = space.suggest(trial, study.parameters)
            trial.set_user_attr("started_at", trial.user_attrs.get("started_at") or now())
            write_record(home, study, stored)
            say(f"trial {trial.number} ({done + 1} of {study.trials})  {_shown(values)}")
            result = _run_trial(document, values, home, execute)
            _tell(stored, trial, result)
            record = write_record(home, study, stored)
            say(_outcome_line(result))
            if result.value is None and study.on_failure == "stop":
                break
    return record


def trial_document(document: StudyDocument, values: Mapping[str, Any]) -> Document:
    """The experiment of a trial. All trials share the study's name, so that equal values are one run, done once."""
    study = document.study
    named = {"name": study.name} | ({"question": study.question} if study.question else {})
    return document.trial({**values, **named})


def measured(study: Study, run_ids: Sequence[str], home: Home, *, confidence: float = 0.95) -> Interval | None:
    """The goal's measure at the last checkpoint, averaged over the seeds; None where a run lacks it.

    mean@k is the mean over all samples there are: its expected value does not depend on k. Its interval is over
    problems and seeds; that of other measures is the recorded one, or Student's over several seeds.
    """
    goal = study.targets[0]
    metric = "mean@%" if goal.metric.startswith("mean@") else goal.metric
    with Store.open(home.root) as store:
        rows = store.query(
            "SELECT run_id, value, ci_low, ci_high FROM evaluations "
            "WHERE list_contains(?, run_id) AND dataset = ? AND metric LIKE ? "
            "QUALIFY step = max(step) OVER (PARTITION BY run_id) ORDER BY run_id",
            [list(run_ids), goal.dataset, metric],
        ).rows
        if {row[0] for row in rows} != set(run_ids) or any(row[1] != row[1] for row in rows):
            return None
        value = sum(row[1] for row in rows) / len(rows)
        if goal.metric.startswith("mean@"):
            return mean_interval(_last_scores(store, run_ids, goal.dataset), confidence=confidence)
    if len(rows) == 1:
        return Interval(value, rows[0][2], rows[0][3])
    return seed_mean([row[1] for row in rows], confidence=confidence)


def _last_scores(store: Store, run_ids: Sequence[str], dataset: str) -> list[list[float]]:
    """Of each run's last checkpoint, [seeds, problems], on the problems that all of them have."""
    from pipelines.report.evidence import accuracies

    last = [steps[max(steps)] for steps in accuracies(store, run_ids)[dataset].values()]
    problems = sorted(set.intersection(*(set(scores) for scores in last)))
    return [[scores[problem] for problem in problems] for scores in last]


def _enqueue_baseline(stored: "optuna.Study", document: StudyDocument) -> None:
    """The first trial has the experiment's own values, where the space holds them: what the others have to beat."""
    searched = document.study.parameters
    own, outside = space.own_params(document)
    if not outside and not stored.get_trials(deepcopy=False):
        kept = {path: space.stored(value, searched[path]) for path, value in own.items()}
        stored.enqueue_trial(kept, user_attrs={"baseline": True})


def _next_trial(stored: "optuna.Study", study: Study) -> "optuna.Trial":
    """The trial that a killed process left, else a new one."""
    import optuna

    trials = stored.get_trials(deepcopy=False)
    left = [trial for trial in trials if trial.state == optuna.trial.TrialState.RUNNING]
    stored.sampler = _sampler(study, left[0].number if left else len(trials))
    return optuna.Trial(stored, left[0]._trial_id) if left else stored.ask()


def _sampler(study: Study, number: int) -> "optuna.samplers.BaseSampler":
    import numpy as np
    import optuna

    seed = int(np.random.SeedSequence([study.sampler.seed, number]).generate_state(1)[0])
    if study.sampler.type == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=study.sampler.startup_trials)


def _run_trial(document: StudyDocument, values: Mapping[str, Any], home: Home, execute: Execute) -> TrialResult:
    study = document.study
    try:
        outcomes = execute(trial_document(document, values))
    except SpecError as error:
        if not _blames(error, values):
            raise
        return TrialResult((), None, str(error))
    run_ids = tuple(outcome.run.run_id for outcome in outcomes)
    if any(outcome.interrupted for outcome in outcomes):
        raise StudyInterruptedError("interrupted")
    if busy := [outcome for outcome in outcomes if outcome.status == "busy"]:
        raise StudyBusyError(str(busy[0].error))
    if unfinished := [outcome for outcome in outcomes if outcome.status != "finished"]:
        return TrialResult(run_ids, None, f"{unfinished[0].run.run_id} {unfinished[0].status}: {unfinished[0].error}")
    value = measured(study, run_ids, home, confidence=outcomes[0].run.experiment.evaluation.confidence)
    return TrialResult(
        run_ids, value, "" if value else f"no finite {study.targets[0].metric} on {study.targets[0].dataset}"
    )


def _blames(error: SpecError, values: Mapping[str, Any]) -> bool:
    """Whether the values of this trial are at fault, and not what all trials share."""
    searched = [tuple(path.split(".")) for path in values]
    blamed = [tuple(map(str, issue.path)) for issue in error.issues]
    return any(path and (path[: len(s)] == s or s[: len(path)] == path) for path in blamed for s in searched)


def _tell(stored: "optuna.Study", trial: "optuna.Trial", result: TrialResult) -> None:
    import optuna

    trial.set_user_attr("run_ids", list(result.run_ids))
    trial.set_user_attr("ended_at", now())
    if result.value is None:
        trial.set_user_attr("reason", result.reason)
        stored.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        return
    for name, end in (("value_low", result.value.low), ("value_high", result.value.high)):
        trial.set_user_attr(name, end if end == end else None)
    stored.tell(trial.number, result.value.value)


def _num_told(stored: "optuna.Study") -> int:
    return sum(trial.state.is_finished() for trial in stored.get_trials(deepcopy=False))


def _shown(values: Mapping[str, Any]) -> str:
    from pipelines.report.evidence import show

    return "  ".join(f"{path}={show(value)}" for path, value in values.items())


def _outcome_line(result: TrialResult) -> str:
    if result.value is None:
        return f"  failed: {result.reason}"
    return f"  {result.value.value:.4f} [{result.value.low:.4f}, {result.value.high:.4f}]"
