"""One rank of the test of a standstill: `standstill_worker DIRECTORY STORE SECONDS`.

Rank 0 waits while rank 1 samples, for longer than the limit; then for an exchange that rank 1 never enters.
"""

import os
import sys
import time
from pathlib import Path

import torch

from rpg.processes import ranks
from specs.machine.launch import KEY
from specs.machine.standstill import show_work, watch_for_standstill


def main(directory: Path, store: Path, seconds: float) -> None:
    rank = int(os.environ["RANK"])
    os.environ |= {"WORLD_SIZE": "2", KEY: "standstill"}
    ranks.join_in(torch.distributed.FileStore(str(store), 2), "cpu")
    ranks.gather(rank)
    watch_for_standstill(directory, seconds)
    if rank == 1:
        sample(1.7 * seconds)
    ranks.gather("what was sampled")
    print("met", flush=True)
    if rank == 1:
        elsewhere()
    ranks.gather("what the other never sends")


def sample(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)
        show_work()


def elsewhere() -> None:
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
