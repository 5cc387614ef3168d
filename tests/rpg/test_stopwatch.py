"""The parts of a step's time."""

import time

import pytest
import torch

from rpg.stopwatch import Stopwatch
from tests.rpg.learner_worker import responses


def test_a_phase_within_another_counts_once_and_on_the_host_it_does_not_wait_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = Stopwatch(torch.device("cuda", 0))
    before, start = len(waits), time.perf_counter()
    with clock("rollout"):
        time.sleep(0.02)
        for _ in range(3):
            with clock("reward", on_host=True):
                time.sleep(0.01)
    assert len(waits) - before == 2, "at the beginning and at the end of what runs on the GPU"
    assert clock.seconds("rollout") >= 0.02
    assert clock.seconds("reward") >= 0.03
    assert clock.seconds("rollout") + clock.seconds("reward") <= time.perf_counter() - start


@pytest.mark.parametrize(("seconds", "rate"), [(2.0, 0.5), (0.0, 0.0)])
def test_rollouts_taken_from_a_checkpoint_have_no_rate_of_sampling(seconds: float, rate: float) -> None:
    clock = Stopwatch(torch.device("cpu"))
    clock.sampling_took(seconds)
    rollouts = responses()
    metrics = clock.metrics(rollouts, num_trained=0)
    assert metrics["tokens_per_second/rollout"] == rate * rollouts.num_sampled.sum()
