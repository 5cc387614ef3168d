"""Pruning with promotion, failures and confirmation, with made-up trainings."""

from pathlib import Path
from typing import Any

import pytest
from tiny_study import Evaluator, load_study, write_study

from pipelines.home.home import Home
from pipelines.prefect.flows.experiment import RunOutcome
from pipelines.processes.supervisor import StageError
from pipelines.studies.study import run_study
from specs import SpecError, load_study_document
from specs.document import Document
from specs.machine.files import read_json
from specs.schema.experiment import Experiment

pytestmark = pytest.mark.more

LONG = ("trials: 8", "trials: 9\noverrides: {training.steps: 8}\npruner: {type: asha, rungs: [2, 4], eta: 2}")
CONFIRMED = ("trials: 8", "trials: 6\nconfirm: {candidates: 2, seeds: 3}")


def run(path: Path, home: Home, execute: Any) -> dict[str, Any]:
    return run_study(load_study_document(path), home, execute)


def test_the_best_of_each_rung_go_on_from_their_checkpoints(home: Home, tmp_path: Path) -> None:
    evaluator = Evaluator(home, steps=8)
    record = run(write_study(tmp_path / "specs", LONG), home, evaluator)
    states = [trial["state"] for trial in record["trials"]]
    searched = record["trials"][1:]
    assert states[0] == "finished", "the baseline meets no rung"
    assert record["trials"][0]["rungs"] == {}
    assert set(states[1:]) == {"finished", "pruned"}
    best = max(searched, key=lambda trial: trial["rungs"]["2"]["value"])
    assert "4" in best["rungs"], "the best of the first rung goes on"
    assert all(trial["rungs"] for trial in searched)
    assert sum("4" in trial["rungs"] for trial in searched) >= 4  # half of eight
    straight_through = 2 * 8 * len(record["trials"])  # seeds x steps x trials
    assert evaluator.steps_trained < 0.7 * straight_through
    # No step is trained twice: each run trained exactly the steps up to its last rung or the end.
    reached = [8 if trial["state"] == "finished" else trial["rung"] for trial in record["trials"]]
    assert evaluator.steps_trained == 2 * sum(reached)


def test_a_pruned_trial_says_where_it_stood(home: Home, tmp_path: Path) -> None:
    record = run(write_study(tmp_path / "specs", LONG), home, Evaluator(home, steps=8))
    reasons = [trial["reason"] for trial in record["trials"] if trial["state"] == "pruned"]
    assert reasons
    assert all("at step" in reason and "place" in reason for reason in reasons)


