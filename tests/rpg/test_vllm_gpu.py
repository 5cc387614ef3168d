"""vLLM on GPUs: sleep, and weights through its own transfer API."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from rpg.samplers.sentinel import Probe, Sentinel
from rpg.samplers.transformers.sampler import model_logprobs
from rpg.types import RolloutGroup
from specs.schema.rollout import VllmRollout
from tests.rpg.tiny_engine import EOS, MAX_LENGTH, PROMPTS, every_rollout, moved, qwen3, sampling, save

PROBE = Probe(token_ids=(5, 7, 3, 4, 9, 2, EOS), prompt_length=1)
WAYS = {
    "colocated": {},
    "asleep": {"sleep": True},
    "ipc": {"placement": "dedicated", "engine_gpus": [0]},
    "nccl": {"placement": "dedicated", "engine_gpus": [1]},
    "nccl_of_two": {"placement": "dedicated", "engine_gpus": [1, 2], "tensor_parallel_size": 2},
}
APART = 0.2
"""Nats, in bfloat16; an engine that holds the weights before is nats away."""
GPUS = {"nccl": 2, "nccl_of_two": 3}


def opened(way: str, directory: Path) -> Sampler:
    pytest.importorskip("vllm", exc_type=ImportError)
    if torch.cuda.device_count() < GPUS.get(way, 1):
        pytest.skip(f"needs {GPUS[way]} GPUs")
    save(qwen3().to(torch.bfloat16), directory)
    rollout = VllmRollout.model_validate({"engine": "vllm", "memory_fraction": 0.2, **WAYS[way]})
    device = torch.device("cuda:0")
    return open_sampler(rollout, SamplerSettings(directory, device, MAX_LENGTH, seed=0, beside_learner=True))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("way", list(WAYS))
def test_weights_arrive_and_are_sampled_with(way: str, tmp_path: Path) -> None:
    learner = moved(qwen3()).to(torch.bfloat16).to("cuda:0")
    sampler = opened(way, tmp_path)
    try:
        sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
        for version in (1, 2):
            sampler.load_weights(learner.named_parameters(), policy_version=version)

            def learner_logprobs(ids: tuple[int, ...], prompt_length: int) -> list[float]:
                return model_logprobs(learner, ids, prompt_length=prompt_length)

            assert Sentinel(PROBE, tolerance=APART).check(sampler, learner_logprobs) < APART
            groups = sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
            assert {group.policy_version for group in groups} == {version}
            for prompt, rollout in every_rollout(groups):
                fresh = model_logprobs(learner, prompt + rollout.response_ids, prompt_length=len(prompt))
                assert list(rollout.rollout_logprobs) == pytest.approx(fresh, abs=APART)
            with torch.no_grad():
                for parameter in learner.parameters():
                    parameter.mul_(1.02)
    finally:
        sampler.close()


@pytest.mark.gpu
@pytest.mark.vllm
def test_a_thread_on_a_stream_of_its_own_gets_the_same_responses(tmp_path: Path) -> None:
    sampler = opened("colocated", tmp_path)

    def sampled() -> list[RolloutGroup]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))

    try:
        before = torch.cuda.current_stream()
        expected = sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
        assert torch.cuda.current_stream() == before
        with ThreadPoolExecutor(1) as thread:
            assert [thread.submit(sampled).result() for _ in range(3)] == [expected] * 3
    finally:
        sampler.close()


@pytest.mark.gpu
@pytest.mark.vllm
def test_an_engine_asleep_gives_its_memory_back(tmp_path: Path) -> None:
    sampler = opened("asleep", tmp_path)
    try:
        torch.cuda.synchronize()
        awake, whole = torch.cuda.mem_get_info()
        sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
        torch.cuda.synchronize()
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - awake > 0.1 * whole, "most of memory_fraction 0.2 is the cache"
        first = sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
        assert first == sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
    finally:
        sampler.close()
