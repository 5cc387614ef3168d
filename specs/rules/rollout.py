"""Rules of sampling, and of the choice of responses to score and train on."""

from collections.abc import Iterator
from dataclasses import replace

from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.schedule import ValueSchedule


def dynamic_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue for dynamic sampling with groups of one, whose scores cannot vary."""
    if experiment.rollout.dynamic_sampling and experiment.training.group_size == 1:
        yield Issue(
            "no group could vary",
            ("rollout", "dynamic_sampling"),
            given="group_size 1",
            hint="raise training.group_size to 2 or more, or leave dynamic_sampling out",
        )


def engines(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if engines cannot be spread evenly over the machines."""
    count, machines = experiment.rollout.engines, experiment.launcher.engine_machines
    if count % machines:
        given, hint = f"{count} engines on {machines} nodes", "rollout.engines must be a multiple of launcher.nodes"
        yield Issue(
            "the engines do not divide evenly among the machines", ("rollout", "engines"), given=given, hint=hint
        )


def idle_engines(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if an engine would be idle because it gets no prompt."""
    count, prompts = experiment.rollout.engines, experiment.training.prompts_per_step
    if count > prompts:
        hint = "raise training.prompts_per_step, or lower rollout.engines"
        given = f"{count} engines for {prompts} prompts"
        yield Issue("a step has fewer prompts than engines: some are idle", ("rollout", "engines"), given, hint=hint)


def turns_without_rewards(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with credit per turn, which needs rewards of turns and an advantage per token."""
    if experiment.advantage.credit == "outcome":
        return
    path = ("advantage", "credit")
    if not experiment.rollout.rollouter.rewards_turns:
        yield Issue(
            "no turn has a reward of its own, so every turn has the return of the response",
            path,
            given=f"turn with rollout.rollouter.type {experiment.rollout.rollouter.type} in these settings",
            hint="configure rewards for turns under `rollout.rollouter`, or leave `credit` out",
        )
    if experiment.objective.ratio_over != "token":
        yield Issue(
            "a whole response has one weight, and cannot have an advantage for each turn",
            path,
            given=f"turn with an objective whose ratio is over the {experiment.objective.ratio_over}",
            hint="take an objective with ratios of tokens, such as `level: token`, or leave `credit` out",
        )
    if experiment.rollout.dynamic_sampling:
        yield Issue(
            "groups with equal sums but different turns would be discarded",
            path,
            given="turn with rollout.dynamic_sampling",
            hint="leave one of them out",
        )


def environment(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with an environment whose turns do not fit into a response."""
    for issue in experiment.rollout.rollouter.issues(experiment.rollout.max_response_length):
        yield replace(issue, path=("rollout", "rollouter", *issue.path))


def overlong(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if the buffer of the overlong penalty is longer than a response."""
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
    """Yields issues with masking. The tokens of a masked response are not computed, so that a reward or a mean cannot
    include them."""
    objective = experiment.objective
    if experiment.training.mask_truncated and objective.penalizes_reward:
        yield Issue(
            "a masked response has no divergence to subtract from its reward",
            ("training", "mask_truncated"),
            given=f"true with {objective.type} and kl_in reward",
            hint="write objective.kl_in: loss, or leave mask_truncated out",
        )
    if experiment.training.mask_truncated and experiment.advantage.whiten == "tokens":
        yield Issue(
            "the mean and deviation would include the tokens of masked responses",
            ("training", "mask_truncated"),
            given="true with advantage.whiten tokens",
            hint="write advantage.whiten: none, or leave mask_truncated out",
        )


def sampler_logprobs(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues if the sampler's logprobs, used as old_logprobs, come from a truncated distribution."""
    rollout = experiment.rollout
    cut = [
        f"{name} {value:g}"
        for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0))
        if value != whole
    ]
    for name in ("max_staleness", "trust_logprobs"):
        if getattr(rollout, name) and cut:
            yield Issue(
                "old_logprobs would be the sampler's, which are those of a truncated distribution",
                ("rollout", name),
                given=" and ".join(cut),
                hint=f"leave {name} out, or leave out {' and '.join(text.split()[0] for text in cut)}",
            )


def replayed_routing(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with routing replay, which supports only single turns and rows that ranks do not share."""
    if not experiment.rollout.replay_routing:
        return
    path, hint = ("rollout", "replay_routing"), "leave replay_routing out"
    if (kind := experiment.rollout.rollouter.type) != "single_turn":
        yield Issue(
            "routing replay supports only responses of a single turn", path, f"true with rollouter {kind}", hint=hint
        )
    if (size := experiment.training.sequence_parallel_size) > 1:
        given = f"true with training.sequence_parallel_size {size}"
        yield Issue("routing replay does not support ranks that share sequences", path, given, hint=hint)


def partial(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with `partial`. Only responses of a single turn, whose tokens show their end, can continue in the
    next step."""
    rollout = experiment.rollout
    if not rollout.partial:
        return
    path, without = ("rollout", "partial"), "leave partial out"
    if not rollout.max_staleness:
        hint = f"write rollout.max_staleness: 1, or {without}"
        yield Issue("a response that continues is older than its step", path, "true with max_staleness 0", hint=hint)
    if (kind := rollout.rollouter.type) != "single_turn":
        given = f"true with rollouter {kind}"
        yield Issue("a response of several turns cannot continue in the next step", path, given, hint=without)
    if rollout.dynamic_sampling:
        hint = "leave one of them out"
        yield Issue(
            "`partial` and `dynamic_sampling` both choose the groups of a step",
            path,
            "true with dynamic_sampling",
            hint=hint,
        )
    if rollout.stop:
        problem = "a stop text that begins in one step and ends in the next would not be found"
        yield Issue(problem, path, f"true with stop {', '.join(map(repr, rollout.stop))}", hint="leave one of them out")
    if isinstance(rollout.temperature, ValueSchedule):
        problem = "the tokens before the cut would have another temperature"
        yield Issue(problem, path, "true with a schedule of temperature", hint="leave one of them out")
    if rollout.replay_routing:
        problem = "the experts of the tokens before the cut are not kept"
        yield Issue(problem, path, "true with replay_routing", hint="leave one of them out")


def summed_divergence(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with a divergence that is summed over the vocabulary. It needs the reference's distribution at
    every token."""
    if (kl := experiment.objective.summed_over) == "sampled":
        return
    path, hint = ("objective", "kl"), "write kl: sampled"
    if (size := experiment.training.sequence_parallel_size) > 1:
        given = f"{kl} with training.sequence_parallel_size {size}"
        message = "ranks that share a sequence do not share the reference's distributions of its tokens"
        yield Issue(message, path, given, hint=f"{hint}, or leave sequence_parallel_size out")
    if experiment.reference.source == "behaviour" and (staleness := experiment.rollout.max_staleness):
        given = f"{kl} with reference.source behaviour and rollout.max_staleness {staleness}"
        message = "the policy that sampled is gone when its distributions are needed"
        yield Issue(message, path, given, hint=f"{hint}, leave max_staleness out, or take another reference.source")


RULES = (
    engines,
    summed_divergence,
    environment,
    dynamic_sampling,
    turns_without_rewards,
    overlong,
    mask_truncated,
    sampler_logprobs,
    replayed_routing,
    partial,
)
