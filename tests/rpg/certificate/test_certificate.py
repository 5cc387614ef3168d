"""The statements of certificates, and their detection of a wrong gradient."""

import dataclasses
import json
import math

import pytest
import torch

from rpg.certificate import certificate
from rpg.certificate.cases import Cases
from rpg.certificate.catalogue import catalogue, certified_objectives, objective, summed
from rpg.certificate.certificate import Certificate, certify
from rpg.certificate.enumeration import enumerate_world, response_probabilities

EVERYTHING = [item for items in certified_objectives().values() for item in items]


def of(**values: object) -> Certificate:
    return certify(objective(values))


@pytest.mark.more
@pytest.mark.parametrize("item", EVERYTHING, ids=lambda item: json.dumps(item.model_dump(mode="json"))[:90])
def test_every_claim_holds(item: certificate.Objective) -> None:
    assert certify(item).holds


@pytest.mark.more
def test_rpg_without_a_clip_is_exact_in_every_situation() -> None:
    for item in catalogue()["RPG without a clip"]:
        if item.level != "to_go":
            assert item.exact == "always"
            assert max(finding.error for finding in certify(item).findings) <= 1e-10


@pytest.mark.parametrize("divergence", ["forward", "reverse", "unnormalized_forward", "unnormalized_reverse"])
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_from_itself_on_a_token_answers_for_the_divergence_of_the_response_with_less_variance(
    divergence: str, estimator: str
) -> None:
    found = {
        level: of(type="rpg", divergence=divergence, estimator=estimator, level=level, clip={"type": "none"})
        for level in ("token", "to_go", "sequence")
    }
    on_policy = {level: certificate.finding("on_policy", "apart") for level, certificate in found.items()}
    direction = divergence.removeprefix("unnormalized_")
    assert found["to_go"].claim == "on_policy"
    assert on_policy["to_go"].error <= 1e-10
    assert on_policy["to_go"].divergence_gradient_of == f"{direction} KL of the response"
    assert on_policy["token"].divergence_error["sequence"] > 0.2
    variances = [on_policy[level].variance for level in ("token", "to_go", "sequence")]
    assert variances == sorted(variances)
    assert variances[1] < 0.98 * variances[2]


@pytest.mark.parametrize("kl", ["full", "top_k"])
@pytest.mark.parametrize("level", ["token", "to_go"])
def test_a_divergence_summed_over_tokens_is_exact_with_less_variance_than_the_sampled_tokens(
    kl: str, level: str
) -> None:
    for divergence in ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse"):
        settings = {"type": "rpg", "divergence": divergence, "level": level, "clip": {"type": "none"}}
        found, sampled = of(**settings, kl=kl), of(**settings)
        exact, other = (each.finding("on_policy", "apart") for each in (found, sampled))
        assert found.holds
        assert found.objective["kl_top_k"] == 64
        assert exact.divergence_gradient_of == other.divergence_gradient_of
        assert exact.variance < 0.95 * other.variance
        if kl == "full":  # nothing but the reward's part varies, and at to_go the later states
            alone = of(**settings | {"divergence": "none"}).finding("on_policy", "apart")
            assert exact.variance < 1.06 * alone.variance
        if level == "token":
            assert max(finding.error for finding in found.findings) <= 1e-10


@pytest.mark.parametrize("kl", ["full", "top_k"])
def test_the_jensen_shannon_divergence_is_that_of_each_token_or_of_the_states_of_the_response(kl: str) -> None:
    settings = {"type": "rpg", "divergence": "jensen_shannon", "kl": kl, "clip": {"type": "none"}}
    of_tokens, of_response = (of(**settings, level=level) for level in ("token", "to_go"))
    assert of_tokens.claimed == (
        "expected reward less the Jensen-Shannon divergence of each token, in states of the sampler"
    )
    for finding in (of_tokens.finding(policy, "apart") for policy in ("on_policy", "off_policy")):
        assert finding.divergence_gradient_of == "Jensen-Shannon divergence of each token"
    on_policy = of_response.finding("on_policy", "apart")
    assert on_policy.divergence_gradient_of == "Jensen-Shannon divergence of the response"
    assert (of_tokens.holds, of_response.holds) == (True, True)


def test_the_weight_of_a_sampled_token_has_no_part_of_a_divergence_over_the_vocabulary() -> None:
    clip = {"type": "dual"}
    full, none = (
        objective({"type": "rpg", "kl_coef": 1.0, "clip": clip, **each})
        for each in ({"kl": "full"}, {"divergence": "none"})
    )
    assert certificate.weight_curves(full) == certificate.weight_curves(none)


