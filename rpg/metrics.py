"""A step's figures. A mean over tokens travels as sum and count, so that microbatches and ranks add up exactly."""

import resource
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rpg.batches.batch import Microbatch, StepRollouts
from rpg.processes import ranks

_LARGEST = ("ratio", "rollout_ratio")
"""Per-token tensors whose maximum is a metric, NAME/max."""
_TOKEN_MEANS = {
    "kl/reverse": "kl_reverse",
    "kl/forward": "kl_forward",
    "kl/behaviour": "kl_behaviour",
    "clip_fraction/low": "clipped_low",
    "clip_fraction/high": "clipped_high",
    "clip_fraction/dual": "clipped_dual",
    "ratio/mean": "ratio",
    "entropy": "entropy",
    "kl/rollout": "kl_rollout",
    "rollout_ratio/mean": "rollout_ratio",
    "clip_fraction/rollout": "corrected",
}
"""Metric -> name of the per-token tensor (`rpg.objectives.diagnostics`, and the entropy) whose mean it is."""


class UpdateMetrics:
    """Sums over the tokens of a step's updates; a token counts once for each update that trains on it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tokens = torch.zeros((), dtype=torch.float64)
        self._largest = torch.zeros(len(_LARGEST), dtype=torch.float64)
        self._loss = torch.zeros((), dtype=torch.float64)
        self._grad_norms: list[float] = []

    @property
    def loss(self) -> float:
        """The sum of this rank's parts of the updates' losses so far."""
        return float(self._loss)

    def add(self, batch: Microbatch, seen: dict[str, Tensor], loss: Tensor) -> None:
        """One pass.

        Args:
            seen: of each response token: what `diagnostics` says of it, and `entropy`. [n] each
            loss: the pass's part of the update's loss.
        """
        if not batch.counts:
            seen = {name: values[:0] for name, values in seen.items()}
        wide = {name: values.to("cpu", torch.float64) for name, values in seen.items()}
        for name, values in wide.items():
            self._sums[name] = self._sums.get(name, 0) + values.sum()
        for name in ("ratio", "weight"):
            self._sums[f"{name}_squared"] = self._sums.get(f"{name}_squared", 0) + wide[name].square().sum()
        self._tokens += wide["ratio"].numel()
        if wide["ratio"].numel():
            self._largest = torch.maximum(self._largest, torch.stack([wide[name].max() for name in _LARGEST]))
        self._loss += loss.detach().to("cpu", torch.float64)

    def update_done(self, grad_norm: float) -> None:
        """Ends an update, whose gradient had this global norm before clipping."""
        self._grad_norms.append(grad_norm)

    def reduce(self, largest: Mapping[str, float] | None = None) -> dict[str, float]:
        """The figures over all ranks, by the names that SQL knows.

        Args:
            largest: more figures of this rank, the same ones on every rank, of which the ranks' largest counts.
        """
        largest = largest or {}
        names = sorted(self._sums)
        values = ranks.total(torch.stack([self._tokens, self._loss, *(self._sums[name] for name in names)]))
        tokens, loss = max(1.0, float(values[0])), float(values[1])
        sums = dict(zip(names, values[2:].tolist(), strict=True))
        figures = {metric: sums[name] / tokens for metric, name in _TOKEN_MEANS.items()}
        maxima = torch.cat([self._largest, torch.tensor(list(largest.values()), dtype=torch.float64)])
        maxima_names = [*(f"{name}/max" for name in _LARGEST), *largest]
        return {
            **figures,
            **dict(zip(maxima_names, ranks.largest(maxima).tolist(), strict=True)),
            "ratio/ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 0.0,
            "weight/variance": max(0.0, sums["weight_squared"] / tokens - (sums["weight"] / tokens) ** 2),
            "loss": loss / len(self._grad_norms),
            "grad_norm": sum(self._grad_norms) / len(self._grad_norms),
        }


def rollout_metrics(step: StepRollouts) -> dict[str, float]:
    """What can be said of a step's responses before training on them. Standard deviations have ddof 1."""
    rewards = step.rewards.astype(np.float64)
    sizes = np.bincount(step.group_ids)
    groups = np.split(rewards, np.cumsum(sizes)[:-1])
    return {
        **step.figures,
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "zero_std_fraction": float(np.mean([np.ptp(group) == 0 for group in groups])),
        "response_length/mean": float(step.lengths.mean()),
        "response_length/max": float(step.lengths.max()),
        "truncated_fraction": step.finish_reasons.count("length") / len(step.finish_reasons),
    }


def staleness_metrics(step: StepRollouts, trained_version: int) -> dict[str, float]:
    """How many steps the policy had been trained since it sampled the step's responses."""
    steps = float(trained_version - step.policy_version)
    return {"staleness/mean": steps, "staleness/max": steps}


def peak_memory_gib(device: torch.device) -> float:
    """Of this process: on a GPU what torch allocated at most, on a CPU the largest resident set. GiB"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
