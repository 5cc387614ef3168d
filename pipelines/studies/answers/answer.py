"""A study's answer as text, and its intervals. It claims only results that are confirmed on fresh seeds.

The best of a search is only a candidate: the best of many measurements is biased upward. Claims come only from the
confirmation: the candidates and the baseline on seeds that no trial had, and the words of `verdict` on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.home.home import Home
from pipelines.report.answer import BySteps, change, figure
from pipelines.report.answer import with_interval as value_with_interval
from pipelines.report.answer.costs import measured_by
from pipelines.report.evidence import accuracies, clusters, load_run, other_measures, short_names, show
from pipelines.report.statistics import Interval, Verdict, mean_interval, seed_mean, spread_of, verdict
from pipelines.report.statistics import level as level_of_look
from pipelines.studies.answers.results import (
    SHARES,
    Arm,
    Best,
    Goal,
    Params,
    StudyRecord,
    best_of,
    best_trial,
    pareto_front,
)
from rpg.statistics.variance import spread_with_failures
from rpg.statistics.wording import level_words
from storage import Store

_FEW = 3
"""Smallest number of trials for which the answer may say that all have the same value."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm of the confirmation with its results on the fresh seeds."""

    arm: Arm
    mean: Interval
    """The mean over the seeds. Failed seeds count with the goal's worst value, if it has one."""
    against_baseline: Interval | None
    """Difference from the baseline, as in the verdict. None for the baseline itself, and if nothing is claimed about
    the arm."""
    differs: bool
    """Whether the verdict distinguishes the arm from the baseline."""
    broken: tuple[str, ...]
    """The constraints that the arm breaks on fresh seeds."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Result of the confirmation on fresh seeds."""

    arms: tuple[ArmResult, ...]
    """The baseline first."""
    verdict: Verdict
    """Verdict on the baseline and on those arms that satisfy the constraints and have a value for every seed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a study."""

    sentence: str
    note: str
    """The data on which the sentence is based."""
    arms: tuple[ArmResult, ...] = ()
    """The arms, the baseline first; empty before the confirmation is over."""


def answer(home: Home, record: StudyRecord) -> Answer:
    """Returns the study's answer so far."""
    if record.measured:
        found = confirmed(home, record)
        note = _with(_without_effect(record), _confirmation_note(record, found))
        return Answer(_sentence(record, found), note, found.arms)
    return Answer(_candidate(record), _with(_without_effect(record), _search_note(record)))


def confirmed(home: Home, record: StudyRecord) -> Confirmed:
    """Returns the results of the arms on fresh seeds, and conclusions about them.

    mean@k, pass@k, maj@k and score@k are compared over seeds and problems, with the same problems for all; a training
    metric over its values, one for each seed. A failed seed counts with the goal's worst value. A training metric has
    no worst value, nor has a score whose reward declares none: then nothing is claimed if a seed failed. Nothing is
    claimed about a candidate that breaks a constraint.
    """
    assert record.confirmation is not None
    arms, level = record.measured, record.confidence
    goal = replace(record.first, dataset=record.confirmation.dataset)
    tables, labels = _tables(home, goal, arms)
    figures = not tables
    scores = tables or [_values(arm) for arm in arms]
    worst = 0.0 if goal.worst is None else goal.worst
    means = _means(arms, scores, goal, labels, level, figures=figures)
    broken = [tuple(record.broken(arm)) for arm in arms]
    held = {
        arm.label: table
        for arm, table, breaks in zip(arms, scores, broken, strict=True)
        if (arm.baseline or not breaks) and not (goal.worst is None and arm.failed)
    }
    said = (
        verdict(
            held,
            (),
            level_of_look(level, record.confirmation.share),
            labels,
            worst,
            higher_is_better=goal.direction == "maximize",
            figures=figures,
            shares=goal.is_share,
        )
        if held
        else Verdict(None, (), "", (), {})
    )
    baseline = arms[0].label
    compared = [baseline in held and arm.label in held and not arm.baseline for arm in arms]
    return Confirmed(
        tuple(
            ArmResult(
                arm,
                mean,
                said.over(arm.label, baseline) if has else None,
                has and said.tells(arm.label, baseline),
                breaks,
            )
            for arm, mean, breaks, has in zip(arms, means, broken, compared, strict=True)
        ),
        said,
    )


