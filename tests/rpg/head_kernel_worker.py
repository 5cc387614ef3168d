"""The output head's kernel against PyTorch's operations, in Triton's interpreter: prints the worst differences as JSON.

The difference of a value counts as a share of the value, or as it is below 1; of a gradient as a share of the tensor's
largest. Run with TRITON_INTERPRET=1. The kernel's block is small, so that vocabularies lie on all sides of it.
"""

import itertools
import json

import torch
from torch import Tensor

from rpg.learner import head_kernel, logprobs
from rpg.learner.logprobs import has_head_kernel, token_logprobs


def passed(vocabulary: int, temperature: float, entropy_gradient: bool, chunk: int) -> list[Tensor]:
    """Logprobs, entropies, and gradients of hidden states and weights."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(5, 8, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (5,), generator=generator)
    found = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, entropy_gradient=entropy_gradient
    )
    steps = torch.linspace(-1, 1, 5)
    (steps * found[0] + (0.3 * steps * found[1] if entropy_gradient else 0)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [found[0].detach(), found[1].detach(), hidden.grad, weight.grad]


def main() -> None:
    device = torch.device("cpu")
    used = has_head_kernel(device)
    head_kernel._BLOCK = 8
    worst = {"values": 0.0, "gradients": 0.0}
    cases = list(itertools.product((1, 7, 8, 9, 17), (1.0, 0.7), (False, True), (5, 3)))
    for case in cases:
        logprobs.has_head_kernel = lambda _: True
        kernel = passed(*case)
        logprobs.has_head_kernel = lambda _: False
        for index, (one, other) in enumerate(zip(kernel, passed(*case), strict=True)):
            kind, size = ("values", other.abs().clamp_min(1)) if index < 2 else ("gradients", other.abs().max())
            share = torch.where(one == other, 0, (one - other).abs() / size)
            worst[kind] = max(worst[kind], float(share.nan_to_num(float("inf")).max()))
    print(json.dumps({"used": used, "cases": len(cases), "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
