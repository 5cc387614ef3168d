"""Configs of models that papers of this field train, for estimates before anything is downloaded."""

from typing import Any

_QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
_QWEN3_0_6B = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_QWEN3_4B = {
    **_QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN2_5_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen3-0.6B-Base": _QWEN3_0_6B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_5_7B,
    "Qwen/Qwen2.5-Math-7B": {**_QWEN2_5_7B, "max_position_embeddings": 4096},
}
"""Hub id -> the fields of its config.json that estimates read."""
