"""Figures of a decoder that determine memory and time, counted on a model that transformers builds without values.

It does so in a child process, unless torch is imported already. The result is kept by the configuration's digest in the
user's own cache, so that planning does not need torch and a configuration is counted once.
"""

import hashlib
import json
import logging
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipelines.processes.supervisor import Child, StageError, supervise
from rpg import pretrained
from rpg.base import shape, traffic
from rpg.base.shape import ModelShape
from specs.machine.files import DiskError, read_json, write_json
from specs.machine.own_cache import library_variables, place_to_save_time
from specs.schema.experiment import Experiment
from specs.schema.model import Model, PretrainedModel, ScratchModel

_COUNT_SECONDS = 300
"""Longest time in seconds that counting may take. The imports before it do not count in a fork."""


def model_shape(experiment: Experiment) -> ModelShape | None:
    """Returns the shape of the experiment's model. None if it has no settings, or transformers cannot
    build a model from them."""
    return _shape_of(experiment.model)


def teacher_shape(experiment: Experiment) -> ModelShape | None:
    """Returns the shape of the reference model. None if there is no such model, or for the reasons of `model_shape`."""
    return _shape_of(experiment.reference.teacher) if experiment.reference.teacher else None


def _shape_of(model: Model) -> ModelShape | None:
    settings = settings_of(model)
    return shape_of_settings(settings) if settings else None


def settings_of(model: Model) -> dict[str, Any] | None:
    """Returns the model's settings: the spec's own architecture, the config.json of a local or cached model, or
    CONFIGS. None if it has none of these."""
    if isinstance(model, ScratchModel):
        tokenizer = model.tokenizer
        vocab_size = tokenizer.vocab_size if tokenizer.type == "bpe" else 258
        return {**model.config, "model_type": model.model_type, "vocab_size": vocab_size}
    config = _config_file(model)
    try:
        fields = json.loads(config.read_text(encoding="utf-8")) if config else CONFIGS.get(model.path)
    except (OSError, ValueError):  # the stage that opens the model reports its errors
        return None
    return fields if isinstance(fields, dict) else None


def shape_of_settings(settings: dict[str, Any]) -> ModelShape | None:
    """Returns the shape of the model that transformers builds from a config.json. None if it cannot build one."""
    return _kept_or_counted(json.dumps(settings, sort_keys=True))


@cache
def _kept_or_counted(settings: str) -> ModelShape | None:
    kept = _place(settings)
    with suppress(TypeError, KeyError, AttributeError):  # damaged
        if kept and (known := read_json(kept)):
            return ModelShape.of_figures(known)
    figures = _count(settings)
    if figures is None:
        return None
    with suppress(OSError, DiskError):  # it is counted again the next time
        if kept:
            write_json(kept, figures)
    return ModelShape.of_figures(figures)


def _place(settings: str) -> Path | None:
    """Returns the cache file of a configuration's figures, named after everything that they depend on. None if no file
    can be kept."""
    with suppress(OSError):
        code = [Path(str(module.__file__)).read_bytes() for module in (shape, traffic, pretrained)]
        digest = hashlib.sha256(b"\0".join([settings.encode(), version("transformers").encode(), *code])).hexdigest()
        return place_to_save_time("planning", "model-shapes", f"{digest[:32]}.json")
    return None


def _count(settings: str) -> dict[str, Any] | None:
    """Returns the figures, from a child process unless this process has imported torch. None if transformers cannot
    build the model."""
    if "torch" in sys.modules:
        return _count_here(settings)
    # The check of the model reports errors in the settings.
    with suppress(OSError, DiskError, StageError), tempfile.TemporaryDirectory() as name:
        given, figures = (Path(name) / file for file in ("settings.json", "figures.json"))
        given.write_text(settings, encoding="utf-8")
        child = Child(
            "count",
            [sys.executable, "-P", "-m", shape.__name__, str(given), str(figures)],
            log=Path(name) / "count.log",
            record=Path(name) / "process.json",
            timeout_seconds=_COUNT_SECONDS,
            environment={"CUDA_VISIBLE_DEVICES": "", **library_variables()},
            forks=True,
        )
        supervise(child)
        return read_json(figures) or None
    return None


def _count_here(settings: str) -> dict[str, Any] | None:
    """Counts the figures in this process, without the time limit that a child process has."""
    from transformers.utils import logging as transformers_logging

    told = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        figures: dict[str, Any] = json.loads(json.dumps(asdict(shape.counted(json.loads(settings)))))
    except Exception:  # from the architecture's own code; the check of the model reports errors
        return None
    finally:
        transformers_logging.set_verbosity(told)
    return figures


def _config_file(model: PretrainedModel) -> Path | None:
    local = Path(model.path) / "config.json"
    if local.is_file():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:  # a directory that does not exist
        return None
    return Path(cached) if isinstance(cached, str) else None


_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
_QWEN3_0_6B = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_QWEN3_1_7B = {
    **_QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_QWEN3_4B = {
    **_QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN2_5_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}

_QWEN3_30B_A3B = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen3-0.6B-Base": _QWEN3_0_6B,
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-1.7B-Base": _QWEN3_1_7B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN3_30B_A3B,
    "Qwen/Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_5_7B,
    "Qwen/Qwen2.5-Math-7B": {**_QWEN2_5_7B, "max_position_embeddings": 4096},
}
"""Hub id -> the fields of its config.json that estimates read."""
