"""The Gaussian process that knows the noise of a study's trials."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trials import GOAL, HIGH, LOW, MIXED, NUMBERS, measured, search, study_document, widest_is_best

from pipelines.home.home import Home
from pipelines.studies import confirmation, noisy_gp, proposals
from pipelines.studies.answers.answer import answer
from pipelines.studies.answers.report import write_study_report
from pipelines.studies.answers.results import Goal, best_trial, read_study
from pipelines.studies.samplers.surrogate import Observations, Surrogate, spread_out
from pipelines.studies.trials import Score, Trial, Work
from specs.study_document import StudyDocument
from storage import Store

HORIZON = 8


def finished(number: int, params: dict[str, Any], value: float, **about: Any) -> Trial:
    return Trial(number, number, "finished", params, not number, Work(), {}, (value,), {}, about)


def paused(number: int, params: dict[str, Any], rungs: dict[int, float]) -> Trial:
    at = {step: Score(value, None, None) for step, value in rungs.items()}
    return Trial(number, number, "paused", params, False, Work(paused=True), at, None, {}, {})


def along(count: int, luck: float, seed: int = 0) -> list[Trial]:
    """Trials along the lower clip, best at its middle, 0.275, by two points; in points."""
    rng = np.random.default_rng(seed)
    places = rng.random(count)
    return [
        finished(
            number,
            {LOW: 0.05 + 0.45 * float(place), HIGH: 0.3},
            float(2 * np.exp(-(((place - 0.5) / 0.2) ** 2)) + luck * rng.standard_normal()),
        )
        for number, place in enumerate(places)
    ]


def model_of(document: StudyDocument, trials: list[Trial]) -> tuple[Surrogate, noisy_gp.Encoding]:
    encoding = noisy_gp.Encoding(document.study.parameters)
    known = noisy_gp.Known.of(document.study, trials, (), HORIZON)
    seen = known.observations(encoding, np.array(known.values)[:, 0])
    return Surrogate(seen, encoding.groups, luck=known.luck), encoding


def test_the_slopes_of_the_likelihood_are_those_that_differences_give() -> None:
    rng = np.random.default_rng(0)
    trials = np.arange(24) // 2
    seen = Observations(
        rng.random((12, 3))[trials], np.where(np.arange(24) % 2, 0.0, -1.0), trials, np.ones(24), rng.random(24)
    )
    model = Surrogate(seen, np.array([0, 1, 1]))
    theta = np.linspace(-0.8, 0.4, 6)
    _, slopes = model.loss(theta)
    for index, slope in enumerate(slopes):
        step = 1e-5 * (np.arange(6) == index)
        numeric = (model.loss(theta + step)[0] - model.loss(theta - step)[0]) / 2e-5
        assert slope == pytest.approx(numeric, rel=1e-4, abs=1e-5)


def test_candidates_come_by_the_surface_and_not_by_their_own_luck(tmp_path: Path) -> None:
    """One lucky trial far from the good region has the best value of all, and is no candidate."""
    document = study_document(tmp_path / "specs", confirm={"candidates": 1, "seeds": 3})
    trials = along(40, luck=0.7)
    trials[0] = finished(0, {LOW: 0.2, HIGH: 0.3}, 0.0)
    lucky = finished(40, {LOW: 0.06, HIGH: 0.3}, max(trial.values[0] for trial in trials if trial.values) + 0.1)
    _, candidate = confirmation.arms(document.study, [*trials, lucky], horizon=HORIZON)
    assert candidate.trial != 40
    assert abs(candidate.params[LOW] - 0.275) < 0.1
    by_value = document.study.model_copy(update={"sampler": document.study.sampler.model_copy(update={"type": "tpe"})})
    assert confirmation.arms(by_value, [*trials, lucky])[1].trial == 40


def test_the_chances_of_being_best_add_up_to_one_and_equal_trials_share_theirs(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs")
    trials = along(20, luck=0.5)
    twin = finished(20, dict(trials[3].params), 0.1)
    standings = noisy_gp.standings(document.study, [*trials, twin], [*trials, twin], horizon=HORIZON)
    assert standings[3] == standings[20]
    assert sum(standing.chance for number, standing in standings.items() if number != 20) == pytest.approx(1.0)


def test_what_is_known_of_paused_trials_counts_for_the_end(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs", pruner={"type": "asha", "rungs": [2, 4]})
    ended = [finished(number, {LOW: 0.275, HIGH: 0.3}, 2.0 + 0.05 * (-1) ** number) for number in range(4)]
    halfway = [
        paused(4 + number, {LOW: 0.05 + 0.03 * number, HIGH: 0.3}, {2: 0.0, 4: 0.1 * number - 1.0})
        for number in range(15)
    ]
    model, encoding = model_of(document, [*ended, *halfway])
    mean, _ = model.marginal(encoding.encode(encoding.places([{LOW: 0.1, HIGH: 0.3}, {LOW: 0.45, HIGH: 0.3}])))
    assert mean[1] > mean[0] + 0.2


def test_the_spread_of_seeds_says_how_noisy_a_trial_is(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs")
    rng = np.random.default_rng(3)
    for luck in (0.1, 1.0):
        trials = []
        for number, trial in enumerate(along(12, luck=0.0)):
            assert trial.values
            by_seed = (trial.values[0] + luck * rng.standard_normal(4)).tolist()
            about = {"by_seed": by_seed, "run_ids": list("abcd")}
            trials.append(finished(number, trial.params, float(np.mean(by_seed)), **about))
        assert model_of(document, trials)[0].luck == pytest.approx(luck, rel=0.35)


def test_a_trial_under_way_is_not_proposed_again(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs")
    trials = along(16, luck=0.3)
    alone, _ = noisy_gp.propose(document.study, trials, horizon=HORIZON)
    running = Trial(16, 16, "running", alone, False, Work(), {}, None, {}, {})
    fewer = document.study.model_copy(update={"trials": 40})
    beside, _ = noisy_gp.propose(fewer, [*trials, running], horizon=HORIZON)
    assert max(abs(beside[LOW] - alone[LOW]) / 0.45, abs(beside[HIGH] - alone[HIGH]) / 0.95) > 0.03


def test_places_and_params_are_one_another(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs", parameters=MIXED)
    encoding = noisy_gp.Encoding(document.study.parameters)
    for place in np.random.default_rng(0).random((50, 5)):
        params = encoding.decode(place)
        again = encoding.decode(encoding.places([params])[0])
        assert {path: pytest.approx(value) for path, value in params.items()} == again


@pytest.mark.more
def test_a_study_of_ten_thousand_trials_proposes_within_two_seconds(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs", trials=20_000)
    trials = along(10_000, luck=0.5)
    started = time.process_time()
    proposed, _ = noisy_gp.propose(document.study, trials, horizon=HORIZON)
    assert time.process_time() - started < 2.0
    assert abs(proposed[LOW] - 0.275) < 0.1


def test_of_very_many_observations_the_best_and_an_even_sample_are_kept() -> None:
    values = np.arange(100.0)
    seen = Observations(values[:, None], np.zeros(100), np.arange(100), np.ones(100), values)
    kept = spread_out(seen, 20)
    assert len(kept) == 20
    assert set(range(90, 100)) <= set(kept.tolist())
    assert kept.min() == 0


@pytest.mark.more
def test_what_the_model_says_of_trials_is_in_the_record_and_in_sql(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    trials = search(monkeypatch, study_document(tmp_path / "specs"), home, measured(widest_is_best))
    with Store.open(home.root) as store:
        rows = store.query(
            "SELECT posterior_mean, posterior_deviation, chance_of_best FROM trials ORDER BY number"
        ).rows
    names = ("posterior_mean", "posterior_deviation", "chance_of_best")
    assert rows == [tuple(trial[name] for name in names) for trial in trials]
    assert sum(row[2] for row in rows) == pytest.approx(1.0)
    record = read_study(home, "quick")
    best = best_trial(record)
    assert best.number == max(range(12), key=lambda number: rows[number][0])
    assert f"The chance that no trial is better is {100 * best.chance:.0f} %." in answer(home, record).sentence


@pytest.mark.more
def test_each_trial_that_the_model_chose_says_what_it_was_expected_to_tell(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    sampler = {"type": "auto", "startup_trials": 4}
    document = study_document(tmp_path / "specs", sampler=sampler, trials=24)
    trials = search(monkeypatch, document, home, measured(widest_is_best))
    gains = [trial["expected_gain"] for trial in trials]
    assert gains[:5] == [None] * 5
    assert all(gain > 0 for gain in gains[5:])
    assert np.mean(gains[-4:]) < 0.2 * np.mean(gains[5:9]), "the more is known the less one more trial tells"
    page = write_study_report(home, "quick").read_text()
    assert (
        f"Trial 23, the newest, was expected to improve the best by {100 * gains[23]:.1f} points:"
        " stopping is reasonable."
    ) in page

    goals = {"goal": None, "goals": [GOAL, {"metric": "kl/reverse", "direction": "minimize"}]}
    several = study_document(tmp_path / "several", name="several", sampler=sampler, trials=7, **goals)
    outcome = measured(widest_is_best, lambda *_: 0.1)
    assert {trial["expected_gain"] for trial in search(monkeypatch, several, home, outcome)} == {None}


def test_what_the_model_expects_stays_within_what_the_goal_can_be(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    """The model knows no scale where three values are equal, and may expect more than all where they are near it."""
    equal = measured(lambda *_: 0.028)
    (first, *_) = search(monkeypatch, study_document(tmp_path / "specs", trials=3), home, equal)
    assert first["posterior_mean"] - 1.96 * first["posterior_deviation"] < 0
    record = read_study(home, "quick")
    assert all(trial.expected and trial.expected.low == 0.0 and trial.expected.high <= 1.0 for trial in record.trials)
    assert "mean@8 on two-terms 2.8 % [0.0, " in answer(home, record).sentence

    standings = {number: noisy_gp.Standing(1.01 + 0.01 * number, 0.1, 0.4 - 0.1 * number) for number in range(3)}
    monkeypatch.setattr(confirmation, "standings", lambda *_, **__: standings)
    trials = search(monkeypatch, study_document(tmp_path / "high", name="high", trials=3), home, equal)
    assert [trial["posterior_mean"] for trial in trials] == pytest.approx([1.01, 1.02, 1.03])
    record = read_study(home, "high")
    shown = [
        (trial.expected.value, trial.expected.low, trial.expected.high) for trial in record.trials if trial.expected
    ]
    assert shown == [(1.0, pytest.approx(1.01 + 0.01 * number - 0.196), 1.0) for number in range(3)]
    best = best_trial(record)
    assert best.number == 2, "the one of the highest mean, as before it is cut"


@pytest.mark.parametrize(
    ("goal", "values", "shown"),
    [
        (Goal("held_out", "pass@4", "maximize"), (-0.5, 0.5, 1.5), (0.0, 0.5, 1.0)),
        (Goal("held_out", "score@4", "maximize", least=-1.0), (-2.0, 0.5, 3.0), (-1.0, 0.5, 3.0)),
        (Goal("held_out", "score@4", "maximize"), (-2.0, 0.5, 3.0), (-2.0, 0.5, 3.0)),
        (Goal("", "entropy", "minimize"), (-2.0, 0.5, 3.0), (0.0, 0.5, 3.0)),
        (Goal("", "reward/mean", "maximize"), (-2.0, 0.5, 3.0), (-2.0, 0.5, 3.0)),
    ],
)
def test_each_goal_says_what_its_values_can_be(goal: Goal, values: tuple[float, ...], shown: tuple[float, ...]) -> None:
    assert tuple(map(goal.possible, values)) == shown


def test_auto_takes_tpe_for_very_many_parameters(tmp_path: Path) -> None:
    study = study_document(tmp_path / "specs").study
    many = {f"training.x{index}": NUMBERS[LOW] for index in range(21)}
    assert proposals.automatic(study) == "noisy_gp"
    assert proposals.automatic(study.model_copy(update={"parameters": many})) == "tpe"
