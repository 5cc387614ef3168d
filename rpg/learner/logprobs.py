"""Computes logprobs of given tokens, entropy and divergences from hidden states. Never holds a tensor [tokens,
vocabulary]."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, assert_never

import torch
from torch import Tensor

from rpg.objectives.distribution import StateDivergence, log_share
from specs.schema.objective import Divergence

CHUNK_ELEMENTS = 2**26
"""Number of logits held at once by default: 256 MiB in float32."""
CHUNK_ON_GPU = 2048
"""Smallest number of tokens in a chunk on a GPU, which reads and writes the head's gradient once per chunk. At a
vocabulary of 151,936 and a hidden size of 2,560 these 3.1 GB take an H100 about 0.9 ms; at 600 TFLOP/s the chunk's
product takes 0.6 ms for 441 tokens and 2.7 ms for 2,048."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    entropy_gradient: bool = False,
    kernel: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax((hidden weight^T + bias) / temperature)[target] and that distribution's entropy, per token.

    Args:
        hidden: [tokens, hidden size], the last hidden states. Differentiable.
        weight: [vocabulary, hidden size], the output head's weight. Differentiable.
        targets: [tokens], int64 token ids; or [tokens, several].
        temperature: divisor of the logits, > 0.
        bias: [vocabulary], the output head's bias, or None. Differentiable.
        chunk: tokens whose logits are held at once; by default as many as fit 256 MiB in float32, on a GPU at least
            CHUNK_ON_GPU.
        entropy_gradient: whether the entropy is differentiable too (for an entropy bonus).
        kernel: whether a GPU may use `rpg.learner.head_kernel`, for one target per token.
    Returns:
        logprobs, in the shape of the targets, and entropy [tokens], nats, float32 (float64 for float64 inputs). Logits
        are float32, even for bfloat16 inputs: bfloat16 has steps of 0.125 nats between 16 and 32. The backward pass
        recomputes the logits of each chunk; its products run in the inputs' dtype.
    Raises:
        ValueError: the shapes do not fit together.
    """
    size = _chunk(hidden, weight, targets, chunk)
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, targets, temperature, size, kernel and targets.dim() == 1, None)
    return logprobs, entropy if entropy_gradient else entropy.detach()


@dataclass(frozen=True, slots=True)
class Compared:
    """The reference's distributions at the tokens of a pass, and the divergence from them."""

    divergence: Divergence
    hidden: Tensor
    """The reference's last hidden states. [tokens, its hidden size]"""
    weight: Tensor
    """Weight of the reference's output head. [its vocabulary, its hidden size]; its vocabulary is at least as large as
    the policy's."""
    bias: Tensor | None
    """Bias of the reference's output head. [its vocabulary]"""


