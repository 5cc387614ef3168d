"""Measurement of a medium-sized model's training step: its rate, its share of the device's peak, and its memory
compared with the estimate."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from pipelines.doctor.gpu_checks.models import MIDDLE, SMALL, BatchShape, random_step, write_model
from pipelines.doctor.gpu_checks.numerics import add_gradient, training
from pipelines.planning.memory import memory_estimate
from rpg.base.shape import ModelShape, shape_of_config
from rpg.batches.minibatches import cut, plan_step
from rpg.learner.deepspeed import Learner
from rpg.learner.kernels import kernels_for
from rpg.pretrained import config_of
from rpg.processes import ranks
from specs.machine.cards import peak_flops
from specs.schema.experiment import Experiment
from specs.schema.training import Training

_OVER_ESTIMATE = 1.1
"""Largest accepted ratio of memory to the estimate, which is an upper bound with an accuracy of 10 %."""
_LEAST_SHARE = 0.1
"""Least accepted share of the GPU's peak. `rpg plan` expects 0.15 to 0.45; a wrong kernel or a throttled GPU reaches a
tenth of that."""
_ON_GPU = BatchShape(prompts=16, group_size=8, prompt_length=256, response_length=768, microbatch_tokens=16384)
_ON_CPU = BatchShape(prompts=4, group_size=4, prompt_length=16, response_length=48, microbatch_tokens=512)
_UPDATES = 2
"""Number of timed updates, after one that is not timed."""


def step_at_zero_2(bench: Bench) -> Figures:
    """Measures updates with gradients and optimizer sharded."""
    return _step(bench, zero_stage=2)


def step_at_zero_3(bench: Bench) -> Figures:
    """Measures updates with the weights sharded as well."""
    return _step(bench, zero_stage=3)


def _step(bench: Bench, *, zero_stage: int) -> Figures:
    on_gpu = bench.device.type == "cuda"
    config, shape = (MIDDLE, _ON_GPU) if on_gpu else (SMALL, _ON_CPU)
    settings = training(
        bench.precision, zero_stage=zero_stage, shape=replace(shape, prompts=shape.prompts * ranks.world_size())
    )
    figures = measure_updates(bench, config, settings, shape)
    _check_memory(figures)
    share = figures.get("share_of_peak")
    if isinstance(share, float) and not share > _LEAST_SHARE:
        raise CheckFailedError(f"{share:.0%} of the peak, {figures['tokens_per_second']:.0f} tokens/s a rank")
    return figures


def measure_updates(
    bench: Bench,
    config: dict[str, Any],
    settings: Training,
    shape: BatchShape,
    *,
    within: Callable[[], AbstractContextManager[object]] | None = None,
) -> Figures:
    """Updates a model with random weights as the trainer does, and measures the updates on this rank.

    Args:
        config: settings of the model, see `models`.
        settings: prompts_per_step, group_size and microbatch_tokens are used unchanged.
        shape: lengths of prompts and responses.
        within: context of one additional, untimed pass, for example a profiler.
    Returns:
        Seconds of an update and of its passes, tokens that this rank computes a second, and on a GPU the share of its
        peak in the whole update and in the passes alone (an optimizer on the host makes the GPU wait), the peak memory
        that torch allocated, and the estimate of `rpg plan` for passes as long as the longest, GiB.
    """
    device, first = bench.device, ranks.rank() == 0
    if first:
        write_model(bench.directory, config, device, getattr(torch, settings.precision))
    ranks.wait_for_all()
    step = random_step(config["vocab_size"], replace(shape, prompts=settings.prompts_per_step))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    learner = Learner(bench.directory, settings, temperature=1.0, device=device, lends_weights=False)
    passes = cut(step, plan_step(step, settings, packed=learner.packs), device)[0].passes
    times, norm = [], 0.0
    for _ in range(1 + _UPDATES):
        start = _now(device)
        add_gradient(learner, passes, step)
        passed = _now(device)
        norm = learner.update(learning_rate=1e-6)
        times.append((passed - start, _now(device) - start))
    if within:
        with within():
            add_gradient(learner, passes[:1], step)
    if not math.isfinite(norm):
        raise CheckFailedError(f"the gradient's norm is {norm}")
    tokens = sum(batch.input_ids.numel() for batch in passes if batch.counts)
    sampled = sum(len(batch.targets) for batch in passes if batch.counts)
    of_passes, of_update = (min(seconds) for seconds in zip(*times[1:], strict=True))
    rate = 1 / of_update
    figures: Figures = {
        "update_seconds": of_update,
        "passes_seconds": of_passes,
        "tokens_per_second": tokens * rate,
    }
    if device.type == "cuda":
        model = shape_of_config(config)
        length = shape.prompt_length + shape.response_length
        flops = model.training_flops(tokens, sampled, pairs=tokens * length / 2)
        figures |= {"tflops": flops * rate / 1e12}
        if peak := peak_flops(torch.cuda.get_device_name(device)):
            figures["share_of_peak"] = flops * rate / peak
            figures["share_of_peak_in_passes"] = flops / of_passes / peak
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        kernels = kernels_for(settings, config_of(bench.directory), device)
        longest = max(batch.input_ids.numel() for batch in passes)
        known = settings.model_copy(update={"kernels": kernels, "microbatch_tokens": longest})
        figures["estimated_gib"] = estimated_bytes(model, known, shape) / 2**30
    return figures


def estimated_bytes(model: ModelShape, settings: Training, shape: BatchShape) -> int:
    """Returns the bytes that `rpg plan` estimates for the learner alone: no sampler, no cache, no
    separate reference."""
    spec = Experiment.model_validate(
        {
            "name": "gpu-check",
            "model": {"source": "pretrained", "path": "random"},
            "data": {
                "train": [{"source": "parquet", "name": "random", "path": "random.parquet"}],
                "max_prompt_length": shape.prompt_length,
            },
            "reward": {"type": "exact_match"},
            "rollout": {"max_response_length": shape.response_length},
            "objective": {"type": "rpg"},
            "reference": {"source": "behaviour", "update": None},
            "training": settings.model_dump(),
        }
    )
    return replace(memory_estimate(spec, model), sampler=0, kv_cache=0).total


def _check_memory(figures: Figures) -> None:
    """Raises CheckFailedError if a rank took more memory than the estimate allows."""
    peak, estimate = figures.get("peak_gib"), figures.get("estimated_gib")
    if isinstance(peak, float) and isinstance(estimate, float) and not peak < _OVER_ESTIMATE * estimate:
        raise CheckFailedError(f"{peak:.1f} GiB were used, but `rpg plan` estimates {estimate:.1f}")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
