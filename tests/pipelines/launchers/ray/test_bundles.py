"""The resources that a launch requests from a Ray cluster, and its message if the cluster cannot hold it."""

import pwd
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from as_users import acting_as, shared_machine

from pipelines.home.home import Home
from pipelines.launchers.ray.cluster import bundles, in_words, lacking, launches, total
from pipelines.launchers.ray.examination import examine_cluster
from pipelines.running.gpu_slots import asked_of_machines, missing_here
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC


class Cluster:
    """The questions that are asked of `ray`."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def cluster_resources(self) -> dict[str, float]:
        return total(self._nodes)

    def available_resources(self) -> dict[str, float]:
        return total(self._nodes)


def experiment(launcher: dict[str, Any], **rollout: Any) -> Experiment:
    training = SPEC["training"] | {"ranks": 8}
    spec = SPEC | {"training": training, "launcher": {"type": "ray", **launcher}}
    return Experiment.model_validate(spec | ({"rollout": rollout} if rollout else {}))


def test_a_bundle_holds_the_ranks_of_a_node_with_a_gpu_each() -> None:
    spec = experiment({"nodes": 2, "cpus_per_rank": 4, "resources": {"accelerator_type:H100": 0.001}})
    assert bundles(spec, 2, gpus=True) == [{"CPU": 16, "GPU": 4, "accelerator_type:H100": 0.004}] * 2
    assert bundles(spec, 1, gpus=False) == [{"CPU": 16, "accelerator_type:H100": 0.004}]


def test_engines_have_bundles_of_their_own_and_fewer_where_there_are_fewer_ranks() -> None:
    apart = {"engine": "vllm", "placement": "dedicated", "ranks_per_engine": 2, "tensor_parallel_size": 2}
    spec = experiment({"nodes": 2, "engine_nodes": 1}, **apart)
    assert bundles(spec, 2, gpus=True) == [{"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 8}]
    assert bundles(spec, 1, gpus=True) == [{"CPU": 4, "GPU": 4}, {"CPU": 2, "GPU": 4}]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}], ""),
        ([{"CPU": 8, "GPU": 8}], ""),
        ([{"CPU": 8, "GPU": 2}] * 4, "no node has 4 GPU, 4 CPU; nodes have 2 GPU, 8 CPU; 2 GPU, 8 CPU; 2 GPU, 8 CPU"),
        ([{"CPU": 8, "GPU": 4}], "8 GPU, 8 CPU are needed, the cluster has 4 GPU, 8 CPU"),
        ([], "no node has 4 GPU, 4 CPU; nodes have nothing"),
    ],
)
def test_a_cluster_that_can_never_hold_a_run_is_told_by_what_its_nodes_have(
    nodes: list[dict[str, float]], why: str
) -> None:
    said = lacking(Cluster(*nodes), bundles(experiment({"nodes": 2}), 2, gpus=True))
    assert said.startswith(why) if why else said == ""


def test_resources_are_shown_without_those_that_ray_keeps_for_itself() -> None:
    shown = in_words({"CPU": 2.0, "memory": 9.0, "object_store_memory": 9.0, "node:10.0.0.1": 1.0, "GPU": 1.0})
    assert shown == "1 GPU, 2 CPU"
    assert in_words({"accelerator_type:H100": 0.5, "CPU_group_0_1f": 1.0}) == "0.5 accelerator_type:H100"


def test_as_many_runs_at_a_time_find_room_as_the_scarcest_resource_allows() -> None:
    wanted = bundles(experiment({"nodes": 2}), 2, gpus=True)
    assert launches(Cluster({"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 12}), wanted) == 2
    assert launches(Cluster({"CPU": 64}), wanted) == 0


def test_a_machine_without_ray_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as Python notes a module that is not there
    (issue,) = missing_here(experiment({}))
    assert issue.message == "ray is not installed"
    assert issue.hint == "pip install 'rpg-experiments[ray]'"
    (finding,) = examine_cluster(Home(tmp_path), experiment({}))
    assert finding.status == "broken"
    assert finding.message == "Ray is not installed here: pip install 'rpg-experiments[ray]'"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ray://head:10001", "RAY_ADDRESS=ray://head:10001 is an address for Ray's client, which cannot start runs"),
        ("127.0.0.1:1", "no Ray cluster accepts this command at 127.0.0.1:1: [Errno 111] Connection refused"),
    ],
)
def test_what_the_environment_names_is_held_to_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, why: str
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    (finding,) = examine_cluster(Home(tmp_path), experiment({}))
    assert finding.message.startswith(why)


@pytest.mark.parametrize("planted", ["a file", "a process"])
def test_no_cluster_of_another_user_is_found_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with shared_machine() as machine, ExitStack() as stack:
        monkeypatch.setenv("RAY_TMPDIR", str(machine.tmp))
        with acting_as(machine.other):
            if planted == "a file":
                (machine.tmp / "ray").mkdir()
                (machine.tmp / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        if planted == "a process":
            command = ["raylet", "-c", "echo; read line", "--gcs-address=127.0.0.1:1"]
            user = pwd.getpwnam(machine.other).pw_uid
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            raylet = stack.enter_context(subprocess.Popen(command, executable="/bin/sh", user=user, **pipes))
            raylet.stdout.readline()  # it is of its user now
        (finding,) = examine_cluster(Home(tmp_path), experiment({}))
        assert f" belongs to user {machine.other}: set launcher.address" in finding.message
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        (finding,) = examine_cluster(Home(tmp_path), experiment({}))
        assert "Connection refused" in finding.message, "a cluster that is named is asked"


def test_a_cluster_is_asked_once_for_cells_that_want_the_same_places() -> None:
    warm, cold = (experiment({}, **SPEC["rollout"] | {"temperature": heat}) for heat in (1.0, 0.5))
    apart = experiment({"nodes": 2}, **SPEC["rollout"])
    assert asked_of_machines(warm) == asked_of_machines(cold) != asked_of_machines(apart)
