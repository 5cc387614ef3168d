"""Formulas against the built-in objectives, and what each symbol and function of a formula means."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.objectives import as_formula, inputs
from rpg.certificate.catalogue import catalogue
from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from specs import parse_objective
from specs.schema.objective import Objective

EVERYTHING = [item for items in catalogue().values() for item in items]


def losses_and_gradient(objective: Objective, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logprobs, mask = values["logprobs"].clone().requires_grad_(), values["response_mask"] != 0
    losses = torch.where(mask, token_losses(objective, **{**values, "logprobs": logprobs}), 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient


@pytest.mark.more
@pytest.mark.parametrize("item", EVERYTHING, ids=lambda item: json.dumps(item.model_dump(mode="json"))[:90])
def test_every_built_in_objective_is_a_formula_too(item: Objective) -> None:
    item = item.with_kl_coef(0.3) if item.needs_reference else item
    formula, values = as_formula(item), inputs(200, 12, dtype=torch.float64, spread=1.0)
    for one, other in zip(losses_and_gradient(item, values), losses_and_gradient(formula, values), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    clipped = [evaluate_objective(each, TokenBatch(**values)).clipped for each in (item, formula)]
    assert torch.equal(*clipped)
    assert bool(clipped[0].any()) == bool(formula.clipped), "the margins are exceeded in some places"


def weights(formula: str, values: dict[str, Tensor], **settings: Any) -> Tensor:
    objective = parse_objective({"type": "formula", "weight": formula, "claim": "none", **settings})
    return -losses_and_gradient(objective, values)[1]


@pytest.fixture
def values() -> dict[str, Tensor]:
    """Two responses, of three and of two tokens; padding stands first in the second."""
    return {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [0.0, -3.0, -0.1]], dtype=torch.float64),
        "old_logprobs": torch.tensor([[-1.2, -1.0, -0.5], [0.0, -2.0, -0.3]], dtype=torch.float64),
        "ref_logprobs": torch.tensor([[-0.7, -1.0, -0.9], [0.0, -3.5, -0.2]], dtype=torch.float64),
        "advantages": torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3).clone(),
        "response_mask": torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64),
        "entropy": torch.tensor([[0.1, 0.2, 0.3], [math.nan, 0.5, 0.6]], dtype=torch.float64),
        "rollout_logprobs": torch.tensor([[-1.1, -1.0, -0.4], [math.nan, -2.2, -0.3]], dtype=torch.float64),
        "rewards": torch.tensor([[1.0], [0.25]], dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("w", [[math.exp(0.2), math.exp(-1), 1], [0, math.exp(-1), math.exp(0.2)]]),
        ("r", [[math.exp(-0.3), math.exp(-1), math.exp(0.4)], [0, math.exp(0.5), math.exp(0.1)]]),
        ("q", [[math.exp(0.5), 1, math.exp(-0.4)], [0, math.exp(-1.5), math.exp(0.1)]]),
        ("log(w)*log(r)/log(p)", [[0.06, -0.5, 0], [0, 0.5 / 3, -0.2]]),
        ("p/p_old - w", [[0, 0, 0], [0, 0, 0]]),
        ("log(p_engine)", [[-1.1, -1, -0.4], [0, -2.2, -0.3]]),
        ("A + H", [[2.1, 2.2, 2.3], [0, -0.5, -0.4]]),
        ("R*position/length", [[1 / 3, 2 / 3, 1], [0, 0.125, 0.25]]),
        ("to_go(log(p))", [[-3.5, -2.5, -0.5], [0, -3.1, -0.1]]),
        ("response_sum(log(p))", [[-3.5, -3.5, -3.5], [0, -3.1, -3.1]]),
        ("response_mean(A) + to_go(1)", [[5, 4, 3], [0, 1, 0]]),
        ("where(A > 0 and not log(w) < 0, 1, -1)", [[1, -1, 1], [0, -1, -1]]),
        ("where(1 < 2, sign(A), 1/0)", [[1, 1, 1], [0, -1, -1]]),
        ("clip(A, -0.5, length - 2) + min(A, 0, 1) + max(A, 1)", [[3, 3, 3], [0, -0.5, -0.5]]),
        ("abs(A)**2 + sqrt(4) - exp(0)*2", [[4, 4, 4], [0, 1, 1]]),
        ("2", [[2, 2, 2], [0, 2, 2]]),
    ],
)
def test_symbols_and_functions_of_tokens(formula: str, expected: list[list[float]], values: dict[str, Tensor]) -> None:
    # the weight is minus the derivative by log pi
    assert torch.allclose(weights(formula, values), torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("level", "formula", "expected"),
    [
        ("sequence", "log(w)", [-0.8, -0.8]),
        ("sequence", "log(p_engine) + R", [-2.5 + 1, -2.5 + 0.25]),
        ("geometric_mean", "log(w)", [-0.8 / 3, -0.4]),
        ("geometric_mean", "log(p_engine)", [-2.5 / 3, -1.25]),
        ("sequence", "H + A", [2.2, -0.45]),
    ],
)
def test_symbols_of_whole_responses(level: str, formula: str, expected: list[float], values: dict[str, Tensor]) -> None:
    found = weights(formula, values, level=level)
    each = torch.tensor(expected, dtype=torch.float64)[:, None]
    assert torch.allclose(found, torch.where(values["response_mask"] != 0, each, 0.0), atol=1e-12)


def test_a_loss_is_differentiated_as_it_is_written(values: dict[str, Tensor]) -> None:
    def gradient(formula: str, level: str = "token") -> Tensor:
        objective = parse_objective({"type": "formula", "level": level, "loss": formula, "claim": "none"})
        return losses_and_gradient(objective, values)[1]

    ratio = torch.exp(values["logprobs"] - values["old_logprobs"])
    mask = values["response_mask"]
    assert torch.allclose(gradient("-w*A"), -ratio * values["advantages"] * mask)
    assert torch.allclose(gradient("sg(w)*w + H"), ratio**2 * mask)
    assert torch.allclose(gradient("to_go(log(p))"), mask.cumsum(-1) * mask)  # a token is in the sums of those before
    whole = torch.exp((values["logprobs"] - values["old_logprobs"]).sum(-1, keepdim=True))
    assert torch.allclose(gradient("w", "sequence"), whole * mask)


def test_the_side_of_a_mark_is_that_of_the_ratio_and_the_advantage(values: dict[str, Tensor]) -> None:
    objective = parse_objective({"type": "formula", "weight": "w*A", "clipped": "abs(log(w)) > 0.1", "claim": "none"})
    found = evaluate_objective(objective, TokenBatch(**values))
    sides = {side: getattr(found, f"clipped_{side}").int().tolist() for side in ("low", "high", "dual")}
    assert sides == {"low": [[0, 1, 0], [0, 1, 0]], "high": [[1, 0, 0], [0, 0, 0]], "dual": [[0, 0, 0], [0, 0, 1]]}


def test_an_input_that_a_formula_reads_must_be_there_and_of_one_shape(values: dict[str, Tensor]) -> None:
    for name, symbol in (("entropy", "H"), ("rollout_logprobs", "p_engine"), ("rewards", "R")):
        objective = parse_objective({"type": "formula", "weight": f"w*{symbol}", "claim": "none"})
        with pytest.raises(ValueError, match=f"the formula reads {symbol}: give `{name}`"):
            token_losses(objective, **{key: value for key, value in values.items() if key != name})
        with pytest.raises(ValueError, match="must have one shape"):
            token_losses(objective, **{**values, name: torch.zeros(2, 2)})


def test_equal_operations_are_computed_once() -> None:
    from rpg.objectives.formula import program

    objective = parse_objective(
        {
            "type": "formula",
            "weight": "log(r)*log(r) + (1 + b)*log(r) + log(r)*log(r)",
            "parameters": {"b": 1},
            "claim": "none",
        }
    )
    names = [step.node.operation for step in program(objective).steps]
    assert names == ["log", "multiply", "multiply", "add", "add"]
