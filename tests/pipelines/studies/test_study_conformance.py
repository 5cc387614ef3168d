"""What every sampler and every pruner of a study keeps to, and what one of them alone has to do."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from recorded_home import record_run
from tiny_trials import (
    DUAL,
    GOAL,
    HIGH,
    LOW,
    MIXED,
    NUMBERS,
    PACE,
    SCALE,
    Outcome,
    measured,
    search,
    study_document,
    widest_is_best,
)

from pipelines.home.home import Home
from pipelines.studies.execution import Result
from pipelines.studies.proposals import propose
from pipelines.studies.trials import ForeignResult, Score, Trial, Work
from pipelines.studies.warm_start import foreign_results
from specs import SpecError
from specs.machine.files import write_json
from specs.machine.liveness import LeaseRecord
from specs.schema.study import SearchSampler, Study
from specs.study_space import holds, is_active

STEPPED: dict[str, Any] = {LOW: {"float": [0.1, 0.4], "step": 0.1}, SCALE: {"choice": ["none", "group_std"]}}
SPACES = {"cma": NUMBERS, "grid": {**STEPPED, DUAL: {"int": [2, 3], "when": {SCALE: "none"}}}}
"""Spaces of the samplers that do not take every space."""
SAMPLERS = get_args(SearchSampler.model_fields["type"].annotation)
MODELS = ("auto", "noisy_gp", "tpe", "gp", "cma")
RUNGS = [2, 4]
ASHA = {"type": "asha", "rungs": RUNGS}
LONG = pytest.mark.long
PRUNERS: list[dict[str, Any]] = [
    {"type": "none"},
    {"type": "asha", "rungs": RUNGS},
    {"type": "asha", "rungs": RUNGS, "eta": 4},
    {"type": "hyperband", "rungs": RUNGS},
    {"type": "median", "rungs": RUNGS, "startup_trials": 2},
    {"type": "patient", "rungs": RUNGS},
]
KL_GOAL = {"metric": "kl/reverse", "direction": "minimize"}
WORTH: Outcome = measured(widest_is_best)


def narrow(trial: Trial, _step: int) -> float:
    """Another measure, best if the upper clip is small."""
    return float(trial.params.get(HIGH, 0.28))


def of_any_space(trial: Trial, step: int) -> Result:
    """A measure that every space has a param for."""
    return Result((f"run-{trial.number}",), (Score(trial.params.get(LOW, 0.2), None, None),), paused_at=step)


def params_of(trials: list[Mapping[str, Any]]) -> list[Any]:
    return [trial["params"] for trial in trials]


@pytest.mark.more
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_proposal_is_in_the_space_and_has_what_its_conditions_say(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str
) -> None:
    document = study_document(
        tmp_path / "specs",
        parameters=SPACES.get(sampler, MIXED),
        sampler={"type": sampler, "startup_trials": 4} if sampler in MODELS else {"type": sampler},
    )
    trials = search(monkeypatch, document, home, of_any_space)
    space = document.study.parameters
    assert len(trials) == 12
    for params in params_of(trials[1:]):
        assert all(holds(space[path], value) for path, value in params.items())
        assert set(params) == {path for path in space if is_active(space[path], params)}
    if sampler != "cma":
        assert len({DUAL in trial["params"] for trial in trials}) == 2, "both sides of the condition are tried"


@pytest.mark.more
@pytest.mark.parametrize("sampler", [sampler for sampler in SAMPLERS if sampler != "nsga2"])
def test_a_study_that_grows_bit_by_bit_proposes_what_a_whole_one_does_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampler: str
) -> None:
    fields: dict[str, Any] = {
        "parameters": SPACES.get(sampler, MIXED),
        "sampler": {"type": sampler, "startup_trials": 3} if sampler in MODELS else {"type": sampler},
    }
    whole = search(monkeypatch, study_document(tmp_path / "a", **fields), Home(tmp_path / "whole"), of_any_space)
    for wanted in (2, 5, 9, 12):
        document = study_document(tmp_path / "b", **fields | {"trials": wanted})
        broken = search(monkeypatch, document, Home(tmp_path / "broken"), of_any_space)
    assert params_of(broken) == params_of(whole)
    assert len({json.dumps(params) for params in params_of(broken[1:])}) == len(broken) - 1


def test_a_genetic_search_goes_on_as_it_would_have_when_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its generations depend on how many trials are wanted, so that it is killed here and does not grow."""
    document = study_document(tmp_path / "specs", parameters=MIXED, sampler={"type": "nsga2"})
    whole = search(monkeypatch, document, Home(tmp_path / "whole"), WORTH)
    calls: list[int] = []

    def killed(trial: Trial, step: int) -> Result:
        calls.append(trial.number)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return WORTH(trial, step)

    for _ in range(12):
        with pytest.raises(KeyboardInterrupt):
            search(monkeypatch, document, Home(tmp_path / "broken"), killed)
    assert params_of(search(monkeypatch, document, Home(tmp_path / "broken"), killed)) == params_of(whole)


