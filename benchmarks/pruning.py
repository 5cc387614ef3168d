"""Savings and cost of pruning: studies over simulated learning curves whose true final values are known.

    python benchmarks/pruning.py [--studies 400]

A trial's true accuracy rises towards its final value at a pace of its own, so that curves cross; it is measured at a
step over 300 problems with 4 samples each, after a seed's luck of 2 points. The trials of a study go through the rules
of pipelines/studies/rungs.py, one worker at a time, as the engine does. Printed by rule and ladder: the steps trained
as a share of those without pruning; by how many points the true final value of the trial that comes out first is below
the best trial's, on average, and the same without pruning; and in what share of the studies the best value without
pruning is within the winner's interval or below it.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelines.studies import rungs
from pipelines.studies.trials import Score, Trial, Work
from specs.schema.study import Goal, Study

PROBLEMS, SAMPLES, LUCK = 300, 4, 0.02
"""Luck: standard deviation of a seed's accuracy."""
SPREAD = 0.05
"""Standard deviation of the trials' final accuracies."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The true learning curves of a study's trials, and their seeds' luck."""

    final: np.ndarray
    """[trials] accuracy at the end."""
    pace: np.ndarray
    """[trials] steps in which the distance to the final value falls by the factor e."""
    luck: np.ndarray
    """[trials] what the seed adds at the end; on the way it comes up with the curve."""
    noise: np.ndarray
    """[trials, steps + 1] of the problems and samples, in standard deviations."""
    start: float = 0.4

    @classmethod
    def drawn(cls, rng: np.random.Generator, trials: int, steps: int) -> "Curves":
        """Draws the learning curves of a study with so many trials."""
        final = rng.normal(0.6, SPREAD, trials)
        pace = steps * 0.3 * np.exp(rng.normal(0, 0.4, trials))
        return cls(final, pace, rng.normal(0, LUCK, trials), rng.standard_normal((trials, steps + 1)))

    def measured(self, trial: int, step: int, steps: int) -> float:
        """Accuracy that an evaluation after a step measures."""
        pace = self.pace[trial]
        risen = (1 - math.exp(-step / pace)) / (1 - math.exp(-steps / pace))
        true = self.start + (self.final[trial] - self.start) * risen
        return float(true + self.luck[trial] + measurement_error() * self.noise[trial, step])


def measurement_error() -> float:
    """Standard deviation of an accuracy over the samples; the problems are the same for all trials."""
    return math.sqrt(0.6 * 0.4 / (PROBLEMS * SAMPLES))


def interval_half_width() -> float:
    """Half the width of a trial's interval at 95 %, from luck and samples."""
    return 1.96 * math.hypot(LUCK, measurement_error())


@dataclass(frozen=True, slots=True)
class Ending:
    """How a simulated study ended."""

    steps: int
    """Trained over all trials."""
    first: int
    """The trial that comes out first."""
    finished: tuple[int, ...]


def simulate(study: Study, curves: Curves, steps: int) -> Ending:
    """A study of one worker. What goes on does so from its checkpoint: no step is trained twice.

    The baseline, trial 0, meets no rung; it is trained to its end by every rule.
    """
    trials: list[Trial] = []
    trained = 0
    while True:
        chosen = rungs.promotion(study, trials)
        if chosen is None and len(trials) < study.trials:
            number = len(trials)
            bracket = rungs.bracket_of(study, number)
            about: dict[str, Any] = {"bracket": bracket}
            baseline = number == 0
            trials.append(Trial(number, number, "running", {}, baseline, Work(), {}, None, {}, about))
            chosen = rungs.Promotion(trials[-1], 0 if baseline else rungs.first_step(study, bracket))
        chosen = chosen or rungs.last_promotion(study, trials)
        if chosen is None:
            break
        trained += _train(study, curves, steps, trials, chosen)
    finished = [trial for trial in trials if trial.values]
    first = max(finished, key=lambda trial: (trial.values or (0.0,))[0])
    return Ending(trained, first.number, tuple(trial.number for trial in finished))


