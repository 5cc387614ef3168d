"""How many threads a process computes with."""

import os
from collections.abc import Iterator

import pytest
import torch

from rpg.processes.device import use_threads
from specs.machine.parent import RUNS_AT_ONCE
from specs.schema.execution import Resources


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("resources", "ranks", "runs", "threads"),
    [
        (Resources(), 1, 1, 8),
        (Resources(), 2, 1, 4),
        (Resources(), 2, 2, 2),
        (Resources(), 3, 4, 1),
        (Resources(threads=3), 2, 2, 3),
    ],
)
def test_ranks_and_the_runs_of_a_command_share_the_cores(monkeypatch, resources, ranks, runs, threads):
    monkeypatch.setenv(RUNS_AT_ONCE, str(runs))
    use_threads(resources, processes=ranks)
    assert torch.get_num_threads() == threads
