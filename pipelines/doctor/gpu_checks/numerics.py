"""Comparison of the trainer's gradients with those of plain PyTorch in float32, one response at a time."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from pipelines.doctor.gpu_checks.models import TINY, BatchShape, random_step, write_model
from rpg.batches.batch import Microbatch, StepRollouts, microbatch
from rpg.batches.minibatches import cut, plan_step
from rpg.learner.deepspeed import Learner
from rpg.learner.policy import Policy, load_model
from rpg.processes import ranks
from specs.schema.training import Training

Gradients = dict[str, Tensor]
"""Parameter -> its gradient in float32, on the host."""
_SHAPE = BatchShape(prompts=4, group_size=6, prompt_length=24, response_length=96, microbatch_tokens=512, unequal=True)
TOLERANCE = 0.05
"""Largest accepted relative error of the gradient in bfloat16, as norm of the error over norm of the gradient. On a CPU
it is 0.01."""


def gradients_at_every_stage(bench: Bench) -> Figures:
    """Runs a tiny training step in bfloat16 at each ZeRO stage. Checks the gradient, its norm, and that the update
    changes weights."""
    figures: Figures = {}
    step = random_step(TINY["vocab_size"], _SHAPE)
    weights_dir = bench.directory
    if ranks.rank() == 0:
        write_model(weights_dir, TINY, torch.device("cpu"), torch.bfloat16)
    ranks.wait_for_all()
    expected = exact_gradients(weights_dir, step, bench.device)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    for stage in (0, 1, 2, 3):
        settings = training("bfloat16", zero_stage=stage)
        learner = Learner(weights_dir, settings, temperature=1.0, device=bench.device, lends_weights=False)
        passes = cut(step, plan_step(step, settings, packed=learner.packs), bench.device)[0].passes
        add_gradient(learner, passes, step)
        error = relative_error(dict(whole_gradients(learner.policy)), expected)
        figures[f"zero_{stage}_gradient_error"] = error
        if not error < TOLERANCE:
            raise CheckFailedError(f"ZeRO {stage}: the gradient is off by {error:.2g} of its norm, allowed {TOLERANCE}")
        before = learner.logprobs(passes[0])[0].detach()
        measured = learner.update(learning_rate=1e-2)
        if not abs(measured / norm - 1) < TOLERANCE:
            raise CheckFailedError(f"ZeRO {stage}: the gradient's norm is {measured:.4g}, in float32 {norm:.4g}")
        after = learner.logprobs(passes[0])[0].detach()
        if not float((after - before).abs().max()) > 0.01:
            raise CheckFailedError(f"ZeRO {stage}: an update does not change the policy")
        del learner
    return figures


def training(precision: str, *, zero_stage: int = 0, packing: bool = True, shape: BatchShape = _SHAPE) -> Training:
    """Returns settings for one update of all responses."""
    return Training.model_validate(
        {
            **{"steps": 1, "prompts_per_step": shape.prompts, "group_size": shape.group_size},
            **{"precision": precision, "zero_stage": zero_stage, "packing": packing, "ranks": ranks.world_size()},
            "microbatch_tokens": shape.microbatch_tokens,
            "optimizer": {"max_grad_norm": 1e9},
        }
    )


def loss_of(logprobs: Tensor, batch: Microbatch, step: StepRollouts) -> Tensor:
    """Returns a pass's part of the loss. The loss is the mean over all tokens of logprob times a fixed random
    weight."""
    generator = torch.Generator().manual_seed(1)
    weights = batch.look_up(torch.randn(len(step.rollout_logprobs), generator=generator))
    return (weights * logprobs).sum() / len(step.rollout_logprobs)


def add_gradient(learner: Learner, passes: Sequence[Microbatch], step: StepRollouts) -> None:
    """Adds the gradient of this rank's passes."""
    for batch in passes:
        learner.backward(loss_of(learner.logprobs(batch)[0], batch, step))


def exact_gradients(weights_dir: Path, step: StepRollouts, device: torch.device) -> Gradients:
    """Returns the gradients of all responses in float32, without packing and without DeepSpeed."""
    settings = training("float32", packing=False)
    policy = Policy(load_model(weights_dir, settings), temperature=1.0).to(device)
    plan = plan_step(step, settings)
    for rank in range(ranks.world_size()):
        for rows in plan.updates[0].passes[rank]:
            batch = microbatch(step, rows, device)
            logprobs, _ = policy(batch.input_ids, batch.sources, batch.targets)
            loss_of(logprobs, batch, step).backward()  # type: ignore[no-untyped-call]
    return {name: value.grad.cpu() for name, value in policy.named_parameters() if value.grad is not None}


def whole_gradients(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields whole gradients, as DeepSpeed has summed them over passes and ranks. All ranks call it,
    before the update."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in policy.named_parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is None:
            raise CheckFailedError(f"DeepSpeed has no gradient of {name}")
        yield name, gradient.float().cpu()


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Returns the norm of the difference over the norm of the expected gradients, over all parameters."""
    if found.keys() != expected.keys():
        raise CheckFailedError(f"gradients of {len(found)} parameters instead of {len(expected)}")
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(gradient.square().sum()) for gradient in expected.values()))
