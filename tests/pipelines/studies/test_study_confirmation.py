"""The confirmation in rounds: the remaining candidates, the claims after each round, and the effect of other numbers of
seeds."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trials import search, study_document

from pipelines.home.home import Home
from pipelines.studies import confirmation
from pipelines.studies.answers.answer import Answer, answer
from pipelines.studies.answers.results import StudyRecord
from pipelines.studies.confirmation import Look, may_win, progress, rounds, set_aside, share_of
from pipelines.studies.execution import Result
from pipelines.studies.ledger import TrialLedger
from pipelines.studies.storage import open_storage
from pipelines.studies.trials import Score, Trial, Work
from specs.study_document import StudyDocument

Value = Callable[[Trial, int], float]
"""Trial and seed, which is 0 in the search -> accuracy."""


def confirmed(
    monkeypatch: pytest.MonkeyPatch, home: Home, document: StudyDocument, value: Value
) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Runs the study. Returns its confirmation and the units that were run, as arm and seed."""
    ran: list[tuple[str, int]] = []

    def outcome(trial: Trial, _: int) -> Result:
        seed = trial.about.get("seed", 0)
        if seed:
            ran.append(("baseline" if trial.baseline else "candidate", seed))
        return Result(("run",), (Score(value(trial, seed), None, None),), tokens=100)

    search(monkeypatch, document, home, outcome)
    record = json.loads((home.study("quick") / "study.json").read_text())
    assert record["status"] == "finished"
    return record["confirmation"], ran


def answered(home: Home) -> Answer:
    """The answer of the study that was run."""
    return answer(home, StudyRecord.of(json.loads((home.study("quick") / "study.json").read_text())))


def with_gain(gain: float, luck: float = 0.01) -> Value:
    """Returns candidates that are this much better on fresh seeds, with a search biased in their favour."""

    def value(trial: Trial, seed: int) -> float:
        if not seed:
            return 0.5 + 0.01 * trial.number
        rng = np.random.default_rng([trial.baseline, seed])
        return 0.5 + gain * (not trial.baseline) + luck * float(rng.uniform(-1, 1))

    return value


def study(tmp_path: Path, **fields: Any) -> StudyDocument:
    confirm = {"candidates": 1, "seeds": 5}
    return study_document(tmp_path, **{"trials": 4, "sampler": {"type": "random"}, "confirm": confirm, **fields})