def better_arms(home: Home, record: StudyRecord) -> list[Arm]:
    """Returns the candidates that are better than the baseline on fresh seeds."""
    if not record.measured:
        return []
    found = confirmed(home, record)
    baseline, *others = found.arms
    named = {one for one, other, _ in found.verdict.differences if other == baseline.arm.label}
    return [result.arm for result in others if result.arm.label in named]


def study_best(home: Home, record: StudyRecord) -> Best | None:
    """Returns the best trial of the study, in agreement with its answer; see `best_of`."""
    return best_of(record, better_arms(home, record))


def _means(
    arms: Sequence[Arm],
    scores: Sequence[NDArray[np.float64]],
    goal: Goal,
    labels: Sequence[object] | None,
    level: float,
    *,
    figures: bool,
) -> list[Interval]:
    """Returns the mean of each arm. Failed seeds count with the goal's worst value; for a training metric they are left
    out."""
    worst = goal.worst
    reaches = [abs(table[~np.isnan(table).any(axis=1)].mean(axis=1) - worst) for table in scores if worst is not None]
    reach = max((float(each.max()) for each in reaches if each.size), default=0.0) or (
        1.0 if goal.is_share else math.nan
    )
    whole = [table if goal.worst is None else np.where(np.isnan(table), goal.worst, table) for table in scores]
    lost = [
        spread_with_failures(table, len(arm.failed), reach) if arm.failed and worst is not None else None
        for table, arm in zip(whole, arms, strict=True)
    ]
    if figures:
        found = [
            seed_mean(table[~np.isnan(table)], confidence=level, spread=least)
            for table, least in zip(whole, lost, strict=True)
        ]
        return [interval.within(0, 1) if goal.is_share else interval for interval in found]
    spread = spread_of([table for table, arm in zip(whole, arms, strict=True) if not arm.failed])
    return [
        mean_interval(table, confidence=level, clusters=labels, spread=least if arm.failed else spread)
        for table, arm, least in zip(whole, arms, lost, strict=True)
    ]


def standing(home: Home, record: StudyRecord, best: Best) -> str:
    """Returns candidate, confirmed, or no difference. The last means that fresh seeds do not distinguish the best
    candidate from the baseline."""
    if best.standing == "candidate" or record.confirmation is None:
        return "candidate"
    _, *others = confirmed(home, record).arms
    told = [result.differs for result in others if best.baseline or result.arm.trial == best.trial]
    return "confirmed" if told and all(told) else "no difference"


def amount(goal: Goal, value: float) -> str:
    """Returns a goal's value as text: a share in percent, another measure in its own units."""
    return figure(value, share=goal.is_share)


def rise(goal: Goal, value: float) -> str:
    """Returns a difference without an interval. Shares are in points."""
    return f"{100 * value:.1f} points" if goal.is_share else f"{value:.3g}"


def difference(goal: Goal, interval: Interval) -> str:
    """Returns a difference with its interval. Shares are in points."""
    return change(interval, share=goal.is_share)


def with_interval(goal: Goal, interval: Interval) -> str:
    """Returns a value with its interval."""
    return value_with_interval(interval, share=goal.is_share)


def settings_words(params: Params) -> str:
    """Returns the params on one line: `clip.low 0.2, clip.high 0.28`."""
    names = short_names(params)
    return ", ".join(f"{names[path]} {show(value)}" for path, value in params.items())


def _values(arm: Arm) -> NDArray[np.float64]:
    """Returns the value of each seed, [seeds, 1]; NaN for a failed one."""
    values = [math.nan if unit.value is None else unit.value for unit in (*arm.finished, *arm.failed)]
    return np.array(values)[:, None]


