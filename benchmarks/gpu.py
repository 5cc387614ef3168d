"""Figures of the learner on a GPU, in the order in which half an hour of one is best spent.

    python benchmarks/gpu.py [SECTION...] [--device cpu] [--out gpu-figures]

    numerics  gradients at every ZeRO stage and in packed rows, bfloat16 against float32; the output head at
              V = 151,936 and h = 2,560 in chunks of 441, 2,048 and 8,192 tokens, with and without products of bfloat16
              that have a float32 result
    learner   an update of 1.7 and 4 billion parameters, passes of 16,384 packed tokens: tokens/s, share of the peak,
              memory against the estimate, and where a pass's time goes; with all, some and no activations recomputed,
              and with Liger's kernels, which take the extra `liger`; how long the state of an update takes to leave
              the GPU for sampling and to come back
    noise     mean and largest differences of logprobs: packed rows against each response alone, bfloat16 against
              float32, a head whose logits are rounded to bfloat16 against one whose are not
    trainer   `rpg.train` with the transformers engine on a tiny model: ZeRO 0 to 3, offloading, max_staleness, and a
              kill with the run that goes on after it
    pauses    what a checkpoint costs the loop, and how often a pass waits for the device

It needs torch, transformers and DeepSpeed, and no vLLM. Each measurement is a process of its own with a time limit, so
that one that fails costs the others nothing. Every section prints a table, and leaves its rows in OUT/SECTION.json.
With `--device cpu` the models are tiny: that shows only that everything runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from pipelines.doctor.gpu_checks.check import Bench

sys.path.insert(0, str(Path(__file__).parents[1]))
Row = dict[str, Any]
LIMIT_SECONDS = 420
KINDS = {"attention_ms": ("attn", "attention"), "matrix_ms": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")}
"""Parts of the names of torch's operations, by what a profile calls them."""
BILLIONS = {"1.7B": "Qwen/Qwen3-1.7B", "4B": "Qwen/Qwen3-4B"}


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


def check(bench: "Bench", name: str) -> Row:
    """One of `rpg doctor --gpu`."""
    from pipelines.doctor.gpu_checks.catalogue import CHECKS

    return dict(next(each for each in CHECKS if each.name == name).load()(bench))


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


def update(bench: "Bench", size: str, recomputes: bool | str, offloads: bool, kernels: str = "torch") -> Row:
    """Updates of a model of random weights; the figures of time by kind are of the passes of one, in milliseconds."""
    from pipelines.doctor.gpu_checks.models import SMALL, BatchShape
    from pipelines.doctor.gpu_checks.numerics import training
    from pipelines.doctor.gpu_checks.speed import measure_updates
    from pipelines.planning.model_shape import CONFIGS
    from specs.schema.training import Offload

    on_gpu = bench.device.type == "cuda"
    shape = BatchShape(8, 8, 256, 1792, 16384) if on_gpu else BatchShape(4, 4, 16, 48, 512)
    settings = training("bfloat16", zero_stage=2, shape=shape).model_copy(
        update={
            "gradient_checkpointing": recomputes,
            "offload": Offload(optimizer=offloads),
            "kernels": kernels if on_gpu else "torch",
        }
    )
    times: Row = {}
    config = CONFIGS[BILLIONS[size]] if on_gpu else SMALL
    figures = measure_updates(bench, config, settings, shape, within=lambda: profiled(bench.device.type, times))
    return {**figures, **times}


def state_away(bench: "Bench", size: str) -> Row:
    """Seconds in which what only updates need leaves the device, and comes back. The first time, which page-locks host
    memory, does not count."""
    import torch

    from benchmarks.logprobs import now
    from pipelines.doctor.gpu_checks.models import SMALL, BatchShape, random_step, write_model
    from pipelines.doctor.gpu_checks.numerics import add_gradient, training
    from pipelines.planning.model_shape import CONFIGS
    from rpg.batches.minibatches import cut, plan_step
    from rpg.learner.deepspeed import Learner
    from specs.schema.training import Offload

    on_gpu, kind = bench.device.type == "cuda", bench.device.type
    config, shape = CONFIGS[BILLIONS[size]] if on_gpu else SMALL, BatchShape(2, 2, 16, 48, 512)
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
    """Fills in where the block's time went, in milliseconds: matrix products, attention, the output head whole, all
    other operations, and the time in which the device had nothing to do. The head's products count twice."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device_type == "cuda"
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        yield
    wall = (time.perf_counter() - start) * 1e3
    kinds = dict.fromkeys(("matrix_ms", "attention_ms", "other_ms", "head_ms"), 0.0)
    for event in profiler.key_averages():
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
    times.update(kinds, wall_ms=wall, idle_ms=max(0.0, wall - busy))


def noise(bench: "Bench", size: str) -> Row:
    """Differences of the same responses' logprobs, nats: the mean, the 99th percentile and the largest."""
    import torch

    from pipelines.doctor.gpu_checks.models import SMALL, BatchShape, make_model, random_step
    from pipelines.doctor.gpu_checks.numerics import training
    from pipelines.planning.model_shape import CONFIGS
    from rpg.batches.minibatches import cut, plan_step
    from rpg.learner import logprobs as chunks
    from rpg.learner.packing import ATTENTION, Packing
    from rpg.learner.policy import Policy

    on_gpu = bench.device.type == "cuda"
    config = CONFIGS[BILLIONS[size]] if on_gpu else SMALL
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
    for _ in range(3):  # after two of them DeepSpeed's timers, where they are on, begin to wait for the device
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


