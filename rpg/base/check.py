"""The base model looked at before it is made, as far as that takes seconds and no network."""

from pathlib import Path
from typing import TYPE_CHECKING

from rpg import pretrained
from rpg.base.stage import cannot_build, existing_model, refuse_code, scratch_config, scratch_model
from rpg.base.tokenization import make_tokenizer
from specs.schema.model import ByteTokenizer, Model, PretrainedModel, ScratchModel, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 50_000_000
"""Parameters up to which a model from scratch is made to see that it computes: that takes a second."""


def check_scratch(model: ScratchModel) -> None:
    """Raises SpecError for what the base stage would refuse of a model from scratch: an architecture or a setting of it
    that there is not, settings that contradict each other.

    Of a model with more than SMALL parameters only the layers are made, without their weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # A tokenizer that the data trains is not there yet; the number of its tokens contradicts no setting.
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    config = scratch_config(model, tokenizer)
    try:
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).num_parameters()  # type: ignore[no-untyped-call]
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
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except Exception:  # a dozen classes of three libraries say that it has not been downloaded
        return None
    refuse_code(model, directory)
    try:
        return pretrained.tokenizer_of(directory)
    except Exception:  # downloaded without it
        return None
