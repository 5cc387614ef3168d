"""What samples responses: one Protocol (`base`), an implementation with transformers and one with vLLM.

`opening` opens the one that a spec names; the sentinel proves that an engine apart has the learner's weights. Imports
processes, batches and the files' helpers, and never the trainer.
"""

from rpg.samplers.opening import SpecialTokens, open_sampler, special_tokens

__all__ = ["SpecialTokens", "open_sampler", "special_tokens"]
