"""The base stage: loads the model that training starts from, or builds it from scratch, and warms it up on request."""

import inspect
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from rpg.data.chat_template import choose_template
from rpg.data.loading import load_problems
from rpg.pretrained import (
    code_settings,
    config_of,
    context_of,
    model_of,
    model_without_weights,
    settings_with_code,
    tokenizer_of,
)
from specs.errors import Issue, SpecError
from specs.machine.manifests import NOTES
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest
from specs.schema.model import ByteTokenizer, Model, PretrainedModel, ScratchModel, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SMALL = 50_000_000
"""Largest number of parameters of a model from scratch that is built to test that it computes. The test takes a
second."""
_FROM_TOKENIZER = ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")
"""Fields of a config that the tokenizer determines."""


_WRITTEN_HERE = ("summary.json", "manifest.json", NOTES)
"""Files that the stage or its publisher writes. If a link had this name, they would write into the model's own
directory."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files that may contain Python code."""


def make(experiment: Experiment, data_dir: Path | None, out: Path) -> None:
    """Fills `out` with a model directory that transformers and vLLM load, and summary.json.

    Args:
        experiment: the run's spec.
        data_dir: the staged data; needed for a warm-up and for a trained tokenizer.
        out: an empty directory.
    Raises:
        SpecError: the model does not exist or its settings are wrong.
    """
    from transformers.utils import logging

    from rpg.processes.device import use_threads

    start = time.monotonic()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    use_threads(experiment.resources)
    if isinstance(experiment.model, PretrainedModel) and experiment.warm_up is None:
        summary = _link(experiment.model, out)
    else:
        summary = _build(experiment, data_dir, out)
    summary["seconds"] = round(time.monotonic() - start, 2)
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(f"{summary['parameters'] / 1e6:.2f} M parameters, vocabulary of {summary['vocabulary']}", flush=True)


def _build(experiment: Experiment, data_dir: Path | None, out: Path) -> dict[str, Any]:
    if isinstance(experiment.model, PretrainedModel):
        model, tokenizer = _load(experiment.model)
    else:
        model, tokenizer = _from_scratch(experiment.model, data_dir)
    losses: list[float] = []
    if experiment.warm_up is not None:
        from rpg.base.warm_up import warm_up
        from rpg.processes.device import device_at_hand

        if data_dir is None:
            raise ValueError("a warm-up needs the staged data")
        choose_template(tokenizer, experiment.data.prompt)
        problems = load_problems(data_dir, "train", tokenizer, experiment.data)
        _check_answers(problems)
        losses = warm_up(
            model,
            tokenizer,
            problems,
            experiment.data,
            experiment.warm_up,
            device=device_at_hand(experiment.resources),  # the machine that starts a run may have no GPU
            seed=experiment.model.seed if isinstance(experiment.model, ScratchModel) else 0,
            microbatch_tokens=experiment.training.microbatch_tokens,
        )
    model.cpu().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {**_facts(model.config, model.num_parameters()), "warm_up": {"losses": losses}}


def _facts(config: "PretrainedConfig", parameters: int) -> dict[str, Any]:
    text = config.get_text_config()
    return {
        "parameters": parameters,
        "model_type": config.model_type,
        "vocabulary": text.vocab_size,
        "context": context_of(config),
    }


def _check_answers(problems: list[Any]) -> None:
    if not any(problem.answer for problem in problems):
        raise SpecError(
            Issue(
                "a warm-up learns gold answers, but the training problems have none",
                path=("warm_up",),
                hint="leave warm_up out, or train on a set with answers",
            )
        )


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What this machine has of a model that a spec names, except the weights."""

    directory: Path | None
    """Directory of the model's files; None if they are not on this machine, or if the model is built from scratch."""
    config: "PretrainedConfig | None"
    """Config of the model; None if it is not on this machine or cannot be read."""
    tokenizer: "PreTrainedTokenizerBase | None"
    """Tokenizer of the model; None if it is not on this machine, or if the data trains it."""


