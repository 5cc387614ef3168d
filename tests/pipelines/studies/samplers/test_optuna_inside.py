"""What Optuna does not promise and studies rely on is as they expect it."""

import warnings

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import NSGAIISampler, QMCSampler, RandomSampler
from optuna.trial import create_trial

from pipelines.studies.samplers import optuna_inside

UNIT = {"x": FloatDistribution(0.0, 1.0)}
GIVEN = (0.1, 0.2, 0.3, 0.4)


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_results_of_the_first_generation_are_the_parents_of_what_nsga2_proposes() -> None:
    sampler = NSGAIISampler(seed=0, population_size=len(GIVEN), crossover_prob=0.0, mutation_prob=0.0)
    study = optuna.create_study(sampler=sampler)
    note = optuna_inside.first_generation()
    study.add_trials([create_trial(value=x, params={"x": x}, distributions=UNIT, system_attrs=note) for x in GIVEN])
    trial = study.ask()
    assert trial.suggest_float("x", 0.0, 1.0) in GIVEN
    assert [value for key, value in optuna_inside.notes_of(study, trial).items() if key in note] == [1]


def test_the_places_of_one_sequence_are_the_points_of_optunas_own() -> None:
    def proposed(sampler: optuna.samplers.BaseSampler) -> list[float]:
        study = optuna.create_study(sampler=sampler)
        study.add_trial(create_trial(value=0.0, params={"x": 0.5}, distributions=UNIT))
        trials = [study.ask() for _ in range(2)]
        return [trial.suggest_float("x", 0.0, 1.0) for trial in trials]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        ours = [
            proposed(optuna_inside.one_sequence(place, seed=3, independent=RandomSampler(seed=0))) for place in (0, 1)
        ]
        theirs = proposed(QMCSampler(seed=3, scramble=True, warn_asynchronous_seeding=False))
    assert ours == [[theirs[0]] * 2, [theirs[1]] * 2]


def test_a_trial_is_known_by_its_id() -> None:
    study = optuna.create_study()
    asked = study.ask()
    assert 0 <= optuna_inside.suggest(asked, "x", UNIT["x"]) <= 1
    trial = study._storage.get_trial(optuna_inside.trial_id(study.trials[0]))
    assert trial.number == asked.number == 0
