"""Opening of a sampler from a spec's rollout section."""

from importlib import import_module
from pathlib import Path

from rpg.samplers.base import Sampler, SamplerSettings
from rpg.samplers.stop_texts import tokenizer_in
from specs.errors import Issue, SpecError
from specs.schema.rollout import Rollout, not_installed


def open_sampler(rollout: Rollout, settings: SamplerSettings) -> Sampler:
    """Opens the sampler that the spec names with `open_sampler` of the module `rpg.samplers.ENGINE`.

    Raises:
        SpecError: a package or device that the sampler needs is missing, or the directory of the weights names no end
            token or lacks a tokenizer that stop texts need.
        SamplerOutOfMemoryError: an engine does not fit.
    """
    if issue := not_installed(rollout):
        raise SpecError(issue)
    if rollout.stop:
        _check_stop_texts(settings.weights_dir)
    sampler: Sampler = import_module(f"rpg.samplers.{rollout.engine}").open_sampler(rollout, settings)
    return sampler


def _check_stop_texts(weights_dir: Path) -> None:
    """Raises SpecError if the tokenizer cannot find stop texts. Without this check the first step would fail."""
    try:
        tokenizer_in(weights_dir)
    except ValueError as error:
        hint = "leave rollout.stop out, or take a model with a tokenizer.json"
        raise SpecError(Issue(str(error), path=("rollout", "stop"), hint=hint)) from error
