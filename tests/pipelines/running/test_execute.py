"""`rpg run` and what stops it, on real runs; the dashboard's view is read from Prefect's own database."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from live import COMMAND, SPEC, Lab, finished
from waiting import wait_for

from pipelines.processes.forking import may_fork
from specs.metrics import METRICS

LONG = ("training.steps=400", "training.checkpoint.every_steps=50")


@pytest.fixture
def done(prepared_home: Path, tmp_path: Path):
    """A copy of the home in which everything is done."""
    lab = Lab(tmp_path / "home", tmp_path / "tiny.yaml")
    shutil.copytree(prepared_home, lab.root)
    lab.spec.write_text(SPEC)
    yield lab
    lab.clean_up()


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where looks and counts are noted of models that nobody has looked at."""
    return str(tmp_path_factory.mktemp("assets"))


def outcomes(err: str) -> dict[str, str]:
    """Stage -> how it ended, from the progress lines."""
    words = [line.split() for line in err.splitlines() if line.startswith("  ")]
    return {
        parts[0]: parts[1]
        for parts in words
        if len(parts) > 1 and parts[1] in ("finished", "cached", "failed", "cancelled")
    }


def test_the_first_run_shows_the_answer_its_graph_and_its_artifacts(done):
    (run_id,) = done.run_ids()
    assert done.state(run_id)["status"] == "finished"
    assert done.prefect_rows("select name, state_name from flow_run") == [("tiny: seed 0", "Completed")]
    tasks = done.prefect_rows("select name, state_name from task_run order by expected_start_time")
    assert tasks == [(name, "Completed") for name in ("data", "base", "train", "evaluate", "report")]
    ((inputs,),) = done.prefect_rows("select task_inputs from task_run where name = 'evaluate'")
    assert len(json.loads(inputs)["wait_for"]) == 2
    keys = {key.removeprefix(f"{run_id}-") for (key,) in done.prefect_rows("select key from artifact")}
    assert keys == {"tiny", "plan", "training", "learning-curve", "results"}
    ((curves,),) = done.prefect_rows(f"select data from artifact where key = '{run_id}-learning-curve' limit 1")
    assert all(f'y-axis "{metric.heading}"' in json.loads(curves) for metric in METRICS if metric.short_name)


def test_a_second_call_finds_everything_cached_and_answers_again(done):
    before = done.state(done.run_ids()[0])
    flow_runs = done.prefect_rows("select id from flow_run")
    result = done.rpg("run", str(done.spec))
    assert result.code == 0, result.err
    assert outcomes(result.err) == dict.fromkeys(("data", "base", "train", "evaluate", "report"), "cached")
    assert done.prefect_rows("select id from flow_run") == flow_runs  # no server was started for it
    assert "held_out  before " in result.out
    assert "report  " in result.out
    assert len(result.out.split("next\n")[1].splitlines()) == 3
    after = done.state(done.run_ids()[0])
    assert after["stages"] == before["stages"]
    assert (after["status"], after["started_at"], after["ended_at"]) == (
        "finished",
        before["started_at"],
        before["ended_at"],
    )


