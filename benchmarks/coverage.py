"""How often the intervals hold that the product prints: simulated experiments whose truth is known.

    python benchmarks/coverage.py [--trials 2000] [--tables intervals metrics pages studies gains]

Every problem has a difficulty, an arm moves each problem's difficulty a little of its own, a seed moves all of its own
problems by its luck, and each problem is answered eight times. All arms are truly equal. The nominal level is 95 %.

The first table is of experiments with six arms. Its columns are the shares of intervals that hold the truth: accuracy
and gain of an arm alone, the same with the seeds' spread pooled over the arms, and the difference of two arms alone;
then the share of experiments whose page says that any two arms differ. With one seed the intervals are about
these weights on new problems and are held against just that, and a page claims nothing. pass@1 is accuracy.

The second table is of training metrics: one figure a seed, of two groups with spreads of 1 and of
`ratio`; coverage of the second group's mean (Student) and of the difference (Welch).

The third table is of pages: a verdict over arms of which some differ and some do not. Its column is the share of pages
with a false sentence: a pair that is called different although it is not, or the wrong way round, or a best that is not
better than each other arm. Its lines are configurations of effects, unequal seeds with unequal luck, some arms with a
seed more than the others, seeds that fail, looks (the question is asked again with each seed from 2 on, and a page
counts if any of its answers was false) and clusters of problems (a deviation of 1 logit that the problems of a cluster
share, in each arm by itself). Then come arms of which one is better: the share of pages that name it as the best. A
line with more seeds than the line above it fails where the share falls by more than chance allows.

The fourth table is of studies that choose the best 3 of many trials with one seed each and confirm them and the
baseline with five fresh seeds, on the problems they were chosen on or on others. Its columns: by how many points the
best trial's own figure flatters it, by how many points its confirmed difference still does, the share of the three
confirmed intervals that hold the truth, and the share of studies that claim any difference.

The fifth table is of one arm of which one run in ten collapses: the shares of pages that say that the accuracy rose,
that say so with no seed collapsed, and that say so of runs that gain as much and never collapse. The sentence is about
a run that does not collapse: it is false where such a run gains nothing. Where all runs together gain nothing the third
share is the sentence's power, and no rule can be false less often about all runs than the chance of a page without a
collapse times that power, since such pages look alike.

A line passes with shares of 92 to 99 % and claims in at most 7 %. Lines marked KNOWN are outside, and why is printed
below the table. The exit code is 1 if any other line is outside.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpg.statistics import (
    Table,
    Verdict,
    arms_against_first,
    gain_interval,
    mean_interval,
    seed_difference,
    seed_mean,
    spread_of,
    verdict,
)
from rpg.statistics.apart import seed_apart

ARMS = 6
SAMPLES = 8
CANDIDATES = 3
FRESH_SEEDS = 5
DIFFICULTY = 2.0
"""Standard deviation of the problems' difficulty, logits."""
GAIN = 0.5
"""Effect of training on every problem, logits."""
COVERAGE = (0.92, 0.99)
MOST_CLAIMS = 0.07
COLLAPSES = 0.1
"""Share of runs that collapse."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)

Truths = NDArray[np.float64]
"""[arms]"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the first table."""

    seeds: tuple[int, ...]
    """Seeds of each arm."""
    problems: int
    luck: tuple[float, ...]
    """Standard deviation of a seed's accuracy in each arm, as a share."""
    accuracy: float = 0.5
    """After training, over all problems there could be."""
    k: int = 1
    """The measure is pass@k; pass@1 is accuracy."""
    known: str = ""
    """Known reason why the line is outside; empty if unknown."""


