"""Times of passes by arithmetic, against what was worked out apart from it, and against each other."""

from pathlib import Path

import pytest

from benchmarks.roofline import LENGTH, MODELS, RESPONSES, TOKENS, WAYS
from pipelines.planning.gpu_hours import gpu_hours
from pipelines.planning.model_shape import model_shape, shape_of_settings
from pipelines.planning.roofline import Kernels, step_seconds, token_seconds
from specs.machine.cards import CARDS, H100, peak_flops
from tests.pipelines.planning.test_estimate import experiment


@pytest.mark.parametrize(
    ("model", "plain_ms", "fused_ms"), [("0.6B", 347, 232), ("1.7B", 572, 415), ("4B, selective", 1260, 881)]
)
def test_a_pass_takes_what_was_worked_out_by_hand(model: str, plain_ms: float, fused_ms: float) -> None:
    """14,592 tokens on an H100, from the sizes of each tensor that a layer reads and writes."""
    settings, recomputes = MODELS[model]
    shape = shape_of_settings(settings)
    assert shape is not None
    for kernels, expected in ((Kernels(), plain_ms), (Kernels(fused=True), fused_ms)):
        each = token_seconds(shape, length=LENGTH, responses=RESPONSES, kernels=kernels)
        milliseconds = TOKENS * (each.forward + each.backward + recomputes * each.recompute_some) * 1e3
        assert milliseconds == pytest.approx(expected, rel=0.12)


def test_the_hours_of_training_are_those_of_logprobs_passes_and_updates(tmp_path: Path) -> None:
    plain = experiment(tmp_path, "qwen3")
    shape = model_shape(plain)
    assert shape is not None
    step = step_seconds(plain, shape)
    assert gpu_hours(plain, shape).training == pytest.approx(3 * (step.logprobs + step.updates) / 3600)
    recomputing = step_seconds(experiment(tmp_path, "qwen3", "training.gradient_checkpointing=true"), shape)
    some = step_seconds(experiment(tmp_path, "qwen3", "training.gradient_checkpointing=selective"), shape)
    assert step.updates < some.updates < recomputing.updates
    assert step.share_of_peak > some.share_of_peak > recomputing.share_of_peak


def test_each_kernel_takes_time_off_a_pass() -> None:
    shape = shape_of_settings(MODELS["0.6B"][0])
    assert shape is not None
    times = [token_seconds(shape, length=LENGTH, responses=RESPONSES, kernels=way) for way in WAYS.values()]
    whole = [each.forward + each.backward for each in times]
    assert whole == sorted(whole, reverse=True)
    assert len(set(whole)) == len(whole)


def test_a_card_is_known_by_the_drivers_name() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "Tesla T4": 0, "X": 0}
    assert {name: peak_flops(name) for name in names} == names
    assert [card.memory_gib for card in CARDS] == sorted(card.memory_gib for card in CARDS)
    assert H100 in CARDS
