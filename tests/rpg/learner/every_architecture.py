"""Every causal architecture of the installed transformers as a tiny model: does it train, and with which sampler?"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rpg.learner.own_logits import check_logits, prove_policy, switch_off_noise
from rpg.learner.policy import Policy
from rpg.samplers.transformers.cache import caches_all_layers
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.types import Sampling
from specs.errors import SpecError

VOCABULARY = 97
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 128, "n_positions": 128, "lru_width": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8},
}
"""Field of a config -> its value in a tiny one, if the config has the field."""
_LATENT = "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 minicpm3 youtu"
OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4, "num_experts_per_tok": 2} for name in _LATENT.split()},
    **{name: {"mamba_n_heads": 8, "mamba_d_head": 16} for name in ("bamba", "granitemoehybrid")},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "doge": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "kimi_linear": {"num_key_value_heads": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 32, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "embedding_dim": 64},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32},
}
"""Architecture -> further fields of a tiny one."""


TRAINS = "trains"
VLLM = "trains with vLLM"
NOT_TRIED = "not tried: no tiny model of it runs here"
"""An architecture of which no tiny model runs on token ids: a user's model has the same error."""


def architectures() -> list[str]:
    """Names of all causal architectures."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> PretrainedConfig:
    """A config of the architecture with few and small layers."""
    config: PretrainedConfig = AutoConfig.for_model(name)
    for part in _parts(config):
        held = vars(part)
        sizes = {field: size for field, size in SIZES.items() if isinstance(held.get(field), int)}
        for field, size in (
            sizes | {field: size for field, size in OWN.get(name, {}).items() if field in held}
        ).items():
            setattr(part, field, size)
        if held.get("is_decoder") is False:
            part.is_decoder = True
        if isinstance(held.get("layer_types"), list):
            part.layer_types = [*dict.fromkeys(part.layer_types)][-2:] * 2
            part.layer_types = part.layer_types[: part.num_hidden_layers]
    return config


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def loud_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model in training mode, with weights that make its logits large and its biases count."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4)
            elif "bias" in name:
                weight.normal_(0, 0.5)
    switch_off_noise(model)
    return model


def outcome_of(name: str) -> str:
    """Returns TRAINS with both samplers, VLLM with vLLM's alone, NOT_TRIED, or `refused: ` and why."""
    try:
        config = tiny_config(name)
        loud_model(config)(input_ids=torch.arange(5, 15)[None], use_cache=False)
    except Exception:  # it is made of parts that only a user can name, or wants a library
        return NOT_TRIED
    try:
        check_logits(config)
        policy = Policy(loud_model(config), temperature=1.0)
        prove_policy(policy, config, torch.device("cpu"))
    except SpecError as error:
        return f"refused: {error.issues[0].given.partition(': ')[2]}"
    try:
        if not caches_all_layers(config):
            return VLLM
        sampled, scored = sampled_and_scored(policy)
    except Exception:  # of an architecture whose decoding is its own
        return VLLM
    return TRAINS if (sampled - scored).abs().max() < 1e-3 else VLLM


def sampled_and_scored(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of a response's tokens by the transformers sampler, and by the policy."""
    sampler = TransformersSampler(policy.model, eos_id=2, pad_id=0, max_concurrent=2, shared=True)
    prompt = [5, 6, 7, 8, 9]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=12)
    (group,) = sampler.generate([prompt], group_size=2, sampling=sampling, seeds=[0])
    first = group.rollouts[0]
    ids = torch.tensor([*prompt, *first.response_ids])
    sources = torch.arange(len(prompt) - 1, len(ids) - 1)
    with torch.no_grad():
        logprobs, _ = policy(ids[None], sources, ids[len(prompt) :])
    return torch.tensor(first.rollout_logprobs), logprobs
