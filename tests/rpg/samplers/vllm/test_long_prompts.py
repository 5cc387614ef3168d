"""Prompts that exceed a pass of vLLM, in an engine of their own: a process closes its engines together."""

from pathlib import Path

import pytest

from rpg.samplers import open_sampler
from specs.schema.rollout import VllmRollout
from tests.rpg.tiny_engine import on_cpu, qwen3, sampling


@pytest.mark.more
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("lengths", "cache_gib"),
    [
        pytest.param([305] * 20, 0.25, id="more prompts than a pass takes"),
        pytest.param([4500, 20, 4300], 0.25, id="longer prompts than a pass takes", marks=pytest.mark.long),
        pytest.param([305] * 20, 0.006, id="less cache than the responses need", marks=pytest.mark.long),
    ],
)
def test_prompts_that_exceed_a_pass_are_sampled_as_they_are_one_by_one(
    tmp_path: Path, lengths: list[int], cache_gib: float
) -> None:
    """A pass on a CPU takes 4096 tokens. Each prompt begins with a text of its own, so that none is in the cache."""
    pytest.importorskip("vllm", exc_type=ImportError)
    qwen3(context=8192).save_pretrained(tmp_path)
    prompts = [[2 + (i * i + place) % 10 for i in range(length)] for place, length in enumerate(lengths)]
    prompts = [[2 + place // 10, 2 + place % 10, *prompt[2:]] for place, prompt in enumerate(prompts)]
    rollout = VllmRollout(engine="vllm", max_concurrent=64, cpu_cache_gib=cache_gib)
    sampler = open_sampler(rollout, on_cpu(tmp_path, max_length=max(lengths) + 120))
    try:
        together = sampler.generate(prompts, group_size=2, sampling=sampling(100), seeds=range(len(prompts)))
        for place in (0, len(prompts) - 1):
            (alone,) = sampler.generate([prompts[place]], group_size=2, sampling=sampling(100), seeds=[place])
            assert [each.turns[0].token_ids for each in together[place].rollouts] == [
                each.turns[0].token_ids for each in alone.rollouts
            ]
    finally:
        sampler.close()
