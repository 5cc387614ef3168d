"""vLLM on GPUs, where `rpg doctor --gpu` does not look: its checks are in test_gpu_checks.py."""

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
OF_TWO = {"placement": "dedicated", "engine_gpus": [1, 2], "tensor_parallel_size": 2}
APART = 0.2
"""Nats, in bfloat16; an engine that holds the weights before is nats away."""


def opened(directory: Path, **placement: object) -> Sampler:
    pytest.importorskip("vllm", exc_type=ImportError)
    save(qwen3().to(torch.bfloat16), directory)
    rollout = VllmRollout.model_validate({"engine": "vllm", "memory_fraction": 0.2, **placement})
    device = torch.device("cuda:0")
    return open_sampler(rollout, SamplerSettings(directory, device, MAX_LENGTH, seed=0, beside_learner=True))


@pytest.mark.gpu
@pytest.mark.vllm
def test_weights_arrive_at_an_engine_of_two_gpus_and_are_sampled_with(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip("needs 3 GPUs")
    learner = moved(qwen3()).to(torch.bfloat16).to("cuda:0")
    sampler = opened(tmp_path, **OF_TWO)
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
    sampler = opened(tmp_path)

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