def test_a_paused_trial_is_neither_failed_nor_lost_when_the_study_is_interrupted(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", LONG)
    whole = run(path, Home(tmp_path / "whole"), Evaluator(Home(tmp_path / "whole"), steps=8))
    for calls in (2, 3, 4):
        evaluator = Evaluator(home, steps=8)

        def interrupted(trial: Document, until: int, evaluator: Evaluator = evaluator, calls: int = calls) -> Any:
            outcomes = evaluator(trial, until)
            if len(evaluator.calls) == calls:
                raise KeyboardInterrupt
            return outcomes

        with pytest.raises(KeyboardInterrupt):
            run(path, home, interrupted)
    record = run(path, home, Evaluator(home, steps=8))
    told = [
        [(t["number"], t["state"], t["value"], t["params"], t["rungs"]) for t in r["trials"]] for r in (record, whole)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "rule",
    [
        "{type: median, rungs: [2, 4], startup_trials: 2}",
        pytest.param("{type: patient, rungs: [2, 4, 6]}", marks=pytest.mark.long),
    ],
)
def test_other_rules_stop_a_trial_at_its_rung(home: Home, tmp_path: Path, rule: str) -> None:
    class Flat(Evaluator):
        def accuracy(self, experiment: Experiment, step: int) -> float:
            clip: Any = experiment.objective.clip  # type: ignore[union-attr]
            return 0.8 - 0.02 * step if clip.high < 0.3 else 0.5 + 0.04 * step

    text = f"trials: 8\noverrides: {{training.steps: 8}}\npruner: {rule}"
    record = run(write_study(tmp_path / "specs", ("trials: 8", text)), home, Flat(home, steps=8))
    states = {trial["state"] for trial in record["trials"][1:]}
    assert states == {"finished", "pruned"}
    stopped = [trial for trial in record["trials"] if trial["state"] == "pruned"]
    assert all(trial["reason"] for trial in stopped)


def test_the_best_are_confirmed_on_seeds_that_no_trial_had(home: Home, tmp_path: Path) -> None:
    evaluator = Evaluator(home)
    record = run(write_study(tmp_path / "specs", CONFIRMED), home, evaluator)
    confirmed = record["confirmation"]
    assert record["status"] == "finished"
    assert confirmed["seeds"] == [2, 3, 4]
    assert confirmed["arms"][0]["label"] == "baseline"
    assert len(confirmed["arms"]) == 3
    for arm in confirmed["arms"]:
        assert [unit["seed"] for unit in arm["units"]] == [2, 3, 4]
        assert {unit["state"] for unit in arm["units"]} == {"finished"}
        assert all(0 < unit["value"] < 1 for unit in arm["units"])
    ranked = sorted(record["trials"][1:], key=lambda trial: -trial["value"])
    assert [arm["trial"] for arm in confirmed["arms"][1:]] == [trial["number"] for trial in ranked[:2]]
    again = Evaluator(home)
    run(write_study(tmp_path / "specs", CONFIRMED), home, again)
    assert again.calls == []


def test_the_confirmations_runs_are_an_experiment_of_their_own(home: Home, tmp_path: Path) -> None:
    run(write_study(tmp_path / "specs", CONFIRMED), home, Evaluator(home))
    units = read_json(home.study("clips") / "study.json")["confirmation"]["arms"][0]["units"]
    assert all(unit["run_id"].startswith("clips-confirmation-s") for unit in units)


def failing(evaluator: Evaluator, cause: Any, times: int) -> Any:
    """Executes as the evaluator does, but its second trial fails this many times."""

    def execute(trial: Document, until: int) -> tuple[RunOutcome, ...]:
        outcomes = evaluator(trial, until)
        error = StageError("it ended")
        error.cause = cause
        if 2 <= len(evaluator.calls) < 2 + times:
            return (RunOutcome(outcomes[0].run, "failed", error), *outcomes[1:])
        return outcomes

    return execute


def test_a_trial_that_lost_its_machine_is_done_again_under_its_number(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 3"))
    record = run(path, home, failing(Evaluator(home), "lost_peer", times=2))
    assert [trial["state"] for trial in record["trials"]] == ["finished"] * 3
    assert [trial["attempts"] for trial in record["trials"]] == [0, 2, 0]


def test_a_trial_that_loses_its_machine_every_time_fails(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 3"))
    record = run(path, home, failing(Evaluator(home), "lost_peer", times=3))
    assert [trial["state"] for trial in record["trials"]] == ["finished", "failed", "finished"]


def test_a_trial_that_diverges_fails_and_the_sampler_learns_of_it(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 3"))
    record = run(path, home, failing(Evaluator(home), "diverged", times=1))
    assert [trial["state"] for trial in record["trials"]] == ["finished", "failed", "finished"]
    assert record["trials"][1]["reason"].startswith("diverged: ")
    assert [trial.state.name for trial in load_study(home, "clips").trials] == ["COMPLETE", "PRUNED", "COMPLETE"]


def test_the_baseline_is_a_trial_where_its_values_are_outside_the_ranges_too(home: Home, tmp_path: Path) -> None:
    outside = ("objective.clip.low: {float: [0.05, 0.5]}", "objective.clip.low: {float: [0.3, 0.5]}")
    path = write_study(tmp_path / "specs", outside, ("trials: 8", "trials: 2"))
    evaluator = Evaluator(home)
    record = run(path, home, evaluator)
    assert record["trials"][0]["baseline"]
    assert evaluator.calls[0]["low"] == 0.2
    assert 0.3 <= record["trials"][1]["params"]["objective.clip.low"] <= 0.5


def test_fewer_fresh_seeds_or_another_set_make_another_confirmation(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", CONFIRMED)
    first = run(path, home, Evaluator(home))
    path.write_text(path.read_text().replace("seeds: 3", "seeds: 2"))
    fewer = run(path, home, Evaluator(home))
    seeds = [[unit["seed"] for unit in arm["units"]] for arm in fewer["confirmation"]["arms"]]
    assert seeds == [[2, 3]] * 3
    assert first["spent"]["seconds"] > fewer["spent"]["seconds"] > 0, "what confirms is spent too"
    looks = [of["confirmation"]["looks"] for of in (first, fewer)]
    assert looks == [[2, 3], [2, 3]], "each number of fresh seeds at which there was a look; three come in two rounds"


def test_a_journals_study_is_not_begun_anew_in_a_database(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 1"))
    run(path, home, Evaluator(home))
    monkeypatch.setenv("RPG_STUDIES_URL", "postgresql://rpg@127.0.0.1:1/none")
    with pytest.raises(SpecError, match="is stored in a journal here"):
        run(path, home, Evaluator(home))
