"""A population: who begins, who goes on, who takes over what, and what comes of a kill."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_trials import HIGH, LOW, NUMBERS, Outcome, measured, search, study_document

from pipelines.home.home import Home
from pipelines.studies.answers.best import best_spec
from pipelines.studies.answers.report import write_study_report
from pipelines.studies.answers.results import read_study
from pipelines.studies.execution import Result
from pipelines.studies.trials import Trial
from specs import SpecError, load_experiment
from specs.schema.schedule import ValueSchedule
from specs.study_document import StudyDocument
from storage import Store

MEMBERS, EVERY, STEPS = 4, 2, 8
BOUNDARIES = (2, 4, 6)
FIELDS: dict[str, Any] = {
    "sampler": {"type": "population", "members": MEMBERS, "exploit_every": EVERY, "perturb": 1.5},
    "trials": 20,
}
WHOLE = 1 + MEMBERS + len(BOUNDARIES)
"""Trials of a population of four: the baseline, the members, and one who takes a place each time."""


def value_at(trial: Trial, path: str, step: int) -> float:
    param = trial.params.get(path, 0.2)
    return ValueSchedule.model_validate(param).at(step) if isinstance(param, dict) else float(param)


def late_is_wide(trial: Trial, step: int) -> float:
    """A measure that wants a narrow upper clip at first and a wide one later."""
    end = step or STEPS
    return sum(-abs(value_at(trial, HIGH, at) - 0.1 * at) for at in range(1, end + 1)) / end


WORTH: Outcome = measured(late_is_wide)


def document_of(directory: Path, **fields: Any) -> StudyDocument:
    return study_document(directory, **FIELDS | fields)


def points(trial: Mapping[str, Any], path: str) -> list[list[float]]:
    schedule: list[list[float]] = trial["params"][path]["schedule"]
    return schedule


def test_the_worst_leave_their_places_to_schedules_that_part_from_a_better_ones(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    trials = search(monkeypatch, document_of(tmp_path / "specs"), home, WORTH)
    assert len(trials) == WHOLE
    members, newcomers = trials[1 : 1 + MEMBERS], trials[1 + MEMBERS :]
    assert [trial["parent"] for trial in members] == [None] * MEMBERS
    assert all(len(points(trial, path)) == 1 for trial in members for path in NUMBERS)
    assert [trial["parent_step"] for trial in newcomers] == list(BOUNDARIES)
    for trial in newcomers:
        parent, step = trials[trial["parent"]], trial["parent_step"]
        for path, searched in NUMBERS.items():
            before = points(parent, path)
            assert points(trial, path)[: len(before)] == before
            (changed_at, value), old = points(trial, path)[-1], before[-1][1]
            low, high = searched["float"]
            assert changed_at == step + 1 or value == old
            assert value == pytest.approx(min(max(old * 1.5, low), high)) or value == pytest.approx(max(old / 1.5, low))
        there = [other for other in trials[1:] if str(step) in other["rungs"]]
        values = {other["number"]: other["rungs"][str(step)]["value"] for other in there}
        ended = [other["number"] for other in there if other["state"] == "pruned" and other["rung"] == step]
        assert ended == [min(values, key=lambda number: values[number])]
        assert trial["parent"] == max(values, key=lambda number: values[number])
        assert f"trial {trial['number']} took its place with trial {trial['parent']}'s" in trials[ended[0]]["reason"]
    finished = [trial["number"] for trial in trials if trial["state"] == "finished"]
    assert len(finished) == 1 + MEMBERS
    assert {trial["state"] for trial in trials} == {"finished", "pruned"}


def test_page_sql_and_best_spec_tell_the_schedules_and_where_they_came_from(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    trials = search(monkeypatch, document_of(tmp_path / "specs"), home, WORTH)
    last = trials[-1]
    page = write_study_report(home, "quick").read_text()
    assert "How the schedules came about" in page
    assert f"trial {last['parent']} at step {last['parent_step']}" in page
    with Store.open(home.root) as store:
        rows = store.query("SELECT parent, parent_step FROM trials ORDER BY number").rows
    assert rows == [(trial["parent"], trial["parent_step"]) for trial in trials]
    text = best_spec(home, read_study(home, "quick"), last["number"]).text
    path = tmp_path / "best.yaml"
    path.write_text(text)
    clip = load_experiment(path).objective.clip
    assert [list(point) for point in clip.high.schedule] == points(last, HIGH)


def test_newcomers_begin_before_their_parents_go_on(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []

    def noted(trial: Trial, step: int) -> Result:
        done.append((trial.number, step))
        return WORTH(trial, step)

    trials = search(monkeypatch, document_of(tmp_path / "specs"), home, noted)
    for trial in trials[1 + MEMBERS :]:
        first = next(index for index, (number, _) in enumerate(done) if number == trial["number"])
        beyond = [index for index, (number, step) in enumerate(done) if number == trial["parent"]]
        after = [index for index in beyond if not 0 < done[index][1] <= trial["parent_step"]]
        assert all(first < index for index in after)


def test_a_population_that_is_killed_at_every_second_piece_of_work_comes_out_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = document_of(tmp_path / "specs")
    whole = search(monkeypatch, document, Home(tmp_path / "whole"), WORTH)
    calls: list[int] = []

    def killed(trial: Trial, step: int) -> Result:
        calls.append(trial.number)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return WORTH(trial, step)

    broken: list[Mapping[str, Any]] = []
    for _ in range(2 * (1 + MEMBERS * (1 + len(BOUNDARIES)))):
        try:
            broken = search(monkeypatch, document, Home(tmp_path / "broken"), killed)
        except KeyboardInterrupt:
            continue
        break

    assert kept(broken) == kept(whole)


def test_workers_that_share_a_population_come_out_as_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which member ends first depends on chance, and who takes over whom does not."""
    document = document_of(tmp_path / "specs")
    whole = search(monkeypatch, document, Home(tmp_path / "whole"), WORTH)
    done: list[tuple[int, int]] = []

    def noted(trial: Trial, step: int) -> Result:
        time.sleep(0.02 * (trial.number % 3))
        done.append((trial.number, step))
        return WORTH(trial, step)

    shared = Home(tmp_path / "shared")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: search(monkeypatch, document, shared, noted), range(3)))
    trials = json.loads((shared.study("quick") / "study.json").read_text())["trials"]
    assert kept(trials) == kept(whole)
    assert len(done) == len(set(done)), "no member was trained to the same step twice"


