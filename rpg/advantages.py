"""Turns rewards into advantages: subtracts a baseline and divides by a scale."""

from collections.abc import Sequence
from itertools import accumulate
from typing import assert_never

import torch
from torch import Tensor

from rpg.objectives.kl import reward_penalties
from rpg.processes import ranks
from specs.schema.objective import Advantage, Baseline, Objective, PublishedObjective, Scale
from specs.schema.schedule import constant

EPSILON = 1e-4
"""Constant added to a standard deviation before dividing by it, as in TRL. Reward units."""
ROUNDING = 1e-9
"""A float64 sum counts as 0 if its size is below this share of the largest magnitude among its terms. Such a sum is 0
in exact arithmetic, and the sign of its rounding error would decide the side of the clip."""


def advantages(rewards: Tensor, group_ids: Tensor, *, baseline: Baseline, scale: Scale) -> Tensor:
    """Returns the advantage of each response: (R - baseline) / scale.

    Args:
        rewards: [responses], reward units; all responses of the step, over all ranks.
        group_ids: [responses], integer; responses to one prompt share it. Need not be contiguous.
        baseline: group_mean; leave_one_out (mean of the group's others); batch_mean; none.
        scale: none; group_std or batch_std: divide by the standard deviation (ddof 1) of the rewards plus 1e-4. A
            single response has no spread and is not scaled. group_mean: divide by the mean of the group's rewards, or
            return 0 if that mean is not positive.
    Returns:
        [responses], of the dtype of `rewards`, at least float32; constant. Exactly 0 if the baseline is the group's
        and all rewards of the group are equal, or if the difference from the baseline is below ROUNDING times the
        largest reward that enters the baseline.
    Raises:
        ValueError: the shapes differ, or leave_one_out is used on a group of one.
    Source: group mean and std, Shao 2024, arXiv:2402.03300; leave-one-out, Ahmadian 2024, arXiv:2402.14740; division by
    the group's mean, MaxRL, arXiv:2602.02710.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must be one-dimensional and equal"
        )
    exact = rewards.detach().double()
    group = torch.unique(group_ids, return_inverse=True)[1]
    centred = exact - _baseline(exact, group, baseline)
    if baseline in ("group_mean", "leave_one_out"):
        centred = torch.where(_varies(exact, group), centred, 0.0)
    if baseline != "none":
        members = torch.zeros_like(group) if baseline == "batch_mean" else group
        centred = _rounded(centred, _group_max(exact.abs(), members))
    return (centred / _scale(exact, group, scale)).to(torch.promote_types(rewards.dtype, torch.float32))


def normalized_sum(terms: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Returns, for each response, the sum over k of w_k (r_k - group mean of r_k) / (group deviation of r_k + 1e-4).

    Args:
        terms: [terms, responses], each in its own units; all responses of the step, over all ranks. NaN marks a
            response that could not be scored: it gets the value of its group that is worst for the sum, or 0 if no
            response of the group could be scored.
        weights: [terms, responses]; the same throughout a group.
        group_ids: [responses], as in `advantages`.
    Returns:
        [responses], at least float32; constant. A term that is the same throughout a group adds exactly 0 there, and a
        sum below ROUNDING of its largest term is exactly 0.
    Source: GDPO, arXiv:2601.05242, before its normalisation over the batch.
    """
    group = torch.unique(group_ids, return_inverse=True)[1]
    total, largest = torch.zeros(2, len(group_ids), dtype=torch.float64)
    for values, weight in zip(terms.detach().double(), weights.double(), strict=True):
        worth = torch.where(values.isnan(), torch.inf, values * weight.sign())
        least = worth.new_full((len(group),), torch.inf).scatter_reduce(0, group, worth, "amin")[group]
        known = torch.where(least.isinf(), 0.0, torch.where(values.isnan(), least * weight.sign(), values))
        part = weight * advantages(known, group_ids, baseline="group_mean", scale="group_std")
        total += part
        largest = torch.maximum(largest, part.abs())
    return _rounded(total, largest).to(torch.promote_types(terms.dtype, torch.float32))


def turn_returns(rewards: Sequence[Sequence[float]]) -> Tensor:
    """Returns, for each turn of a response, the sum of the rewards of this turn and all later ones.

    Args:
        rewards: for each response, the rewards of its turns, reward units; at least one.
    Returns:
        [responses, turns], float64. A response with fewer turns repeats the return of its last turn in the remaining
        places: its estimate of the return from there on.
    Example:
        >>> turn_returns([[1.0, 2.0, 4.0], [8.0]]).tolist()
        [[7.0, 6.0, 4.0], [8.0, 8.0, 8.0]]
    """
    most = max(map(len, rewards), default=0)
    sums = [list(accumulate(reversed(each)))[::-1] for each in rewards]
    return torch.tensor([each + each[-1:] * (most - len(each)) for each in sums], dtype=torch.float64)