def token_divergences(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    compared: Compared,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, StateDivergence, Tensor]:
    """Returns the results of `token_logprobs`, the divergence from the reference over the whole vocabulary at each
    token's state, and the reference's logprobs of the targets (constant), [tokens].

    The logits of both policies are held for a chunk of tokens at a time, and computed again in the backward pass.

    Args: as in `token_logprobs`; the reference's logits are divided by the same temperature.
    """
    size = _chunk(hidden, weight, targets, chunk)
    apply: Callable[..., tuple[Tensor, ...]] = _TokenLogprobs.apply
    given = hidden, weight, bias, targets, temperature, size, False, compared
    logprobs, entropy, value, reverse, forward, ref_logprobs = apply(*given)
    outside = torch.zeros_like(targets, dtype=torch.bool)
    state = StateDivergence(value, reverse, forward, outside)
    return logprobs, entropy if entropy_gradient else entropy.detach(), state, ref_logprobs


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logprobs of the targets [tokens], and ids and logprobs of the most likely tokens [tokens, count].

    Args: as in `token_logprobs`; vocabulary: number of tokens from which they are chosen, the first ones; by default
        all, and `count` is at most this number.
    """
    size = _chunk(hidden, weight, targets, chunk)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count = min(count, vocabulary or weight.shape[0])
    logprobs = hidden.new_empty(len(hidden), dtype=wide)
    likeliest = hidden.new_empty(len(hidden), count, dtype=wide)
    ids = targets.new_empty(len(hidden), count)
    block, powers = _block(hidden, weight, size), _block(hidden, weight, size)
    head = _head(weight, wide)
    for part in _parts(len(hidden), size):
        shifted, exponentials, _ = _shifted(_logits(block, hidden[part], head, bias, temperature), powers)
        log_total = exponentials.sum(-1).log()
        logprobs[part] = shifted.gather(1, targets[part, None])[:, 0] - log_total
        highest, ids[part] = shifted[:, :vocabulary].topk(count, dim=-1)
        likeliest[part] = highest - log_total[:, None]
    return logprobs, ids, likeliest


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> int:
    """Returns the number of tokens whose logits are held at once. Raises ValueError if shapes do not fit together."""
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape[:1] != hidden.shape[:1]
        or targets.dim() > 2
    ):
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} "
            "must be [tokens, hidden size], [vocabulary, hidden size] and [tokens] or [tokens, several]"
        )
    return chunk or max(CHUNK_ON_GPU if hidden.is_cuda else 1, CHUNK_ELEMENTS // weight.shape[0])


def _shifted(logits: Tensor, powers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits minus the highest of each row (computed in place), their exponentials, and the highest
    logits."""
    highest = logits.amax(-1)
    shifted = logits.sub_(highest[:, None])
    return shifted, torch.exp(shifted, out=powers[: len(shifted)]), highest


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function that keeps only its inputs and one log-normaliser per token for the backward pass. Chunks share
    one block of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        kernel: bool,
        compared: Compared | None,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        in_kernel = kernel and bias is None and wide == torch.float32 and has_head_kernel(hidden.device)
        logprobs = hidden.new_empty(targets.shape, dtype=wide)
        entropy = hidden.new_empty(hidden.shape[0], dtype=wide)
        comparison = None if compared is None else _Comparison(compared, hidden, temperature, chunk)
        normaliser = hidden.new_empty(hidden.shape[0], dtype=torch.float64 if in_kernel else wide)
        block = _block(hidden, weight, chunk)
        powers = block if in_kernel else _block(hidden, weight, chunk)
        head = _head(weight, wide)
        for part in _parts(hidden.shape[0], chunk):
            if in_kernel:
                logits = _logits(block, hidden[part], head, None, 1.0)
                logprobs[part], entropy[part], normaliser[part] = _kernel().logprobs_of(
                    logits, targets[part], temperature
                )
                continue
            if comparison:
                comparison.prepare(part, targets[part], powers)
            shifted, exponentials, highest = _shifted(_logits(block, hidden[part], head, bias, temperature), powers)
            total = exponentials.sum(-1)
            normaliser[part] = highest + total.log()
            chosen = shifted.gather(1, targets[part].reshape(len(shifted), -1)) - total.log()[:, None]
            logprobs[part] = chosen.view(logprobs[part].shape)
            if comparison is None:
                entropy[part] = total.log() - exponentials.mul_(shifted).sum(-1) / total
                continue
            entropy[part] = total.log() - _dot(exponentials, shifted) / total
            comparison.add(part, shifted.sub_(total.log()[:, None]), exponentials, total)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.in_kernel, ctx.comparison = temperature, chunk, in_kernel, comparison
        ctx.set_materialize_grads(False)
        if comparison is None:
            return logprobs, entropy
        comparison.free()
        constant = comparison.reverse, comparison.forward, comparison.ref_logprobs
        ctx.mark_non_differentiable(*constant)
        return logprobs, entropy, comparison.value, *constant

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = entropy.dtype
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        block = _block(hidden, weight, ctx.chunk)
        head = _head(weight, wide)
        for part in _parts(hidden.shape[0], ctx.chunk):
            from_logprobs, from_entropy, from_value = (
                gradient if gradient is None else gradient[part] for gradient in (*gradients, None)[:3]
            )
            if ctx.in_kernel:
                slope, scale = _kernel().slope_of(
                    _logits(block, hidden[part], head, None, 1.0),
                    targets[part],
                    normalisers=normaliser[part],
                    entropies=entropy[part],
                    from_logprobs=from_logprobs,
                    from_entropies=from_entropy,
                    temperature=ctx.temperature,
                    dtype=hidden.dtype,
                )
            else:
                logits = _logits(block, hidden[part], head, bias, ctx.temperature)
                log_p = logits.sub_(normaliser[part, None])
                if from_value is None:
                    slope, scale = _slope(log_p, targets[part], from_logprobs, from_entropy, entropy[part])
                else:
                    kept = None if from_entropy is None else log_p.clone()
                    slope = ctx.comparison.slope(part, log_p, targets[part], from_value, from_logprobs)
                    scale = torch.ones_like(from_value)
                    if kept is not None:
                        slope += _slope(kept, targets[part], None, from_entropy, entropy[part])[0]
            scale = scale / ctx.temperature
            if grad_bias is not None:
                grad_bias.addmv_(slope.T, scale)
            narrow = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (narrow @ weight) * scale[:, None]
            if grad_weight is not None:
                _add_product(grad_weight, narrow.T, (hidden[part] * scale[:, None]).to(hidden.dtype))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


