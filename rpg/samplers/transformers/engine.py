"""Opening of a transformers sampler: in this process, or in its own processes, which get new weights as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from safetensors.torch import load, load_file

from rpg.messages import message
from rpg.pretrained import model_of, special_tokens
from rpg.samplers.base import Sampler, SamplerSettings
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.samplers.vllm.placement import open_engines
from specs.schema.rollout import TransformersRollout


@message
@dataclass(frozen=True, slots=True)
class TransformersEngine:
    """Settings with which an engine is started. See vLLM's EngineSettings."""

    sampler: ClassVar = "rpg.samplers.transformers.engine:EngineSampler.of"
    weights_dir: Path
    device_type: str
    max_length: int
    max_concurrent: int
    precision: Literal["float32", "bfloat16", "auto"]
    """Type of the weights. auto means the type in which they are stored."""
    transfer: Literal[""] = ""
    """Returns the empty text, which means that weights go through the host's memory."""
    tensor_parallel_size: int = 1


class EngineSampler(TransformersSampler):
    """The sampler with methods for loading weights from a rank."""

    @classmethod
    def of(cls, settings: TransformersEngine) -> Self:
        """Opens the engine in this process."""
        tokens = special_tokens(settings.weights_dir)
        model = model_of(settings.weights_dir, dtype=settings.precision)
        model.to(torch.device(settings.device_type))  # type: ignore[arg-type]  # transformers hides the signature
        return cls(
            model,
            eos_id=tokens.eos_ids,
            pad_id=tokens.pad_id,
            max_concurrent=settings.max_concurrent,
            max_length=settings.max_length,
            tokenizer_dir=settings.weights_dir,
        )

    def load_directory(self, weights_dir: str, *, policy_version: int) -> None:
        """Loads weights from the safetensors of a transformers directory."""
        self.load_weights(load_file(Path(weights_dir, "model.safetensors")).items(), policy_version=policy_version)

    def load_safetensors(self, content: bytes, *, policy_version: int) -> None:
        """Loads weights from the bytes of such a directory's safetensors."""
        self.load_weights(load(content).items(), policy_version=policy_version)


def open_sampler(rollout: TransformersRollout, settings: SamplerSettings) -> Sampler:
    """Opens the sampler on the learner's own module if that is given, else on the weights in the directory. With
    `engines`, opens it in its own processes.

    Raises:
        SpecError: the directory names no end token.
    """
    tokens = special_tokens(settings.weights_dir)
    model = settings.learner_model
    dtype: Literal["float32", "bfloat16", "auto"]
    dtype = settings.precision or ("float32" if settings.device.type == "cpu" else "auto")
    if rollout.engines:
        engine = TransformersEngine(
            settings.weights_dir, settings.device.type, settings.max_length, rollout.max_concurrent, dtype
        )
        return open_engines(rollout, engine)
    if model is None:
        model = model_of(settings.weights_dir, dtype=dtype)
        model.to(settings.device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    return TransformersSampler(
        model,
        eos_id=tokens.eos_ids,
        pad_id=tokens.pad_id,
        max_concurrent=rollout.max_concurrent,
        max_length=settings.max_length,
        shared=settings.learner_model is not None,
        tokenizer_dir=settings.weights_dir,
    )
