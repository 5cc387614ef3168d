"""Sentences of a verdict: shares in percent, differences of shares in points."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpg.statistics.apart import SeedApart
from rpg.statistics.variance import Interval

ONE_SEED = "One seed: the interval covers new problems, not new training runs."
_ONE_SEED_EACH = "One seed each: the intervals cover new problems, not new training runs."

_CONFIDENT = 0.95
"""Confidence of the bound on the share of runs that collapse, if no seed has collapsed."""
CHOSEN = "chosen on these problems: biased upward"
"""Note beside an accuracy by which its checkpoint was chosen."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_MOST_INTERVALS = 3
"""Largest number of differences in a sentence that are printed with their intervals."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Figures of one arm for a verdict."""

    label: str
    mean: float
    """Mean over seeds and problems, with failed seeds at the worst value."""
    num_seeds: int
    """Number of seeds, including failed ones."""
    num_failed: int
    apart: SeedApart | None = None
    """The seed that is an outlier among the others; None if none is."""


Difference = tuple[str, str, Interval]
"""The better arm, the worse arm, and the better minus the worse."""


def of_runs_like_these(num_seeds: int) -> str:
    """Returns the sentence on the scope of a gain: it holds for runs that do not collapse, and a share of runs may
    collapse.

    That share is Clopper and Pearson's upper limit for no collapse among the seeds.

    Example:
        >>> of_runs_like_these(5)
        'That holds for runs that do not collapse; 5 seeds allow for up to 45 % of runs that do.'
    """
    share = 100 * (1 - (1 - _CONFIDENT) ** (1 / num_seeds))
    return f"That holds for runs that do not collapse; {num_seeds} seeds allow for up to {share:.0f} % of runs that do."


def sentence(
    arms: Sequence[Arm],
    best: str | None,
    differences: Sequence[Difference],
    pairs: Mapping[tuple[str, str], Interval],
    *,
    shares: bool,
    sign: int,
    trained: bool,
    worst: float,
    level: float,
    looks: Sequence[float] = (),
) -> str:
    """Returns the sentences of a headline: on the best arm, on the differences or their absence, and on lost seeds.

    Args:
        pairs: the intervals of all pairs.
        sign: 1 if the higher score is the better one, else -1.
        level: confidence of the intervals of differences.
        looks: numbers of seeds at the earlier analyses.
    """
    words = _Words(shares)
    if trained and len(arms) > 1 and all(arm.num_seeds == 1 for arm in arms):
        return f"{_highest(arms, words, sign)} {_ONE_SEED_EACH}"
    compared = [arm for arm in arms if arm.num_seeds > 1 or not trained]
    alone = [arm for arm in arms if arm not in compared]
    if len(arms) == 1:
        said = [f"{_start(arms[0].label)} has {words.amount(arms[0].mean)}."]
    elif len(compared) < 2:
        return " ".join([_nothing_compared(arms, alone, words), *_caveats(arms, words, worst)])
    elif best is not None:
        said = [*_of_best(arms, best, differences, words), *_of_rest(best, differences, words)]
    elif differences:
        said = [*_of_rest(None, differences, words), _of_leaders(compared, differences)]
    else:
        said = _of_none(compared, pairs, words, "arm" if trained else "model")
    if alone and len(arms) > 1:
        seen = _list([f"{arm.label} {words.amount(arm.mean)}" for arm in alone])
        said.append(f"Not compared, with one seed: {seen}.")
    if looks and len(arms) > 1:
        said.append(look_sentence(looks, level, "differences"))
    said += _caveats(arms, words, worst)
    return " ".join([*said, *(_of_two_seeds(compared, differences) if trained and len(arms) > 1 else [])])


def look_sentence(looks: Sequence[float], level: float, what: str) -> str:
    """Returns the sentence on the earlier analyses and the resulting confidence level of the intervals.

    Args:
        looks: numbers of seeds at the earlier analyses, at least one.
        what: the name of the figures whose intervals have that level.
    """
    place = len(looks)
    ordinal = _ORDINALS[place].capitalize() if place < len(_ORDINALS) else f"{place + 1}th"
    at = _list([f"{look:g}" if look == int(look) else f"{int(look)} to {math.ceil(look)}" for look in looks])
    return (
        f"{ordinal} look ({'first' if place == 1 else 'earlier'} at {at} seeds): brackets of {what} are"
        f" {level_words(level)} intervals."
    )


