"""Training in batch jobs of a real Slurm: a controller and two nodes on this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live import SPEC, Lab, finished
from slurm_cluster import SlurmCluster, missing
from waiting import wait_for

from pipelines.launchers.local import local_command
from tests.rpg.tiny_run import assert_trained, finish, free_port, make_run, start, step_of, weights

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path / "slurm")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def two_nodes(inputs: Path, run: Path, *, steps: int = 12, **more: Any) -> Path:
    """A run of one rank on each node."""
    launcher = {"type": "slurm", "nodes": 2, "stop_before_seconds": 5, **more}
    return make_run(inputs, run, training={"ranks": 2, "steps": steps}, launcher=launcher)


def head(run: Path) -> Any:
    return start([sys.executable, "-m", "pipelines.launchers.slurm.head", str(run)])


def job_of(run: Path) -> str:
    return str(json.loads((run / "slurm" / "job.json").read_text())["job"])


@pytest.mark.more
def test_a_job_on_two_nodes_finishes_and_every_node_has_its_log(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "in-container"  # stands for `apptainer exec IMAGE python "$@"`
    inside.write_text(
        f"""#!/bin/sh\necho "$SLURM_JOB_ID" > {tmp_path}/in-$SLURMD_NODENAME\nexec {sys.executable} "$@"\n"""
    )
    inside.chmod(0o755)
    of_srun = {"srun_options": ["--mpi=none"], "srun_python": str(inside)}
    run = two_nodes(inputs, tmp_path / "run", steps=2, environment={"NCCL_DEBUG": "WARN"}, **of_srun)
    output = finish(head(run))
    assert {path.name for path in tmp_path.glob("in-rpg*")} == {"in-rpg1", "in-rpg2"}
    assert "job 1 is submitted" in output
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert "step 2/2" in logs["train-0-rpg1.log"]
    assert "node 1 of 2" in logs["train-1-rpg2.log"]
    assert "2 ranks on rpg1, rpg2" in logs["train-slurm.log"]
    launch = json.loads((run / "launch.json").read_text())
    assert (launch["launcher"], launch["job"]) == ("slurm", "1")
    assert launch["environment"]["NCCL_DEBUG"] == "WARN"
    assert (run / "train.json").exists()
    wait_for(lambda: not cluster.jobs(), what="the job to leave the queue")


def test_a_cluster_that_ends_in_the_midst_of_a_job_leaves_no_process(cluster: SlurmCluster) -> None:
    cluster.command("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 100")
    wait_for(lambda: len(cluster.step_managers()) == 3, what="the batch script and a step on each node")
    cluster.close()
    assert cluster.step_managers() + cluster.processes() == []


@pytest.mark.long
@pytest.mark.parametrize("how", ["preempted", "time limit", "requeued"])
def test_a_job_that_has_to_yield_saves_its_state_and_goes_on_when_it_is_its_turn(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path, how: str
) -> None:
    whole = make_run(inputs, tmp_path / "whole", training={"ranks": 2, "steps": 12})
    finish(start(local_command(whole, 2, free_port())))
    run = two_nodes(inputs, tmp_path / "run")
    process = head(run)
    wait_for(lambda: step_of(run) >= 3, what="three steps")
    urgent = None
    if how == "preempted":
        command = ["srun", "--partition=urgent", "--nodes=2", "--ntasks=2", "--exclusive", "sleep", "1"]
        urgent = subprocess.Popen(command, env=os.environ | cluster.environment)
    elif how == "time limit":
        # What --signal=B:TERM@N makes Slurm do N seconds before the limit.
        cluster.command("scancel", "--batch", "--signal=TERM", job_of(run))
    else:
        cluster.command("scontrol", "requeue", job_of(run))
    finish(process)
    if urgent:
        assert urgent.wait(60) == 0
    assert job_of(run) == "1", "one job, queued again"
    attempts = [json.loads(path.read_text()) for path in sorted((run / "attempts").iterdir())]
    assert len(attempts) == 2
    # Not at a multiple of every_steps by itself: the state after the step under way.
    assert attempts[1]["resumed_from_step"] >= 3 or how == "requeued"
    assert_trained(whole)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("how", ["rank killed", "node died"])
