"""The model to train, pretrained or from scratch, and an optional supervised warm-up."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from specs.errors import Issue, IssueError
from specs.schema.base import Spec, names_path

ConfigValue = JsonValue
"""Value of a library's setting."""
_SIZES = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings"),
    *("n_embd", "n_inner", "n_layer", "n_head", "n_positions"),
}
"""Fields of transformers' decoder configs that are counts: first Llama's names, which most models use, then GPT-2's."""


class PretrainedModel(Spec):
    """Weights and tokenizer that already exist."""

    source: Literal["pretrained"] = "pretrained"
    path: str = names_path("path or id", min_length=1)
    """A directory (relative to the spec file) or a Hub id such as `Qwen/Qwen3-4B-Base`."""
    revision: str = "main"
    """Branch, tag or commit of a Hub id; ignored for a directory."""


class ByteTokenizer(Spec):
    """One token per UTF-8 byte, plus padding and end-of-text. It needs no training, and can represent any text."""

    type: Literal["bytes"] = "bytes"


class TrainedTokenizer(Spec):
    """A byte-level BPE tokenizer trained on the training set's prompts and answers."""

    type: Literal["bpe"] = "bpe"
    vocab_size: int = Field(512, ge=260)
    """Number of tokens, including the 256 bytes and two special tokens."""


Tokenizer = Annotated[ByteTokenizer | TrainedTokenizer, Field(discriminator="type")]


class ScratchModel(Spec):
    """An architecture with random weights, and its tokenizer."""

    source: Literal["scratch"] = "scratch"
    model_type: str = "qwen3"
    """A causal language model in transformers: qwen3, llama, gpt2 (tested), ..."""
    config: dict[str, ConfigValue] = Field(default_factory=dict)
    """Fields of that architecture's transformers config (hidden_size, rope_parameters, ...). vocab_size is not allowed,
    because it comes from the tokenizer."""
    tokenizer: Tokenizer = ByteTokenizer()
    """How text becomes tokens."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights and of the warm-up. It is independent of the run's seed, so that all runs share one
    base model."""

    @field_validator("config")
    @classmethod
    def _sizes_are_counts(cls, config: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
        for name, value in config.items():
            counts = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if name in _SIZES and value is not None and not counts:
                raise IssueError(Issue("must be a whole number", (name,), f"{value}", "a whole number, at least 1"))
        return config


Model = Annotated[PretrainedModel | ScratchModel, Field(discriminator="source")]


class WarmUp(Spec):
    """Supervised steps on the training set's prompts and answers before reinforcement learning."""

    steps: int = Field(ge=1)
    """Largest number of optimizer updates."""
    until_loss: float = Field(0.0, ge=0)
    """Stop once the mean loss of the last 20 updates is at most this, in nats per answer token. 0 takes all steps."""
    batch_size: int = Field(128, ge=1)
    """Examples per update."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate. It is reached after `warmup_fraction` of the steps and then constant, because a decay to 0 would
    end in a sharp minimum, which the first updates of reinforcement learning leave again."""
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the steps over which the rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
