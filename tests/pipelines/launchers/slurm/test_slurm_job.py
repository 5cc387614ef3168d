"""What a batch job asks srun for, what it makes of how its nodes end, and what the command that waits makes of that;
with Slurm's commands replaced."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.launchers.slurm import job
from pipelines.launchers.slurm.head import SlurmHead
from tests.rpg.tiny_run import make_run

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


@pytest.mark.parametrize(
    ("codes", "states", "expected"),
    [
        ([[0], [-9]], "", ["b"]),
        ([[1], [-7]], "", ["b"]),
        ([[-6], [-9]], "", ["b"]),
        ([[-6], [-6]], "", []),
        ([[-9], [-9]], "", []),
        ([[1], None], "", ["b"]),
        ([None, None], "", []),
        ([[-9], None], "a idle\nb down*", ["b"]),
        ([None, None], "a down\nb mixed", ["a"]),
        ([[1], [-9]], "a draining\nb mixed", ["b"]),
    ],
)
def test_the_node_that_failed_is_named_before_the_job_is_queued_again(
    run_dir: Path, codes: list[list[int] | None], states: str, expected: list[str]
) -> None:
    reports = "\n".join(
        f"""echo '{json.dumps({"host": "x", "codes": each})}' > slurm/7-0-node-{node}.json"""
        for node, each in enumerate(codes)
        if each
    )
    programs(srun=f"{reports}\nexit 1", sinfo=f"printf '{states}'", squeue="echo RUNNING")
    programs(scontrol="[ $1 = show ] && echo a b || cp slurm/failed.json seen 2>/dev/null || [ $1 = requeue ]")
    settings(ranks=2, nodes=2, restarts=1)
    assert job.Job(run_dir).run() != 0
    assert not (run_dir / "slurm" / "ended.json").exists(), "queued again"
    seen = run_dir / "seen"
    assert (json.loads(seen.read_text())["hosts"] if seen.exists() else []) == expected


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ("no", "update JobId=7 ExcNodeList=h[1-2],a,b"),
        ("h[1-2],a,b", "update JobId=7 ExcNodeList=h[1-2],b"),
        ("h[1-2]", ""),
    ],
)
def test_nodes_that_failed_are_excluded_as_far_as_others_are_left(run_dir: Path, refused: str, expected: str) -> None:
    programs(
        sbatch=f"""for last; do :; done; case $last in "--exclude={refused}"*) exit 1;; esac""",
        squeue="echo 'h[1-2]'",
        scontrol='echo "$@" > asked',
    )
    run = make_run(run_dir, run_dir / "run", launcher={"type": "slurm", "options": ["--exclude=h[1-2]"]})
    (run / "slurm").mkdir()
    (run / "slurm" / "failed.json").write_text('{"hosts": ["a", "b"]}')
    SlurmHead(run, "train")._exclude_failed("7")
    asked = run_dir / "asked"
    assert (asked.read_text().strip() if asked.exists() else "") == expected
