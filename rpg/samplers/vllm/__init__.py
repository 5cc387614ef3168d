"""The vLLM sampler: its engine in this process or in a dedicated one, and how weights reach it.

vLLM itself is imported when an engine starts, so that all else here can be read and tested where it is not installed.
"""

from rpg.samplers.vllm.placement import open_sampler

__all__ = ["open_sampler"]