class _Comparison:
    """The divergences over the vocabulary at each state of a pass, and their derivatives, computed chunk by chunk."""

    def __init__(self, compared: Compared, hidden: Tensor, temperature: float, chunk: int) -> None:
        self._compared, self._temperature, self._chunk = compared, temperature, chunk
        self._wide = torch.promote_types(hidden.dtype, torch.float32)

        def of_tokens() -> Tensor:
            return hidden.new_empty(len(hidden), dtype=self._wide)

        self.value, self.reverse, self.forward, self.ref_logprobs = (of_tokens() for _ in range(4))
        self._normaliser, self._inner, self._mass = of_tokens(), of_tokens(), of_tokens()
        self._block: Tensor | None = None

    def prepare(self, part: slice, targets: Tensor, powers: Tensor) -> None:
        """Computes log π_ref of a chunk in the same way as the policy's, so that equal policies have equal bits.
        `powers` is scratch space."""
        logits = self._logits(part)
        if powers.shape[1] != logits.shape[1]:
            powers = torch.empty_like(logits)
        shifted, exponentials, highest = _shifted(logits, powers)
        log_total = exponentials.sum(-1).log()
        self._normaliser[part] = highest + log_total
        shifted.sub_(log_total[:, None])
        self.ref_logprobs[part] = shifted.gather(1, targets[:, None])[:, 0]

    def add(self, part: slice, log_p: Tensor, exponentials: Tensor, total: Tensor) -> None:
        """Computes the divergences of a chunk from log π and π times `total` [chunk, vocabulary]. Overwrites
        `log_p`."""
        assert self._block is not None, "it is prepared"
        log_q = self._block[: len(log_p), : log_p.shape[1]]
        log_ratio, reference = log_p.sub_(log_q), log_q.exp_()
        is_whole = self._block.shape[1] == log_p.shape[1]  # otherwise the reference has further tokens
        mass = torch.ones_like(total) if is_whole else reference.sum(-1)
        reverse, forward = _dot(exponentials, log_ratio) / total, -_dot(reference, log_ratio)
        self._inner[part], self._mass[part] = reverse, mass
        # Both are at least 0, apart from rounding.
        self.reverse[part] = (reverse - 1 + mass).clamp(min=0)
        self.forward[part] = (forward + 1 - mass).clamp(min=0)
        match self._compared.divergence:
            case "reverse":
                self.value[part] = reverse
            case "unnormalized_reverse":
                self.value[part] = reverse - 1 + mass
            case "forward":
                self.value[part] = forward
            case "unnormalized_forward":
                self.value[part] = forward + 1 - mass
            case "jensen_shannon":
                share = log_share(log_ratio)
                self._inner[part] = _dot(exponentials, share) / total / 2
                self.value[part] = self._inner[part] + (_dot(reference, share) + forward) / 2
            case "none":
                self.value[part] = 0
            case never:
                assert_never(never)

    def slope(
        self,
        part: slice,
        log_p: Tensor,
        targets: Tensor,
        from_value: Tensor,
        from_logprobs: Tensor | None,
    ) -> Tensor:
        """Returns the gradient of a chunk's divergences and logprobs with respect to logits / temperature [chunk,
        vocabulary]. Overwrites `log_p`.

        d D / d z_j = φ_j - p_j Σ_i φ_i with φ_j = d D / d log p_j.
        """
        log_q = self._logits(part).sub_(self._normaliser[part, None])[:, : log_p.shape[1]]
        along = torch.zeros_like(from_value) if from_logprobs is None else from_logprobs
        inner, mass = self._inner[part, None], self._mass[part, None]
        value, logprobs = from_value[:, None], along[:, None]
        match self._compared.divergence:
            case "reverse" | "unnormalized_reverse":
                weight = torch.sub(log_p, log_q, out=log_q).mul_(value).sub_(inner * value + logprobs)
                slope = log_p.exp_().mul_(weight)
            case "forward" | "unnormalized_forward":
                slope = log_p.exp_().mul_(value * mass - logprobs).sub_(log_q.exp_().mul_(value))
            case "jensen_shannon":
                weight = log_share(torch.sub(log_p, log_q, out=log_q)).mul_(value / 2).sub_(inner * value + logprobs)
                slope = log_p.exp_().mul_(weight)
            case "none":
                slope = log_p.exp_().mul_(-logprobs)
            case never:
                assert_never(never)
        return slope.scatter_add_(1, targets[:, None], logprobs)

    def free(self) -> None:
        """Frees the block of the reference's logits until the backward pass."""
        self._block = None

    def _logits(self, part: slice) -> Tensor:
        """Returns the reference's logits over the temperature. [chunk, its vocabulary]"""
        compared = self._compared
        if self._block is None:
            self._block = _block(compared.hidden, compared.weight, self._chunk)
        head = _head(compared.weight, self._wide)
        return _logits(self._block, compared.hidden[part], head, compared.bias, self._temperature)