def token_advantages(
    objective: Objective,
    advantage: Advantage,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    held: Tensor | None = None,
    turns: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Tensor:
    """Returns the advantage of every sampled token that this rank holds, with responses laid end to end.

    Applies penalty in the reward, baseline, scale and whitening as the spec says. All ranks call it.

    Args:
        rewards: [responses], reward units; of all responses of the step, over all ranks. Or [responses, turns]: the
            return from each turn on, see `turn_returns`.
        group_ids: [responses]; responses to one prompt share it.
        lengths: [responses], sampled tokens of each.
        held: indices of the responses that this rank holds; each is held by one rank. If omitted, all.
        turns: [tokens], the turn of each; needed if `rewards` are returns.
        old_logprobs, ref_logprobs: [tokens], nats; needed if `objective.penalizes_reward`.
    Returns:
        [tokens] of the responses held, at least float32; constant.
    Raises:
        ValueError: as in `advantages`, or logprobs are needed and missing.
    """
    exact = rewards.detach().double().reshape(len(rewards), -1)
    held = torch.arange(len(lengths), device=lengths.device) if held is None else held
    here = lengths[held]
    later = torch.zeros(int(here.sum()), dtype=torch.float64, device=rewards.device)
    if isinstance(objective, PublishedObjective) and objective.penalizes_reward:
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError("`kl_in: reward` needs `old_logprobs` and `ref_logprobs`")
        penalties = constant(objective.kl_coef) * reward_penalties(
            old_logprobs - ref_logprobs, here, estimator=objective.kl_estimator, credit=objective.kl_credit
        )
        if objective.kl_credit == "to_go":
            later = penalties
        else:
            of_held = penalties[here.cumsum(0) - here]
            exact = exact - ranks.total(exact.new_zeros(len(exact)).index_copy(0, held, of_held))[:, None]
    columns = [
        advantages(column, group_ids, baseline=advantage.baseline, scale=advantage.scale) for column in exact.unbind(1)
    ]
    owners = torch.repeat_interleave(held, here)
    tokens = torch.stack(columns, 1)[owners, torch.zeros_like(owners) if turns is None else turns] - later
    if advantage.whiten == "tokens":
        tokens = whitened(tokens)
    return tokens.to(torch.promote_types(rewards.dtype, torch.float32))


def response_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns the mean over each response's tokens, which are laid end to end. [responses], float64"""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return values.new_zeros(len(lengths), dtype=torch.float64).index_add(0, owner, values.double()) / lengths


def with_signal(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns whether each response has a token with nonzero advantage; tokens are laid end to end. [responses],
    bool"""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), dtype=torch.bool).index_put((owner[values != 0],), torch.tensor(True))


def whitened(values: Tensor) -> Tensor:
    """Returns (x - mean) / sqrt(variance + 1e-8), ddof 1, over the values of all ranks. All ranks call it.

    The result is exactly 0 if the difference from the mean is below ROUNDING times the largest value.

    Source: Hu 2025, arXiv:2501.03262; epsilon from OpenRLHF. Means and variances of ranks are combined as in Chan 1983.
    """
    count = values.numel()
    own = (count, float(values.mean()) if count else 0.0, float(values.var(correction=1)) if count > 1 else 0.0)
    parts = ranks.gather((*own, float(values.abs().max()) if count else 0.0))
    total = sum(count for count, *_ in parts)
    mean = sum(count / total * mean for count, mean, *_ in parts)
    within = sum((count - 1) / (total - 1) * variance for count, _, variance, _ in parts if count > 1)
    between = sum(count / (total - 1) * (each - mean) ** 2 for count, each, *_ in parts) if total > 1 else 0.0
    centred = _rounded(values - mean, values.new_tensor(max(largest for *_, largest in parts)))
    return centred * torch.rsqrt(values.new_tensor(within + between) + 1e-8)


def overlong_penalties(lengths: Tensor, *, max_response_length: int, buffer: int) -> Tensor:
    """Returns DAPO's soft punishment: 0 up to max_response_length - buffer tokens, then linear down to -1 at the
    maximum.

    Args:
        lengths: [responses], tokens, the end token included.
        buffer: tokens before the maximum in which the punishment grows, at least 1.
    Returns:
        [responses], reward units, to be added to the reward.
    Source: Yu 2025, arXiv:2503.14476, eq. 13.
    """
    return -((lengths.double() - (max_response_length - buffer)) / buffer).clamp(0, 1)


def _baseline(rewards: Tensor, group: Tensor, baseline: Baseline) -> Tensor:
    sums, sizes = _group_sum(rewards, group), _group_sum(torch.ones_like(rewards), group)
    match baseline:
        case "none":
            return torch.zeros_like(rewards)
        case "batch_mean":
            return rewards.mean().expand_as(rewards)
        case "group_mean":
            return sums / sizes
        case "leave_one_out":
            if bool((sizes < 2).any()):
                raise ValueError("leave_one_out needs at least two responses in each group")
            return (sums - rewards) / (sizes - 1)
        case never:
            assert_never(never)


def _scale(rewards: Tensor, group: Tensor, scale: Scale) -> Tensor:
    match scale:
        case "none":
            return torch.ones_like(rewards)
        case "group_mean":
            mean = _rounded(_baseline(rewards, group, "group_mean"), _group_max(rewards.abs(), group))
            return torch.where(mean > 0, mean, torch.inf)
        case "group_std":
            members = group
        case "batch_std":
            members = torch.zeros_like(group)
        case never:
            assert_never(never)
    sizes = _group_sum(torch.ones_like(rewards), members)
    mean = _group_sum(rewards, members) / sizes
    deviation = torch.sqrt(_group_sum((rewards - mean) ** 2, members) / (sizes - 1).clamp(min=1))
    return torch.where(sizes > 1, deviation + EPSILON, 1.0)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Returns the total of each response's group. [responses]"""
    totals = values.new_zeros(int(group.max()) + 1 if group.numel() else 0)
    return totals.index_add(0, group, values)[group]


def _rounded(sums: Tensor, largest: Tensor) -> Tensor:
    """Returns the sums. Each sum below ROUNDING times the largest magnitude among its terms becomes 0."""
    return torch.where(sums.abs() < ROUNDING * largest, 0.0, sums)


def _group_max(values: Tensor, group: Tensor) -> Tensor:
    """Returns the largest value of each response's group. [responses]"""
    return values.new_full((group.numel(),), -torch.inf).scatter_reduce(0, group, values, "amax")[group]


def _varies(rewards: Tensor, group: Tensor) -> Tensor:
    return _group_max(rewards, group) + _group_max(-rewards, group) > 0
