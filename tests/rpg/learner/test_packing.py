"""Sequences end to end in one row are attended to as if each were alone."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rpg.learner import packing
from rpg.learner.packing import Packing
from rpg.learner.packing_trial import try_packing
from rpg.learner.policy import Policy
from tests.rpg.tiny_engine import gpt2, llama, qwen3, sharpened
from tests.rpg.tiny_run import finish, group_of, start

FAMILIES = ((11,), (6,), (6,), (6, 3, 3, 1, 6), (2, 4), (3, 1, 1), (2, 5, 3))
"""Length of each prompt, then those of its responses."""


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


def packed_row() -> tuple[torch.Tensor, Packing, list[torch.Tensor]]:
    """Token ids of a row [1, tokens], what it holds, and for each sequence where its tokens stand in the row."""
    tokens = sum(map(sum, FAMILIES))
    ids = torch.randint(0, 12, (1, tokens), generator=torch.Generator().manual_seed(0))
    sequences, start = [], 0
    for prompt, *responses in FAMILIES:
        end = start + prompt
        if not responses:
            sequences.append(torch.arange(start, end))
        for response in responses:
            sequences.append(torch.cat([torch.arange(start, start + prompt), torch.arange(end, end + response)]))
            end += response
        start = end
    return ids, Packing(FAMILIES, ids.device), sequences


@pytest.mark.parametrize("long", [packing.LONG, 3])
@pytest.mark.parametrize("make", [qwen3, llama, gpt2, sliding])
def test_a_packed_row_has_the_states_and_gradients_of_its_sequences(
    make: Callable[[], PreTrainedModel], long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LONG", long)
    model = make().double()
    ids, row, sequences = packed_row()
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    assert row.layers == model.config.num_hidden_layers
    apart = torch.cat([hidden(model, "sdpa", ids[:, sequence]) for sequence in sequences], dim=1)
    together = packed[:, torch.cat(sequences)]
    torch.testing.assert_close(together, apart)
    direction = torch.randn(apart.shape, generator=torch.Generator().manual_seed(1), dtype=apart.dtype)
    weights = list(model.base_model.parameters())
    one, two = (torch.autograd.grad((states * direction).sum(), weights) for states in (together, apart))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)  # norms are taken in float32


def test_it_is_the_block_diagonal_mask_that_transformers_makes_of_the_positions() -> None:
    model = sliding()
    lengths = (11, 6, 6, 6, 3, 1)
    ids = torch.randint(0, 12, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    row = Packing(tuple((length,) for length in lengths), ids.device)
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    torch.testing.assert_close(packed, hidden(model, "sdpa", ids, position_ids=row.position_ids))


def test_without_packing_a_window_still_ends_what_a_token_sees() -> None:
    model = sliding()
    ids = torch.randint(0, 12, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hidden(model, packing.ATTENTION, ids), hidden(model, "sdpa", ids))


def test_a_model_that_does_not_keep_them_apart_is_not_packed() -> None:
    model = qwen3()
    model.config._attn_implementation = packing.ATTENTION
    policy = Policy(model, temperature=1.0)
    assert try_packing(policy, model.config, torch.device("cpu"), precision="float32").keeps_apart
    model.config._attn_implementation = "sdpa"
    trial = try_packing(policy, model.config, torch.device("cpu"), precision="float32")
    assert not trial.keeps_apart
    assert "does not keep them apart" in str(trial)


class RunsOn(Policy):
    """Says that its attention knows packed rows, and attends to the whole row."""

    def forward(self, input_ids, sources, targets, temperature=None, packing=None):
        if packing:
            packing.layers += self.model.config.num_hidden_layers
        return super().forward(input_ids, sources, targets, temperature)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [qwen3, llama, gpt2])
def test_the_trial_tells_rounding_from_sequences_that_see_each_other(
    make: Callable[[], PreTrainedModel], precision: str
) -> None:
    model = make().to(getattr(torch, precision))
    model.config._attn_implementation = packing.ATTENTION
    apart, together = (
        try_packing(kind(model, temperature=1.0), model.config, torch.device("cpu"), precision=precision)
        for kind in (Policy, RunsOn)
    )
    assert apart.keeps_apart
    assert not together.keeps_apart
    assert f"allowed {together.tolerance:g}" in str(together)


ONE_RANK_ROUNDS_MORE = """
import torch
from rpg.learner import packing
from rpg.learner.packing_trial import try_packing
from rpg.learner.policy import Policy
from rpg.processes import ranks
from tests.rpg.tiny_engine import qwen3

class Rounds(Policy):
    def forward(self, *arguments, packing=None):
        logprobs, entropies = super().forward(*arguments, packing=packing)
        return logprobs + 9.0 * (packing is not None) * ranks.rank(), entropies

ranks.join("cpu")
model = qwen3()
model.config._attn_implementation = packing.ATTENTION
trial = try_packing(Rounds(model, temperature=1.0), model.config, torch.device("cpu"), precision="float32")
print(trial.keeps_apart)
ranks.leave()
"""


@pytest.mark.more
def test_ranks_that_find_different_things_agree_to_pad() -> None:
    first, second = (start([sys.executable, "-c", ONE_RANK_ROUNDS_MORE], environment) for environment in group_of(2))
    assert finish(first, second).splitlines()[-1] == "False", "rank 0 alone would have packed"


def unequal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What PyTorch says of its kernel for GPUs: causal, the last query at the last key, `window_size[0]` keys back."""
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert (longest_query, longest_key) == (int(query_bounds.diff().max()), int(key_bounds.diff().max()))
    outputs = []
    for sequence in range(len(query_bounds) - 1):
        q = query[query_bounds[sequence] : query_bounds[sequence + 1]]
        k, v = (states[key_bounds[sequence] : key_bounds[sequence + 1]] for states in (key, value))
        ahead = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (ahead >= 0) & ((window_size[0] < 0) | (ahead <= window_size[0]))
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_for_unequal_lengths_is_given_the_same_sequences(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    row = Packing(((20,), (12, 12, 7, 1), (10, 15), (3, 20, 9)), torch.device("cpu"))
    tokens = sum(segment.length for segment in row.segments)
    query, key, value = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", unequal_attention)
    packing._shared_keys.cache_clear()
    output = packing._flash(query, key, value, row, 0.3, window)
    packing._shared_keys.cache_clear()
    assert torch.allclose(output, packing._attend(query, key, value, row, 0.3, window), atol=1e-6)


def test_a_gpu_without_the_kernel_for_unequal_lengths_takes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    packing._has_flash.cache_clear()
    assert [packing._has_flash(torch.device("cuda", index)) for index in capabilities] == [True, False]
    assert not packing._has_flash(torch.device("cpu"))
    packing._has_flash.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [qwen3, llama])
def test_the_kernels_of_a_gpu_give_the_same_states(make: Callable[[], PreTrainedModel], dtype: torch.dtype) -> None:
    model = make().to("cuda", dtype)
    families = ((200,), (120, 120, 7, 1), (100, 150), (3, 200, 90))
    ids = torch.randint(0, 12, (1, sum(map(sum, families))), device="cuda")
    row = Packing(families, ids.device)
    packed = hidden(model, packing.ATTENTION, ids, packing=row, position_ids=row.position_ids)
    # On the host the same row goes through the other kernel, sequence by sequence, which is held to each alone above.
    row = Packing(families, torch.device("cpu"))
    model = model.to("cpu", torch.float32)
    apart = hidden(model, packing.ATTENTION, ids.cpu(), packing=row, position_ids=row.position_ids)
    assert (packed.cpu() - apart).norm() < 0.02 * apart.norm()
