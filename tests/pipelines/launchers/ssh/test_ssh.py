"""Training over two hosts that ssh reaches: real servers in network namespaces of their own."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live import SPEC, Lab, finished
from ssh_hosts import SshHosts, missing
from waiting import wait_for

from pipelines.doctor.gpu_checks.session import check_gpus
from pipelines.home.home import Home
from pipelines.launchers.local import local_command
from specs.machine.gpu_slots import leased
from specs.schema.experiment import Experiment
from tests.rpg import tiny_run
from tests.rpg.tiny_run import STEADY, assert_trained, finish, free_port, make_run, start, step_of, weights

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path / "ssh")
    yield made
    made.close()


def over(hosts: SshHosts, **more: Any) -> dict[str, Any]:
    """The launcher's section: a rank on each host."""
    listed = [{"host": host.address} for host in hosts.hosts]
    return {"type": "ssh", "hosts": listed, "ssh": hosts.ssh, "lost_after_seconds": 5, "connect_seconds": 60, **more}


def head(run: Path, **environment: str) -> Any:
    return start([sys.executable, "-m", "pipelines.launchers.ssh.head", str(run)], environment)


def same(one: Path, other: Path) -> None:
    assert_trained(one)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=1e-5)


def test_two_hosts_give_the_weights_of_one_process(hosts: SshHosts, inputs: Path, tmp_path: Path) -> None:
    alone = make_run(inputs, tmp_path / "alone", training={"optimizer": STEADY})
    run = make_run(inputs, tmp_path / "two", training={"ranks": 2, "optimizer": STEADY}, launcher=over(hosts))
    finish(head(run), start([sys.executable, "-m", "rpg.train", str(alone)]))
    same(alone, run)
    launch = json.loads((run / "launch.json").read_text())
    assert [host["ranks"] for host in launch["hosts"]] == ["0-0", "1-1"]
    assert launch["rendezvous"].startswith(hosts.hosts[0].address + ":")
    first, second = (run / "logs" / host["log"] for host in launch["hosts"])
    assert "step 6/6" in first.read_text()
    assert "node 1 of 2" in second.read_text()


@pytest.mark.long
def test_every_host_answers_its_part_of_the_evaluation_sets(lab: Lab, hosts: SshHosts) -> None:
    lab.spec.write_text(SPEC.replace("steps: 6", "steps: 2\n  ranks: 2") + hosts.spec(extra=", connect_seconds: 60"))
    done = lab.rpg("run", str(lab.spec))
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("evaluate*")}
    assert len(logs) == 3
    assert "2 ranks on" in logs["evaluate.log"]
    (first,) = [text for name, text in logs.items() if name.startswith("evaluate-0-")]
    assert "5 of 5 problems answered" in first
    assert lab.query("select count(distinct problem_id) from evaluation_samples")[0][0] == 10
    launch = json.loads((lab.home.run(run_id) / "launch-evaluate.json").read_text())
    assert [host["ranks"] for host in launch["hosts"]] == ["0-0", "1-1"]


@pytest.mark.long
def test_a_host_that_training_leaves_over_evaluates_meanwhile(lab: Lab, hosts: SshHosts) -> None:
    spec = SPEC.replace("samples_per_problem: 2", "samples_per_problem: 2, concurrent_ranks: 1")
    lab.spec.write_text(spec.replace("steps: 6", "steps: 200") + hosts.spec(extra=", connect_seconds: 60"))
    done = lab.rpg("run", str(lab.spec))
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("*.log")}
    assert f"1 ranks on {hosts.hosts[0].address}" in logs["train.log"]
    assert f"1 ranks on {hosts.hosts[1].address}" in logs["evaluate-concurrent.log"]
    (stage,) = [text for name, text in logs.items() if name.startswith("evaluate-0-")]
    assert "step 0: was measured while training went on" in stage
    assert not any(host.processes() for host in hosts.hosts)