_LONG_ROW = 16_384
"""Number of columns from which a CPU multiplies rows one after the other."""


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Returns the inner product of each pair of rows, without a tensor of the products of long rows. [rows]"""
    if one.is_cuda:
        return torch.bmm(one[:, None], other[:, :, None])[:, 0, 0]
    # On a CPU a batched product of 100 rows of 151,936 takes three times as long as one product after the other, which
    # in turn costs microseconds a row, many times the work on a short row.
    if one.shape[1] < _LONG_ROW:
        return (one * other).sum(-1)
    return torch.stack([torch.dot(*pair) for pair in zip(one, other, strict=True)])


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _block(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Returns an uninitialised block, float32 or wider. [chunk, vocabulary]

    A fresh block for each chunk would cost page faults."""
    shape = (min(chunk, hidden.shape[0]), weight.shape[0])
    return hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, torch.float32))


@cache
def has_head_kernel(device: torch.device) -> bool:
    """Returns whether the device uses `rpg.learner.head_kernel`.

    GPUs use it if Triton is installed and the kernel agrees with PyTorch's operations. Triton's interpreter, in which
    tests run it, counts as a GPU."""
    on_gpu, interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    if not (on_gpu or interpreted) or find_spec("triton") is None:
        return False
    try:
        return _kernel_is_right(device)
    except Exception as error:  # any error of Triton's compiler on this machine
        logging.getLogger(__name__).warning("the output head's kernel is not used: %s", error)
        return False


