"""CPU time of built-in objectives, and of the same losses written as formulas.

`python benchmarks/objectives.py` evaluates each objective of the certificates' catalogue and its formula in turns, loss
and gradient of one pass of 32 responses of up to 1,024 tokens in float32, on one thread; and prints the median CPU time
of each, and formula over built-in in the fastest round of each.
"""

import statistics
import time
from typing import Any

import torch
import typer

from rpg.certificate.catalogue import catalogue, label
from rpg.objectives import TokenBatch, evaluate_objective
from specs import parse_objective
from specs.schema.clip import DualClip, NoClip, TruncateClip
from specs.schema.objective import (
    Cispo,
    ClippedPublishedObjective,
    FormulaObjective,
    Objective,
    PublishedObjective,
    RegularizedObjective,
)

HELD = "clip(w, 1 - low, 1 + high)"
WEIGHTS = {
    "forward": "{q}",
    "reverse": "-{w}*(log({w}) - log(q) + 1)",
    "unnormalized_forward": "({q} - {w})",
    "unnormalized_reverse": "-{w}*(log({w}) - log(q))",
    "none": "0",
}
"""Divergence -> K at a ratio, as in docs/objectives.md."""
PER_RATIO = {
    "forward": "1/r",
    "reverse": "-(log(r) + 1)",
    "unnormalized_forward": "(1/r - 1)",
    "unnormalized_reverse": "-log(r)",
    "none": "0",
}
"""Divergence -> K(w)/w."""
LOSSES = {
    "forward": "-q*log(p)",
    "reverse": "w*log(r)",
    "unnormalized_forward": "(w - q*log(p))",
    "unnormalized_reverse": "(w*log(r) - w)",
    "none": "0",
}
_TO_GO = "sg(to_go(log(r)))"
_SO_FAR = "response_sum(log(q)) - to_go(log(q)) + log(q)"
TO_GO = {
    "forward": (f"exp({_SO_FAR})", f"exp({_SO_FAR} - sg(log(w)))"),
    "reverse": (f"-{{w}}*({_TO_GO} + 1)", f"-({_TO_GO} + 1)"),
    "unnormalized_forward": (f"(exp({_SO_FAR}) - {{w}})", f"(exp({_SO_FAR} - sg(log(w))) - 1)"),
    "unnormalized_reverse": (f"-{{w}}*{_TO_GO}", f"-{_TO_GO}"),
    "none": ("0", "0"),
}
"""Divergence -> K at a ratio, and K(w)/w, of level to_go."""
ESTIMATES = {"k1": "log(r)", "k2": "log(r)**2/2", "k3": "(1/r - 1 + log(r))"}
PPO_CLIPPED = "{a} > 0 and w > 1 + high or {a} < 0 and w < 1 - low"


def as_formula(objective: Objective) -> FormulaObjective:
    """Returns the objective as a formula. A penalty in the reward remains part of the advantage."""
    made = _regularized(objective) if isinstance(objective, RegularizedObjective) else _published(objective)
    clip = getattr(objective, "clip", NoClip())
    numbers = {name: getattr(clip, name) for name in ("low", "high", "dual") if getattr(clip, name, 0)}
    numbers |= {"beta": objective.claimed_kl_coef, "bound": getattr(objective, "max_ratio", 1.0)}
    used = {key: value for key, value in made.items() if value}
    level = objective.ratio_over
    formula = parse_objective(
        {
            "type": "formula",
            "level": level,
            "parameters": numbers,
            "claim": "none",
            "aggregation": objective.aggregation,
        }
        | used
    )
    assert isinstance(formula, FormulaObjective)
    return formula


def _regularized(objective: RegularizedObjective) -> dict[str, str]:
    clip, named = objective.clip, objective.divergence
    weight = TO_GO[named][0] if objective.level == "to_go" else WEIGHTS[named]
    plain, held = (f"beta*{weight.format(w=ratio, q='q')}" for ratio in ("w", HELD))
    plain = f"w*A + {plain}"
    if objective.estimator == "differentiable":
        return _differentiable(objective)
    if isinstance(clip, NoClip):
        return {"weight": plain}
    if isinstance(clip, TruncateClip):
        return {"weight": f"{HELD}*A + {held}", "clipped": f"w != {HELD}"}
    if isinstance(clip, DualClip):
        inactive = held if clip.keep_divergence else "0"
        if clip.branch == "raw":
            clipped = "A > 0 and w >= 1 + high or A <= 0 and (w < 1 - low or w >= dual)"
            return {"weight": f"where({clipped}, {inactive}, w*A + {held})", "clipped": clipped}
        clipped = f"{plain} >= 0 and w >= 1 + high or {plain} < 0 and (w <= 1 - low or w >= dual)"
        return {"weight": f"where({clipped}, {inactive}, {plain})", "clipped": clipped}
    value = f"(A + beta*{_per_ratio(objective)})"
    bounded = f"where({value} >= 0, min(w, 1 + high), clip(w, 1 - low, dual))"
    return {"weight": f"{value}*{bounded}", "clipped": f"w != {bounded}"}


