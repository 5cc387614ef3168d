"""The vLLM sampler: its engine in this process or in a dedicated one, and the transfer of weights to it.

vLLM itself is imported when an engine starts, so that the other code can be imported and tested without it.
"""

from rpg.samplers.vllm.opening import open_sampler

__all__ = ["open_sampler"]
