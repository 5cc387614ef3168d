"""Every launcher that a spec can name keeps to the protocol, is found by its name, and leaves alone what is not its."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipelines.home.home import Home
from pipelines.launchers import Launcher, Room, launcher_of, launchers, rank_program
from pipelines.launchers.ranks import Share, number_range
from pipelines.launchers.ssh.head import choose
from specs.schema.experiment import Experiment
from specs.schema.launchers import Host
from tests.rpg.tiny_run import SPEC, finish, make_run, start

SECTIONS = {
    "local": {"type": "local"},
    "ssh": {"type": "ssh", "hosts": [{"host": "elsewhere"}]},
    "slurm": {"type": "slurm"},
    "ray": {"type": "ray"},
}


def experiment(kind: str) -> Experiment:
    return Experiment.model_validate(SPEC | {"launcher": SECTIONS[kind]})


def test_a_spec_names_every_launcher_that_there_is() -> None:
    assert launchers() == [launcher_of(experiment(kind)) for kind in SECTIONS]


@pytest.mark.parametrize("kind", sorted(SECTIONS.keys() - {"ray"}))
def test_a_launcher_that_asks_nobody_finds_no_obstacle(kind: str) -> None:
    assert launcher_of(experiment(kind)).room(experiment(kind)) == Room()


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_launchers_command_names_the_runs_directory(kind: str, tmp_path: Path) -> None:
    assert str(tmp_path) in launcher_of(experiment(kind)).command(tmp_path, experiment(kind), [])


def test_each_rank_of_a_stage_runs_that_stages_program(tmp_path: Path) -> None:
    assert rank_program(tmp_path, "train") == ["rpg.train", str(tmp_path)]
    assert rank_program(tmp_path, "evaluate") == ["rpg.stage", str(tmp_path / "evaluate-job.json")]
    local = experiment("local")
    command = launcher_of(local).command(tmp_path, local, [], stage="evaluate")
    assert command[-2:] == rank_program(tmp_path, "evaluate")
    assert not (tmp_path / "launch.json").exists(), "that is training's"
    assert (tmp_path / "launch-evaluate.json").exists()


def test_the_interface_on_which_ranks_meet_is_gloos_and_nccl_chooses_its_own(tmp_path: Path) -> None:
    share = Share(
        run_dir=str(tmp_path),
        first_rank=2,
        ranks=2,
        world_size=4,
        node=1,
        nodes=2,
        master_address="10.0.0.1",
        master_port=1,
        log="",
        interface="eth7",
        environment={"NCCL_IB_HCA": "mlx5"},
    )
    names = {name: value for name, value in share.rank_environment(1).items() if name.startswith(("GLOO", "NCCL"))}
    assert names == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_IB_HCA": "mlx5"}


@pytest.mark.parametrize(
    ("device", "environment", "of_engines"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"}, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("cuda", {}, ["0,1", "2,3"]),
        ("auto", {"RPG_SLOTS": ""}, [None, None]),
        ("auto", {"RPG_SLOTS": "GPU-a,GPU-b,GPU-c,GPU-d"}, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "GPU-a"}, ["GPU-a", "GPU-a"]),
    ],
)
def test_each_engine_of_a_machine_has_its_gpus_and_is_no_rank(
    tmp_path: Path, device: str, environment: dict[str, str], of_engines: list[str | None]
) -> None:
    share = Share(
        run_dir=str(tmp_path),
        world_size=8,
        node=1,
        nodes=1,
        master_address="10.0.0.1",
        master_port=7,
        log="",
        first_engine=2,
        engines=2,
        address="10.0.0.2",
        device=device,
        gpus=4,
        threads=3,
        environment={"OMP_NUM_THREADS": "5"},
    )
    commands = share.commands(environment)
    assert [program for program, _ in commands] == [["rpg.engine", "2", "10.0.0.2"], ["rpg.engine", "3", "10.0.0.2"]]
    started = [environment | variables for _, variables in commands]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in started] == of_engines
    for variables in started:
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "7")
        assert variables["OMP_NUM_THREADS"] == "3"
        assert variables["RPG_SIGN_OF_WORK"] == str(tmp_path / "working"), "as the ranks watch it"
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & variables.keys()


@pytest.mark.parametrize(
    ("answering", "fewest", "chosen"),
    [
        ("abxyz", 0, {"a": "0-3", "b": "4-5", "x": "0-1", "y": "2-2"}),
        ("abxz", 0, {"a": "0-3", "b": "4-5", "x": "0-1", "z": "2-2"}),
        ("abx", 0, {}),
        ("abx", 1, {"a": "0-3", "x": "0-1"}),
        ("aby", 2, {"a": "0-1", "y": "0-0"}),
        ("aby", 3, {}),
        ("ab", 1, {}),
        ("axyz", 1, {"a": "0-3", "x": "0-1"}),
    ],
)
def test_of_the_hosts_that_answer_the_first_get_ranks_and_engines_for_all_of_these(
    answering: str, fewest: int, chosen: dict[str, str]
) -> None:
    """Six ranks, an engine of two GPUs for each pair; hosts a and b with four slots, x with five, y and z with two."""
    launcher = {
        "type": "ssh",
        "hosts": [{"host": name, "slots": 4} for name in "ab"],
        "engine_hosts": [{"host": name, "slots": slots} for name, slots in (("x", 5), ("y", 2), ("z", 2))],
    }
    apart = {"engine": "vllm", "placement": "dedicated", "ranks_per_engine": 2, "tensor_parallel_size": 2}
    training = SPEC["training"] | {"ranks": 6}
    spec = Experiment.model_validate(SPEC | {"training": training, "rollout": apart, "launcher": launcher})
    hosts = [Host.model_validate(host) for host in (*launcher["hosts"], *launcher["engine_hosts"])]
    connections: list[Any] = [
        SimpleNamespace(
            name=host.host,
            slots=host.slots,
            for_engines=host.host in "xyz",
            hello=host.host in answering,
            closed=False,
            ranks=range(0),
            engines=range(0),
        )
        for host in hosts
    ]
    with_numbers = choose(spec, connections, fewest=fewest)
    assert {
        each.name: number_range((each.ranks or each.engines).start, len(each.ranks or each.engines))
        for each in with_numbers
    } == chosen
    assert all(bool(each.ranks) == (each.name in "ab") for each in with_numbers)


def test_only_ranks_that_run_here_take_this_machines_gpus() -> None:
    assert {kind: launcher_of(experiment(kind)).ranks_run_here for kind in SECTIONS} == {
        "local": True,
        "ssh": False,
        "slurm": False,
        "ray": False,
    }


@pytest.mark.parametrize("launcher", launchers(), ids=lambda launcher: type(launcher).__name__)
def test_ending_what_was_never_started_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    launcher.end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_launchers_need_here_and_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = [finding for launcher in launchers() for finding in launcher.examine(Home(tmp_path), None)]
    assert [(finding.name, finding.status, finding.message) for finding in findings] == [
        ("launcher ssh", "ok", str(tmp_path / "ssh")),
        ("launcher slurm", "note", "no sbatch here"),
        ("launcher ray", "ok", f"ray {metadata.version('ray')}"),
    ]
    (finding,) = launcher_of(experiment("slurm")).examine(Home(tmp_path), experiment("slurm"))
    assert (finding.status, finding.message) == ("broken", "no sbatch here")


HOST = """
import json, sys, time
from pipelines.launchers.hosts.node import machine_versions
name, _ = sys.argv[-2:]
def report(kind, **fields):
    print(json.dumps({"report": kind, **fields}), flush=True)
