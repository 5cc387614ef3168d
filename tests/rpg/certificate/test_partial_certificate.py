"""Certificates of runs whose sampler changes within a response."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rpg.certificate import certificate
from rpg.certificate.cases import SITUATIONS, Case, draw_cut_cases
from rpg.certificate.certificate import Certificate, certify_experiment
from rpg.certificate.enumeration import response_probabilities
from rpg.certificate.reading import in_words
from tests.rpg.certificate.test_coverage import experiment


def found(**objective: Any) -> Certificate:
    spec = experiment(objective__type="rpg", rollout__max_staleness=1)
    partial = spec.rollout.model_copy(update={"partial": True})
    changed = type(spec).model_validate(
        {**spec.model_dump(mode="json"), "rollout": partial.model_dump(mode="json"), "objective": objective}
    )
    return certify_experiment(changed)[1]


@pytest.mark.parametrize("level", ["token", "to_go", "sequence"])
@pytest.mark.parametrize("divergence", ["unnormalized_reverse", "forward", "none"])
def test_what_is_exact_always_is_exact_with_a_sampler_that_changes(level: str, divergence: str) -> None:
    each = found(type="rpg", divergence=divergence, level=level, clip={"type": "none"})
    assert each.holds
    assert (each.partial.error <= 1e-10) == (each.claim == "always"), each.claim


def test_responses_that_end_before_the_change_are_short_and_have_another_gradient() -> None:
    partial = found(type="rpg", clip={"type": "none"}).partial
    assert partial.short_length < 0.6 * partial.mean_length
    assert partial.short_error > 0.5
    assert partial.short_cosine < 0.9


def test_the_first_tokens_of_a_case_are_the_older_samplers() -> None:
    """Cases of one world differ only in the position of the change."""
    cases: dict[tuple[int, int, int], list[Case]] = {}
    for case in draw_cut_cases():
        key = case.world.vocabulary, case.world.length, case.situation
        cases.setdefault(key, []).append(case)
    first, second = cases[3, 3, SITUATIONS.index(("on_policy", "apart"))][:2]
    assert (first.cut, second.cut) == (1, 2)
    world = first.world
    assert torch.equal(world.prefixes, second.world.prefixes)
    older, newer = second.sampler, first.policy
    for response, probability in enumerate(response_probabilities(world, first.engine).tolist()):
        expected = 1.0
        for position in range(int(world.response_mask[response].sum())):
            table = older if position < 1 else newer
            row = torch.softmax(table[world.prefixes[response, position]], -1)
            expected *= float(row[world.tokens[response, position]])
        assert probability == pytest.approx(expected, rel=1e-12)


def test_a_ratio_over_the_newest_policy_alone_would_be_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    right = certificate._cases(is_cut=True)
    newest = torch.cat([case.world.logprobs(case.policy).flatten() for case in draw_cut_cases()])
    old_logprobs = torch.zeros_like(right.old_logprobs)
    width = torch.tensor([case.world.length for case in draw_cut_cases()])[right.case_of_response]
    old_logprobs[torch.arange(old_logprobs.shape[1]) < width[:, None]] = newest
    cases = certificate._cases
    wrong = replace(right, old_logprobs=old_logprobs)
    monkeypatch.setattr(certificate, "_cases", lambda **kind: wrong if kind.get("is_cut") else cases(**kind))
    each = found(type="rpg", clip={"type": "none"})
    assert not each.holds
    assert each.partial.error > 0.1


def test_the_meaning_names_the_bias_towards_short_responses() -> None:
    told = in_words(found(type="rpg").as_json(), updates=1, max_staleness=1)["meaning"]
    assert "rollout.partial: if a newer policy continues a response, the gradient is up to" in told
    assert "a bias towards short responses in the first steps" in told
    assert "rollout.partial true" not in told, "the certificate covers it"
    alone = in_words(certificate.certify(experiment().objective).as_json(), updates=1)["meaning"]
    assert "partial" not in alone
