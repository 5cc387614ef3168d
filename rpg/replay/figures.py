"""What is said of an objective over many recorded tokens: sums that add up over steps, and the figures from them."""

from dataclasses import dataclass, field

from rpg.replay.replay import Weights


@dataclass(slots=True)
class Tally:
    """Sums of one objective's figures over tokens and steps, which add up exactly."""

    updates: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    largest_ratio: float = 0.0

    def add(self, weights: Weights, updates: int) -> None:
        """One step, of this many updates."""
        self.updates += updates
        tokens = weights.known
        wide = {
            name: getattr(weights, name)[tokens].double()
            for name in (*_TOKEN_MEANS.values(), "weight", "gradient", "penalty_weight")
        }
        self._add("tokens", float(tokens.sum()))
        self._add("loss", float((weights.losses.double() * weights.share).sum()))
        self._add("penalty", float((weights.penalty.double() * weights.share).sum()))
        self._add("bonus", float((weights.bonus.double() * weights.share).sum()))
        for name, values in wide.items():
            self._add(name, float(values.sum()))
        for name in ("ratio", "weight", "gradient", "penalty_weight"):
            self._add(f"{name}_squared", float(wide[name].square().sum()))
        self._add("weight_size", float(wide["weight"].abs().sum()))
        if len(wide["ratio"]):
            self.largest_ratio = max(self.largest_ratio, float(wide["ratio"].max()))

    def figures(self) -> dict[str, float]:
        """By the names that SQL knows, and those of `FIGURES`. Empty where no token was trained on."""
        sums, tokens = self.sums, self.sums.get("tokens", 0.0)
        if not tokens:
            return {}
        return {
            "loss": sums["loss"] / self.updates,
            "loss/divergence": sums["penalty"] / self.updates,
            "loss/entropy": sums["bonus"] / self.updates,
            "weight/mean": sums["weight"] / tokens,
            "weight/variance": max(0.0, sums["weight_squared"] / tokens - (sums["weight"] / tokens) ** 2),
            "weight/ess": _share(sums["weight_size"] ** 2, tokens * sums["weight_squared"]),
            "weight/divergence": _share(sums["penalty_weight_squared"], sums["weight_squared"]) ** 0.5,
            "ratio/mean": sums["ratio"] / tokens,
            "ratio/max": self.largest_ratio,
            "ratio/ess": _share(sums["ratio"] ** 2, tokens * sums["ratio_squared"]),
            **{metric: sums[name] / tokens for metric, name in _TOKEN_MEANS.items() if metric != "ratio/mean"},
        }

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


_TOKEN_MEANS = {
    "ratio/mean": "ratio",
    "clip_fraction/low": "clipped_low",
    "clip_fraction/high": "clipped_high",
    "clip_fraction/dual": "clipped_dual",
    "kl/reverse": "kl_reverse",
    "kl/forward": "kl_forward",
    "kl/behaviour": "kl_behaviour",
}
FIGURES = {
    "loss": "of an update, mean over the step's updates",
    "loss/divergence": "the divergence's part of it",
    "loss/entropy": "the entropy bonus's part of it",
    "weight/mean": "gradient weight m of a token, before the correction and the aggregation",
    "weight/variance": "of m over the tokens",
    "weight/ess": "share of the tokens that |m| is spread over: (sum |m|)^2 / (tokens x sum m^2)",
    "weight/divergence": "size of the divergence's part of m beside the whole of m",
}
"""What the figures mean that a run does not record under the same name, or records of its updates only."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
