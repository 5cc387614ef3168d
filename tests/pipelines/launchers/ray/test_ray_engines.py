"""Engines on a node of a Ray cluster that has no ranks."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_cluster import RayCluster
from waiting import wait_for

from tests.pipelines.launchers.ray.test_ray import WHY_NOT, head, nothing_left, of
from tests.pipelines.launchers.ray.test_ray import cluster as cluster  # the fixture
from tests.pipelines.launchers.slurm.test_engine_nodes import inputs as inputs  # the fixture: a model that vLLM takes
from tests.pipelines.launchers.slurm.test_engine_nodes import make
from tests.rpg.checkpoints.test_resume import recorded, same_rows
from tests.rpg.tiny_run import assert_trained, finish, step_of, train

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


def test_an_engine_on_a_node_of_its_own_samples_what_it_does_beside_its_rank_and_one_that_is_killed_comes_back(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    beside = make(inputs, tmp_path / "beside" / "run", steps=5)
    run = make(inputs, tmp_path / "apart" / "run", steps=5, launcher=cluster.section(engine_nodes=1))
    train(beside)
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=600, what="a whole checkpoint")
    (engine,) = of(cluster, "rpg.engine")
    engine.kill()
    output = finish(driver, seconds=1200)
    assert "continues from step-00000" in output
    assert_trained(beside)
    same_rows(run, beside)
    ours, theirs = recorded(run, "tokens"), recorded(beside, "tokens")
    assert theirs
    assert {key: row["token_id"] for key, row in ours.items()} == {key: row["token_id"] for key, row in theirs.items()}
    launch = json.loads((run / "launch.json").read_text())
    assert [(host.get("ranks"), host.get("engines")) for host in launch["hosts"]] == [("0-0", None), (None, "0-0")]
    assert {host["address"] for host in launch["hosts"]} == {host.address for host in cluster.hosts}
    wait_for(lambda: nothing_left(cluster), timeout=60, what="the end of every process")
    assert not of(cluster, "rpg.engine")
