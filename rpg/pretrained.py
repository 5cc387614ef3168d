"""Models, configs and tokenizers from a directory: the one place that reads them, and it runs no code of theirs.

A setting that names code is refused by its name: transformers would run it, ask at the terminal, or fetch a kernel.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class ModelCodeError(ValueError):
    """A model's settings name code to run."""


def config_of(directory: Path) -> "PretrainedConfig":
    """The config of a model directory. ModelCodeError where a setting names code, as below."""
    from transformers import AutoConfig

    _refuse_code(directory)
    config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return config


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer

    _refuse_code(directory)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return tokenizer


def model_of(directory: Path, **settings: Any) -> "PreTrainedModel":
    """The model of a directory, from its safetensors. `settings` are those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    _refuse_code(directory)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=False, use_safetensors=True, **settings
    )
    return model


def settings_with_code(directory: Path) -> list[str]:
    """The settings of a model directory that name code, each `config.json: auto_map`."""
    found = []
    for file in sorted(directory.glob("*config*.json")):
        try:
            settings = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):  # what reads it says what is wrong with it
            continue
        found += [f"{file.name}: {name}" for name in code_settings(settings)]
    return found


def code_settings(settings: Any, inside: str = "") -> Iterator[str]:
    """The names of the settings that have transformers run code which it does not come with.

    They are `auto_map`, and an implementation of attention or the like that is a kernel of a Hub.
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
        else:
            yield from code_settings(value, f"{name}.")


def _refuse_code(directory: Path) -> None:
    if found := settings_with_code(directory):
        raise ModelCodeError(f"{directory} names code to run, which is never run: {', '.join(found)}")