@dataclass(frozen=True, slots=True)
class World:
    """Problems, and arms that are equal over all problems there could be."""

    accuracy: float
    arm_effect: float = 0.5
    """Standard deviation of an arm's own effect on one problem, logits."""

    @property
    def deviation(self) -> float:
        """Standard deviation of a problem's logit in one arm."""
        return float(np.hypot(DIFFICULTY, self.arm_effect))

    def middle(self) -> float:
        """The mean logit at which the mean chance is `accuracy`."""
        low, high = -20.0, 20.0
        for _ in range(60):
            at = (low + high) / 2
            low, high = (at, high) if expected(at, self.deviation) < self.accuracy else (low, at)
        return low

    def in_logits(self, luck: float) -> float:
        """The deviation of logits that moves the accuracy by `luck`."""
        middle = self.middle()
        slope = (expected(middle + 0.01, self.deviation) - expected(middle - 0.01, self.deviation)) / 0.02
        return luck / slope


def expected(middle: float, deviation: float, k: int = 1) -> float:
    """pass@k over problems whose logits are normal; the mean chance of a right answer for k = 1."""
    return float(_WEIGHTS @ (1 - (1 - chance(middle + deviation * _NODES)) ** k) / _WEIGHTS.sum())


def chance(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logistic function."""
    return 1 / (1 + np.exp(-logits))


def scores(logits: NDArray[np.float64], rng: np.random.Generator, k: int = 1) -> NDArray[np.float64]:
    """pass@k of each problem, estimated from its samples; the share of right ones for k = 1."""
    by_count = np.array([1 - math.comb(SAMPLES - right, k) / math.comb(SAMPLES, k) for right in range(SAMPLES + 1)])
    return by_count[rng.binomial(SAMPLES, chance(logits))]


def share(outcomes: Iterable[bool]) -> float:
    """How many of the outcomes are true."""
    return float(np.mean(list(outcomes)))


def experiments(setting: Setting, trials: int) -> Iterator[tuple[Table, list[Table], Truths, float]]:
    """Simulated experiments.

    Yields:
        scores [problems] of the base model, scores [seeds, problems] of each arm, what the intervals of each arm should
        hold, and the base model's measure over all problems there could be.
    """
    rng, world = np.random.default_rng(0), World(setting.accuracy)
    middle, lucks = world.middle(), [world.in_logits(luck) for luck in setting.luck]
    start = middle - GAIN
    of_new_seeds = [expected(middle, float(np.hypot(world.deviation, luck)), setting.k) for luck in lucks]
    before_training = expected(start, DIFFICULTY, setting.k)
    for _ in range(trials):
        difficulty = DIFFICULTY * rng.standard_normal(setting.problems)
        before = scores(start + difficulty, rng, setting.k)
        after, truths = [], []
        for seeds, luck, truth in zip(setting.seeds, lucks, of_new_seeds, strict=True):
            effect = world.arm_effect * rng.standard_normal(setting.problems)
            shift = luck * rng.standard_normal((seeds, 1))
            after.append(scores(middle + difficulty + effect + shift, rng, setting.k))
            of_these_weights = expected(middle + float(shift[0, 0]), world.deviation, setting.k)
            truths.append(of_these_weights if seeds == 1 else truth)
        yield before, after, np.array(truths), before_training


def line(setting: Setting, trials: int) -> tuple[list[float], float]:
    """Coverage (alone: accuracy, gain; pooled: accuracy, gain; two arms' difference), and false claims."""
    held, claims = np.zeros(5), 0
    for before, after, truths, start in experiments(setting, trials):
        gains = truths - start
        spread, of_gains = spread_of(after), spread_of([table - before for table in after])
        arms = list(zip(after, truths, gains, strict=True))
        pair = arms_against_first(after[:2])[0]
        held += (
            not mean_interval(after[0]).excludes(truths[0]),
            not gain_interval(before, after[0]).excludes(gains[0]),
            share(not mean_interval(arm, spread=spread).excludes(truth) for arm, truth, _ in arms),
            share(not gain_interval(before, arm, spread=of_gains).excludes(gain) for arm, _, gain in arms),
            not pair.excludes(truths[1] - truths[0]),
        )
        claims += bool(verdict(dict(zip("abcdef", after, strict=True))).differences)
    return list(held / trials), claims / trials


@dataclass(frozen=True, slots=True)
class Study:
    """One line of the fourth table: equal arms with one seed each, of which arm 0 is the baseline."""

    tried: int
    """Arms, the baseline among them."""
    problems: int
    luck: float
    """Standard deviation of a seed's accuracy, as a share."""
    same: bool
    """Whether the best are confirmed on the problems that they were chosen on."""


def study_line(study: Study, trials: int) -> tuple[float, float, float, float]:
    """How well the best are confirmed.

    Returns:
        by how much the best one's own figure and its confirmed difference flatter it, in shares; coverage of confirmed
        intervals; false claims.
    """
    rng, world, tried, problems = np.random.default_rng(0), World(0.5), study.tried, study.problems
    middle, deviation = world.middle(), world.in_logits(study.luck)
    truth = expected(middle, float(np.hypot(world.deviation, deviation)))
    flattered, left, held, claims = 0.0, 0.0, 0.0, 0

    def new_problems() -> NDArray[np.float64]:
        """Logits [tried, problems]."""
        difficulty = middle + DIFFICULTY * rng.standard_normal(problems)
        return difficulty + world.arm_effect * rng.standard_normal((tried, problems))

    for _ in range(trials):
        logits = new_problems()
        values = scores(logits + deviation * rng.standard_normal((tried, 1)), rng).mean(axis=1)
        best = [int(arm) for arm in np.argsort(-values) if arm][:CANDIDATES]
        logits = logits if study.same else new_problems()
        confirmed = [scores(logits[arm] + deviation * rng.standard_normal((FRESH_SEEDS, 1)), rng) for arm in (0, *best)]
        found = verdict({str(arm): table for arm, table in enumerate(confirmed)})
        intervals = [found.over(str(arm), "0") for arm in range(1, len(confirmed))]
        flattered += float(values[best[0]]) - truth
        left += intervals[0].value
        held += share(not interval.excludes(0) for interval in intervals)
        claims += bool(found.differences)
    return flattered / trials, left / trials, held / trials, claims / trials


@dataclass(frozen=True, slots=True)
class Gain:
    """One line of the fifth table: one arm, of which one run in ten may collapse."""

    seeds: int
    luck: float
    """Standard deviation of a seed's accuracy, as a share."""
    collapse: float
    """Accuracy that a run loses if it collapses, as a share."""
    of_all: bool
    """Whether the mean gain of all runs is 0; else that of a run that does not collapse is."""


def gain_line(line: Gain, trials: int) -> tuple[float, float, float]:
    """How often a page says that the accuracy rose.

    Returns:
        the shares of pages that say so, that say so with no seed collapsed, and that say so of runs that never
        collapse, though they gain as much.
    """
    rng, world, problems = np.random.default_rng(0), World(0.5), 300
    middle, luck, lost = world.middle(), world.in_logits(line.luck), world.in_logits(line.collapse)

    def of_all(gain: float) -> float:
        of_each = (expected(middle + gain - each, world.deviation) for each in (0.0, lost))
        return float(np.dot((1 - COLLAPSES, COLLAPSES), list(of_each))) - expected(middle, world.deviation)

    low, high = 0.0, lost
    for _ in range(60 if line.of_all else 0):
        low, high = ((low + high) / 2, high) if of_all((low + high) / 2) < 0 else (low, (low + high) / 2)
    rose = np.zeros(3)
    for _ in range(trials):
        difficulty = middle + DIFFICULTY * rng.standard_normal(problems)
        before = scores(difficulty, rng)
        logits = difficulty + low + world.arm_effect * rng.standard_normal(problems)
        logits = logits + luck * rng.standard_normal((line.seeds, 1))
        collapsed = rng.random((line.seeds, 1)) < COLLAPSES
        says = says_rose(before, scores(logits - lost * collapsed, rng))
        rose += says, says and not collapsed.any(), says_rose(before, scores(logits, rng))
    return float(rose[0] / trials), float(rose[1] / trials), float(rose[2] / trials)


def says_rose(before: NDArray[np.float64], after: Table) -> bool:
    """Whether a page says that the accuracy rose."""
    return gain_interval(before, after).low > 0 and seed_apart(after - before) is None


def print_gains(processes: ProcessPoolExecutor, trials: int) -> int:
    """The fifth table; returns how many lines failed."""
    failed = 0
    rows = [Gain(*each) for each in itertools.product((3, 5, 10), (0.005, 0.02), (0.2, 0.4), (False, True))]
    print("seeds luck collapse  no gain of            | rose   no seed collapsed  if none ever did")
    for row, (rose, whole, never) in zip(rows, processes.map(gain_line, rows, [trials] * len(rows)), strict=True):
        outcome = "POWER" if row.of_all else "PASS" if rose <= MOST_CLAIMS else "FAIL"
        failed += outcome == "FAIL"
        whose = "all runs" if row.of_all else "one that stays"
        print(
            f"{row.seeds:>5} {100 * row.luck:>4g} {100 * row.collapse:>8g}  {whose:<20}"
            f" | {rose:.3f}  {whole:.3f}              {never:.3f}  {outcome}",
            flush=True,
        )
    return failed


@dataclass(frozen=True, slots=True)
class Page:
    """One line of the third table."""

    effects: tuple[float, ...]
    """Effect of each arm over the first, as a share."""
    seeds: tuple[int, ...]
    luck: tuple[float, ...]
    problems: int = 300
    fails: float = 0.0
    """Chance of a seed to fail; the same for all arms, so that the effects are of what failures leave."""
    looks: bool = False
    """The question is asked with 2 seeds, with 3, and so on."""
    clusters: int = 0
    """Problems of a cluster; 0: each is by itself."""
    power: bool = False
    """The share of pages that name the best, not of false ones."""
    more: bool = False
    """The line above has the same arms with fewer seeds: this one names the best at least as often."""
    known: str = ""

    @property
    def words(self) -> str:
        """Words that tell the line from others."""
        effects = ", ".join(f"{100 * effect:+g}" if effect else "0" for effect in self.effects)
        effects = f"0 x {len(self.effects)}" if not any(self.effects) else effects
        seeds = ",".join(map(str, self.seeds)) if len(set(self.seeds)) > 1 else str(self.seeds[0])
        luck = ",".join(f"{100 * each:g}" for each in self.luck)
        luck = luck if len(set(self.luck)) > 1 else f"{100 * self.luck[0]:g}"
        more = [f"{100 * self.fails:g} % of seeds fail"] * bool(self.fails) + ["asked at each"] * self.looks
        more += [f"clusters of {self.clusters}"] * bool(self.clusters)
        return f"{effects:>23} {seeds:>15} {luck:>13} {self.problems:>8}  {', '.join(more):<22}"


def page_line(page: Page, trials: int) -> float:
    """Returns the share of pages with a false sentence, or of pages with a true claim."""
    rng, world = np.random.default_rng(0), World(0.5)
    middle, per_share = world.middle(), world.in_logits(1.0)
    truths = [expected(middle + effect * per_share, world.deviation) for effect in page.effects]
    truths = [truth * (1 - page.fails) for truth in truths]
    counted = 0
    for _ in range(trials):
        difficulty = DIFFICULTY * rng.standard_normal(page.problems)
        labels = [problem // page.clusters for problem in range(page.problems)] if page.clusters else None
        arms = {}
        for arm, (effect, seeds, luck) in enumerate(zip(page.effects, page.seeds, page.luck, strict=True)):
            own = world.arm_effect * rng.standard_normal(page.problems)
            if page.clusters:
                own += np.repeat(rng.standard_normal(-(-page.problems // page.clusters)), page.clusters)[
                    : page.problems
                ]
            shift = luck * per_share * rng.standard_normal((seeds, 1))
            table = scores(middle + effect * per_share + difficulty + own + shift, rng)
            table[rng.random(seeds) < page.fails] = np.nan
            arms[str(arm)] = table
        if page.power:
            counted += verdict(arms).best == str(truths.index(max(truths)))
            continue
        asked = range(2, max(page.seeds) + 1) if page.looks else (max(page.seeds),)
        counted += any(
            is_false(
                verdict({arm: table[:seeds] for arm, table in arms.items()}, range(2, seeds), clusters=labels), truths
            )
            if page.looks
            else is_false(verdict(arms, clusters=labels), truths)
            for seeds in asked
        )
    return counted / trials


def is_false(found: Verdict, truths: Sequence[float]) -> bool:
    """Returns whether a page makes a false statement."""
    wrong = any(truths[int(better)] <= truths[int(worse)] for better, worse, _ in found.differences)
    top = max(truths)
    return wrong or (found.best is not None and (truths[int(found.best)] < top or truths.count(top) > 1))


def pages() -> list[Page]:
    """Configurations of effects; unequal seeds with unequal luck; seeds that fail; looks; clusters; power."""
    one_calm = (
        "one arm has no luck at all and the other much: three seeds cannot show that, and Welch's freedom is near 2"
    )
    three = (0.0, 0.0, 0.0, -0.1), (0.0, 0.07, 0.07, 0.07, 0.08), (0.1, 0.1, 0.0, 0.0), (0.0, 0.0)
    rows = []
    for effects in ((0.0,) * 6, *three):
        for seeds, luck in ((2, 0.02), (3, 0.0), (3, 0.02), (5, 0.02), (5, 0.04), (10, 0.02)):
            rows += [Page(effects, (seeds,) * len(effects), (luck,) * len(effects), n) for n in (30, 300)]
    for seeds, luck in (
        ((8, 2), (0.01, 0.03)),
        ((10, 3), (0.01, 0.03)),
        ((3, 10), (0.03, 0.01)),
        ((8, 2) * 3, (0.01, 0.03) * 3),
    ):
        rows.append(Page((0.0,) * len(seeds), seeds, luck))
    for seeds, luck in (
        ((10, 3) * 3, (0.01, 0.03, 0.04) * 2),
        ((10, 3) * 3, (0.04,) * 6),
        ((10, 3) * 3, (0.01, 0.03) * 3),
        ((3, 5), (0.03, 0.01)),
        ((3, 3, 10), (0.04, 0.01, 0.01)),
        ((2, 5), (0.04, 0.0)),
    ):
        rows.append(Page((0.0,) * len(seeds), seeds, luck))
    for seeds in (
        *((few + 1, *(few,) * 7) for few in (2, 3, 5)),
        *((3, 3, 4), (3, 4, 4), (2, 3, 3), (2, 2, 3), (3, 4, 5, 6)),
        *((2, 3), (2, 5), (3, 4), (3, 5), (3, 10)),
    ):
        rows += [Page((0.0,) * len(seeds), seeds, (luck,) * len(seeds)) for luck in (0.02, 0.04)]
    rows.append(Page((0.0,) * 2, (3, 4), (0.04, 0.0), known=one_calm))
    rows.append(Page((0.0,) * 2, (3, 3), (0.0, 0.04), known=one_calm))
    rows.append(Page((0.0,) * 3, (3,) * 3, (0.0, 0.0, 0.04), known=one_calm))
    rows.append(Page((0.0,) * 2, (5, 5), (0.0, 0.04)))
    rows.append(Page((0.0,) * 6, (3,) * 6, (0.01, 0.02, 0.03) * 2))
    for arms, seeds, fails in ((2, 3, 0.2), (2, 5, 0.2), (2, 5, 0.5), (4, 5, 0.2), (6, 3, 0.1)):
        rows.append(Page((0.0,) * arms, (seeds,) * arms, (0.02,) * arms, fails=fails))
    rows += [
        Page((0.0,) * arms, (most,) * arms, (0.02,) * arms, looks=True) for arms, most in ((2, 5), (2, 10), (4, 10))
    ]
    rows += [Page((0.0,) * arms, (5,) * arms, (0.02,) * arms, clusters=size) for arms in (2, 6) for size in (5, 20)]
    rows += [Page((0.0, 0.04), (seeds,) * 2, (0.02,) * 2, power=True) for seeds in (3, 5, 10)]
    for gap, designs in (
        (0.06, ((3, 3, 3), (3, 3, 4), (3, 4, 4), (4, 4, 4))),
        (0.06, ((3, 3), (3, 4), (3, 5), (3, 10), (5, 10))),
        (0.06, ((3,) * 8, (4, *(3,) * 7), (4, *(3,) * 6, 4))),
        (0.2, ((2, 2, 2), (2, 2, 3), (2, 3, 3), (3, 3, 3))),
        (0.2, ((2, 2), (2, 3), (2, 5), (3, 5))),
    ):
        rows += [
            Page((*(0.0,) * (len(seeds) - 1), gap), seeds, (0.02,) * len(seeds), power=True, more=place > 0)
            for place, seeds in enumerate(designs)
        ]
    return rows


def print_pages(processes: ProcessPoolExecutor, trials: int) -> int:
    """The third table; returns how many lines failed."""
    failed, reasons, rows, before = 0, [], pages(), 0.0
    print(f"{'effects':>23} {'seeds':>15} {'luck':>13} problems  {'':<22} | false")
    for page, found in zip(rows, processes.map(page_line, rows, [trials] * len(rows)), strict=True):
        outcome = "PASS" if found <= MOST_CLAIMS else "KNOWN" if page.known else "FAIL"
        if page.power:
            fell = page.more and before - found > 3 * math.sqrt(found * (1 - found) * 2 / trials)
            outcome, before = "FAIL" if fell else "POWER", found
        failed += outcome == "FAIL"
        if outcome == "KNOWN" and page.known not in reasons:
            reasons.append(page.known)
        print(f"{page.words} | {found:.3f}  {outcome}", flush=True)
    print("".join(f"KNOWN: {reason}\n" for reason in reasons))
    return failed


def settings() -> list[Setting]:
    """Numbers of seeds and problems and luck; rare and frequent success; unequal seeds; unequal luck; pass@k."""
    skewed = "one point of luck is most of an accuracy of 1.6 %: seeds are skewed, and a gain's interval is symmetric"
    two_seeds = "two seeds cannot show that the first arm varies more than the others, and it is in every difference"
    equal = itertools.product((1, 2, 3, 5, 10), (30, 300), (0.01, 0.02, 0.03))
    rare = itertools.product((1, 2, 3, 10), (30, 300), (0.016, 0.05, 0.95))
    known = {(2, 300, 0.016): skewed, (3, 300, 0.016): skewed}
    rows = [Setting((seeds,) * ARMS, problems, (luck,) * ARMS) for seeds, problems, luck in equal]
    rows += [
        Setting((seeds,) * ARMS, problems, (0.01,) * ARMS, accuracy, known=known.get((seeds, problems, accuracy), ""))
        for seeds, problems, accuracy in rare
    ]
    for problems in (30, 300):
        rows += [Setting((few, *(many,) * 5), problems, (0.02,) * ARMS) for few, many in ((2, 5), (5, 2))]
    for seeds, problems in itertools.product((2, 3, 5, 10), (30, 300)):
        rows.append(Setting((seeds,) * ARMS, problems, (0.01, 0.02, 0.03) * 2))
        why = two_seeds if (seeds, problems) == (2, 300) else ""
        rows.append(Setting((seeds,) * ARMS, problems, (0.03, 0.02, 0.01) * 2, known=why))
    for seeds, problems, k in itertools.product((1, 2, 3, 10), (30, 300), (4, 8)):
        rows.append(Setting((seeds,) * ARMS, problems, (0.02,) * ARMS, k=k))
    return rows


def is_within(coverage: list[float], claims: float) -> bool:
    """Whether a line passes."""
    return all(COVERAGE[0] <= each <= COVERAGE[1] for each in coverage) and claims <= MOST_CLAIMS


def main() -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument(
        "--tables", nargs="*", choices=("intervals", "metrics", "pages", "studies", "gains"), help="all of them"
    )
    asked = parser.parse_args()
    trials = asked.trials
    print(f"standard error of a share of 95 %: {(0.95 * 0.05 / trials) ** 0.5:.4f}\n")
    with ProcessPoolExecutor() as processes:
        tables = {
            "intervals": lambda: print_experiments(processes, trials),
            "metrics": lambda: print_metrics(trials),
            "pages": lambda: print_pages(processes, trials),
            "studies": lambda: print_studies(processes, trials),
            "gains": lambda: print_gains(processes, trials),
        }
        failed = sum(tables[name]() for name in asked.tables or tables)
    return int(failed > 0)


def print_experiments(processes: ProcessPoolExecutor, trials: int) -> int:
    """The first table; returns how many lines failed."""
    failed, reasons = 0, []
    print(f"{'seeds':>11} problems     luck accuracy pass@ | alone          pooled         pair   | claims")
    print(f"{'':>44} | mean   gain    mean   gain   2 arms | of {ARMS} arms")
    rows = settings()
    for setting, (coverage, claims) in zip(rows, processes.map(line, rows, [trials] * len(rows)), strict=True):
        outcome = "PASS" if is_within(coverage, claims) else "KNOWN" if setting.known else "FAIL"
        failed += outcome == "FAIL"
        if outcome == "KNOWN" and setting.known not in reasons:
            reasons.append(setting.known)
        seeds = ",".join(map(str, setting.seeds if len(set(setting.seeds)) > 1 else setting.seeds[:1]))
        percent = [f"{100 * luck:g}" for luck in setting.luck]
        luck = "".join(percent) if len(set(percent)) > 1 else percent[0]
        alone, pooled = (" ".join(f"{each:.3f} " for each in shares) for shares in (coverage[:2], coverage[2:4]))
        print(
            f"{seeds:>11} {setting.problems:>8} {luck:>8} {setting.accuracy:>8.3f} {setting.k:>5} |"
            f" {alone}  {pooled} {coverage[4]:.3f}  | {claims:.3f}  {outcome}",
            flush=True,
        )
    print("".join(f"KNOWN: {reason}\n" for reason in reasons))
    return failed


def print_metrics(trials: int) -> int:
    """The second table; returns how many lines failed."""
    failed, rng = 0, np.random.default_rng(0)
    print("seeds ratio | mean   difference")
    for seeds, ratio in itertools.product((2, 3, 5, 10), (1, 3)):
        held = np.zeros(2)
        for _ in range(trials):
            first, second = rng.standard_normal(seeds), ratio * rng.standard_normal(seeds)
            held += not seed_mean(second).excludes(0), not seed_difference(first, second).excludes(0)
        mean, difference = held / trials
        outcome = "PASS" if is_within([mean, difference], 0) else "FAIL"
        failed += outcome == "FAIL"
        print(f"{seeds:>5} {ratio:>5} | {mean:.3f}  {difference:.3f}  {outcome}", flush=True)
    print()
    return failed


def print_studies(processes: ProcessPoolExecutor, trials: int) -> int:
    """The fourth table; returns how many lines failed."""
    failed = 0
    grid = itertools.product((8, 30), (30, 300), (0.01, 0.02, 0.03), (True, False))
    rows = [Study(*columns) for columns in grid]
    print("trials problems luck  confirmed on | best: own  confirmed | coverage  claims")
    for study, figures in zip(rows, processes.map(study_line, rows, [trials] * len(rows)), strict=True):
        flattered, left, held, claims = figures
        # Intervals that hold together hold more often each.
        outcome = "PASS" if held >= COVERAGE[0] and claims <= MOST_CLAIMS else "FAIL"
        failed += outcome == "FAIL"
        print(
            f"{study.tried:>6} {study.problems:>8} {100 * study.luck:>4g}  {'the same' if study.same else 'others':>12}"
            f" | {100 * flattered:+9.2f} {100 * left:+10.2f} | {held:.3f}     {claims:.3f}  {outcome}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
