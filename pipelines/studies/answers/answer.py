"""A study's answer in words, which claims only what fresh seeds confirm, and the intervals that it rests on.

The best of a search is a candidate: the best of many measurements flatters itself. A claim comes from the confirmation
alone: the candidates and the baseline on seeds that no trial had, each candidate held against the baseline with
intervals that hold together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.home import Home
from pipelines.report.answer import BySteps, percent, points
from pipelines.report.evidence import accuracies, load_run, other_measures, show
from pipelines.report.statistics import (
    Interval,
    arms_against_first,
    mean_interval,
    seed_difference,
    seed_mean,
    spread_of,
)
from pipelines.studies.answers.results import (
    Arm,
    Best,
    Confirmation,
    Goal,
    Params,
    StudyRecord,
    best_trial,
    pareto_front,
)
from storage import Store


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm of the confirmation with what its fresh seeds gave."""

    arm: Arm
    mean: Interval
    against_baseline: Interval | None
    """Less the baseline; the intervals of all candidates hold together. None for the baseline itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a study found."""

    sentence: str
    note: str
    """What the sentence rests on."""
    arms: tuple[ArmResult, ...] = ()
    """The baseline first; empty before the confirmation is over."""


def answer(home: Home, record: StudyRecord) -> Answer:
    """The study's answer as far as it goes."""
    if record.confirmation and record.confirmation.measured:
        arms = confirmed_arms(home, record, record.confirmation)
        return Answer(_verdict(record, record.confirmation, arms), _confirmation_note(record, arms), arms)
    return Answer(_candidate(record), _search_note(record))


def confirmed_arms(home: Home, record: StudyRecord, confirmation: Confirmation) -> tuple[ArmResult, ...]:
    """The arms that ran on at least two fresh seeds, each candidate held against the baseline.

    mean@k, pass@k and maj@k are compared over seeds and problems, the problems being the same for all; a training
    metric over its values, one a seed, at a level at which the intervals hold together (Bonferroni).
    """
    arms, level = confirmation.measured, record.confidence
    goal = replace(record.first, dataset=confirmation.dataset)
    if tables := _tables(home, goal, arms):
        spread = spread_of(tables)
        means = [mean_interval(table, confidence=level, spread=spread) for table in tables]
        against = arms_against_first(tables, confidence=level)
    else:
        values = [[unit.value for unit in arm.finished if unit.value is not None] for arm in arms]
        means = [seed_mean(row, confidence=level) for row in values]
        each = 1 - (1 - level) / (len(arms) - 1)
        against = [seed_difference(values[0], row, confidence=each) for row in values[1:]]
    rows = zip(arms, means, [None, *against], strict=True)
    return tuple(ArmResult(arm, mean, difference) for arm, mean, difference in rows)


def standing(home: Home, record: StudyRecord, best: Best) -> str:
    """candidate, confirmed, or no difference: fresh seeds do not tell the best candidate from the baseline."""
    if best.standing == "candidate" or record.confirmation is None:
        return "candidate"
    _, *candidates = confirmed_arms(home, record, record.confirmation)
    return "confirmed" if _best_candidate(record, candidates)[1].tells_from(0) else "no difference"


def amount(goal: Goal, value: float) -> str:
    """A value of a goal: a share in percent, another measure as it is."""
    return percent(value) if goal.is_share else f"{value:.4g}"


def difference(goal: Goal, interval: Interval) -> str:
    """A difference with its interval: of shares in points."""
    if goal.is_share:
        return points(interval)
    ends = f" [{interval.low:+.3g}, {interval.high:+.3g}]" if interval.known else ""
    return f"{interval.value:+.3g}{ends}"


def with_interval(goal: Goal, interval: Interval) -> str:
    """A value with its interval."""
    if not interval.known:
        return amount(goal, interval.value)
    if goal.is_share:
        return f"{percent(interval.value)} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    return f"{interval.value:.4g} [{interval.low:.4g}, {interval.high:.4g}]"


def settings_words(params: Params) -> str:
    """`objective.clip.low 0.2, objective.clip.high 0.28`."""
    return ", ".join(f"{path} {show(value)}" for path, value in params.items())


def _tables(home: Home, goal: Goal, arms: Sequence[Arm]) -> list[list[list[float]]]:
    """Of each arm the scores [seeds, problems] of its runs' last checkpoints; none where the measure has no such."""
    if not goal.is_share:
        return []
    run_ids = [unit.run_id for arm in arms for unit in arm.finished]
    with Store.open(home.root) as store:
        scores = _scores(home, store, goal, run_ids)
    if not all(scores.get(run_id) for run_id in run_ids):
        return []
    last = {run_id: steps[max(steps)] for run_id, steps in scores.items()}
    problems = sorted(set.intersection(*(set(last[run_id]) for run_id in run_ids)))
    if not problems:
        return []
    return [[[last[unit.run_id][problem] for problem in problems] for unit in arm.finished] for arm in arms]


