"""The words of answers: figures with their intervals, and the sentences that a verdict does not contain."""

import math
from collections.abc import Iterable, Sequence

from pipelines.report.answer.outcome import Outcome, only_these_weights
from pipelines.report.answer.scores import Level
from pipelines.report.evidence import Group, Run, with_key
from pipelines.report.statistics import Interval
from rpg.statistics.wording import CHOSEN, ONE_SEED, look_sentence, of_runs_like_these

_MOST_NAMED = 6
"""Largest number of runs that a sentence names one by one."""


def figure(value: float, *, share: bool) -> str:
    """Returns a share in percent, or a score unchanged."""
    return percent(value) if share else f"{value:.4g}"


def change(interval: Interval, *, share: bool) -> str:
    """Returns a difference with its interval: shares in points, scores in their own units."""
    if share:
        return points(interval)
    ends = f" [{interval.low:+z.3g}, {interval.high:+z.3g}]" if interval.known else ""
    return f"{interval.value:+z.3g}{ends}"


def with_interval(interval: Interval, *, share: bool) -> str:
    """Returns a value with its interval."""
    value = figure(interval.value, share=share)
    if not interval.known:
        return value
    if share:
        return f"{value} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    return f"{value} [{interval.low:.4g}, {interval.high:.4g}]"


def figure_and_interval(interval: Interval, digits: int | None, *, share: bool, sign: str = "") -> tuple[str, str]:
    """Returns a value and its interval as texts for a table, with shares in percent. An unknown interval is empty.

    Args:
        digits: digits after the decimal point, see `digits_of`; None: four that count.
        sign: "+" for differences.
    Example:
        >>> figure_and_interval(Interval(0.7123, 0.66, 0.764), 1, share=True)
        ('71.2', '[66.0, 76.4]')
    """
    form = f"{sign}z.4g" if digits is None else f"{sign}z.{digits}f"
    unit = 100 if share else 1
    value, low, high = (format(unit * end, form) for end in (interval.value, interval.low, interval.high))
    return value, f"[{low}, {high}]" if interval.known else ""


def digits_of(intervals: Iterable[Interval | None], *, share: bool) -> int | None:
    """Returns the digits after the decimal point for a table's column: half of the narrowest interval gets two
    significant digits. None if no interval is known.

    Example:
        >>> digits_of([Interval(0.7123, 0.66, 0.764), None], share=True)
        1
    """
    unit = 100 if share else 1
    halves = [unit * (each.high - each.low) / 2 for each in intervals if each and each.known]
    narrowest = min((half for half in halves if half > 0), default=0.0)
    return min(max(1 - math.floor(math.log10(narrowest)), 0), 6) if narrowest else None


