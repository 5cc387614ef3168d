"""Computes the values of a step's metrics, under the names that specs/metrics.py describes.

A mean over tokens travels as sum and count, so that microbatches and ranks add up exactly.
"""

import resource
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpg.batches.batch import Microbatch, StepRollouts
from rpg.processes import ranks
from rpg.processes.device_memory import peak_of_gpu
from rpg.rewards import Score
from rpg.routing import Routing, balancing_loss
from rpg.types import Problem
from specs.schema.experiment import Experiment
from specs.schema.schedule import Place, schedules_in

TOKEN_MEANS = {
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
"""Metric -> the per-token tensor whose mean it is."""
SCHEDULED: Mapping[Place, str] = {
    ("objective", "kl_coef"): "kl_coef",
    ("objective", "clip", "low"): "clip/low",
    ("objective", "clip", "high"): "clip/high",
    ("objective", "clip", "dual"): "clip/dual",
    ("objective", "max_ratio"): "max_ratio",
    ("rollout", "temperature"): "temperature",
    ("training", "entropy_coef"): "entropy_coef",
    ("reference", "update", "every_steps"): "reference/every_steps",
    ("reference", "update", "ema_decay"): "reference/ema_decay",
}
"""Field of the spec that accepts a schedule or a closed loop -> metric that records its value. The learning rate is
always recorded."""
OF_FORMULAS = ("objective", "parameters")
"""Path in the spec of the schedules that are recorded as `parameter/NAME`."""
_MAXIMA = {"ratio/max": "ratio", "rollout_ratio/max": "rollout_ratio"}
"""Metric -> the per-token tensor whose maximum it is."""
_SQUARED = ("ratio", "weight")
"""Per-token tensors whose squares are summed as well."""


class UpdateMetrics:
    """Sums over the tokens of a step's updates. A token counts once for each update that trains on it.

    The sums stay on the device of the passes until `reduce`, so that no pass waits for a copy. A skipped update counts
    for nothing: the caller continues with a copy from before it.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._grad_norms: list[float] = []
        self._routing: Tensor | None = None
        """Sums over the passes of the current update: counts and probabilities of a mixture's experts. [2, layers,
        experts]"""
        self._routings: list[Tensor] = []
        """Sums of this kind for each update that was made."""
        self.num_skipped = 0
        """Number of updates that were skipped."""

    @property
    def loss(self) -> float:
        """Returns the sum of this rank's parts of the losses of all updates so far. Waits for the device."""
        return float(self._loss)

    def add(self, batch: Microbatch, per_token: Mapping[str, Tensor], loss: Tensor) -> None:
        """Adds one pass.

        Args:
            per_token: `PassLoss.diagnostics`, and `entropy`. [n] each
            loss: the pass's part of the update's loss.
        """
        counted = slice(None) if batch.counts else slice(0)
        wide = {name: values[counted].to(torch.float64) for name, values in per_token.items()}
        for name, values in wide.items():
            self._sums[name] = self._sums.get(name, 0) + values.sum()
        for name in _SQUARED:
            self._sums[f"{name}_squared"] = self._sums.get(f"{name}_squared", 0) + wide[name].square().sum()
        self._tokens += wide["ratio"].numel()
        if wide["ratio"].numel():
            self._maxima = torch.maximum(self._maxima, torch.stack([wide[name].max() for name in _MAXIMA.values()]))
        self._loss += loss.detach()

    def add_routing(self, routing: Routing, *, counted: bool) -> None:
        """Adds the routing of a pass's tokens to experts. Does nothing if the tokens are not `counted`."""
        sums = torch.stack([routing.counts, routing.probabilities.detach()]).to(torch.float64) * counted
        self._routing = sums if self._routing is None else self._routing + sums

    def update_done(self, grad_norm: float) -> None:
        """Ends an update whose gradient had this global norm before clipping."""
        self._grad_norms.append(grad_norm)
        if self._routing is not None:
            self._routings.append(self._routing)
            self._routing = None

    def copy(self) -> "UpdateMetrics":
        """Returns a copy of the sums as they are now."""
        return deepcopy(self)

    def reduce(self, maxima: Mapping[str, float] | None = None) -> dict[str, float]:
        """Returns the metrics over all ranks, or only `maxima` if no update was made. All ranks call it.

        Args:
            maxima: further metrics, with the same names on every rank: each becomes the largest of the ranks' values.
        """
        maxima = maxima or {}
        if not self._grad_norms:
            largest = ranks.largest(torch.tensor(list(maxima.values()), dtype=torch.float64))
            return dict(zip(maxima, largest.tolist(), strict=True))
        names = sorted(self._sums)
        own = torch.stack([self._loss, *(self._sums[name] for name in names)]).cpu()
        totals = ranks.total(torch.cat([torch.tensor([self._tokens], dtype=torch.float64), own]))
        tokens, loss = max(1.0, float(totals[0])), float(totals[1])
        sums = dict(zip(names, totals[2:].tolist(), strict=True))
        others = torch.tensor(list(maxima.values()), dtype=torch.float64)
        largest = ranks.largest(torch.cat([self._maxima.cpu(), others]))
        return {
            **token_metrics(sums, tokens),
            **dict(zip([*_MAXIMA, *maxima], largest.tolist(), strict=True)),
            **(routing_metrics(ranks.total(torch.stack(self._routings).cpu())) if self._routings else {}),
            "loss": loss / len(self._grad_norms),
            "grad_norm": sum(self._grad_norms) / len(self._grad_norms),
        }


