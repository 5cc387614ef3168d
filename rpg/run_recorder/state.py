"""Copies and restores the whole state of training: counters, random generators, and the state of each component."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg.checkpoints.pieces import StateCopy, load_values
from rpg.components import TrainerComponents
from rpg.rollouts.source import RolloutSource

_COUNTERS = "trainer.json"
_RANDOM = "random"


@dataclass
class TrainingState:
    """The counters of a run. The rest of its state is in the components."""

    step: int = 0
    """Number of steps begun. Between two steps, this is the number of finished steps."""
    updates: int = 0
    """Number of optimizer updates, including skipped ones."""
    skipped_in_a_row: int = 0
    """Number of updates in a row, up to the last one, that were skipped because their gradients were not finite."""
    policy_version: int = 0
    """Number of times that the sampler has loaded weights."""

    def copy(self, components: TrainerComponents, source: RolloutSource) -> StateCopy:
        """Returns the whole state of training, copied to host memory. All ranks call it. Each gets the part that it
        writes.

        The state is: weights and optimizer (in pieces), the reference's weights and schedule, the values of closed
        loops, the random states, the data cursor, the rollouts sampled but not yet trained on, and the counters, which
        determine the learning rate.
        """
        copied = StateCopy()
        components.learner.save(copied)
        if components.reference:
            components.reference.save(copied)
        copied.values(_RANDOM, random_states())
        record = {
            **asdict(self),
            "position": source.save(self.step, copied),
            "reference": components.schedule.state_dict(),
        }
        record["guards"] = components.guards.state_dict()
        record["loops"] = components.loops.state_dict()
        copied.document(_COUNTERS, record)
        return copied

    def load(self, components: TrainerComponents, source: RolloutSource, directory: Path) -> None:
        """Restores a written `copy` and loads the policy into the sampler. All ranks call it.

        It also works in the middle of a run: it replaces the components' whole state.
        """
        record = json.loads((directory / _COUNTERS).read_bytes())
        components.learner.load(directory)
        if components.reference:
            components.reference.load(directory)
        if states := load_values(directory, _RANDOM):
            restore_random_states(states)
        source.load(directory, record["position"])
        components.schedule.load_state_dict(record["reference"])
        components.guards.load_state_dict(record["guards"])
        components.loops.load_state_dict(record.get("loops", {}))  # a checkpoint of an earlier release has none
        self.step, self.updates, self.policy_version = record["step"], record["updates"], record["policy_version"]
        self.skipped_in_a_row = record["skipped_in_a_row"]
        components.give_sampler_weights(self.policy_version)


def random_states() -> dict[str, Any]:
    """Returns the states of this process's random generators (Python, NumPy, torch), as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to states that `random_states` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