def _kernel() -> Any:
    from rpg.learner import head_kernel

    return head_kernel


def _kernel_is_right(device: torch.device) -> bool:
    """Compares logprob, entropy and gradient of a few rows with PyTorch's operations."""
    logits = torch.linspace(-8, 8, 3 * 5001, device=device).view(3, -1)[:, torch.arange(5001) * 7 % 5001].contiguous()
    targets = torch.tensor([0, 4095, 5000], device=device)
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    expected = [log_p.gather(1, targets[:, None])[:, 0], entropy, torch.logsumexp(logits.double(), -1)]
    found = _kernel().logprobs_of(logits, targets, 1.0)
    ones = torch.ones(3, device=device)
    gradients = {"from_logprobs": ones, "from_entropies": ones, "temperature": 1.0, "dtype": torch.float32}
    slope, _ = _kernel().slope_of(logits, targets, normalisers=expected[2], entropies=entropy, **gradients)
    expected_slope, _ = _slope(log_p, targets, ones, ones, entropy)
    pairs = zip([*found, slope], [*expected, expected_slope], strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


@cache
def multiplies_into_float32(device: torch.device) -> bool:
    """Returns whether torch, on this device, multiplies bfloat16 matrices into a float32 result, alone and added to
    another matrix.

    It does not on a CPU. On a GPU without such products the output head takes many times as long. Raises torch's error
    if the GPU has no memory left for the test.
    """
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        total = torch.mm(one, one, out_dtype=torch.float32)
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:  # no such kernel, or one that refuses these types
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            raise
        return False
    return True


def _head(weight: Tensor, wide: torch.dtype) -> Tensor:
    """Returns the head's weight for `_logits`: unchanged, or in the wide type if no product writes into that type."""
    return weight if weight.dtype == wide or multiplies_into_float32(weight.device) else weight.to(wide)


def _logits(block: Tensor, hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Returns the chunk's logits, written into the block. [chunk, vocabulary]"""
    logits = block[: hidden.shape[0]]
    if head.dtype == logits.dtype:
        torch.mm(hidden.to(head.dtype), head.T, out=logits)
    else:
        torch.mm(hidden, head.T, out_dtype=logits.dtype, out=logits)
    if bias is not None:
        logits += bias
    return logits.div_(temperature) if temperature != 1.0 else logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes total += left @ right in the wider type. If each chunk's product were rounded to bfloat16, the errors
    would add up to a bias."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif multiplies_into_float32(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _slope(
    log_p: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradient with respect to logits / temperature [chunk, vocabulary], and a factor for each row [chunk].
    Overwrites `log_p`.

    d logprob / d z_j = [j = target] - p_j and d entropy / d z_j = -p_j (log p_j + entropy).
    """
    if grad_logprobs is not None and grad_logprobs.dim() == 2:
        slope = _slope(log_p.clone(), targets[:, 0], None, grad_entropy, entropy)[0] if grad_entropy is not None else 0
        slope = slope - log_p.exp_().mul_(grad_logprobs.sum(-1, keepdim=True))
        return slope.scatter_add_(1, targets, grad_logprobs), torch.ones_like(entropy)
    if grad_entropy is None:
        if grad_logprobs is None:
            return log_p.zero_(), torch.zeros_like(entropy)
        slope = log_p.exp_()
        return slope.scatter_add_(1, targets[:, None], slope.new_full((len(targets), 1), -1)), -grad_logprobs
    slope = log_p.exp() * (log_p + entropy[:, None]) * -grad_entropy[:, None]
    if grad_logprobs is not None:
        slope -= log_p.exp_().mul_(grad_logprobs[:, None])
        slope.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return slope, torch.ones_like(entropy)
