"""What sampling ahead asks of the rest of a spec."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.rules.objective import on_policy
from specs.schema.experiment import Experiment
from specs.schema.objective import RegularizedObjective


def sampler_logprobs(experiment: Experiment) -> Iterator[Issue]:
    """The sampler's logprobs stand for the policy's only if it draws from the whole distribution."""
    rollout = experiment.rollout
    cut = [
        f"{name} {value:g}"
        for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0))
        if value != whole
    ]
    for name in ("max_staleness", "trust_logprobs"):
        if getattr(rollout, name) and cut:
            yield Issue(
                "old_logprobs would be the sampler's, of a distribution that was cut",
                ("rollout", name),
                given=" and ".join(cut),
                hint=f"leave {name} out, or leave out {' and '.join(text.split()[0] for text in cut)}",
            )


def idle_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Knobs of sampling that cannot act."""
    rollout, training = experiment.rollout, experiment.training
    if training.steps > 1 and rollout.max_staleness >= training.steps - 1:
        yield Issue(
            "every batch is sampled by the policy that training begins with",
            ("rollout", "max_staleness"),
            given=f"{rollout.max_staleness}, in {training.steps} steps",
            hint="1 is enough to sample while training",
        )
    if rollout.gives_old_logprobs and rollout.correction.type != "none":
        name = "max_staleness" if rollout.max_staleness else "trust_logprobs"
        yield Issue(
            "there is no gap left to correct",
            ("rollout", "correction"),
            given=f"{name}: old_logprobs are the engine's own",
            hint=f"leave correction out, or {name}",
        )
    if rollout.trust_logprobs and rollout.max_staleness:
        hint = "leave trust_logprobs out: with max_staleness above 0 the sampler's are taken anyway"
        yield Issue("trust_logprobs has no effect", ("rollout", "trust_logprobs"), given="true", hint=hint)
    elif rollout.trust_logprobs and training.minibatches == 1 and experiment.first_pass_gives_old_logprobs:
        yield Issue(
            "nothing is recomputed that could be trusted",
            ("rollout", "trust_logprobs"),
            given="1 minibatch, whose first pass gives its old_logprobs",
            hint="leave trust_logprobs out",
        )


def idle_clip(experiment: Experiment) -> Iterator[Issue]:
    """Bounds on a ratio that is always 1."""
    clip = getattr(experiment.objective, "clip", None)
    if clip is None or getattr(clip, "type", "") == "none" or not on_policy(experiment):
        return
    yield Issue(
        "the clip can never fire",
        ("objective", "clip"),
        given="1 minibatch x 1 epoch: the policy that is trained is the one that sampled, so every ratio is 1",
        hint="raise training.minibatches or training.epochs"
        + (", or write clip: {type: none}" if isinstance(experiment.objective, RegularizedObjective) else ""),
    )


def idle_skipping(experiment: Experiment) -> Iterator[Issue]:
    """Leaving responses out, under a loss that has a gradient for each."""
    training = experiment.training
    if training.skip_zero_advantage and not experiment.skips_zero_advantage:
        kl_coef, entropy_coef = experiment.objective.kl_coef, training.entropy_coef
        given = f"entropy_coef {entropy_coef:g}" if entropy_coef else f"kl_coef {kl_coef:g}"
        yield Issue(
            "every response is computed: the loss has a gradient where the advantage is 0 as well",
            ("training", "skip_zero_advantage"),
            given=given,
            hint="leave skip_zero_advantage out",
        )


RULES = (sampler_logprobs,)
IDLE_KNOBS = (idle_clip, idle_sampling, idle_skipping)
