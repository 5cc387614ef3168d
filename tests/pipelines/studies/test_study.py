import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT, TESTS
from recorded_home import START, record_run
from tiny_study import STUDY, Evaluator, load_study, write_study

from pipelines.home.home import Home
from pipelines.jobs.preflight import examined
from pipelines.planning.plan import make_plan
from pipelines.prefect.flows.experiment import RunOutcome
from pipelines.processes.supervisor import StageError
from pipelines.studies.execution import Task, run_task
from pipelines.studies.measures import shared_seconds
from pipelines.studies.study import run_study
from pipelines.studies.trials import State, StudyInterruptedError, Trial, Work, seconds_left
from specs import Experiment, SpecError, load_study_document
from specs.document import Document
from specs.errors import Issue
from storage import Store

HERE = TESTS / "pipelines"
TILT = "  objective.parameters.tilt: {float: [0.0, 1.0]}\n"
CASES = """\
  objective:
    cases:
      rpg: {type: rpg}
      'false': {type: formula, weight: 2*w*A, claim: {exact: always}}
"""


def with_formula(directory: Path, parameters: str) -> Path:
    """The study over these parameters, of an experiment whose claim holds with 0 tilt alone."""
    path = write_study(
        directory / "specs", (STUDY[STUDY.index("  objective.clip.low") : STUDY.index("goal:")], parameters)
    )
    formula = "type: formula, parameters: {tilt: 0.0, over: 1.0}, weight: w*A + tilt/over, claim: {exact: always}"
    experiment = path.with_name("tiny.yaml")
    experiment.write_text(re.sub(r"objective: .*", f"objective: {{{formula}}}", experiment.read_text()))
    return path


def shown(record: dict[str, Any]) -> list[tuple[int, str, float, dict[str, Any]]]:
    return [(trial["number"], trial["state"], trial["value"], trial["params"]) for trial in record["trials"]]


