"""Sequences end to end in one row are attended to as if each were alone."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rpg.engines import packing
from rpg.engines.packing import Packing
from tests.rpg.tiny_engine import gpt2, llama, qwen3, sharpened

LENGTHS = (11, 6, 6, 6, 3, 1)


def sliding() -> PreTrainedModel:
    """The second layer sees four tokens back."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        use_sliding_window=True,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    return sharpened(Qwen3ForCausalLM(config))


def hidden(model: PreTrainedModel, implementation: str, ids: torch.Tensor, **inputs: object) -> torch.Tensor:
    model.config._attn_implementation = implementation
    states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    return states


@pytest.mark.parametrize("make", [qwen3, llama, gpt2, sliding])
def test_a_packed_row_has_the_states_and_gradients_of_its_sequences(make: Callable[[], PreTrainedModel]) -> None:
    model = make().double()
    ids = torch.randint(0, 12, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    row = Packing.of(LENGTHS, ids.device)
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    assert row.layers == model.config.num_hidden_layers
    apart = torch.cat([hidden(model, "sdpa", part) for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart)
    direction = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1), dtype=packed.dtype)
    weights = list(model.base_model.parameters())
    one, two = (torch.autograd.grad((states * direction).sum(), weights) for states in (packed, apart))
    torch.testing.assert_close(one, two)


def test_it_is_the_block_diagonal_mask_that_transformers_makes_of_the_positions() -> None:
    model = sliding()
    ids = torch.randint(0, 12, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    row = Packing.of(LENGTHS, ids.device)
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    torch.testing.assert_close(packed, hidden(model, "sdpa", ids, position_ids=row.position_ids))


def test_without_packing_a_window_still_ends_what_a_token_sees() -> None:
    model = sliding()
    ids = torch.randint(0, 12, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hidden(model, packing.ATTENTION, ids), hidden(model, "sdpa", ids))


def test_a_model_that_does_not_keep_them_apart_is_not_packed() -> None:
    from rpg.engines.deepspeed import keeps_sequences_apart
    from rpg.engines.policy import Policy

    model = qwen3()
    model.config._attn_implementation = packing.ATTENTION
    policy = Policy(model, temperature=1.0)
    assert keeps_sequences_apart(policy, model.config, torch.device("cpu"), tolerance=1e-4)
    model.config._attn_implementation = "sdpa"
    assert not keeps_sequences_apart(policy, model.config, torch.device("cpu"), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [qwen3, llama])
def test_the_kernel_for_unequal_lengths_gives_the_same_states(make: Callable[[], PreTrainedModel]) -> None:
    model = make().to("cuda", torch.bfloat16)
    ids = torch.randint(0, 12, (1, 448), device="cuda")
    row = Packing.of((200, 120, 120, 7, 1), ids.device)
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    apart = torch.cat([hidden(model, "sdpa", part) for part in ids.split(row.lengths, dim=1)], dim=1)
    assert (packed - apart).norm() < 0.02 * apart.norm()
