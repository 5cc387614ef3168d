"""Samplers of responses: one Protocol (`base`), and one module an engine, named as the spec names the engine.

What is true of an engine is said by its class in `specs.schema.rollout`; how it is opened by `open_sampler` of its
module here, which `opening` looks up by name. The sentinel proves that an engine apart has the learner's weights.
Imports processes, `types` and the schema, and never the trainer.
"""

from rpg.samplers.base import SamplerSettings
from rpg.samplers.opening import open_sampler

__all__ = ["SamplerSettings", "open_sampler"]