SECTIONS: dict[str, dict[str, tuple[Callable[..., Row], dict[str, Any]]]] = {
    "numerics": {
        "gradients": (check, {"name": "gradients"}),
        "packing": (check, {"name": "packing"}),
        **{
            f"head, {chunk} tokens, {'float32' if exact else 'no float32'} results": (
                head,
                {"chunk": chunk, "exact": exact},
            )
            for chunk in (441, 2048, 8192)
            for exact in (True, False)
        },
    },
    "learner": {
        # With its optimizer beside what 16,384 tokens keep where nothing is recomputed it would not fit 80 GB.
        "1.7B, offloading": (update, {"size": "1.7B", "recomputes": False, "offloads": True}),
        "1.7B, Liger": (update, {"size": "1.7B", "recomputes": False, "offloads": False, "kernels": "liger"}),
        "1.7B, recomputing": (update, {"size": "1.7B", "recomputes": True, "offloads": False}),
        "1.7B, recomputing some": (update, {"size": "1.7B", "recomputes": "selective", "offloads": False}),
        "1.7B, recomputing some, Liger": (
            update,
            {"size": "1.7B", "recomputes": "selective", "offloads": False, "kernels": "liger"},
        ),
        "1.7B, state away": (state_away, {"size": "1.7B"}),
        # Master weights, moments and gradients of 4 billion parameters are 64 GB: the optimizer goes to the host.
        "4B, recomputing, offloading": (update, {"size": "4B", "recomputes": True, "offloads": True}),
        "4B, recomputing some, offloading": (update, {"size": "4B", "recomputes": "selective", "offloads": True}),
    },
    "noise": {"1.7B": (noise, {"size": "1.7B"}), "4B": (noise, {"size": "4B"})},
    "trainer": {
        **{f"ZeRO {stage}": (trained, {"kills": False, "training": {"zero_stage": stage}}) for stage in range(4)},
        "optimizer offloaded": (
            trained,
            {"kills": False, "training": {"zero_stage": 2, "offload": {"optimizer": True}}},
        ),
        "all offloaded": (
            trained,
            {"kills": False, "training": {"zero_stage": 3, "offload": {"optimizer": True, "parameters": True}}},
        ),
        "max_staleness 1": (trained, {"kills": False, "rollout": {"max_staleness": 1}}),
        "killed": (trained, {"kills": True}),
    },
    "pauses": {"0.6B": (pauses, {})},
}
"""Section -> its measurements by name: a function and its arguments."""


def measured(section: str, name: str, device_type: str) -> Row:
    """One measurement in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "row.json"
        command = [sys.executable, __file__, section, "--device", device_type, "--measure", name, "--out", str(out)]
        with open(Path(directory) / "log", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(LIMIT_SECONDS)
                failure = f"exited with {code}"
            except subprocess.TimeoutExpired:
                failure = f"longer than {LIMIT_SECONDS} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if out.exists():
                return {"measurement": name, **json.loads(out.read_text())}
            log.seek(0)
            sys.stderr.write(log.read()[-3000:])
        return {"measurement": name, "failed": failure}


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Returns 1 where a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("gpu-figures"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if asked.measure:
        function, arguments = SECTIONS[asked.sections[0]][asked.measure]
        if asked.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        with bench_on(asked.device) as bench:
            row = function(bench, **arguments)
        asked.out.write_text(json.dumps(row))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for section in asked.sections or SECTIONS:
        print(f"{section}, {asked.device}", flush=True)
        rows = []
        for name in SECTIONS[section]:
            row = measured(section, name, asked.device)
            rows.append(row)
            failed |= "failed" in row
            figures = ", ".join(f"{key} {shown(value)}" for key, value in row.items() if key != "measurement")
            print(f"  {name:42} {figures}", flush=True)
            (asked.out / f"{section}.json").write_text(json.dumps(rows, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