def test_a_lost_node_is_noticed_and_the_job_is_queued_again(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path, how: str
) -> None:
    run = two_nodes(inputs, tmp_path / "run")
    process = head(run)
    # The checkpoint of step 4 is begun when that of step 2 is whole.
    wait_for(lambda: step_of(run) >= 5, what="a whole checkpoint")
    if how == "rank killed":
        next(rank for rank in cluster.ranks() if cluster.node_of(rank) == "rpg2").kill()
    else:
        cluster.kill_node("rpg2")
        wait_for(lambda: not cluster.ranks(), what="the end of all ranks")
        cluster.start_node("rpg2")
    output = finish(process)
    assert how == "node died" or "rpg2 failed, but too few other nodes are left" in output
    assert job_of(run) == "1", "one job, queued again"
    attempts = [json.loads(path.read_text()) for path in sorted((run / "attempts").iterdir())]
    assert [attempt["resumed_from_step"] > 0 for attempt in attempts] == [False, True]


@pytest.mark.long
def test_a_job_that_lost_a_node_goes_on_on_another(inputs: Path, tmp_path: Path, cluster: SlurmCluster) -> None:
    run = two_nodes(inputs, tmp_path / "run", nodes=1)
    process = head(run)
    wait_for(lambda: step_of(run) >= 5, what="a whole checkpoint")
    assert {cluster.node_of(rank) for rank in cluster.ranks()} == {"rpg1"}
    cluster.ranks()[0].kill()
    output = finish(process)
    assert "job 1: excludes rpg1" in output
    assert "2 ranks on rpg2" in (run / "logs" / "train-slurm.log").read_text()
    assert job_of(run) == "1", "one job, queued again"


@pytest.mark.long
def test_a_rank_that_fails_ends_the_job_with_its_log_and_is_not_queued_again(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path
) -> None:
    run = two_nodes(inputs, tmp_path / "run")
    (run / "inputs.json").write_text((run / "inputs.json").read_text().replace("data", "nowhere"))
    output = finish(head(run), expect=1)
    assert "KeyError" in output or "FileNotFoundError" in output
    assert cluster.command("scontrol", "show", "job", "1").count("Restarts=0") == 1


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_job_outlives_the_command_and_the_next_one_finds_it(inputs: Path, tmp_path: Path) -> None:
    run = two_nodes(inputs, tmp_path / "run", steps=60)  # longer than a command takes to start
    process = head(run)
    wait_for(lambda: step_of(run) >= 2, what="two steps")
    process.kill()
    process.communicate()
    output = finish(head(run))
    assert "continues with job 1, which is RUNNING" in output
    assert len(list((run / "attempts").iterdir())) == 1


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_job_of_an_earlier_version_is_ended_and_another_one_goes_on(inputs: Path, tmp_path: Path) -> None:
    run = two_nodes(inputs, tmp_path / "run", steps=60)  # longer than a command takes to start
    process = head(run)
    # The checkpoint of step 4 is begun when that of step 2 is whole.
    wait_for(lambda: step_of(run) >= 5, what="a whole checkpoint")
    process.kill()
    process.communicate()
    # Its output did not name the module that the job starts.
    job = json.loads((run / "slurm" / "job.json").read_text())
    (run / "slurm" / "job.json").write_text(json.dumps({name: job[name] for name in job if name != "module"}))
    output = finish(head(run))
    assert "ends job 1, which is for other work or of another version" in output
    assert job_of(run) == "2"
    attempts = [json.loads(path.read_text()) for path in sorted((run / "attempts").iterdir())]
    assert attempts[-1]["resumed_from_step"] >= 2


@pytest.mark.long
def test_a_job_that_somebody_cancelled_is_not_brought_back(cluster: SlurmCluster, inputs: Path, tmp_path: Path) -> None:
    run = two_nodes(inputs, tmp_path / "run", steps=400)
    process = head(run)
    wait_for(lambda: step_of(run) >= 1, what="a step")
    cluster.command("scancel", "1")
    code = process.wait(120)
    process.communicate()
    assert code in (1, 143)
    assert cluster.jobs() == []


