"""Processes bound to the CPUs beside their GPU; the machine's nodes are files of a test."""

import os
from pathlib import Path

import pytest
import torch

from rpg.processes import numa

ADDRESS = "0000:65:00.0"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for name, text in {
        f"bus/pci/devices/{ADDRESS}/numa_node": "1\n",
        "bus/pci/devices/0000:17:00.0/numa_node": "-1\n",
        "devices/system/node/node1/cpulist": "4-7,12\n",
        "devices/system/cpu/online": "0-15\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_cpus_of_a_gpus_node_are_those_that_the_system_lists(system: Path) -> None:
    assert numa.cpus_near(ADDRESS, system) == {4, 5, 6, 7, 12}
    assert numa.cpus_near("0000:17:00.0", system) == set(range(16)), "it is beside no node"
    with pytest.raises(OSError, match="No such file"):
        numa.cpus_near("0000:99:00.0", system)


@pytest.mark.parametrize(
    ("allowed", "bound"),
    [(set(range(16)), {4, 5, 6, 7, 12}), ({0, 1}, None)],
)
def test_a_rank_is_bound_unless_somebody_else_has_bound_it(
    allowed: set[int], bound: set[int] | None, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[set[int]] = []
    monkeypatch.delenv("RPG_BOUND_TO_CPUS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: given.append(set(cpus)))
    near = numa.cpus_near
    monkeypatch.setattr(numa, "_address", lambda _: ADDRESS)
    monkeypatch.setattr(numa, "cpus_near", lambda address: near(address, system))
    numa.bind_to_gpu(torch.device("cpu"))
    assert given == []
    numa.bind_to_gpu(torch.device("cuda", 0))
    assert given == ([bound] if bound else [])
    numa.unbind()  # in an engine's process, whose GPU is another one
    assert given == ([bound, set(range(16))] if bound else [])
    assert "RPG_BOUND_TO_CPUS" not in os.environ


@pytest.mark.parametrize(
    ("visible", "listing", "bound"),
    [
        ("GPU-a", "00000000:65:00.0\n", {4, 5, 6, 7, 12}),
        ("GPU-a,GPU-b", "00000000:65:00.0\n00000000:B3:00.0\n", {0, 1, 4, 5, 6, 7, 12}),
        ("MIG-a", "", None),
    ],
)
def test_an_engine_is_bound_to_the_nodes_of_all_its_gpus(
    visible: str, listing: str, bound: set[int] | None, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "bus/pci/devices/0000:b3:00.0/numa_node": "0",
        "devices/system/node/node0/cpulist": "0-1",
    }.items():
        (system / name).parent.mkdir(parents=True)
        (system / name).write_text(text)
    program = system / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$4\" = {visible} ] && printf '{listing}' || exit 6\n")
    program.chmod(0o755)
    given: list[set[int]] = []
    near = numa.cpus_near
    for name, value in {"CUDA_VISIBLE_DEVICES": visible, "PATH": f"{system}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RPG_BOUND_TO_CPUS", "")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: given.append(set(cpus)))
    monkeypatch.setattr(numa, "cpus_near", lambda address: near(address, system))
    numa.bind_to_visible_gpus()
    assert given == ([bound] if bound else [])
