"""`python -m tests.rpg.several_runs RUN_DIR...`: the trainer for one run after another, each in a process of its own.

The processes are forks of one that has imported torch and DeepSpeed, which takes longer than a tiny run.
"""

import multiprocessing
import sys
from pathlib import Path

from rpg.processes.parent import share_cores
from rpg.train import main


def train(run_dir: str) -> None:
    """As `python -m rpg.train RUN_DIR`."""
    sys.exit(main(Path(run_dir)))


if __name__ == "__main__":
    share_cores()
    import rpg.parts  # noqa: F401

    for run_dir in sys.argv[1:]:
        process = multiprocessing.get_context("fork").Process(target=train, args=(run_dir,))
        process.start()
        process.join()
        if process.exitcode != 0:
            sys.exit(1)
