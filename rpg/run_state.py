"""How far a run is, and its whole state on disk: with it the next step is the one that would have come anyway."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rpg.parts import Parts
from rpg.pieces import StateCopy, load_values
from rpg.random_states import random_states, restore_random_states
from rpg.rollouts import RolloutSource

_COUNTERS = "trainer.json"
_RANDOM = "random"


@dataclass
class RunState:
    """Counters of a run; the rest of its state lies with the parts that it belongs to."""

    step: int = 0
    """Steps begun; between steps: done."""
    updates: int = 0
    """Optimizer updates done."""
    policy_version: int = 0
    """Weight loads of the sampler."""

    def copy(self, parts: Parts, source: RolloutSource) -> StateCopy:
        """Everything, copied to host memory. All ranks call; each gets what it has to write.

        Weights and optimizer (in pieces), the reference's weights and schedule, the random states, the data cursor,
        the rollouts sampled but not yet trained on and the counters. The learning rate follows from the counters.
        """
        copied = StateCopy()
        parts.learner.save(copied)
        if parts.reference:
            parts.reference.save(copied)
        copied.values(_RANDOM, random_states())
        record = {**asdict(self), "position": source.save(self.step, copied), "reference": parts.schedule.state_dict()}
        record["guards"] = parts.guards.state_dict()
        copied.document(_COUNTERS, record)
        return copied

    def load(self, parts: Parts, source: RolloutSource, directory: Path) -> None:
        """Takes back what a `copy` wrote, and gives the sampler the policy. All ranks call it.

        Parts in the middle of a run are set back as well: nothing of what they were is left.
        """
        record = json.loads((directory / _COUNTERS).read_bytes())
        parts.learner.load(directory)
        if parts.reference:
            parts.reference.load(directory)
        if states := load_values(directory, _RANDOM):
            restore_random_states(states)
        source.load(directory, record["position"])
        parts.schedule.load_state_dict(record["reference"])
        parts.guards.load_state_dict(record.get("guards", {}))
        self.step, self.updates, self.policy_version = record["step"], record["updates"], record["policy_version"]
        parts.give_sampler_weights(self.policy_version)