def test_a_world_lists_every_response_once() -> None:
    generator = torch.Generator().manual_seed(0)
    # two tokens that go on: 1 + 2 + 4 + 8 responses that end within 4 tokens, and 16 that are cut
    world = enumerate_world(3, 4, generator)
    assert len(world.rewards) == 31
    assert (
        len({(*row.tolist(), *mask.tolist()) for row, mask in zip(world.tokens, world.response_mask, strict=True)})
        == 31
    )
    total = response_probabilities(world, world.policy(generator)).sum().item()
    assert math.isclose(total, 1, rel_tol=1e-12)


def test_the_expected_gradient_agrees_with_automatic_differentiation_through_the_policy() -> None:
    cases = certificate._cases()
    slopes = slopes_of("sequence", cases)
    table = torch.log(cases.policy.clamp(min=1e-300)).requires_grad_()
    logprobs = torch.log_softmax(table, -1)[cases.prefixes, cases.tokens]
    expected = cases.probability[:, None] * torch.where(cases.response_mask, slopes * logprobs, 0)
    (gradient,) = torch.autograd.grad(-expected.sum(), table)
    assert torch.allclose(gradient, cases.expected(cases.gradients(slopes)), atol=1e-12)


@pytest.mark.more
@pytest.mark.parametrize("several_turns", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_variance_agrees_with_the_gradient_of_every_single_response(level: str, several_turns: bool) -> None:
    cases = certificate._cases(several_turns=several_turns)
    slopes = slopes_of(level, cases)
    variances = [_variance_over_responses(cases, slopes, case) for case in range(len(cases.situation))]
    assert torch.allclose(cases.variance(cases.gradients(slopes)), torch.stack(variances), rtol=1e-10, atol=0)


def slopes_of(level: str, cases: Cases) -> torch.Tensor:
    """Derivatives of the losses of RPG without a clip by the logprobs."""
    logprobs = cases.logprobs.clone().requires_grad_()
    losses = certificate.token_losses(
        objective({"type": "rpg", "level": level, "clip": {"type": "none"}}),
        logprobs=logprobs,
        old_logprobs=cases.old_logprobs,
        ref_logprobs=cases.ref_logprobs,
        advantages=torch.where(cases.response_mask, cases.centred[:, None], 0.0),
        response_mask=cases.response_mask,
    )
    (slopes,) = torch.autograd.grad(torch.where(cases.response_mask, losses, 0.0).sum(), logprobs)
    return slopes


def _variance_over_responses(cases: Cases, slopes: torch.Tensor, case: int) -> torch.Tensor:
    """Variance of the gradient in one case, from automatic differentiation of each response by itself."""
    here, before = cases.case_of_response == case, int((cases.case_of_prefix < case).sum())
    mask, weights, tokens, chances = (
        values[here] for values in (cases.response_mask, slopes, cases.tokens, cases.probability)
    )
    rows = torch.where(mask, cases.prefixes[here] - before, 0)

    def losses(table: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, weights * torch.log_softmax(table, -1)[rows, tokens], 0).sum(-1)

    table = torch.log(cases.policy[cases.case_of_prefix == case].clamp(min=1e-300))
    gradients = torch.autograd.functional.jacobian(losses, table, vectorize=True).flatten(1)
    return (chances @ (gradients - chances @ gradients) ** 2).sum()


@pytest.mark.parametrize(
    ("estimator", "weighted", "on_policy", "off_policy"),
    [
        ("k1", False, "nothing", ""),
        ("k2", False, "reverse KL of each token", ""),
        ("k3", False, "forward KL of each token", ""),
        ("k1", True, "reverse KL of each token", "reverse KL of each token"),
        ("k2", True, "", ""),
        ("k3", True, "reverse KL of each token", "reverse KL of each token"),
    ],
)
def test_the_penalties_in_the_loss_are_the_gradients_that_enumeration_found(
    estimator: str, weighted: bool, on_policy: str, off_policy: str
) -> None:
    found = of(type="ppo", kl_coef=1.0, kl_estimator=estimator, kl_weighted=weighted)
    assert found.finding("on_policy", "apart").divergence_gradient_of == on_policy
    assert found.finding("off_policy", "apart").divergence_gradient_of == off_policy


def test_k1_off_policy_against_the_sampler_is_minus_the_forward_divergence() -> None:
    found = of(type="ppo", kl_coef=1.0, kl_estimator="k1").finding("off_policy", "sampler")
    assert found.divergence_gradient_of == "minus the forward KL of each token"


def test_k1_in_the_reward_is_the_divergence_of_the_whole_response_on_policy_only() -> None:
    for name in ("rloo", "reinforce_plus_plus"):
        found = of(type=name)
        assert found.finding("on_policy", "apart").divergence_gradient_of == "reverse KL of the response"
        assert found.finding("off_policy", "apart").divergence_gradient_of == ""


def test_no_penalty_on_single_tokens_has_the_gradient_of_the_whole_responses_divergence() -> None:
    for estimator, weighted in (("k2", False), ("k3", False), ("k1", True), ("k3", True)):
        found = of(type="ppo", kl_coef=1.0, kl_estimator=estimator, kl_weighted=weighted)
        assert found.finding("on_policy", "apart").divergence_error["sequence"] > 0.3
    whole = of(type="rpg", level="sequence", clip={"type": "none"})
    assert whole.finding("off_policy", "apart").divergence_error["sequence"] <= 1e-10


def test_the_unnormalised_forms_have_less_variance_than_the_normalised_ones() -> None:
    variances = {
        divergence: of(type="rpg", divergence=divergence).finding("on_policy", "apart").variance
        for divergence in ("forward", "unnormalized_forward", "reverse", "unnormalized_reverse")
    }
    assert variances["unnormalized_forward"] < variances["forward"]
    assert variances["unnormalized_reverse"] < variances["reverse"]


def test_dividing_by_a_responses_own_length_turns_the_gradient() -> None:
    assert of(type="grpo", kl_coef=0.0).length_cosine < 0.999
    assert of(type="dr_grpo").length_cosine == 1


def test_a_wrong_gradient_does_not_get_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    right = certificate.token_losses
    monkeypatch.setattr(certificate, "token_losses", lambda *args, **inputs: (1 + 1e-8) * right(*args, **inputs))
    assert not of(type="rpg", clip={"type": "none"}).holds
    assert of(type="grpo").holds  # it claims nothing


def test_a_certificate_is_plain_data() -> None:
    data = json.loads(json.dumps(of(type="grpo").as_json()))
    assert data["objective"]["type"] == "grpo"
    assert data["claim"] == "never"


SEVERAL_TURNS = (
    [
        objective({"type": "rpg", "divergence": kind, "estimator": estimator, "level": level, "clip": {"type": "none"}})
        for kind in ("reverse", "unnormalized_reverse", "forward", "unnormalized_forward")
        for estimator in ("reinforce", "differentiable")
        for level in ("token", "to_go", "sequence")
    ]
    + [item for kl in ("full", "top_k") for item in summed(kl)]
    + [objective({"type": kind}) for kind in ("grpo", "ppo", "dapo", "gspo", "rloo")]
)


@pytest.mark.more
@pytest.mark.parametrize("turns", ["outcome", "turn"])
@pytest.mark.parametrize("item", SEVERAL_TURNS, ids=lambda item: json.dumps(item.model_dump(mode="json"))[:90])
def test_every_claim_holds_with_given_tokens_and_rewards_of_turns(
    item: certificate.Objective, turns: certificate.Turns
) -> None:
    if turns == "turn" and item.ratio_over != "token":
        return  # refused: a whole response has one weight
    found = certify(item, turns)
    assert found.holds
    assert found.num_cases == 2 * 6 * 4 + 2 * 4, "and one world of policies far apart"
    if item.exact == "always":
        assert max(finding.error for finding in found.findings) <= 1e-10


def test_a_world_of_several_turns_lists_every_response_with_what_was_given() -> None:
    generator = torch.Generator().manual_seed(0)
    world = enumerate_world(3, 5, generator, turns=True)
    given = (world.tokens == 0) & ~world.response_mask & (world.tokens.cumsum(-1) > 0)
    assert (world.chance < 1).any()
    assert given.any(), "a 0 that is given ends nothing"
    total = response_probabilities(world, world.policy(generator)).sum().item()
    assert math.isclose(total, 1, rel_tol=1e-12)
    assert world.earlier[~world.response_mask].abs().sum() == 0
    assert (world.earlier > 0).any()


def test_what_is_said_behind_a_new_context_follows_from_that_context_alone() -> None:
    world = enumerate_world(3, 5, torch.Generator().manual_seed(4), turns=True)
    seen: dict[tuple[int, ...], set[int]] = {}
    for row in range(len(world.tokens)):
        tokens, sampled = world.tokens[row].tolist(), world.response_mask[row].tolist()
        given = [place for place in range(4) if not sampled[place] and tokens[place] and sampled[place + 1]]
        if given:  # the last token, given: a new context, after whatever was said before it
            seen.setdefault(tuple(tokens[: given[0]]), set()).add(int(world.prefixes[row, given[0] + 1]))
    assert {(1,), (2, 1), (1, 0, 1)} <= set(seen)
    assert len(set.union(*seen.values())) == 1
    goes_on = {
        tuple(row[:3]): int(prefixes[2]) for row, prefixes in zip(world.tokens.tolist(), world.prefixes, strict=True)
    }
    assert goes_on[1, 0, 0] != goes_on[1, 2, 0]


def test_a_loss_that_trains_on_given_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = certificate._cases(several_turns=True)
    was_given = (cases.tokens > 0) & ~cases.response_mask
    trained = dataclasses.replace(cases, response_mask=cases.response_mask | was_given)
    monkeypatch.setattr(certificate, "_cases", lambda **_: trained)
    assert not certify(objective({"type": "rpg", "clip": {"type": "none"}}), "outcome").holds
