"""How far a run is, and its whole state on disk: with it the next step is the one that would have come anyway."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rpg import ranks
from rpg.checkpoint import random_states, restore_random_states
from rpg.parts import Parts
from rpg.run_directory import replace_json
from specs.errors import Problem, SpecError


@dataclass
class RunState:
    """Counters of a run; the rest of its state lies with the parts that it belongs to."""

    step: int = 0
    """Steps begun; between steps: done."""
    updates: int = 0
    """Optimizer updates done."""
    policy_version: int = 0
    """Weight loads of the sampler."""

    def save(self, parts: Parts, directory: Path) -> None:
        """Writes everything. All ranks call; each writes its own files.

        Weights, optimizer and shards (DeepSpeed), the reference's weights and schedule, the random states, the data
        cursor and the counters. The learning rate follows from the counters.
        """
        parts.learner.save(directory)
        if parts.reference:
            parts.reference.save(directory)
        torch.save(random_states(), directory / _random_file())
        if ranks.rank() == 0:
            record = {
                **asdict(self),
                "position": parts.order.position,
                "reference": parts.schedule.state_dict(),
                "layout": _layout(parts),
            }
            replace_json(directory / "trainer.json", record, durable=False)

    def load(self, parts: Parts, directory: Path) -> None:
        """Takes back what `save` wrote, and gives the sampler the policy."""
        record = json.loads((directory / "trainer.json").read_bytes())
        _check_layout(record["layout"], _layout(parts))
        parts.learner.load(directory)
        if parts.reference:
            parts.reference.load(directory)
        if (directory / _random_file()).exists():
            restore_random_states(torch.load(directory / _random_file(), weights_only=True))
        parts.order.position = record["position"]
        parts.schedule.load_state_dict(record["reference"])
        self.step, self.updates, self.policy_version = record["step"], record["updates"], record["policy_version"]
        parts.give_sampler_weights(self.policy_version)


def _layout(parts: Parts) -> dict[str, int | str]:
    """How DeepSpeed's files are cut. Without shards any number of ranks can read them."""
    training = parts.spec.training
    whole = training.zero_stage == 0 and training.precision == "float32"
    return {"ranks": 0 if whole else ranks.world_size(), "zero_stage": training.zero_stage}


def _check_layout(written: dict[str, int | str], present: dict[str, int | str]) -> None:
    wrong = [
        Problem(
            "the checkpoint was written with another value",
            path=("training", key),
            given=str(present[key]),
            allowed=str(written[key]),
            hint="its optimizer state is cut up accordingly; change it back to go on from there",
        )
        for key in written
        if written[key] != present[key]
    ]
    if wrong:
        raise SpecError(*wrong)


def _random_file() -> str:
    return f"random-rank{ranks.rank():05}.pt"