def level_words(level: float) -> str:
    """Returns a confidence level in percent: `95 %`, `98.5 %`."""
    return f"{100 * level:.4g} %"


class _Words:
    """Figures as text: shares in percent, differences of shares in points."""

    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def amount(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.shares else f"{value:.4g}"

    def gap(self, interval: Interval) -> str:
        """Returns a difference with its sign."""
        if self.shares:
            value, ends = f"{100 * interval.value:+z.1f} points", (100 * interval.low, 100 * interval.high)
            return f"{value} [{ends[0]:+z.1f}, {ends[1]:+z.1f}]" if interval.known else value
        value = f"{interval.value:+z.3g}"
        return f"{value} [{interval.low:+z.3g}, {interval.high:+z.3g}]" if interval.known else value

    def distances(self, intervals: Sequence[Interval]) -> str:
        """Returns the differences of arms without a sign: `21.0 [16.3, 25.7] and 18.9 points [14.6, 23.2]`."""
        if len(intervals) > _MOST_INTERVALS:
            values = [abs(interval.value) for interval in intervals]
            return f"{self._size(min(values))} to {self._size(max(values))}{self._unit}"
        last = len(intervals) - 1
        return _joined(
            [
                f"{self._size(interval.value)}{self._unit if place == last else ''} {self._ends(interval)}"
                for place, interval in enumerate(intervals)
            ]
        )

    def size(self, value: float) -> str:
        """Returns the size of a difference with its unit."""
        return f"{self._size(value)}{self._unit}"

    @property
    def _unit(self) -> str:
        return " points" if self.shares else ""

    def _size(self, value: float) -> str:
        return f"{100 * abs(value):.1f}" if self.shares else f"{abs(value):.3g}"

    def _ends(self, interval: Interval) -> str:
        low, high = sorted((abs(interval.low), abs(interval.high)))
        return f"[{self._size(low)}, {self._size(high)}]"


def _highest(arms: Sequence[Arm], words: _Words, sign: int) -> str:
    top = max(sign * arm.mean for arm in arms)
    leaders = [arm for arm in arms if sign * arm.mean == top]
    if len(leaders) == len(arms):
        return f"All are level at {words.amount(arms[0].mean)}."
    if len(leaders) > 1:
        return f"{_start(_names(leaders))} are level at {words.amount(leaders[0].mean)}."
    return (
        f"{_start(leaders[0].label)} came out {'highest' if sign > 0 else 'lowest'}: {words.amount(leaders[0].mean)}."
    )


def _nothing_compared(arms: Sequence[Arm], alone: Sequence[Arm], words: _Words) -> str:
    counts = [f"{arm.num_seeds} seed{'s' if arm.num_seeds > 1 else ''}" for arm in arms]
    seen = ", ".join(f"{arm.label} {words.amount(arm.mean)} ({count})" for arm, count in zip(arms, counts, strict=True))
    return f"Not compared: {_names(alone)} {_has(alone)} one seed. Seen: {seen}."


def _of_best(arms: Sequence[Arm], best: str, differences: Sequence[Difference], words: _Words) -> list[str]:
    mean = next(arm.mean for arm in arms if arm.label == best)
    ahead = sorted((row for row in differences if row[0] == best), key=lambda row: abs(row[2].value))
    _, other, interval = ahead[0]
    nearest = f", the nearest of the other {len(ahead)}," if len(ahead) > 1 else ""
    return [
        f"{_start(best)} is best: {words.amount(mean)}.",
        f"It beats {_named(other)}{nearest} by {words.distances([interval])}.",
    ]


def _of_rest(best: str | None, differences: Sequence[Difference], words: _Words) -> list[str]:
    """Returns a sentence for each arm that is shown to be worse than others, without the best arm."""
    worse: dict[str, list[Difference]] = {}
    for row in differences:
        if row[0] != best:
            worse.setdefault(row[1], []).append(row)
    return [
        f"{_start(_list([row[0] for row in rows]))} {'beats' if len(rows) == 1 else 'beat'} {_named(label)},"
        f" by {words.distances([row[2] for row in rows])}."
        for label, rows in worse.items()
    ]


def _of_leaders(arms: Sequence[Arm], differences: Sequence[Difference]) -> str:
    """Returns the sentence on the arms that no other arm beats, if none of them is best."""
    beaten = {row[1] for row in differences}
    leaders = [arm.label for arm in arms if arm.label not in beaten]
    if len(leaders) < 2:
        return "The data show no best arm."
    named = {row[0] for row in differences} == set(leaders) and len(beaten) == 1
    which = "which" if named else f"which of {_list(leaders)}"
    return f"The data do not show {which} is {'better' if len(leaders) == 2 else 'best'}."


def _of_none(arms: Sequence[Arm], pairs: Mapping[tuple[str, str], Interval], words: _Words, kind: str) -> list[str]:
    labels = {arm.label for arm in arms}
    held = {names: interval for names, interval in pairs.items() if labels >= set(names)}
    if len(arms) == 2:
        ((one, other), interval), *_ = held.items()
        # The second minus the first, the order of a table whose first line is the first arm.
        turned = Interval(-interval.value, -interval.high, -interval.low)
        figures = f"{words.amount(arms[0].mean)} and {words.amount(arms[1].mean)}"
        return [
            f"{_start(_list([one, other]))} do not differ measurably: {figures}.",
            f"{_start(_named(other))} less {_named(one)}: {words.gap(turned)}.",
        ]
    low, high = (words.amount(end(arm.mean for arm in arms)) for end in (min, max))
    said = [f"No {kind} differs measurably from another: all {len(arms)} are between {low} and {high}."]
    beyond = max(max(abs(interval.low), abs(interval.high)) for interval in held.values())
    if not math.isnan(beyond) and not (words.shares and beyond >= 1):
        said.append(f"Differences of more than {words.size(beyond)} are excluded; smaller ones are not.")
    return said


def _caveats(arms: Sequence[Arm], words: _Words, worst: float) -> list[str]:
    """Returns a sentence for each arm that lost seeds or has an outlying seed."""
    said = [
        f"{_start(arm.label)} lost {arm.num_failed} of its {arm.num_seeds} seeds, counted as {words.amount(worst)}."
        for arm in arms
        if arm.num_failed
    ]
    return said + [
        f"One seed of {_named(arm.label)} stands apart: {words.amount(arm.apart.value)}, the others"
        f" {words.amount(arm.apart.least)} to {words.amount(arm.apart.most)}."
        for arm in arms
        if arm.apart
    ]


def _of_two_seeds(arms: Sequence[Arm], differences: Sequence[Difference]) -> list[str]:
    """Returns the sentence on arms with two seeds, for which nothing is claimed."""
    told = {label for row in differences for label in row[:2]}
    few = [arm for arm in arms if arm.num_seeds == 2 and arm.label not in told]
    if few and len(few) == len(arms):
        return ["Two seeds each; a claim needs three."]
    it = "it" if len(few) == 1 else "them"
    return [f"{_start(_names(few))} {_has(few)} two seeds; a claim about {it} needs three."] if few else []


def _has(arms: Sequence[Arm]) -> str:
    return "has" if len(arms) == 1 else "have"


def _names(arms: Sequence[Arm]) -> str:
    return _list([arm.label for arm in arms])


def _named(label: str) -> str:
    return "the baseline" if label == "baseline" else label


def _start(text: str) -> str:
    """Returns the text as the start of a sentence. The user's own labels are not changed."""
    text = _named(text)
    return text[0].upper() + text[1:] if text.startswith(("the baseline", "trial ", "trials ")) else text


def _list(labels: Sequence[str]) -> str:
    """Returns labels as a list in a sentence: `a, b and c`, `trials 5 and 3`."""
    numbers = [label.removeprefix("trial ") for label in labels]
    if len(labels) > 1 and all(number.isdigit() for number in numbers) and not set(labels) & set(numbers):
        return f"trials {_joined(numbers)}"
    return _joined([_named(label) for label in labels])


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
