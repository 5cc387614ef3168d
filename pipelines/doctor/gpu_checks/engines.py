"""Checks of engines with their own weights. Each loads the learner's weights and samples with them; a missed load must
be detected."""

import math
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from pipelines.doctor.gpu_checks.models import TINY, make_model, move
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from rpg.samplers.sentinel import Sentinel, StaleEngineError, open_sentinel, probe_of
from rpg.samplers.transformers.sampler import model_logprobs
from rpg.types import RolloutGroup, Sampling
from specs.schema.rollout import VllmRollout

_MAX_LENGTH = 64
_PROMPTS = ([5, 6, 7], [8], [9] * 20, [3, 4], list(range(2, 12)) * 3)
_SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_length=24)
_GIVEN_BACK = 0.1
"""Share of the GPU's memory that an engine with a share of 0.2 must free while asleep. Most of its memory is its
cache."""


def colocated(bench: Bench) -> Figures:
    """Checks vLLM in this process."""
    return _exchange(bench, _vllm())


def asleep(bench: Bench) -> Figures:
    """Checks vLLM in this process. The engine sleeps while it does not sample."""
    return _exchange(bench, _vllm(sleep=True))


def dedicated(bench: Bench) -> Figures:
    """Checks vLLM in a separate process, on this rank's device."""
    return _exchange(bench, _vllm(placement="dedicated", engine_gpus=[0]))


def dedicated_nccl(bench: Bench) -> Figures:
    """Checks vLLM in a separate process, on the next GPU."""
    return _exchange(bench, _vllm(placement="dedicated", engine_gpus=[1]))


def _vllm(**changes: Any) -> VllmRollout:
    return VllmRollout.model_validate({"engine": "vllm", "memory_fraction": 0.2, "cpu_cache_gib": 0.25, **changes})


def _exchange(bench: Bench, rollout: VllmRollout) -> Figures:
    """Loads weights into the engine twice, samples with them, and then compares it with a policy that
    it did not load."""
    device, dtype = bench.device, getattr(torch, bench.precision)
    learner = make_model(TINY, torch.device("cpu"), dtype)
    learner.save_pretrained(bench.directory)
    learner.to(device)  # type: ignore[arg-type]  # transformers' own types
    sentinel = open_sentinel(
        rollout, probe_of(_PROMPTS[-1], max_length=_MAX_LENGTH), precision=bench.precision, device_type=device.type
    )
    assert sentinel is not None
    settings = SamplerSettings(
        bench.directory, device, _MAX_LENGTH, seed=0, beside_learner=True, precision=bench.precision
    )
    start = time.perf_counter()
    sampler = open_sampler(rollout, settings)
    figures: Figures = {"start_seconds": time.perf_counter() - start}
    try:
        for version in (1, 2):
            move(learner, version)
            figures |= _load(sampler, sentinel, learner, version)
        if rollout.sleeps:
            figures |= _memory_given_back(sampler, sentinel, learner, device)
        _check_sentinel_fires(sampler, sentinel, learner)
    finally:
        sampler.close()
    return figures


def _load(sampler: Sampler, sentinel: Sentinel, learner: PreTrainedModel, version: int) -> Figures:
    """Loads the learner's weights; new samples must then have the learner's logprobs."""
    start = time.perf_counter()
    sampler.load_weights(learner.named_parameters(), policy_version=version)
    seconds = time.perf_counter() - start
    sentinel.check(sampler, lambda ids, prompt: model_logprobs(learner, ids, prompt_length=prompt))
    worst = _logprob_difference(sampler, sentinel, learner, when=f"after load {version}")
    return {"load_seconds": seconds, "logprob_difference": worst}


def _logprob_difference(sampler: Sampler, sentinel: Sentinel, learner: PreTrainedModel, *, when: str) -> float:
    """Samples groups. Returns the largest of their mean differences between sampled and learner's logprobs, in nats.

    Raises:
        CheckFailedError: the difference exceeds the sentinel's bound; `when` begins its message.
    """
    worst = max(_difference(group, learner) for group in _sampled(sampler))
    if not worst < sentinel.tolerance:
        raise CheckFailedError(
            f"{when} sampled tokens have other logprobs than the learner's: {worst:.3g} nats in the mean, allowed"
            f" {sentinel.tolerance:g}"
        )
    return worst


def _sampled(sampler: Sampler) -> list[RolloutGroup]:
    return sampler.generate(_PROMPTS, group_size=2, sampling=_SAMPLING, seeds=range(len(_PROMPTS)))


def _difference(group: RolloutGroup, learner: PreTrainedModel) -> float:
    """Returns the mean difference of a group's logprobs from the learner's, in nats; infinite if one is
    not a number."""
    prompt = tuple(group.prompt_ids)
    differences = [
        abs(mine - other)
        for rollout in group.rollouts
        for mine, other in zip(
            rollout.rollout_logprobs,
            model_logprobs(learner, prompt + rollout.response_ids, prompt_length=len(prompt)),
            strict=True,
        )
    ]
    mean = sum(differences) / len(differences)
    return mean if math.isfinite(mean) else math.inf


def _memory_given_back(sampler: Sampler, sentinel: Sentinel, learner: PreTrainedModel, device: torch.device) -> Figures:
    """Returns the memory that the engine frees while it sleeps. Checks that the cache's memory stays free after a load
    of new weights, and that the engine then samples with the new weights."""
    awake, whole = _free(device)
    sampler.sleep()
    sleeping, _ = _free(device)
    sampler.load_weights(learner.named_parameters(), policy_version=sampler.policy_version + 1)
    loaded, _ = _free(device)
    _logprob_difference(sampler, sentinel, learner, when="after it has slept")
    if not loaded - awake > _GIVEN_BACK * whole:
        raise CheckFailedError("loading weights also reclaims the cache's memory")
    if not sleeping - awake > _GIVEN_BACK * whole:
        raise CheckFailedError(f"the sleeping engine frees only {(sleeping - awake) / 2**30:.2f} GiB")
    return {"given_back_gib": (sleeping - awake) / 2**30}


def _free(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)


def _check_sentinel_fires(sampler: Sampler, sentinel: Sentinel, learner: PreTrainedModel) -> None:
    """Updates the learner without loading the engine, and checks that the sentinel fires."""
    move(learner, 3)
    try:
        sentinel.check(sampler, lambda ids, prompt: model_logprobs(learner, ids, prompt_length=prompt))
    except StaleEngineError:
        return
    raise CheckFailedError("the check does not detect an engine without the learner's weights")
