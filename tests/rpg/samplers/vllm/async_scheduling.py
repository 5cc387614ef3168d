"""A plugin of pytest that has vLLM's engine on a CPU schedule a step while the one before it computes, as on GPUs.

`pytest -p tests.rpg.samplers.vllm.async_scheduling tests/rpg/samplers -k vllm`: vLLM's CPU platform switches that off,
after which this switches it on again.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

_plain = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]


def _forced(cls: type[CpuPlatform], vllm_config: Any) -> None:
    _plain(cls, vllm_config)
    vllm_config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(_forced)  # type: ignore[method-assign,assignment]
