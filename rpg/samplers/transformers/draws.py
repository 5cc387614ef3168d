"""Sampling of tokens by inversion of the distribution function. The uniform noise depends only on the response."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024
"""Number of positions whose noise is generated at once."""


def uniforms(seed: int, response: int, block: int, size: int = BLOCK) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) for `size` <= BLOCK positions of a response, from block * BLOCK on.

    They are counter-based (Philox), so that they depend only on (seed, response, position), and on nothing else in the
    batch.
    """
    key = np.array([seed % 2**64, response], dtype=np.uint64)
    counter = np.array([0, 0, block, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(size)


def draw(logits: Tensor, noise: Tensor, *, temperature: float, top_p: float, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """Returns one token per row, and its logprob under the distribution from which it was drawn.

    Args:
        logits: [rows, vocabulary], float32.
        noise: [rows], float64 in [0, 1); not used at temperature 0.
        temperature: logits are divided by it; 0 takes the likeliest token, with logprob 0 since it is certain.
        top_p: nucleus probability in (0, 1]: the smallest set of likeliest tokens that holds it, renormalised.
        top_k: number of the likeliest tokens that are kept, with all that tie with the last of them, before the nucleus
            is selected; 0 keeps all.
    Returns:
        tokens [rows] int64, logprobs [rows] float32, nats.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    if top_p < 1:
        logprobs = torch.log_softmax(logprobs.masked_fill(~nucleus(logprobs, top_p), -torch.inf), dim=-1)
    # float64: in float32 the sum over a large vocabulary would lose the tail to rounding.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, (noise * cumulative[:, -1])[:, None], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Returns a mask [rows, vocabulary] of the smallest set of likeliest tokens whose probability reaches top_p
    (Holtzman 2020)."""
    ordered, indices = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    return torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, indices, before < top_p)