@pytest.mark.long
def test_cancel_stops_every_host_and_resume_finishes_with_all_logs_in_one_place(lab: Lab, hosts: SshHosts) -> None:
    lab.spec.write_text(SPEC.replace("steps: 6", "steps: 400\n  ranks: 2") + hosts.spec(extra=", connect_seconds: 60"))
    running = lab.start("run", str(lab.spec))
    (run_id,) = wait_for(lab.run_ids, what="the run")
    wait_for(lambda: lab.progress(run_id) >= 2, what="two steps on two hosts")
    assert all(len(host.ranks()) == 1 for host in hosts.hosts)
    asked = time.monotonic()
    cancelled = lab.start("cancel", run_id)
    wait_for(lambda: not any(host.processes() for host in hosts.hosts), what="the end of every process")
    assert time.monotonic() - asked < 10 + 5  # 10 s from when the command, which takes its time to start, has asked
    assert finished(cancelled).code == 0
    assert finished(running).code == 1
    assert lab.state(run_id)["status"] == "cancelled"
    logs = lab.rpg("logs", run_id, "--stage", "train").out
    assert "2 ranks on" in logs
    assert "node 0 of 2" in logs
    assert "node 1 of 2" in logs
    shown = lab.rpg("show", run_id, "--all").out
    assert hosts.hosts[1].address in shown
    assert "rendezvous" in shown


@pytest.mark.long
@pytest.mark.parametrize("how", ["rank killed", "host off and on", "link cut"])
def test_a_lost_host_is_noticed_and_the_run_comes_back_by_itself(
    hosts: SshHosts, inputs: Path, tmp_path: Path, how: str
) -> None:
    whole = make_run(inputs, tmp_path / "whole", training={"ranks": 2, "steps": 12})
    finish(start(local_command(whole, 2, free_port())))
    run = make_run(inputs, tmp_path / "two", training={"ranks": 2, "steps": 12}, launcher=over(hosts))
    process = head(run)
    wait_for(lambda: step_of(run) >= 3, what="three steps")
    victim = hosts.hosts[1]
    if how == "rank killed":
        victim.ranks()[0].kill()
    elif how == "host off and on":
        victim.power_off()
        wait_for(lambda: not hosts.hosts[0].ranks(), what="the end of the other host's ranks")
        victim.serve()
    else:
        victim.cut()
        # It hears nothing any more, and ends its rank by itself.
        wait_for(lambda: not victim.ranks() and not hosts.hosts[0].ranks(), what="the end of all ranks")
        victim.mend()
    output = finish(process)
    assert "(loss 1)" in output
    assert "goes on from step-00000" in output
    same(whole, run)


@pytest.mark.long
def test_a_spare_host_stands_in_for_one_that_stays_away(hosts: SshHosts, inputs: Path, tmp_path: Path) -> None:
    run = make_run(inputs, tmp_path / "one", training={"steps": 12}, launcher=over(hosts))
    process = head(run)
    wait_for(lambda: step_of(run) >= 3, what="three steps")
    assert len(hosts.hosts[0].ranks()) == 1
    hosts.hosts[0].power_off()
    output = finish(process)
    assert f"{hosts.hosts[0].address}: cannot be reached" in output
    assert f"1 ranks on {hosts.hosts[1].address}" in output


