"""What every objective is written in: checked inputs, and the ratios between the three policies."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 60.0
"""Nats. exp(60) = 1.1e26 leaves room in float32 for a product with the log-ratio of a whole response and an advantage;
beyond it a ratio is held there and passes no gradient."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A batch as the equations see it. [B, T] at token level; at sequence level [B, 1], one entry a response."""

    logprobs: Tensor
    """[B, T], log pi(y_t), nats; the only differentiable input; 0 on padding."""
    log_policy: Tensor
    """log pi of what the ratio is taken over: the token, or the whole response. Differentiable."""
    log_ratio: Tensor
    """log pi/pi_old of the same. Differentiable."""
    log_reference: Tensor
    """log pi_ref/pi_old of the same. Constant."""
    advantages: Tensor
    """Constant. At sequence level the mean over the response's tokens."""
    share: Tensor
    """What part of its entry's loss a token bears: 1, or one over the tokens of the response."""
    response_mask: Tensor
    """[B, T], bool."""

    @property
    def ratio(self) -> Tensor:
        """w = pi/pi_old, differentiable."""
        return bounded_exp(self.log_ratio)

    @property
    def reference_weight(self) -> Tensor:
        """q = pi_ref/pi_old, constant."""
        return bounded_exp(self.log_reference)

    @property
    def log_ref_ratio(self) -> Tensor:
        """log r = log pi/pi_ref, differentiable."""
        return self.log_ratio - self.log_reference

    def per_token(self, values: Tensor) -> Tensor:
        """[B, T]: an entry's loss spread over its tokens, so that a response's tokens sum to it."""
        return (values * self.share).expand_as(self.logprobs)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, held at exp(MAX_LOG_RATIO) above it."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def checked(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five inputs at float32 or wider, all but the first constant, padding zeroed so that nothing in it can matter.

    Raises:
        ValueError: a shape that is not [batch, time], or differs from that of `logprobs`.
    """
    named = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if logprobs.dim() != 2 or len(set(shapes.values())) > 1:
        said = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"all inputs must have one shape [batch, time]; given: {said}")
    mask = response_mask.detach() != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    constants = (old_logprobs.detach(), ref_logprobs.detach(), advantages.detach())
    policy, old, ref, advantage = (torch.where(mask, x.to(dtype), 0.0) for x in (logprobs, *constants))
    return policy, old, ref, advantage, mask


def token_terms(
    *, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Terms:
    """Ratios of single tokens."""
    policy, old, ref, advantage, mask = checked(logprobs, old_logprobs, ref_logprobs, advantages, response_mask)
    return Terms(
        logprobs=policy,
        log_policy=policy,
        log_ratio=policy - old,
        log_reference=ref - old,
        advantages=advantage,
        share=torch.ones_like(advantage),
        response_mask=mask,
    )


def sequence_terms(
    *, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Terms:
    """Ratios of whole responses: sums of log-ratios over the response's tokens."""
    policy, old, ref, advantage, mask = checked(logprobs, old_logprobs, ref_logprobs, advantages, response_mask)
    share = 1 / mask.sum(-1, keepdim=True).clamp(min=1).to(policy.dtype)
    return Terms(
        logprobs=policy,
        log_policy=policy.sum(-1, keepdim=True),
        log_ratio=(policy - old).sum(-1, keepdim=True),
        log_reference=(ref - old).sum(-1, keepdim=True),
        advantages=advantage.sum(-1, keepdim=True) * share,
        share=share,
        response_mask=mask,
    )


def geometric_terms(
    *, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Terms:
    """The geometric mean of a response's ratios; every token bears the whole of its entry's loss."""
    whole = sequence_terms(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        response_mask=response_mask,
    )
    return replace(
        whole,
        log_policy=whole.log_policy * whole.share,
        log_ratio=whole.log_ratio * whole.share,
        log_reference=whole.log_reference * whole.share,
        share=torch.ones_like(whole.share),
    )
