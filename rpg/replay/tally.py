"""Computes an objective's metrics over many recorded tokens, from sums that add up over steps."""

from dataclasses import dataclass, field, fields

from rpg.metrics import TOKEN_MEANS, token_metrics
from rpg.replay.step import ReplayedStep

_AVERAGED = tuple(field.name for field in fields(ReplayedStep) if field.name in TOKEN_MEANS.values())
"""Fields of `ReplayedStep` whose means are metrics."""


@dataclass(slots=True)
class Tally:
    """Sums of an objective's values over tokens and steps. Tallies of different steps can be added exactly."""

    updates: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    largest_ratio: float = 0.0

    def add(self, replayed: ReplayedStep, updates: int) -> None:
        """Adds a step with this number of updates."""
        self.updates += updates
        tokens = replayed.trained
        wide = {
            name: getattr(replayed, name)[tokens].double()
            for name in (*_AVERAGED, "weight", "gradient", "penalty_weight")
        }
        self._add("tokens", float(tokens.sum()))
        for name in ("losses", "penalty", "bonus"):
            self._add(name, float((getattr(replayed, name).double() * replayed.share).sum()))
        for name, values in wide.items():
            self._add(name, float(values.sum()))
        for name in ("ratio", "weight", "gradient", "penalty_weight"):
            self._add(f"{name}_squared", float(wide[name].square().sum()))
        self._add("weight_size", float(wide["weight"].abs().sum()))
        self._add("active", float((wide["weight"] != 0).sum()))
        if len(wide["ratio"]):
            self.largest_ratio = max(self.largest_ratio, float(wide["ratio"].max()))

    def merge(self, other: "Tally") -> None:
        """Adds the sums of another tally."""
        self.updates += other.updates
        self.largest_ratio = max(self.largest_ratio, other.largest_ratio)
        for name, value in other.sums.items():
            self._add(name, value)

    def metrics(self) -> dict[str, float]:
        """Returns values under the names of the metrics that a run records, and in addition:

        loss/divergence, loss/entropy: the divergence's and the entropy bonus's part of the loss. weight/mean: the mean
            of the tokens' gradient weights m, before the correction and the aggregation. weight/size: the mean of |m|.
        weight/active: the share of the tokens whose m is not 0. weight/ess: the share of the tokens that |m| is spread
        over, (Σ|m|)² / (tokens · Σm²). weight/divergence: the size of the divergence's part of m relative to the whole
        of m.

        Empty if no token was trained on.
        """
        sums, tokens = self.sums, self.sums.get("tokens", 0.0)
        if not tokens:
            return {}
        return {
            "loss": sums["losses"] / self.updates,
            "loss/divergence": sums["penalty"] / self.updates,
            "loss/entropy": sums["bonus"] / self.updates,
            "weight/mean": sums["weight"] / tokens,
            "weight/size": sums["weight_size"] / tokens,
            "weight/active": sums["active"] / tokens,
            "weight/ess": _share(sums["weight_size"] ** 2, tokens * sums["weight_squared"]),
            "weight/divergence": _share(sums["penalty_weight_squared"], sums["weight_squared"]) ** 0.5,
            **token_metrics(sums, tokens),
            "ratio/max": self.largest_ratio,
        }

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