@pytest.mark.long
def test_a_run_may_go_on_with_fewer_ranks(hosts: SshHosts, inputs: Path, tmp_path: Path) -> None:
    launcher = over(hosts, min_ranks=1, recover_seconds=1, connect_seconds=30)
    run = make_run(inputs, tmp_path / "two", training={"ranks": 2, "steps": 12}, launcher=launcher)
    process = head(run)
    wait_for(lambda: step_of(run) >= 3, what="three steps")
    hosts.hosts[1].power_off()
    output = finish(process)
    assert f"1 ranks (of 2) on {hosts.hosts[0].address}" in output
    assert (run / "train.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_command_that_watches_over_it(
    hosts: SshHosts, inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = make_run(inputs, tmp_path / "two", training={"ranks": 2, "steps": 400}, launcher=over(hosts))
    process = head(run)
    wait_for(lambda: step_of(run) >= 1, what="a step")
    process.send_signal(number)
    wait_for(lambda: not any(host.processes() for host in hosts.hosts), timeout=30, what="the end of every process")
    finish(process, expect=-9 if number == signal.SIGKILL else 143)
    if number == signal.SIGTERM:
        assert list((run / "checkpoints").glob("step-*")), "its state is saved"


@pytest.mark.long
def test_a_host_whose_slots_are_taken_is_waited_for_and_the_holder_is_named(
    hosts: SshHosts, inputs: Path, tmp_path: Path
) -> None:
    slots = {"RPG_SLOT_DIR": str(tmp_path / "slots"), "RPG_SLOTS": "7"}
    launcher = over(hosts, environment=slots)
    run = make_run(inputs, tmp_path / "two", launcher=launcher)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slots.items():
            patch.setenv(name, value)
        with leased(1, "another-run", waiting=None):
            process = head(run)
            wait_for((run / "launch.json").exists, what="the host's orders")
            time.sleep(5)
            assert not hosts.hosts[0].ranks()
    output = finish(process)
    assert "7 is held by another-run" in output


@pytest.mark.long
def test_hosts_that_cannot_train_together_are_told_apart_before_anything_starts(
    hosts: SshHosts, inputs: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = make_run(inputs, tmp_path / "two", training={"ranks": 2}, launcher=over(hosts))
    # The second host sees another directory in the place of the run's.
    second = hosts.hosts[1]
    second.hide(run, elsewhere)
    hosts.await_answer(second)
    finish(head(run), expect=2)
    (problem,) = json.loads((run / "problems.json").read_text())
    assert problem["message"] == f"{second.address} does not see the run's directory"


@pytest.mark.long
def test_doctor_looks_at_the_hosts_of_a_spec(lab: Lab, hosts: SshHosts) -> None:
    lab.spec.write_text(SPEC + hosts.spec(extra=", connect_seconds: 60"))
    first, second = (host.address for host in hosts.hosts)
    fit = json.loads(lab.rpg("doctor", str(lab.spec), "--json").out)
    states = {finding["name"]: finding["status"] for finding in fit}
    assert states[f"host {first}"] == states[f"host {second}"] == "ok"
    hosts.hosts[1].power_off()
    result = lab.rpg("doctor", str(lab.spec), "--json")
    states = {finding["name"]: finding["status"] for finding in json.loads(result.out)}
    assert (states[f"host {first}"], states[f"host {second}"], result.code) == ("ok", "broken", 1)


@pytest.mark.long
@pytest.mark.parametrize("apart", [False, True], ids=["ranks", "ranks and engines"])
def test_the_gpu_checks_of_a_spec_are_made_on_its_hosts(hosts: SshHosts, tmp_path: Path, apart: bool) -> None:
    training = {**tiny_run.SPEC["training"], "ranks": 1 if apart else 2}
    launcher = over(hosts)
    if apart:
        launcher["engine_hosts"] = [launcher["hosts"].pop()]
    changes = {"training": training, "resources": {"device": "cpu"}, "launcher": launcher}
    if apart:
        changes["rollout"] = {"engine": "vllm", "placement": "dedicated"}
    experiment = Experiment.model_validate({**tiny_run.SPEC, **changes})
    results = check_gpus(Home(tmp_path / "home"), experiment, names=["machine", "all_reduce"], on_result=lambda _: None)
    assert [(result.check, result.status, result.rank) for result in results] == [
        (name, "ok", rank) for name in ("machine", "all_reduce") for rank in (0, 1)
    ]
    assert "between_hosts_gb_per_s" in results[2].figures
    wait_for(lambda: not any(host.processes() for host in hosts.hosts))