def look_at(model: Model, *, build: bool) -> NamedModel:
    """Reads the model as `make` would, in seconds and without a network.

    Args:
        build: whether to build a model from scratch, to test that it computes. With more than SMALL parameters only its
            layers are built.
    Raises:
        SpecError: `make` would refuse it.
    """
    from rpg.base.tokenization import make_tokenizer

    if isinstance(model, PretrainedModel):
        return _look_at_existing(model)
    named = model.tokenizer
    # The size of a tokenizer that the data trains contradicts no setting.
    tokenizer = make_tokenizer(ByteTokenizer() if isinstance(named, TrainedTokenizer) else named, ())
    config = scratch_config(model, tokenizer)
    if build:
        try:
            parameters = model_without_weights(config).num_parameters()
        except Exception as error:
            raise cannot_build(model, error) from error
        if parameters <= SMALL:
            scratch_model(model, tokenizer, config)
    return NamedModel(None, config, None if isinstance(named, TrainedTokenizer) else tokenizer)


def _look_at_existing(model: PretrainedModel) -> NamedModel:
    if Path(model.path).is_dir():
        return NamedModel(*existing_model(model))
    if (directory := _downloaded(model)) is None:
        return NamedModel(None, None, None)
    refuse_code(model, directory)
    config = tokenizer = None
    with suppress(Exception):  # downloaded without this file
        tokenizer = tokenizer_of(directory)
    with suppress(Exception):
        config = config_of(directory)
    return NamedModel(directory, config, tokenizer)


def _downloaded(model: PretrainedModel) -> Path | None:
    """Returns the directory of a Hub model if it is on this machine, else None."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except Exception:  # a dozen exception classes of three libraries mean "not downloaded"
        return None


# Existing models


def _link(spec: PretrainedModel, out: Path) -> dict[str, Any]:
    """Links to the model's files, except pickles, which could hold code."""
    directory, config, _ = existing_model(spec)
    with _blaming(spec):
        facts = _facts(config, _count(directory))
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.name not in _WRITTEN_HERE and file.suffix not in _PICKLES:
            os.symlink(file.resolve(), out / file.name)
    return facts


def existing_model(spec: PretrainedModel) -> "tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]":
    """Returns the directory, config and tokenizer of an existing model. Raises SpecError if any of them cannot be
    read."""
    directory = _directory(spec)
    with _blaming(spec):
        tokenizer = tokenizer_of(directory)
        return directory, config_of(directory), tokenizer


def _load(spec: PretrainedModel) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    directory = _directory(spec)
    with _blaming(spec):
        return model_of(directory, dtype="auto"), tokenizer_of(directory)


def _directory(spec: PretrainedModel) -> Path:
    """Returns the directory of the model's files, which are downloaded if the path is a Hub id. The weights are
    safetensors."""
    directory = _local_directory(spec)
    refuse_code(spec, directory)
    if not any(directory.glob("*.safetensors")):
        raise _no_model("the model has no weights as safetensors", spec, _SAFETENSORS_HINT)
    return directory


def _local_directory(spec: PretrainedModel) -> Path:
    if Path(spec.path).is_absolute() or Path(spec.path).is_dir():
        directory = Path(spec.path)
        if not directory.is_dir():
            raise _no_model("no such model directory", spec, f"there is no directory {directory}")
        if not (directory / "config.json").is_file():
            raise _no_model("the directory contains no model", spec, "a model directory has a config.json")
        return directory
    from huggingface_hub import snapshot_download

    try:
        unwanted = [f"*{suffix}" for suffix in _PICKLES]
        return Path(snapshot_download(spec.path, revision=spec.revision, ignore_patterns=unwanted))
    except Exception as error:
        # The client reports missing files, a bad id and a lost network by a dozen exception classes of three libraries.
        reason = str(error).strip().splitlines()[0]
        raise _no_model(f"the model cannot be fetched from the Hub: {reason}", spec, _HUB_HINT) from error


def refuse_code(spec: PretrainedModel, directory: Path) -> None:
    """Raises SpecError if the model's settings name code to run."""
    if found := settings_with_code(directory):
        raise _no_model(f"the model has its own code, which is never executed: {', '.join(found)}", spec, _CODE_HINT)


_CODE_HINT = (
    "transformers' own class may do: take a copy of the model without these settings; one whose code transformers does "
    "not have cannot be trained"
)
_SAFETENSORS_HINT = (
    "pickled weights (*.bin) can run code and are not read; if you trust them, convert them: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
)
_HUB_HINT = "without a network, give the directory of a downloaded model"