def _tables(home: Home, goal: Goal, arms: Sequence[Arm]) -> tuple[list[NDArray[np.float64]], Sequence[object] | None]:
    """Returns the scores [seeds, problems] of each arm at the last step that all its runs have, with NaN for failed
    seeds, and the problems' clusters. Empty if the measure has no scores by problem."""
    run_ids = [unit.run_id for arm in arms for unit in arm.finished]
    if not goal.dataset:
        return [], None
    with Store.open(home.root) as store:
        scores = _scores(home, store, goal, run_ids)
        shared = clusters(store, run_ids).get(goal.dataset, {})
    steps = [set(scores.get(run_id, ())) for run_id in run_ids]
    step = max(set.intersection(*steps), default=0) if steps else 0
    problems = sorted(set.intersection(*(set(scores[run_id][step]) for run_id in run_ids))) if step else []
    if not problems:
        return [], None
    lost = [math.nan] * len(problems)
    return [
        np.array(
            [[scores[unit.run_id][step][problem] for problem in problems] for unit in arm.finished]
            + [lost for _ in arm.failed]
        )
        for arm in arms
    ], [shared.get(problem, problem) for problem in problems] if shared else None


def _scores(home: Home, store: Store, goal: Goal, run_ids: Sequence[str]) -> BySteps:
    """Returns each problem's score by run and step. pass@k and maj@k take longer and are computed only at the last
    step."""
    if goal.metric.startswith(("mean@", "score@")):
        return accuracies(store, run_ids).get(goal.dataset, {})
    if not goal.metric.startswith(SHARES):
        return measured_by(store, run_ids, goal.metric, goal.dataset)
    query = "SELECT DISTINCT max(step) FROM evaluations WHERE list_contains(?, run_id) GROUP BY run_id"
    steps = [row[0] for row in store.query(query, [list(run_ids)]).rows]
    runs = [load_run(home, run_id) for run_id in run_ids]
    return other_measures(store, runs, steps).get(goal.metric, {}).get(goal.dataset, {})


def _sentence(record: StudyRecord, found: Confirmed) -> str:
    """Returns the verdict, the settings of a candidate that is better than the baseline, and the reasons for claims
    that are not made."""
    assert record.confirmation is not None
    goal = replace(record.first, dataset=record.confirmation.dataset)
    said = [f"On {len(record.confirmation.seeds)} fresh seeds, {goal.measure}: {found.verdict.text}".rstrip(": ")]
    baseline = found.arms[0].arm.label
    said += [
        f"{result.arm.label.capitalize()}: {settings_words(result.arm.params)}."
        for result in found.arms
        if any(row[:2] == (result.arm.label, baseline) for row in found.verdict.differences)
    ]
    for result in found.arms:
        name, lost = result.arm.label.capitalize(), result.arm.failed
        said += [f"{name} breaks the constraint {broken} on fresh seeds." for broken in result.broken]
        if lost and goal.worst is None:
            said.append(
                f"{name} lost {len(lost)} of its {len(result.arm.units)} seeds, and {goal.measure} has no worst value"
                " with which to count them, so nothing is claimed about it."
            )
    return " ".join(said)


def _num_judged(record: StudyRecord) -> int:
    """Returns the number of trials among which the best was selected, including trials that were pruned at a rung."""
    return sum(trial.state in ("finished", "pruned", "paused") for trial in record.trials)


def _candidate(record: StudyRecord) -> str:
    """Returns a sentence on the candidate of the search, which claims nothing."""
    if not record.finished:
        return "No trial has finished yet."
    trial = best_trial(record)
    if trial is None:
        return "No finished trial satisfies the constraints."
    if len(record.goals) > 1:
        numbers = [str(trial.number) for trial in pareto_front(record)]
        one = len(numbers) == 1
        return (
            f"Candidates: trial{'' if one else 's'} {', '.join(numbers)}, which no other trial beats in every goal "
            f"(not confirmed; the best of {_num_judged(record)} trials is biased)."
        )
    assert trial.interval is not None
    who = settings_words(trial.params)
    if trial.baseline:
        others = "" if len(record.finished) == 1 else ", which no other trial beat"
        who = f"the experiment's own values{others}"
    said = [f"Candidate: {who} (not confirmed)."]
    value = with_interval(record.first, trial.expected or trial.interval)
    if trial.expected:
        said.append(f"A model of {_num_judged(record)} trials expects {record.first.measure} {value} for it.")
        said.append(f"The chance that no trial is better is {100 * trial.chance:.0f} %.")
    elif len(record.finished) == 1:
        said.append(f"Its {record.first.measure} is {value}.")
    else:
        biased = f"the best of {_num_judged(record)} trials is biased"
        said.append(f"Its {record.first.measure} is {value}; {biased}.")
    return " ".join(said)


