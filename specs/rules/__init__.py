"""Rules across fields: contradictions, missing files, and settings that have no effect or are probably mistakes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specs.bounds import repeats
from specs.errors import Issue, Path
from specs.rules import control, evaluation, guards, idle, model_evaluation, rollout, training, vllm
from specs.rules.files import context_length, missing_files
from specs.schema.experiment import Experiment
from specs.schema.model import ScratchModel


def issues_of(experiment: Experiment) -> list[Issue]:
    """Returns the errors that make the experiment impossible."""
    rules = RULES if experiment.trains else OF_A_MODEL
    return [issue for rule in rules for issue in rule(experiment)]


def warnings_of(experiment: Experiment) -> list[Issue]:
    """Returns warnings about settings that have no effect or are probably mistakes. Each names the setting."""
    rules = IDLE_KNOBS if experiment.trains else (idle.issues,)
    return [issue for rule in rules for issue in rule(experiment)]


def _batch(experiment: Experiment) -> Iterator[Issue]:
    training = experiment.training
    rollouts = training.prompts_per_step * training.group_size
    if rollouts % training.minibatches:
        parts = [str(number) for number in range(1, min(rollouts, 1024) + 1) if rollouts % number == 0]
        yield Issue(
            "the batch does not divide evenly",
            ("training", "minibatches"),
            given=f"{training.prompts_per_step} x {training.group_size} responses in {training.minibatches} parts",
            allowed=", ".join(parts[:16]) + (", ..." if len(parts) > 16 else ""),
            hint="minibatches must divide prompts_per_step x group_size",
        )


def _groups(experiment: Experiment) -> Iterator[Issue]:
    if experiment.training.group_size > 1:
        return
    for name, value in (("baseline", "leave_one_out"), ("scale", "group_std")):
        if getattr(experiment.advantage, name) == value:
            yield Issue(
                f"advantage.{name} {value} needs more than one response per prompt",
                ("training", "group_size"),
                given="1",
                allowed="2 or more",
                hint=f"raise `training.group_size`, or take another `advantage.{name}`",
            )


def _advantage(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if advantages are divided by a mean of rewards that may have another sign than the rewards."""
    if experiment.advantage.scale != "group_mean":
        return
    path = ("advantage", "scale")
    for at, reward in experiment.rewards():
        if at[:2] != ("data", "evaluation") and reward.may_be_negative():
            yield Issue(
                "the mean of a group would be 0 or negative while some of its responses are right",
                path,
                given=f"group_mean with {'.'.join(map(str, at))}.type {reward.type}, which may be negative",
                hint="take a reward that is never negative, such as exact_match, or another `advantage.scale`",
            )
    penalties = [".".join(map(str, (*at, "overlong"))) for at, reward in experiment.rewards() if reward.overlong]
    if experiment.objective.penalizes_reward:
        penalties.append("objective.kl_in reward")
    for penalty in penalties:
        yield Issue(
            "a penalty makes the mean of a group 0 or negative while some of its responses are right",
            path,
            given=f"group_mean with {penalty}",
            hint="leave the penalty out, or take another `advantage.scale`",
        )
    if experiment.advantage.rewards == "normalized_each":
        yield Issue(
            "normalized rewards have a mean of 0, which cannot be a divisor",
            path,
            "group_mean with advantage.rewards normalized_each",
        )


def _reference(experiment: Experiment) -> Iterator[Issue]:
    reference = experiment.reference
    if reference.source == "snapshot" and reference.update is None:
        hint = "write when the snapshot is updated, e.g. `update: {every_steps: 16}`"
        yield Issue("missing", ("reference", "update"), allowed="the fields of a schedule", hint=hint)
    if reference.source != "snapshot" and reference.update is not None:
        yield Issue(
            f"a reference with `source: {reference.source}` is never updated",
            ("reference", "update"),
            hint="leave `update` out, or write `source: snapshot`",
        )
    if reference.source == "model" and not reference.path:
        hint = "name the teacher: a directory, or a Hub id such as Qwen/Qwen3-4B"
        yield Issue("missing", ("reference", "path"), allowed="a model directory or a Hub id", hint=hint)
    if reference.source != "model" and reference.path:
        yield Issue(
            f"a reference with `source: {reference.source}` comes from the policy",
            ("reference", "path"),
            given=reference.path,
            hint="leave `path` out, or write `source: model`",
        )


def _context(experiment: Experiment) -> Iterator[Issue]:
    context = context_length(experiment.model)
    if not context:
        return
    prompt = experiment.data.max_prompt_length
    longest = {
        ("rollout", "max_response_length"): experiment.rollout.max_response_length,
        ("evaluation", "max_response_length"): experiment.evaluation.max_response_length,
    }
    for path, response in longest.items():
        if prompt + response > context and response:
            yield Issue(
                "prompt and response do not fit the model's context",
                path,
                given=f"{prompt} + {response} = {prompt + response} tokens",
                allowed=f"at most {context} tokens together",
                hint=f"lower data.max_prompt_length or {'.'.join(path)}, or take a model with a longer context",
            )