def _scores(home: Home, store: Store, goal: Goal, run_ids: Sequence[str]) -> BySteps:
    """Each problem's score by run and step; of pass@k and maj@k, which take longer, at the last step alone."""
    if goal.metric.startswith("mean@"):
        return accuracies(store, run_ids).get(goal.dataset, {})
    query = "SELECT DISTINCT max(step) FROM evaluations WHERE list_contains(?, run_id) GROUP BY run_id"
    steps = [row[0] for row in store.query(query, [list(run_ids)]).rows]
    runs = [load_run(home, run_id) for run_id in run_ids]
    return other_measures(store, runs, steps).get(goal.metric, {}).get(goal.dataset, {})


def _verdict(record: StudyRecord, confirmation: Confirmation, arms: Sequence[ArmResult]) -> str:
    """What the confirmation says of the best candidate and the baseline."""
    goal = replace(record.first, dataset=confirmation.dataset)
    baseline, *candidates = arms
    best, against = _best_candidate(record, candidates)
    gap, seeds = difference(goal, against), len(best.arm.finished)
    values = f"{amount(goal, best.mean.value)} against {amount(goal, baseline.mean.value)}"
    if not against.tells_from(0):
        several = f"the best of {len(candidates)} candidates" if len(candidates) > 1 else "the candidate"
        return (
            f"No difference found: {several} came out {gap} in {goal.measure} against the experiment's own values "
            f"on {seeds} fresh seeds ({values})."
        )
    if goal.better(against.value) < 0:
        return (
            f"The experiment's own values are better than every candidate: the best of them came out {gap} in "
            f"{goal.measure} on {seeds} fresh seeds ({values})."
        )
    return (
        f"{best.arm.label.capitalize()} is better than the baseline by {gap} in {goal.measure} on {seeds} fresh seeds "
        f"({values}): {settings_words(best.arm.params)}."
    )


def _best_candidate(record: StudyRecord, candidates: Sequence[ArmResult]) -> tuple[ArmResult, Interval]:
    """The candidate with the best mean on fresh seeds, and what it has over the baseline."""
    best = max(candidates, key=lambda result: record.first.better(result.mean.value))
    assert best.against_baseline is not None
    return best, best.against_baseline


def _num_judged(record: StudyRecord) -> int:
    """How many trials the best was chosen from: those that were left behind at a rung count too."""
    return sum(trial.state in ("finished", "pruned", "paused") for trial in record.trials)


def _candidate(record: StudyRecord) -> str:
    """What the search says: a candidate, of which nothing is claimed."""
    if not record.finished:
        return "No trial has finished yet."
    trial = best_trial(record)
    if trial is None:
        return "No trial that finished keeps the constraints."
    if len(record.goals) > 1:
        numbers = [str(trial.number) for trial in pareto_front(record)]
        one = len(numbers) == 1
        return (
            f"Candidates: trial{'' if one else 's'} {', '.join(numbers)}, which no other beats in every goal "
            f"(not confirmed; the best of {_num_judged(record)} trials flatters itself)."
        )
    assert trial.interval is not None
    value = f"{record.first.measure} {with_interval(record.first, trial.interval)}"
    flattered = f"(not confirmed; the best of {_num_judged(record)} trials flatters itself)"
    if len(record.finished) == 1:
        flattered = "(not confirmed)"
    if trial.baseline:
        others = "" if len(record.finished) == 1 else ", which no other trial came out above"
        return f"Candidate: the experiment's own values{others}: {value} {flattered}."
    return f"Candidate: {settings_words(trial.params)}: {value} {flattered}."


def _search_note(record: StudyRecord) -> str:
    """How far the confirmation is, or how there would be one."""
    confirmation = record.confirmation
    if confirmation is not None and confirmation.units:
        ended = sum(unit.state in ("finished", "failed") for unit in confirmation.units)
        if not confirmation.over:
            runs = f"{ended} of {len(confirmation.units)} runs on fresh seeds"
            return f"The confirmation is not complete: {runs} have ended."
        return "The confirmation failed: the baseline or every candidate has fewer than two runs with a value."
    if best_trial(record) is None:
        return ""
    of_one = " One seed cannot tell what training does." if len(record.seeds) == 1 else ""
    level = f"{100 * record.confidence:g} %"
    return (
        f"Brackets are {level} intervals of the trial by itself, not of its being the best.{of_one} "
        "With `confirm` in its file a study, once its search is over, runs the best again on fresh seeds."
    )


def _confirmation_note(record: StudyRecord, arms: Sequence[ArmResult]) -> str:
    assert record.confirmation is not None
    units = record.confirmation.units
    lost = sum(unit.state == "failed" for unit in units)
    level = f"{100 * record.confidence:g} %"
    together = "; those of the candidates hold together" if len(arms) > 2 else ""
    failed = f" {lost} of its {len(units)} runs failed; the intervals are of the others." if lost else ""
    seeds = ", ".join(map(str, record.confirmation.seeds))
    return f"Confirmed on seeds that no trial had ({seeds}): brackets are {level} intervals{together}.{failed}"
