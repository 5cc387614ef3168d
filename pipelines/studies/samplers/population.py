"""Population-based training, Jaderberg 2017, arXiv:1711.09846, with members that are whole schedules.

Members train side by side. Every `exploit_every` steps all wait for each other; then the worst quarter ends, and each
of these leaves its place to a new trial, which has a better member's schedule up to there and that one's values changed
by chance after it. Its run goes on from the better member's checkpoint, since the two are one up to that step; so it
comes out as if it had been trained by its schedule from the start. Pure: trials in, decisions out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.studies.trials import Trial
from specs.schema.study import FloatRange, IntRange, Study
from specs.study_space import Params, bounds

PARENT, BORN, REPLACES = "population:parent", "population:born", "population:replaces"
"""Names of a member's notes: the trial whose checkpoint it has taken over, at which step, and whose place it has."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A member that takes over another one's checkpoint."""

    parent: Trial
    step: int
    """Step of the checkpoint."""
    replaces: Trial


@dataclass(frozen=True, slots=True)
class _Generation:
    """Members that train to one step, the last at which all before them have been compared."""

    begun: int
    """That step; 0: nobody has been compared."""
    going: tuple[Trial, ...]
    """Members that are still there, without those that ended at that step."""
    vacant: tuple[Trial, ...]
    """Those that ended there and whose place nobody has taken."""
    best: tuple[Trial, ...]
    """Those that may be taken over, the best first."""


def born(trial: Trial) -> int:
    """The step of the checkpoint that a member has taken over; 0: it has taken none."""
    return int(trial.sampler_notes.get(BORN, 0))


def next_step(study: Study, step: int, horizon: int) -> int:
    """The next step after this one at which members are compared; 0: the end."""
    following = step - step % study.sampler.exploit_every + study.sampler.exploit_every
    return following if following < horizon else 0


def is_complete(study: Study, trials: Sequence[Trial], horizon: int) -> bool:
    """Whether no member is to begin now."""
    return _members(trials) >= study.sampler.members and newcomer(study, trials, horizon) is None


def newcomer(study: Study, trials: Sequence[Trial], horizon: int) -> Newcomer | None:
    """The next member that takes another one's place now; None: nobody does."""
    if _members(trials) < study.sampler.members:
        return None
    now = _generation(study, trials, horizon)
    if not now.vacant or not now.best or any(trial.rung > now.begun or _is_beyond(trial, now) for trial in now.going):
        return None
    rng = np.random.default_rng([study.sampler.seed, len(trials), 0])
    return Newcomer(now.best[int(rng.integers(len(now.best)))], now.begun, now.vacant[0])


def goes_on(study: Study, trials: Sequence[Trial], horizon: int) -> Trial | None:
    """The member that goes on from where all have been compared; None: nobody does now."""
    now = _generation(study, trials, horizon)
    return next((trial for trial in now.going if trial.state == "paused" and trial.rung == now.begun), None)


def first_values(params: Params) -> Params:
    """The params of a member as schedules that hold one value so far."""
    return {path: {"schedule": [[1, value]]} for path, value in params.items()}


def changed_values(study: Study, new: Newcomer, number: int) -> Params:
    """The params of a member that takes another one's place: the parent's schedules, and other values from there.

    Args:
        number: the member's, of all trials.
    """
    rng = np.random.default_rng([study.sampler.seed, number, 1])
    params: Params = {}
    for path, searched in study.parameters.items():
        assert isinstance(searched, (FloatRange, IntRange))
        points = [list(point) for point in new.parent.params[path]["schedule"]]
        value = _changed(points[-1][1], searched, study.sampler.perturb, upward=bool(rng.integers(2)))
        if value != points[-1][1]:
            points.append([new.step + 1, value])
        params[path] = {"schedule": points}
    return params


def why_ended(trial: Trial, trials: Sequence[Trial]) -> str:
    """Why a member that waits when the search ends did not go on."""
    heir = next((other for other in trials if other.sampler_notes.get(REPLACES) == trial.number), None)
    taken = f"; trial {heir.number} took its place with trial {heir.sampler_notes[PARENT]}'s checkpoint" if heir else ""
    return f"{trial.rungs[trial.rung].value:.4f} at step {trial.rung}, among the worst there{taken}"


def _members(trials: Sequence[Trial]) -> int:
    """How many members have begun with values of their own."""
    return sum(not trial.baseline and not born(trial) for trial in trials)


def _generation(study: Study, trials: Sequence[Trial], horizon: int) -> _Generation:
    going = [trial for trial in trials if not trial.baseline and not born(trial)]
    begun, vacant, best = 0, list[Trial](), list[Trial]()
    while going and (step := next_step(study, begun, horizon)):
        if (begun == 0 and len(going) < study.sampler.members) or any(
            trial.rung < step and not trial.ended for trial in going
        ):
            break
        ranked = sorted(going, key=lambda trial: _place(study, trial, step))
        lost = sum(step not in trial.rungs for trial in ranked)
        worst = ranked[len(ranked) - min(len(ranked) - 1, max(lost, 1, len(ranked) // 4)) :]
        stay = ranked[: len(ranked) - len(worst)]
        best = [trial for trial in stay[: len(worst)] if _keeps(trial, step)]
        children = [trial for trial in trials if born(trial) == step]
        replaced = {trial.sampler_notes[REPLACES] for trial in children}
        vacant = [trial for trial in worst if trial.number not in replaced]
        begun, going = step, sorted([*stay, *children], key=lambda trial: trial.number)
    return _Generation(begun, tuple(going), tuple(vacant), tuple(best))


def _is_beyond(trial: Trial, now: _Generation) -> bool:
    """Whether a member of an earlier generation has been let on already."""
    return born(trial) < now.begun and not trial.ended and trial.state != "paused"


def _keeps(trial: Trial, step: int) -> bool:
    """Whether a member was there at a step, within the constraints."""
    return step in trial.rungs and bool(trial.about.get("kept", {}).get(str(step), True))


def _place(study: Study, trial: Trial, step: int) -> tuple[bool, bool, float, int]:
    """By which members are sorted, the best first: those that were not there last, those that break a constraint before
    them."""
    sign = 1 if study.targets[0].direction == "maximize" else -1
    value = -sign * trial.rungs[step].value if step in trial.rungs else 0.0
    return step not in trial.rungs, not _keeps(trial, step), value, trial.number


def _changed(value: Any, searched: FloatRange | IntRange, factor: float, *, upward: bool) -> Any:
    """A value times or over the factor, within the range; a whole number by one at least."""
    low, high = bounds(searched)
    target = value * factor if upward else value / factor
    if isinstance(searched, IntRange):
        moved = max(round(target), value + 1) if upward else min(round(target), value - 1)
        return int(min(max(moved, low), high))
    return float(min(max(target, low), high))
