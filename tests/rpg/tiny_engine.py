"""A policy small enough to enumerate, on disk, and the engines that sample from it."""

from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from rpg.types import Rollout, RolloutGroup, Sampling
from specs.schema.rollout import TransformersRollout, VllmRollout

EOS, PAD, VOCABULARY = 0, 1, 12
WORDS = ["<eos>", "<pad>", "a", "b", "ab", "ba", "c", "d", " ", "e", "fa", "bf"]
MAX_LENGTH = 64
PROMPT = [5, 7, 3]
PROMPTS = [[5, 6, 7], [8], [9] * 20, [3, 4], list(range(2, 12)) * 3]
"""Prompts of unequal lengths, a single token among them."""


def qwen3(vocabulary: int = VOCABULARY, context: int = 256, head_dim: int = 32) -> PreTrainedModel:
    """Two layers, grouped queries, tied head; weights large enough for its distributions to be far from flat."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    return sharpened(Qwen3ForCausalLM(config))


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    return sharpened(LlamaForCausalLM(config))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=EOS, bos_token_id=None
    )
    return sharpened(GPT2LMHeadModel(config))


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.eval()


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Another policy of the same shape, as after an update."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return copy.eval()


def open_engine(name: str, weights_dir: Path, *, max_concurrent: int = 128, max_length: int = MAX_LENGTH) -> Sampler:
    spec = {
        "transformers": TransformersRollout(max_concurrent=max_concurrent),
        "engines": TransformersRollout(max_concurrent=max_concurrent, engines=3),
        "vllm": VllmRollout(engine="vllm", max_concurrent=max_concurrent, cpu_cache_gib=0.25),
        "dedicated": VllmRollout(
            engine="vllm", placement="dedicated", max_concurrent=max_concurrent, cpu_cache_gib=0.25
        ),
        "vllm engines": VllmRollout(engine="vllm", engines=2, max_concurrent=max_concurrent, cpu_cache_gib=0.1),
    }[name]
    return open_sampler(spec, on_cpu(weights_dir, max_length=max_length))


def on_cpu(weights_dir: Path, *, max_length: int = MAX_LENGTH) -> SamplerSettings:
    return SamplerSettings(weights_dir, torch.device("cpu"), max_length=max_length, seed=0)


def save(model: PreTrainedModel, directory: Path) -> None:
    """The policy with a tokenizer of as many tokens, whose text is WORDS run together."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)


def sampling(
    max_response_length: int = 24,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
) -> Sampling:
    return Sampling(temperature, top_p, max_response_length, top_k, stop)


def every_rollout(groups: list[RolloutGroup]) -> list[tuple[tuple[int, ...], Rollout]]:
    return [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]


def fresh_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], drawn: Sampling
) -> torch.Tensor:
    """Logprobs [response] from one forward pass without a cache, under the distribution that `drawn` asks for."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    probabilities = reference_probabilities(logits, drawn)
    return probabilities[torch.arange(len(response)), torch.tensor(response)].log()


def reference_probabilities(logits: torch.Tensor, drawn: Sampling) -> torch.Tensor:
    """Probabilities [rows, vocabulary], row by row and in float64: tempered, cut to top_k, then to the nucleus."""
    rows = torch.softmax(logits.double() / drawn.temperature, dim=-1)
    for row in rows:
        likeliest = row.argsort(descending=True).tolist()
        row[likeliest[drawn.top_k or len(likeliest) :]] = 0.0
        row /= row.sum()
        held = 0.0
        for token in likeliest:
            held, row[token] = held + float(row[token]), row[token] if held < drawn.top_p else 0.0
        row /= row.sum()
    return rows
