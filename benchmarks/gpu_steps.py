"""Functions that `benchmarks/gpu.py` measures by: each makes one measurement and returns its figures by name."""

import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from specs.machine.cards import H100, card_named

if TYPE_CHECKING:
    from pipelines.doctor.gpu_checks.check import Bench
    from rpg.types import RolloutGroup

Row = dict[str, Any]
KINDS = {"attention_ms": ("attn", "attention"), "matrix_ms": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")}
"""Parts of the names of torch's operations, by their names in a profile."""
_COMPARED = 16
"""Responses whose logprobs are compared."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of CUDA in which the host waits for the device, as a profile names them."""


def prepare(device: str, *, by_uuid: bool = False, **_: Any) -> None:
    """Imports what steps need, and names the GPU.

    Args:
        by_uuid: whether it is named by its UUID, as a run that leases it does.
    """
    if by_uuid and device == "cuda":
        from specs.machine.gpu_slots import slots_here

        os.environ["CUDA_VISIBLE_DEVICES"] = slots_here()[0]
    for module in ("transformers.models.qwen3.modeling_qwen3", "rpg.learner.deepspeed_imported", "rpg.trainer"):
        import_module(module)


def on_bench(device: str, *, name: str, **arguments: Any) -> Row:
    """Figures of the function of that name here."""
    arguments.pop("by_uuid", None)
    with bench_on(device) as bench:
        figures: Row = globals()[name](bench, **arguments)
    return figures


def config_of(bench: "Bench", size: str) -> Row:
    """Settings of the Qwen3 model of that size, or of a small mixture of experts; on a CPU of a small model."""
    from pipelines.doctor.gpu_checks.models import SMALL
    from pipelines.planning.model_shape import CONFIGS

    if size == "experts":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        return {**SMALL, "model_type": "qwen3_moe", "head_dim": 64, **experts}
    return CONFIGS[f"Qwen/Qwen3-{size}"] if bench.device.type == "cuda" else SMALL


@contextmanager
def bench_on(device_type: str) -> Iterator["Bench"]:
    """A bench of its own, in a process group of one."""
    import torch

    from pipelines.doctor.gpu_checks.check import Bench
    from rpg.processes import ranks
    from rpg.processes.device import choose_device
    from specs.schema.execution import Resources

    device = choose_device(Resources.model_validate({"device": device_type}))
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    ranks.join(device_type)
    with tempfile.TemporaryDirectory() as directory:
        yield Bench(device, Path(directory))
    ranks.leave()


def doctor(bench: "Bench", check: str) -> Row:
    """One of `rpg doctor --gpu`."""
    from pipelines.doctor.gpu_checks.catalogue import CHECKS

    return dict(next(each for each in CHECKS if each.name == check).load()(bench))


def head(bench: "Bench", chunk: int, exact: bool) -> Row:
    """Forward and backward of the output head. `exact`: its logits are products with a float32 result."""
    import torch

    from benchmarks.logprobs import forget_peak, make_inputs, now, peak_bytes
    from rpg.learner import logprobs

    kind, dtype = bench.device.type, torch.bfloat16
    if not exact:
        logprobs.multiplies_into_float32 = lambda _: False  # type: ignore[assignment]
    hidden, weight, targets = make_inputs(*((2560, 16384) if kind == "cuda" else (8, 64)), kind, dtype)
    upstream = torch.linspace(-1, 1, len(targets), device=kind)
    forget_peak(kind)
    before, seconds = peak_bytes(kind), []
    for _ in range(4):
        hidden.grad = weight.grad = None
        start = now(kind)
        torch.autograd.backward(logprobs.token_logprobs(hidden, weight, targets, chunk=chunk)[0], upstream)
        seconds.append(now(kind) - start)
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    return {"seconds": min(seconds[1:]), "gib": (peak_bytes(kind) - before - gradients) / 2**30}


def products(bench: "Bench") -> Row:
    """Rates that the device sustains in what a training pass consists of, by which the roofline can be set: matrix
    products of an MLP's shape, attention over sequences of 2,048 tokens, a sum of two tensors."""
    import torch

    from benchmarks.logprobs import now

    kind, on_gpu = bench.device.type, bench.device.type == "cuda"
    tokens, hidden, inner, heads = (16384, 2048, 6144, 16) if on_gpu else (256, 64, 192, 2)
    length = 2048 if on_gpu else 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)

    def best(work: Any) -> float:
        seconds = []
        for _ in range(8):
            start = now(kind)
            for _ in range(4):
                work()
            seconds.append((now(kind) - start) / 4)
        return max(min(seconds[2:]), 1e-9)

    rows, weight = random(tokens, hidden), random(inner, hidden)
    query, key, value = (random(tokens // length, heads, length, 128).requires_grad_() for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    upstream = random(*query.shape)
    seen = 4 * query.numel() * length / 2
    alone = best(lambda: attention(query.detach(), key.detach(), value.detach(), is_causal=True))
    both = best(lambda: torch.autograd.grad(attention(query, key, value, is_causal=True), query, upstream))
    added, result = random(64 * tokens, 128), random(64 * tokens, 128)
    moved = 3 * added.numel() * added.element_size()
    figures: Row = {
        "products_tflops": 2 * tokens * hidden * inner / best(lambda: rows @ weight.T) / 1e12,
        "attention_tflops": seen / alone / 1e12,
        "attention_backward_tflops": 2.5 * seen / max(both - alone, 1e-9) / 1e12,
        "moved_tb_per_second": moved / best(lambda: torch.add(added, result, out=result)) / 1e12,
    }
    if on_gpu and (card := card_named(torch.cuda.get_device_name())):
        figures |= {"products_share_of_nominal": figures["products_tflops"] * 1e12 / card.flops}
    return figures


def update(
    bench: "Bench",
    size: str,
    recomputes: bool | str,
    offloads: bool = False,
    kernels: str = "torch",
    head_kernel: bool = True,
    tokens: int = 16384,
) -> Row:
    """Updates of a model of random weights; figures of time by kind are those of one pass, in milliseconds. The
    roofline of its passes is that of this card, on a CPU of an H100.

    Args:
        tokens: of a pass, at most.
    """
    import torch

    from pipelines.doctor.gpu_checks.models import BatchShape
    from pipelines.doctor.gpu_checks.numerics import training
    from pipelines.doctor.gpu_checks.speed import measure_updates
    from pipelines.planning.roofline import Kernels, token_seconds
    from rpg.base.shape import counted
    from rpg.learner import logprobs
    from specs.schema.training import Offload

    on_gpu = bench.device.type == "cuda"
    shape = BatchShape(4, 8, 256, 1568, tokens) if on_gpu else BatchShape(2, 4, 16, 48, 512)
    settings = training("bfloat16", zero_stage=2, shape=shape).model_copy(
        update={
            "gradient_checkpointing": recomputes,
            "offload": Offload(optimizer=offloads),
            "kernels": kernels if on_gpu else "torch",
        }
    )
    if not head_kernel:
        logprobs.has_head_kernel = lambda _: False  # type: ignore[assignment]
    times: Row = {}
    config = config_of(bench, size)
    figures = dict(measure_updates(bench, config, settings, shape, within=lambda: profiled(bench.device.type, times)))
    card = card_named(torch.cuda.get_device_name()) if on_gpu else H100
    if card:
        length = shape.prompt_length + shape.response_length
        fused = Kernels(fused=kernels == "liger", head=head_kernel)
        computed = float(figures["tokens_per_second"]) * float(figures["update_seconds"])
        responses = shape.responses * shape.response_length / computed
        each = token_seconds(counted(config), length=length, responses=responses, kernels=fused, card=card)
        recomputed = {False: 0.0, True: each.recompute_all, "selective": each.recompute_some}[recomputes]
        figures |= {"roofline_seconds": computed * (each.forward + each.backward + recomputed)}
    return {**figures, **times}


def state_away(bench: "Bench", size: str) -> Row:
    """Seconds in which what only updates need leaves the device, and comes back. The first time, which page-locks host
    memory, does not count."""
    import torch

    from benchmarks.logprobs import now
    from pipelines.doctor.gpu_checks.models import BatchShape, random_step, write_model
    from pipelines.doctor.gpu_checks.numerics import add_gradient, training
    from rpg.batches.minibatches import cut, plan_step
    from rpg.learner.deepspeed import Learner
    from specs.schema.training import Offload

    on_gpu, kind = bench.device.type == "cuda", bench.device.type
    config, shape = config_of(bench, size), BatchShape(2, 2, 16, 48, 512)
    settings = training("bfloat16", zero_stage=2, shape=shape)
    settings = settings.model_copy(update={"offload": Offload(while_sampling=True)})
    write_model(bench.directory, config, bench.device, torch.bfloat16)
    learner = Learner(bench.directory, settings, temperature=1.0, device=bench.device, lends_weights=False)
    step = random_step(config["vocab_size"], shape)
    passes = cut(step, plan_step(step, settings, packed=learner.packs), bench.device)[0].passes
    with learner.updating():
        add_gradient(learner, passes, step)
        learner.update(learning_rate=1e-6)
    times, held = [], 0
    for _ in range(3):
        start = now(kind)
        with learner.updating():
            there = now(kind)
            held = torch.cuda.memory_allocated() if on_gpu else 0
        times.append((there - start, now(kind) - there))
    back, out = (min(seconds) for seconds in zip(*times, strict=True))
    away = (held - torch.cuda.memory_allocated()) / 2**30 if on_gpu else 0.0
    return {"away_gib": away, "out_seconds": out, "back_seconds": back}


@contextmanager
def profiled(device_type: str, times: Row) -> Iterator[None]:
    """Fills in the parts of the block's time, in milliseconds: matrix products, attention, the output head whole, all
    other operations, and the time in which the device had nothing to do. The head's products count twice. And how often
    the host waited for the device; the profiler itself waits once at the end."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device_type == "cuda"
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        yield
    wall = (time.perf_counter() - start) * 1e3
    averages = profiler.key_averages()
    print(
        averages.table(sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=40, max_name_column_width=70)
    )
    waits = 0
    kinds = dict.fromkeys(("matrix_ms", "attention_ms", "other_ms", "head_ms"), 0.0)
    for event in averages:
        waits += event.count if event.key in WAITS else 0
        if "CPU" not in str(event.device_type):  # a kernel, which counts for the operation that has started it
            continue
        own, whole = (
            (event.self_device_time_total, event.device_time_total)
            if on_gpu
            else (event.self_cpu_time_total, event.cpu_time_total)
        )
        if event.key in ("_TokenLogprobs", "_TokenLogprobsBackward"):
            kinds["head_ms"] += whole / 1e3
        kinds[
            next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "other_ms")
        ] += own / 1e3
    busy = kinds["matrix_ms"] + kinds["attention_ms"] + kinds["other_ms"]
    times.update(kinds, wall_ms=wall, idle_ms=max(0.0, wall - busy), host_waits=waits)


def noise(bench: "Bench", size: str) -> Row:
    """Differences of the same responses' logprobs, nats: the mean, the 99th percentile and the largest."""
    import torch

    from pipelines.doctor.gpu_checks.models import BatchShape, make_model, random_step
    from pipelines.doctor.gpu_checks.numerics import training
    from rpg.batches.minibatches import cut, plan_step
    from rpg.learner import logprobs as chunks
    from rpg.learner.packing import ATTENTION, Packing
    from rpg.learner.policy import Policy

    on_gpu = bench.device.type == "cuda"
    config = config_of(bench, size)
    shape = BatchShape(2, 4, 128, 512, 4096, unequal=True) if on_gpu else BatchShape(2, 4, 8, 32, 256, unequal=True)
    model = make_model(config, bench.device, torch.bfloat16)
    with torch.no_grad():
        model.base_model.norm.weight.mul_(6)  # logits as far apart as trained ones
    model.config._attn_implementation = ATTENTION
    step = random_step(config["vocab_size"], shape)

    @torch.no_grad()
    def logprobs(*, packed: bool) -> torch.Tensor:
        policy, found = Policy(model, temperature=1.0), torch.empty(len(step.rollout_logprobs))
        plan = plan_step(step, training("bfloat16", packing=packed, shape=shape), packed=packed)
        for batch in cut(step, plan, bench.device)[0].passes:
            packing = Packing(batch.packed, bench.device) if packed else None
            found[batch.tokens] = policy(batch.input_ids, batch.sources, batch.targets, packing=packing)[0].cpu()
        return found

    def apart(name: str, one: torch.Tensor, other: torch.Tensor) -> Row:
        difference = (one - other).abs()
        figures = {"mean": difference.mean(), "p99": difference.quantile(0.99), "largest": difference.max()}
        return {f"{name}_{figure}": float(value) for figure, value in figures.items()}

    padded, packed_row = logprobs(packed=False), logprobs(packed=True)
    exact_logits = chunks._logits

    def rounded_logits(*arguments: Any) -> torch.Tensor:
        logits = exact_logits(*arguments)
        return logits.copy_(logits.bfloat16())

    chunks._logits = rounded_logits
    rounded = logprobs(packed=False)
    chunks._logits = exact_logits
    model.float()
    exact = logprobs(packed=False)
    return {
        **apart("packed_against_padded", packed_row, padded),
        **apart("bfloat16_against_float32", padded, exact),
        **apart("head_rounded_against_head_in_float32", rounded, padded),
        **apart("head_rounded_against_float32", rounded, exact),
    }


def trained(bench: "Bench", kills: bool, **changes: Any) -> Row:
    """Four steps of `rpg.train`. `kills`: the trainer is killed behind its first checkpoint, and started again."""
    from pipelines.doctor.gpu_checks.training import recorded, started, train, write_inputs, write_run

    write_inputs(bench.directory)
    run = write_run(bench, "run", **changes)
    start = time.perf_counter()
    if kills:
        with started(run) as process:
            while process.poll() is None and not list((run / "checkpoints").glob("step-*")):
                time.sleep(0.01)
    train(run)
    steps = recorded(run)
    seconds = sorted(metrics["time/step"] for metrics in steps.values())
    attempts = len(list((run / "attempts").iterdir()))
    whole = time.perf_counter() - start
    return {"steps": len(steps), "attempts": attempts, "step_seconds": seconds[len(seconds) // 2], "seconds": whole}


def pauses(bench: "Bench") -> Row:
    """Seconds that the loop waits for a checkpoint's copy, and waits for the device in a pass of the learner."""
    import torch

    from pipelines.doctor.gpu_checks.models import MIDDLE, SMALL, BatchShape, random_step, write_model
    from pipelines.doctor.gpu_checks.numerics import add_gradient, training
    from rpg.batches.minibatches import cut, plan_step
    from rpg.checkpoints.pieces import StateCopy
    from rpg.learner.deepspeed import Learner

    on_gpu = bench.device.type == "cuda"
    config = MIDDLE if on_gpu else SMALL
    shape = BatchShape(8, 8, 256, 768, 16384) if on_gpu else BatchShape(4, 4, 16, 48, 512)
    settings = training("bfloat16", zero_stage=2, shape=shape)
    write_model(bench.directory, config, bench.device, torch.bfloat16)
    learner = Learner(bench.directory, settings, temperature=1.0, device=bench.device, lends_weights=False)
    step = random_step(config["vocab_size"], shape)
    passes = cut(step, plan_step(step, settings, packed=learner.packs), bench.device)[0].passes
    for _ in range(3):  # after two of them DeepSpeed's timers, if they are on, begin to wait for the device
        add_gradient(learner, passes, step)
        learner.update(learning_rate=1e-6)
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(torch.cuda, "synchronize", wraps=torch.cuda.synchronize) as asked,
    ):
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        add_gradient(learner, passes, step)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    waits = asked.call_count + sum("synchroniz" in str(warning.message) for warning in caught)
    learner.update(learning_rate=1e-6)
    if on_gpu:
        torch.cuda.synchronize()
    start, copy = time.perf_counter(), StateCopy()
    learner.save(copy)
    stall = time.perf_counter() - start
    start = time.perf_counter()
    copy.write(bench.directory)
    return {
        "state_gib": copy.num_bytes / 2**30,
        "copy_seconds": stall,
        "write_seconds": time.perf_counter() - start,
        "waits_per_pass": waits / len(passes) if on_gpu else "not counted",
    }


def sampled(
    bench: "Bench",
    size: str,
    slots: int,
    engine: str,
    cudnn: bool = True,
    multiple: int = 64,
    kv_cache: str = "auto",
) -> Row:
    """Response tokens a second of a model of random weights, every slot in use from the first token to the last. With
    vLLM also how far its logprobs are from those of transformers, nats.

    Args:
        cudnn: whether torch's attention may take cuDNN's kernels.
        multiple: keys that attention sees come in multiples of it, see `rpg.samplers.transformers.decoding`.
        kv_cache: type of vLLM's cache.
    """
    import torch

    from benchmarks.logprobs import now
    from pipelines.doctor.gpu_checks.models import write_model
    from rpg.samplers import SamplerSettings, open_sampler
    from rpg.samplers.transformers import decoding
    from rpg.types import Sampling
    from specs.schema.rollout import TransformersRollout, VllmRollout

    on_gpu, kind = bench.device.type == "cuda", bench.device.type
    prompt, response = (256, 512) if on_gpu else (16, 16)
    concurrent = slots if on_gpu else slots // 16
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    decoding._WIDTHS[kind] = multiple
    precision = bench.precision
    config = config_of(bench, size)
    write_model(bench.directory, config, bench.device, getattr(torch, precision))
    choice = {"engine": engine, "max_concurrent": concurrent}
    if engine == "vllm":
        keys = {"memory_fraction": 0.85, "cpu_cache_gib": 0.25, "kv_cache": kv_cache}
        rollout = VllmRollout.model_validate({**choice, **keys})
    else:
        rollout = TransformersRollout.model_validate(choice)
    settings = SamplerSettings(bench.directory, bench.device, prompt + response, seed=0, precision=precision)
    start = now(kind)
    sampler = open_sampler(rollout, settings)
    opened = now(kind) - start
    prompts = torch.randint(2, config["vocab_size"], (concurrent // 4, prompt)).tolist()
    seeds, times = range(len(prompts)), {}
    for tokens in (response // 8, response):  # the first is not counted
        sampling, start = Sampling(temperature=1.0, top_p=1.0, max_response_length=tokens), now(kind)
        groups = sampler.generate(prompts, group_size=4, sampling=sampling, seeds=seeds)
        seconds = now(kind) - start
        count = sum(len(rollout.response_ids) for group in groups for rollout in group.rollouts)
        times = {"tokens_per_second": count / seconds, "step_ms": seconds / tokens * 1e3, "open_seconds": opened}
    sampler.close()
    return times | (_difference(bench, groups) if engine == "vllm" else {})


def _difference(bench: "Bench", groups: "Sequence[RolloutGroup]") -> Row:
    """The mean difference between the sampler's logprobs and those of transformers on the same weights, nats."""
    import torch

    from rpg.pretrained import model_of
    from rpg.samplers.transformers.sampler import model_logprobs

    model = model_of(bench.directory, dtype=bench.precision).to(bench.device)
    differences = []
    for group in groups[:_COMPARED]:
        rollout = group.rollouts[0]
        ids = (*group.prompt_ids, *rollout.response_ids)
        theirs = torch.tensor(model_logprobs(model, ids, prompt_length=len(group.prompt_ids)))
        differences.append((torch.tensor(rollout.rollout_logprobs) - theirs).abs().mean().item())
    return {"logprob_difference": sum(differences) / len(differences)}


def whole_steps(bench: "Bench", size: str, engine: str, replay_routing: bool = False) -> Row:
    """Whole steps of `rpg.train`: rollouts of 64 responses, their scores, one update. The engine and the learner take
    turns on the device if the engine is vLLM."""
    from pipelines.doctor.gpu_checks.training import recorded, train, write_inputs, write_run

    on_gpu = bench.device.type == "cuda"
    write_inputs(bench.directory, config_of(bench, size) if on_gpu else None)
    turns = engine == "vllm" and on_gpu
    rollout: Row = {"engine": engine, "max_response_length": (768 if turns else 256) if on_gpu else 8}
    if engine == "vllm":
        rollout |= {"memory_fraction": 0.85, "sleep": turns, "cpu_cache_gib": 0.25, "replay_routing": replay_routing}
    training = {"zero_stage": 2, "minibatches": 1, "offload": {"while_sampling": turns}}
    training |= {"gradient_checkpointing": "selective", "prompts_per_step": 8, "microbatch_tokens": 8192}
    run = write_run(bench, "run", rollout=rollout, training=training)
    train(run)
    steps = list(recorded(run).values())[1:]
    names = [name for name in steps[0] if name.startswith("time/") or name in ("memory/peak_gib", "mfu")]
    return {name: sorted(metrics.get(name, 0.0) for metrics in steps)[len(steps) // 2] for name in sorted(names)}