def _train(study: Study, curves: Curves, steps: int, trials: list[Trial], chosen: rungs.Promotion) -> int:
    """Trains a trial until it pauses or ends. Returns the steps that it took."""
    trial, until, begun = chosen.trial, chosen.until, chosen.trial.rung
    while True:
        value = curves.measured(trial.number, until or steps, steps)
        if not until:
            trials[trial.number] = replace(trial, state="finished", values=(value,))
            return steps - begun
        trial = replace(trial, state="running", rungs={**trial.rungs, until: Score(value, None, None)})
        trials[trial.number] = trial
        verdict, _ = rungs.verdict(study, trial, trials)
        if verdict != "go on":
            trials[trial.number] = replace(trial, state="paused" if verdict == "pause" else "pruned")
            return trial.rung - begun
        until = rungs.next_step(study, trial)


def study_of(trials: int, pruner: dict[str, Any]) -> Study:
    """A study with a pruner; what it searches is of no account here."""
    return Study.model_validate(
        {
            "name": "curves",
            "experiment": "none.yaml",
            "parameters": {"objective.clip.low": {"float": [0.05, 0.5]}},
            "goal": Goal(dataset="held_out", metric="mean@4"),
            "trials": trials,
            "pruner": pruner,
        }
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """Means of one pruning rule over many studies."""

    share: float
    """Share of the steps that are trained without pruning."""
    loss: float
    """True final value of the best trial less that of the one that comes out first."""
    loss_unpruned: float
    """Loss of the chosen trial without pruning."""
    reached: float
    """Share of studies in which what comes out first without pruning is not above the pruned winner's interval."""


def compare(trials: int, steps: int, pruner: dict[str, Any], studies: int) -> Figures:
    """A rule against no pruning over the same curves."""
    pruned, whole = study_of(trials, pruner), study_of(trials, {"type": "none"})
    rows = []
    for number in range(studies):
        curves = Curves.drawn(np.random.default_rng([number, trials]), trials, steps)
        ending, reference = simulate(pruned, curves, steps), simulate(whole, curves, steps)
        best = curves.final.max()
        value, unpruned = (curves.measured(end.first, steps, steps) for end in (ending, reference))
        rows.append(
            (
                ending.steps / reference.steps,
                best - curves.final[ending.first],
                best - curves.final[reference.first],
                unpruned <= value + interval_half_width(),
            )
        )
    return Figures(*map(float, np.mean(rows, axis=0)))


LADDERS: Sequence[tuple[str, int, tuple[int, ...]]] = (
    ("1/4 1/2", 24, (6, 12)),
    ("1/8 1/4 1/2", 200, (25, 50, 100)),
    ("1/6 1/2", 24, (4, 12)),
    ("1/3", 24, (8,)),
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--trials", type=int, nargs="+", default=[8, 24])
    arguments = parser.parse_args()
    print(f"{'rule':12}{'rungs':14}{'trials':>7}{'steps':>8}{'loss':>8}{'unpruned':>10}{'reached':>9}")
    for trials in arguments.trials:
        for label, steps, ladder in LADDERS:
            for name, options in (
                ("asha 2", {"type": "asha", "eta": 2}),
                ("asha 3", {"type": "asha", "eta": 3}),
                ("asha 4", {"type": "asha", "eta": 4}),
                ("hyperband 2", {"type": "hyperband", "eta": 2}),
                ("median", {"type": "median"}),
                ("patient", {"type": "patient"}),
            ):
                figures = compare(trials, steps, {**options, "rungs": ladder}, arguments.studies)
                losses = f"{100 * figures.loss:>8.2f}{100 * figures.loss_unpruned:>10.2f}"
                print(f"{name:12}{label:14}{trials:>7}{figures.share:>8.1%}{losses}{figures.reached:>9.1%}")


if __name__ == "__main__":
    main()
