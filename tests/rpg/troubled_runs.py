"""`python -m tests.rpg.troubled_runs TROUBLE:RUN_DIR...`: trainers that meet trouble, one after another.

Each is a fork of this process. It leaves its words in RUN_DIR/TROUBLE.txt, its exit code in TROUBLE.code and what
it noted of its end in TROUBLE.exits. A trouble is one of `TROUBLES`, or set_back. Under DeepSpeed's launcher, with one
run, the last rank alone meets it.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpg.train import main
from specs.machine.parent import share_cores

FOURTH = 4
"""Default batch whose sampling meets the trouble."""
LONG_SECONDS = 1.5


class Troubled:
    """A sampler with something that is wrong with it."""

    batch = FOURTH

    def __init__(self, sampler: Any, run_dir: Path) -> None:
        self.sampler = sampler
        self.run_dir = run_dir
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def generate(self, *prompts: Any, **how: Any) -> Any:
        self.calls += 1
        if self.calls == self.batch:
            self.meet()
        return self.sampler.generate(*prompts, **how)

    def meet(self) -> None:
        """Before that batch, in the thread that samples ahead."""


class Failing(Troubled):
    batch = 6

    def meet(self) -> None:
        raise MemoryError("no room for the responses")


class Cancelled(Troubled):
    """The user cancels the run when a batch has begun that takes long."""

    def meet(self) -> None:
        (self.run_dir / "cancelled.met").touch()
        (self.run_dir / "cancel").touch()
        time.sleep(LONG_SECONDS)


class Terminated(Troubled):
    """A SIGTERM comes then."""

    def meet(self) -> None:
        (self.run_dir / "terminated.met").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LONG_SECONDS)


class Stale(Troubled):
    """Counts the weights that it is given, and keeps its own."""

    def load_weights(self, _weights: Any, *, policy_version: int) -> None:
        self.sampler.policy_version = policy_version


class Sleeping(Troubled):
    """Throws its weights away when it is to sleep, as vLLM does on a GPU."""

    has_weights = True

    def meet(self) -> None:
        """Nothing more: it samples in every call."""

    def generate(self, *prompts: Any, **how: Any) -> Any:
        assert self.has_weights
        return super().generate(*prompts, **how)

    def sleep(self) -> None:
        self.has_weights = False
        with (self.run_dir / "slept").open("a") as file:
            print(self.calls, file=file)

    def load_weights(self, weights: Any, *, policy_version: int) -> None:
        self.sampler.load_weights(weights, policy_version=policy_version)
        self.has_weights = True


TROUBLES = {kind.__name__.lower(): kind for kind in (Failing, Cancelled, Terminated, Stale, Sleeping)}
TROUBLES["none"] = Troubled


def meet(trouble: str, run_dir: Path) -> None:
    """Has the trainer of this process open a sampler that meets the trouble, on a transformers model in any case."""
    import rpg.components
    from specs.schema.rollout import TransformersRollout

    opened: Callable[..., Any] = rpg.components.open_sampler

    def open_sampler(_rollout: Any, settings: Any) -> Any:
        return TROUBLES[trouble](opened(TransformersRollout(), settings), run_dir)

    rpg.components.open_sampler = open_sampler


def train(trouble: str, run_dir: Path) -> int:
    """Runs `python -m rpg.train RUN_DIR`, with the trouble added."""
    if trouble == "set_back":
        return set_back.main(run_dir)
    if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        meet(trouble, run_dir)
    return main(run_dir)


def train_aside(trouble: str, run_dir: Path) -> None:
    """In a process of its own, whose words go to a file."""
    with (run_dir / f"{trouble}.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(train(trouble, run_dir))


if __name__ == "__main__":
    runs = [(trouble, Path(run_dir)) for trouble, _, run_dir in (argument.partition(":") for argument in sys.argv[1:])]
    share_cores()
    from tests.rpg import set_back  # torch, after the cores are shared

    if "RANK" in os.environ:
        sys.exit(train(*runs[0]))
    for trouble, run_dir in runs:
        process = multiprocessing.get_context("fork").Process(target=train_aside, args=(trouble, run_dir))
        process.start()
        process.join()
        (run_dir / f"{trouble}.code").write_text(str(process.exitcode))
        if (run_dir / "exits").exists():
            (run_dir / "exits").rename(run_dir / f"{trouble}.exits")
