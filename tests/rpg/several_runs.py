"""`python -m tests.rpg.several_runs`: the trainer for one run after another, each in a process of its own.

The processes are forks of one that has imported torch and DeepSpeed, which takes longer than a tiny run. Each line of
stdin names the directory to begin in, a run's directory and a file for what its trainer prints; the answer on stdout
is the trainer's exit code.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from rpg.train import main
from specs.machine.parent import die_with_parent, share_cores


def train(directory: str, run_dir: str, printed: str) -> None:
    """Runs `python -m rpg.train RUN_DIR` in a directory."""
    os.chdir(directory)
    with Path(printed).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(Path(run_dir)))


if __name__ == "__main__":
    die_with_parent()
    share_cores()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401

    import rpg.components  # noqa: F401

    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=train, args=json.loads(line))
        process.start()
        process.join()
        print(process.exitcode, flush=True)
