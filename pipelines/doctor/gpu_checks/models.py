"""Models with random weights and responses with random tokens: the work is real, only the content is not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipelines.planning.model_shape import CONFIGS
from rpg.batches.batch import StepRollouts
from rpg.rewards.score import Score

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # distributions far from flat
}
SMALL: dict[str, Any] = {
    **TINY,
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
MIDDLE: dict[str, Any] = CONFIGS["Qwen/Qwen3-0.6B"]
PAD, EOS = 0, 1


def make_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model with random weights, the same for the same device."""
    torch.manual_seed(0)
    fields = {**config, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**fields), dtype=dtype
        )
    model.train(mode=False)
    return model


def write_model(directory: Path, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Path:
    """Writes it as a transformers model directory, without a tokenizer."""
    make_model(config, device, dtype).save_pretrained(directory)
    return directory


@torch.no_grad()
def move(model: PreTrainedModel, seed: int) -> None:
    """Adds noise to the weights, so that the logprobs change by nats."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Number and length of the responses in training, and tokens per pass."""

    prompts: int
    group_size: int
    prompt_length: int
    response_length: int
    microbatch_tokens: int
    unequal: bool = False
    """Whether lengths are drawn from 1 to `response_length`. Otherwise all responses have `response_length` tokens."""

    @property
    def responses(self) -> int:
        """Returns the number of responses."""
        return self.prompts * self.group_size


def random_step(vocabulary: int, shape: BatchShape) -> StepRollouts:
    """Returns a step of random tokens. Every rank holds the whole step."""
    generator = np.random.default_rng(0)
    count = shape.responses
    lengths = np.full(count, shape.response_length, dtype=np.int64)
    if shape.unequal:
        lengths = generator.integers(1, shape.response_length + 1, count)
    tokens = int(lengths.sum())
    return StepRollouts(
        prompts=tuple(generator.integers(2, vocabulary, (shape.prompts, shape.prompt_length))),
        problems=(0,) * shape.prompts,
        group_ids=np.repeat(np.arange(shape.prompts, dtype=np.int64), shape.group_size),
        lengths=lengths,
        num_sampled=lengths,
        finish_reasons=tuple("stop" for _ in range(count)),
        scores=tuple(Score(value=float(value), correct=False) for value in generator.normal(size=count)),
        held=np.arange(count, dtype=np.int64),
        token_ids=generator.integers(2, vocabulary, tokens),
        sampled=np.ones(tokens, dtype=np.bool_),
        rollout_logprobs=np.zeros(tokens, dtype=np.float32),
        responses=("",) * count,
        policy_version=0,
    )
