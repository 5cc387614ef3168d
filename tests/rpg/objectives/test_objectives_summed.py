"""Divergences that are summed over the vocabulary or over the reference's likeliest tokens."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from rpg.objectives.distribution import of_logits, summed
from specs import SpecError, parse_objective

DIVERGENCES = ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "jensen_shannon")
CHOICES = list(itertools.product(("full", "top_k"), DIVERGENCES, ("token", "to_go"), ("reinforce", "differentiable")))
each_choice = pytest.mark.parametrize(("kl", "divergence", "level", "estimator"), CHOICES)


def of(**values: Any) -> Any:
    return parse_objective({"type": "rpg", "kl_coef": 0.5, "kl_top_k": 2, "clip": {"type": "none"}, **values})


def batch(seed: int, *, responses: int = 3, time: int = 4, vocabulary: int = 5) -> dict[str, Tensor]:
    """Three policies over a vocabulary, float64; the last response has two tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, reference = (
        torch.randn(responses, time, vocabulary, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    ids = torch.randint(0, vocabulary, (responses, time), generator=generator)
    mask = torch.ones(responses, time, dtype=torch.float64)
    mask[-1, 2:] = 0
    names = ("logprobs", "old_logprobs", "ref_logprobs")
    chosen = (torch.log_softmax(each, -1).gather(-1, ids[..., None])[..., 0] for each in (logits, old, reference))
    return {
        **dict(zip(names, chosen, strict=True)),
        "advantages": torch.randn(responses, 1, generator=generator, dtype=torch.float64).expand(responses, time),
        "response_mask": mask,
        "logits": logits,
        "ref_logits": reference,
        "token_ids": ids,
    }


def gradients(item: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of the loss by logprobs and logits."""
    leaves = [inputs[name].clone().requires_grad_() for name in ("logprobs", "logits")]
    losses = token_losses(item, **inputs | dict(zip(("logprobs", "logits"), leaves, strict=True)))
    return list(torch.autograd.grad(torch.where(inputs["response_mask"] != 0, losses, 0).sum(), leaves))


def test_golden_values_of_one_state() -> None:
    """π = (1/2, 1/4, 1/4), π_ref = (1/4, 1/2, 1/4): log r = (log 2, -log 2, 0)."""
    policy, reference = (torch.tensor([[[a, b, 0.25]]]).log() for a, b in ((0.5, 0.25), (0.25, 0.5)))
    two = math.log(2)
    expected = {
        "reverse": (0.5 - 0.25) * two,
        "forward": (0.5 - 0.25) * two,
        "unnormalized_reverse": (0.5 - 0.25) * two,
        "unnormalized_forward": (0.5 - 0.25) * two,
        # m = (3/8, 3/8, 1/4); both KLs to it are 1/2 log(4/3) + 1/4 log(2/3)
        "jensen_shannon": 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3),
    }
    for divergence, value in expected.items():
        assert of_logits(divergence, policy, reference).value.item() == pytest.approx(value, rel=1e-6)
    # The reference's likeliest token is the second: π log r = -1/4 log 2, π = 1/4, π_ref = 1/2.
    of_one = {
        "reverse": -0.25 * two,
        "unnormalized_reverse": -0.25 * two + 0.25,
        "forward": 0.5 * two,
        "unnormalized_forward": 0.5 * two - 0.25,
        "jensen_shannon": (0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)) / 2,
    }
    for divergence, value in of_one.items():
        found = of_logits(divergence, policy, reference, top_k=1, token_ids=torch.tensor([[0]]))
        assert found.value.item() == pytest.approx(value, rel=1e-6)
        assert found.outside.item()


def test_golden_losses_of_a_token_and_of_what_follows_it() -> None:
    """Two states like the one above, A = 1, w = 2, β = 1/2. D of a state is 1/4 log 2."""
    policy, reference = (torch.tensor([[a, b, 0.25]]).log().expand(1, 2, 3) for a, b in ((0.5, 0.25), (0.25, 0.5)))
    logprobs = torch.full((1, 2), 0.5).log()
    inputs = {
        **{"logprobs": logprobs, "old_logprobs": logprobs - math.log(2), "ref_logprobs": logprobs - math.log(2)},
        **{"advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2)},
        **{"logits": policy, "ref_logits": reference, "token_ids": torch.zeros(1, 2, dtype=torch.int64)},
    }
    state = 0.5 * 0.25 * math.log(2)
    of_token = token_losses(of(kl="full", divergence="reverse", estimator="differentiable"), **inputs)
    assert torch.allclose(of_token, torch.tensor([[-2 + state, -2 + state]]))
    to_go = token_losses(of(kl="full", divergence="reverse", level="to_go"), **inputs)
    # REINFORCE weights: w (A - β D of later states), and log π = -log 2.
    weights = [2 * (1 - state), 2.0]
    assert torch.allclose(to_go, torch.tensor([[weight * math.log(2) + state for weight in weights]]))


@each_choice
def test_a_sum_over_all_likeliest_tokens_is_that_over_the_vocabulary(
    kl: str, divergence: str, level: str, estimator: str
) -> None:
    if kl == "full":
        return
    inputs, settings = batch(1), {"divergence": divergence, "level": level, "estimator": estimator}
    pairs = zip(*(gradients(of(**settings, **kl), inputs) for kl in ({"kl": "full"}, {"kl": "top_k", "kl_top_k": 9})),
                strict=True)  # fmt: skip
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)


@each_choice
def test_what_stands_on_padding_changes_nothing(kl: str, divergence: str, level: str, estimator: str) -> None:
    item, inputs = of(kl=kl, divergence=divergence, level=level, estimator=estimator), batch(2)
    spoilt = dict(inputs)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "logits", "ref_logits"):
        spoilt[name] = inputs[name].clone()
        spoilt[name][-1, 2:] = math.nan if inputs[name].dim() == 2 else 7.0
    for one, other in zip(gradients(item, inputs), gradients(item, spoilt), strict=True):
        assert torch.equal(one, other)
    assert not gradients(item, inputs)[1][-1, 2:].any()


@each_choice
@pytest.mark.parametrize("sign", [-1, 1])
def test_policies_fifty_nats_apart_stay_finite(kl: str, divergence: str, level: str, estimator: str, sign: int) -> None:
    item, inputs = of(kl=kl, divergence=divergence, level=level, estimator=estimator), batch(3)
    inputs = {name: values.float() if values.is_floating_point() else values for name, values in inputs.items()}
    inputs["logits"][..., 0] += sign * 50
    inputs["logprobs"] = torch.log_softmax(inputs["logits"], -1).gather(-1, inputs["token_ids"][..., None])[..., 0]
    assert all(gradient.isfinite().all() for gradient in gradients(item, inputs))


@pytest.mark.parametrize("kl", ["full", "top_k"])
def test_logits_where_nothing_counts_change_nothing_and_halves_are_widened(kl: str) -> None:
    inputs = batch(3)
    padding = inputs["response_mask"] == 0
    assert padding.any()
    inputs["logits"], inputs["ref_logits"] = inputs["logits"].bfloat16(), inputs["ref_logits"].bfloat16()
    wide = gradients(of(kl=kl), inputs | {name: inputs[name].float() for name in ("logits", "ref_logits")})[1]
    for name in ("logits", "ref_logits"):
        inputs[name] = torch.where(padding[..., None], torch.nan, inputs[name])
    assert torch.equal(gradients(of(kl=kl), inputs)[1], wide.bfloat16())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ref_logits": (1, 2, 6)}, r"ref_logits \[1, 2, 6\]"),
        ({"ref_logits": (1, 2, 1)}, r"ref_logits \[1, 2, 1\]"),
        ({"logits": (1, 3, 5), "ref_logits": (1, 3, 5)}, r"given: response_mask \[1, 2\], logits \[1, 3, 5\]"),
        ({"token_ids": (1, 1)}, r"token_ids \[1, 1\]"),
        ({"token_ids": (1, 2)}, "token_ids must be whole numbers from 0 to 4"),
    ],
)
def test_logits_and_ids_that_do_not_fit_are_refused_by_name(changed: dict[str, tuple[int, ...]], said: str) -> None:
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "response_mask")
    inputs = {name: torch.ones(1, 2) for name in names} | {
        name: torch.zeros(1, 2, 5) for name in ("logits", "ref_logits")
    }
    inputs["token_ids"] = torch.zeros(1, 2, dtype=torch.int64)
    inputs |= {name: torch.full(shape, 9.0).to(inputs[name].dtype) for name, shape in changed.items()}
    with pytest.raises(ValueError, match=said):
        token_losses(of(kl="top_k"), **inputs)


@pytest.mark.parametrize("clip", ["dual", "truncate", "value"])
def test_a_clip_bounds_what_the_sampled_token_weighs_and_leaves_the_sum_alone(clip: str) -> None:
    inputs = batch(4)
    inputs["old_logprobs"] = inputs["logprobs"] - math.log(20)  # beyond every bound
    for level in ("token", "to_go"):
        by_logits = [gradients(of(kl="full", level=level, clip={"type": kind}), inputs)[1] for kind in ("none", clip)]
        assert torch.equal(*by_logits)
        assert by_logits[0].any()


def test_the_metrics_are_exact_at_every_state_with_full_and_unbiased_with_top_k() -> None:
    inputs = batch(5, responses=1, time=1)
    policy, reference = (torch.log_softmax(inputs[name], -1) for name in ("logits", "ref_logits"))
    old = torch.log_softmax(torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)
    exact = {"kl_reverse": summed("reverse", policy, reference), "kl_forward": summed("forward", policy, reference)}
    one = torch.ones(1, 1, dtype=torch.float64)
    means = {("top_k", name): torch.zeros(1, 1, dtype=torch.float64) for name in exact}
    for token in range(5):
        ids = torch.full((1, 1), token)
        for kl, top_k in (("full", 0), ("top_k", 2)):
            state = of_logits("reverse", inputs["logits"], inputs["ref_logits"], top_k=top_k, token_ids=ids)
            given = TokenBatch(policy[..., token], old[token] * one, reference[..., token], one, one, state=state)
            found = evaluate_objective(of(kl=kl, divergence="reverse"), given)
            for name, value in exact.items():
                if kl == "full":
                    assert getattr(found, name).item() == pytest.approx(value.item(), rel=1e-12)
                else:
                    means[kl, name] += old[token].exp() * getattr(found, name)
    for (_, name), mean in means.items():
        assert mean.item() == pytest.approx(exact[name].item(), rel=1e-12)


def test_missing_inputs_are_named() -> None:
    inputs = batch(6)
    without = {name: values for name, values in inputs.items() if name not in ("logits", "ref_logits", "token_ids")}
    with pytest.raises(ValueError, match="`kl: full` needs `logits` and `ref_logits`"):
        token_losses(of(kl="full"), **without)
    with pytest.raises(ValueError, match="`kl: top_k` needs `token_ids`"):
        token_losses(of(kl="top_k"), **{name: values for name, values in inputs.items() if name != "token_ids"})
    with pytest.raises(ValueError, match="needs the divergence at each state"):
        evaluate_objective(of(kl="full"), TokenBatch(**without))
    with pytest.raises(ValueError, match=r"state \[3, 3\]"):
        TokenBatch(**without, state=of_logits("reverse", inputs["logits"][:, :3], inputs["ref_logits"][:, :3]))
    assert token_losses(of(kl="full", kl_coef=0.0), **without).shape == (3, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": "full", "level": "sequence"}, "objective.kl: `kl: full` is summed at each state"),
        ({"kl": "top_k", "level": "sequence"}, "objective.kl: `kl: top_k` is summed at each state"),
        ({"divergence": "jensen_shannon"}, "objective.divergence: jensen_shannon is a sum over the vocabulary"),
        (
            {"kl": "full", "estimator": "differentiable", "clip": {"type": "dual", "branch": "regularized"}},
            "`clip.branch: regularized` with `estimator: differentiable` needs `kl: sampled`, not `kl: full`",
        ),
        ({"kl": "top_k", "kl_top_k": 0}, "objective.kl_top_k: must be at least 1"),
        ({"kl": "all"}, "allowed: sampled, top_k, full"),
    ],
    ids=str,
)
def test_combinations_without_a_meaning_are_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        of(**settings)
    assert message in str(refused.value)
