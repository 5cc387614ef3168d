"""Studies: Optuna proposes values, each trial is an experiment run like any other, fresh seeds confirm the best.

Any number of workers share a study. Each takes the next piece of work under the study's lock, does it without the lock,
and writes down what came out. Killed at any moment, a study goes on where it stopped: what a dead worker had begun is
taken up under its number and its values, its runs go on from their checkpoints, and it is told once. One worker alone
proposes the same trials after the same results, interrupted or not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from pipelines.home.home import Home
from pipelines.prefect_flows.experiment import RunOutcome
from pipelines.running.failures import cause_of_error
from pipelines.running.time_left import duration
from pipelines.studies import conditions, confirmation, measures, proposals, rungs, space
from pipelines.studies.record import study_record
from pipelines.studies.storage import StudyStorage, open_storage
from pipelines.studies.trials import Score, Trial, Work, Worker, read_trial, seconds_left, signs_of_life
from pipelines.studies.warm_start import foreign_results
from specs.document import Document
from specs.errors import SpecError
from specs.machine.exit_cause import Cause
from specs.machine.files import now, write_json
from specs.machine.gpu_slots import slots_wanted
from specs.schema.experiment import Experiment
from specs.schema.study import Study, measure_label
from specs.study_document import StudyDocument
from specs.study_space import Params, settings
from storage import Store

Execute = Callable[[Document, int], tuple[RunOutcome, ...]]
"""Runs a trial's experiment, as `execute_experiment` does, until a step; 0: to its end."""
ATTEMPTS = 3
"""How often a trial is begun when what ends it is not its own fault."""
INFRASTRUCTURE: frozenset[Cause] = frozenset({"lost_peer", "preempted", "hung"})
"""Causes that say nothing of a trial's values: it is done once more."""
AT_FAULT: frozenset[Cause] = frozenset({"diverged", "out_of_memory", "sampler_out_of_memory"})
"""Causes that a trial's values have brought about: the sampler is to keep away from them."""
_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 10.0


class StudyInterruptedError(Exception):
    """The command was asked to stop; the trial under way goes on at the next call."""


@dataclass(frozen=True, slots=True)
class Task:
    """A trial that this worker has claimed."""

    trial: Trial
    confirming: bool = False
    """It is a unit of the confirmation."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a task."""

    run_ids: tuple[str, ...] = ()
    values: tuple[Score, ...] = ()
    """By goal; empty: none."""
    paused_at: int = 0
    """The rung that it has reached; 0: its end."""
    constraints: Mapping[str, float] | None = None
    tokens: float = 0.0
    gpu_hours: float = 0.0
    reason: str = ""
    """Why there is no value."""
    at_fault: bool = False
    """Its values are the reason."""
    again: bool = False
    """It failed for another reason than its values, and may be done once more."""
    busy: bool = False
    """Another process executes one of its runs."""


