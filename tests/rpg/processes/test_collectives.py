"""A collective of the learner that waits for a rank in vain ends with that rank's number; other waits go on."""

import os
import sys
from pathlib import Path

import pytest

from tests.rpg.tiny_run import finish, start


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_hangs_in_an_update_is_named_and_one_that_samples_long_is_waited_for(
    size: int, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.rpg.collective_worker",
        str(tmp_path / "exits"),
        str(tmp_path / "store"),
        "3",
    ]
    processes = [
        start(command, environment=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size)}) for rank in range(size)
    ]
    try:
        for rank, process in enumerate(processes):
            if rank != 1:
                said = finish(process, expect=0, seconds=120).splitlines()
                assert said[0] == "met"
                assert said[-1] == (
                    "rank 1 did not arrive at a collective within 3 s (launcher.collective_timeout_seconds)"
                )
        assert sorted(path.name for path in (tmp_path / "exits").iterdir()) == [
            f"waited-{rank}" for rank in range(size) if rank != 1
        ]
    finally:
        processes[1].kill()
        processes[1].communicate()
