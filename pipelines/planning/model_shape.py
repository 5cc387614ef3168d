"""The figures of a decoder that memory and time depend on, from its config; nothing is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.schema.experiment import Experiment
from specs.schema.model import PretrainedModel, ScratchModel


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a decoder that memory depends on."""

    parameters: int
    matrix_parameters: int
    """Parameters that every token is multiplied with: of the embeddings only the output head counts."""
    hidden_size: int
    layers: int
    key_value_size: int
    """Size of a token's key, of one layer, over all its heads."""
    attention_size: int
    """Size of a token's query, of one layer, over all its heads."""
    intermediate_size: int
    vocab_size: int
    context: int
    is_gated: bool
    """Whether the MLP has a gate, as in Llama's descendants; GPT-2's has none."""
    norms_queries: bool
    """Whether queries and keys are normalised, as in Qwen3."""


def model_shape(experiment: Experiment) -> ModelShape | None:
    """The shape, from the spec's own architecture, the config.json of a local or cached model, or CONFIGS; None where
    there is none of these."""
    model = experiment.model
    if isinstance(model, ScratchModel):
        tokenizer = model.tokenizer
        vocab_size = tokenizer.vocab_size if tokenizer.type == "bpe" else 258
        return shape_of_config({**model.config, "model_type": model.model_type, "vocab_size": vocab_size})
    config = _config_file(model)
    try:
        fields = json.loads(config.read_text(encoding="utf-8")) if config else CONFIGS.get(model.path)
    except (OSError, ValueError):  # whoever opens the model names what is wrong with it
        return None
    return shape_of_config(fields) if isinstance(fields, dict) else None


def _config_file(model: PretrainedModel) -> Path | None:
    local = Path(model.path) / "config.json"
    if local.is_file():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    return Path(cached) if isinstance(cached, str) else None


def shape_of_config(config: dict[str, Any]) -> ModelShape | None:
    """Reads the names that Llama's descendants share, and GPT-2's; None where a needed one is missing."""

    def read(*names: str, default: int | None = None) -> int | None:
        sizes = (config[name] for name in names if isinstance(config.get(name), int))
        return next((size for size in sizes if size > 0), default)

    hidden, layers = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
    heads = read("num_attention_heads", "n_head")
    vocab = read("vocab_size")
    if hidden is None or layers is None or heads is None or vocab is None:
        return None
    head_size = read("head_dim", default=hidden // heads) or 1
    key_value = head_size * (read("num_key_value_heads", default=heads) or heads)
    gated = "n_embd" not in config
    intermediate = read("intermediate_size", "n_inner", default=4 * hidden) or 4 * hidden
    attention = 2 * hidden * heads * head_size + 2 * hidden * key_value
    layer = attention + (3 if gated else 2) * hidden * intermediate + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings", not gated) else 2)
    context = read("max_position_embeddings", "n_positions", default=0) or 0
    if not gated:
        embeddings += context * hidden  # learned positions
    body = layers * layer + hidden
    return ModelShape(
        parameters=body + embeddings,
        matrix_parameters=body + vocab * hidden,
        hidden_size=hidden,
        layers=layers,
        key_value_size=key_value,
        attention_size=heads * head_size,
        intermediate_size=intermediate,
        vocab_size=vocab,
        context=context,
        is_gated=gated,
        norms_queries=config.get("model_type", "") in _NORMS_QUERIES,
    )


_NORMS_QUERIES = ("qwen3", "qwen3_moe", "olmo2", "gemma3_text")
"""Architectures that normalise queries and keys."""
_QWEN3 = {
    "model_type": "qwen3",
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
_QWEN3_1_7B = {
    **_QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
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
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-1.7B-Base": _QWEN3_1_7B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_5_7B,
    "Qwen/Qwen2.5-Math-7B": {**_QWEN2_5_7B, "max_position_embeddings": 4096},
}
"""Hub id -> the fields of its config.json that estimates read."""
