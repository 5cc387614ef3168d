"""From rewards to advantages: a baseline taken off, a scale divided by."""

import torch
from torch import Tensor

EPSILON = 1e-4
"""Reward units, added to a standard deviation before dividing by it, as in TRL."""


def advantages(rewards: Tensor, group_ids: Tensor, *, baseline: str, scale: str) -> Tensor:
    """(R - baseline) / scale of each response.

    Args:
        rewards: [responses], reward units; all responses of the step, over all ranks.
        group_ids: [responses], integer; responses to one prompt share it. Need not be contiguous.
        baseline: group_mean; leave_one_out (mean of the group's others); batch_mean; none.
        scale: none; group_std or batch_std: divide by the standard deviation (ddof 1) of the rewards plus 1e-4. A
            single response has no spread and is not scaled.
    Returns:
        [responses], of the dtype of `rewards`, at least float32; constant. Exactly 0 where a group's rewards are all
        equal and the baseline is the group's.
    Raises:
        ValueError: shapes that differ, or leave_one_out on a group of one.
    Source: group mean and std, Shao 2024, arXiv:2402.03300; leave-one-out, Ahmadian 2024, arXiv:2402.14740.
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
    return (centred / _scale(exact, group, scale)).to(torch.promote_types(rewards.dtype, torch.float32))


def varying_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[responses], bool: whether the rewards of the response's group differ at all; where not, no advantage is left.

    Source: DAPO's dynamic sampling, Yu 2025, arXiv:2503.14476, keeps these.
    """
    return _varies(rewards.detach().double(), torch.unique(group_ids, return_inverse=True)[1])


def _baseline(rewards: Tensor, group: Tensor, baseline: str) -> Tensor:
    if baseline == "none":
        return torch.zeros_like(rewards)
    if baseline == "batch_mean":
        return rewards.mean().expand_as(rewards)
    sums, sizes = _group_sum(rewards, group), _group_sum(torch.ones_like(rewards), group)
    if baseline == "group_mean":
        return sums / sizes
    if bool((sizes < 2).any()):
        raise ValueError("leave_one_out needs at least two responses in each group")
    return (sums - rewards) / (sizes - 1)


def _scale(rewards: Tensor, group: Tensor, scale: str) -> Tensor:
    if scale == "none":
        return torch.ones_like(rewards)
    members = torch.zeros_like(group) if scale == "batch_std" else group
    sizes = _group_sum(torch.ones_like(rewards), members)
    mean = _group_sum(rewards, members) / sizes
    deviation = torch.sqrt(_group_sum((rewards - mean) ** 2, members) / (sizes - 1).clamp(min=1))
    return torch.where(sizes > 1, deviation + EPSILON, 1.0)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """[responses]: each one's group total."""
    totals = values.new_zeros(int(group.max()) + 1 if group.numel() else 0)
    return totals.index_add(0, group, values)[group]


def _varies(rewards: Tensor, group: Tensor) -> Tensor:
    highest = rewards.new_full((group.numel(),), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    lowest = rewards.new_full((group.numel(),), torch.inf).scatter_reduce(0, group, rewards, "amin")
    return (highest > lowest)[group]
