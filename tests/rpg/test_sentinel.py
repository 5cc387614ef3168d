"""The sentinel: an engine that does not hold the learner's weights is found at once."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from rpg.engines.sentinel import LogprobsFn, Probe, StaleEngineError, check, tolerance_of
from rpg.engines.transformers import TransformersSampler, model_logprobs
from specs.schema.rollout import VllmRollout
from tests.rpg.tiny_engine import EOS, PAD, moved, qwen3

PROBE = Probe(token_ids=(5, 7, 3, 4, 9, 2, EOS), prompt_length=1)


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

    assert check(sampler, learner_of(learner), PROBE, tolerance=1e-4) < 1e-5


def test_an_engine_left_behind_by_the_learner_is_caught_with_the_figure(sampler: TransformersSampler) -> None:
    learner = moved(qwen3())

    with pytest.raises(StaleEngineError, match=r"after load 0 .* differ by [0-9.]+ nats, allowed 0\.05 \(rollout\."):
        check(sampler, learner_of(learner), PROBE, tolerance=0.05)


def test_one_stale_tensor_is_caught(sampler: TransformersSampler) -> None:
    learner = qwen3()
    with torch.no_grad():
        learner.model.layers[1].mlp.down_proj.weight[0].mul_(1.5)

    with pytest.raises(StaleEngineError):
        check(sampler, learner_of(learner), PROBE, tolerance=1e-3)


def test_logprobs_that_are_no_numbers_are_stale(sampler: TransformersSampler) -> None:
    def broken(_: Sequence[int], __: int) -> list[float]:
        return [math.nan] * 6

    with pytest.raises(StaleEngineError, match="differ by nan nats"):
        check(sampler, broken, PROBE, tolerance=math.inf)


def test_a_probe_of_another_length_is_the_callers_mistake(sampler: TransformersSampler) -> None:
    with pytest.raises(ValueError, match="shorter"):
        check(sampler, partial(lambda *_: [0.0]), PROBE, tolerance=0.05)


def test_the_bound_leaves_room_for_what_bfloat16_rounds_away() -> None:
    exact, rounded = qwen3(), qwen3().to(torch.bfloat16)
    with torch.no_grad():
        for model in (exact, rounded):
            model.model.norm.weight.mul_(4)  # logits as far apart as those of a trained model
    learner = TransformersSampler(rounded, eos_id=EOS, pad_id=PAD, max_concurrent=4)
    bound = tolerance_of(VllmRollout(engine="vllm"), precision="bfloat16", device_type="cuda")
    tight = tolerance_of(VllmRollout(engine="vllm"), precision="float32", device_type="cpu")

    assert tight < check(learner, learner_of(exact), PROBE, tolerance=bound) < bound
    assert (
        tolerance_of(VllmRollout(engine="vllm", sentinel_tolerance=0.2), precision="float32", device_type="cpu") == 0.2
    )
