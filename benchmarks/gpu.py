"""Measurements of a GPU in an hour: whether results are right, how fast the learner, the sampler and whole steps are.

    python benchmarks/gpu.py campaign [--device cpu] [--rows gpu-figures.jsonl] [--step-limit 540]

Parts, in the order in which the time is best spent:

    correctness  checks of `rpg doctor --gpu`; differences of logprobs: packed rows against each response alone,
                 bfloat16 against float32, a head whose logits are rounded against one whose are not; `rpg.train` on a
                 tiny model: ZeRO 0 to 3, offloading, max_staleness, a kill
    learner      rates of products, attention and memory, and updates of 1.7 and 4 billion parameters: tokens/s, share
                 of the peak and of the rate of products that was measured, memory against the plan, passes against the
                 roofline, and where their time goes; how long the state of an update takes to leave and to come back
    sampler      the transformers engine: tokens/s by slots and by the kernels of attention
    trainer      what a checkpoint costs; the output head by chunk and type of result; whole steps with the transformers
                 engine
    vllm         engines of vLLM: asleep, transfer of weights, tokens/s and difference of logprobs with caches of two
                 types, whole steps at 0.6 and 1.7 billion parameters, and of a mixture of experts whose routing is
                 replayed

Each step is a process of its own, which is ended within the limit with all that it has started. It imports what it
needs while another one measures; steps whose times do not count are made several at once. A row is written when it is
there, also why a step failed, and a later call makes the steps that have no row: on another machine too, given the
rows. Tables are printed at the end, and by `--show` from rows alone. It needs torch, transformers, DeepSpeed, Pydantic
and PyArrow, and no network; steps with vLLM or Liger are left out if the package is missing. With `--device cpu` the
models are tiny: that shows only that everything runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.campaign import Row, Step, command_line


def _step(
    part: str,
    name: str,
    function: str,
    *,
    package: str = "",
    needs_gpu: bool = False,
    memory_gib: float = 0.0,
    alone: bool = True,
    **arguments: Any,
) -> Step:
    arguments = {"name": function, **arguments}
    return Step(part, name, "benchmarks.gpu_steps:on_bench", arguments, package, needs_gpu, memory_gib, alone)


def _doctor(part: str, check: str, *, alone: bool = False, **settings: Any) -> Step:
    return _step(part, check, "doctor", check=check, alone=alone, **settings)


def _updates(size: str, recomputes: bool | str, name: str, **settings: Any) -> Step:
    return _step("learner", f"{size}, {name}", "update", size=size, recomputes=recomputes, **settings)


def _trained(name: str, *, kills: bool = False, **changes: Any) -> Step:
    return _step("correctness", name, "trained", kills=kills, alone=False, **changes)


_LIGER = {"package": "liger_kernel", "kernels": "liger"}
_LARGE = {"memory_gib": 100.0}
"""Master weights, moments and gradients of 4 billion parameters are 64 GB: on smaller cards the optimizer goes to the
host."""
STEPS = (
    _doctor("correctness", "machine"),
    _doctor("correctness", "gradients"),
    _doctor("correctness", "train_and_resume", by_uuid=True),
    _step("correctness", "noise, 1.7B", "noise", size="1.7B", alone=False),
    *(_trained(f"ZeRO {stage}", training={"zero_stage": stage}) for stage in (0, 1, 2, 3)),
    _trained("optimizer offloaded", training={"zero_stage": 2, "offload": {"optimizer": True}}),
    _trained("all offloaded", training={"zero_stage": 3, "offload": {"optimizer": True, "parameters": True}}),
    _trained("max_staleness 1", rollout={"max_staleness": 1}),
    _trained("killed", kills=True),
    _step("learner", "rates", "products"),
    _updates("1.7B", "selective", "recomputing some, Liger", **_LIGER),
    _updates("4B", "selective", "recomputing some, Liger", **_LARGE, **_LIGER),
    _updates("1.7B", False, "recomputing nothing, Liger", **_LIGER),
    _updates("4B", False, "recomputing nothing, Liger, half a pass", tokens=8192, **_LARGE, **_LIGER),
    _updates("1.7B", "selective", "recomputing some"),
    _doctor("learner", "step_zero_2", alone=True),
    _doctor("learner", "step_zero_3", alone=True),
    _updates("1.7B", "selective", "recomputing some, no kernel of the head", head_kernel=False),
    _step("learner", "1.7B, state away", "state_away", size="1.7B"),
    _updates("4B", "selective", "recomputing some", **_LARGE),
    _updates("4B", "selective", "recomputing some, offloading, Liger", offloads=True, **_LIGER),
    _updates("1.7B", True, "recomputing all"),
    _updates("4B", True, "recomputing all, offloading", offloads=True),
    *(
        _step(
            "sampler",
            f"1.7B, {slots} slots, {'any' if cudnn else 'no cuDNN'} kernel, keys in {multiple}s",
            "sampled",
            **{"size": "1.7B", "slots": slots, "engine": "transformers", "cudnn": cudnn, "multiple": multiple},
        )
        for slots, cudnn, multiple in (
            (64, True, 64),
            (64, False, 64),
            (64, False, 1),
            (256, True, 64),
            (256, False, 64),
        )
    ),
    _step("trainer", "pauses", "pauses"),
    *(
        _step("trainer", f"head, {chunk} tokens, {'float32' if exact else 'no float32'} results", "head", **settings)
        for chunk in (441, 2048, 8192)
        for exact in (True, False)
        for settings in ({"chunk": chunk, "exact": exact},)
    ),
    _step("trainer", "whole steps, 0.6B, transformers", "whole_steps", size="0.6B", engine="transformers"),
    _step("trainer", "noise, 4B", "noise", size="4B"),
    _doctor("vllm", "asleep", package="vllm", needs_gpu=True, alone=True),
    _doctor("vllm", "colocated", package="vllm", alone=True),
    _doctor("vllm", "dedicated", package="vllm", alone=True),
    *(
        _step(
            "vllm",
            f"1.7B, 256 slots, vLLM{', cache of eight bits' if kv_cache == 'fp8' else ''}",
            "sampled",
            **{"package": "vllm", "size": "1.7B", "slots": 256, "engine": "vllm", "kv_cache": kv_cache},
            needs_gpu=kv_cache == "fp8",
        )
        for kv_cache in ("auto", "fp8")
    ),
    _step("vllm", "whole steps, 0.6B, vLLM", "whole_steps", package="vllm", size="0.6B", engine="vllm"),
    _step("vllm", "whole steps, 1.7B, vLLM", "whole_steps", package="vllm", size="1.7B", engine="vllm"),
    _step(
        "vllm",
        "whole steps, experts, replay_routing",
        "whole_steps",
        **{"package": "vllm", "size": "experts", "engine": "vllm", "replay_routing": True},
        needs_gpu=True,
    ),
)
"""All of them, most truth first."""


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """Rows of updates get the share of the rate of products that this card was measured to have, and what their passes
    take over the roofline's time."""
    rates = {row["device"]: row["figures"] for row in rows if row["step"] == "rates" and "figures" in row}
    return [_with_shares(row, rates.get(row["device"], {})) for row in rows]


def _with_shares(row: Row, rates: Row) -> Row:
    figures = row.get("figures", {})
    shares = {}
    if "tflops" in figures and rates:
        shares["share_of_measured_products"] = figures["tflops"] / rates["products_tflops"]
    if "roofline_seconds" in figures:
        shares["passes_over_roofline"] = figures["passes_seconds"] / figures["roofline_seconds"]
    return {**row, "figures": {**figures, **shares}} if shares else row


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], STEPS, about=__doc__ or "", derive=with_shares))