def kept(trials: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [[trial[key] for key in ("params", "state", "value", "rungs", "parent", "reason")] for trial in trials]


def test_members_that_fail_or_break_a_constraint_are_replaced_and_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    bound = {"constraints": [{"metric": "kl/reverse", "max": 0.5}]}

    def outcome(trial: Trial, step: int) -> Result:
        if trial.number == 1:
            return Result((), reason="diverged", at_fault=True)
        breaks = trial.number == 2
        worth = measured(lambda *_: 9.0)(trial, step) if breaks else WORTH(trial, step)
        return Result(worth.run_ids, worth.values, paused_at=step, constraints={"kl/reverse": 1.0 if breaks else 0.1})

    trials = search(monkeypatch, document_of(tmp_path / "specs", **bound), home, outcome)
    parents = {trial["parent"] for trial in trials if trial["parent"] is not None}
    assert parents
    assert not parents & {1, 2}
    assert trials[1]["state"] == "failed"
    assert trials[5]["parent_step"] == BOUNDARIES[0]


def test_without_trials_left_nobody_takes_over_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    trials = search(monkeypatch, document_of(tmp_path / "specs", trials=1 + MEMBERS), home, WORTH)
    assert [trial["parent"] for trial in trials] == [None] * (1 + MEMBERS)
    assert [trial["state"] for trial in trials].count("finished") == 2
    assert json.loads((home.study("quick") / "study.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampler": {"type": "population"}}, "sampler.exploit_every: missing"),
        ({"sampler": {"type": "population", "exploit_every": 8}}, "sampler.exploit_every: members are compared before"),
        ({"trials": 4}, "trials: too few for the members and the baseline"),
        ({"pruner": {"type": "asha", "rungs": [2]}}, "pruner.type: a population compares its members itself"),
        (
            {"parameters": {LOW: {"choice": [0.1, 0.2]}}},
            r"parameters\[objective.clip.low\]: a population cannot change it over training",
        ),
        ({"parameters": {"objective.clip.dual": {"float": [2.0, 9.0]}}}, "a population cannot change it over training"),
        ({"parameters": {LOW: {"float": [0.1, 0.5], "step": 0.1}}}, "a population multiplies and divides it"),
    ],
)
def test_what_a_population_cannot_do_is_refused_at_its_place(
    tmp_path: Path, fields: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        document_of(tmp_path / "specs", **fields)


def test_settings_of_a_population_have_no_effect_elsewhere(tmp_path: Path) -> None:
    document = study_document(tmp_path / "specs", sampler={"type": "random", "members": 4})
    assert [warning.message for warning in document.warnings] == ["members has no effect"]
    document = document_of(tmp_path / "few", trials=6)
    assert [warning.message for warning in document.warnings] == ["places of the last members stay vacant"]
