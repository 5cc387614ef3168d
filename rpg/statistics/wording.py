"""The sentences of a verdict: shares in percent, differences of shares in points."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rpg.statistics.variance import Interval

ONE_SEED = "One seed cannot tell what training does: its interval is about these weights on new problems."

CHOSEN = "chosen on these problems: flatters itself"
"""Said beside an accuracy by which its checkpoint was chosen."""


class _Arm(Protocol):
    @property
    def label(self) -> str: ...
    @property
    def mean(self) -> float: ...
    @property
    def num_seeds(self) -> int: ...
    @property
    def num_failed(self) -> int: ...


Difference = tuple[str, str, Interval]
"""The better arm, the worse, and the first less the second."""


def sentence(
    arms: Sequence[_Arm],
    best: str | None,
    differences: Sequence[Difference],
    pairs: Mapping[tuple[str, str], Interval],
    *,
    shares: bool,
    sign: int,
    trained: bool,
    worst: float,
    looks: Sequence[int] = (),
) -> str:
    """Sentence of a headline: who is best, all that differ or that nothing does, and which seeds were lost.

    Args:
        pairs: the intervals of all pairs.
        sign: 1 where the higher score is the better, else -1.
        looks: numbers of seeds at which the question was asked before.
    """
    words = _Words(shares)
    kind = "arm" if trained else "model"
    if trained and len(arms) > 1 and all(arm.num_seeds == 1 for arm in arms):
        return f"{_highest(arms, words, sign)} {ONE_SEED}"
    if len(arms) == 1:
        said = [f"{arms[0].label} has {words.amount(arms[0].mean)}."]
    elif best is not None:
        said = [_of_best(arms, best, differences, words), *_of_rest(best, differences, words)]
    elif differences:
        said = [f"No {kind} is best.", *_of_rest(None, differences, words)]
    else:
        said = [_of_none(arms, pairs, words, kind)]
    if looks and len(arms) > 1:
        asked = _list([str(look) for look in looks])
        said.append(f"It was asked before at {asked} seeds, so that less is claimed than at a first look.")
    return " ".join([*said, *_caveats(arms, words, worst, trained)])


class _Words:
    """Figures in words: shares in percent, differences of shares in points."""

    def __init__(self, shares: bool) -> None:
        self._shares = shares

    def amount(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self._shares else f"{value:.4g}"

    def gap(self, interval: Interval) -> str:
        if self._shares:
            value, ends = f"{100 * interval.value:+.1f} points", (100 * interval.low, 100 * interval.high)
            return f"{value} [{ends[0]:+.1f}, {ends[1]:+.1f}]" if interval.known else value
        value = f"{interval.value:+.3g}"
        return f"{value} [{interval.low:+.3g}, {interval.high:+.3g}]" if interval.known else value

    def distance(self, interval: Interval) -> str:
        """How far two are apart, without a sign."""
        ends = sorted((abs(interval.low), abs(interval.high)))
        if self._shares:
            return f"{100 * abs(interval.value):.1f} points [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
        return f"{abs(interval.value):.3g} [{ends[0]:.3g}, {ends[1]:.3g}]"


def _highest(arms: Sequence[_Arm], words: _Words, sign: int) -> str:
    top = max(sign * arm.mean for arm in arms)
    leaders = [arm for arm in arms if sign * arm.mean == top]
    if len(leaders) == len(arms):
        return f"All are level at {words.amount(arms[0].mean)}."
    if len(leaders) > 1:
        return f"{_list([arm.label for arm in leaders])} are level at {words.amount(leaders[0].mean)}."
    return f"{leaders[0].label} came out {'highest' if sign > 0 else 'lowest'}: {words.amount(leaders[0].mean)}."


def _of_best(arms: Sequence[_Arm], best: str, differences: Sequence[Difference], words: _Words) -> str:
    mean = next(arm.mean for arm in arms if arm.label == best)
    ahead = sorted((row for row in differences if row[0] == best), key=lambda row: abs(row[2].value))
    nearest = ahead[0]
    if len(ahead) == 1:
        return f"{best} is best: {words.amount(mean)}, {words.gap(nearest[2])} against {nearest[1]}."
    return (
        f"{best} is best: {words.amount(mean)}, better than each of the other {len(ahead)};"
        f" {words.gap(nearest[2])} against {nearest[1]}, the nearest."
    )


def _of_rest(best: str | None, differences: Sequence[Difference], words: _Words) -> list[str]:
    """A sentence for each arm that is shown to be worse than others, the best aside."""
    worse: dict[str, list[Difference]] = {}
    for row in differences:
        if row[0] != best:
            worse.setdefault(row[1], []).append(row)
    return [
        f"{label} is worse than {_list([row[0] for row in rows])}"
        + (f", by {words.distance(rows[0][2])}." if len(rows) == 1 else ".")
        for label, rows in worse.items()
    ]


def _of_none(arms: Sequence[_Arm], pairs: Mapping[tuple[str, str], Interval], words: _Words, kind: str) -> str:
    if len(arms) == 2:
        ((one, other), interval), *_ = pairs.items()
        figures = f"{words.amount(arms[0].mean)} and {words.amount(arms[1].mean)}"
        return f"{one} and {other} do not differ measurably: {figures}, {words.gap(interval)}."
    low, high = (words.amount(end(arm.mean for arm in arms)) for end in (min, max))
    return f"No {kind} differs measurably from another: all {len(arms)} are between {low} and {high}."


def _caveats(arms: Sequence[_Arm], words: _Words, worst: float, trained: bool) -> list[str]:
    said = [
        f"{arm.label} lost {arm.num_failed} of its {arm.num_seeds} seeds, counted as {words.amount(worst)}."
        for arm in arms
        if arm.num_failed
    ]
    if trained and len(arms) > 1:
        for count, number in ((1, "one seed"), (2, "two seeds")):
            few = [arm.label for arm in arms if arm.num_seeds == count]
            if few and count == 1:
                said.append(f"{_list(few)} {_has(few)} {number}, which tells nothing of training.")
            elif few:
                said.append(f"{_list(few)} {_has(few)} {number}: a claim about {_it(few)} wants three or more.")
    return said


def _has(labels: Sequence[str]) -> str:
    return "has" if len(labels) == 1 else "have"


def _it(labels: Sequence[str]) -> str:
    return "it" if len(labels) == 1 else "them"


def _list(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
