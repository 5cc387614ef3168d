"""What must hold for every objective on any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rpg.certificate.catalogue import catalogue, label
from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from rpg.objectives.aggregate import aggregate
from rpg.objectives.registry import equation
from specs.schema.fields import members
from specs.schema.objective import Objective, PublishedObjective

EVERYTHING = [item for items in catalogue().values() for item in items]
each_objective = pytest.mark.parametrize(
    "item", EVERYTHING, ids=[f"{n}-{label(item)}" for n, item in enumerate(EVERYTHING)]
)
any_objective = st.sampled_from(EVERYTHING)
quick = settings(deadline=None, max_examples=60)


def batch(seed: int, *, responses: int = 5, time: int = 6, spread: float = 0.4) -> dict[str, Tensor]:
    """Three policies and responses of unequal length, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    old = -normal(responses, time).abs() - 0.05
    lengths = torch.randint(1, time + 1, (responses, 1), generator=generator)
    return {
        "logprobs": old + spread * normal(responses, time),
        "old_logprobs": old,
        "ref_logprobs": old + spread * normal(responses, time),
        "advantages": normal(responses, 1).expand(responses, time).clone(),
        "response_mask": (torch.arange(time) < lengths).double(),
    }


def diagnostics(item: Objective, **inputs: Tensor) -> dict[str, Tensor]:
    return evaluate_objective(item, TokenBatch(**inputs)).diagnostics()


def gradient(item: Objective, inputs: dict[str, Tensor], *, microbatches: list[list[int]] | None = None) -> Tensor:
    """Gradient of the aggregated loss by the logprobs, from microbatches with the whole batch's denominators."""
    leaf = inputs["logprobs"].clone().requires_grad_()
    mask = inputs["response_mask"]
    for rows in microbatches or [list(range(len(mask)))]:
        part = {name: tensor[rows] for name, tensor in {**inputs, "logprobs": leaf}.items()}
        aggregate(
            token_losses(item, **part),
            part["response_mask"],
            aggregation=item.aggregation,
            num_tokens=mask.sum().item(),
            num_sequences=len(mask),
            max_response_length=16,
        ).backward()
    assert leaf.grad is not None
    return leaf.grad


@quick
@given(any_objective, st.integers(0, 10**6), st.integers(1, 4))
def test_more_padding_changes_no_loss(item: Objective, seed: int, extra: int) -> None:
    inputs = batch(seed)
    padded = {name: torch.nn.functional.pad(tensor, (0, extra)) for name, tensor in inputs.items()}
    assert torch.allclose(
        token_losses(item, **inputs), token_losses(item, **padded)[:, :-extra], rtol=1e-12, atol=1e-15
    )


@quick
@given(any_objective, st.integers(0, 10**6), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_on_padding_changes_neither_loss_nor_gradient(item: Objective, seed: int, rubbish: float) -> None:
    inputs = batch(seed)
    mask = inputs["response_mask"]
    spoilt = {
        name: tensor if name == "response_mask" else torch.where(mask != 0, tensor, rubbish)
        for name, tensor in inputs.items()
    }
    assert torch.equal(gradient(item, inputs), gradient(item, spoilt))
    on_tokens = mask != 0
    assert torch.equal(token_losses(item, **inputs)[on_tokens], token_losses(item, **spoilt)[on_tokens])


@quick
@given(any_objective, st.integers(0, 10**6), st.data())
def test_neither_microbatches_nor_ranks_nor_the_order_of_responses_change_the_gradient(
    item: Objective, seed: int, data: st.DataObject
) -> None:
    inputs = batch(seed)
    order = data.draw(st.permutations(range(5)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 4))))
    parts = [order[start:end] for start, end in zip([0, *cuts], [*cuts, 5], strict=True)]
    assert torch.allclose(gradient(item, inputs), gradient(item, inputs, microbatches=parts), rtol=1e-12, atol=1e-14)


@each_objective
def test_only_logprobs_receives_a_gradient(item: Objective) -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in batch(1).items()}
    token_losses(item, **inputs).sum().backward()
    assert inputs.pop("logprobs").grad is not None
    assert all(tensor.grad is None for tensor in inputs.values())


@pytest.mark.more
@each_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_of_fifty_nats_stay_finite(item: Objective, dtype: torch.dtype, sign: int) -> None:
    inputs = {name: tensor.to(dtype) for name, tensor in batch(2).items()}
    for name, shift in (("logprobs", sign * 50), ("ref_logprobs", -sign * 50), ("old_logprobs", 0)):
        spoilt = {**inputs, name: inputs[name] + shift, "ref_logprobs": inputs["ref_logprobs"] - sign * 50}
        assert torch.isfinite(token_losses(item, **spoilt)).all()
        assert torch.isfinite(gradient(item, spoilt)).all()
        assert all(torch.isfinite(values).all() for values in diagnostics(item, **spoilt).values())


