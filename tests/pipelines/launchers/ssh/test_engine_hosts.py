"""Engines on a host without ranks, which ssh reaches: they sample what they would on the host of their rank."""

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import SPEC, Lab
from places import ROOT
from ssh_hosts import SshHost, SshHosts
from waiting import wait_for

from pipelines.launchers.local import local_command
from tests.pipelines.launchers.ssh.test_ssh import WHY_NOT, head, step_of
from tests.pipelines.launchers.ssh.test_ssh import hosts as hosts  # the fixture: two of them
from tests.rpg.checkpoints.test_resume import recorded, same_rows
from tests.rpg.tiny_run import finish, free_port, make_inputs, make_run, start, train

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory, head_dim=32)
    return directory


def apart(hosts: SshHosts, **more: Any) -> dict[str, Any]:
    """The launcher's section: a rank on the first host, its engine on the second."""
    first, second = hosts.hosts
    return {
        "type": "ssh",
        "hosts": [{"host": first.address, "slots": 2}],
        "engine_hosts": [{"host": second.address, "slots": 2}],
        "ssh": hosts.ssh,
        "lost_after_seconds": 5,
        "connect_seconds": 60,
        **more,
    }


def make(inputs: Path, run: Path, *, steps: int = 2, **more: Any) -> Path:
    """A run with a dedicated engine; `more`: changes of other sections and of these."""
    training, rollout = more.pop("training", {}), more.pop("rollout", {})
    engine = {"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25}
    return make_run(inputs, run, training={"steps": steps, **training}, rollout={**engine, **rollout}, **more)


def engines(host: SshHost) -> list[psutil.Process]:
    return [process for process in host.processes() if "rpg.engine" in process.cmdline()]


def finish_again(run: Path) -> str:
    """The rank's log of another launch of a run that is trained."""
    finish(head(run))
    (log,) = (run / "logs").glob("train-0-*")
    return log.read_text()


def test_an_engine_on_a_host_of_its_own_samples_what_it_does_beside_its_rank(
    hosts: SshHosts, inputs: Path, tmp_path: Path
) -> None:
    beside, run = make(inputs, tmp_path / "beside"), make(inputs, tmp_path / "apart", launcher=apart(hosts))
    train(beside)
    output = finish(head(run))
    assert f"1 ranks on {hosts.hosts[0].address}, 1 engines on {hosts.hosts[1].address}" in output
    ours, theirs = recorded(run, "tokens"), recorded(beside, "tokens")
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert [ours[key][name] for name in ("token_id", "rollout_logprob")] == [
            theirs[key][name] for name in ("token_id", "rollout_logprob")
        ], key
    assert "is trained already" in finish_again(run), "and the engine that nobody needed has ended"
    launch = json.loads((run / "launch.json").read_text())
    assert [(host.get("ranks"), host.get("engines")) for host in launch["hosts"]] == [("0-0", None), (None, "0-0")]
    assert not any(host.processes() for host in hosts.hosts)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks with one engine beside them, to the end without a break."""
    run = make(inputs, tmp_path_factory.mktemp("whole") / "run", **TWO)
    finish(start(local_command(run, 2, free_port())))
    return run


TWO: dict[str, Any] = {"steps": 12, "training": {"ranks": 2}, "rollout": {"ranks_per_engine": 2}}


@pytest.mark.parametrize("how", ["engine killed", "host off and on", "link cut"])
def test_an_engine_that_two_ranks_share_is_lost_and_the_run_comes_back_by_itself(
    hosts: SshHosts, inputs: Path, tmp_path: Path, whole: Path, how: str
) -> None:
    run = make(inputs, tmp_path / "run", launcher=apart(hosts), **TWO)
    process = head(run)
    wait_for(lambda: step_of(run) >= 5, timeout=240, what="a whole checkpoint")
    with_ranks, with_engine = hosts.hosts
    (engine,) = engines(with_engine)
    assert len(with_ranks.ranks()) == 2
    assert not engines(with_ranks) + with_engine.ranks()
    if how == "engine killed":
        engine.kill()
    elif how == "host off and on":
        with_engine.power_off()
        wait_for(lambda: not with_ranks.ranks(), what="the end of the ranks")
        with_engine.serve()
    else:
        with_engine.cut()
        wait_for(lambda: not engines(with_engine) and not with_ranks.ranks(), what="the end of all")
        with_engine.mend()
    output = finish(process)
    assert "(loss 1)" in output
    assert "goes on from step-00000" in output
    same_rows(run, whole)
    assert not any(host.processes() for host in hosts.hosts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_outlives_neither_its_rank_nor_the_command_and_serves_the_step_in_which_that_is_stopped(
    hosts: SshHosts, inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = make(inputs, tmp_path / "run", steps=400, launcher=apart(hosts))
    process = head(run)
    wait_for(lambda: step_of(run) >= 1, timeout=240, what="a step")
    process.send_signal(number)
    wait_for(lambda: not any(host.processes() for host in hosts.hosts), timeout=30, what="the end of every process")
    output = finish(process, expect=-9 if number == signal.SIGKILL else 143)
    if number == signal.SIGTERM:
        assert list((run / "checkpoints").glob("step-*")), "its state is saved"
        assert "ended with" not in output


def test_what_an_engine_there_refuses_is_the_specs_mistake(hosts: SshHosts, tmp_path: Path) -> None:
    make_inputs(tmp_path, head_dim=8)
    run = make(tmp_path, tmp_path / "run", launcher=apart(hosts))
    finish(head(run), expect=2)
    (problem,) = json.loads((run / "problems.json").read_text())
    assert problem["message"] == "vLLM on a CPU has no attention for the model's head size"


def test_an_engine_that_fails_by_itself_fails_the_run_with_the_end_of_its_log(
    hosts: SshHosts, inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'rpg.engine' in sys.orig_argv:\n    print('a broken engine', flush=True)\n    os._exit(3)\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    run = make(inputs, tmp_path / "run", launcher=apart(hosts, environment={"PYTHONPATH": path}))
    output = finish(head(run), expect=3)
    assert f"{hosts.hosts[1].address}: an engine ended with 3; the end of its log:\n" in output
    assert "a broken engine" in output
    assert "(loss 1)" not in output
    assert not any(host.processes() for host in hosts.hosts)


def test_evaluation_samples_with_engines_there_too(lab: Lab, hosts: SshHosts) -> None:
    first, second = (host.address for host in hosts.hosts)
    ssh = ", ".join(hosts.ssh)
    lab.spec.write_text(
        SPEC.replace("steps: 6", "steps: 1")
        .replace("head_dim: 16", "head_dim: 32")
        .replace("engine: transformers", "engine: vllm, placement: dedicated, cpu_cache_gib: 0.25")
        + f"launcher: {{type: ssh, hosts: [{{host: {first}}}], engine_hosts: [{{host: {second}}}], ssh: [{ssh}],"
        " connect_seconds: 60}\n"
    )
    done = lab.rpg("run", str(lab.spec), timeout=500)
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("*.log")}
    for stage in ("train", "evaluate"):
        assert f"1 ranks on {first}, 1 engines on {second}" in logs[f"{stage}.log"]
        assert "engines 0 to 0" in logs[f"{stage}-1-{second}.log"]
    assert lab.query("select count(distinct problem_id) from evaluation_samples")[0][0] == 10
    shown = lab.rpg("show", run_id, "--all").out
    assert f'{{"host": "{second}", "engines": "0-0"' in shown
    examined = json.loads(lab.rpg("doctor", str(lab.spec), "--json").out)
    assert {finding["status"] for finding in examined if finding["name"] in (f"host {first}", f"host {second}")} == {
        "ok"
    }
    assert not any(host.processes() for host in hosts.hosts)
