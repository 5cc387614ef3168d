"""The output head's kernel against PyTorch's operations, in Triton's interpreter: prints the worst differences as JSON.

Run with TRITON_INTERPRET=1. The kernel's block is small, so that vocabularies have all remainders of it.
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
    worst, cases = 0.0, 0
    for case in itertools.product((1, 7, 8, 9, 15, 16, 17, 23), (1.0, 0.7), (False, True), (5, 3)):
        logprobs.has_head_kernel = lambda _: True
        kernel = passed(*case)
        logprobs.has_head_kernel = lambda _: False
        for one, other in zip(kernel, passed(*case), strict=True):
            worst = max(worst, float((one - other).norm() / other.norm().clamp_min(1)))
        cases += 1
    print(json.dumps({"used": used, "cases": cases, "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
