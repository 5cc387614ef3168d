"""What a host of an ssh run reports when its orders come at an odd moment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specs.machine.gpu_slots import DIRECTORY, SLOTS, leased


def test_a_host_that_waits_for_gpus_when_the_others_are_over_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "leases"))
    monkeypatch.setenv(SLOTS, "a,b")
    settings = {"environment": {}, "run_dir": str(tmp_path), "token": "", "interface": "", "silence_seconds": 60}
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 1, "node": 1, "nodes": 1}
    engines = {"engines": 2, "gpus": 2, "device": "cuda", "run_dir": str(tmp_path), "log": str(tmp_path / "log")}
    command = [sys.executable, "-m", "pipelines.launchers.hosts.node"]
    with (
        leased(1, "another run", waiting=None),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node,
    ):
        assert node.stdin is not None
        assert node.stdout is not None
        node.stdin.write(f"{json.dumps(settings)}\n{json.dumps({'order': 'start', **engines, **meeting})}\n")
        node.stdin.flush()
        assert any("a is held by another run" in line for line in iter(node.stdout.readline, ""))
        node.stdin.write('{"order": "kill"}\n')
        node.stdin.flush()
        *_, last = [json.loads(line) for line in node.stdout]
    assert last == {"report": "ended", "codes": [None, None]}
    assert not (tmp_path / "log").exists(), "nothing was started"
