"""Samplers of responses: a Protocol (`base`), and one module per engine, named as in a spec.

An engine's class in `specs.schema.rollout` states its properties; `open_sampler` of its module here opens it, and
`opening` finds the module by name. The sentinel checks that a separate engine has the learner's weights. The package
imports processes, `types` and the schema, and never the trainer.
"""

from rpg.samplers.base import SamplerSettings
from rpg.samplers.opening import open_sampler

__all__ = ["SamplerSettings", "open_sampler"]