def _evaluation_sets(experiment: Experiment) -> Iterator[Issue]:
    known = dict.fromkeys(source.name for source in experiment.data.evaluation if source.name)
    for index, source in enumerate(experiment.data.evaluation):
        if not source.name:
            yield Issue("missing", ("data", "evaluation", index, "name"), hint="an evaluation set needs a name")
        if not source.answered and source.reward:
            hint = f"leave it out: a set of source {source.source} has a score of its own"
            yield Issue(
                "the set is scored by likelihood: there are no responses for a reward to score",
                ("data", "evaluation", index, "reward"),
                hint=hint,
            )
    for index, source in enumerate(experiment.data.train):
        if not source.answered:
            hint = "move it to data.evaluation"
            yield Issue("only an evaluation can use such a set", ("data", "train", index), source.source, hint=hint)
    for index, name in enumerate(experiment.evaluation.datasets):
        if name not in known:
            yield Issue(
                "no such evaluation set",
                ("evaluation", "datasets", index),
                given=name,
                allowed=", ".join(known) or "none: data.evaluation is empty",
            )
    yield from _repeated(experiment.evaluation.datasets, ("evaluation", "datasets"), "the set is named twice")
    if experiment.evaluation.every_steps and not experiment.data.evaluation:
        yield Issue(
            "there is no evaluation set",
            ("evaluation", "every_steps"),
            given=str(experiment.evaluation.every_steps),
            hint="name a set in `data.evaluation`, or leave `every_steps` out",
        )


def _names(experiment: Experiment) -> Iterator[Issue]:
    for split, sources in (("train", experiment.data.train), ("evaluation", experiment.data.evaluation)):
        seen: set[str] = set()
        for index, source in enumerate(sources):
            if source.name and source.name in seen:
                path = ("data", split, index, "name")
                yield Issue("the name is taken by another set", path, given=source.name)
            seen.add(source.name)


def _seeds(experiment: Experiment) -> Iterator[Issue]:
    yield from _repeated(experiment.seeds, ("seeds",), "the seed is given twice")


def _repeated(values: Sequence[object], path: Path, message: str) -> Iterator[Issue]:
    for index in repeats(values):
        yield Issue(message, (*path, index), given=str(values[index]))


def _reward(experiment: Experiment) -> Iterator[Issue]:
    for path, source in experiment.sets():
        if issue := (source.reward or experiment.reward).refuses(source):
            yield replace(issue, path=(*path, "reward") if source.reward else path)


def _comparisons(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with judges that compare. They need a group, and their scores cannot compare policies, because the
    mean over a group is constant."""
    hint = "write compare: each, or give the evaluation sets a reward of their own"
    for path, source in experiment.sets():
        reward = source.reward or experiment.reward
        at = (*path, "reward") if source.reward else ("reward",)
        if reward.compares() and "evaluation" in path:
            message = "a judge that compares responses within a group cannot measure a policy"
            yield Issue(message, at, f"used for the evaluation set {source.name or path[-1]}", hint=hint)
        elif reward.compares() and experiment.training.group_size < 2:
            yield Issue("a judge that compares needs groups", ("training", "group_size"), "1", "at least 2")


def _prompt(experiment: Experiment) -> Iterator[Issue]:
    prompt = experiment.data.prompt
    if "{prompt}" not in prompt.template and "{metadata." not in prompt.template:
        yield Issue(
            "the template does not contain the problem's text",
            ("data", "prompt", "template"),
            allowed="a text with {prompt} or {metadata.NAME} in it",
        )


def _overlap(experiment: Experiment) -> Iterator[Issue]:
    if experiment.data.overlap != "error":
        return
    for index, held_out in enumerate(experiment.data.evaluation):
        for trained in experiment.data.train if held_out.answered else ():
            if issue := held_out.shared_with(trained):
                yield replace(issue, path=("data", "evaluation", index, *issue.path))


def _vocabulary(experiment: Experiment) -> Iterator[Issue]:
    model = experiment.model
    if isinstance(model, ScratchModel) and "vocab_size" in model.config:
        path = ("model", "config", "vocab_size")
        yield Issue("the tokenizer determines it", path, hint="leave it out; set model.tokenizer")


def _launcher(experiment: Experiment) -> Iterator[Issue]:
    return experiment.launcher.issues(experiment.training)


def _record(experiment: Experiment) -> Iterator[Issue]:
    record = experiment.record
    if record.rollouts == "none" and record.tokens != "none":
        yield Issue(
            "token rows would contain the responses that record.rollouts leaves out",
            ("record", "tokens"),
            given=f"{record.tokens} with `rollouts: none`",
            allowed="none",
            hint="write `tokens: none` too, or leave `rollouts` out",
        )


def _sinks(experiment: Experiment) -> Iterator[Issue]:
    yield from _repeated([sink.type for sink in experiment.sinks], ("sinks",), "there is a sink of this type already")


RULES = (
    _batch,
    _groups,
    _advantage,
    _reference,
    _context,
    _evaluation_sets,
    _names,
    _seeds,
    _reward,
    _comparisons,
    _prompt,
    _overlap,
    _vocabulary,
    *rollout.RULES,
    *vllm.RULES,
    missing_files,
    _launcher,
    _record,
    _sinks,
    *training.RULES,
    *control.RULES,
    *evaluation.RULES,
)
IDLE_KNOBS = (
    idle.issues,
    idle.unread_parameters,
    idle.unfinished_schedules,
    rollout.idle_engines,
    *guards.IDLE_KNOBS,
)
OF_A_MODEL = (
    _evaluation_sets,
    _names,
    _reward,
    _comparisons,
    _prompt,
    _vocabulary,
    *vllm.RULES,
    missing_files,
    _launcher,
    *model_evaluation.RULES,
)
"""Rules for the evaluation of a model without training."""
