"""The sentinel: an engine that does not hold the learner's weights is found at once."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from rpg.samplers.sentinel import LogprobsFn, Probe, Sentinel, StaleEngineError, open_sentinel
from rpg.samplers.transformers.sampler import TransformersSampler, model_logprobs
from specs.schema.rollout import VllmRollout
from tests.rpg.tiny_engine import EOS, PAD, moved, qwen3

PROBE = Probe(token_ids=(5, 7, 3, 4, 9, 2, EOS), prompt_length=1)
LONG_PROBE = Probe(token_ids=(5, 7, 3, 4, 9, 2) * 4, prompt_length=1)


def learner_of(model: PreTrainedModel) -> LogprobsFn:
    def logprobs(token_ids: Sequence[int], prompt_length: int) -> list[float]:
        return model_logprobs(model, token_ids, prompt_length=prompt_length)

    return logprobs


@pytest.fixture
def sampler() -> TransformersSampler:
    return TransformersSampler(qwen3(), eos_id=EOS, pad_id=PAD, max_concurrent=4)


def test_an_engine_with_the_learners_weights_passes(sampler: TransformersSampler) -> None:
    learner = moved(qwen3())
    sampler.load_weights(learner.named_parameters(), policy_version=1)

    sentinel = Sentinel(PROBE, tolerance=1e-4)
    assert sentinel.check(sampler, learner_of(learner)) < 1e-5
    nudge(learner)
    assert 0 < sentinel.check(sampler, learner_of(learner)) == sentinel.difference


def test_an_engine_left_behind_by_the_learner_is_caught_with_the_figure(sampler: TransformersSampler) -> None:
    learner = moved(qwen3())

    with pytest.raises(StaleEngineError, match=r"after load 0 .* differ by [0-9.]+ nats, allowed 0\.05 \(rollout\."):
        Sentinel(PROBE, tolerance=0.05).check(sampler, learner_of(learner))


def test_one_stale_tensor_is_caught(sampler: TransformersSampler) -> None:
    learner = qwen3()
    with torch.no_grad():
        learner.model.layers[1].mlp.down_proj.weight[0].mul_(1.5)

    with pytest.raises(StaleEngineError):
        Sentinel(PROBE, tolerance=1e-3).check(sampler, learner_of(learner))


def test_logprobs_that_are_no_numbers_are_stale(sampler: TransformersSampler) -> None:
    def broken(_: Sequence[int], __: int) -> list[float]:
        return [math.nan] * 6

    with pytest.raises(StaleEngineError, match="differ by nan nats"):
        Sentinel(PROBE, tolerance=math.inf).check(sampler, broken)


def test_a_probe_of_another_length_is_the_callers_mistake(sampler: TransformersSampler) -> None:
    with pytest.raises(ValueError, match="shorter"):
        Sentinel(PROBE, tolerance=0.05).check(sampler, partial(lambda *_: [0.0]))


def test_the_bound_leaves_room_for_what_bfloat16_rounds_away() -> None:
    exact, rounded = qwen3(), qwen3().to(torch.bfloat16)
    with torch.no_grad():
        for model in (exact, rounded):
            model.model.norm.weight.mul_(4)  # logits as far apart as those of a trained model
    learner = TransformersSampler(rounded, eos_id=EOS, pad_id=PAD, max_concurrent=4)
    loose = open_sentinel(VllmRollout(engine="vllm"), PROBE, precision="bfloat16", device_type="cuda")
    tight = open_sentinel(VllmRollout(engine="vllm"), PROBE, precision="float32", device_type="cpu")
    given = VllmRollout(engine="vllm", sentinel_tolerance=0.2)

    assert tight.token_tolerance < loose.check(learner, learner_of(exact)) < loose.token_tolerance
    assert loose.mean_difference < loose.tolerance
    with pytest.raises(StaleEngineError):
        tight.check(learner, learner_of(exact))
    assert open_sentinel(given, PROBE, precision="float32", device_type="cpu").tolerance == 0.2


@pytest.mark.parametrize(
    ("off", "is_stale"), [([1.15] + [0.0] * 22, False), ([0.25] * 23, True), ([2.3] + [0.0] * 22, True)]
)
def test_in_bfloat16_one_token_may_be_far_off_and_all_of_them_may_not(
    sampler: TransformersSampler, off: list[float], is_stale: bool
) -> None:
    sentinel = open_sentinel(VllmRollout(engine="vllm"), LONG_PROBE, precision="bfloat16", device_type="cuda")

    def learner(ids: Sequence[int], prompt_length: int) -> list[float]:
        own = sampler.logprobs(ids, prompt_length=prompt_length)
        return [logprob + more for logprob, more in zip(own, off, strict=True)]

    if is_stale:
        with pytest.raises(
            StaleEngineError, match=r"in the mean, allowed 0\.2 \(rollout\.sentinel_tolerance\), and by"
        ):
            sentinel.check(sampler, learner)
    else:
        assert sentinel.check(sampler, learner) == pytest.approx(1.15, abs=1e-5)
        assert sentinel.mean_difference == pytest.approx(0.05, abs=1e-5)


def test_an_engine_that_stands_still_is_caught_whatever_the_bound(sampler: TransformersSampler) -> None:
    sentinel, learner = Sentinel(LONG_PROBE, tolerance=math.inf), qwen3()
    sentinel.check(sampler, learner_of(learner))
    sentinel.check(sampler, learner_of(learner))  # a load of the same weights
    nudge(learner)

    with pytest.raises(StaleEngineError, match="the same bits as before the load, although the learner's"):
        sentinel.check(sampler, learner_of(learner))
    sampler.load_weights(learner.named_parameters(), policy_version=1)
    sentinel.check(sampler, learner_of(learner))


def test_an_engine_that_rounds_more_than_its_learner_may_stand_still(sampler: TransformersSampler) -> None:
    coarse = open_sentinel(VllmRollout(engine="vllm"), LONG_PROBE, precision="float32", device_type="cuda")
    learner = qwen3()
    coarse.check(sampler, learner_of(learner))
    nudge(learner)

    coarse.check(sampler, learner_of(learner))


def nudge(model: PreTrainedModel) -> None:
    """An update far below any bound."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-5)
