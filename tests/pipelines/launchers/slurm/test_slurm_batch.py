"""What sbatch is asked for."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.launchers.slurm.queue import batch_options
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC


def options(
    *,
    rollout: dict[str, Any] | None = None,
    device: str = "cuda",
    of_spec: tuple[str, ...] = (),
    partition: str = "",
    engine_nodes: int = 0,
    names: tuple[str, ...] = ("--gpus",),
) -> list[str]:
    """Those of the names that are asked for."""
    launcher = {"type": "slurm", "nodes": 2, "options": list(of_spec), "partition": partition}
    training = SPEC["training"] | {"ranks": 4}
    resources = {"device": device, "threads": 2}
    changes = {"launcher": launcher | {"engine_nodes": engine_nodes}, "training": training, "resources": resources}
    spec = SPEC | changes | ({"rollout": rollout} if rollout else {})
    asked = batch_options(Experiment.model_validate(spec), Path("run"), "train")
    return [each for each in asked if each.startswith(names)]


def test_a_gpu_a_rank_and_those_of_engines_apart_are_asked_for_where_the_spec_asks_for_none() -> None:
    assert options() == ["--gpus-per-node=2"]
    assert options(device="auto") == []
    apart = {"engine": "vllm", "placement": "dedicated"}
    assert options(rollout=apart) == ["--gpus-per-node=4"]
    assert options(rollout=apart | {"tensor_parallel_size": 2}) == ["--gpus-per-node=6"]
    assert options(rollout=apart | {"engine_gpus": [0, 2]}) == ["--gpus-per-node=3"]
    assert options(rollout=apart | {"ranks_per_engine": 4}) == ["--gpus-per-node=3"], "an engine on each of two nodes"


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ({}, 1, ["--nodes=3", "--cpus-per-task=8", "--gpus-per-node=4"]),
        ({}, 3, ["--nodes=5", "--cpus-per-task=4", "--gpus-per-node=2"]),
        ({"tensor_parallel_size": 4}, 2, ["--nodes=4", "--cpus-per-task=4", "--gpus-per-node=8"]),
        ({"ranks_per_engine": 4}, 1, ["--nodes=3", "--cpus-per-task=4", "--gpus-per-node=2"]),
    ],
)
def test_nodes_for_engines_are_further_ones_and_all_nodes_have_what_the_fullest_needs(
    fields: dict[str, Any], nodes: int, expected: list[str]
) -> None:
    """Two ranks on each of two nodes, and their four engines, or one."""
    apart = {"engine": "vllm", "placement": "dedicated", **fields}
    assert options(rollout=apart, engine_nodes=nodes, names=("--nodes", "--cpus", "--gpus")) == expected


def test_gpus_that_slurm_knows_of_in_the_specs_partition_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'main* (null)'\necho 'h100 gpu:h100:8(S:0-1)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert options(device="auto", partition="h100") == ["--gpus-per-node=2"]
    assert options(device="auto", partition="main") == []
    assert options(device="auto") == [], "the default partition is main"
    assert options(device="cpu", partition="h100") == []


@pytest.mark.parametrize("option", ["--gres=gpu:8", "-G8", "--gpus-per-task=4"])
def test_the_specs_own_way_of_asking_stays_alone(option: str) -> None:
    assert options(of_spec=(option,)) == [option] * option.startswith("--gpus")


@pytest.mark.parametrize("option", ["--get-user-env", "--gid=lab"])
def test_other_options_that_begin_alike_do_not_ask_for_gpus(option: str) -> None:
    assert options(of_spec=(option,)) == ["--gpus-per-node=2"]
