"""What a batch job asks srun for, and what it makes of how its nodes end, with Slurm's commands replaced."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.launchers.slurm import job

SRUN = """\
echo '{"host": "first", "codes": [0]}' > slurm/7-0-node-0.json
exec sleep 600
"""
"""The node with the rank is done, the one with its engine is dead: srun waits until Slurm notices."""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, a run's; programs in it stand for Slurm's."""
    (tmp_path / "slurm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "")
    monkeypatch.setattr(job, "_PEERS_SECONDS", 0.5)
    return tmp_path


def programs(**scripts: str) -> None:
    for name, content in scripts.items():
        Path(name).write_text(f"#!/bin/sh\n{content}\n")
        Path(name).chmod(0o755)


def settings(**changes: Any) -> None:
    plain = {"stage": "train", "ranks": 1, "nodes": 1, "interface": "lo", "environment": {}, "restarts": 0}
    of_srun = {"srun_options": [], "srun_python": "", "engines": []}
    Path("slurm/settings.json").write_text(json.dumps(plain | of_srun | changes))


def test_a_node_with_engines_that_is_dead_when_the_ranks_are_over_does_not_keep_the_job(run_dir: Path) -> None:
    programs(srun=SRUN, scontrol="echo first second")
    settings(engines=[1], gpus_per_engine=1, device="cpu", threads=1)
    assert job.Job(run_dir).run() == 0
    assert json.loads((run_dir / "slurm" / "ended.json").read_text()) == {"job": "7", "code": 0}
    launch = json.loads((run_dir / "launch.json").read_text())
    assert [host["host"] for host in launch["hosts"]] == ["first", "second"]


def test_the_specs_options_of_srun_and_its_interpreter_start_the_nodes(run_dir: Path) -> None:
    report = "slurm/7-0-node-0.json"
    programs(
        srun=f"""printf '%s\\n' "$@" > words; echo '{{"host": "a", "codes": [0]}}' > {report}""", scontrol="echo a"
    )
    container = ["--container-image=/images/rpg.sqsh", "--container-mounts=/shared:/shared"]
    settings(srun_options=container, srun_python="/usr/bin/python3")
    assert job.Job(run_dir).run() == 0
    words = (run_dir / "words").read_text().splitlines()
    program = ["/usr/bin/python3", "-P", "-u", "-m", "pipelines.launchers.slurm.node", str(run_dir), "7-0"]
    assert words[words.index("--kill-on-bad-exit=1") + 1 :] == [*container, *program]