def test_a_candidate_that_cannot_win_any_more_has_no_further_seed(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    found, ran = confirmed(monkeypatch, home, study(tmp_path), with_gain(-0.2))
    assert len(ran) == 4
    assert [arm["stopped_after"] for arm in found["arms"]] == [0, 2]
    said = answered(home)
    assert "stopped after 2 seeds, since it could no longer win." in said.note
    assert "Measured on 2 fresh seeds of at most 5 (" in said.note
    assert "; stopped, since no candidate could still win." in said.note


def test_a_candidate_that_has_won_ends_the_confirmation_at_the_level_of_that_look(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    found, ran = confirmed(monkeypatch, home, study(tmp_path), with_gain(0.2, luck=0.02))
    assert len(ran) == 6
    assert (found["looks"], found["share"]) == ([2, 3], 1)
    said = answered(home)
    assert "is best" in said.sentence
    assert "; stopped, since a candidate is better than the baseline." in said.note
    assert "Brackets of arms are 95 % intervals, of differences 98.5 %." in said.note


def test_what_is_undecided_goes_to_the_last_seed_and_has_the_whole_error_there(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    found, ran = confirmed(monkeypatch, home, study(tmp_path), with_gain(0.02, luck=0.05))
    assert (len(ran), found["share"], found["looks"]) == (10, 0, [2, 3, 5])


def test_more_seeds_are_taken_up_where_the_rounds_ended_and_claim_less(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    confirmed(monkeypatch, home, study(tmp_path), with_gain(0.02, luck=0.05))
    more = study(tmp_path, confirm={"candidates": 1, "seeds": 8})
    found, ran = confirmed(monkeypatch, home, more, with_gain(0.02, luck=0.05))
    assert (len(ran), found["looks"]) == (6, [2, 3, 5, 8])
    assert found["share"] == 3, "those of the first three looks are spent"
    again, ran = confirmed(monkeypatch, home, more, with_gain(0.02, luck=0.05))
    assert (again["share"], ran) == (3, [])


@pytest.mark.parametrize(
    ("ended", "looks"),
    [(0, [2, 3, 5]), (3, [3, 5]), (5, [5])],
)
def test_a_confirmation_whose_units_were_made_at_once_is_completed(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, ended: int, looks: list[int]
) -> None:
    value = with_gain(0.02, luck=0.05)
    search(
        monkeypatch, study(tmp_path, confirm=None), home, lambda t, _: Result(("r",), (Score(value(t, 0), None, None),))
    )
    document = study(tmp_path)
    storage = open_storage(home, "quick", lambda _: False)
    ledger = TrialLedger(document, storage, home.study("quick"), lambda: False, "")

    def earlier() -> None:
        ledger.open()
        for arm in confirmation.arms(document.study, ledger.trials()):
            for seed in ledger.confirming_seeds:
                ledger.add_unit(arm, seed)
        for unit in ledger.units():
            if unit.about["seed"] in ledger.confirming_seeds[:ended]:
                claimed = ledger.claim(unit, 0)
                ledger.finish(claimed, [Score(value(unit, unit.about["seed"]), None, None)])

    ledger.transaction(earlier)
    found, ran = confirmed(monkeypatch, home, study(tmp_path, confirm={"candidates": 1, "seeds": 5}), value)
    assert len(ran) == 2 * (5 - ended)
    assert [len(arm["units"]) for arm in found["arms"]] == [5, 5]
    assert (found["looks"], found["share"]) == (looks, 0)


def test_every_share_of_the_error_is_spent_once() -> None:
    taken: dict[int, int] = {}
    for number in rounds(16):
        taken[number] = share_of(number, 16, taken)
    assert taken == {2: 3, 4: 2, 8: 1, 16: 0}
    assert share_of(8, 16, taken) == 1, "to look once more at the same seeds costs nothing"
    assert share_of(20, 20, taken) == 4


def test_of_several_candidates_each_stops_by_itself() -> None:
    looks = [Look(2, 2, 5, (0, 3, 7), "", stopped=(7,))]
    at = progress(looks, {0: 2, 3: 2, 7: 2}, 0, 5)
    assert (at.seeds, at.due, at.stopped) == ({0: 3, 3: 3, 7: 2}, 3, {7: 2})
    # By more seeds it may win after all.
    at = progress(looks, {0: 2, 3: 2, 7: 2}, 0, 9)
    assert (at.seeds, at.due, at.stopped) == ({0: 3, 3: 3, 7: 3}, 3, {})


@pytest.mark.parametrize(
    ("candidate", "baseline", "may"),
    [
        ([0.5, 0.5], [0.5, 0.5], False),
        ([0.6, 0.6], [0.5, 0.5], True),
        ([0.4, 0.5], [0.45, 0.44], True),
        ([-np.inf, 0.9], [0.5, 0.5], False),
        ([0.9, 0.9], [0.5, -np.inf], False),
    ],
)
def test_a_candidate_goes_on_where_it_may_still_be_told_from_the_baseline(
    candidate: Sequence[float], baseline: Sequence[float], may: bool
) -> None:
    assert may_win(candidate, baseline, 5, 0.95) is may


def test_a_budget_sets_aside_what_the_confirmation_may_cost_at_most(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    document = study(tmp_path, trials=40, budget={"tokens": 2000}, confirm={"candidates": 1, "seeds": 4})
    confirmed(monkeypatch, home, document, with_gain(0.02, luck=0.05))
    trials = json.loads((home.study("quick") / "study.json").read_text())["trials"]
    assert len(trials) == 12, "2,000 less eight runs of 100"


def test_the_confirmation_is_not_expected_to_make_data_and_base_model_again(tmp_path: Path) -> None:
    about = {"run_ids": ["a"], "tokens": 100.0, "gpu_hours": 2.0, "seconds": 3600.0, "shared_seconds": 1800.0}
    baseline = Trial(0, 0, "finished", {}, True, Work(), {}, (0.5,), {}, about)
    costs = set_aside(study(tmp_path, confirm={"candidates": 1, "seeds": 4}).study, [baseline])
    assert (costs["tokens"], costs["gpu_hours"], costs["hours"]) == (800, 8, 4)


def test_the_mean_of_finished_trials_is_set_aside_where_the_baseline_failed(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    document = study(tmp_path, trials=40, budget={"tokens": 2000}, confirm={"candidates": 1, "seeds": 4})

    def outcome(trial: Trial, _: int) -> Result:
        if trial.baseline:
            return Result(("run",), reason="diverged", at_fault=True)
        return Result(("run",), (Score(0.5, None, None),), tokens=100)

    search(monkeypatch, document, home, outcome)
    trials = json.loads((home.study("quick") / "study.json").read_text())["trials"]
    assert len(trials) == 13, "the baseline's failure, and 2,000 less eight runs of 100"


def test_at_most_half_of_a_budget_is_set_aside(monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path) -> None:
    document = study(tmp_path, trials=40, budget={"tokens": 800}, confirm={"candidates": 3, "seeds": 4})
    confirmed(monkeypatch, home, document, with_gain(0.02, luck=0.05))
    trials = json.loads((home.study("quick") / "study.json").read_text())["trials"]
    assert len(trials) == 4
