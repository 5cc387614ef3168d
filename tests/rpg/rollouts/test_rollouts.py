"""The sources of a step's rollouts, over several ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("refill", ["", "stream"])
def test_a_sampler_that_fails_on_one_rank_ends_all_of_them_with_its_words(
    tmp_path: Path, staleness: int, refill: str
) -> None:
    command = [sys.executable, "-m", "tests.rpg.rollouts_worker", str(tmp_path / "store"), str(staleness), refill]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[0].strip() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert said[1].startswith("SamplerOutOfMemoryError: the sampler ran out of memory; ")
    assert said[1].endswith("no room for the cache")
    assert said[0] == f"RuntimeError: rank 1 could not make its share of the rollouts: {said[1]}"
