"""Logprobs of given tokens, and the entropy, from hidden states; [tokens, vocabulary] is never held."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**26
"""Logits held at once by default: 256 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden weight^T + bias) / temperature)[target] and the entropy of that distribution, per token.

    Args:
        hidden: [tokens, hidden size], the last hidden states. Differentiable.
        weight: [vocabulary, hidden size], of the output head. Differentiable.
        targets: [tokens], int64 token ids.
        temperature: logits are divided by it, > 0.
        bias: [vocabulary] of the output head, or none. Differentiable.
        chunk: tokens whose logits are held at once; by default as many as fit 256 MiB in float32.
        entropy_gradient: whether the entropy is differentiable too (for an entropy bonus).
    Returns:
        logprobs [tokens] and entropy [tokens], nats, float32 (float64 for float64 inputs). Products run in the
        inputs' dtype, softmax in float32. The backward pass computes the logits of each chunk again.
    Raises:
        ValueError: shapes that do not fit together.
    """
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} "
            "must be [tokens, hidden size], [vocabulary, hidden size] and [tokens]"
        )
    size = chunk if chunk is not None else max(1, CHUNK_ELEMENTS // weight.shape[0])
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, targets, temperature, size)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the inputs and one log-normaliser a token between the passes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normaliser = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
        for part in _parts(hidden.shape[0], chunk):
            logits = _logits(hidden[part], weight, bias, temperature)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = chosen - normaliser[part]
            probabilities = torch.exp(logits - normaliser[part, None])
            entropy[part] = normaliser[part] - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_logprobs, grad_entropy = gradients
        wide = normaliser.dtype
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        for part in _parts(hidden.shape[0], ctx.chunk):
            log_p = _logits(hidden[part], weight, bias, ctx.temperature).sub_(normaliser[part, None])
            slope = _slope(
                log_p,
                targets[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                entropy[part],
            ).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            narrow = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                _add_product(grad_weight, narrow.T, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[chunk, vocabulary], float32 or wider, a fresh tensor."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    return logits.div_(temperature) if temperature != 1.0 else logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's wider type: products rounded to bfloat16 chunk by chunk would add up
    to a bias."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _slope(
    log_p: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """[chunk, vocabulary]: the gradient with respect to the logits over the temperature. Overwrites `log_p` where it
    can.

    d logprob / d z_j = [j = target] - p_j and d entropy / d z_j = -p_j (log p_j + entropy).
    """
    if grad_entropy is None:
        if grad_logprobs is None:
            return log_p.zero_()
        slope = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        slope = log_p.exp() * (log_p + entropy[:, None]) * -grad_entropy[:, None]
        if grad_logprobs is not None:
            slope -= log_p.exp_().mul_(grad_logprobs[:, None])
    if grad_logprobs is not None:
        slope.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return slope
