"""Triton kernels for logprob and entropy of rows of logits, and for their gradient. Each kernel reads a row once.

PyTorch's operations traverse the float32 logits of a chunk about ten times in a forward pass and five in a backward
pass. Importing this needs Triton, which torch's CUDA wheels include.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Number of a row's logits that a program processes at once."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _forward(logits, targets, logprobs, entropies, normalisers, size, temperature, block: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Computes one row per program: running maximum, sum of exponentials, and sum of exponentials times their
    exponents."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    start = logits + row * size
    highest = tl.max(tl.load(start + columns, mask=columns < size, other=float("-inf")) / temperature, 0)
    total = highest * 0
    weighted = highest * 0
    for first in range(0, size, block):
        inside = first + columns < size
        values = tl.load(start + first + columns, mask=inside, other=float("-inf")) / temperature
        higher = tl.maximum(highest, tl.max(values, 0))
        fall = highest - higher
        shifted = values - higher
        powers = tl.exp(shifted)
        rescale = tl.exp(fall)
        # The sums are relative to the old maximum: rescale them to the new one.
        weighted = rescale * (weighted + fall * total) + tl.sum(powers * tl.where(inside, shifted, 0), 0)
        total = rescale * total + tl.sum(powers, 0)
        highest = higher
    chosen = tl.load(start + tl.load(targets + row)) / temperature
    logarithm = tl.log(total)
    tl.store(logprobs + row, chosen - highest - logarithm)
    tl.store(entropies + row, logarithm - weighted / total)
    tl.store(normalisers + row, highest.to(tl.float64) + logarithm.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _backward(  # type: ignore[no-untyped-def,unused-ignore]
    logits,
    slopes,
    targets,
    normalisers,
    entropies,
    from_logprobs,
    from_entropies,
    size,
    temperature,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Computes one block of a row per program; see `rpg.learner.logprobs._slope`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    target = tl.load(targets + row)
    values = tl.load(logits + row * size + columns, mask=inside, other=0.0) / temperature
    # Rounding a normaliser of 16 to float32 loses up to 1e-6: the rounding error is subtracted separately.
    normaliser = tl.load(normalisers + row)
    rounded = normaliser.to(tl.float32)
    log_p = values - rounded - (normaliser - rounded.to(tl.float64)).to(tl.float32)
    slope = tl.exp(log_p)
    is_target = columns == target
    if with_entropy:
        of_logprob = tl.load(from_logprobs + row)
        of_entropy = tl.load(from_entropies + row)
        slope = -slope * (of_entropy * (log_p + tl.load(entropies + row)) + of_logprob)
        slope += tl.where(is_target, of_logprob, 0)
    else:
        slope -= tl.where(is_target, 1, 0)
    tl.store(slopes + row * size + columns, slope.to(slopes.dtype.element_ty), mask=inside)


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs, entropies and log-normalisers (float64) of the rows of contiguous float32 logits. [tokens]
    each"""
    tokens, size = logits.shape
    logprobs, entropies = logits.new_empty(tokens), logits.new_empty(tokens)
    normalisers = logits.new_empty(tokens, dtype=torch.float64)
    _forward[(tokens,)](logits, targets, logprobs, entropies, normalisers, size, temperature, block=_block(size))
    return logprobs, entropies, normalisers


def slope_of(
    logits: Tensor,
    targets: Tensor,
    *,
    normalisers: Tensor,
    entropies: Tensor,
    from_logprobs: Tensor | None,
    from_entropies: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient with respect to logits / temperature [tokens, vocabulary], in `dtype`, and a factor for each
    row [tokens]."""
    tokens, size = logits.shape
    slopes = logits.new_empty(tokens, size, dtype=dtype)
    zeros = torch.zeros_like(entropies)
    of_logprobs = zeros if from_logprobs is None else from_logprobs.contiguous()
    of_entropies = zeros if from_entropies is None else from_entropies.contiguous()
    block = _block(size)
    _backward[(tokens, triton.cdiv(size, block))](
        logits,
        slopes,
        targets,
        normalisers,
        entropies,
        of_logprobs,
        of_entropies,
        size,
        temperature,
        with_entropy=from_entropies is not None,
        block=block,
    )
    return slopes, torch.ones_like(zeros) if from_entropies is not None else -of_logprobs


def _block(size: int) -> int:
    return min(_BLOCK, 1 << (size - 1).bit_length())
