"""The base model looked at before it is made, as far as that takes seconds and no network."""

from pathlib import Path
from typing import TYPE_CHECKING

from rpg import pretrained
from rpg.base.stage import cannot_build, existing_model, refuse_code, scratch_config, scratch_model
from rpg.base.tokenization import make_tokenizer
from specs.errors import Issue, SpecError
from specs.schema.experiment import Experiment
from specs.schema.model import ByteTokenizer, Model, PretrainedModel, ScratchModel, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SMALL = 50_000_000
"""Parameters up to which a model from scratch is made to see that it computes: that takes a second."""


def check_scratch(model: ScratchModel) -> None:
    """Raises SpecError for what the base stage would refuse of a model from scratch: an architecture or a setting of it
    that there is not, settings that contradict each other.

    Of a model with more than SMALL parameters only the layers are made, without their weights.
    """
    # A tokenizer that the data trains is not there yet; the number of its tokens contradicts no setting.
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    config = scratch_config(model, tokenizer)
    try:
        parameters = pretrained.model_without_weights(config).num_parameters()
    except Exception as error:
        raise cannot_build(model, error) from error
    if parameters <= SMALL:
        scratch_model(model, tokenizer)


def tokenizer_of(model: Model) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer; None where the data trains it, or it is on the Hub and not on this machine.

    Raises:
        SpecError: the directory that the spec names is without a config, a tokenizer or safetensors, or the model's
            settings name code.
    """
    if not isinstance(model, PretrainedModel):
        return None if isinstance(model.tokenizer, TrainedTokenizer) else make_tokenizer(model.tokenizer, ())
    if Path(model.path).is_dir():
        return existing_model(model)[2]
    directory = downloaded(model)
    if directory is None:
        return None
    refuse_code(model, directory)
    try:
        return pretrained.tokenizer_of(directory)
    except Exception:  # downloaded without it
        return None


def downloaded(model: PretrainedModel) -> Path | None:
    """The directory of a model of the Hub that is on this machine; None where it is not."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except Exception:  # a dozen classes of three libraries say that it has not been downloaded
        return None


def check_training(experiment: Experiment) -> None:
    """Raises SpecError for what a rank would refuse of the model, as far as its config shows it.

    That is logits that are scaled, experts whose load cannot be balanced or whose choice cannot be replayed, heads that
    ranks cannot share out, and modules for adapters that there are not.

    A model that is not on this machine, or whose config builds no model, is passed over.
    """
    from rpg.learner.adapters import check_targets
    from rpg.learner.own_logits import check_logits
    from rpg.learner.sequence_parallel import check_heads
    from rpg.routing import balancing_weight, check_balancing, check_replay

    config, training = config_of_model(experiment.model), experiment.training
    if config is None:
        return
    check_logits(config)
    if balancing_weight(training, config):
        check_balancing(training, pretrained.model_without_weights(config))
    if experiment.rollout.replay_routing:
        check_replay(config)
    text = config.get_text_config()
    if training.sequence_parallel_size > 1:
        heads = text.num_attention_heads
        check_heads(
            training.sequence_parallel_size, heads=heads, key_heads=getattr(text, "num_key_value_heads", None) or heads
        )
    if training.lora and training.lora.target_modules:
        check_targets(pretrained.model_without_weights(config), training.lora)


def check_sampler(experiment: Experiment) -> None:
    """Raises SpecError where the spec's sampler cannot hold the model's layers, as far as its config shows it."""
    from rpg.samplers.transformers.cache import caches_all_layers

    config = config_of_model(experiment.model)
    if config is None or experiment.rollout.engine != "transformers" or caches_all_layers(config):
        return
    kinds = ", ".join(sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}))
    issue = Issue(
        "the transformers sampler takes models with full attention in every layer alone",
        ("rollout", "engine"),
        given=f"transformers; {config.model_type} has {kinds or 'other'} layers",
        hint="write engine: vllm, which samples such models",
    )
    raise SpecError(issue)


def directory_of(model: Model) -> Path | None:
    """Returns the directory of a model that exists; None where it is not on this machine, or made from scratch."""
    if not isinstance(model, PretrainedModel):
        return None
    return Path(model.path) if Path(model.path).is_dir() else downloaded(model)


def config_of_model(model: Model) -> "PretrainedConfig | None":
    """The model's config; None where it is not on this machine, or cannot be read."""
    if not isinstance(model, PretrainedModel):
        return scratch_config(model, make_tokenizer(ByteTokenizer(), ()))
    directory = directory_of(model)
    try:
        return pretrained.config_of(directory) if directory else None
    except Exception:  # whoever reads the tokenizer says what is wrong with the directory
        return None