def _with(*notes: str) -> str:
    return " ".join(filter(None, notes))


def _without_effect(record: StudyRecord) -> str:
    """Returns a sentence that says that all trials have the same value; empty if they do not, or if they are too
    few."""
    finished = record.finished
    tried = {settings_words(trial.params) for trial in finished}
    if len(tried) < _FEW or len({trial.values for trial in finished}) > 1:
        return ""
    searched = ", ".join(record.parameters)
    return (
        f"All {len(finished)} trials have exactly the same value: either {searched} did not change their"
        " training, or the goal does not show the change."
    )


def _search_note(record: StudyRecord) -> str:
    """Returns the progress of the confirmation, or how to request one."""
    confirmation = record.confirmation
    if confirmation is not None and confirmation.units:
        ended = sum(unit.state in ("finished", "failed") for unit in confirmation.units)
        if not confirmation.over:
            runs = f"{ended} of {len(confirmation.units)} runs on fresh seeds"
            return f"The confirmation is not complete: {runs} have ended."
        return "The confirmation failed: the baseline or every candidate has fewer than two runs with a value."
    if best_trial(record) is None:
        return ""
    of_one = " One seed: the interval covers no new training runs." if len(record.seeds) == 1 else ""
    # While it searches, the record does not say whether a confirmation follows.
    again = " With `confirm` in its file, a study runs its best trials again on fresh seeds."
    return (
        f"Brackets are {level_words(record.confidence)} intervals of the trial by itself, not corrected for"
        f" the choice of the best.{of_one}{again if record.status == 'finished' else ''}"
    )


def _confirmation_note(record: StudyRecord, found: Confirmed) -> str:
    """Returns the note on a confirmation: its seeds, interim analyses, confidence levels and lost runs."""
    assert record.confirmation is not None
    confirmation, now = record.confirmation, len(record.confirmation.seeds)
    arms, seeds = found.arms, ", ".join(map(str, confirmation.seeds))
    most = ended = ""
    if now < confirmation.most:
        won = any(worse == arms[0].arm.label for _, worse, _ in found.verdict.differences)
        why = "a candidate is better than the baseline" if won else "no candidate could still win"
        most, ended = f" of at most {confirmation.most}", f"; stopped, since {why}"
    said = [f"Measured on {now} fresh seeds{most} ({seeds}){ended}."]
    if before := [str(look) for look in confirmation.looks if 1 < look < now]:
        numbers = " and ".join([*([", ".join(before[:-1])] if before[1:] else []), before[-1]])
        said.append(f"Earlier interim analys{'es' if before[1:] else 'is'} at {numbers} seeds.")
    level, together = level_words(record.confidence), "; those of differences hold together" if len(arms) > 2 else ""
    if confirmation.share:
        of_differences = level_words(level_of_look(record.confidence, confirmation.share))
        said.append(f"Brackets of arms are {level} intervals, of differences {of_differences}{together}.")
    else:
        said.append(f"Brackets are {level} intervals{together}.")
    said += [
        f"{arm.label.capitalize()} stopped after {arm.stopped_after} seeds, since it could no longer win."
        for arm in confirmation.arms
        if arm.stopped_after
    ]
    if lost := sum(len(result.arm.failed) for result in arms):
        worst = record.first.worst
        counted = "" if worst is None else f"; each counts as {amount(record.first, worst)}"
        said.append(f"{lost} of {len(confirmation.units)} runs failed ({_lost_seeds(arms)}){counted}.")
    return " ".join(said)


def _lost_seeds(arms: Sequence[ArmResult]) -> str:
    """Returns `trial 2: 100, 103`."""
    lost = [(result.arm.label, [str(unit.seed) for unit in result.arm.failed]) for result in arms]
    return "; ".join(f"{label}: {', '.join(seeds)}" for label, seeds in lost if seeds)
