"""Rules on how responses are sampled, and which are scored and trained on."""

from collections.abc import Iterator
from dataclasses import replace

from specs.errors import Issue
from specs.rules.objective import on_policy
from specs.schema.experiment import Experiment
from specs.schema.objective import RegularizedObjective
from specs.schema.rollout import SAMPLERS, engine_of


def dynamic_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Dynamic sampling keeps groups whose scores vary, which those of a group of one never do."""
    if experiment.rollout.dynamic_sampling and experiment.training.group_size == 1:
        yield Issue(
            "no group could vary",
            ("rollout", "dynamic_sampling"),
            given="group_size 1",
            hint="raise training.group_size to 2 or more, or leave dynamic_sampling out",
        )


def turns_without_rewards(experiment: Experiment) -> Iterator[Issue]:
    """Turns answer for returns of their own where they have rewards, and where an advantage is of a token."""
    if experiment.advantage.credit == "outcome":
        return
    path = ("advantage", "credit")
    if not experiment.rollout.rollouter.rewards_turns:
        yield Issue(
            "no turn has a reward: from each turn on the return is that of the response",
            path,
            given=f"turn with rollout.rollouter.type {experiment.rollout.rollouter.type} as it is set",
            hint="set rewards of turns under rollout.rollouter, or leave credit out",
        )
    if experiment.objective.ratio_over != "token":
        yield Issue(
            "a whole response has one weight, and cannot have an advantage for each turn",
            path,
            given=f"turn with an objective whose ratio is over the {experiment.objective.ratio_over}",
            hint="take an objective with ratios of tokens, such as level: token, or leave credit out",
        )
    if experiment.rollout.dynamic_sampling:
        yield Issue(
            "groups would be thrown away whose sums are equal and whose turns are not",
            path,
            given="turn with rollout.dynamic_sampling",
            hint="leave one of them out",
        )


def environment(experiment: Experiment) -> Iterator[Issue]:
    """The turns of an environment must fit into a response."""
    for issue in experiment.rollout.rollouter.issues(experiment.rollout.max_response_length):
        yield replace(issue, path=("rollout", "rollouter", *issue.path))


def overlong(experiment: Experiment) -> Iterator[Issue]:
    """The buffer of the overlong penalty must lie within the response."""
    longest = experiment.rollout.max_response_length
    for path, reward in experiment.rewards():
        if reward.overlong and reward.overlong.buffer > longest:
            yield Issue(
                "the buffer is longer than a response",
                (*path, "overlong", "buffer"),
                given=str(reward.overlong.buffer),
                allowed=f"at most {longest}, rollout.max_response_length",
            )


def mask_truncated(experiment: Experiment) -> Iterator[Issue]:
    """A masked response's tokens are not computed, so that nothing of theirs can enter a reward or a mean."""
    objective = experiment.objective
    if experiment.training.mask_truncated and objective.penalizes_reward:
        yield Issue(
            "a masked response has no divergence to take off its reward",
            ("training", "mask_truncated"),
            given=f"true with {objective.type} and kl_in reward",
            hint="write objective.kl_in: loss, or leave mask_truncated out",
        )
    if experiment.training.mask_truncated and experiment.advantage.whiten == "tokens":
        yield Issue(
            "the tokens of masked responses would be in the mean and the deviation of the others",
            ("training", "mask_truncated"),
            given="true with advantage.whiten tokens",
            hint="write advantage.whiten: none, or leave mask_truncated out",
        )


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


