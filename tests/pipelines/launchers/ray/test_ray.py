"""Training on a real Ray cluster of two nodes, each in a network namespace of its own."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray_cluster import RayCluster, missing
from waiting import wait_for

from tests.rpg.tiny_run import STEADY, assert_trained, finish, make_run, start, step_of, weights

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
long = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    made = RayCluster(tmp_path_factory.mktemp("ray") / "hosts")
    yield made
    made.close()


def head(cluster: RayCluster, run: Path) -> Any:
    return start(cluster.on(0, [sys.executable, "-m", "pipelines.launchers.ray.head", str(run)]), {})


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_two_nodes_give_the_weights_of_one_process(
    cluster: RayCluster, inputs: Path, tmp_path: Path, ranks: int
) -> None:
    alone = make_run(inputs, tmp_path / "alone", training={"optimizer": STEADY})
    training = {"ranks": ranks, "optimizer": STEADY}
    run = make_run(inputs, tmp_path / "two", training=training, launcher=cluster.section(nodes=2))
    finish(head(cluster, run), start([sys.executable, "-m", "rpg.train", str(alone)]))
    assert_trained(alone)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-5)
    launch = json.loads((run / "launch.json").read_text())
    half = ranks // 2
    assert [host["ranks"] for host in launch["hosts"]] == [f"0-{half - 1}", f"{half}-{ranks - 1}"]
    assert {host["address"] for host in launch["hosts"]} == {host.address for host in cluster.hosts}
    assert not any(host.ranks() for host in cluster.hosts)


def of(cluster: RayCluster, name: str) -> list[psutil.Process]:
    """Processes of the cluster whose command line has a word."""
    found = []
    for host in cluster.hosts:
        for process in host.processes():
            try:
                if any(name in word for word in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
    return found


def nothing_left(cluster: RayCluster) -> bool:
    """Whether ranks, node programs and placement groups are gone."""
    groups = cluster.ask("[g['state'] for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']")
    return not of(cluster, "rpg.train") and not of(cluster, "launchers.ray.node") and groups == "[]"


def long_run(cluster: RayCluster, inputs: Path, directory: Path, **more: Any) -> Path:
    """A run that is long enough to be disturbed: a checkpoint a step."""
    training = {"ranks": 2, "steps": 40, "checkpoint": {"every_steps": 1}}
    return make_run(inputs, directory, training=training, launcher=cluster.section(nodes=2, **more))


@long
@pytest.mark.parametrize("killed", ["rpg.train", "launchers.ray.node", "ray::Carrier"])
def test_what_is_killed_on_a_node_brings_the_run_back_from_its_last_checkpoint(
    cluster: RayCluster, inputs: Path, tmp_path: Path, killed: str
) -> None:
    run = long_run(cluster, inputs, tmp_path / "run")
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    of(cluster, killed)[-1].kill()
    output = finish(driver)
    assert "continues from step-" in output
    assert_trained(run)
    assert step_of(run) == 40
    wait_for(lambda: nothing_left(cluster), timeout=60, what="the end of every process")


@long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_ends_leaves_no_actor_and_no_placement_group(
    cluster: RayCluster, inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = long_run(cluster, inputs, tmp_path / "run")
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    driver.send_signal(number)
    driver.communicate(timeout=120)
    wait_for(lambda: nothing_left(cluster), timeout=60, what="the end of every process")
    finish(head(cluster, run))
    assert_trained(run)
    assert step_of(run) == 40


@long
def test_a_run_that_no_node_can_hold_is_refused_with_what_nodes_have(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    run = make_run(inputs, tmp_path / "run", training={"ranks": 3}, launcher=cluster.section(nodes=1))
    output = finish(head(cluster, run), expect=1)
    assert "the Ray cluster cannot hold the run: no node has 3 CPU; nodes have 2 CPU" in output


@long
@pytest.mark.parametrize(("ranks", "then"), [(2, 2), (4, 2)])
def test_a_node_that_is_drained_has_the_run_save_and_go_on_elsewhere(
    cluster: RayCluster, inputs: Path, tmp_path: Path, ranks: int, then: int
) -> None:
    """Two ranks find room on the node that is left, four do not: it has two CPUs."""
    run = seldom_saved(cluster, inputs, tmp_path / "run", ranks=ranks, min_ranks=2, recover_seconds=5)
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    cluster.drain(1)
    try:
        output = finish(driver)
    finally:
        cluster.restart(1)
    assert "about to be removed; the run saves its state and continues elsewhere" in output
    assert ("waiting: the run needs 4 CPU of the Ray cluster, of which " in output) == (ranks == 4)
    launch = json.loads((run / "launch.json").read_text())
    assert {host["address"] for host in launch["hosts"]} == {cluster.hosts[0].address}
    assert sum(1 for _ in (run / "attempts").iterdir()) == 2
    assert f"{then} ranks (of 4)" in output or then == ranks
    assert_trained(run)
    assert step_of(run) == 40


@long
def test_a_command_whose_own_node_is_drained_has_the_run_save_and_ends(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    run = seldom_saved(cluster, inputs, tmp_path / "run")
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    cluster.drain(0)
    try:
        output = finish(driver, expect=143)
    finally:
        cluster.renew()
    assert "this command's own node is about to be removed; the run saves its state and ends: `rpg resume" in output
    finish(head(cluster, run))
    (_, second) = (json.loads(path.read_text()) for path in sorted((run / "attempts").iterdir()))
    assert second["resumed_from_step"] >= 2
    assert step_of(run) == 40


def seldom_saved(cluster: RayCluster, inputs: Path, directory: Path, *, ranks: int = 2, **more: Any) -> Path:
    """A run long enough to be disturbed, with a checkpoint of its own accord near its end alone."""
    training = {"ranks": ranks, "steps": 40, "checkpoint": {"every_steps": 30}}
    return make_run(inputs, directory, training=training, launcher=cluster.section(nodes=2, **more))


@long
def test_a_node_that_dies_is_waited_for_until_another_takes_its_place(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    run = long_run(cluster, inputs, tmp_path / "run", recover_seconds=300)
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    cluster.hosts[1].power_off()
    wait_for(lambda: not of(cluster, "rpg.train"), timeout=120, what="the end of the ranks")
    cluster.restart(1)
    output = finish(driver)
    assert ": lost, " in output
    assert_trained(run)
    assert step_of(run) == 40


@long
def test_a_cluster_whose_head_dies_ends_the_run_which_goes_on_in_the_next_one(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    run = long_run(cluster, inputs, tmp_path / "run")
    driver = head(cluster, run)
    wait_for(lambda: step_of(run) >= 2, timeout=300, what="a step")
    for server in of(cluster, "gcs_server"):
        server.kill()
    output = driver.communicate(timeout=200)[0]
    assert driver.returncode != 0, output
    wait_for(lambda: not of(cluster, "rpg.train"), timeout=60, what="the end of every process")
    cluster.renew()
    finish(head(cluster, run))
    assert_trained(run)
    assert step_of(run) == 40


@long
@pytest.mark.parametrize("apart", [False, True], ids=["ranks", "ranks and engines"])
def test_the_gpu_checks_of_a_spec_are_made_on_every_node(
    cluster: RayCluster, inputs: Path, tmp_path: Path, apart: bool
) -> None:
    changes: dict[str, Any] = {"training": {"ranks": 1 if apart else 2}, "resources": {"device": "cpu"}}
    nodes = {"engine_nodes": 1} if apart else {"nodes": 2}
    if apart:
        changes["rollout"] = {"engine": "vllm", "placement": "dedicated"}
    run = make_run(inputs, tmp_path / "run", launcher=cluster.section(**nodes), **changes)
    program = (
        "import json, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "from pipelines.doctor.gpu_checks.session import check_gpus\nfrom pipelines.home.home import Home\n"
        "from specs.schema.experiment import Experiment\n"
        "spec = Experiment.model_validate_json(Path(sys.argv[1], 'spec.json').read_bytes())\n"
        "names = ['machine', 'all_reduce']\n"
        "results = check_gpus(Home(Path(sys.argv[1], 'home')), spec, names=names, on_result=lambda _: None)\n"
        "print(json.dumps([asdict(result) for result in results]))"
    )
    output = finish(start(cluster.on(0, [sys.executable, "-c", program, str(run)]), {}))
    results = json.loads(output.splitlines()[-1])
    assert [(result["check"], result["status"], result["rank"]) for result in results] == [
        (name, "ok", rank) for name in ("machine", "all_reduce") for rank in (0, 1)
    ], results
    assert "between_hosts_gb_per_s" in results[2]["figures"]
    wait_for(lambda: nothing_left(cluster), timeout=60, what="the end of every process")