@pytest.mark.more
@each_objective
@pytest.mark.parametrize("sign", [-1, 1])
def test_fifty_nats_at_every_token_of_a_long_response_stay_finite(item: Objective, sign: int) -> None:
    inputs = {name: tensor.float() for name, tensor in batch(2, responses=3, time=512).items()}
    inputs["logprobs"] = inputs["logprobs"] + sign * 50
    inputs["ref_logprobs"] = inputs["ref_logprobs"] - sign * 50
    assert torch.isfinite(token_losses(item, **inputs)).all()
    assert torch.isfinite(gradient(item, inputs)).all()
    assert all(torch.isfinite(values).all() for values in diagnostics(item, **inputs).values())


@each_objective
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_do_not_lose_the_ratio(item: Objective, dtype: torch.dtype) -> None:
    inputs = {name: tensor.to(dtype) for name, tensor in batch(3).items()}
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    losses = token_losses(item, **inputs)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), token_losses(item, **wide), rtol=1e-4, atol=1e-5)


@each_objective
def test_shapes_that_differ_are_named(item: Objective) -> None:
    inputs = batch(4)
    with pytest.raises(ValueError, match=r"old_logprobs \[5, 5\]"):
        token_losses(item, **{**inputs, "old_logprobs": inputs["old_logprobs"][:, :5]})
    with pytest.raises(ValueError, match=r"logprobs \[6\]"):
        token_losses(item, **{name: tensor[0] for name, tensor in inputs.items()})


@each_objective
def test_a_response_without_tokens_is_no_trouble(item: Objective) -> None:
    inputs = batch(5)
    inputs["response_mask"][2] = 0
    assert torch.isfinite(gradient(item, inputs)).all()
    assert gradient(item, inputs)[2].abs().sum() == 0


@each_objective
def test_diagnostics_agree_with_the_loss(item: Objective) -> None:
    inputs = batch(6)
    seen = diagnostics(item, **inputs)
    mask = inputs["response_mask"] != 0
    leaf = inputs["logprobs"].clone().requires_grad_()
    torch.where(mask, token_losses(item, **{**inputs, "logprobs": leaf}), 0).sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(seen["weight"], -leaf.grad)
    assert all(values.shape == mask.shape for values in seen.values())
    assert not any(values.requires_grad for values in seen.values())
    assert all((values[~mask] == 0).all() for values in seen.values())
    sides = [seen[name] for name in ("clipped_low", "clipped_high", "clipped_dual")]
    assert all(side.dtype == torch.bool for side in sides)
    assert torch.stack(sides).sum(0).max() <= 1
    for name in ("kl_reverse", "kl_forward", "kl_behaviour"):
        assert (seen[name] >= -1e-12).all()


@each_objective
def test_an_evaluation_leaves_losses_that_train_as_token_losses_do(item: Objective) -> None:
    inputs = batch(7)
    gradients = []
    for losses_of in (token_losses, lambda item, **inputs: evaluate_objective(item, TokenBatch(**inputs)).losses):
        parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
        losses = losses_of(item, **{**inputs, "logprobs": inputs["logprobs"] * parameter})
        assert parameter.grad is None, "the weight is taken by the logprobs, not by what they come from"
        torch.where(inputs["response_mask"] != 0, losses, 0).square().sum().backward()
        gradients.append((losses.detach(), parameter.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert gradients[0][1] == gradients[1][1]
    assert not evaluate_objective(item, TokenBatch(**inputs)).losses.requires_grad


def test_every_objective_of_the_schema_has_an_equation() -> None:
    objectives = members(Objective)
    assert len(objectives) > 1
    for objective in objectives:
        assert equation.dispatch(objective) is not equation.dispatch(object), objective.__name__
    with pytest.raises(NotImplementedError, match="no equation is registered for PublishedObjective"):
        token_losses(PublishedObjective(), **batch(8))  # type: ignore[arg-type]


@quick
@given(st.integers(0, 10**6))
def test_the_divergence_metrics_are_unbiased(seed: int) -> None:
    """Summed over a vocabulary of four with the sampler's probabilities, each is the divergence it is named after."""
    generator = torch.Generator().manual_seed(seed)
    policy, sampler, reference = (
        torch.log_softmax(torch.randn((1, 4), generator=generator, dtype=torch.float64), -1) for _ in range(3)
    )
    one = torch.ones_like(policy)
    seen = diagnostics(
        EVERYTHING[0], logprobs=policy, old_logprobs=sampler, ref_logprobs=reference, advantages=one, response_mask=one
    )
    expected = {
        "kl_reverse": (policy.exp() * (policy - reference)).sum(),
        "kl_forward": (reference.exp() * (reference - policy)).sum(),
        "kl_behaviour": (sampler.exp() * (sampler - policy)).sum(),
    }
    for name, value in expected.items():
        assert (sampler.exp() * seen[name]).sum().item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12)
