"""One rank of the test of a sampler that fails on one of two: `rollouts_worker STORE STALENESS REFILL` says how it
ended."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rpg.data.order import PromptOrder
from rpg.processes import ranks
from rpg.rewards import Score
from rpg.rollouts.source import RolloutSource
from rpg.stopwatch import Stopwatch
from rpg.types import Admit, OnResponse, Rollout, RolloutGroup, Turn
from specs.machine.launch import KEY
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC


class FailingSampler:
    """Has no memory on rank 1."""

    def generate(self, prompts: Sequence[Sequence[int]], *, on_response: OnResponse, **_: Any) -> list[RolloutGroup]:
        if ranks.rank() == 1:
            raise MemoryError("no room for the cache")
        rollout = Rollout((Turn((1,), (0.0,)),), "stop")
        on_response(0, rollout)
        return [RolloutGroup(tuple(prompt), (rollout,), 0) for prompt in prompts]

    def stream(self, prompts: Sequence[Sequence[int]], *, admit: Admit, **options: Any) -> int:
        assert admit() == 2
        self.generate(prompts[:1], **options)
        while admit() is not None:
            pass
        return 0


class Always:
    """A tokenizer and a scorer that find everything good."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def submit(self, *_: Any) -> Future[Score]:
        done: Future[Score] = Future()
        done.set_result(Score.of(1.0, None))
        return done


def main(store: Path, staleness: int, refill: str) -> None:
    os.environ |= {"WORLD_SIZE": "2", KEY: "rollouts"}
    ranks.join_in(torch.distributed.FileStore(str(store), 2), "cpu")
    rollout: dict[str, Any] = {"max_response_length": 8, "max_staleness": staleness}
    if refill:
        rollout["dynamic_sampling"] = {"refill": refill}
    group_size = 2 if refill else 1
    training = SPEC["training"] | {"prompts_per_step": 2, "group_size": group_size, "minibatches": 1}
    spec = Experiment.model_validate(SPEC | {"rollout": rollout, "training": training})
    problems: list[Any] = [object()] * 2
    parts: Any = SimpleNamespace(
        spec=spec,
        seed=0,
        device=torch.device("cpu"),
        order=PromptOrder(2, seed=0),
        problems=problems,
        prompts=[[1], [2]],
        sampler=FailingSampler(),
        tokenizer=Always(),
        scorer=Always(),
    )
    with RolloutSource(parts) as source:
        try:
            source.prefetch(0)
            source.wait()
            ranks.wait_for_all()  # as the figures of a step, while the next batch is made
            source.next_batch(1, Stopwatch(torch.device("cpu")))
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    ranks.wait_for_all()
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
