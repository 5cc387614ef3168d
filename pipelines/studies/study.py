"""Execution of studies: Optuna proposes values, each trial is an experiment like any other, and fresh seeds confirm the
best.

Any number of workers share a study. Each claims the next task under the study's lock, executes it without the lock, and
records the result. A study that is killed at any moment resumes where it stopped: another worker claims a dead worker's
trial with its number and its values, its runs resume from their checkpoints, and its result is recorded once. A single
worker proposes the same trials after the same results, interrupted or not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from pipelines.home.home import Home
from pipelines.running.time_left import duration
from pipelines.studies import conditions, confirmation, proposals, rungs, space
from pipelines.studies.answers.results import Arm, StudyRecord
from pipelines.studies.execution import Execute, Result, Task, run_task
from pipelines.studies.ledger import TrialLedger
from pipelines.studies.record import Confirming, study_record
from pipelines.studies.storage import open_storage
from pipelines.studies.trials import (
    ForeignResult,
    Score,
    StudyInterruptedError,
    Trial,
    seconds_left,
)
from pipelines.studies.warm_start import foreign_results
from specs.machine.files import now, write_json
from specs.machine.gpu_slots import slots_wanted
from specs.schema.experiment import Experiment
from specs.schema.study import Study
from specs.study_document import StudyDocument

ATTEMPTS = 3
"""Largest number of attempts of a trial whose values did not cause its failures."""
_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 10.0


def run_study(
    document: StudyDocument,
    home: Home,
    execute: Execute,
    *,
    say: Callable[[str], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    ended: Callable[[Mapping[str, Any]], None] = lambda _: None,
    began: str = "",
) -> dict[str, Any]:
    """Executes the unfinished part of the study, together with its other workers. Returns the study's record
    (study.json).

    Args:
        execute: called for each task, in this thread.
        say: receives a line for each event.
        stopping: whether the command was asked to stop; called while the worker waits for others.
        ended: receives the record whenever a trial has ended.
        began: time at which the command was given, UTC, ISO-8601; trials that were cancelled before are run again.
            Empty means now.
    Raises:
        SpecError: the study does not match its stored state, or its experiment names a missing file or model.
        StudyInterruptedError: asked to stop.
        StudyStorageError: its database does not answer.
    """
    worker = _StudyWorker(document, home, execute, say, stopping, began or now())
    worker.prepare()
    while task := worker.next_task():
        worker.perform(task)
        ended(worker.record)
    return worker.write_record(at_once=True)


class _StudyWorker:
    """One worker of a study: claims a task, executes it, records the result, and keeps study.json up to date."""

    def __init__(
        self,
        document: StudyDocument,
        home: Home,
        execute: Execute,
        say: Callable[[str], None],
        stopping: Callable[[], bool],
        began: str,
    ) -> None:
        self.document = document
        self.study: Study = document.study
        self.horizon = document.experiment.experiment.training.steps
        self.home = home
        self.execute = execute
        self.say = say
        self.stopping = stopping
        self._is_told = False
        self.storage = open_storage(home, self.study.name, self._wait_for_database)
        directory = home.study(self.study.name)
        directory.mkdir(parents=True, exist_ok=True)
        self.ledger = TrialLedger(document, self.storage, directory, stopping, began)
        self.foreign: list[ForeignResult] = []
        self.record: dict[str, Any] = {}
        self._written_at, self._write_seconds = -1e9, 0.0

    def _wait_for_database(self, reason: str) -> bool:
        """Reports once that the worker waits for the database. Returns whether the worker is asked to stop."""
        if not self._is_told:
            self._is_told = True
            self.say(f"waiting: {reason}")
        return self.stopping()

    def prepare(self) -> None:
        """Opens the study, or creates it. Raises SpecError."""
        self.ledger.transaction(self.ledger.open)
        if self.study.sampler.type == "auto":
            chosen = self.study.sampler.model_copy(update={"type": self.ledger.auto_sampler})
            self.study = self.study.model_copy(update={"sampler": chosen})
            self.document = replace(self.document, study=self.study)
        self.foreign = foreign_results(self.document, self.home)
        self.write_record()

    # The next task.

    def next_task(self) -> Task | None:
        """Claims and returns the next task; None if the study is done. Waits while the tasks of other workers may lead
        to new ones."""
        waiting = False
        while True:
            decision = self.ledger.transaction(self._decide)
            if decision != "wait":
                self.write_record()
                return decision
            if not waiting:
                self.say("  waiting for the trials of other workers")
                waiting = True
            if self.stopping():
                raise StudyInterruptedError("interrupted")
            time.sleep(_WAIT_SECONDS)

    def _decide(self) -> Task | Literal["wait"] | None:
        """Returns a claimed task, None if nothing is left, or `wait` if others execute the remaining tasks."""
        trials = self.ledger.trials()
        if self._is_stopped(trials):
            return None
        if trial := self.ledger.to_take_up(trials):
            # To the trial's own step: one that is evaluated there, but not yet paused, has not earned the next one.
            return Task(self.ledger.claim(trial, trial.work.until))
        if promotion := rungs.promotion(self.study, trials):
            return Task(self.ledger.claim(promotion.trial, promotion.until))
        if self._may_begin(trials):
            return Task(self._begin(trials))
        if any(trial.state == "running" for trial in trials):
            return "wait"
        if last := rungs.last_promotion(self.study, trials):
            return Task(self.ledger.claim(last.trial, last.until))
        for trial in trials:
            if trial.state == "paused":
                self.ledger.end_without_value(trial, rungs.reason_not_promoted(self.study, trial, trials))
        return self._decide_confirmation(trials)

    def _is_stopped(self, trials: Sequence[Trial]) -> bool:
        """Returns whether a failure has ended the study; see `on_failure`."""
        return self.study.on_failure == "stop" and any(trial.state == "failed" for trial in trials)

    def _may_begin(self, trials: Sequence[Trial]) -> bool:
        """Returns whether the number of trials, the budget and the sampler allow another trial."""
        started = min((trial.about["started_at"] for trial in trials if "started_at" in trial.about), default=now())
        spent = {name: sum(float(trial.about.get(name, 0.0)) for trial in trials) for name in ("tokens", "gpu_hours")}
        spent["hours"] = (_seconds(now()) - _seconds(started)) / 3600
        budget, aside = self.study.budget, confirmation.set_aside(self.study, trials)
        for name, used in spent.items():
            limit = getattr(budget, name)
            if limit and used >= limit - min(aside.get(name, 0.0), limit / 2):
                return False
        if len(trials) >= self.study.trials:
            return False
        return not proposals.is_exhausted(self.study, trials)

    def _begin(self, trials: Sequence[Trial]) -> Trial:
        proposal = proposals.propose(self.study, trials, self.foreign, horizon=self.horizon)
        bracket = rungs.bracket_of(self.study, len(trials))
        return self.ledger.add_trial(proposal, until=rungs.first_step(self.study, bracket), bracket=bracket)

    def _decide_confirmation(self, trials: Sequence[Trial]) -> Task | Literal["wait"] | None:
        """Returns the next unit of the confirmation. The first worker that comes after a round also analyses the
        round."""
        arms = confirmation.arms(self.study, trials, horizon=self.horizon)
        seeds = self.ledger.confirming_seeds
        while arms:
            at = self._confirming(arms)
            wanted = {(arm.trial, seed): arm for arm in arms for seed in seeds[: at.progress.seeds[arm.trial]]}
            known = {(unit.about["arm"], unit.about["seed"]) for unit in self.ledger.units()}
            for (trial, seed), arm in wanted.items():
                if (trial, seed) not in known:
                    self.ledger.add_unit(arm, seed)
            units = [unit for unit in self.ledger.units() if (unit.about["arm"], unit.about["seed"]) in wanted]
            if unit := self.ledger.to_take_up(units):
                return Task(self.ledger.claim(unit, 0), confirming=True)
            if any(unit.state == "running" for unit in units):
                return "wait"
            if not at.progress.due or any(unit.state == "cancelled" for unit in units):
                return None
            self._look(trials, arms, at)
        return None

    def _confirming(self, arms: Sequence[Arm]) -> Confirming:
        """Returns the progress of the confirmation of these arms."""
        ledger, seeds = self.ledger, self.ledger.confirming_seeds
        ended = {
            (unit.about["arm"], unit.about["seed"])
            for unit in ledger.units()
            if unit.ended and unit.state != "cancelled"
        }
        counts = {
            arm.trial: next((n for n, seed in enumerate(seeds) if (arm.trial, seed) not in ended), len(seeds))
            for arm in arms
        }
        looks = [
            look for look in ledger.looks() if (look.arms, look.dataset) == (tuple(counts), ledger.confirming_dataset)
        ]
        baseline = next((arm.trial for arm in arms if arm.baseline), None)
        at = confirmation.progress(looks, counts, baseline, len(seeds))
        shares = ledger.shares()
        share = confirmation.share_of(at.due or max(at.seeds.values(), default=0), len(seeds), shares)
        return Confirming(seeds, at, shares, share)

    def _look(self, trials: Sequence[Trial], arms: Sequence[Arm], at: Confirming) -> None:
        """Compares the arms after a round, and records the findings."""
        most, dataset = len(at.seeds), self.ledger.confirming_dataset
        look = confirmation.Look(at.progress.due, at.share, most, tuple(arm.trial for arm in arms), dataset)
        over = replace(at, progress=replace(at.progress, due=0))
        record = StudyRecord.of(self._record(trials, arms, over, "confirming"))
        self.ledger.note_look(confirmation.look_at(self.home, record, look))

    # Its execution.

    def perform(self, task: Task) -> None:
        """Executes a task and records the result."""
        trial = task.trial
        self.say(self._begun_line(task))
        started = time.monotonic()
        try:
            result = self._result(task)
        except BaseException:
            self.ledger.transaction(lambda: self.ledger.release(trial))
            self.write_record(at_once=True)
            raise
        seconds = time.monotonic() - started
        outcome = self.ledger.transaction(lambda: self._tell(task, result, seconds))
        self.write_record()
        self.say(outcome)

    def _result(self, task: Task) -> Result:
        """Returns the result of the task. Waits while another process executes one of its runs."""
        waiting = 0.0
        while True:
            twin = None if task.confirming else self.ledger.transaction(lambda: self._result_of_equal_trial(task.trial))
            result = twin or run_task(task, self.document, self.home, self.execute)
            if not result.busy:
                return result
            if not waiting:
                self.say(f"  waiting: {result.reason}")
            if self.stopping():
                raise StudyInterruptedError("interrupted")
            # Each check is a flow run on the dashboard, which should not have thousands.
            waiting = min(2 * waiting + _WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
            time.sleep(waiting)

    def _result_of_equal_trial(self, trial: Trial) -> Result | None:
        """Returns the result of a trial with the same params, if there is one, because a new run would give the same
        result."""
        for other in self.ledger.trials():
            if other.values and other.id != trial.id and space.text_of(other.params) == space.text_of(trial.params):
                low, high = other.about.get("value_low"), other.about.get("value_high")
                values = tuple(Score(value, low, high) for value in other.values)
                constraints = other.about.get("constraints")
                return Result(tuple(other.about.get("run_ids", ())), values, constraints=constraints)
        return None

    # Its result.

    def _tell(self, task: Task, result: Result, seconds: float) -> str:
        ledger, trial = self.ledger, self.ledger.reread(task.trial)
        if trial.ended or not ledger.holds(trial):
            return f"  trial {trial.number} has ended, or another worker has taken it over; this result is not used"
        # Counted from the claim, so that a repetition after a lost connection records the same.
        spent = float(task.trial.about.get("seconds", 0.0)) + seconds
        gpus = _gpus(self.document.experiment.experiment)
        ledger.note(trial, run_ids=list(result.run_ids), seconds=spent, gpu_hours=spent * gpus / 3600)
        if result.shared_seconds:
            shared = float(task.trial.about.get("shared_seconds", 0.0)) + result.shared_seconds
            ledger.note(trial, shared_seconds=shared)
        if result.tokens:
            ledger.note(trial, tokens=result.tokens)
        if result.constraints is not None:
            ledger.note(trial, constraints=dict(result.constraints))
        if not result.values:
            return self._tell_failure(trial, result, attempts=task.trial.attempts + 1)
        if result.paused_at:
            return self._tell_rung(ledger.reread(trial), result.paused_at, result.values[0])
        ledger.finish(trial, result.values)
        return f"  {'  '.join(_shown(scored) for scored in result.values)}"

    def _tell_rung(self, trial: Trial, step: int, scored: Score) -> str:
        if self.study.constraints:
            kept = {**trial.about.get("kept", {}), str(step): confirmation.is_feasible(self.study, trial)}
            self.ledger.note(trial, kept=kept)
        current = self.ledger.note_rung(trial, step, scored)
        verdict, why = rungs.verdict(self.study, current, self.ledger.trials())
        if verdict == "stop":
            self.ledger.end_without_value(current, why)
            return f"  {_shown(scored)} at step {step}: pruned, {why}"
        if verdict == "pause":
            self.ledger.pause(trial)
        else:
            self.ledger.claim(current, rungs.next_step(self.study, current))
        return f"  {_shown(scored)} at step {step}"

    def _tell_failure(self, trial: Trial, result: Result, attempts: int) -> str:
        if result.cancelled:
            self.ledger.cancel(trial, result.reason)
            return f"  cancelled: {result.reason}; run the study again to continue it"
        if result.again and attempts < ATTEMPTS:
            self.ledger.note(trial, attempts=attempts)
            self.ledger.release(trial)
            return f"  retrying: {result.reason}"
        self.ledger.end_without_value(trial, result.reason, failed=True, at_fault=result.at_fault)
        return f"  failed: {result.reason}"

    # The record.

    def write_record(self, *, at_once: bool = False) -> dict[str, Any]:
        """Writes study.json. A large study is not written at every change, so that this never takes much of the time.

        Args:
            at_once: write it even if that takes long.
        """
        if not at_once and time.monotonic() - self._written_at < 20 * self._write_seconds:
            return self.record
        started = time.monotonic()
        self.record = self.ledger.transaction(self._write)
        self._written_at = time.monotonic()
        self._write_seconds = self._written_at - started
        return self.record

    def _write(self) -> dict[str, Any]:
        ledger = self.ledger
        trials = ledger.trials()
        stopped = self._is_stopped(trials)
        searching = not stopped and (self._may_begin(trials) or any(not trial.ended for trial in trials))
        arms = [] if searching or stopped else confirmation.arms(self.study, trials, horizon=self.horizon)
        # Units of arms that were chosen when fewer trials were wanted do not confirm the present arms.
        at = self._confirming(arms)
        status = "searching" if searching else "confirming" if at.progress.due else "finished"
        record = self._record(trials, arms, at, "stopped" if stopped else status)
        write_json(self.home.study(self.study.name) / "study.json", record)
        return record

    def _record(self, trials: Sequence[Trial], arms: Sequence[Arm], at: Confirming, status: str) -> dict[str, Any]:
        return study_record(
            self.document,
            trials,
            self.ledger.units(),
            arms,
            status=status,
            seeds=conditions.trial_seeds(self.study, self.document.experiment.experiment.seeds),
            confirming=at,
            standings=confirmation.standings(self.study, trials, horizon=self.horizon),
            created_at=self.ledger.created_at,
        )

    def _begun_line(self, task: Task) -> str:
        from pipelines.report.evidence import show

        trial = task.trial
        values = "  ".join(f"{path}={show(value)}" for path, value in trial.params.items())
        if task.confirming:
            what = "baseline" if trial.baseline else f"trial {trial.about['arm']}  {values}"
            return f"confirming with seed {trial.about['seed']}: {what}"
        until = f"  to step {trial.work.until}" if trial.work.until else ""
        wanted = max(self.study.trials, trial.number + 1)  # it may have begun when more were wanted
        return f"trial {trial.number} ({trial.number + 1} of {wanted})  {values}{until}{self._left()}"

    def _left(self) -> str:
        """Returns the remaining time of the trials as the end of a line; empty if it is not known yet."""
        seconds = self.ledger.transaction(lambda: seconds_left(self.ledger.trials(), self.study.trials))
        return f"  (all trials: about {duration(seconds)} left)" if seconds else ""


def _gpus(experiment: Experiment) -> int:
    """Returns the number of GPUs that a run holds; 0 if the run computes on this machine's CPU."""
    gpus = experiment.gpus
    return slots_wanted(experiment.resources.device, gpus) if experiment.launcher.type == "local" else gpus


def _shown(scored: Score) -> str:
    ends = f" [{scored.low:.4f}, {scored.high:.4f}]" if scored.low is not None and scored.high is not None else ""
    return f"{scored.value:.4f}{ends}"


def _seconds(time_text: str) -> float:
    return datetime.fromisoformat(time_text).timestamp()