@pytest.mark.long
def test_evaluation_is_a_job_on_all_nodes_too(lab: Lab, cluster: SlurmCluster) -> None:
    section = "launcher: {type: slurm, nodes: 2}\n"
    lab.spec.write_text(SPEC.replace("steps: 6", "steps: 2\n  ranks: 2") + section)
    done = lab.rpg("run", str(lab.spec))
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("evaluate*")}
    assert set(logs) == {"evaluate.log", "evaluate-slurm.log", "evaluate-0-rpg1.log", "evaluate-1-rpg2.log"}
    assert "job 2 is submitted" in logs["evaluate.log"]
    assert "5 of 5 problems answered" in logs["evaluate-0-rpg1.log"]
    assert lab.query("select count(distinct problem_id) from evaluation_samples")[0][0] == 10
    wait_for(lambda: not cluster.jobs(), what="the job to leave the queue")


@pytest.mark.long
def test_evaluation_while_training_goes_on_is_a_job_of_its_own(lab: Lab, cluster: SlurmCluster) -> None:
    spec = SPEC.replace("samples_per_problem: 2", "samples_per_problem: 2, concurrent_ranks: 1")
    lab.spec.write_text(spec.replace("steps: 6", "steps: 200") + "launcher: {type: slurm}\n")
    done = lab.rpg("run", str(lab.spec))
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("*.log")}
    submitted = {
        name: [f"job {n}" for n in (1, 2, 3) if f"job {n} is submitted" in text] for name, text in logs.items()
    }
    assert submitted["train.log"] == ["job 1"]
    assert submitted["evaluate-concurrent.log"] == ["job 2"]
    assert submitted["evaluate.log"] == ["job 3"]
    assert "step 0: was measured during training" in logs["evaluate-0-rpg1.log"]
    wait_for(lambda: not cluster.jobs(), what="the jobs to leave the queue")


@pytest.mark.long
def test_cancel_stops_every_node_and_the_logs_are_all_in_one_place(lab: Lab, cluster: SlurmCluster) -> None:
    section = "launcher: {type: slurm, nodes: 2}\n"
    lab.spec.write_text(SPEC.replace("steps: 6", "steps: 400\n  ranks: 2") + section)
    running = lab.start("run", str(lab.spec))
    (run_id,) = wait_for(lab.run_ids, what="the run")
    wait_for(lambda: lab.progress(run_id) >= 2, what="two steps on two nodes")
    cancelled = lab.start("cancel", run_id)
    wait_for((lab.home.run(run_id) / "cancel.json").exists, what="the request")
    asked = time.monotonic()
    wait_for(lambda: not cluster.processes(), what="the end of every process")
    assert time.monotonic() - asked < 10
    assert finished(cancelled).code == 0
    assert finished(running).code == 1
    assert lab.state(run_id)["status"] == "cancelled"
    wait_for(lambda: not cluster.jobs(), what="the job to leave the queue")
    logs = lab.rpg("logs", run_id, "--stage", "train").out
    assert "node 0 of 2" in logs
    assert "node 1 of 2" in logs
    assert "rendezvous" in lab.rpg("show", run_id, "--all").out


@pytest.mark.long
def test_cancel_ends_the_job_of_a_command_that_was_killed(lab: Lab, cluster: SlurmCluster) -> None:
    section = "launcher: {type: slurm, nodes: 2}\n"
    lab.spec.write_text(SPEC.replace("steps: 6", "steps: 400\n  ranks: 2") + section)
    running = lab.start("run", str(lab.spec))
    (run_id,) = wait_for(lab.run_ids, what="the run")
    wait_for(lambda: lab.progress(run_id) >= 1, what="a step on two nodes")
    running.kill()
    running.communicate()
    assert len(cluster.ranks()) == 2
    assert lab.rpg("cancel", run_id).code == 0
    wait_for(lambda: not cluster.processes(), timeout=10, what="the end of every process")


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_doctor_asks_slurm_whether_it_would_take_the_job(lab: Lab) -> None:
    def answer(launcher: str) -> dict[str, str]:
        lab.spec.write_text(f"{SPEC}launcher: {launcher}\n")
        findings = json.loads(lab.rpg("doctor", str(lab.spec), "--json").out)
        return next(finding for finding in findings if finding["name"] == "launcher slurm")

    assert answer("{type: slurm, partition: urgent}")["status"] == "ok"
    refused = answer("{type: slurm, partition: nowhere}")
    assert refused["status"] == "broken"
    assert "invalid partition" in refused["message"].lower()
