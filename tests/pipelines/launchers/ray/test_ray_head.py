"""The head's reactions to nodes' reports, and a node's reports when its orders arrive at an odd moment."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipelines.launchers.ray.connection import Connection, await_answers
from pipelines.launchers.ray.head import RayHead
from specs.machine.gpu_slots import DIRECTORY, SLOTS, leased
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import make_run


def test_a_host_that_waits_for_gpus_when_the_others_are_over_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "leases"))
    monkeypatch.setenv(SLOTS, "a,b")
    settings = {"environment": {}, "run_dir": str(tmp_path), "token": "", "interface": "", "silence_seconds": 60}
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 1, "node": 1, "nodes": 1}
    engines = {"engines": 2, "gpus": 2, "device": "cuda", "run_dir": str(tmp_path), "log": str(tmp_path / "log")}
    command = [sys.executable, "-m", "pipelines.launchers.ray.node"]
    with (
        leased(1, "another run", waiting=None),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node,
    ):
        node.stdin.write(f"{json.dumps(settings)}\n{json.dumps({'order': 'start', **engines, **meeting})}\n")
        node.stdin.flush()
        assert any("a is held by another run" in line for line in iter(node.stdout.readline, ""))
        node.stdin.write('{"order": "kill"}\n')
        node.stdin.flush()
        *_, last = [json.loads(line) for line in node.stdout]
    assert last == {"report": "ended", "codes": [None, None]}
    assert not (tmp_path / "log").exists(), "nothing was started"


def test_a_host_that_hears_nothing_ends_its_ranks_and_reports_no_end_of_their_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.json")  # the rank waits for its content
    settings = {"environment": {}, "run_dir": str(tmp_path), "token": "", "interface": "", "silence_seconds": 2}
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 1, "node": 0, "nodes": 1}
    share = {"run_dir": str(tmp_path), "first_rank": 0, "ranks": 1, "log": str(tmp_path / "log"), **meeting}
    command = [sys.executable, "-m", "pipelines.launchers.ray.node"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        node.stdin.write(f"{json.dumps(settings)}\n{json.dumps({'order': 'start', **share})}\n")
        node.stdin.flush()
        reports = [json.loads(line) for line in node.stdout]
    kinds = [report["report"] for report in reports]
    assert kinds[:2] == ["hello", "started"]
    assert set(kinds[2:]) == {"beat"}
    assert not any(psutil.pid_exists(pid) for pid in reports[1]["pids"])


HOST = """
import json, sys, time
from pipelines.launchers.ray.node import machine_versions
name = sys.argv[-1]
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
"""A node program: the one that is called `far` falls silent, and is back just when the ranks of both are ended."""


class ProgramChannel:
    """A program on this machine, in the place of one that an actor of Ray's carries."""

    def __init__(self, program: Path, name: str) -> None:
        command = [sys.executable, str(program), name]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        os.set_blocking(self._program.stdout.fileno(), False)
        self.closed = False

    def send(self, data: bytes) -> None:
        if self._program.poll() is None:
            self._program.stdin.write(data)

    def receive(self) -> bytes:
        data: bytes | None = self._program.stdout.read(1 << 16)
        self.closed = data == b""
        return data or b""

    def close(self) -> None:
        self.closed = True
        self._program.kill()
        self._program.communicate()


class HeadOfPrograms(RayHead):
    """A head whose nodes `near` and `far` run a given program."""

    program: Path
    on_far = "ranks"

    def connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        del patience
        connections = [
            Connection(name, ProgramChannel(self.program, name), self.launcher, self.directory, self.token, secret)
            for name in ("near", "far")
        ]
        connections[0].ranks = range(1)
        setattr(connections[1], self.on_far, range(1, 2) if self.on_far == "ranks" else range(1))
        await_answers(connections, 30)
        return connections


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Puts the handler of SIGTERM back, which a head replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def head(run: Path, program: str) -> HeadOfPrograms:
    """A head of the run, whose nodes run this program."""
    asks = SimpleNamespace(get_draining_nodes=dict)
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray: Any = SimpleNamespace(
        get_runtime_context=lambda: context, _private=SimpleNamespace(state=SimpleNamespace(state=asks))
    )
    made = HeadOfPrograms(run, "train", Experiment.model_validate_json((run / "spec.json").read_bytes()), ray)
    made.program = run / "node.py"
    made.program.write_text(program)
    return made


@pytest.mark.usefixtures("undisturbed")
def test_a_host_that_is_back_too_late_is_lost_and_its_ranks_have_not_trained(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = {"type": "ray", "nodes": 2, "lost_after_seconds": 2, "restarts": 0}
    run = make_run(inputs, tmp_path / "run", training={"ranks": 2}, launcher=launcher)
    assert head(run, HOST).run() == 1
    output = capsys.readouterr().out
    assert "far: lost" in output
    assert "near: lost" not in output


ANOTHER_HOST = """
import json, sys
hello = {"host": "far", "shared": True, "versions": {}, "address": "fd00::2", "interface": "eth0", "port": 1}
print(json.dumps({"report": "hello", **hello}), flush=True)
sys.stdin.read()
"""
"""A node program of a machine that has IPv6 alone, and another version of this code."""


@pytest.mark.usefixtures("undisturbed")
def test_nodes_that_cannot_train_together_are_named_with_each_reason(inputs: Path, tmp_path: Path) -> None:
    rollout = {"engine": "vllm", "placement": "dedicated"}
    run = make_run(inputs, tmp_path / "run", rollout=rollout, launcher={"type": "ray", "engine_nodes": 1})
    unfit = head(run, ANOTHER_HOST)
    unfit.on_far = "engines"
    assert unfit.run() == 2
    problems = json.loads((run / "problems.json").read_text())
    assert [(problem["message"], problem["path"]) for problem in problems] == [
        ("near has other versions", ["launcher"]),
        ("far has engines and is reached by IPv6", ["launcher"]),
        ("far has other versions", ["launcher"]),
    ]