def test_a_grid_has_each_combination_once_and_then_the_study_is_over(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    document = study_document(
        tmp_path / "specs",
        parameters=STEPPED,
        sampler={"type": "grid"},
        trials=50,
        confirm={"candidates": 1, "seeds": 2},
    )
    trials = search(monkeypatch, document, home, of_any_space)
    searched = [json.dumps(params) for params in params_of(trials[1:])]
    assert len(searched) == len(set(searched)) == 4 * 2
    record = json.loads((home.study("quick") / "study.json").read_text())
    assert record["status"] == "finished"
    assert len(record["confirmation"]["arms"]) == 2


def test_qmc_spreads_more_evenly_than_chance_and_meets_no_point_twice_when_a_range_moves(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    for trials, high in ((9, 0.5), (17, 0.6)):
        space = {LOW: {"float": [0.05, high]}, HIGH: {"float": [0.05, 1.0]}}
        document = study_document(tmp_path / "specs", parameters=space, sampler={"type": "qmc"}, trials=trials)
        recorded = search(monkeypatch, document, home, WORTH)
    drawn = params_of(recorded[1:])
    for searched in (drawn[:8], drawn[8:]):
        eighths = {int(8 * (params[HIGH] - 0.05) / 0.95) for params in searched}
        assert len(eighths) == 8, "a scrambled Sobol sequence has one point in each eighth"
    assert len({params[HIGH] for params in drawn}) == 16


@pytest.mark.more
@pytest.mark.parametrize("sampler", [sampler for sampler in SAMPLERS if sampler != "grid"])
def test_a_range_that_was_moved_is_searched_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str
) -> None:
    for trials, low in ((6, [0.05, 0.5]), (12, [0.3, 0.8])):
        space = {**NUMBERS, LOW: {"float": low}}
        kind = {"type": sampler, "startup_trials": 3} if sampler in MODELS else {"type": sampler}
        document = study_document(tmp_path / "specs", parameters=space, sampler=kind, trials=trials)
        recorded = search(monkeypatch, document, home, WORTH)
    assert {trial["state"] for trial in recorded} == {"finished"}
    assert all(0.3 <= params[LOW] <= 0.8 for params in params_of(recorded[6:]))


def test_tpe_learns_from_trials_of_before_a_range_was_widened(tmp_path: Path) -> None:
    document = study_document(
        tmp_path / "specs",
        parameters={**NUMBERS, LOW: {"float": [0.05, 0.9]}},
        sampler={"type": "tpe", "startup_trials": 10},
    )
    before = [
        finished(number, {LOW: 0.05 + 0.03 * number, HIGH: 0.5}, -abs(0.3 - 0.03 * number)) for number in range(15)
    ]
    proposed = [propose(with_seed(document.study, seed), before).params[LOW] for seed in range(40)]
    assert sum(abs(low - 0.35) < 0.1 for low in proposed) >= 22  # of draws at random 9


def finished(number: int, params: dict[str, Any], value: float, **about: Any) -> Trial:
    return Trial(number, number, "finished", params, False, Work(), {}, (value,), {}, about)


def with_seed(study: Study, seed: int) -> Study:
    return study.model_copy(update={"sampler": study.sampler.model_copy(update={"seed": seed})})


@pytest.mark.more
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("goals", [1, 2])
def test_what_validation_accepts_runs_with_each_number_of_goals(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str, goals: int
) -> None:
    fields: dict[str, Any] = {
        "goal": None if goals > 1 else GOAL,
        "goals": [GOAL, KL_GOAL] if goals > 1 else None,
        "parameters": {LOW: {"float": [0.1, 0.4], "step": 0.1}, HIGH: {"float": [0.1, 0.9], "step": 0.2}},
        "sampler": {"type": sampler},
        "constraints": [{"metric": "kl/forward", "max": 0.5}],
    }
    if sampler == "cma" and goals > 1:
        with pytest.raises(SpecError, match="one goal"):
            study_document(tmp_path / "specs", **fields)
        return
    document = study_document(tmp_path / "specs", **fields)
    outcome = measured(*[widest_is_best, narrow][:goals], constraint="kl/forward")
    trials = search(monkeypatch, document, home, outcome)
    assert [len(trial["values"]) for trial in trials] == [goals] * 12
    assert {trial["feasible"] for trial in trials} == {True, False}


@pytest.mark.parametrize("sampler", ["noisy_gp", "tpe", "nsga2"])
def test_a_diverged_trial_does_not_stop_a_search_with_several_goals(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str
) -> None:
    document = study_document(tmp_path / "specs", goal=None, goals=[GOAL, KL_GOAL], sampler={"type": sampler})
    usual = measured(widest_is_best, narrow)

    def outcome(trial: Trial, step: int) -> Result:
        return Result(reason="diverged", at_fault=True) if trial.number % 3 == 1 else usual(trial, step)

    trials = search(monkeypatch, document, home, outcome)
    assert [trial["state"] for trial in trials].count("failed") == 4


def test_cma_refuses_what_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cma searches numbers only"):
        study_document(tmp_path / "specs", parameters=MIXED, sampler={"type": "cma"})


def shares(document: Any, trials: list[Trial], inside: Any) -> float:
    """The share of proposals, over seeds, that are inside a region."""
    return sum(inside(propose(with_seed(document.study, seed), trials).params) for seed in range(30)) / 30


@pytest.mark.parametrize("sampler", ["tpe", "noisy_gp"])
def test_a_model_is_steered_by_constraints(tmp_path: Path, sampler: str) -> None:
    kind = {"type": sampler}
    document = study_document(tmp_path / "specs", sampler=kind, constraints=[{"metric": "kl/reverse", "max": 0.5}])
    places = [0.06 * 1.18**step for step in range(16)]
    free = [finished(number, {LOW: 0.3, HIGH: high}, high) for number, high in enumerate(places)]
    bound = [
        finished(number, {LOW: 0.3, HIGH: high}, high, constraints={"kl/reverse": 2 * high})
        for number, high in enumerate(places)
    ]
    unbound = study_document(tmp_path / "free", sampler=kind)
    assert shares(document, bound, lambda params: params[HIGH] <= 0.25) > 0.6
    assert shares(unbound, free, lambda params: params[HIGH] <= 0.25) < 0.3


def share_that_diverges(study: Study, *, seen: bool) -> float:
    """Returns the share of a sampler's proposals that diverges, with the best values at the border of divergence."""
    trials: list[Trial] = []
    for number in range(40):
        params = propose(study, trials).params
        if params[HIGH] <= 0.3:
            trials.append(finished(number, params, params[HIGH]))
        else:
            about = {"at_fault": seen, "reason": "diverged"}
            trials.append(Trial(number, number, "failed", params, False, Work(), {}, None, {}, about))
    return sum(trial.state == "failed" for trial in trials[10:]) / 30


@pytest.mark.more
@pytest.mark.parametrize("sampler", ["tpe", "noisy_gp"])
def test_a_model_keeps_away_from_where_trials_diverge(tmp_path: Path, sampler: str) -> None:
    """Told as failed, as Optuna has it, diverged trials are unseen and their region stays the best guess."""
    study = study_document(tmp_path / "specs", sampler={"type": sampler}).study
    told, untold = (
        sum(share_that_diverges(with_seed(study, seed), seen=seen) for seed in range(4)) / 4 for seen in (True, False)
    )
    assert told < 0.6 * untold, (told, untold)


@pytest.mark.parametrize("sampler", ["noisy_gp", "tpe", "gp", "cma", "nsga2"])
def test_results_from_elsewhere_change_what_is_proposed_and_are_no_trials(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str
) -> None:
    goals = [{"dataset": "two-terms", "metric": "mean@8", "direction": "maximize", "over_seeds": "mean"}]
    elsewhere = [
        {"number": n, "state": "finished", "params": {LOW: 0.1 + 0.01 * n, HIGH: 0.1 + 0.05 * n}, "values": [0.1 * n]}
        for n in range(12)
    ]
    home.study("older").mkdir(parents=True)
    write_json(
        home.study("older") / "study.json",
        {"name": "older", "experiment": "", "goal": "", "goals": goals, "trials": elsewhere},
    )
    kind = {"type": sampler} if sampler == "nsga2" else {"type": sampler, "startup_trials": 8}
    warm = study_document(tmp_path / "a", sampler=kind, trials=4, warm_start={"studies": ["older"]})
    cold = study_document(tmp_path / "b", name="cold", sampler=kind, trials=4)
    learnt, unlearnt = search(monkeypatch, warm, home, WORTH), search(monkeypatch, cold, home, WORTH)
    assert len(learnt) == len(unlearnt) == 4
    assert params_of(learnt)[1:] != params_of(unlearnt)[1:]


@pytest.mark.parametrize("sampler", ["tpe", "noisy_gp"])
def test_a_model_proposes_where_results_from_elsewhere_are_good(tmp_path: Path, sampler: str) -> None:
    document = study_document(tmp_path / "specs", sampler={"type": sampler})
    foreign = [ForeignResult({LOW: 0.05 + 0.018 * n, HIGH: 0.5}, (-abs(0.18 - 0.018 * n),)) for n in range(25)]
    lows = [propose(with_seed(document.study, seed), [], foreign).params[LOW] for seed in range(20)]
    assert sum(abs(low - 0.23) < 0.06 for low in lows) >= 15  # of draws at random 6


@pytest.mark.parametrize("sampler", ["tpe", "noisy_gp"])
def test_results_from_elsewhere_that_break_a_constraint_attract_no_proposal(tmp_path: Path, sampler: str) -> None:
    document = study_document(
        tmp_path / "specs", sampler={"type": sampler}, constraints=[{"metric": "kl/reverse", "max": 0.5}]
    )
    places = [0.06 * 1.18**step for step in range(16)]
    foreign = [ForeignResult({LOW: 0.3, HIGH: high}, (high,), {"kl/reverse": 2 * high}) for high in places]
    proposed = [propose(with_seed(document.study, seed), [], foreign).params[HIGH] for seed in range(30)]
    assert sum(high <= 0.25 for high in proposed) > 18


def test_a_run_is_learnt_from_by_the_names_of_its_cases_and_the_values_inside_them(home: Home, tmp_path: Path) -> None:
    kinds = {
        "by-steps": {"source": "snapshot", "update": {"every_steps": 8}},
        "average": {"source": "snapshot", "update": {"ema_decay": 0.9}},
        "behaviour": {"source": "behaviour"},
    }
    space = {LOW: NUMBERS[LOW], "reference": {"cases": kinds}, PACE: {"int": [1, 8], "when": {"reference": "by-steps"}}}
    document = study_document(tmp_path / "specs", parameters=space, warm_start={"runs": ["paced", "moving"]})
    for run_id, reference in (
        ("paced", {"reference": kinds["by-steps"], PACE: 3}),
        ("moving", {"reference": kinds["average"]}),
    ):
        record_run(home, run_id, after=0.6, steps=8, problems=20, experiment="clips")
        spec = document.trial({LOW: 0.1, **reference}).experiment.model_dump(mode="json")
        write_json(home.run(run_id) / "spec.json", spec)
    paced, moving = foreign_results(document, home)
    assert paced.params == {LOW: 0.1, "reference": "by-steps", PACE: 3}
    assert moving.params == {LOW: 0.1, "reference": "average"}


@pytest.mark.more
@pytest.mark.parametrize("pruner", PRUNERS, ids=lambda pruner: f"{pruner['type']}-{pruner.get('eta', '')}")
@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_every_pruner_ends_with_a_finished_trial_and_says_why_the_others_ended(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, sampler: str, pruner: dict[str, Any]
) -> None:
    space = {LOW: {"float": [0.1, 0.4], "step": 0.1}, HIGH: {"float": [0.1, 0.9], "step": 0.1}}
    document = study_document(tmp_path / "specs", parameters=space, sampler={"type": sampler}, pruner=pruner)
    trials = search(monkeypatch, document, home, WORTH)
    assert len(trials) == 12
    assert {trial["state"] for trial in trials} <= {"finished", "pruned"}
    assert sum(trial["state"] == "finished" for trial in trials[1:]) >= 1
    assert all(trial["reason"] and trial["rungs"] for trial in trials if trial["state"] == "pruned")
    assert not any(trial["reason"] for trial in trials if trial["state"] == "finished")
    if pruner["type"] in ("asha", "hyperband"):
        best = max(trials[1:], key=lambda trial: trial["params"][HIGH])
        assert "pruned" in {trial["state"] for trial in trials}
        assert max(best["rungs"].values(), key=lambda rung: rung["value"])["value"] > 0


@pytest.mark.more
@pytest.mark.parametrize("pruner", PRUNERS[1:4], ids=lambda pruner: f"{pruner['type']}-{pruner.get('eta', '')}")
def test_trials_that_diverge_on_the_way_keep_no_other_from_its_end(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path, pruner: dict[str, Any]
) -> None:
    def outcome(trial: Trial, step: int) -> Result:
        fails = trial.number and step != 2 and trial.number % 3
        return Result(reason="diverged", at_fault=True) if fails else WORTH(trial, step)

    trials = search(monkeypatch, study_document(tmp_path / "specs", pruner=pruner), home, outcome)
    assert {trial["state"] for trial in trials} == {"finished", "pruned", "failed"}
    assert sum(trial["state"] == "finished" for trial in trials[1:]) >= 1


def test_where_patience_stops_every_candidate_there_is_nothing_to_confirm(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    pruner, confirm = {"type": "patient", "rungs": RUNGS}, {"candidates": 1, "seeds": 2}
    document = study_document(tmp_path / "specs", pruner=pruner, trials=4, confirm=confirm)
    trials = search(monkeypatch, document, home, measured(lambda _trial, step: 0.5 - 0.01 * step))
    assert [trial["state"] for trial in trials] == ["finished", "pruned", "pruned", "pruned"]
    record = json.loads((home.study("quick") / "study.json").read_text())
    assert (record["status"], record["confirmation"]) == ("finished", None)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.more
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"sampler": {"type": "qmc"}, "pruner": ASHA}, id="qmc"),
        pytest.param({"sampler": {"type": "auto", "startup_trials": 2}, "pruner": ASHA}, id="auto", marks=LONG),
    ],
)
@pytest.mark.parametrize("each", [pytest.param(1, marks=LONG), 5])
def test_a_worker_killed_at_any_write_loses_doubles_and_promotes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: Mapping[str, Any], each: int
) -> None:
    """Whatever is written next, it is the last thing written; then another worker does what is left.

    Args:
        each: of so many writes the first is tried.
    """
    from optuna.storages import JournalStorage

    document = study_document(tmp_path / "specs", trials=4, confirm={"candidates": 1, "seeds": 4}, **fields)

    monkeypatch.setattr(LeaseRecord, "is_held", lambda *_, **__: False)  # this process lives on
    whole = told(search(monkeypatch, document, Home(tmp_path / "whole"), WORTH)), rounds_of(Home(tmp_path / "whole"))
    write = JournalStorage._write_log
    count = 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(JournalStorage, "_write_log", counted)
        search(monkeypatch, document, Home(tmp_path / "counted"), WORTH)
    total = count
    assert total > 40
    for last in range(1, total, each):
        home, count = Home(tmp_path / f"killed-{last}"), 0

        def killed(*arguments: Any, last: int = last) -> Any:
            nonlocal count
            count += 1
            if count > last:
                raise Killed
            return write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(JournalStorage, "_write_log", killed)
            with pytest.raises(Killed):
                search(monkeypatch, document, home, WORTH)
        assert (told(search(monkeypatch, document, home, WORTH)), rounds_of(home)) == whole, (
            f"killed after write {last}"
        )


