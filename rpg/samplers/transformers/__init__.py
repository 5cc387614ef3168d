"""The transformers sampler. It runs in the trainer's process, on the learner's own weights if these are not sharded."""

from rpg.samplers.transformers.engine import open_sampler

__all__ = ["open_sampler"]
