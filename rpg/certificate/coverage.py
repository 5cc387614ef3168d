"""Finds keys of a spec that can change the gradient and that its certificate does not cover.

It walks the spec itself, so a key that no table here names is listed too."""

from collections.abc import Iterator, Mapping
from typing import Any

from specs.schema.experiment import Experiment

_ENUMERATED = """
objective.type objective.divergence objective.estimator objective.level objective.kl_coef objective.kl_estimator
objective.kl_in objective.kl_weighted objective.kl objective.kl_top_k objective.max_ratio
objective.clip.type objective.clip.low objective.clip.high
objective.clip.dual objective.clip.branch objective.clip.keep_divergence
objective.weight objective.loss objective.clipped objective.parameters objective.claim
advantage.baseline advantage.credit rollout.rollouter rollout.partial training.minibatches training.epochs
reference.source reference.path reference.revision reference.update.every_steps reference.update.every_updates
reference.update.kl_above reference.update.kl_window reference.update.ema_decay reference.update.after_steps
reference.update.plateau
"""
"""Keys whose effect is enumerated: those of the loss, of a turn's credit, of the distance between policy, sampler and
reference, and of a sampler that changes within a response."""
_FOR_ANY_VALUE = """
model.source model.path model.revision model.model_type model.config model.tokenizer.type model.tokenizer.vocab_size
model.seed warm_up.steps warm_up.until_loss warm_up.batch_size warm_up.learning_rate warm_up.warmup_fraction
warm_up.weight_decay training.lora.rank training.lora.alpha training.lora.target_modules
data.train data.prompt.type data.prompt.template data.prompt.system data.prompt.enable_thinking
data.prompt.chat_template data.deduplicate
data.overlap data.max_prompt_length reward
rollout.temperature rollout.stop rollout.max_response_length
"""
"""Keys of the policy, its problems, its reward, and the end of a response. The certificate holds for any value of
these."""
_AFTER_THE_GRADIENT = """
training.steps training.prompts_per_step training.group_size training.skip_zero_advantage training.on_not_finite
training.guards training.export_every_steps training.optimizer.learning_rate training.optimizer.betas
training.optimizer.epsilon training.optimizer.weight_decay training.optimizer.max_grad_norm
training.schedule.type training.schedule.warmup_updates reference.update.reset_optimizer
"""
"""Keys that set how many gradients are computed and how the optimizer uses them."""
_NOT_OF_TRAINING = "name question seeds matrix data.evaluation evaluation launcher resources stages"
_WITH_ANOTHER = """
rollout.correction.bound rollout.correction.low rollout.correction.high rollout.correction.over
rollout.correction.measure
"""
"""Keys that have an effect only if another listed key has one."""

_TABLES = (_ENUMERATED, _FOR_ANY_VALUE, _AFTER_THE_GRADIENT, _NOT_OF_TRAINING, _WITH_ANOTHER)
COVERED = frozenset(" ".join(_TABLES).split())
"""Keys and sections that a certificate covers, or that do not change the gradient."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "objective.aggregation": ("token_mean", "sequence_sum", "fixed_length"),  # the other aggregation: see length_cosine
    "advantage.scale": ("none",),
    "advantage.whiten": ("none",),
    "advantage.rewards": ("summed",),
    "data.order": ({"type": "shuffled"},),
    "rollout.top_p": (1.0,),
    "rollout.top_k": (0,),
    "rollout.dynamic_sampling": (None,),
    "rollout.correction.type": ("none",),
    "rollout.trust_logprobs": (False,),
    "rollout.max_staleness": (0,),
    "rollout.replay_routing": (False,),
    "rollout.engine": ("transformers",),
    "rollout.kv_cache": ("auto",),
    "training.mask_truncated": (False,),
    "training.entropy_coef": (0.0,),
    "training.router_aux_loss_coef": (None, 0.0),
    "training.optimizer.type": ("adamw",),
    "training.precision": ("float32",),
    "training.gradient_reduction": ("auto", "float32"),
}
"""Keys that no certificate covers -> values that leave the gradient unchanged."""


def not_covered(experiment: Experiment) -> dict[str, Any]:
    """Returns the keys, with values, that may make an experiment's gradient differ from its certificate's.

    Example:
        >>> settings = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "entropy_coef": 0.01}
        >>> task = {"source": "reasoning_gym", "task": "chain_sum", "size": 10}
        >>> spec = {"name": "one", "model": {"source": "scratch"}, "data": {"train": [task]}, "training": settings}
        >>> spec |= {"objective": {"type": "rpg"}, "reward": {"type": "exact_match"}}
        >>> not_covered(Experiment.model_validate(spec))
        {'training.entropy_coef': 0.01}
    """
    return dict(_listed(experiment.identity(), ""))


def _listed(section: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        path = f"{place}{key}"
        if path in WITHOUT_EFFECT:
            if value not in WITHOUT_EFFECT[path]:
                yield path, _given(value)
        elif path in COVERED:
            continue
        elif isinstance(value, dict) and value:
            yield from _listed(value, f"{path}.")
        elif value is not None and value not in ("", [], {}):  # a key that no table names
            yield path, value


def _given(value: Any) -> Any:
    """Returns a key's value, without fields that a closed loop omits."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
