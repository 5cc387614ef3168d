"""The engines behind the loop's two Protocols: what samples and what learns."""

from rpg.engines.opening import SpecialTokens, open_sampler, special_tokens

__all__ = ["SpecialTokens", "open_sampler", "special_tokens"]
