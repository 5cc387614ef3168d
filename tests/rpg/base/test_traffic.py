"""The work of a pass, counted on meta tensors, against the same by hand and by PyTorch's counter."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rpg.base import traffic
from rpg.base.shape import counted, shape_of_config
from rpg.base.traffic import counting, traffic_of
from rpg.batches.batch import Microbatch
from rpg.learner.policy import Policy
from rpg.metrics import PassCounts
from rpg.pretrained import config_of_settings, model_without_weights

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
EXPERTS = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}


def test_an_operation_moves_what_it_reads_and_writes() -> None:
    one = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    with counting() as counter:
        doubled = one.float() * one.new_empty(4, 1, dtype=torch.float32).expand(4, 6)
        doubled.add_(1.0)
        one.T[:2].contiguous()
    work = counter.take(1)
    conversion, product, addition, copy = 24 * (2 + 4), 24 * (4 + 4) + 4 * 4, 24 * (4 + 4), 8 * 4
    assert (work.flops, work.bytes_moved) == (0, conversion + product + addition + copy)


@pytest.mark.parametrize("settings", [QWEN3, EXPERTS], ids=["dense", "experts"])
def test_products_of_a_pass_are_two_operations_a_weight_and_twice_that_back(settings: dict[str, Any]) -> None:
    shape, work = shape_of_config(settings), traffic_of(settings, tokens=64)
    head = shape.vocab_size * shape.hidden_size
    without_norms = pytest.approx(2 * (shape.matrix_parameters - head), rel=0.02)
    assert work.forward.flops == work.fused_forward.flops == without_norms
    assert work.backward.flops == 2 * work.forward.flops
    assert (work.head_forward.flops, work.head_backward.flops) == (2 * head, 6 * head)


def test_fused_kernels_move_less_than_half_and_logits_of_a_head_kernel_pass_by_once() -> None:
    work = traffic_of(QWEN3)
    assert work.fused_forward.bytes_moved < work.forward.bytes_moved / 2
    assert work.fused_backward.bytes_moved < work.backward.bytes_moved / 2
    assert work.kernel_head_forward.bytes_moved == 4 * 300 < work.head_forward.bytes_moved / 5


@pytest.mark.parametrize("settings", [QWEN3, EXPERTS], ids=["dense", "experts"])
def test_two_of_many_equal_layers_stand_for_all(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    two = traffic_of(settings, tokens=64)
    monkeypatch.setattr(traffic, "_are_alike", lambda _: False)
    assert traffic_of(settings, tokens=64) == two


def test_a_model_that_does_not_run_on_meta_tensors_has_a_shape_without_traffic() -> None:
    looks_at_values = {"model_type": "mamba", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1}
    assert counted(looks_at_values).traffic is None
    assert counted(QWEN3).traffic == traffic_of(QWEN3)


def test_the_arithmetic_of_mfu_is_that_of_the_passes() -> None:
    """By PyTorch's counter. It sees the head's logits twice, which the backward pass takes again, and does not see as
    many operations of the head's own gradient, a product added in place."""
    shape = shape_of_config(QWEN3)
    model = model_without_weights(config_of_settings(QWEN3)).to_empty(device="cpu").double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    batch = padded_pass(rows=3, length=10, targets=12)
    counts = PassCounts.of_passes([batch])
    with FlopCounterMode(display=False) as counter:  # type: ignore[no-untyped-call,unused-ignore]
        logprobs, _ = Policy(model, temperature=1.0)(batch.input_ids, batch.sources, batch.targets)
        logprobs.sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    without_norms = pytest.approx(shape.training_flops(counts.tokens, counts.responses, pairs=0), rel=0.02)
    assert by_operation[torch.ops.aten.mm] == without_norms
    assert counts.pairs == 3 * 10**2 / 2


def test_a_prompt_that_responses_share_counts_once() -> None:
    batch = padded_pass(rows=1, length=4 + 3 + 2, targets=5, packed=((4, 3, 2),))
    counts = PassCounts.of_passes([batch, padded_pass(rows=1, length=9, targets=5, counts=False)])
    assert (counts.tokens, counts.responses) == (9, 5)
    assert counts.pairs == 4 * 4 / 2 + (3 * 4 + 3 * 3 / 2) + (2 * 4 + 2 * 2 / 2)


def padded_pass(
    *, rows: int, length: int, targets: int, packed: tuple[tuple[int, ...], ...] = (), counts: bool = True
) -> Microbatch:
    places = torch.arange(targets)
    return Microbatch(
        input_ids=torch.ones(rows, length, dtype=torch.int64),
        packed=packed,
        sources=places,
        host_sources=places,
        targets=torch.ones(targets, dtype=torch.int64),
        tokens=places,
        response_mask=torch.ones(rows, length),
        places=places,
        rollouts=torch.arange(rows),
        rollout_logprobs=torch.zeros(targets),
        rewards=torch.zeros(rows),
        counts=counts,
    )
