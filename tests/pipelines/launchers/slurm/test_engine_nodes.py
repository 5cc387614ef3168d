"""Engines on a node of a Slurm job that has no ranks."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import SPEC, Lab
from slurm_cluster import SlurmCluster
from waiting import wait_for

from specs.machine.launch import KEY
from tests.pipelines.launchers.slurm.test_slurm import WHY_NOT, head, job_of, step_of
from tests.pipelines.launchers.slurm.test_slurm import cluster as cluster  # the fixture
from tests.rpg.tiny_run import finish, make_inputs, make_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
APART = {"type": "slurm", "engine_nodes": 1, "stop_before_seconds": 5}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that vLLM takes."""
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory, head_dim=32)
    return directory


def make(inputs: Path, run: Path, *, steps: int = 2, **more: Any) -> Path:
    """A run with a dedicated engine; `more`: changes of other sections and of these."""
    training, rollout = more.pop("training", {}), more.pop("rollout", {})
    engine = {"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25}
    return make_run(inputs, run, training={"steps": steps, **training}, rollout={**engine, **rollout}, **more)


def engines(cluster: SlurmCluster) -> Iterator[psutil.Process]:
    for process in cluster.processes():
        try:
            if "rpg.engine" in process.cmdline():
                yield process
        except psutil.Error:
            continue


def test_a_job_whose_engine_is_killed_is_queued_again_and_goes_on(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path
) -> None:
    run = make(inputs, tmp_path / "run", steps=12, launcher=APART)
    process = head(run)
    wait_for(lambda: step_of(run) >= 5, timeout=240, what="a whole checkpoint")
    (engine,) = engines(cluster)
    assert cluster.node_of(engine) == "rpg2"
    assert all(cluster.node_of(rank) == "rpg1" for rank in cluster.ranks())
    key = engine.environ()[KEY]
    engine.kill()
    finish(process)
    assert job_of(run) == "1", "one job, queued again"
    attempts = [json.loads(path.read_text()) for path in sorted((run / "attempts").iterdir())]
    assert [attempt["resumed_from_step"] > 0 for attempt in attempts] == [False, True]
    launch = json.loads((run / "launch.json").read_text())
    assert launch["hosts"] == [{"host": "rpg1", "ranks": "0-0"}, {"host": "rpg2", "engines": "0-0"}]
    assert "engines 0 to 0" in (run / "logs" / "train-1-rpg2.log").read_text()
    assert not any(key.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())
    wait_for(lambda: not cluster.jobs(), what="the job to leave the queue")
    assert not cluster.processes()


def test_a_rank_that_fails_ends_the_job_for_good_though_it_never_met_its_engine(
    cluster: SlurmCluster, inputs: Path, tmp_path: Path
) -> None:
    run = make(inputs, tmp_path / "run", launcher=APART)
    (run / "inputs.json").write_text((run / "inputs.json").read_text().replace("data", "nowhere"))
    output = finish(head(run), expect=1)
    assert "KeyError" in output or "FileNotFoundError" in output
    assert cluster.command("scontrol", "show", "job", "1").count("Restarts=0") == 1
    assert not cluster.processes()


def test_evaluation_samples_with_engines_there_too(lab: Lab, cluster: SlurmCluster) -> None:
    lab.spec.write_text(
        SPEC.replace("steps: 6", "steps: 1")
        .replace("head_dim: 16", "head_dim: 32")
        .replace("engine: transformers", "engine: vllm, placement: dedicated, cpu_cache_gib: 0.25")
        + "launcher: {type: slurm, engine_nodes: 1}\n"
    )
    done = lab.rpg("run", str(lab.spec), timeout=500)
    assert done.code == 0, done.err
    (run_id,) = lab.run_ids()
    logs = {path.name: path.read_text() for path in (lab.home.run(run_id) / "logs").glob("*.log")}
    for stage in ("train", "evaluate"):
        assert "engines 0 to 0" in logs[f"{stage}-1-rpg2.log"]
    assert "10 of 10 problems answered" in logs["evaluate-0-rpg1.log"]
    assert lab.query("select count(distinct problem_id) from evaluation_samples")[0][0] == 10
    assert '{"host": "rpg2", "engines": "0-0"' in lab.rpg("show", run_id, "--all").out
    wait_for(lambda: not cluster.jobs(), what="the jobs to leave the queue")
    assert not cluster.processes()