@contextmanager
def _blaming(spec: PretrainedModel) -> Iterator[None]:
    """Converts errors of transformers or safetensors within the block into a SpecError about the named model."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _no_model(f"the model cannot be loaded: {reason}", spec, "") from error


def _no_model(message: str, spec: PretrainedModel, hint: str) -> SpecError:
    return SpecError(Issue(message, path=("model", "path"), given=spec.path, hint=hint))


def _count(directory: Path) -> int:
    """Returns the number of parameters stored in the directory."""
    from safetensors import safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


# Models from scratch


def _from_scratch(spec: ScratchModel, data_dir: Path | None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from rpg.base.tokenization import make_tokenizer

    tokenizer = make_tokenizer(spec.tokenizer, _texts(data_dir) if isinstance(spec.tokenizer, TrainedTokenizer) else ())
    return scratch_model(spec, tokenizer), tokenizer


def scratch_model(
    spec: ScratchModel, tokenizer: "PreTrainedTokenizerBase", config: "PretrainedConfig | None" = None
) -> "PreTrainedModel":
    """Returns a model of the architecture with random weights, for a tokenizer. Raises SpecError if its settings do not
    make a model.

    Args:
        config: result of `scratch_config`; None computes it.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(spec.seed)
    config = config or scratch_config(spec, tokenizer)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        # Some contradictions show only in a forward pass.
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:
        raise cannot_build(spec, error) from error
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def scratch_config(spec: ScratchModel, tokenizer: "PreTrainedTokenizerBase") -> "PretrainedConfig":
    """Returns the architecture's config. Raises SpecError if the architecture or a setting does not exist."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if found := list(code_settings({"model_type": spec.model_type, **spec.config})):
        message = f"refers to custom code, which is never executed: {', '.join(found)}"
        raise SpecError(Issue(message, path=("model", "config"), given=_shown(spec.config), hint="leave it out"))
    known_types = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if spec.model_type not in known_types:
        message = "transformers knows no such decoder architecture"
        hint = nearest(spec.model_type, known_types)
        raise SpecError(Issue(message, path=("model", "model_type"), given=spec.model_type, hint=hint))
    defaults = AutoConfig.for_model(spec.model_type)
    known = set(defaults.to_dict()) | set(defaults.attribute_map) | set(inspect.signature(type(defaults)).parameters)
    issues = [
        Issue(
            f"{spec.model_type} has no such setting" if key not in _FROM_TOKENIZER else "follows from the tokenizer",
            path=("model", "config", key),
            given=str(value),
            hint=nearest(key, known) if key not in _FROM_TOKENIZER else "leave it out",
        )
        for key, value in spec.config.items()
        if key in _FROM_TOKENIZER or not (key in known or _is_read(defaults, key))
    ]
    if issues:
        raise SpecError(*issues)
    try:
        return AutoConfig.for_model(
            spec.model_type,
            **spec.config,
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    except Exception as error:  # transformers checks types and values, in each architecture differently
        raise cannot_build(spec, error) from error


def _is_read(config: "PretrainedConfig", key: str) -> bool:
    """Returns whether the architecture reads a setting that its config does not declare, as Qwen3-MoE reads
    `head_dim`."""
    module = find_spec(type(config).__module__.replace("configuration_", "modeling_"))
    if module is None or module.origin is None:
        return False
    return f'getattr(config, "{key}"' in Path(module.origin).read_text(encoding="utf-8")


def cannot_build(spec: ScratchModel, error: Exception) -> SpecError:
    """Returns an error with transformers' complaint about the settings, located at the setting that the complaint
    quotes, if any."""
    reason = " ".join(str(error).split()) or type(error).__name__
    message = f"transformers cannot build {spec.model_type} with these settings: {reason}"
    named = {key: value for key, value in spec.config.items() if f"'{key}'" in reason}
    path = ("model", "config", *(named if len(named) == 1 else ()))
    return SpecError(Issue(message, path=path, given=_shown(named or spec.config)))


def _texts(data_dir: Path | None) -> list[str]:
    if data_dir is None:
        raise ValueError("a trained tokenizer needs the staged data")
    table = pq.read_table(data_dir / "train.parquet", columns=["prompt", "answer"])
    return [str(text) for column in table.columns for text in column.to_pylist()]


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())
