"""What studies find at equal cost: simulated studies over surfaces whose true values are known.

    python benchmarks/search.py [--repetitions 8] [--budgets 15 33 100] [--lucks 0 2 4] [--surfaces smooth ...]
    python benchmarks/search.py --recorded [--repetitions 40]
    python benchmarks/search.py --confirmations 2000
    python benchmarks/search.py --proposals 100 1000 10000

The proposals, rungs, ranking, rounds of confirmation and verdicts are the product's own; only the training is replaced,
by a surface of gains over the baseline in points. A run's value has the luck of its seed; half-way it has come nearer
to its end at a pace of its own, so that curves cross. Cost is counted in steps, in units of one whole run, with the
baseline's and the confirmation's. With --recorded a run is looked up instead: a real one, of the cell nearest to its
values and of a random one of the cell's seeds, as benchmarks/recorded_training.py has trained it; its true value is the
mean over the cell's seeds. The repetitions of all methods are paired: trial n of repetition r has the same luck.

Printed: the mean true gain of what each method recommends, in points, and its standard error over repetitions; where
nothing has an effect, the share of studies that claim something; else the shares of right and of false claims.
"""

import argparse
import functools
import heapq
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.studies import confirmation, noisy_gp, proposals, rungs
from pipelines.studies.trials import Score, Trial, Work
from rpg.statistics import Verdict, level, verdict
from specs.schema.study import Study

Array = NDArray[np.float64]
STEPS = 24
"""Steps of a whole run."""
START = -20.0
"""Points below the baseline's end at which every run starts."""
LOW, HIGH, KL, RATE = (
    "objective.clip.low",
    "objective.clip.high",
    "objective.kl_coef",
    "training.optimizer.learning_rate",
)
BOUNDS: dict[str, Any] = {LOW: {"float": [0.05, 0.5]}, HIGH: {"float": [0.05, 1.0], "log": True}}
PLAIN: dict[str, Any] = {LOW: 0.2, HIGH: 0.2}


def _unit(params: Mapping[str, Any]) -> tuple[float, float]:
    """Clip bounds in [0, 1]."""
    return (params[LOW] - 0.05) / 0.45, math.log(params[HIGH] / 0.05) / math.log(20)


@dataclass(frozen=True, slots=True)
class Surface:
    """True values of a space's points."""

    name: str
    parameters: Mapping[str, Any]
    baseline: Mapping[str, Any]
    value: Callable[[Mapping[str, Any]], float]
    """Points; NaN: training diverges."""
    has_effect: bool = True

    def gain(self, params: Mapping[str, Any]) -> float:
        """Points above the baseline; a run that diverges loses 20."""
        value = self.value(params)
        return START if math.isnan(value) else value - self.value(self.baseline)