def token_metrics(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Returns the metrics, given sums over this many tokens.

    Args:
        sums: sums of per-token tensors under their names, and of their squares under NAME_squared. A mean whose sum is
            missing is left out.
    """
    return {
        **{metric: sums[name] / tokens for metric, name in TOKEN_MEANS.items() if name in sums},
        "ratio/ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 0.0,
        "weight/variance": max(0.0, sums["weight_squared"] / tokens - (sums["weight"] / tokens) ** 2),
    }


def routing_metrics(updates: Tensor) -> dict[str, float]:
    """Returns the metrics of a mixture of experts.

    Args:
        updates: counts and summed probabilities of each update, over all ranks. [updates, 2, layers, experts]
    """
    losses = [
        balancing_loss(counts, probabilities, float(probabilities.sum()) / len(counts))
        for counts, probabilities in updates
    ]
    counts = updates[:, 0].sum(0)
    return {
        "aux_loss": float(torch.stack(losses).mean()),
        "experts/largest_load": float((counts / counts.mean(dim=1, keepdim=True)).max()),
        "experts/idle_fraction": float((counts == 0).double().mean()),
    }


def rollout_metrics(
    step: StepRollouts, trained_rewards: NDArray[np.floating[Any]] | None = None, problems: Sequence[Problem] = ()
) -> dict[str, float]:
    """Returns the metrics of a step's responses before any training on them. Standard deviations have ddof 1.

    Args:
        trained_rewards: the rewards from which advantages are computed, [B] or [B, turns]; None means the step's
            rewards.
        problems: all training problems, the step's among them. None leaves out the metrics by set.
    """
    rewards = step.rewards.astype(np.float64)
    sizes = np.bincount(step.group_ids)
    groups = np.split(rewards if trained_rewards is None else trained_rewards, np.cumsum(sizes)[:-1])
    return {
        "reward/error_fraction": sum(score.error is not None for score in step.scores) / len(step.scores),
        **step.figures,
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        **_term_means(step.scores),
        **_means_by_set(step, rewards, problems),
        "zero_std_fraction": float(np.mean([not np.ptp(group, axis=0).any() for group in groups])),
        "response_length/mean": float(step.num_sampled.mean()),
        "response_length/max": float(step.num_sampled.max()),
        "truncated_fraction": step.finish_reasons.count("length") / len(step.finish_reasons),
        **_turn_metrics(step),
    }


def _turn_metrics(step: StepRollouts) -> dict[str, float]:
    """Returns the counts of turns and calls per response; empty if the environment gives no turn."""
    if not step.turn_counts:
        return {}
    calls = sum(counts.calls for counts in step.turn_counts)
    return {
        "turns/mean": sum(counts.sampled for counts in step.turn_counts) / len(step.turn_counts),
        "calls/mean": calls / len(step.turn_counts),
        "calls/error_fraction": sum(counts.errors for counts in step.turn_counts) / max(1, calls),
        "time/tools": sum(counts.seconds for counts in step.turn_counts),
        **(
            {"turn_reward/mean": sum(map(sum, step.turn_rewards)) / len(step.turn_counts)}
            if any(counts.rewards for counts in step.turn_counts)
            else {}
        ),
        "given_fraction": 1.0 - float(step.num_sampled.sum() / step.lengths.sum()),
    }


def _term_means(scores: Sequence[Score], of_set: str = "") -> dict[str, float]:
    """Returns the mean of each term of a weighted reward over the responses that could be scored. The rewards of
    different sets may have different terms."""
    names = sorted({name for score in scores for name in score.terms})
    values = {name: [score.terms[name] for score in scores if name in score.terms] for name in names}
    return {f"reward/{name}/mean{of_set}": sum(each) / len(each) for name, each in values.items()}


def _means_by_set(step: StepRollouts, rewards: NDArray[np.float64], problems: Sequence[Problem]) -> dict[str, float]:
    """Returns the means of the rewards and of their terms for each training set, over the responses to its problems;
    empty for a single set."""
    if len({problem.dataset for problem in problems}) <= 1:
        return {}
    sets = np.array([problems[index].dataset for index in step.problems])[step.group_ids]
    means: dict[str, float] = {}
    for name in sorted(set(sets)):
        places = np.flatnonzero(sets == name)
        means[f"reward/mean/{name}"] = float(rewards[places].mean())
        means |= _term_means([step.scores[place] for place in places], f"/{name}")
    return means


def staleness_metrics(step: StepRollouts, trained_version: int) -> dict[str, float]:
    """Returns metrics of how many steps the policy was trained for after it sampled the step's tokens."""
    parts = [part for response in step.versions for part in response] or [(step.policy_version, 1)]
    versions, tokens = np.array(parts).T
    ages = trained_version - versions
    return {"staleness/mean": float(np.average(ages, weights=tokens)), "staleness/max": float(ages.max())}


def scheduled_values(spec: Experiment, step: int, loops: Mapping[Place, float]) -> dict[str, float]:
    """Returns the values of the spec's schedules at a step, and those of its closed loops; empty without either."""
    scheduled = {path: schedule.at(step) for path, schedule in schedules_in(spec)} | dict(loops)
    fixed = {SCHEDULED[path]: value for path, value in scheduled.items() if path in SCHEDULED}
    own = {f"parameter/{path[-1]}": value for path, value in scheduled.items() if path[:-1] == OF_FORMULAS}
    return fixed | own


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The counts that determine the arithmetic cost of passes. Work shared by several responses counts once."""

    tokens: int
    """Number of tokens that go through the layers, including padding."""
    responses: int
    """Number of response tokens that go through the output head."""
    pairs: float
    """Number of pairs of tokens in which one attends to the other."""

    @classmethod
    def of_passes(cls, passes: Iterable[Microbatch]) -> "PassCounts":
        """Returns the counts over those of the passes that count."""
        counted = [batch for batch in passes if batch.counts]
        return cls(
            tokens=sum(batch.input_ids.numel() for batch in counted),
            responses=sum(len(batch.targets) for batch in counted),
            pairs=sum(_pairs(batch) for batch in counted),
        )


def _pairs(batch: Microbatch) -> float:
    if not batch.packed:
        rows, length = batch.input_ids.shape
        return rows * length**2 / 2
    return sum(
        prompt**2 / 2 + sum(length * (prompt + length / 2) for length in responses)
        for prompt, *responses in batch.packed
    )


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory of this process so far, GiB.

    On a GPU it is the most that torch allocated, without the memory that a sleeping engine has given back; on a CPU it
    is the largest resident set."""
    if device.type == "cuda":
        return peak_of_gpu().highest() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