@pytest.mark.more
def test_a_study_runs_its_trials_and_keeps_them_in_sql(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs"))
    record = run_study(document, home, Evaluator(home))
    assert [trial["state"] for trial in record["trials"]] == ["finished"] * 8
    assert len({trial["params"]["objective.clip.low"] for trial in record["trials"]}) == 8
    with Store.open(home.root) as store:
        rows = store.query(
            "SELECT number, state, run_id, value, params, started_at, ended_at FROM trials ORDER BY 1"
        ).rows
        (study,) = store.query("SELECT name, goal, trials_wanted, num_trials, sampler FROM studies").rows
    assert study == ("clips", "maximize mean@8 on two-terms", 8, 8, "noisy_gp")
    assert [row[0] for row in rows] == list(range(8))
    assert all(home.run(row[2]).is_dir() and 0 < row[3] < 1 and row[5] <= row[6] for row in rows)
    assert set(json.loads(rows[0][4])) == set(document.study.parameters)


def test_each_line_says_what_is_left_by_the_times_of_all_trials_that_have_ended(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, took, said = [0.0], iter((60.0, 180.0, 600.0, 600.0)), []
    monkeypatch.setattr("pipelines.studies.study.time", SimpleNamespace(monotonic=lambda: clock[0]))
    evaluate = Evaluator(home)

    def slower(trial: Document, until: int) -> tuple[RunOutcome, ...]:
        clock[0] += next(took)
        return evaluate(trial, until)

    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 4")))
    run_study(document, home, slower, say=said.append)
    left = [line.partition("(all trials: ")[2] for line in said if line.startswith("trial ")]
    assert left == ["", "about 3 min left)", "about 4 min left)", "about 5 min left)"]


def test_trials_that_are_under_way_share_what_is_left() -> None:
    def trial(number: int, state: State, **about: float) -> Trial:
        return Trial(number, number, state, {}, False, Work(), {}, None, {}, about)

    ended = [trial(0, "finished", seconds=40.0), trial(1, "pruned", seconds=80.0)]
    under_way = [trial(2, "running"), trial(3, "running", seconds=9.0)]
    assert seconds_left([*ended, under_way[0]], wanted=6) == 4 * 60
    assert seconds_left([*ended, *under_way], wanted=6) == 2 * 60
    assert seconds_left([*ended, trial(2, "paused", seconds=20.0)], wanted=3) == 60
    assert seconds_left(ended, wanted=2) == 0
    assert seconds_left(under_way, wanted=6) == 0
    maker = trial(0, "finished", seconds=240.0, shared_seconds=210.0)
    assert seconds_left([maker], wanted=6) == 5 * 30, "no other trial makes data and base model again"


def test_making_data_and_base_model_is_no_cost_of_the_trials_after(home: Home) -> None:
    record_run(home, "sums-s0")  # its data are cached, its base model took from 2.5 s to 64 s
    with Store.open(home.root) as store:
        assert shared_seconds(store, ["sums-s0"], START) == 61.5
        assert shared_seconds(store, ["sums-s0"], START + timedelta(seconds=10)) == 0, "an earlier call's"


def test_the_first_trial_has_the_experiments_own_values(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 1")))
    (trial,) = run_study(document, home, Evaluator(home))["trials"]
    assert trial["baseline"]
    assert trial["params"] == {
        "objective.clip.low": 0.2,
        "objective.clip.high": 0.28,
        "reference.update.every_steps": 2,
        "advantage.scale": "none",
    }


def test_a_trials_value_is_the_mean_over_seeds_with_its_interval(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 1")))
    (trial,) = run_study(document, home, Evaluator(home))["trials"]
    with Store.open(home.root) as store:
        values = [row[0] for row in store.query("SELECT value FROM evaluations WHERE step = 2").rows]
    assert len(values) == len(trial["run_ids"]) == 2
    assert trial["value"] == pytest.approx(sum(values) / 2)
    assert trial["value_low"] < trial["value"] < trial["value_high"]


@pytest.mark.more
def test_a_finished_study_runs_nothing_more_until_more_trials_are_wanted(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 2"))
    first = run_study(load_study_document(path), home, Evaluator(home))
    idle, busy = Evaluator(home), Evaluator(home)
    assert shown(run_study(load_study_document(path), home, idle)) == shown(first)
    assert idle.calls == []
    more = run_study(load_study_document(path, ("trials=4",)), home, busy)
    assert shown(more)[:2] == shown(first)
    assert len(busy.calls) == 2


def test_equal_trials_share_their_runs(home: Home, tmp_path: Path) -> None:
    few = ("objective.clip.low: {float: [0.05, 0.5]}", "objective.clip.low: {choice: [0.1, 0.2]}")
    high = ("  objective.clip.high: {float: [0.05, 1.0], log: true}\n", "")
    pace = ("  reference.update.every_steps: {int: [1, 2]}\n", "")
    scale = ("  advantage.scale: {choice: [none, group_std]}\n", "")
    path = write_study(tmp_path / "specs", few, high, pace, scale)
    evaluator = Evaluator(home)
    record = run_study(load_study_document(path), home, evaluator)
    assert len(record["trials"]) == 8
    assert len(evaluator.trained) == 4  # two values x two seeds


@pytest.mark.more
def test_a_killed_study_proposes_what_an_uninterrupted_one_would(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs")
    whole = run_study(load_study_document(path), home, Evaluator(home))
    broken = tmp_path / "broken"
    chance = random.Random(0)
    for _ in range(3):
        kill_midway(path, broken, chance.uniform(0.2, 0.9))
    record = run_study(load_study_document(path), Home(broken), Evaluator(Home(broken)))
    assert shown(record) == shown(whole)
    assert len(record["trials"]) == 8
    with Store.open(broken) as store:
        assert store.query("SELECT count(*), count(DISTINCT number), count(value) FROM trials").rows == [(8, 8, 8)]


def kill_midway(path: Path, root: Path, seconds: float) -> None:
    """Starts the study in a process, lets it begin a trial, and kills it after `seconds`."""
    command = [sys.executable, "-W", "ignore", str(HERE / "tiny_study.py"), str(path), str(root), "0.3"]
    search = os.pathsep.join([str(HERE), str(ROOT)])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": search}
    )
    with process:
        assert process.stdout.readline(), process.stderr.read().decode()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait(10)


@pytest.mark.more
def test_half_a_line_at_the_journals_end_is_dropped(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 2"))
    first = run_study(load_study_document(path), home, Evaluator(home))
    with open(home.study("clips") / "journal.log", "a") as journal:
        journal.write('{"op_code": 4, "worker')
    again = run_study(load_study_document(path, ("trials=3",)), home, Evaluator(home))
    assert shown(again)[:2] == shown(first)
    assert len(again["trials"]) == 3


@pytest.mark.more
def test_an_interrupted_trial_goes_on_under_its_number(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 2")))

    def interrupted(trial: Document, _until: int) -> tuple[RunOutcome, ...]:
        run = make_plan(trial, home).runs[0]
        return (RunOutcome(run, "cancelled", interrupted=True),)

    with pytest.raises(StudyInterruptedError):
        run_study(document, home, interrupted)
    left = json.loads((home.study("clips") / "study.json").read_text())
    assert [trial["state"] for trial in left["trials"]] == ["pending"]
    record = run_study(document, home, Evaluator(home))
    assert [(trial["number"], trial["state"]) for trial in record["trials"]] == [(0, "finished"), (1, "finished")]
    assert record["trials"][0]["params"] == left["trials"][0]["params"]


@pytest.mark.parametrize("on_failure", ["record", "stop"])
def test_a_trial_with_a_cancelled_run_is_left_to_the_next_call(home: Home, tmp_path: Path, on_failure: str) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", f"trials: 2\non_failure: {on_failure}"))
    document, evaluate, said = load_study_document(path), Evaluator(home), []

    def cancelled_once(trial: Document, until: int) -> tuple[RunOutcome, ...]:
        if said[-1].startswith("trial 0 "):
            return (RunOutcome(make_plan(trial, home).runs[0], "cancelled"),)
        return evaluate(trial, until)

    first = run_study(document, home, cancelled_once, say=said.append)
    assert [trial["state"] for trial in first["trials"]] == ["cancelled", "finished"]
    assert first["trials"][0]["reason"].endswith(" was cancelled")
    again = run_study(document, home, evaluate)
    assert [(trial["state"], trial["reason"]) for trial in again["trials"]] == [("finished", "")] * 2
    assert again["trials"][0]["params"] == first["trials"][0]["params"]
    assert again["trials"][1] == first["trials"][1]


@pytest.mark.more
@pytest.mark.parametrize(("on_failure", "told"), [("record", ["failed", "finished"]), ("stop", ["failed"])])
def test_a_failed_trial_is_recorded_with_its_reason(
    home: Home, tmp_path: Path, on_failure: str, told: list[str]
) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", f"trials: 2\non_failure: {on_failure}"))
    succeed = Evaluator(home)

    def first_fails(trial: Document, _until: int) -> tuple[RunOutcome, ...]:
        outcomes = succeed(trial)
        if len(succeed.calls) == 1:
            return (RunOutcome(outcomes[0].run, "failed", StageError("ran out of memory")), *outcomes[1:])
        return outcomes

    record = run_study(load_study_document(path), home, first_fails)
    assert [trial["state"] for trial in record["trials"]] == told
    assert "ran out of memory" in record["trials"][0]["reason"]
    assert record["trials"][0]["value"] is None


def test_a_run_without_the_goals_measure_fails_its_trial(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 1"), ("mean@8", "pass@4")))
    (trial,) = run_study(document, home, Evaluator(home))["trials"]
    assert (trial["state"], trial["reason"]) == ("failed", "no finite pass@4 on two-terms")


def test_the_mean_of_fewer_samples_is_the_mean_of_all(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 1"), ("mean@8", "mean@1"))
    (trial,) = run_study(load_study_document(path), home, Evaluator(home))["trials"]
    assert 0 < trial["value"] < 1


@pytest.mark.more
def test_a_users_mistake_that_all_trials_share_ends_the_study(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs"))

    def missing(_trial: Document, _until: int) -> tuple[RunOutcome, ...]:
        raise SpecError(Issue("no such directory", ("model", "path")))

    with pytest.raises(SpecError, match="no such directory"):
        run_study(document, home, missing)
    assert len(run_study(document, home, Evaluator(home))["trials"]) == 8


def test_a_mistake_in_a_searched_field_fails_the_trial_alone(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 2")))

    def refused(_trial: Document, _until: int) -> tuple[RunOutcome, ...]:
        raise SpecError(Issue("does not fit", ("objective", "clip")))

    record = run_study(document, home, refused)
    assert [trial["state"] for trial in record["trials"]] == ["failed"] * 2
    assert all("does not fit" in trial["reason"] for trial in record["trials"])


def test_a_trial_whose_values_make_the_claim_false_fails_before_it_runs(home: Home, tmp_path: Path) -> None:
    """With 0 tilt the weight is the divergence's, with any other it is not."""
    document, called = load_study_document(with_formula(tmp_path, TILT)), []

    def execute(trial: Document, _until: int) -> tuple[RunOutcome, ...]:
        called.append(trial)
        raise StudyInterruptedError("it may run")

    def trial(**params: Any) -> Task:
        return Task(Trial(0, 0, "running", params, False, Work(), {}, None, {}, {}))

    tilt = "objective.parameters.tilt"
    cases = load_study_document(with_formula(tmp_path, CASES))
    for task, of_study in ((trial(**{tilt: 0.5}), document), (trial(objective="false"), cases)):
        result = run_task(task, of_study, home, execute)
        assert result.at_fault
        assert "objective.claim: the claim is false" in result.reason
    assert not called
    with pytest.raises(StudyInterruptedError, match="it may run"):
        run_task(trial(**{tilt: 0.0}), document, home, execute)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (TILT, ["parameters[objective.parameters.tilt]: objective.claim: the claim is false (with 1)"]),
        ("  objective.parameters.tilt: {float: [-1.0, 1.0]}\n", ["is false (with -1)", "is false (with 1)"]),
        (
            "  objective.parameters.over: {float: [0.0, 1.0]}\n",
            ["parameters[objective.parameters.over]: objective.weight: the formula's value is not finite (with 0)"],
        ),
        (
            "  objective.weight: {choice: [w*A, w*A/A]}\n",
            ["study.yaml:6:36: parameters[objective.weight].choice.1: the formula's value is not finite"],
        ),
        (CASES, ["parameters.objective.cases.false.claim: the claim is false"]),
        ("  objective.parameters.over: {float: [1.0, 2.0]}\n", []),
        ("  training.optimizer.learning_rate: {float: [0.1, 1.0]}\n", []),
    ],
)
def test_candidates_and_ends_whose_formula_is_refused_are_said_before_the_study_runs(
    parameters: str, said: list[str], tmp_path: Path
) -> None:
    errors, _, _ = examined(load_study_document(with_formula(tmp_path, parameters)), [])
    assert len(errors) == len(said)
    for text, issue in zip(said, errors, strict=True):
        assert text in str(SpecError(issue))
        assert "hint: search other values; or " in str(SpecError(issue))


def test_a_refused_candidate_without_a_remedy_of_its_own_has_a_whole_hint(tmp_path: Path) -> None:
    document = load_study_document(with_formula(tmp_path, "  objective.parameters.over: {float: [1.0, 2.0]}\n"))

    def refused(experiment: Experiment) -> list[Issue]:
        return [Issue("not finite", ("objective",))] if experiment.objective.parameters["over"] == 2 else []

    (issue,) = document.refused(refused, ["objective"])
    assert issue.hint == "search other values"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{choice: [none, group_std]}", "{choice: [none, batch_std]}", "parameters[advantage.scale]: differs"),
        ("[0.05, 1.0], log: true", "[0.05, 1.0]", "parameters[objective.clip.high]: differs"),
        ("  reference.update.every_steps: {int: [1, 2]}\n", "", "parameters: is searched by the stored study"),
        ("direction: maximize", "direction: minimize", "goal: differs"),
    ],
)
def test_a_changed_study_is_refused_with_its_line(home: Home, tmp_path: Path, old: str, new: str, message: str) -> None:
    from specs.errors import render

    explicit = ("metric: mean@8", "metric: mean@8, direction: maximize")
    run_study(
        load_study_document(write_study(tmp_path / "specs", explicit, ("trials: 8", "trials: 1"))),
        home,
        Evaluator(home),
    )
    changed = write_study(tmp_path / "specs", explicit, (old, new))
    with pytest.raises(SpecError) as refused:
        run_study(load_study_document(changed), home, Evaluator(home))
    text = render(refused.value.issues)
    assert message in text
    assert f"{changed}:" in text
    assert "another name" in text


@pytest.mark.more
def test_a_wider_numeric_range_goes_on(home: Home, tmp_path: Path) -> None:
    run_study(load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 2"))), home, Evaluator(home))
    wider = write_study(tmp_path / "specs", ("[0.05, 0.5]", "[0.01, 0.6]"), ("trials: 8", "trials: 3"))
    assert len(run_study(load_study_document(wider), home, Evaluator(home))["trials"]) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 20", "steps: 21", "no longer the experiment of the stored study"),
        ("low: 0.2", "low: 0.3", "another baseline than the stored study"),
    ],
)
def test_another_experiment_or_baseline_under_the_same_study_is_refused(
    home: Home, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 1"))
    run_study(load_study_document(path), home, Evaluator(home))
    experiment = path.with_name("tiny.yaml")
    experiment.write_text(experiment.read_text().replace(old, new))
    with pytest.raises(SpecError, match=message):
        run_study(load_study_document(path), home, Evaluator(home))


@pytest.mark.more
def test_a_study_goes_on_when_its_work_is_to_run_elsewhere_or_otherwise(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 1"))
    run_study(load_study_document(path), home, Evaluator(home))
    experiment = path.with_name("tiny.yaml")
    experiment.write_text(experiment.read_text() + "stages: {train: {retries: 5}}\nresources: {threads: 1}\n")
    again = load_study_document(path, ("trials=2", "overrides.training.microbatch_tokens=512"))
    assert len(run_study(again, home, Evaluator(home))["trials"]) == 2


@pytest.mark.more
def test_a_constraint_that_no_trial_was_measured_by_is_refused(home: Home, tmp_path: Path) -> None:
    path = write_study(tmp_path / "specs", ("trials: 8", "trials: 1"))
    run_study(load_study_document(path), home, Evaluator(home))
    late = "trials: 2\nconstraints:\n  - {metric: truncated_fraction, max: 0.5}\n"
    path = write_study(tmp_path / "specs", ("trials: 8\n", late))
    with pytest.raises(SpecError, match="was not measured in the stored study's trials"):
        run_study(load_study_document(path), home, Evaluator(home))


@pytest.mark.more
def test_a_unit_of_the_confirmation_has_its_mean_where_trials_are_judged_cautiously(home: Home, tmp_path: Path) -> None:
    goal = ("metric: mean@8", "metric: mean@8, over_seeds: lower_bound")
    confirm = (
        "trials: 8\n",
        "trials: 2\nconfirm: {candidates: 1, seeds: 2}\nconstraints: [{metric: kl/reverse, max: 9}]\n"
        "overrides: {seeds: [0, 1, 2]}\n",
    )
    record = run_study(load_study_document(write_study(tmp_path / "specs", goal, confirm)), home, Evaluator(home))
    units = [unit for arm in record["confirmation"]["arms"] for unit in arm["units"]]
    with Store.open(home.root) as store:
        sql = "SELECT run_id, value FROM evaluations WHERE metric = 'mean@8' AND step = 2"
        accuracies = dict(store.query(sql).rows)
    assert len(units) == 4
    for unit in units:
        assert unit["value"] == pytest.approx(accuracies[unit["run_id"]])
        assert 0 <= unit["constraints"]["kl/reverse"] < 9, "by which the candidates are held against it on fresh seeds"


def test_the_journal_is_optunas_own(home: Home, tmp_path: Path) -> None:
    document = load_study_document(write_study(tmp_path / "specs", ("trials: 8", "trials: 3")))
    run_study(document, home, Evaluator(home))
    stored = load_study(home, "clips")
    assert [trial.state.name for trial in stored.trials] == ["COMPLETE"] * 3
