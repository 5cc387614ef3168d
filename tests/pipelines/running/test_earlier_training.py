"""Training that another run has done is taken: whole under another name, its steps where more of them are asked for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from live import Lab

from pipelines.home.home import Home
from pipelines.home.results import damage_of
from pipelines.home.state import RunState
from pipelines.home.unrecorded import why_incomplete
from pipelines.jobs.plan import _summary
from pipelines.planning.beginnings import shared_steps
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.processes.supervisor import StageError
from pipelines.running import stages
from pipelines.running.earlier_training import take_training
from pipelines.running.run import RunExecution, register_experiment, register_run
from specs.loader import load_document
from specs.machine.files import read_json, write_json
from specs.records import CheckpointRow
from storage import Store, check
from storage.segments import BadSegmentError
from tests.pipelines.planning.test_plan import SPEC, finish, planned
from tests.storage.recording import NOON, RecordedRun, segment


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def train(spec: Path, home: Home) -> Callable[..., RunPlan]:
    """Leaves a run with these overrides as if it was trained to its end."""

    def trained(*overrides: str) -> RunPlan:
        (run,) = planned(spec, home, *overrides).runs
        finish(run, home)
        steps = run.experiment.training.steps
        write_json(home.run(run.run_id) / "checkpoints" / f"step-{steps:06}" / "manifest.json", {"files": {}})
        return run

    return trained


def training(spec: Path, home: Home, *overrides: str) -> tuple[str, str]:
    (run,) = planned(spec, home, *overrides).runs
    return run.stage("train").action, run.stage("train").reason


def test_what_another_experiment_has_trained_is_cached(spec: Path, home: Home, train: Callable[..., RunPlan]) -> None:
    run = train()
    assert training(spec, home, "name=other") == ("CACHED", f"trained as {run.run_id}")
    assert training(spec, home, "name=other", "objective.kl_coef=0.02")[0] == "RUN"
    (home.run(run.run_id) / "result").write_text("changed")
    assert training(spec, home, "name=other") == ("RUN", "new")


def test_more_steps_go_on_from_the_last_checkpoint_of_fewer(
    spec: Path, home: Home, train: Callable[..., RunPlan]
) -> None:
    run = train()
    more = "training.steps=5"
    assert training(spec, home, more) == ("RESUME", f"continues from step 2 of {run.run_id}")
    assert training(spec, home, more, "training.prompts_per_step=8")[0] == "RUN"
    assert ("train", "RESUME", 1, "continues from step 2 of another run") in _summary(planned(spec, home, more))
    assert training(spec, home, "training.steps=1")[0] == "RUN"
    (home.run(run.run_id) / "checkpoints" / "step-000002" / "manifest.json").unlink()
    assert training(spec, home, more)[0] == "RUN"


@pytest.mark.more
@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ("[[1, 0.2]]", "[[1, 0.2], [4, 0.3]]", 3),
        ("[[1, 0.2], [4, 0.3]]", "[[1, 0.2], [4, 0.3], [6, 0.1]]", 4),
        ("[[1, 0.2], [4, 0.3]]", "[[1, 0.2], [3, 0.3]]", 2),
        ("[[1, 0.2], [4, 0.3]]", "[[1, 0.2], [2, 0.3]]", 0),
        ("[[1, 0.2]]", "[[1, 0.3]]", 0),
    ],
)
def test_a_run_goes_on_from_the_last_saved_step_up_to_which_another_had_its_values(
    spec: Path, home: Home, first: str, second: str, step: int
) -> None:
    def low(points: str) -> tuple[str, ...]:
        return ("training.steps=8", f"objective.clip={{type: dual, low: {{schedule: {points}}}}}")

    (other,) = planned(spec, home, *low(first)).runs
    directory = home.run(other.run_id)
    for saved in (2, 3, 4, 8):
        write_json(directory / "checkpoints" / f"step-{saved:06}" / "manifest.json", {"files": {}})
    register_run(home, load_document(spec, low(first)), other)
    register_experiment(home, load_document(spec, low(first)), (other,))
    write_json(directory / "plan.json", other.record())
    expected = ("RESUME", f"continues from step {step} of {other.run_id}")
    assert training(spec, home, *low(second)) == expected if step else training(spec, home, *low(second))[0] == "RUN"
    assert training(spec, home, *low(second), "training.prompts_per_step=8")[0] == "RUN"
    write_json(directory / "guards.json", [])
    assert training(spec, home, *low(second))[0] == "RUN", "its learning rate was lowered"


@pytest.mark.parametrize(
    ("setting", "further", "why"),
    [
        (
            "training.schedule.type=cosine",
            "",
            "the rate of a cosine schedule at each step depends on the number of steps",
        ),
        ("rollout.max_staleness=1", "", "rollout.max_staleness samples steps ahead"),
        ("evaluation.every_steps=1", "evaluation.seed=7", "the evaluations during training had other settings"),
    ],
)
def test_where_more_steps_cannot_go_on_the_plan_says_why(
    spec: Path, home: Home, train: Callable[..., RunPlan], setting: str, further: str, why: str
) -> None:
    train(setting)
    action, reason = training(spec, home, setting, "training.steps=5", *([further] if further else []))
    assert action == "RUN"
    assert reason.startswith(f"training.steps 2 -> 5 (--set); from the start: {why}")


def test_the_most_accurate_checkpoint_is_taken_too(spec: Path, home: Home) -> None:
    keep_best = ("evaluation.every_steps=1", "training.checkpoint={every_steps: 1, keep_best: {accuracy_on: held_out}}")
    steps = "training.steps=4"
    (short,) = planned(spec, home, *keep_best, steps).runs
    finish(short, home)
    source = home.run(short.run_id)
    for step in (1, 2, 4):
        write_json(source / "checkpoints" / f"step-{step:06}" / "manifest.json", {"files": {}})
        write_json(source / "weights" / f"step-{step:06}" / "model.json", {})
    accuracies = {"1": {"held_out": 0.1}, "2": {"held_out": 0.3}, "3": {"held_out": 0.2}}
    noted = {"evaluation": short.stage("evaluate").fingerprint, "steps": [1, 2, 3], "accuracies": accuracies}
    write_json(source / "evaluated.json", noted)
    document = load_document(spec, [*keep_best, "training.steps=6"])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    take_training(execution, execution.plan.stage("train"))
    taken = {
        kind: sorted(path.name for path in (execution.directory / kind).iterdir())
        for kind in ("checkpoints", "weights")
    }
    assert taken == {"checkpoints": ["step-000002", "step-000004"], "weights": ["step-000002"]}


@pytest.mark.more
@pytest.mark.parametrize("override", ["training.steps=5", "name=other"])
def test_what_is_taken_is_the_runs_own_and_outlives_the_other_one(
    spec: Path, home: Home, train: Callable[..., RunPlan], override: str
) -> None:
    (short,) = planned(spec, home).runs
    recorded = RecordedRun(home.root, short.run_id)
    recorded.start(1, lease=3)
    recorded.steps(1, 1)
    recorded.start(2, resumed_from_step=1, lease=4)
    recorded.step(2)
    for kind, path in (("weights", "weights/step-000002"), ("full", "checkpoints/step-000002")):
        saved = {"step": [2], "path": path, "kind": kind, "num_bytes": 1, "recorded_at": NOON}
        recorded.writer.columns(CheckpointRow, saved)
    recorded.writer.event(2, "weights_exported", "weights/step-000002")
    recorded.writer.event(2, "finished", "")
    write_json(recorded.path / "weights" / "step-000002" / "model.json", {})
    recorded.evaluate_on_the_way(1, 0.5, short.stage("evaluate").fingerprint)
    write_json(recorded.path / "evaluated.json", {"evaluation": short.stage("evaluate").fingerprint, "steps": [1]})
    train()
    document = load_document(spec, [override])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    take_training(execution, execution.plan.stage("train"))
    shutil.rmtree(recorded.path)
    evaluation = run.stage("evaluate").fingerprint
    assert read_json(execution.directory / "evaluated.json") == {"evaluation": evaluation, "steps": [1]}
    RunState(home, run.run_id).update(evaluation=evaluation)
    with Store.open(home.root) as store:
        assert store.query("select distinct run_id, step from metrics order by step").rows == [
            *((run.run_id, 1), (run.run_id, 2)),
        ]
        assert store.query("select attempt, resumed_from_step, valid_through from attempts order by attempt").rows == [
            *((1, 0, 1), (2, 1, None)),
        ]
        assert store.query("select run_id, step, value from evaluations").rows == [(run.run_id, 1, 0.5)]
        events = store.query("select kind from events where step = 2 and kind <> 'stepped' order by kind").rows
        saved = [path for (path,) in store.query("select path from checkpoints order by path").rows]
    whole = override == "name=other"
    assert events == ([("finished",), ("weights_exported",)] if whole else [])
    assert saved == ["checkpoints/step-000002", *(["weights/step-000002"] if whole else [])]
    assert all((execution.directory / path).is_dir() for path in saved)
    assert (execution.directory / "checkpoints" / "step-000002" / "manifest.json").is_file()
    assert damage_of(execution.directory / "train.json", run.stage("train").fingerprint).startswith("result") == whole
    assert check(home.root) == []


def test_a_run_that_takes_training_whose_tokens_were_freed_knows_why_it_has_none(
    spec: Path, home: Home, train: Callable[..., RunPlan]
) -> None:
    first = train()
    freed = {"tokens": {"freed_at": NOON.isoformat(), "keep_days": 1}}
    write_json(home.run(first.run_id) / "freed.json", freed)
    document = load_document(spec, ["name=other"])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    take_training(execution, execution.plan.stage("train"))
    assert why_incomplete(execution.directory, "tokens").startswith("`rpg gc` freed them on 2026-11-20")


def test_a_retry_goes_on_with_what_was_taken_before_it(
    spec: Path, home: Home, train: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    (short,) = planned(spec, home).runs
    recorded = RecordedRun(home.root, short.run_id)
    recorded.start(1)
    recorded.steps(1, 2)
    train()
    document = load_document(spec, ["training.steps=5"])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    later = execution.directory / "attempts" / "0002.json"

    def fails(*_: object) -> None:
        write_json(later, read_json(later.with_name("0001.json")) | {"attempt": 2})
        raise StageError("out of memory", execution.directory / "log")

    monkeypatch.setattr(stages, "_train", fails)
    for _ in range(2):
        with pytest.raises(StageError, match="out of memory"):
            stages.perform_stage(execution, execution.plan.stage("train"))
    assert later.is_file()


def test_of_a_damaged_run_nothing_is_taken(spec: Path, home: Home, train: Callable[..., RunPlan]) -> None:
    (short,) = planned(spec, home).runs
    recorded = RecordedRun(home.root, short.run_id)
    recorded.start(1)
    recorded.steps(1, 2)
    train()
    segment(recorded, "tokens", 2).write_bytes(b"PAR1")
    document = load_document(spec, ["training.steps=5"])
    (run,) = make_plan(document, home).runs
    execution = RunExecution(document, run.run_id, home)
    execution.directory.mkdir()
    with pytest.raises(BadSegmentError):
        take_training(execution, execution.plan.stage("train"))
    assert list(execution.directory.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_more_steps_and_another_name_give_bit_for_bit_what_training_from_the_start_gives(lab: Lab) -> None:
    # A bonus on the entropy moves the weights where the rewards of so small a model give no signal.
    evaluated = ("evaluation.every_steps=2", "training.entropy_coef=0.1")
    short = lab.rpg("run", str(lab.spec), overrides=("training.steps=3", *evaluated))
    assert short.code == 0, short.err
    assert "live: rpg watch --web tiny\n" in short.err
    (first,) = lab.run_ids()
    longer = lab.rpg("run", str(lab.spec), overrides=("training.steps=6", *evaluated))
    assert longer.code == 0, longer.err
    assert f"continues from step 3 of {first}" in longer.err
    (second,) = set(lab.run_ids()) - {first}
    assert lab.query(f"select step from metrics where run_id = '{second}' and name = 'entropy' order by step") == [
        (step,) for step in range(1, 7)
    ]
    assert lab.query(
        f"select resumed_from_step, valid_through from attempts where run_id = '{second}' order by attempt"
    ) == [
        *((0, 3), (3, None)),
    ]
    measured = f"select distinct step from evaluations where run_id = '{second}' order by step"
    assert lab.query(measured) == [(0,), (2,), (4,), (6,)]
    assert lab.query(f"select count(*) from events where run_id = '{second}' and kind = 'finished'") == [(1,)]
    proof = lab.rpg("resume", second, "--prove", "--steps", "6")
    assert proof.code == 0, proof.out + proof.err
    renamed = lab.rpg("run", str(lab.spec), overrides=("name=other", "training.steps=6", *evaluated))
    assert renamed.code == 0, renamed.err
    (third,) = set(lab.run_ids()) - {first, second}
    stages = lab.state(third)["stages"]
    assert (stages["train"]["cached"], stages["train"]["reason"]) == (True, f"trained as {second}")
    for table in ("metrics", "rollouts", "tokens"):
        count = f"select count(*), count(distinct step) from {table} where run_id = "
        assert lab.query(f"{count} '{third}'") == lab.query(f"{count} '{second}'")
    removed = lab.rpg("rm", second, "--yes")
    assert removed.code == 0, removed.err
    assert lab.rpg("resume", third, "--prove").code == 0
    assert json.loads(lab.rpg("db", "check", "--full", "--json").out) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_that_parts_from_another_gives_bit_for_bit_what_training_from_the_start_gives(lab: Lab) -> None:
    common = ("training.steps=6", "training.checkpoint={every_steps: 3}", "training.entropy_coef=0.1")
    rate = "training.optimizer.learning_rate={schedule: %s}"
    first = lab.rpg("run", str(lab.spec), overrides=(*common, rate % "[[1, 1e-2]]"))
    assert first.code == 0, first.err
    (one,) = lab.run_ids()
    second = lab.rpg("run", str(lab.spec), overrides=(*common, rate % "[[1, 1e-2], [4, 1e-3]]"))
    assert second.code == 0, second.err
    assert f"continues from step 3 of {one}" in second.err
    (other,) = set(lab.run_ids()) - {one}
    rates = f"select value from metrics where run_id = '{other}' and name = 'learning_rate' order by step"
    assert lab.query(rates) == [*[(1e-2,)] * 3, *[(1e-3,)] * 3]
    proof = lab.rpg("resume", other, "--prove", "--steps", "6")
    assert proof.code == 0, proof.out + proof.err
    assert lab.rpg("rm", one, "--yes").code == 0
    assert json.loads(lab.rpg("db", "check", "--full", "--json").out) == []


def test_an_evaluation_that_is_taken_is_the_runs_own_and_outlives_the_other_one(
    spec: Path, home: Home, train: Callable[..., RunPlan]
) -> None:
    first = train()
    evaluation = first.stage("evaluate").fingerprint
    recorded = RecordedRun(home.root, first.run_id)
    recorded.evaluate(evaluation, accuracy=0.7)
    write_json(first.stage("evaluate").output / "summary.json", {"checkpoints": []})
    document = load_document(spec, ["name=other"])
    (run,) = make_plan(document, home).runs
    planned_evaluation = run.stage("evaluate")
    assert (planned_evaluation.action, planned_evaluation.reason) == ("CACHED", f"evaluated as {first.run_id}")
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    assert stages.perform_stage(execution, planned_evaluation) == "cached"
    assert execution.state.stage("evaluate")["reason"] == f"evaluated as {first.run_id}"
    shutil.rmtree(recorded.path)
    with Store.open(home.root) as store:
        query = "select distinct run_id, value from evaluations where metric like 'mean@%' order by value"
        rows = store.query(query).rows
        samples = store.query("select distinct run_id from evaluation_samples").rows
    assert rows == [(run.run_id, 0.4), (run.run_id, 0.7)]
    assert samples == [(run.run_id,)]
    (again,) = make_plan(document, home).runs
    assert (again.stage("evaluate").action, again.stage("evaluate").reason) == ("CACHED", "done")


def test_an_evaluation_that_is_gone_by_the_time_is_done_anew(
    spec: Path, home: Home, train: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train()
    document = load_document(spec, ["name=other"])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    execution = RunExecution(document, run.run_id, home)
    shutil.rmtree(first.stage("evaluate").output)
    done: list[str] = []
    monkeypatch.setattr(stages, "_make_aside", lambda _execution, stage, _tick: done.append(stage.reason))
    assert stages.perform_stage(execution, run.stage("evaluate")) == "done"
    assert done == [f"{first.run_id} is damaged: {first.run_id} no longer has such an evaluation"]


@pytest.mark.long
def test_another_name_takes_the_evaluation_too_and_what_is_asked_for_anew_is_done(lab: Lab) -> None:
    first = lab.rpg("run", str(lab.spec))
    assert first.code == 0, first.err
    (one,) = lab.run_ids()
    renamed = lab.rpg("run", str(lab.spec), overrides=("name=other",))
    assert renamed.code == 0, renamed.err
    (other,) = set(lab.run_ids()) - {one}
    stages = lab.state(other)["stages"]
    assert (stages["train"]["cached"], stages["train"]["reason"]) == (True, f"trained as {one}")
    assert (stages["evaluate"]["cached"], stages["evaluate"]["reason"]) == (True, f"evaluated as {one}")
    for table, columns in (("evaluations", "step, metric, value"), ("evaluation_samples", "* exclude (run_id)")):
        rows = f"select {columns} from {table} where run_id = "
        assert lab.query(f"{rows}'{one}' order by all") == lab.query(f"{rows}'{other}' order by all") != []
    removed = lab.rpg("rm", one, "--yes")
    assert removed.code == 0, removed.err
    assert json.loads(lab.rpg("db", "check", "--full", "--json").out) == []
    anew = lab.rpg("run", str(lab.spec), "--fresh", "train", overrides=("name=other",))
    assert anew.code == 0, anew.err
    stages = lab.state(other)["stages"]
    assert (stages["base"]["cached"], stages["train"]["cached"], stages["evaluate"]["cached"]) == (True, False, False)
    assert stages["train"]["reason"] == "computed again, as requested"
    query = f"select attempt, valid_through from attempts where run_id = '{other}' order by attempt"
    assert lab.query(query) == [(1, 0), (2, None)]
    again = lab.rpg("plan", str(lab.spec), "--json", overrides=("name=other",))
    assert {stage["action"] for stage in json.loads(again.out)["runs"][0]["stages"]} == {"CACHED"}


def test_batches_sampled_ahead_have_the_temperature_of_their_own_step() -> None:
    field = "rollout.temperature"
    first = {f"{field}.schedule.0.0": 1, f"{field}.schedule.0.1": 1.0, f"{field}.between": "step"}
    second = first | {f"{field}.schedule.1.0": 5, f"{field}.schedule.1.1": 0.5}
    ahead = {"rollout.max_staleness": 2}
    assert shared_steps(first, second, 9) == 4
    assert shared_steps(first | ahead, second | ahead, 9) == 2