def _differentiable(objective: RegularizedObjective) -> dict[str, str]:
    clip, named = objective.clip, objective.divergence
    to_go = objective.level == "to_go"
    loss = f"-sg({TO_GO[named][0].format(w='w')})*log(p)" if to_go else LOSSES[named]
    if not isinstance(clip, DualClip):
        return {"loss": f"-w*A + beta*{loss}"}
    if clip.branch == "raw":
        clipped = _ppo("A", dual=True)
        return {**clipped, "loss": f"{clipped['loss']} + beta*{loss}"}
    return _ppo(f"(A + beta*{_per_ratio(objective)})", dual=True)


def _per_ratio(objective: RegularizedObjective) -> str:
    return TO_GO[objective.divergence][1] if objective.level == "to_go" else PER_RATIO[objective.divergence]


def _ppo(advantage: str, *, dual: bool) -> dict[str, str]:
    """PPO's clip of an advantage."""
    loss, clipped = f"-min(w*{advantage}, {HELD}*{advantage})", PPO_CLIPPED.format(a=advantage)
    if not dual:
        return {"loss": loss, "clipped": clipped}
    held = f"where({advantage} < 0, min({loss}, -dual*{advantage}), {loss})"
    return {"loss": held, "clipped": f"{clipped} or {advantage} < 0 and w > dual"}


def _published(objective: Objective) -> dict[str, str]:
    if isinstance(objective, Cispo):
        return {"weight": "min(w, bound)*A", "clipped": "w > bound"}
    assert isinstance(objective, ClippedPublishedObjective)
    clipped = _ppo("A", dual=objective.clip.dual > 0)
    if not objective.penalizes_loss:
        return clipped
    weighted = "w*" if objective.kl_weighted else ""
    return {**clipped, "loss": f"{clipped['loss']} + beta*{weighted}{ESTIMATES[objective.kl_estimator]}"}


def inputs(responses: int, length: int, *, dtype: torch.dtype, spread: float = 0.4) -> dict[str, Any]:
    """Three policies, by `spread` nats apart, and responses of unequal length."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    old = -normal(responses, length).abs() - 0.05
    lengths = torch.randint(1, length + 1, (responses, 1), generator=generator)
    return {
        "logprobs": old + spread * normal(responses, length),
        "old_logprobs": old,
        "ref_logprobs": old + spread * normal(responses, length),
        "advantages": normal(responses, 1).expand(responses, length).clone(),
        "response_mask": (torch.arange(length) < lengths).to(dtype),
    }


def seconds(objective: Objective, values: dict[str, Any]) -> float:
    """CPU time of one pass's loss and gradient."""
    logprobs = values["logprobs"].clone().requires_grad_()
    batch = TokenBatch(**{**values, "logprobs": logprobs})
    began = time.process_time()
    evaluate_objective(objective, batch).losses.sum().backward()
    return time.process_time() - began


def main(rounds: int = 25, responses: int = 32, length: int = 1024) -> None:
    """Prints a line an objective."""
    torch.set_num_threads(1)
    values = inputs(responses, length, dtype=torch.float32)
    print(f"{'objective':<78} {'built-in':>9} {'formula':>9} {'ratio':>6}")
    for heading, objectives in catalogue().items():
        for objective in objectives:
            formula = as_formula(objective)
            seconds(objective, values), seconds(formula, values)
            pairs = [(seconds(objective, values), seconds(formula, values)) for _ in range(rounds)]
            own, other = (statistics.median(each) for each in zip(*pairs, strict=True))
            fastest = [min(each) for each in zip(*pairs, strict=True)]
            ratio = fastest[1] / fastest[0]
            where = heading if isinstance(objective, PublishedObjective) else heading.removeprefix("RPG, ")
            print(f"{f'{where}: {label(objective)}'[:78]:<78} {own:9.6f} {other:9.6f} {ratio:6.2f}")


if __name__ == "__main__":
    typer.run(main)