@pytest.mark.more
def test_a_plan_loads_what_it_looks_at_and_no_more(lab, assets, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", assets)
    program = f"import sys\ntry:\n    {COMMAND}\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    planned = finished(lab.start_program(program, "plan", str(lab.spec), "--json"))
    actions = {stage["stage"]: stage["action"] for stage in json.loads(planned.out)["runs"][0]["stages"]}
    assert (actions["base"], actions["train"]) == ("CACHED", "RUN")
    loaded = {*planned.err.split()}
    # This plan counts the model's parameters in a fork, so that its look is a fork as well.
    assert ("tokenizers" in loaded) == (not may_fork())
    assert not {"torch", "prefect", "duckdb", "optuna", "fsspec", "httpx"} & loaded
    # The same look would find the same: what looks next takes that as known. A look at something else does not.
    again = finished(lab.start_program(program, "plan", str(lab.spec), "--json"))
    assert json.loads(again.out) == json.loads(planned.out)
    assert not {"tokenizers", "transformers", "reasoning_gym"} & {*again.err.split()}
    longer = finished(lab.start_program(program, "plan", str(lab.spec), "--set", "rollout.max_response_length=5"))
    assert "tokenizers" in longer.err.split()


@pytest.mark.more
def test_a_deep_validation_looks_at_a_model_that_is_made_and_at_what_training_asks_of_it(lab, assets, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", assets)
    program = f"import sys\ntry:\n    {COMMAND}\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    first = finished(lab.start_program(program, "validate", "--deep", str(lab.spec)))
    assert first.out == f"{lab.spec}: experiment tiny: 1 run (1 seed)\n"
    assert "torch" in first.err.split(), "a plan's look is at no model, since it is made"
    for verb, override, said in (
        (("validate", "--deep"), "training.lora={target_modules: [c_attn]}", "c_attn"),
        (("validate", "--deep"), "training.entropy_coef={target: 20, of: entropy}", "tokens is at most"),
        (("plan",), "training.entropy_coef={target: 20, of: entropy}", "tokens is at most"),
        (("plan",), "matrix={product: {rollout.replay_routing: [false, true]}}", "no experts whose choice"),
    ):
        wrong = lab.rpg(*verb, str(lab.spec), overrides=(override,))
        assert wrong.code == 2
        assert said in wrong.err


@pytest.mark.more
def test_another_number_of_samples_evaluates_again_and_trains_nothing(done):
    result = done.rpg("run", str(done.spec), overrides=("evaluation.samples_per_problem=3",))
    assert result.code == 0, result.err
    cached = dict.fromkeys(("data", "base", "train"), "cached")
    assert outcomes(result.err) == cached | {"evaluate": "finished", "report": "finished"}
    (run_id,) = done.run_ids()
    assert done.query("select distinct samples_per_problem from evaluations") == [(3,)]
    assert done.state(run_id)["evaluation"] == done.state(run_id)["stages"]["evaluate"]["fingerprint"]


@pytest.mark.long
def test_a_damaged_result_is_made_again(done):
    ((run_id),) = done.run_ids()
    output = done.root / done.state(run_id)["stages"]["data"]["output"]
    (output / "train.parquet").write_bytes(b"not parquet")
    result = done.rpg("run", str(done.spec))
    assert result.code == 0, result.err
    assert outcomes(result.err)["data"] == "finished"
    assert outcomes(result.err)["train"] == "cached"


@pytest.mark.long
def test_plan_and_run_agree_on_a_flipped_byte_and_the_weights_are_exported_again(done):
    (run_id,) = done.run_ids()
    (weights,) = done.home.run(run_id).glob("weights/step-000006/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    planned = json.loads(done.rpg("plan", str(done.spec), "--json").out)["runs"][0]["stages"]
    actions = {stage["stage"]: stage["action"] for stage in planned}
    result = done.rpg("run", str(done.spec))
    assert result.code == 0, result.err
    ended = outcomes(result.err)
    assert {stage: "cached" if action == "CACHED" else "finished" for stage, action in actions.items()} == ended
    assert ended == {
        "data": "cached",
        "base": "cached",
        "train": "finished",
        "evaluate": "cached",
        "report": "finished",
    }
    assert weights.read_bytes() == whole
    assert outcomes(done.rpg("run", str(done.spec)).err) == dict.fromkeys(ended, "cached")


@pytest.mark.more
def test_a_users_mistake_found_by_a_stage_is_shown_with_its_line_and_exit_code_2(lab):
    lab.spec.write_text(SPEC.replace("overlap: drop", "overlap: error"))
    result = lab.rpg("run", str(lab.spec))
    assert result.code == 2
    assert "Traceback" not in result.err
    assert f"{lab.spec}:" in result.err
    assert "1 error; this error ended the data stage; no later stage was run" in result.err
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["status"] == "failed"
    assert "train" not in lab.state(run_id)["stages"]
    assert lab.processes() == []


@pytest.mark.more
@pytest.mark.usefixtures("signals_arrive")
def test_an_interrupted_run_is_resumed_where_it_stopped_and_cancelled_in_its_grace(lab):
    run = lab.start("run", str(lab.spec), overrides=LONG)
    wait_for(lab.training_pid, what="the trainer")
    (run_id,) = lab.run_ids()
    wait_for(lambda: lab.progress(run_id) >= 3 or run.poll() is not None, what="step 3")
    assert run.poll() is None, finished(run).err
    log = (lab.home.run(run_id) / "logs" / "train.log").read_text()
    assert "train: begins at step 0" in log
    assert "WARNING" not in log, "where there is no GPU to be found, nobody warns of it"
    run.send_signal(signal.SIGINT)
    interrupted = finished(run, timeout=60)
    assert interrupted.code == 130, interrupted.err
    assert lab.state(run_id)["status"] == "cancelled"
    assert lab.state(run_id)["reason"] == "train: interrupted by SIGINT"
    assert lab.processes() == []
    reached = lab.progress(run_id)
    assert 3 <= reached < 400

    resumed = lab.start("resume", run_id)
    wait_for(lambda: lab.progress(run_id) > reached or resumed.poll() is not None, what="a step beyond the checkpoint")
    assert resumed.poll() is None, finished(resumed).err
    started = time.monotonic()
    cancelled = lab.rpg("cancel", run_id, "--grace", "5")
    assert cancelled.code == 0, cancelled.err
    assert time.monotonic() - started < 20
    assert finished(resumed).code == 1
    assert lab.state(run_id)["status"] == "cancelled"
    assert not (lab.home.run(run_id) / "cancel.json").exists()
    attempt = json.loads((lab.home.run(run_id) / "attempts" / "0002.json").read_text())
    assert attempt["resumed_from_step"] == reached
    assert lab.processes() == []

    again = lab.rpg("cancel", run_id)
    assert again.code == 2
    assert "the run is not running but cancelled" in again.err


@pytest.mark.long
def test_concurrent_runs_share_a_stage_and_one_process_has_a_run(lab):
    shutil.rmtree(lab.root / "artifacts")
    short = ("training.steps=2",)
    first = lab.start("run", str(lab.spec), overrides=short)
    other_seed = lab.start("run", str(lab.spec), overrides=(*short, "seeds=[1]"))
    wait_for(lambda: any(lab.state(run_id).get("pid") == first.pid for run_id in lab.run_ids()), what="the run")
    same = finished(lab.start("run", str(lab.spec), overrides=short))
    assert same.code == 0, same.err
    assert "another command executes it: waiting; `rpg watch " in same.err
    assert set(outcomes(same.err).values()) == {"cached"}
    ended = [finished(first), finished(other_seed)]
    assert [result.code for result in ended] == [0, 0], [result.err for result in ended]
    assert sorted(outcomes(result.err)["base"] for result in ended) == ["cached", "finished"]
    assert sorted(outcomes(result.err)["data"] for result in ended) == ["cached", "finished"]