def run_study(
    document: StudyDocument,
    home: Home,
    execute: Execute,
    *,
    say: Callable[[str], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    ended: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Does what is left of the study, together with whoever else is at it, and returns its record (study.json).

    Args:
        execute: called for each piece of work, in this thread.
        say: is given a line for each thing that happens.
        stopping: whether the command was asked to stop; asked while the worker waits for others.
        ended: is given the record whenever a trial has ended.
    Raises:
        SpecError: the study does not fit what is stored of it, or its experiment names what is not there.
        StudyInterruptedError: asked to stop.
        StudyStorageError: its database does not answer.
    """
    worker = _StudyWorker(document, home, execute, say, stopping)
    worker.prepare()
    while task := worker.next_task():
        worker.perform(task)
        ended(worker.record)
    return worker.write_record(at_once=True)


def trial_document(document: StudyDocument, trial: Trial, seeds: Sequence[int]) -> Document:
    """The experiment of a trial.

    All trials bear the study's name, so that equal values are one run, done once; what they vary is a matrix of one
    cell, by which the dashboard, comparisons and SQL tell them apart. The base model is evaluated with the baseline
    alone: it is the same for all.

    Raises:
        SpecError: the experiment does not accept the values; the issue's path is that of the field.
    """
    study = document.study
    values = {} if trial.baseline else settings(trial.params, study.parameters)
    name = confirmation.experiment_name(study) if "arm" in trial.about else study.name
    common: dict[str, Any] = {"name": name, "seeds": list(seeds)}
    if study.question:
        common["question"] = study.question
    if not trial.baseline and document.experiment.experiment.evaluation.checkpoints == "initial_and_final":
        common["evaluation.checkpoints"] = "final"
    document.trial({**values, **common})
    if values:
        common["matrix"] = {"product": {path: [value] for path, value in values.items()}}
    return document.trial(common)


class _StudyWorker:
    """One worker of a study."""

    def __init__(
        self,
        document: StudyDocument,
        home: Home,
        execute: Execute,
        say: Callable[[str], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.document = document
        self.study: Study = document.study
        self.home = home
        self.execute = execute
        self.say = say
        self.stopping = stopping
        self.worker = Worker.this()
        self._is_told = False
        self.storage: StudyStorage = open_storage(home, self.study.name, self._wait_for_database)
        self.record: dict[str, Any] = {}
        experiment = document.experiment.experiment
        self.seeds = conditions.trial_seeds(self.study, experiment.seeds)
        self.confirming_seeds = confirmation.fresh_seeds(self.study, experiment.seeds)
        self.confirming_dataset = (self.study.confirm and self.study.confirm.dataset) or self.study.targets[0].dataset
        self.confidence = experiment.evaluation.confidence
        self.foreign: list[proposals.Foreign] = []
        self._search_id = self._units_id = -1
        self._written_at, self._write_seconds = -1e9, 0.0

    # What is stored.

    def _wait_for_database(self, reason: str) -> bool:
        """Says once that the database is waited for. Returns whether the worker is asked to stop."""
        if not self._is_told:
            self._is_told = True
            self.say(f"waiting: {reason}")
        return self.stopping()

    def _transaction(self, work: Callable[[], Any]) -> Any:
        return self.storage.transaction(work, self.stopping)

    def _trials(self) -> list[Trial]:
        return [
            read_trial(frozen, self._restored)
            for frozen in self.storage.storage.get_all_trials(self._search_id, deepcopy=False)
        ]

    def _units(self) -> list[Trial]:
        """The units of today's confirmation; an earlier one may have had more seeds, or another evaluation set."""
        if self._units_id < 0:
            return []
        units = [
            read_trial(frozen, self._restored)
            for frozen in self.storage.storage.get_all_trials(self._units_id, deepcopy=False)
        ]
        wanted = set(self.confirming_seeds)
        return [
            unit
            for unit in units
            if unit.about["seed"] in wanted
            and unit.about.get("dataset", self.confirming_dataset) == self.confirming_dataset
        ]

    def _restored(self, params: Mapping[str, Any]) -> dict[str, Any]:
        searched = self.study.parameters
        return {path: space.restored(value, searched[path]) for path, value in params.items() if path in searched}

    def _note(self, trial: Trial, **attributes: Any) -> None:
        for name, value in attributes.items():
            self.storage.storage.set_trial_user_attr(trial.id, name, value)

    def prepare(self) -> None:
        """Opens the study, or makes it, with the baseline as its first trial. Raises SpecError."""
        self._transaction(self._prepare)
        self.foreign = foreign_results(self.document, self.home)
        self.write_record()

    def _prepare(self) -> None:
        from optuna.study import StudyDirection

        stored, study = self.storage.storage, self.study
        directions = [StudyDirection[goal.direction.upper()] for goal in study.targets]
        self._search_id = self.storage.study_id(study.name, directions)
        if study.confirm:
            self._units_id = self.storage.study_id(f"{study.name}/confirmation", directions[:1])
        before = stored.get_study_user_attrs(self._search_id)
        # What a worker that was killed here had begun to note binds nobody: trials are made after the conditions.
        trials = stored.get_all_trials(self._search_id, deepcopy=False)
        finished = [trial.user_attrs.get("constraints", {}) for trial in trials if trial.state.name == "COMPLETE"]
        issues = conditions.changes(before, self.document) if trials else []
        if issues := issues + conditions.unmeasured(self.document, finished):
            raise SpecError(*(self.document.locate(issue) for issue in issues))
        if "created_at" not in before:
            stored.set_study_user_attr(self._search_id, "created_at", now())
        for key, value in conditions.conditions(self.document).items():
            if before.get(key) != value:
                stored.set_study_user_attr(self._search_id, key, value)
        if not trials:
            params, _ = self.document.own_params()
            self._create(self._search_id, params, baseline=True)

    def _create(
        self,
        study_id: int,
        params: Params,
        *,
        until: int = 0,
        sampler_notes: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> None:
        """A new trial that nobody works on yet, in one operation."""
        from optuna.trial import TrialState, create_trial

        kept, distributions = proposals.stored_params(self.study, params)
        template = create_trial(
            state=TrialState.RUNNING,
            params=kept,
            distributions=distributions,
            system_attrs=dict(sampler_notes or {}),
            user_attrs={"params": params, "work": Work(until=until).plain(), **about},
        )
        self.storage.storage.create_new_trial(study_id, template_trial=template)

    def _create_unit(self, arm: confirmation.Arm, seed: int) -> None:
        about: dict[str, Any] = {"arm": arm.trial, "baseline": arm.baseline, "dataset": self.confirming_dataset}
        self._create(self._units_id, dict(arm.params), seed=seed, **about)

    # What to do next.

    def next_task(self) -> Task | None:
        """Claims the next piece of work; None where the study is done. Waits while others may still give some."""
        waiting = False
        while True:
            decision = self._transaction(self._decide)
            if decision is None or isinstance(decision, Task):
                self.write_record()
                return decision
            if not waiting:
                self.say("  waiting for the trials of other workers")
                waiting = True
            if self.stopping():
                raise StudyInterruptedError("interrupted")
            time.sleep(_WAIT_SECONDS)

    def _decide(self) -> "Task | str | None":
        """A claimed task; None: nothing is left; `wait`: others are at work on what is left."""
        trials = self._trials()
        if self._is_stopped(trials):
            return None
        if trial := self._taken_up(trials):
            # To the step that it was to reach: evaluated there, but not yet paused, it has not earned the next one.
            return Task(self._claim(trial, trial.work.until))
        if promotion := rungs.promotion(self.study, trials):
            return Task(self._claim(promotion.trial, promotion.until))
        if self._may_begin(trials):
            return Task(self._begin(trials))
        if any(trial.state == "running" for trial in trials):
            return "wait"
        if last := rungs.last_promotion(self.study, trials):
            return Task(self._claim(last.trial, last.until))
        for trial in trials:
            if trial.state == "paused":
                self._end_pruned(trial, rungs.why_left_behind(self.study, trial, trials))
        return self._decide_confirmation(trials)

    def _is_stopped(self, trials: Sequence[Trial]) -> bool:
        """Whether a failure has ended the study, as `on_failure` has it."""
        return self.study.on_failure == "stop" and any(trial.state == "failed" for trial in trials)

    def _taken_up(self, trials: Sequence[Trial]) -> Trial | None:
        """What this worker has claimed already, else the first that nobody works on."""
        open_ones = [trial for trial in trials if not trial.ended and trial.state != "paused"]
        own = [trial for trial in open_ones if trial.work.worker and trial.work.worker.id == self.worker.id]
        return next(iter(own or [trial for trial in open_ones if trial.work.abandoned]), None)

    def _may_begin(self, trials: Sequence[Trial]) -> bool:
        budget, spent = self.study.budget, dict.fromkeys(("tokens", "gpu_hours"), 0.0)
        for trial in trials:
            for name in spent:
                spent[name] += float(trial.about.get(name, 0.0))
        started = min((trial.about["started_at"] for trial in trials if "started_at" in trial.about), default=now())
        hours = (_seconds(now()) - _seconds(started)) / 3600
        limits = ((spent["tokens"], budget.tokens), (spent["gpu_hours"], budget.gpu_hours), (hours, budget.hours))
        if len(trials) >= self.study.trials or any(limit and used >= limit for used, limit in limits):
            return False
        return not proposals.is_exhausted(self.study, trials)

    def _begin(self, trials: Sequence[Trial]) -> Trial:
        proposal = proposals.propose(self.study, trials, self.foreign)
        bracket = rungs.bracket_of(self.study, len(trials))
        until = rungs.first_step(self.study, bracket)
        self._create(
            self._search_id, proposal.params, until=until, sampler_notes=proposal.sampler_notes, bracket=bracket
        )
        return self._claim(self._trials()[-1], until)

    def _claim(self, trial: Trial, until: int) -> Trial:
        work = Work(until=until, worker=self.worker, beat=now())
        self._note(trial, work=work.plain())
        if "started_at" not in trial.about:
            self._note(trial, started_at=now())
        return self._reread(trial)

    def _reread(self, trial: Trial) -> Trial:
        return read_trial(self.storage.storage.get_trial(trial.id), self._restored)

    def _decide_confirmation(self, trials: Sequence[Trial]) -> "Task | str | None":
        units = self._units()
        if self.study.confirm:
            known = {(unit.about["arm"], unit.about["seed"]) for unit in units}
            for arm in confirmation.arms(self.study, trials):
                for seed in self.confirming_seeds:
                    if (arm.trial, seed) not in known:
                        self._create_unit(arm, seed)
            units = self._units()
        if unit := self._taken_up(units):
            return Task(self._claim(unit, 0), confirming=True)
        return "wait" if any(unit.state == "running" for unit in units) else None

    # Doing it.

    def perform(self, task: Task) -> None:
        """Does a piece of work and writes down what came out."""
        trial = task.trial
        self.say(self._begun_line(task))
        started = time.monotonic()
        try:
            with signs_of_life(self.storage.storage, trial):
                result = self._result(task)
        except BaseException:
            self._transaction(lambda: self._release(trial))
            self.write_record(at_once=True)
            raise
        seconds = time.monotonic() - started
        outcome = self._transaction(lambda: self._tell(task, result, seconds))
        self.write_record()
        self.say(outcome)

    def _result(self, task: Task) -> Result:
        """What comes of the task. Waits while another process executes one of its runs."""
        waiting = 0.0
        while True:
            twin = None if task.confirming else self._transaction(lambda: self._twin(task.trial))
            result = twin or self._run(task)
            if not result.busy:
                return result
            if not waiting:
                self.say(f"  waiting: {result.reason}")
            if self.stopping():
                raise StudyInterruptedError("interrupted")
            # Each look is a flow run on the dashboard, of which there are not to be thousands.
            waiting = min(2 * waiting + _WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
            time.sleep(waiting)

    def _twin(self, trial: Trial) -> Result | None:
        """The result of a trial with the same params, if there is one: nothing would come out differently."""
        for other in self._trials():
            if other.values and other.id != trial.id and space.text_of(other.params) == space.text_of(trial.params):
                low, high = other.about.get("value_low"), other.about.get("value_high")
                values = tuple(Score(value, low, high) for value in other.values)
                constraints = other.about.get("constraints")
                return Result(tuple(other.about.get("run_ids", ())), values, constraints=constraints)
        return None

    def _run(self, task: Task) -> Result:
        trial = task.trial
        seeds = [trial.about["seed"]] if task.confirming else self.seeds
        try:
            outcomes = self.execute(trial_document(self.document, trial, seeds), trial.work.until)
        except SpecError as error:
            if not _blames(error, trial.params):
                raise
            return Result(reason=str(error), at_fault=True)
        run_ids = tuple(outcome.run.run_id for outcome in outcomes)
        if any(outcome.interrupted for outcome in outcomes):
            raise StudyInterruptedError("interrupted")
        if busy := [outcome for outcome in outcomes if outcome.status == "busy"]:
            return Result(run_ids, reason=str(busy[0].error), busy=True)
        with Store.open(self.home.root) as store:
            tokens = measures.sampled_tokens(store, self.home, run_ids)
            if failed := [outcome for outcome in outcomes if outcome.status not in ("finished", "paused")]:
                return _failure(run_ids, failed[0], tokens)
            return self._measured(task, store, run_ids, tokens)

    def _measured(self, task: Task, store: Store, run_ids: tuple[str, ...], tokens: float) -> Result:
        until, goals = task.trial.work.until, self.study.targets
        dataset = ""
        if task.confirming and self.study.confirm:
            # One seed a unit: what is cautious over seeds is the interval over all of them.
            goals = (goals[0].model_copy(update={"over_seeds": "mean"}),)
            dataset = self.study.confirm.dataset
        scores = [
            measures.score(store, self.home, goal, run_ids, until, dataset=dataset, confidence=self.confidence)
            for goal in goals
        ]
        for goal, scored in zip(goals, scores, strict=True):
            if scored is None:
                label = measure_label(goal.metric, goal.dataset)
                return Result(run_ids, tokens=tokens, reason=f"no finite {label}", at_fault=True)
        bounded = measures.constraint_values(store, self.home, self.study, run_ids) if self.study.constraints else None
        whole = tuple(scored for scored in scores if scored is not None)
        return Result(run_ids, whole, paused_at=until, constraints=bounded, tokens=tokens)

    # Writing down what came out.

    def _release(self, trial: Trial) -> None:
        if self._is_mine(trial):
            self._note(trial, work=Work(until=trial.work.until).plain())

    def _is_mine(self, trial: Trial) -> bool:
        """Whether the claim still holds: a worker that was given up for dead tells nothing."""
        current = self._reread(trial)
        return not current.ended and current.work.worker is not None and current.work.worker.id == self.worker.id

    def _tell(self, task: Task, result: Result, seconds: float) -> str:
        trial = self._reread(task.trial)
        if trial.ended or not self._is_mine(trial):
            return f"  trial {trial.number} has ended, or another worker has taken it over; this result is not used"
        # Counted from the claim: told once more after a lost connection, it says the same.
        spent = float(task.trial.about.get("seconds", 0.0)) + seconds
        gpus = _gpus(self.document.experiment.experiment)
        self._note(trial, run_ids=list(result.run_ids), seconds=spent, gpu_hours=spent * gpus / 3600)
        if result.tokens:
            self._note(trial, tokens=result.tokens)
        if result.constraints is not None:
            self._note(trial, constraints=dict(result.constraints))
        if not result.values:
            return self._tell_failure(trial, result, attempts=task.trial.attempts + 1)
        if result.paused_at:
            return self._tell_rung(trial, result.paused_at, result.values[0])
        return self._tell_end(trial, result.values)

    def _tell_end(self, trial: Trial, values: Sequence[Score]) -> str:
        from optuna.trial import TrialState

        self._note(trial, value_low=values[0].low, value_high=values[0].high, ended_at=now(), reason="")
        told = [scored.value for scored in values]
        self.storage.storage.set_trial_state_values(trial.id, TrialState.COMPLETE, told)
        return f"  {'  '.join(_shown(scored) for scored in values)}"

    def _tell_rung(self, trial: Trial, step: int, scored: Score) -> str:
        reached = {**trial.rungs, step: scored}
        plain = {str(at): asdict(score) for at, score in reached.items()}
        if step not in trial.rungs:
            self.storage.storage.set_trial_intermediate_value(trial.id, step, scored.value)
        self._note(trial, rungs=plain)
        current = self._reread(trial)
        verdict, why = rungs.verdict(self.study, current, self._trials())
        if verdict == "stop":
            self._end_pruned(current, why)
            return f"  {_shown(scored)} at step {step}: pruned, {why}"
        if verdict == "pause":
            self._note(trial, work=Work(paused=True).plain())
        else:
            self._claim(current, rungs.next_step(self.study, current))
        return f"  {_shown(scored)} at step {step}"

    def _end_pruned(self, trial: Trial, why: str) -> None:
        from optuna.trial import TrialState

        self._note(trial, reason=why, at_fault=False, ended_at=now())
        self.storage.storage.set_trial_state_values(trial.id, TrialState.PRUNED)

    def _tell_failure(self, trial: Trial, result: Result, attempts: int) -> str:
        from optuna.trial import TrialState

        if result.again and attempts < ATTEMPTS:
            self._note(trial, attempts=attempts, work=Work(until=trial.work.until).plain())
            return f"  once more: {result.reason}"
        self._note(trial, reason=result.reason, at_fault=result.at_fault, ended_at=now())
        state = TrialState.PRUNED if result.at_fault else TrialState.FAIL
        self.storage.storage.set_trial_state_values(trial.id, state)
        return f"  failed: {result.reason}"

    # The record.

    def write_record(self, *, at_once: bool = False) -> dict[str, Any]:
        """Writes study.json; of a large study not at every change, so that the record never costs much of the time.

        Args:
            at_once: whatever it costs.
        """
        if not at_once and time.monotonic() - self._written_at < 20 * self._write_seconds:
            return self.record
        started = time.monotonic()
        self.record = self._transaction(self._write)
        self._written_at = time.monotonic()
        self._write_seconds = self._written_at - started
        return self.record

    def _write(self) -> dict[str, Any]:
        trials, units = self._trials(), self._units()
        stopped = self._is_stopped(trials)
        searching = not stopped and (self._may_begin(trials) or any(not trial.ended for trial in trials))
        arms = [] if searching or stopped else confirmation.arms(self.study, trials)
        # Units of earlier arms, chosen when fewer trials were wanted, confirm nothing of today's.
        ended = {(unit.about["arm"], unit.about["seed"]) for unit in units if unit.ended}
        unconfirmed = any((arm.trial, seed) not in ended for arm in arms for seed in self.confirming_seeds)
        status = "searching" if searching else "confirming" if unconfirmed else "finished"
        looks = self._looks(answered=bool(arms) and not unconfirmed)
        record = study_record(
            self.document,
            trials,
            units,
            arms,
            status="stopped" if stopped else status,
            seeds=self.seeds,
            confirming_seeds=self.confirming_seeds,
            looks=looks,
            created_at=self.storage.storage.get_study_user_attrs(self._search_id)["created_at"],
        )
        write_json(self.home.study(self.study.name) / "study.json", record)
        return record

    def _looks(self, *, answered: bool) -> list[int]:
        """Numbers of fresh seeds at which the study has given an answer.

        Args:
            answered: it gives one now.
        """
        stored = self.storage.storage
        before = list(stored.get_study_user_attrs(self._search_id).get("looks", []))
        looks = sorted({*before, len(self.confirming_seeds)}) if answered else before
        if looks != before:
            stored.set_study_user_attr(self._search_id, "looks", looks)
        return looks

    def _begun_line(self, task: Task) -> str:
        from pipelines.report.evidence import show

        trial = task.trial
        values = "  ".join(f"{path}={show(value)}" for path, value in trial.params.items())
        if task.confirming:
            what = "baseline" if trial.baseline else f"trial {trial.about['arm']}  {values}"
            return f"confirming with seed {trial.about['seed']}: {what}"
        until = f"  to step {trial.work.until}" if trial.work.until else ""
        return f"trial {trial.number} ({trial.number + 1} of {self.study.trials})  {values}{until}{self._left()}"

    def _left(self) -> str:
        """How long the trials will take, for the end of a line; empty where nothing is known yet."""
        seconds = self._transaction(lambda: seconds_left(self._trials(), self.study.trials))
        return f"  (all trials: about {duration(seconds)} left)" if seconds else ""


def _gpus(experiment: Experiment) -> int:
    """How many GPUs a run holds; 0 where it computes on this machine's CPU."""
    gpus = experiment.gpus
    return slots_wanted(experiment.resources.device, gpus) if experiment.launcher.type == "local" else gpus


def _failure(run_ids: tuple[str, ...], outcome: RunOutcome, tokens: float) -> Result:
    cause = cause_of_error(outcome.error)
    reason = f"{outcome.run.run_id} {outcome.status}: {outcome.error}"
    if cause in AT_FAULT:
        return Result(run_ids, tokens=tokens, reason=f"{cause.replace('_', ' ')}: {reason}", at_fault=True)
    return Result(run_ids, tokens=tokens, reason=reason, again=cause in INFRASTRUCTURE)


def _blames(error: SpecError, params: Mapping[str, Any]) -> bool:
    """Whether the values of this trial are at fault, and not what all trials share."""
    searched = [tuple(path.split(".")) for path in params]
    blamed = [tuple(map(str, issue.path)) for issue in error.issues]
    return any(path and (path[: len(s)] == s or s[: len(path)] == path) for path in blamed for s in searched)


def _shown(scored: Score) -> str:
    ends = f" [{scored.low:.4f}, {scored.high:.4f}]" if scored.low is not None and scored.high is not None else ""
    return f"{scored.value:.4f}{ends}"


def _seconds(time_text: str) -> float:
    return datetime.fromisoformat(time_text).timestamp()
