"""Checks a model's config for features that a sampler or a rank would refuse."""

import math

from rpg import pretrained
from rpg.base.stage import NamedModel
from specs.errors import Issue, SpecError
from specs.schema.experiment import Experiment
from specs.schema.schedule import ClosedLoop
from specs.schema.training import Training


def check_model(experiment: Experiment, model: NamedModel) -> None:
    """Raises SpecError for a model that the spec's sampler or training would refuse.

    The sampler refuses layers that it cannot hold. Training refuses scaled logits, experts whose load cannot be
    balanced or whose choice cannot be replayed, heads that cannot be divided among ranks, missing modules for adapters,
    and a target that the entropy cannot reach.

    A model that is not on this machine, or whose config builds no model, is skipped.
    """
    from rpg.learner.adapters import check_targets
    from rpg.learner.own_logits import check_logits
    from rpg.learner.sequence_parallel import check_heads
    from rpg.routing import balancing_weight, check_balancing, check_replay
    from rpg.samplers.transformers.cache import caches_all_layers

    config, training = model.config, experiment.training
    if config is None:
        return
    text = config.get_text_config()
    if experiment.rollout.engine == "transformers" and not caches_all_layers(config):
        kinds = ", ".join(sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"}))
        issue = Issue(
            "the transformers sampler supports only models with full attention in every layer",
            ("rollout", "engine"),
            given=f"transformers; {config.model_type} has {kinds or 'other'} layers",
            hint="write engine: vllm, which samples such models",
        )
        raise SpecError(issue)
    if not experiment.trains:
        return
    check_logits(config)
    _check_entropy(training, pretrained.embedding_size(config))
    is_balanced, targets = balancing_weight(training, config), training.lora and training.lora.target_modules
    empty = pretrained.model_without_weights(config) if is_balanced or targets else None
    if is_balanced and empty is not None:
        check_balancing(training, empty)
    if experiment.rollout.replay_routing:
        check_replay(config)
    if training.sequence_parallel_size > 1:
        heads = text.num_attention_heads
        check_heads(
            training.sequence_parallel_size, heads=heads, key_heads=getattr(text, "num_key_value_heads", None) or heads
        )
    if training.lora and targets and empty is not None:
        check_targets(empty, training.lora)


def _check_entropy(training: Training, num_tokens: int) -> None:
    """Raises SpecError if the entropy of this many tokens cannot reach the target of entropy_coef."""
    loop = training.entropy_coef
    if isinstance(loop, ClosedLoop) and num_tokens and loop.target >= math.log(num_tokens):
        issue = Issue(
            f"the entropy over the model's {num_tokens} tokens is at most {math.log(num_tokens):.4g} nats",
            ("training", "entropy_coef", "target"),
            given=f"{loop.target:g}",
            allowed=f"a number in (0, {math.log(num_tokens):.4g})",
        )
        raise SpecError(issue)
