"""The model that the benchmarks of sampling and of a whole step share."""

import os

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = int(os.environ.get("BENCHMARK_VOCABULARY", "512"))
PAD = VOCABULARY - 1


def small_qwen3(*, ends: list[int] | None) -> Qwen3ForCausalLM:
    """Qwen3 architecture, 4.85 M parameters with 512 tokens, the same random weights each time; any of `ends` ends a
    response."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config)
