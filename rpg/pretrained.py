"""Reads models, configs and tokenizers from a directory without running their code. No other module does this.

A setting that names code is refused, and the error names it: transformers would run the code, ask at the terminal, or
fetch a kernel.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from torch import nn
    from transformers import Conv1D, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_FLASH_ATTENTION = {"2": "flash_attn", "3": "flash_attn_interface", "4": "flash_attn.cute"}
"""Version of flash attention -> module that computes it. Without the module, transformers downloads a kernel from the
Hub."""
_FROM_HUB = {
    "quant_method": ("eetq", "fbgemm_fp8", "gguf", "metal", "mxfp4"),
    "model_type": ("mra", "rwkv", "yoso"),
}
"""Setting -> values for which transformers 5 downloads a kernel from the Hub regardless of USE_HUB_KERNELS
(`get_kernel` in its quantizers, integrations and models)."""
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Fields of transformers' configs that hold the length of the context."""
_CHOSEN_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "experts_per_token"),
    *("top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k"),
)
"""Fields of transformers' configs that hold the number of experts that a token is routed to."""


class ModelCodeError(ValueError):
    """Error raised if a model's settings name code to run."""


def config_of(directory: Path) -> "PretrainedConfig":
    """Returns the config of a model directory. Raises ModelCodeError if a setting names code; see `code_settings`."""
    from transformers import AutoConfig

    _refuse_code(directory)
    config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return config


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a model directory."""
    from transformers import AutoTokenizer

    _refuse_code(directory)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return tokenizer


def model_of(directory: Path, **settings: Any) -> "PreTrainedModel":
    """Returns the model of a directory, from its safetensors. `settings` are passed to `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    _refuse_code(directory)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=False, use_safetensors=True, **settings
    )
    return model


def classifier_of(directory: Path, **settings: Any) -> "PreTrainedModel":
    """Returns the sequence classifier of a directory; see `model_of`."""
    from transformers import AutoModelForSequenceClassification

    _refuse_code(directory)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        directory, trust_remote_code=False, use_safetensors=True, **settings
    )
    return model


def config_of_settings(settings: Mapping[str, Any]) -> "PretrainedConfig":
    """Returns the config of a config.json with these settings. Raises ModelCodeError if one names code; see
    `code_settings`."""
    from transformers import AutoConfig

    if found := list(code_settings(dict(settings))):
        raise ModelCodeError(f"the settings refer to custom code, which is never executed: {', '.join(found)}")
    config: PretrainedConfig = AutoConfig.for_model(**settings)
    return config


def model_without_weights(config: "PretrainedConfig") -> "PreTrainedModel":
    """Returns the config's decoder on the meta device, on which weights have shapes but no values."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model


def linear_modules(model: "PreTrainedModel") -> "Iterator[tuple[str, nn.Linear | Conv1D]]":
    """Yields the linear modules between the embeddings and the output head, each by the last part of its name."""
    from torch import nn
    from transformers import Conv1D

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            yield name.rpartition(".")[2], module


def first_size(config: Any, *names: str) -> int:
    """Returns the first size that the config has under one of the names, or 0. If it is a list over layers, returns the
    largest."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # if layers differ in it, each has its own config
            value = [first_size(layer, name) for layer in config.per_layer_config]
        sizes = [size for size in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(size, int)]
        if sizes and max(sizes) > 0:
            return max(sizes)
    return 0


def context_of(config: "PretrainedConfig") -> int | None:
    """Returns the largest number of tokens of prompt and response together that a config allows; None if it has no
    bound."""
    return first_size(config.get_text_config(), *_CONTEXTS) or None


def experts_per_token(text: "PretrainedConfig") -> int:
    """Returns, from a decoder's config, how many experts of a layer a token is routed to; 0 if it has no experts."""
    return first_size(text, *_CHOSEN_EXPERTS)


def settings_with_code(directory: Path) -> list[str]:
    """Returns the settings of a model directory that name code, each like `config.json: auto_map`. Adapters count too,
    because they name a model."""
    found = []
    for file in sorted(directory.glob("*config*.json")):
        if file.name == "adapter_config.json":  # peft loads the model that it names, which has not been checked
            found.append(f"{file.name}, adapters of another model: merge them into it first")
        try:
            settings = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):  # the code that reads it reports the error
            continue
        found += [f"{file.name}: {name}" for name in code_settings(settings)]
    return found


def code_settings(settings: Any, inside: str = "") -> Iterator[str]:
    """Yields the names of the settings that make transformers run code that is not part of it.

    They are `auto_map`; an implementation of attention or the like that is a kernel of a Hub; and, if the package
    `kernels` is installed, settings for which transformers fetches a kernel. `rpg` has switched off all other downloads
    of kernels.
    Example:
        >>> list(code_settings({"auto_map": {}, "text_config": {"attn_implementation": "kernels-community/flash"}}))
        ['auto_map', 'text_config.attn_implementation (kernels-community/flash)']
    """
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    if not isinstance(settings, dict):
        return
    for key, value in settings.items():
        name = f"{inside}{key}"
        if key == "auto_map":
            yield name
        elif "_implementation" in str(key):
            values = value.values() if isinstance(value, dict) else [value]
            yield from (f"{name} ({each})" for each in values if isinstance(each, str) and "/" in each)
            if find_spec("kernels"):
                yield from (f"{name} ({each}, {_LACKING})" for each in values if _falls_back(each))
        elif isinstance(value, str) and value.lower() in _FROM_HUB.get(str(key), ()) and find_spec("kernels"):
            yield f"{name} ({value}, {_LACKING})"
        else:
            yield from code_settings(value, f"{name}.")


_LACKING = "which fetches a kernel of a Hub: uninstall the package kernels, or install what computes it here"


def _falls_back(implementation: Any) -> bool:
    """Returns whether this names a flash attention that is not installed. `paged|flash_attention_2` also counts as
    flash attention."""
    named = re.search(r"flash_attention_(\d)", implementation) if isinstance(implementation, str) else None
    return named is not None and not is_installed(_FLASH_ATTENTION.get(named[1], ""))


def is_installed(module: str) -> bool:
    """Returns whether a module is installed. Imports only the packages that hold it."""
    try:
        return bool(module) and find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that end a response, and the padding token."""

    eos_ids: tuple[int, ...]
    """Ids of the end tokens. Any of them ends a response."""
    pad_id: int


def special_tokens(
    weights_dir: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    config: "PretrainedConfig | None" = None,
) -> SpecialTokens:
    """Returns the end tokens that the generation config, the config and the tokenizer name, and the padding token.

    The padding token comes from the first of the three that names one inside the embedding.

    The files of a model often disagree: a chat model's generation config may name the token that ends a document, its
    tokenizer the one that ends a turn.

    Args:
        weights_dir: the model's directory.
        tokenizer: the directory's tokenizer; None reads it from the directory.
        config: the directory's config; None reads it from the directory.
    Raises:
        SpecError: none of them names an end token, or the generation config cannot be read.
    """
    tokenizer, config = tokenizer or tokenizer_of(weights_dir), config or config_of(weights_dir)
    named = [*_generation_config(weights_dir), tokenizer]
    configs = [config, config.get_text_config()]
    eos_ids = dict.fromkeys(token for each in named for token in token_ids(each.eos_token_id))
    # A config that names none has its class's default, which may be any token of this model.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends = [token for each in configs for token in token_ids(getattr(each, "eos_token_id", None))]
    eos_ids |= dict.fromkeys(token for token in ends if token in special)
    size = embedding_size(config)
    pads = [pad for each in (*named, *configs) for pad in token_ids(getattr(each, "pad_token_id", None))]
    pads = [pad for pad in pads if not size or pad < size]
    if not eos_ids:
        hint = "name eos_token in its tokenizer, or eos_token_id in its generation_config.json"
        raise SpecError(Issue("the model has no end-of-text token", path=("model",), given=str(weights_dir), hint=hint))
    return SpecialTokens(tuple(eos_ids), pads[0] if pads else next(iter(eos_ids)))


def _generation_config(weights_dir: Path) -> list[Any]:
    """Returns the generation config of a model directory, in a list; an empty list if the directory lacks one."""
    from transformers import GenerationConfig

    if not (file := weights_dir / "generation_config.json").exists():
        return []
    try:
        return [GenerationConfig.from_pretrained(weights_dir)]
    except (OSError, ValueError, TypeError) as error:
        message = f"{file.name} cannot be read: {' '.join(str(error).split())}"[:300]
        raise SpecError(Issue(message, path=("model",), given=str(file))) from None


def token_ids(tokens: Any) -> list[int]:
    """Returns the token ids that a setting of a model names: one id, a list, or None. Anything else names no token,
    such as -1.

    Example:
        >>> token_ids([5, 7.0]), token_ids(3), token_ids(-1), token_ids("</s>")
        ([5, 7], [3], [], [])
    """
    listed = tokens if isinstance(tokens, (list, tuple)) else [tokens]
    return [
        int(token)
        for token in listed
        if isinstance(token, (int, float)) and not isinstance(token, bool) and token >= 0 and float(token).is_integer()
    ]


def end_texts(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the texts of all end tokens of the model that a tokenizer was read with, longer ones first."""
    directory, own = Path(tokenizer.name_or_path), tokenizer.eos_token_id
    is_model = bool(tokenizer.name_or_path) and (directory / "config.json").is_file()
    ids = special_tokens(directory, tokenizer).eos_ids if is_model else token_ids(own)
    return sorted((str(tokenizer.decode([token])) for token in ids if token < len(tokenizer)), key=len, reverse=True)


def embedding_size(config: "PretrainedConfig") -> int:
    """Returns the number of token ids in the model's embedding, or 0 if the config does not state it."""
    return first_size(config.get_text_config(), "vocab_size")


def _refuse_code(directory: Path) -> None:
    if found := settings_with_code(directory):
        raise ModelCodeError(f"{directory} refers to custom code, which is never executed: {', '.join(found)}")