def percent(value: float) -> str:
    """Returns a share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def points(interval: Interval) -> str:
    """Returns a difference of shares in percentage points, with its interval.

    Example:
        >>> points(Interval(0.152, 0.11, 0.2))
        '+15.2 points [+11.0, +20.0]'
    """
    value = f"{100 * interval.value:+z.1f} points"
    return f"{value} [{100 * interval.low:+z.1f}, {100 * interval.high:+z.1f}]" if interval.known else value


def headline_of_one(outcome: Outcome, groups: Sequence[Group], level: Level) -> list[str]:
    """Returns the headline for one group: the change of its measure, with qualifications."""
    said = [_apart(outcome) or f"{outcome.measure.capitalize()} on {outcome.dataset} {_moved(outcome)}."]
    if only_these_weights([outcome]):
        said.append(ONE_SEED)
    elif outcome.gain is not None and outcome.apart is None and outcome.gain.low > 0:
        said.append(of_runs_like_these(outcome.num_seeds))
    looks = sorted({look for look in level.looks if 1 < look < outcome.num_seeds})
    if looks and outcome.gain is not None:
        said.append(look_sentence(looks, level.at(outcome.num_seeds), "gains"))
    if outcome.num_failed:
        worst = level.scale.worst
        counted = "not counted" if worst is None else f"counted as {figure(worst, share=outcome.is_share)}"
        said.append(f"{outcome.num_failed} of {outcome.num_seeds} seeds failed, {counted}: no gain is claimed.")
    return [*said, *not_whole(groups)]


def _apart(outcome: Outcome) -> str:
    """Returns a sentence on a seed that is far from the others, in place of a claim on the mean; empty if there is no
    such seed."""
    apart, share = outcome.apart, outcome.is_share
    if apart is None:
        return ""
    what = f"{outcome.measure.capitalize()} on {outcome.dataset}"
    if outcome.gain is None:
        one, least, most = (figure(value, share=share) for value in (apart.value, apart.least, apart.most))
        return f"{what} is {least} to {most} with {apart.num_others} seeds and {one} with one, which stands apart."
    unit = " points" if share else ""
    one, least, most = (
        f"{100 * value:+z.1f}" if share else f"{value:+z.3g}" for value in (apart.value, apart.least, apart.most)
    )
    return (
        f"{what} moved by {least} to {most}{unit} with {apart.num_others} seeds and by {one} with one, which stands"
        " apart. So no gain is claimed."
    )


def _moved(outcome: Outcome) -> str:
    share = outcome.is_share
    after = figure(outcome.after.value, share=share)
    if outcome.as_is:
        return f"is {after}"
    if outcome.gain is None or outcome.before is None:
        return f"is {after} after {outcome.step} steps"
    moved = f"{figure(outcome.before.value, share=share)} to {after}, {change(outcome.gain, share=share)}"
    if not outcome.gain.excludes(0):
        return f"did not move measurably: {moved}"
    return f"{'rose' if outcome.gain.value > 0 else 'fell'} from {moved}"


def nothing_compared(
    dataset: str, results: Sequence[Outcome], groups: Sequence[Group], lost: Sequence[Outcome]
) -> list[str]:
    at = dict.fromkeys(f"{with_key(groups[0].key, result.label)} at step {result.step}" for result in results)
    if lost or any(result.chosen for result in results):
        return [f"On {dataset} nothing is compared.", *not_compared(results, lost), *not_whole(groups)]
    why = f"they share no step at which all were evaluated ({_listed(list(at))})"
    if sum(any(run.has_ended for run in group.runs) for group in groups) < 2:
        why = "fewer than two have ended"
    elif len({result.step for result in results}) == 1:
        why = "they share no problem"
    return [f"On {dataset} nothing is compared: {why}.", *not_whole(groups)]


def not_compared(results: Sequence[Outcome], lost: Sequence[Outcome]) -> list[str]:
    return [
        *(f"{result.label} is not compared ({CHOSEN})." for result in results if result.chosen),
        *(
            f"{result.label} is not compared: it lost {result.num_failed} of its {result.num_seeds} seeds, and the"
            " reward declares no worst value with which to count them."
            for result in lost
        ),
    ]


def not_whole(groups: Sequence[Group]) -> list[str]:
    """Returns sentences on failed seeds, and on runs that have no outcome yet."""
    runs = [(group, run) for group in groups for run in group.runs if run.trains]
    failed = [_named(groups, group, run) for group, run in runs if run.status == "failed"]
    # If nothing has ended, the results so far are shown.
    ended = any(run.has_ended or run.status == "failed" for _, run in runs)
    open_ = [
        f"{_named(groups, group, run)} ({run.status})"
        for group, run in runs
        if run.status != "failed" and not run.has_ended and ended
    ]
    said = [f"Failed: {_listed(failed)}."] if failed else []
    return [*said, f"Not counted, as they have not ended: {_listed(open_)}."] if open_ else said


def _named(groups: Sequence[Group], group: Group, run: Run) -> str:
    return f"seed {run.seed}" if len(groups) == 1 else f"seed {run.seed} of {group.named}"


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
