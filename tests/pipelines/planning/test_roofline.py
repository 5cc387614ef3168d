"""Times of passes by arithmetic, compared with independent calculations and with each other."""

from pathlib import Path

import pytest

from benchmarks.roofline import LENGTH, MODELS, RESPONSES, TOKENS, WAYS
from pipelines.planning import roofline
from pipelines.planning.gpu_hours import gpu_hours
from pipelines.planning.model_shape import model_shape, shape_of_settings
from pipelines.planning.roofline import BANDWIDTH, PASS_BYTES, Kernels, step_seconds, token_seconds
from specs.machine.cards import CARDS, H100, peak_flops
from tests.pipelines.planning.test_estimate import experiment


@pytest.mark.parametrize(
    ("model", "plain_ms", "fused_ms"), [("0.6B", 347, 232), ("1.7B", 572, 415), ("4B, selective", 1260, 881)]
)
def test_a_pass_takes_what_was_worked_out_by_hand(
    model: str, plain_ms: float, fused_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """14,592 tokens on an H100, from the sizes of each tensor that a layer reads and writes; products at 620 TFLOP/s,
    attention at 350 and 260, memory at 2.8 TB/s."""
    for name, rate in {"PRODUCTS": 0.627, "ATTENTION": (0.354, 0.263), "BANDWIDTH": 0.836}.items():
        monkeypatch.setattr(roofline, name, rate)
    settings, recomputes = MODELS[model]
    shape = shape_of_settings(settings)
    assert shape is not None
    for kernels, expected in ((Kernels(), plain_ms), (Kernels(fused=True), fused_ms)):
        each = token_seconds(shape, length=LENGTH, responses=RESPONSES, kernels=kernels)
        milliseconds = TOKENS * (each.forward + each.backward + recomputes * each.recompute_some) * 1e3
        assert milliseconds == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize(
    ("model", "fused", "milliseconds"),
    [
        ("1.7B", True, 311.4),
        ("1.7B, selective", True, 319.9),
        ("1.7B, selective", False, 509.2),
        ("4B, selective", True, 697.5),
    ],
)
def test_a_pass_takes_what_it_took_on_an_h200(model: str, fused: bool, milliseconds: float) -> None:
    """8 responses of 1,568 tokens to a prompt of 256: what the GPU was busy for, docs/performance.md."""
    settings, recomputes = MODELS[model]
    shape = shape_of_settings(settings)
    tokens, h200 = 256 + 8 * 1568, next(card for card in CARDS if card.part == "H200")
    kernels = Kernels(fused=fused, head=True)
    each = token_seconds(shape, length=1824, responses=8 * 1568 / tokens, kernels=kernels, card=h200)
    seconds = tokens * (each.forward + each.backward + recomputes * each.recompute_some)
    seconds += PASS_BYTES * shape.parameters / (BANDWIDTH * h200.bandwidth)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_the_hours_of_training_are_those_of_logprobs_passes_and_updates(tmp_path: Path) -> None:
    plain = experiment(tmp_path, "qwen3")
    shape = model_shape(plain)
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


def test_a_sum_over_the_vocabulary_takes_time_for_the_references_logits_and_distributions(tmp_path: Path) -> None:
    plain = experiment(tmp_path, "qwen3")
    shape = model_shape(plain)
    assert shape is not None
    seconds = step_seconds(plain, shape)
    full, top_k = (step_seconds(experiment(tmp_path, "qwen3", f"objective.kl={kl}"), shape) for kl in ("full", "top_k"))
    assert full.updates > 1.2 * seconds.updates
    assert top_k.updates == seconds.updates
    # The first minibatch's distributions are kept before it is trained on, with its old logprobs.
    assert full.logprobs == top_k.logprobs == pytest.approx(2 * seconds.logprobs)