def _smooth(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    return 4 * math.exp(-((x - 0.7) ** 2 + (y - 0.75) ** 2) / 0.2)


def _ridge(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    return 4 * math.exp(-((x + y - 1.1) ** 2) / 0.02 - (x - y - 0.4) ** 2 / 0.5)


def _cliff(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    height = x + y
    return math.nan if height > 1.5 else 4 / (1 + math.exp(-10 * (height - 1.1)))


def _interaction(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    return 10 * (x - 0.45) * (y - 0.45)


def _edge(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    return 3 * x - 2 * y


def _two_peaks(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    one = 2.2 * math.exp(-((x - 0.2) ** 2 + (y - 0.8) ** 2) / 0.06)
    return one + 4 * math.exp(-((x - 0.8) ** 2 + (y - 0.7) ** 2) / 0.03)


def _narrow(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    return 5 * math.exp(-((x - 0.85) ** 2 + (y - 0.3) ** 2) / 0.02)


def _kinds(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    bowl = -3 * ((x - 0.4) ** 2 + (y - 0.6) ** 2)
    kind = p["reference"]
    if kind == "snapshot":
        return bowl + 3.0 - 1.5 * abs(math.log2(p["reference.update.every_steps"] / 6))
    if kind == "average":
        return bowl + 2.0 - 20 * abs(p["reference.update.ema_decay"] - 0.93)
    return bowl + {"behaviour": -1.0, "initial": 0.5}[kind]


def _table(p: Mapping[str, Any]) -> float:
    a = {"token_mean": 0.0, "sequence_mean": 1.0, "constant": -1.0, "none": 0.3}[p["objective.aggregate"]]
    return a + {0.01: 0.0, 0.03: 1.0, 0.1: -0.5}[p[KL]] + (0.8 if p["objective.level"] == "sequence" else 0.0)


def _six(p: Mapping[str, Any]) -> float:
    x, y = _unit(p)
    rate, kl = math.log10(p[RATE] / 1e-5) / 2, math.log10(p[KL] / 1e-3) / 2
    return -15 * (rate - 0.75) ** 2 - 10 * (kl - 0.3) ** 2 - 4 * (x - 0.6) ** 2 - 2 * (y - 0.7) ** 2


def _none(_: Mapping[str, Any]) -> float:
    return 0.0


_KINDS: dict[str, Any] = {
    **BOUNDS,
    "reference": {"cases": {"snapshot": {}, "average": {}, "behaviour": {}, "initial": {}}},
    "reference.update.every_steps": {"int": [2, 16], "when": {"reference": "snapshot"}},
    "reference.update.ema_decay": {"float": [0.8, 0.98], "when": {"reference": "average"}},
}
_TABLE: dict[str, Any] = {
    "objective.aggregate": {"choice": ["token_mean", "sequence_mean", "constant", "none"]},
    KL: {"choice": [0.01, 0.03, 0.1]},
    "objective.level": {"choice": ["token", "sequence"]},
}
_SIX: dict[str, Any] = {
    **BOUNDS,
    RATE: {"float": [1e-5, 1e-3], "log": True},
    KL: {"float": [1e-3, 1e-1], "log": True},
    "training.updates_per_step": {"int": [1, 8]},
    "rollout.temperature": {"float": [0.7, 1.2]},
}
SURFACES = {
    surface.name: surface
    for surface in (
        Surface("smooth", BOUNDS, PLAIN, _smooth),
        Surface("ridge", BOUNDS, PLAIN, _ridge),
        Surface("cliff", BOUNDS, PLAIN, _cliff),
        Surface("interaction", BOUNDS, PLAIN, _interaction),
        Surface("edge", BOUNDS, PLAIN, _edge),
        Surface("two peaks", BOUNDS, PLAIN, _two_peaks),
        Surface("narrow", BOUNDS, PLAIN, _narrow),
        Surface("kinds", _KINDS, {**PLAIN, "reference": "initial"}, _kinds),
        Surface("table", _TABLE, {"objective.aggregate": "token_mean", KL: 0.01, "objective.level": "token"}, _table),
        Surface(
            "six",
            _SIX,
            {**PLAIN, RATE: 1e-4, KL: 1e-3, "training.updates_per_step": 1, "rollout.temperature": 1.0},
            _six,
        ),
        Surface("none", BOUNDS, PLAIN, _none, has_effect=False),
        Surface("none, kinds", _KINDS, {**PLAIN, "reference": "initial"}, _none, has_effect=False),
    )
}


class World:
    """Runs on a surface, of one repetition: the same run has the same luck whichever method asks for it."""

    def __init__(self, surface: Surface, luck: float, repetition: int) -> None:
        self._surface, self._luck, self._repetition = surface, luck, repetition

    def run(self, params: Mapping[str, Any], number: int, until: int = 0, *, fresh: bool = False) -> float:
        """A run's value at a step, in points over the baseline's worth; NaN: it has diverged.

        Args:
            number: of the trial, or of the fresh seed with the arm.
            until: the step; 0: the end.
            fresh: a run of the confirmation.
        """
        true = self._surface.gain(params)
        if true == START:
            return math.nan
        rng = np.random.default_rng([self._repetition, number, fresh, 17])
        seed, *_ = rng.standard_normal(2)
        pace = 0.3 * math.exp(0.4 * rng.standard_normal())
        share = (until or STEPS) / STEPS
        evaluation = np.random.default_rng([self._repetition, number, fresh, until]).standard_normal()
        risen = (1 - math.exp(-share / pace)) / (1 - math.exp(-1 / pace))
        value = START + (true + self._luck * 0.8 * seed - START) * risen
        return float(value + self._luck * 0.6 * evaluation)


class RecordedRuns:
    """Real runs of benchmarks/recorded_training.py: the accuracy of each cell and seed after some steps, in points."""

    def __init__(self, file: Path) -> None:
        rows = [row for row in pq.read_table(file).to_pylist() if row["accuracy"] is not None]
        of_cell: dict[tuple[float, ...], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            of_cell[row["low"], row["high"], row["kl"]][row["seed"]][row["step"]] = 100 * row["accuracy"]
        self.curves = [[by_step for _, by_step in sorted(seeds.items())] for seeds in of_cell.values()]
        """Cell -> its seeds' accuracy by step."""
        self._cells = np.log(np.array(list(of_cell)))
        self._span = np.ptp(self._cells, axis=0)

    def cell(self, params: Mapping[str, Any]) -> int:
        """The cell nearest to a trial's values, on logarithmic axes of equal length."""
        place = np.log([params[LOW], params[HIGH], params[KL]])
        return int((((self._cells - place) / self._span) ** 2).sum(axis=1).argmin())

    def worth(self, params: Mapping[str, Any]) -> float:
        """The mean over the seeds of the nearest cell, at the end."""
        return float(np.mean([curve[STEPS] for curve in self.curves[self.cell(params)]]))

    def surface(self) -> Surface:
        """The space that was recorded, with the spec's own values as the baseline."""
        own = {LOW: 0.2, HIGH: 0.28, KL: 1e-2}
        ends = {LOW: [0.05, 0.6], HIGH: [0.05, 3.0], KL: [1e-3, 0.3]}
        return Surface(
            "recorded", {path: {"float": range_, "log": True} for path, range_ in ends.items()}, own, self.worth
        )


class RecordedWorld(World):
    """Recorded runs, of one repetition."""

    def __init__(self, runs: RecordedRuns, surface: Surface, repetition: int) -> None:
        super().__init__(surface, 0.0, repetition)
        self._runs, self._own = runs, runs.worth(surface.baseline)

    def run(self, params: Mapping[str, Any], number: int, until: int = 0, *, fresh: bool = False) -> float:
        """See `World.run`: one of the recorded seeds, the same at every step of a trial."""
        curves = self._runs.curves[self._runs.cell(params)]
        seed = int(np.random.default_rng([self._repetition, number, fresh, 17]).integers(len(curves)))
        return curves[seed][until or STEPS] - self._own


@dataclass(frozen=True, slots=True)
class Ending:
    """A method's recommendation."""

    gain: float
    cost: float
    """Whole runs."""
    claim: str = ""
    """right, false, or empty: nothing is claimed."""


def study_of(surface: Surface, budget: int, **options: Any) -> Study:
    """A study of a surface."""
    return Study.model_validate(
        {
            "name": "surface",
            "experiment": "none.yaml",
            "parameters": surface.parameters,
            "goal": {"metric": "mean@4", "dataset": "held_out"},
            "trials": budget,
            **options,
        }
    )


def search(study: Study, surface: Surface, world: World, budget: float, workers: int) -> tuple[list[Trial], float]:
    """Runs a study's search until its budget of whole runs is spent, with several workers at once."""
    trials: list[Trial] = []
    spent = 0.0
    busy: list[tuple[float, int, int, int]] = []
    clock = 0.0
    while True:
        while len(busy) < workers:
            chosen = rungs.promotion(study, trials)
            if chosen is None and spent < budget - 0.5 and len(trials) < study.trials:
                number = len(trials)
                params = (
                    dict(surface.baseline) if not number else proposals.propose(study, trials, horizon=STEPS).params
                )
                until = rungs.first_step(study, 0) if number else 0
                trials.append(Trial(number, number, "running", params, not number, Work(), {}, None, {}, {}))
                chosen = rungs.Promotion(trials[-1], until)
            if chosen is None:
                break
            trial = replace(chosen.trial, state="running")
            trials[trial.number] = trial
            steps = ((chosen.until or STEPS) - trial.rung) / STEPS
            spent += steps
            jitter = 1 + 0.1 * ((trial.number * 7919) % 11) / 11
            heapq.heappush(busy, (clock + steps * jitter, trial.number, chosen.until, trial.rung))
        if not busy:
            last = rungs.last_promotion(study, trials)
            if last is None:
                return trials, spent
            spent += ((last.until or STEPS) - last.trial.rung) / STEPS
            heapq.heappush(busy, (clock, last.trial.number, last.until, last.trial.rung))
        clock, number, until, _ = heapq.heappop(busy)
        trials[number] = _told(trials[number], until, world.run(trials[number].params, number, until))


def _told(trial: Trial, until: int, value: float) -> Trial:
    if math.isnan(value):
        return replace(trial, state="failed", about={"at_fault": True})
    if until:
        return replace(trial, state="paused", rungs={**trial.rungs, until: Score(value, None, None)})
    return replace(trial, state="finished", values=(value,))


def ours(surface: Surface, world: World, budget: int, workers: int, seed: int, **options: Any) -> Ending:
    """A study as the product does it. The largest cost of `confirm` is reserved before the search begins."""
    options = {"sampler": {"type": "noisy_gp", "seed": seed}, **options}
    if "seed" not in options["sampler"]:
        options["sampler"] = {**options["sampler"], "seed": seed}
    study = study_of(surface, 1000 if "pruner" in options else budget, **options)
    confirm = study.confirm
    reserved = (confirm.candidates + 1) * confirm.seeds if confirm else 0
    if not study.rungs:
        study = study.model_copy(update={"trials": max(2, budget - reserved)})
    trials, spent = search(study, surface, world, budget - reserved, workers)
    if confirm is None:
        candidates = confirmation.ranked(study, trials)
        best = candidates[0].params if candidates else surface.baseline
        return Ending(surface.gain(best), spent)
    arms = confirmation.arms(study, trials)
    if not arms:
        return Ending(0.0, spent)
    fresh = {
        arm.label: [world.run(arm.params, 1000 * seed + arm.trial, fresh=True) for seed in range(confirm.seeds)]
        for arm in arms
    }
    scores, said = confirm_in_rounds({label: np.nan_to_num(row, nan=START) for label, row in fresh.items()})
    spent += sum(map(len, scores.values()))
    gains = {arm.label: surface.gain(arm.params) for arm in arms}
    better = [one for one, other, _ in said.differences if other == next(iter(scores))]
    # The mean of an arm that stopped before the others is over fewer seeds.
    most = max(map(len, scores.values()))
    whole = better or [label for label, row in scores.items() if len(row) == most]
    recommended = max(whole, key=lambda label: float(scores[label].mean()))
    wrong = [one for one, other, _ in said.differences if gains[one] <= gains[other] + 1e-9]
    return Ending(gains[recommended], spent, "false" if wrong else "right" if said.differences else "")


def confirm_in_rounds(fresh: Mapping[str, Array]) -> tuple[dict[str, Array], Verdict]:
    """The values that the rounds of a confirmation take of all there are, the baseline first; and its verdict."""
    most = len(next(iter(fresh.values())))
    baseline, *candidates = fresh
    taken: dict[int, int] = {}
    seeds: dict[str, int] = {}
    for number in confirmation.rounds(most):
        seeds |= dict.fromkeys((baseline, *candidates), number)
        taken[number] = confirmation.share_of(number, most, taken)
        scores = {label: row[: seeds[label]] for label, row in fresh.items()}
        tables = {label: row[:, None] for label, row in scores.items()}
        said = verdict(tables, (), level(0.95, taken[number]), worst=START, figures=True, shares=False)
        if number < most:
            candidates = [
                label for label in candidates if confirmation.may_win(scores[label], scores[baseline], most, 0.95)
            ]
        if not candidates or any(worse == baseline for _, worse, _ in said.differences):
            break
    return scores, said


def print_confirmations(repetitions: int) -> None:
    """Prints the claims and costs of a confirmation alone, for candidates of known gain."""
    print(f"confirmation alone, luck 2 points, {repetitions} studies a line: claims, false claims, runs of how many")
    for most in (2, 3, 4, 5, 8, 10, 16):
        for gains in ((0.0,), (0.0, 0.0), (0.0,) * 4, (2.0,), (4.0,), (6.0,), (4.0, 0.0), (-3.0,)):
            rng = np.random.default_rng(1)
            all_of = np.array([0.0, *gains])
            claims = wrong = runs = 0
            for _ in range(repetitions):
                rows = all_of[:, None] + 2 * rng.standard_normal((len(all_of), most))
                scores, said = confirm_in_rounds({str(number): row for number, row in enumerate(rows)})
                claims += any(worse == "0" for _, worse, _ in said.differences)
                wrong += any(all_of[int(one)] <= all_of[int(other)] for one, other, _ in said.differences)
                runs += sum(map(len, scores.values()))
            shown = ", ".join(f"{gain:+g}" for gain in gains)
            print(
                f"  {most:2} seeds, candidates {shown:15} {100 * claims / repetitions:5.1f} %"
                f" {100 * wrong / repetitions:5.1f} %  {runs / repetitions:5.1f} of {most * len(all_of)}",
                flush=True,
            )


def print_proposals(counts: Sequence[int]) -> None:
    """Prints CPU seconds of the next proposal, and of ranking the candidates, after so many finished trials."""
    print("CPU seconds of a proposal and of ranking the candidates, by trials that have finished")
    for name in ("smooth", "six", "kinds"):
        surface = SURFACES[name]
        study = study_of(surface, 2 * max(counts), sampler={"type": "noisy_gp"})
        encoding, rng = noisy_gp.Encoding(study.parameters), np.random.default_rng(0)
        trials = []
        for number, place in enumerate(rng.random((max(counts), len(study.parameters)))):
            params = encoding.decode(place)
            value = surface.gain(params) + 2 * rng.standard_normal()
            trials.append(Trial(number, number, "finished", params, False, Work(), {}, (float(value),), {}, {}))
        for count in counts:
            started = time.process_time()
            proposals.propose(study, trials[:count], horizon=STEPS)
            proposed = time.process_time()
            confirmation.ranked(study, trials[:count], horizon=STEPS)
            print(f"  {name:8}{count:7}  {proposed - started:5.2f}  {time.process_time() - proposed:5.2f}", flush=True)


def optuna_loop(surface: Surface, world: World, budget: int, workers: int, seed: int) -> Ending:
    """Optuna's own loop with its defaults: all is spent on the search, and the best value is recommended."""
    import optuna

    from pipelines.studies import space

    study = study_of(surface, budget)
    made = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    best: tuple[float, Mapping[str, Any]] = (-math.inf, surface.baseline)
    params_of: dict[int, Mapping[str, Any]] = {}
    for first in range(0, budget, workers):
        asked = [made.ask() for _ in range(min(workers, budget - first))]
        for trial in asked:
            params_of[trial.number] = space.suggest(trial, study.parameters)
        for trial in asked:
            value = world.run(params_of[trial.number], trial.number + 1)
            if math.isnan(value):
                made.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            made.tell(trial, value)
            best = max(best, (value, params_of[trial.number]), key=lambda row: row[0])
    return Ending(surface.gain(best[1]), budget)


def smac_loop(surface: Surface, world: World, budget: int, _workers: int, seed: int, *, facade: str) -> Ending:
    """SMAC's own loop with a facade's defaults, one run at a time: its incumbent is recommended. It repeats promising
    points with other seeds by itself. Needs `pip install smac`, and a space without `when` that has
    more points than runs."""
    import tempfile

    import smac
    from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer
    from smac.runhistory.dataclasses import TrialValue

    every: list[Any] = []
    for path, searched in surface.parameters.items():
        if "choice" in searched:
            every.append(Categorical(path, searched["choice"]))
        else:
            made, ends = (Float, searched["float"]) if "float" in searched else (Integer, searched["int"])
            every.append(made(path, tuple(ends), log=searched.get("log", False)))
    configurations = ConfigurationSpace(seed=seed)
    configurations.add(every)
    with tempfile.TemporaryDirectory() as directory:
        scenario = smac.Scenario(configurations, n_trials=budget, seed=seed, output_directory=Path(directory))
        loop = getattr(smac, facade)(scenario, _never_called, logging_level=False, overwrite=True)
        for number in range(budget):
            asked = loop.ask()
            value = world.run(dict(asked.config), number + 1)
            loop.tell(asked, TrialValue(cost=-START if math.isnan(value) else -value))
        (best, *_) = loop.intensifier.get_incumbents()
    return Ending(surface.gain(dict(best)), budget)


def _never_called(_config: Any, seed: int) -> float:
    """What SMAC would call, were it not asked and told."""
    raise AssertionError(seed)


ASHA = {"type": "asha", "rungs": [6, 12], "eta": 3}
Method = Callable[[Surface, World, int, int, int], Ending]


def _method(**options: Any) -> Method:
    return lambda surface, world, budget, workers, seed: ours(surface, world, budget, workers, seed, **options)


def _confirmed(**options: Any) -> Method:
    def method(surface: Surface, world: World, budget: int, workers: int, seed: int) -> Ending:
        seeds = {15: 3, 33: 4}.get(budget, 8)
        confirm = {"candidates": 1, "seeds": seeds}
        return ours(surface, world, budget, workers, seed, confirm=confirm, **options)

    return method


METHODS: dict[str, Method] = {
    "optuna": optuna_loop,
    "smac": functools.partial(smac_loop, facade="HyperparameterOptimizationFacade"),
    "smac gp": functools.partial(smac_loop, facade="BlackBoxFacade"),
    "random": _method(sampler={"type": "random"}),
    "gp": _method(sampler={"type": "gp", "startup_trials": 5}),
    "auto": _method(),
    "auto asha": _method(pruner=ASHA),
    "random asha": _method(sampler={"type": "random"}, pruner=ASHA),
    "tpe asha": _method(sampler={"type": "tpe", "startup_trials": 5}, pruner=ASHA),
    "auto confirmed": _confirmed(),
    "auto asha confirmed": _confirmed(pruner=ASHA),
    "tpe asha 1x5": _method(
        sampler={"type": "tpe", "startup_trials": 5}, pruner=ASHA, confirm={"candidates": 1, "seeds": 5}
    ),
}
_OWN = [name for name in METHODS if not name.startswith("smac")]
"""Methods that need nothing beside the product."""


def main() -> None:
    """Prints the table."""
    import optuna

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the first repetition's number")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 33])
    parser.add_argument("--lucks", type=float, nargs="+", default=[2.0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--surfaces", nargs="+", default=list(SURFACES), choices=list(SURFACES))
    parser.add_argument("--methods", nargs="+", default=_OWN, choices=list(METHODS))
    parser.add_argument("--recorded", action="store_true", help="look real runs up instead of simulating them")
    parser.add_argument("--confirmations", type=int, default=0, help="number of simulations of the confirmation alone")
    parser.add_argument("--proposals", type=int, nargs="+", default=[], help="time proposals after N trials")
    arguments = parser.parse_args()
    if arguments.proposals:
        print_proposals(arguments.proposals)
        return
    if arguments.confirmations:
        print_confirmations(arguments.confirmations)
        return
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    repetitions = range(arguments.first, arguments.first + arguments.repetitions)
    if arguments.recorded:
        print_recorded(arguments.methods, arguments.budgets, repetitions)
        return
    for workers in arguments.workers:
        for budget in arguments.budgets:
            for luck in arguments.lucks:
                _table_of(arguments.surfaces, arguments.methods, budget, luck, workers, repetitions, time.process_time)


RECORD = Path(__file__).with_name("recorded_training.parquet")


def print_recorded(methods: Sequence[str], budgets: Sequence[int], repetitions: Sequence[int]) -> None:
    """Prints the gain of each method on recorded runs, and the possible gain."""
    runs = RecordedRuns(RECORD)
    surface = runs.surface()
    final = [[curve[STEPS] for curve in curves] for curves in runs.curves]
    means, own = np.array([np.mean(values) for values in final]), runs.worth(surface.baseline)
    luck = math.sqrt(np.mean([np.var(values, ddof=1) for values in final if len(values) > 1]))
    gains = means - own
    print(f"{len(final)} cells, {sum(map(len, final))} runs; luck of a seed {luck:.1f} points. Against the own values:")
    print(f"the best cell {gains.max():+.1f}, the worst {gains.min():+.1f}, a random one {gains.mean():+.1f}")
    for budget in budgets:
        print(f"\n{budget} whole runs, {len(repetitions)} repetitions; then the paired difference from the first")
        first = None
        for method in methods:
            endings = [
                METHODS[method](surface, RecordedWorld(runs, surface, number), budget, 1, number)
                for number in repetitions
            ]
            gains = np.array([ending.gain for ending in endings])
            first = gains if first is None else first
            error, paired = (_error(values) for values in (gains, gains - first))
            claims = f"; right {_share(endings, 'right')}, false {_share(endings, 'false')}"
            cost = np.mean([ending.cost for ending in endings])
            ahead = f"  {(gains - first).mean():+.2f} ({paired:.2f})"
            print(f"  {method:22}{gains.mean():6.2f} ({error:.2f})  cost {cost:5.1f}{claims}{ahead}", flush=True)


def _error(values: Array) -> float:
    """Standard error of the mean; 0 of one value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _table_of(
    surfaces: Sequence[str],
    methods: Sequence[str],
    budget: int,
    luck: float,
    workers: int,
    repetitions: Sequence[int],
    clock: Callable[[], float],
) -> None:
    print(f"\n{budget} whole runs, luck {luck:g} points, {workers} at once, {len(repetitions)} repetitions")
    endings: dict[str, dict[str, list[Ending]]] = defaultdict(dict)
    for method in methods:
        started = clock()
        for name in surfaces:
            surface = SURFACES[name]
            endings[method][name] = [
                METHODS[method](surface, World(surface, luck, number), budget, workers, number)
                for number in repetitions
            ]
        effects = [name for name in surfaces if SURFACES[name].has_effect]
        cells = [f"{name} {np.mean([e.gain for e in endings[method][name]]):.2f}" for name in effects]
        gains = np.array([[e.gain for e in endings[method][name]] for name in effects])
        every = [e for name in effects for e in endings[method][name]]
        nothing = [e for name in surfaces if name not in effects for e in endings[method][name]]
        error = gains.mean(axis=0).std(ddof=1) / math.sqrt(len(repetitions)) if effects and len(repetitions) > 1 else 0
        mean = gains.mean() if effects else math.nan
        claims = ""
        if any(e.claim for e in (*every, *nothing)):
            claims = f"; right {_share(every, 'right')}, false {_share(every, 'false')}"
            claims += f", false if nothing has an effect {_share(nothing, 'false')}"
        cost = np.mean([e.cost for e in (*every, *nothing)])
        print(
            f"  {method:22}{mean:6.2f} ({error:.2f})  cost {cost:5.1f}{claims}  [{clock() - started:.0f} s]", flush=True
        )
        print(f"      {'  '.join(cells)}", flush=True)


def _share(endings: Sequence[Ending], claim: str) -> str:
    return f"{sum(e.claim == claim for e in endings)}/{len(endings)}" if endings else "-"


if __name__ == "__main__":
    main()
