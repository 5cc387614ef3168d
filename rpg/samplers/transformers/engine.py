"""A transformers sampler in a process of its own, which is given new weights as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load, load_file

from rpg.messages import message
from rpg.pretrained import model_of, special_tokens
from rpg.samplers.transformers.sampler import TransformersSampler


@message
@dataclass(frozen=True, slots=True)
class TransformersEngine:
    """Settings with which an engine is started; see EngineSettings of vLLM's."""

    weights_dir: Path
    device_type: str
    max_length: int
    max_concurrent: int
    precision: Literal["float32", "bfloat16", "auto"]
    """Type of the weights; auto: that in which they are stored."""
    transfer: Literal[""] = ""
    """Weights go through the host's memory."""
    tensor_parallel_size: int = 1

    def open(self) -> "EngineSampler":
        """Opens the engine in this process."""
        tokens = special_tokens(self.weights_dir)
        model = model_of(self.weights_dir, dtype=self.precision)
        model.to(torch.device(self.device_type))  # type: ignore[arg-type]  # transformers' decorator hides the signature
        return EngineSampler(
            model,
            eos_id=tokens.eos_ids,
            pad_id=tokens.pad_id,
            max_concurrent=self.max_concurrent,
            max_length=self.max_length,
            tokenizer_dir=self.weights_dir,
        )


class EngineSampler(TransformersSampler):
    """The sampler, with the methods by which a rank gives it weights."""

    def load_directory(self, weights_dir: str, *, policy_version: int) -> None:
        """Loads weights from the safetensors of a transformers directory."""
        self.load_weights(load_file(Path(weights_dir, "model.safetensors")).items(), policy_version=policy_version)

    def load_safetensors(self, content: bytes, *, policy_version: int) -> None:
        """Loads weights from the bytes of such a directory's safetensors."""
        self.load_weights(load(content).items(), policy_version=policy_version)
