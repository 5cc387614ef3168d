"""Several trainings in one process: `train_worker RUN_DIR...`. A:B continues run A from its second to last checkpoint,
in a copy of its directory that is made at B."""

import shutil
import sys
import time
from pathlib import Path

import torch

from rpg.components import open_components
from rpg.processes import ranks
from rpg.processes.stopping import StopAfterStep
from rpg.recording.run_directory import RunDirectory
from rpg.rollouts.source import RolloutSource
from rpg.train import _run


def continued(original: Path, copy: Path) -> Path:
    """The run as it was when the second to last checkpoint was written, except for records."""
    shutil.copytree(original, copy, symlinks=True)
    (copy / "train.json").unlink()
    shutil.rmtree(max((copy / "checkpoints").glob("step-*")))
    return copy


def main(arguments: list[str]) -> None:
    ranks.join("cpu")
    torch.set_num_threads(1)
    stop = StopAfterStep()
    for argument in arguments:
        original, _, copy = argument.partition(":")
        run = RunDirectory(continued(Path(original), Path(copy)) if copy else Path(original))
        with open_components(run, run.spec(), torch.device("cpu")) as components, RolloutSource(components) as source:
            assert _run(components, source, run.inputs(), stop, time.monotonic()) == 0
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
