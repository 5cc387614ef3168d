"""One rank of the test of collectives that wait: `collective_worker DIRECTORY STORE SECONDS`.

Rank 1 samples for longer than the limit, which harms nothing; then it hangs, and the others update.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rpg.processes import ranks
from specs.machine.launch import KEY


def main(directory: Path, store: Path, seconds: float) -> None:
    size = int(os.environ["WORLD_SIZE"])
    os.environ[KEY] = "collectives"
    ranks.join_in(dist.FileStore(str(store), size), "cpu")
    update = dist.new_group(list(range(size)))  # as DeepSpeed makes its own
    ranks.bound_waits(seconds)
    dist.all_reduce(torch.ones(1), group=update)
    if ranks.rank() == 1:
        time.sleep(1.5 * seconds)
    for exchange in (
        lambda: ranks.gather("rollouts"),
        lambda: ranks.total(torch.ones(2)),
        lambda: ranks.all_to_all([torch.ones(1)] * size),
    ):
        exchange()
    print("met", flush=True)
    if ranks.rank() == 1:
        time.sleep(600)
    try:
        dist.all_reduce(torch.ones(1), group=(update, None)[ranks.rank() % 2])
    except RuntimeError as error:
        print(ranks.absent_ranks(error, directory), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
