"""Access of one worker to a study's trials in the storage: it reads, claims and ends them.

Only this module creates, claims and ends trials. All methods but `transaction` are called within one, under the study's
lock: a decision is written before another worker reads. A worker holds a trial by a lease, like a process holds a run;
it is in the study's directory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipelines.studies import conditions, confirmation, proposals
from pipelines.studies.answers.results import Arm
from pipelines.studies.confirmation import Look
from pipelines.studies.storage import StudyStorage
from pipelines.studies.trials import Score, Trial, Work, read_trial
from specs.errors import SpecError
from specs.machine.files import now
from specs.machine.lease import Lease, RunBusyError, acquire
from specs.machine.liveness import LeaseWatch
from specs.study_document import StudyDocument
from specs.study_space import Params

T = TypeVar("T")


class TrialLedger:
    """Trials of a study's search, and units of its confirmation.

    Args:
        directory: the study's directory, which all its workers share.
        stopping: whether the command was asked to stop; called while a database is unreachable.
        began: time at which the command was given, UTC, ISO-8601. It takes up trials that were cancelled before.
    """

    def __init__(
        self,
        document: StudyDocument,
        storage: StudyStorage,
        directory: Path,
        stopping: Callable[[], bool],
        began: str,
    ) -> None:
        self._document = document
        self._study = document.study
        self._storage = storage
        self._directory = directory
        self._leases: dict[int, Lease] = {}
        """Leases of this worker, by the trial's id."""
        self._watch = LeaseWatch()
        self._stopping = stopping
        self._began = began
        self._search_id = self._units_id = -1
        confirm = self._study.confirm
        self.confirming_seeds = confirmation.fresh_seeds(self._study, document.experiment.experiment.seeds)
        self.confirming_dataset = (confirm and confirm.dataset) or self._study.targets[0].dataset

    def transaction(self, work: Callable[[], T]) -> T:
        """Runs `work` under the study's lock; see StudyStorage.transaction."""
        return self._storage.transaction(work, self._stopping)

    def open(self) -> None:
        """Opens the study, or creates it with the baseline as its first trial. Raises SpecError."""
        from optuna.study import StudyDirection

        stored, study = self._storage.storage, self._study
        directions = [StudyDirection[goal.direction.upper()] for goal in study.targets]
        self._search_id = self._storage.study_id(study.name, directions)
        if study.confirm:
            self._units_id = self._storage.study_id(f"{study.name}/confirmation", directions[:1])
        before = stored.get_study_user_attrs(self._search_id)
        # A killed worker's partial notes have no effect: trials are created after the conditions.
        trials = stored.get_all_trials(self._search_id, deepcopy=False)
        finished = [trial.user_attrs.get("constraints", {}) for trial in trials if trial.state.name == "COMPLETE"]
        issues = conditions.changes(before, self._document) if trials else []
        if issues := issues + conditions.unmeasured(self._document, finished):
            raise SpecError(*(self._document.locate(issue) for issue in issues))
        if "created_at" not in before:
            stored.set_study_user_attr(self._search_id, "created_at", now())
        if not trials:
            self.note_sampler()
        for key, value in conditions.conditions(self._document).items():
            if before.get(key) != value:
                stored.set_study_user_attr(self._search_id, key, value)
        if not trials:
            params, _ = self._document.own_params()
            self._create(self._search_id, params, baseline=True)

    @property
    def created_at(self) -> str:
        """Time at which the study was created."""
        return str(self._storage.storage.get_study_user_attrs(self._search_id)["created_at"])

    def note_sampler(self) -> None:
        """Records the sampler that `sampler.type: auto` means in this study."""
        chosen = proposals.automatic(self._study)
        self._storage.storage.set_study_user_attr(self._search_id, "auto_sampler", chosen)

    @property
    def auto_sampler(self) -> str:
        """The sampler that `sampler.type: auto` means in this study. It was chosen when the study was created."""
        return str(self._storage.storage.get_study_user_attrs(self._search_id)["auto_sampler"])

    def looks(self) -> list[Look]:
        """Returns the interim analyses of the confirmation, in order."""
        attributes = self._storage.storage.get_study_user_attrs(self._search_id)
        return [Look.read(plain) for plain in attributes.get("rounds", [])]

    def note_look(self, look: Look) -> None:
        """Records an interim analysis of the confirmation."""
        noted = [*map(Look.plain, self.looks()), look.plain()]
        self._storage.storage.set_study_user_attr(self._search_id, "rounds", noted)

    def shares(self) -> dict[int, int]:
        """Returns the share of the error of each interim analysis, by its number of fresh seeds; see `share_of`."""
        return {look.seeds: look.share for look in self.looks()}

    def trials(self) -> list[Trial]:
        """Returns the trials of the search, in order."""
        return self._read(self._search_id)

    def units(self) -> list[Trial]:
        """Returns the units of the present confirmation. An earlier one may have had more seeds, or another evaluation
        set."""
        if self._units_id < 0:
            return []
        wanted = set(self.confirming_seeds)
        return [
            unit
            for unit in self._read(self._units_id)
            if unit.about["seed"] in wanted and unit.about["dataset"] == self.confirming_dataset
        ]

    def reread(self, trial: Trial) -> Trial:
        """Reads the trial again from the storage."""
        is_unit = "arm" in trial.about
        return read_trial(self._storage.storage.get_trial(trial.id), partial(self._is_held, is_unit), self._began)

    def add_trial(self, proposal: proposals.Proposal, *, until: int, bracket: int) -> Trial:
        """Returns a new trial of the search, claimed by this worker. `until`: the step to train to; 0 means the end."""
        notes = proposal.sampler_notes
        self._create(self._search_id, proposal.params, until=until, sampler_notes=notes, bracket=bracket)
        return self.claim(self.trials()[-1], until)

    def add_unit(self, arm: Arm, seed: int) -> None:
        """Adds a unit of the confirmation, which no worker has claimed yet."""
        about: dict[str, Any] = {"arm": arm.trial, "baseline": arm.baseline, "dataset": self.confirming_dataset}
        self._create(self._units_id, dict(arm.params), seed=seed, **about)

    def to_take_up(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the trial that this worker has already claimed, else the first trial without a worker."""
        if own := [trial for trial in trials if trial.state == "running" and self._holds(trial)]:
            return own[0]
        for trial in (trial for trial in trials if trial.state == "pending"):
            with suppress(RunBusyError):
                self._take(trial)
                return trial
        return None

    def claim(self, trial: Trial, until: int) -> Trial:
        """Claims a trial without a worker for this one. `until`: the step to train to; 0 means the end."""
        if not self._holds(trial):
            self._take(trial)
        self.note(trial, work=asdict(Work(until)))
        if "started_at" not in trial.about:
            self.note(trial, started_at=now())
        return self.reread(trial)

    def holds(self, trial: Trial) -> bool:
        """Returns whether this worker's claim still holds. A worker that was considered dead must not report
        results."""
        return self._holds(trial) and not self.reread(trial).ended

    def release(self, trial: Trial) -> None:
        """Releases a claim, so that any worker may claim the trial."""
        if lease := self._leases.pop(trial.id, None):
            lease.release()

    def pause(self, trial: Trial) -> None:
        """Leaves a trial at its rung, where it waits for a promotion."""
        self.note(trial, work=asdict(Work(paused=True)))
        self.release(trial)

    def cancel(self, trial: Trial, why: str) -> None:
        """Marks a trial as cancelled. The next command that runs the study continues it."""
        self.note(trial, reason=why, work=asdict(Work(trial.work.until, cancelled_at=now())))
        self.release(trial)

    def note_rung(self, trial: Trial, step: int, scored: Score) -> Trial:
        """Records a trial's value at a rung."""
        plain = {str(at): score.plain() for at, score in {**trial.rungs, step: scored}.items()}
        if step not in trial.rungs:
            self._storage.storage.set_trial_intermediate_value(trial.id, step, scored.value)
        self.note(trial, rungs=plain)
        return self.reread(trial)

    def finish(self, trial: Trial, values: Sequence[Score]) -> None:
        """Ends a trial that was trained to its end. `values`: by goal."""
        from optuna.trial import TrialState

        self.note(trial, value_low=values[0].low, value_high=values[0].high, ended_at=now(), reason="")
        if len(values[0].by_seed) > 1:
            self.note(trial, by_seed=list(values[0].by_seed))
        told = [scored.value for scored in values]
        self._storage.storage.set_trial_state_values(trial.id, TrialState.COMPLETE, told)
        self.release(trial)

    def end_without_value(self, trial: Trial, why: str, *, failed: bool = False, at_fault: bool = False) -> None:
        """Ends a trial that was pruned, or that has failed.

        Args:
            at_fault: its values caused the failure: the sampler treats it as pruned, and avoids them.
        """
        from optuna.trial import TrialState

        self.note(trial, reason=why, at_fault=at_fault, ended_at=now())
        state = TrialState.FAIL if failed and not at_fault else TrialState.PRUNED
        self._storage.storage.set_trial_state_values(trial.id, state)
        self.release(trial)

    def note(self, trial: Trial, **attributes: Any) -> None:
        """Records attributes of a trial, by name."""
        for name, value in attributes.items():
            self._storage.storage.set_trial_user_attr(trial.id, name, value)

    def _read(self, study_id: int) -> list[Trial]:
        stored = self._storage.storage.get_all_trials(study_id, deepcopy=False)
        is_held = partial(self._is_held, study_id == self._units_id)
        return [read_trial(frozen, is_held, self._began) for frozen in stored]

    def _place(self, is_unit: bool, number: int) -> Path:
        """Returns the directory with a trial's leases."""
        return self._directory / ("confirmation" if is_unit else "trials") / str(number)

    def _is_held(self, is_unit: bool, number: int) -> bool:
        place = self._place(is_unit, number)
        return place.exists() and self._watch.is_executed(place, {})

    def _holds(self, trial: Trial) -> bool:
        return trial.id in self._leases and not self._leases[trial.id].superseded

    def _take(self, trial: Trial) -> None:
        """Takes the trial's lease. Raises RunBusyError if another worker has it."""
        self._leases[trial.id] = acquire(self._place("arm" in trial.about, trial.number), watched=True)

    def _create(
        self,
        study_id: int,
        params: Params,
        *,
        until: int = 0,
        sampler_notes: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> None:
        """Creates a trial without a worker, in one operation."""
        from optuna.trial import TrialState, create_trial

        kept, distributions = proposals.stored_params(self._study, params)
        template = create_trial(
            state=TrialState.RUNNING,
            params=kept,
            distributions=distributions,
            system_attrs=dict(sampler_notes or {}),
            user_attrs={"params": params, "work": asdict(Work(until)), **about},
        )
        self._storage.storage.create_new_trial(study_id, template_trial=template)