settings = sys.stdin.readline()
place = {"address": "127.0.0.1", "interface": "lo", "port": 1}
report("hello", host=name, shared=True, versions=machine_versions(), **place)
for line in sys.stdin:
    order = json.loads(line)["order"]
    if order == "beat" and name == "near":
        report("beat")
    if order == "kill":
        time.sleep(0.5 if name == "near" else 0.0)
        report("ended", codes=[None])
        break
"""
"""An ssh whose host `far` falls silent, and is back just when the ranks of both are ended."""


def test_a_host_that_is_back_too_late_is_lost_and_its_ranks_have_not_trained(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST)
    hosts = [{"host": "near"}, {"host": "far"}]
    ssh = [sys.executable, str(tmp_path / "host.py")]
    launcher = {"type": "ssh", "hosts": hosts, "ssh": ssh, "lost_after_seconds": 2, "restarts": 0}
    run = make_run(tmp_path, tmp_path / "run", training={"ranks": 2}, launcher=launcher)
    output = finish(start([sys.executable, "-m", "pipelines.launchers.ssh.head", str(run)]), expect=1)
    assert "far: lost" in output
    assert "near: lost" not in output


def test_a_host_that_hears_nothing_ends_its_ranks_and_reports_no_end_of_their_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.json")  # the rank waits for its content
    settings = {"environment": {}, "run_dir": str(tmp_path), "token": "", "interface": "", "silence_seconds": 2}
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 1, "node": 0, "nodes": 1}
    share = {"run_dir": str(tmp_path), "first_rank": 0, "ranks": 1, "log": str(tmp_path / "log"), **meeting}
    command = [sys.executable, "-m", "pipelines.launchers.hosts.node"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        node.stdin.write(f"{json.dumps(settings)}\n{json.dumps({'order': 'start', **share})}\n")
        node.stdin.flush()
        reports = [json.loads(line) for line in node.stdout]
    kinds = [report["report"] for report in reports]
    assert kinds[:2] == ["hello", "started"]
    assert set(kinds[2:]) == {"beat"}
    assert not any(psutil.pid_exists(pid) for pid in reports[1]["pids"])


ANOTHER_HOST = """
import json, sys
hello = {"host": "far", "shared": True, "versions": {}, "address": "fd00::2", "interface": "eth0", "port": 1}
print(json.dumps({"report": "hello", **hello}), flush=True)
sys.stdin.read()
"""
"""An ssh whose hosts have IPv6 alone, and another version of this code."""


def test_hosts_are_unfit_under_the_key_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(ANOTHER_HOST)
    ssh = [sys.executable, str(tmp_path / "host.py")]
    launcher = {"type": "ssh", "hosts": [{"host": "near"}], "engine_hosts": [{"host": "far"}], "ssh": ssh}
    rollout = {"engine": "vllm", "placement": "dedicated"}
    run = make_run(tmp_path, tmp_path / "run", rollout=rollout, launcher=launcher)
    finish(start([sys.executable, "-m", "pipelines.launchers.ssh.head", str(run)]), expect=2)
    problems = json.loads((run / "problems.json").read_text())
    assert [(problem["message"], problem["path"]) for problem in problems] == [
        ("near has other versions", ["launcher", "hosts"]),
        ("far has engines and is reached by IPv6", ["launcher", "engine_hosts"]),
        ("far has other versions", ["launcher", "engine_hosts"]),
    ]