def idle_dynamic_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Dynamic sampling may throw away groups that have an advantage."""
    baseline = experiment.advantage.baseline
    if experiment.rollout.dynamic_sampling and baseline in ("none", "batch_mean"):
        yield Issue(
            "dynamic sampling throws away groups that have an advantage",
            ("rollout", "dynamic_sampling"),
            given=f"advantage.baseline {baseline}: a group that is all right differs from the other groups",
            hint="take advantage.baseline group_mean or leave_one_out, or leave dynamic_sampling out",
        )


def idle_oversampling(experiment: Experiment) -> Iterator[Issue]:
    """Rounds sample no more groups than are missing."""
    dynamic = experiment.rollout.dynamic_sampling
    if dynamic and dynamic.refill == "rounds" and "oversampling" in dynamic.model_fields_set:
        yield Issue(
            "oversampling has no effect",
            ("rollout", "dynamic_sampling", "oversampling"),
            given="refill rounds",
            hint="write refill: stream, or leave oversampling out",
        )


def idle_correction(experiment: Experiment) -> Iterator[Issue]:
    """A correction may have a ratio that is always 1, or a bound of nothing."""
    correction = experiment.rollout.correction
    if correction.type == "none" and "bound" in correction.model_fields_set:
        yield Issue(
            "the bound has no effect",
            ("rollout", "correction", "bound"),
            given="correction.type none",
            hint="write type: truncate or type: mask, or leave the bound out",
        )
    if (
        correction.type != "none"
        and experiment.rollout.runs_learner_model
        and not experiment.rollout.gives_old_logprobs
        and (experiment.rollout.top_p, experiment.rollout.top_k) == (1, 0)  # else it weighs by what was cut off
    ):
        others = " or ".join(engine_of(section) for section in SAMPLERS if not section.runs_learner_model)
        yield Issue(
            "the correction can never act",
            ("rollout", "correction"),
            given=f"engine {experiment.rollout.engine}: it samples with the learner's own weights and arithmetic",
            hint=f"leave it out; it is for engine {others}",
        )


def biased_ratio(experiment: Experiment) -> Iterator[Issue]:
    """Tokens drawn from a cut distribution are trained on as if they were from the whole one."""
    rollout = experiment.rollout
    for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != whole:
            yield Issue(
                "the importance ratio is biased",
                ("rollout", name),
                given=f"{value:g}: tokens are drawn from a part of the distribution, old_logprobs are of all of it",
                hint=f"leave {name} at {whole} in training; evaluation has its own",
            )


def idle_cuts(experiment: Experiment) -> Iterator[Issue]:
    """At temperature 0 only the likeliest token is taken, so that no cut of the distribution matters."""
    evaluation = experiment.evaluation
    for name, value, whole in (("top_p", evaluation.top_p, 1), ("top_k", evaluation.top_k, 0)):
        if evaluation.temperature == 0 and value != whole:
            yield Issue(
                f"{name} has no effect",
                ("evaluation", name),
                given=f"{value:g} at temperature 0, which takes the likeliest token",
                hint=f"leave {name} out, or raise evaluation.temperature",
            )


def unequal_stops(experiment: Experiment) -> Iterator[Issue]:
    """A policy trained to stop at a text is measured without it."""
    if experiment.rollout.stop and not experiment.evaluation.stop:
        yield Issue(
            "evaluation does not stop where training does",
            ("rollout", "stop"),
            given=", ".join(repr(text) for text in experiment.rollout.stop),
            hint="give evaluation.stop the same texts",
        )


def idle_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Sampling ahead, trust and correction may leave each other nothing to do."""
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
    """A clip bounds a ratio that is always 1."""
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


def replayed_routing(experiment: Experiment) -> Iterator[Issue]:
    """The experts of a response are those of one turn, in rows that ranks do not share."""
    if not experiment.rollout.replay_routing:
        return
    path, hint = ("rollout", "replay_routing"), "leave replay_routing out"
    if (kind := experiment.rollout.rollouter.type) != "single_turn":
        yield Issue("a response of several turns has experts of each", path, f"true with rollouter {kind}", hint=hint)
    if (size := experiment.training.sequence_parallel_size) > 1:
        given = f"true with training.sequence_parallel_size {size}"
        yield Issue("the routing is not replayed where ranks share sequences", path, given, hint=hint)


RULES = (
    environment,
    dynamic_sampling,
    turns_without_rewards,
    overlong,
    mask_truncated,
    sampler_logprobs,
    replayed_routing,
)
IDLE_KNOBS = (
    idle_dynamic_sampling,
    idle_oversampling,
    idle_correction,
    biased_ratio,
    idle_cuts,
    unequal_stops,
    idle_clip,
    idle_sampling,
)
