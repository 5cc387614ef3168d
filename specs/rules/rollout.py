"""Rules on how responses are sampled, and which are scored and trained on."""

from collections.abc import Iterator
from dataclasses import replace

from specs.errors import Issue
from specs.schema.experiment import Experiment


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


def partial(experiment: Experiment) -> Iterator[Issue]:
    """Responses can continue in the next step only if they are single turns, whose end their own tokens show."""
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
        yield Issue("both choose the groups of a step", path, "true with dynamic_sampling", hint=hint)
    if rollout.stop:
        problem = "a stop text that two steps sample would not be seen"
        yield Issue(problem, path, f"true with stop {', '.join(map(repr, rollout.stop))}", hint="leave one of them out")
    if rollout.replay_routing:
        problem = "the experts of the tokens before the cut are not kept"
        yield Issue(problem, path, "true with replay_routing", hint="leave one of them out")


RULES = (
    environment,
    dynamic_sampling,
    turns_without_rewards,
    overlong,
    mask_truncated,
    sampler_logprobs,
    replayed_routing,
    partial,
)
