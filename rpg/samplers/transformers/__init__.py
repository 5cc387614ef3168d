"""The transformers sampler, in the trainer's own process, over the learner's own weights where these are whole."""

from rpg.samplers.transformers.sampler import open_sampler

__all__ = ["open_sampler"]