def told(trials: list[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("number", "state", "value", "params", "rungs", "attempts")
    return [tuple(trial[key] for key in keys) for trial in trials]


def rounds_of(home: Home) -> tuple[Any, ...]:
    """The looks of the study's confirmation, and what came of each unit."""
    found = json.loads((home.study("quick") / "study.json").read_text())["confirmation"]
    units = [(arm["label"], unit["seed"], unit["value"]) for arm in found["arms"] for unit in arm["units"]]
    return found["looks"], found["share"], found["decided"], units


def test_workers_that_share_a_study_do_each_trial_once_and_end_together(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    document = study_document(
        tmp_path / "specs",
        sampler={"type": "random"},
        pruner={"type": "asha", "rungs": RUNGS},
        trials=24,
        confirm={"candidates": 2, "seeds": 5},
    )
    done: list[tuple[int, int]] = []
    confirmed: list[tuple[int, int]] = []

    def outcome(trial: Trial, step: int) -> Result:
        time.sleep(0.01)
        if "arm" in trial.about:
            confirmed.append((trial.about["arm"], trial.about["seed"]))
            close = 0.5 + 0.1 * (trial.about["seed"] % 2) + 0.01 * (not trial.baseline)
            return Result(("run",), (Score(close, None, None),))
        done.append((trial.number, step))
        return WORTH(trial, step)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: search(monkeypatch, document, home, outcome), range(3)))
    record = json.loads((home.study("quick") / "study.json").read_text())
    assert len(record["trials"]) == 24
    assert {trial["state"] for trial in record["trials"]} == {"finished", "pruned"}
    assert len(done) == len(set(done)), "no trial was trained to the same step twice"
    units = [unit for arm in record["confirmation"]["arms"] for unit in arm["units"]]
    assert len(confirmed) == len(set(confirmed)) == len(units), "no unit was done twice"
    assert {unit["state"] for unit in units} == {"finished"}
    assert record["status"] == "finished"
