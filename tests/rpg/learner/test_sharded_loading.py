"""For ZeRO 3 one rank reads a model, and it is cut up parameter by parameter."""

import json
import sys
from pathlib import Path

import pytest

from tests.rpg.tiny_run import finish, group_of, start

SHAPE = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}


def write_models(directory: Path) -> list[Path]:
    """Models whose files differ from their parameters: tied or not against what is written, experts by themselves."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
    from transformers import Qwen3MoeForCausalLM as Qwen3Moe

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    models = {
        "tied": Qwen3ForCausalLM(Qwen3Config(**NARROW, tie_word_embeddings=True)),
        "untied": Qwen3ForCausalLM(Qwen3Config(**NARROW, tie_word_embeddings=False)),
        "untied_by_its_values": Qwen3ForCausalLM(Qwen3Config(**NARROW, tie_word_embeddings=False)),
        "tied_and_written_twice": Qwen3ForCausalLM(Qwen3Config(**NARROW, tie_word_embeddings=True)),
        "experts": Qwen3Moe(Qwen3MoeConfig(**NARROW, **experts, tie_word_embeddings=False)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
    }
    for name, model in models.items():
        model.save_pretrained(directory / name)
    config = directory / "untied_by_its_values" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    weights = directory / "tied_and_written_twice" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    return [directory / name for name in models]


@pytest.mark.long
def test_two_ranks_load_the_model_that_transformers_reads_and_hold_half_of_it_each(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rpg.sharded_loading_worker", *map(str, write_models(tmp_path))]
    finish(*[start(command, environment) for environment in group_of(2)])
