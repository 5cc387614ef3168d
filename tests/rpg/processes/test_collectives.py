"""A collective of the learner that waits for a missing rank ends with that rank's number; other waits continue."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_for

from specs.machine.exit_cause import EarlyExit, noted_exits
from tests.rpg.tiny_run import finish, group_of, make_run, start, step_of


@pytest.mark.more
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


@pytest.mark.long
def test_a_training_whose_rank_stops_in_an_update_ends_with_that_ranks_number(inputs: Path, tmp_path: Path) -> None:
    run = make_run(
        inputs,
        tmp_path / "run",
        training={"ranks": 2, "steps": 10_000, "epochs": 32},  # nearly all of its time it updates
        launcher={"type": "local", "collective_timeout_seconds": 5},
    )
    first, second = (start([sys.executable, "-m", "rpg.train", str(run)], own) for own in group_of(2))
    try:
        wait_for(lambda: step_of(run) >= 1, timeout=240)
        for pause in range(20):
            os.kill(second.pid, signal.SIGSTOP)
            with suppress(subprocess.TimeoutExpired):
                first.wait(30)
                break
            os.kill(second.pid, signal.SIGCONT)  # it was sampling, say, for which the other has patience
            time.sleep(0.1 * pause)
        assert first.returncode == 1
        assert noted_exits(run)[0] == EarlyExit(
            "lost_peer",
            "rank 1 did not arrive at a collective within 5 s (launcher.collective_timeout_seconds)",
            noted_exits(run)[0].microbatch_tokens,
        )
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
