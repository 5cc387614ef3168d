"""Settings that have no effect or are probably mistakes, in one table. A row has keys and the reason why they cannot
act."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from specs.errors import Issue
from specs.reading.validate import show
from specs.schema.experiment import Experiment
from specs.schema.objective import FormulaObjective, PublishedObjective, RegularizedObjective
from specs.schema.rollout import SAMPLERS, engine_of
from specs.schema.schedule import ClosedLoop, ValueSchedule, largest, schedules_in, settled, value_at

_MOST_BETWEEN = 1000
"""Number of steps that are checked for an update of the reference, in addition to those around the points of its
schedule."""
_STEEP_RATE = 0.1
"""Learning rate that is too large for any language model: Adam changes each weight by about this amount per update, and
most weights are smaller."""
_OTHER_ENGINES = " or ".join(engine_of(section) for section in SAMPLERS if not section.runs_learner_model)
_Reason = Callable[[Experiment, Any], str | bool]
"""Function of the experiment and a key's value. It returns the reason why the key cannot act, which is shown as given;
false if the key acts."""


class Idle(NamedTuple):
    """A row of the table."""

    keys: str
    """Paths from the experiment, separated by spaces. Sections without such a key are skipped."""
    reason: _Reason
    remedy: str = ""
    """Advice in addition to leaving the key out."""
    message: str = ""
    """Consequence. Empty means that the key has no effect and may be left out."""
    only: Literal["", "set", "changed"] = ""
    """Whether the warning needs the spec to set the key, or to set it to a value other than the default."""


def issues(experiment: Experiment) -> Iterator[Issue]:
    """Yields a warning for each setting of the table that cannot act."""
    for row in OF_TRAINING if experiment.trains else OF_A_MODEL:
        for key in row.keys.split():
            *above, name = path = tuple(key.split("."))
            section = _at(experiment, above)
            field = type(section).model_fields.get(name) if section is not None else None
            if field is None or (row.only and name not in section.model_fields_set):
                continue
            value = getattr(section, name)
            if row.only == "changed" and value == field.get_default(call_default_factory=True):
                continue
            if given := row.reason(experiment, value):
                hint = row.remedy if row.message else ", or ".join(filter(None, [f"leave {name} out", row.remedy]))
                yield Issue(row.message or f"{name} has no effect", path, str(given), hint=hint)


def _at(experiment: Experiment, path: list[str]) -> Any:
    """Returns the section or value at a path; None if the path does not exist."""
    found: Any = experiment
    for part in path:
        found = getattr(found, part, None)
    return found


def on_policy(experiment: Experiment) -> bool:
    """Returns whether every ratio is 1: one update per step, from the sampling policy."""
    is_adam = experiment.training.optimizer.type == "adamw"
    return _updates(experiment) == 1 and not experiment.rollout.max_staleness and is_adam


def _updates(experiment: Experiment) -> int:
    """Returns the number of updates in a step."""
    return experiment.training.minibatches * experiment.training.epochs


def _with(key: str, *values: object) -> _Reason:
    """Returns that another key has one of these values, as the reason."""

    def reason(experiment: Experiment, value: Any) -> str | bool:
        other = _at(experiment, key.split("."))
        given, beside = (each if isinstance(each, str) else show(each) for each in (value, other))
        return bool(value) and other in values and f"{given} with {key} {beside}"

    return reason


def _past_the_end(experiment: Experiment, value: int) -> str | bool:
    return value >= experiment.training.steps and f"{value} steps of {experiment.training.steps}"


def _past_the_evaluations(experiment: Experiment, plateau: int) -> str | bool:
    """Returns the number of evaluations during training as the reason, if they are too few for a plateau. The first one
    only sets the best scores."""
    every, steps = experiment.evaluation.every_steps, experiment.training.steps
    counted = len(range(every, steps, every)) if every else 0
    return plateau >= counted > 0 and f"{plateau} after the first of {counted} evaluations before the last step"


def _without_divergence(experiment: Experiment, _: object = None) -> str | bool:
    given = "divergence none" if getattr(experiment.objective, "divergence", "") == "none" else "kl_coef 0"
    given = "a formula without r and q" if experiment.objective.type == "formula" else given
    return not experiment.objective.needs_reference and given


def _with_equal_policies(experiment: Experiment, _: object) -> str | bool:
    given = "1 minibatch x 1 epoch: the trained policy is the sampling policy, so every ratio is 1"
    return on_policy(experiment) and given


def _without_size(experiment: Experiment, kl_coef: float | ValueSchedule | ClosedLoop) -> str | bool:
    objective, size = experiment.objective, largest(kl_coef)
    in_loss = isinstance(objective, (RegularizedObjective, PublishedObjective)) and not objective.penalizes_reward
    is_small = objective.needs_reference and in_loss and size < 1e-2 and experiment.reference.source == "behaviour"
    return is_small and f"{size:g} from the behaviour policy, which changes every step"


def _margin(clip: Any, name: str) -> float:
    """Returns the largest margin of a schedule, or the start of a closed loop."""
    margin = getattr(clip, name)
    return (settled(clip, name).start or 0.0) if isinstance(margin, ClosedLoop) else largest(margin)


def _read_as_bounds(_: Experiment, clip: Any) -> str | bool:
    """Returns a hint with the margins that were probably meant: 0.2 and 0.28 for the bounds 0.8 and 1.28."""
    if getattr(clip, "type", "") == "none":
        return False
    low, high = (_margin(clip, name) for name in ("low", "high"))
    like_bounds = (0.5 < low <= 0.95, 1 < high <= 10)  # larger bounds are meant to be out of reach
    # A truncated ratio may well reach 5, as in truncated importance sampling.
    doubtful = all(like_bounds) or (any(like_bounds) and getattr(clip, "type", "") != "truncate")
    meant_low, meant_high = 1 - low if like_bounds[0] else low, high - 1 if like_bounds[1] else high
    given = f"low {low:g}, high {high:g}: the clip acts outside [{1 - low:g}, {1 + high:g}]"
    bounds = f"[{1 - meant_low:g}, {1 + meant_high:g}]"
    return doubtful and f"{given}; for the bounds {bounds} write low: {meant_low:g}, high: {meant_high:g}"


def _unmoved(experiment: Experiment, every: float | ValueSchedule, unit: str, in_a_step: int) -> str | bool:
    """Returns the reason if the reference's first update would come after the end of training; else false."""
    update, steps = experiment.reference.update, experiment.training.steps
    points = every.phases() if isinstance(every, ValueSchedule) else set[int]()
    around = {step + beside for step in points for beside in (-1, 0, 1)}
    between = range(1, steps, max(1, steps // _MOST_BETWEEN))
    asked = [step for step in {*around, *between, steps - 1} if 0 < step < steps]
    moves = any(0 < value_at(every, step) <= in_a_step * step for step in asked) or (
        update and (update.kl_above or update.plateau)
    )
    return bool(largest(every)) and not moves and f"every {every} {unit} of {in_a_step * steps}"


def _computed(experiment: Experiment, skips: bool) -> str | bool:
    """Returns the reason why responses with an advantage of 0 are computed anyway, or cannot occur."""
    training, kl_coef = experiment.training, getattr(experiment.objective, "kl_coef", 0.0)
    if experiment.skips_zero_advantage:
        whitens = experiment.advantage.whiten == "tokens"
        return whitens and "advantage.whiten tokens, which subtracts the mean, so that no advantage is exactly 0"
    others = (
        f"kl_coef {kl_coef}" if largest(kl_coef) else f"router_aux_loss_coef {training.router_aux_loss_coef or 0.0:g}"
    )
    others = "an objective that is a formula" if experiment.objective.type == "formula" else others
    given = f"entropy_coef {training.entropy_coef}" if largest(training.entropy_coef) else others
    return skips and f"{given}, whose loss has a gradient even if the advantage is 0"


def _untrusted(experiment: Experiment, trusts: bool) -> str | bool:
    """Returns the reason why the sampler's logprobs are used anyway, or are not needed."""
    if staleness := experiment.rollout.max_staleness:
        return trusts and f"max_staleness {staleness}, which uses the sampler's logprobs anyway"
    once = experiment.training.minibatches == 1 and experiment.first_pass_gives_old_logprobs
    return trusts and once and "1 minibatch, whose first pass gives its old_logprobs"


def _with_both_bounds(experiment: Experiment, bound: float) -> str | bool:
    """Returns the bounds that replace the short form `bound`; false if it has its default of 1."""
    correction = experiment.rollout.correction
    given = correction.high is not None and (correction.low is not None or correction.type == "truncate")
    return given and correction.measure == "ratio" and f"{bound:g} with bounds {correction.bounds}"


def _exact(experiment: Experiment, _: object) -> str | bool:
    """Returns the reason why a correction has nothing to correct."""
    rollout = experiment.rollout
    if rollout.correction.type == "none":
        return False
    if rollout.gives_old_logprobs:
        name = "max_staleness" if rollout.max_staleness else "trust_logprobs"
        return f"{name}: old_logprobs are the engine's own"
    whole = (rollout.top_p, rollout.top_k) == (1, 0)  # else it corrects for the truncation
    given = f"engine {rollout.engine}, which samples with the learner's own weights and arithmetic"
    return rollout.runs_learner_model and whole and f"{given}: a correction is for engine {_OTHER_ENGINES}"


def unfinished_schedules(experiment: Experiment) -> Iterator[Issue]:
    """Yields a warning for each schedule whose last point lies beyond the end of training."""
    steps = experiment.training.steps
    for path, schedule in schedules_in(experiment):
        last = schedule.schedule[-1][0]
        if last > steps and len(schedule.schedule) > 1:
            yield Issue(
                "training ends before the schedule does",
                (*path, "schedule", len(schedule.schedule) - 1, 0),
                given=f"step {last}, of {steps}",
                hint="raise training.steps, or let the schedule end earlier",
            )


def unread_parameters(experiment: Experiment) -> Iterator[Issue]:
    """Yields a warning for each number of a formula that the formula does not read."""
    objective = experiment.objective
    unread = set(objective.parameters) - set(objective.names()) if isinstance(objective, FormulaObjective) else set()
    for name in sorted(unread):
        yield Issue("no formula reads it", ("objective", "parameters", name), hint="leave it out")


_ON_CPU = _with("resources.device", "cpu")
_COLOCATED = _with("rollout.placement", "colocated")
_ENGINE_GPUS = Idle("rollout.engine_gpus", lambda e, gpus: _COLOCATED(e, gpus) or _ON_CPU(e, gpus))
OF_TRAINING = (
    Idle("objective.kl_coef", lambda e, coef: largest(coef) > 0 and _without_divergence(e), only="set"),
    Idle(
        "objective.kl_coef",
        lambda e, coef: (
            isinstance(e.objective, RegularizedObjective)
            and e.objective.divergence != "none"
            and largest(coef) == 0
            and "0"
        ),
        "raise kl_coef, or write divergence: none",
        "the divergence has no effect",
    ),
    Idle(
        "objective.kl_coef",
        _without_size,
        "write 1e-2 or more, or a constant reference: source snapshot or initial",
        "the divergence is negligible compared with the reward",
    ),
    Idle(
        "objective.kl objective.kl_estimator objective.kl_in objective.kl_weighted"
        " objective.clip.keep_divergence objective.clip.branch",
        _without_divergence,
        "raise kl_coef",
        only="changed",
    ),
    Idle(
        "objective.kl_top_k",
        lambda e, top_k: _at(e, ["objective", "kl"]) != "top_k" and f"{top_k} with kl {_at(e, ['objective', 'kl'])}",
        "write kl: top_k",
        only="set",
    ),
    Idle(
        "objective.clip.keep_divergence",
        lambda e, _: (
            e.objective.summed_over == "full"
            and _at(e, ["objective", "level"]) == "token"
            and "true with `kl: full`: no clip acts on its divergence"
        ),
        only="changed",
    ),
    Idle(
        "objective.kl",
        lambda e, kl: (
            e.objective.summed_over != "sampled"
            and e.reference.source == "behaviour"
            and on_policy(e)
            and f"{kl} from the behaviour policy, with 1 minibatch x 1 epoch: the two are one policy in every update"
        ),
        "take reference.source initial or snapshot, or write kl: sampled",
        "the divergence is always 0",
    ),
    Idle(
        "objective.kl_in",
        lambda e, _: (
            e.objective.penalizes_reward
            and e.reference.source == "behaviour"
            and "reward, which compares the sampling policy with the reference; `source: behaviour` makes them equal"
        ),
        "take reference.source initial or snapshot, or write kl_in: loss",
        "the divergence is always 0",
    ),
    Idle(
        "objective.clip",
        lambda e, clip: not hasattr(clip, "type") and _with_equal_policies(e, clip),
        "raise training.minibatches or training.epochs",
        "the clip can never fire",
    ),
    Idle(
        "objective.clip",
        lambda e, clip: getattr(clip, "type", "none") != "none" and _with_equal_policies(e, clip),
        "raise training.minibatches or training.epochs, or write clip: {type: none}",
        "the clip can never fire",
    ),
    Idle(
        "objective.clip",
        _read_as_bounds,
        "write margins: low 0.2 holds the ratio at or above 0.8",
        "these look like bounds, but they are margins around ratio 1",
    ),
    Idle("objective.max_ratio", _with_equal_policies, "raise training.minibatches or training.epochs"),
    Idle(
        "reference.source",
        lambda e, source: source != "behaviour" and _without_divergence(e),
        "leave reference out, or write source: behaviour: a second model costs memory",
        "nothing reads the reference",
    ),
    Idle(
        "reference.update.every_steps",
        lambda e, every: _unmoved(e, every, "steps", 1),
        "lower every_steps or raise training.steps",
        "the reference is never updated",
    ),
    Idle(
        "reference.update.every_updates",
        lambda e, every: _unmoved(e, every, "updates", _updates(e)),
        "lower every_updates or raise training.steps",
        "the reference is never updated",
    ),
    Idle(
        "reference.update.after_steps",
        _past_the_end,
        "lower after_steps or raise training.steps",
        "the reference is never updated",
    ),
    Idle(
        "reference.update.kl_window",
        lambda e, window: bool(_at(e, ["reference", "update", "kl_above"])) and _past_the_end(e, window),
        "lower kl_window or raise training.steps",
        "kl_above can never act",
    ),
    Idle(
        "reference.update.plateau",
        _past_the_evaluations,
        "lower plateau or evaluation.every_steps, or raise training.steps",
        "plateau can never act",
    ),
    Idle(
        "advantage.scale",
        lambda e, scale: (
            scale == "group_std"
            and e.advantage.baseline in ("batch_mean", "none")
            and f"group_std with baseline {e.advantage.baseline}, with which such a group has an advantage other than 0"
        ),
        "take scale batch_std or none, or baseline group_mean or leave_one_out",
        "a group whose rewards are all equal is divided by 1e-4",
    ),
    Idle(
        "training.group_size",
        lambda e, size: size == 1 and e.advantage.baseline == "group_mean" and "1 response, minus its own mean",
        "raise group_size, or take advantage.baseline batch_mean",
        "every advantage is zero, so nothing is learnt",
    ),
    Idle("training.skip_zero_advantage", _computed),
    Idle("training.offload.while_sampling", lambda e, leaves: leaves is True and _ON_CPU(e, leaves)),
    Idle(
        "training.optimizer.learning_rate",
        lambda _, rate: largest(rate) >= _STEEP_RATE and f"{largest(rate):g}",
        "post-training takes 1e-7 to 1e-4, a small model from scratch 1e-3",
        "an update would change the weights by more than their size",
    ),
    Idle(
        "training.schedule.warmup_updates",
        lambda e, warmup: warmup >= (updates := e.training.steps * _updates(e)) and f"{warmup} of {updates} updates",
        "lower warmup_updates",
        "the learning rate never reaches its peak",
    ),
    Idle(
        "rollout.dynamic_sampling",
        lambda e, dynamic: (
            bool(dynamic)
            and e.advantage.baseline in ("none", "batch_mean")
            and f"advantage.baseline {e.advantage.baseline}: a group of right responses differs from other groups"
        ),
        "take `advantage.baseline: group_mean` or `leave_one_out`, or leave `dynamic_sampling` out",
        "dynamic sampling throws away groups that have an advantage",
    ),
    Idle(
        "rollout.dynamic_sampling.oversampling",
        _with("rollout.dynamic_sampling.refill", "rounds"),
        "write refill: stream",
        only="set",
    ),
    Idle(
        "rollout.correction.bound rollout.correction.low rollout.correction.high rollout.correction.over"
        " rollout.correction.measure",
        lambda e, value: e.rollout.correction.type == "none" and f"{value} with rollout.correction.type none",
        "write a type",
        only="changed",
    ),
    Idle(
        "rollout.correction.bound",
        _with("rollout.correction.measure", "probability"),
        "give `low` and `high` instead",
        only="changed",
    ),
    Idle("rollout.correction.bound", _with_both_bounds, "give `low` and `high`, and leave `bound` out", only="changed"),
    Idle(
        "rollout.correction.type",
        lambda e, kind: (
            e.objective.ratio_over == "sequence"
            and kind != "none"
            and e.rollout.correction.over != "sequence"
            and f"{kind} over the {e.rollout.correction.over}"
        ),
        "write over: sequence, or use an objective with ratios of tokens",
        "the correction is inexact: it weights tokens, and the objective weights whole responses",
    ),
    Idle("rollout.correction", _exact),
    Idle(
        "rollout.top_p rollout.top_k",
        lambda _, cut: (
            f"{cut:g}: tokens are drawn from a part of the distribution, but old_logprobs are those of the whole"
        ),
        "leave it out in training; evaluation has its own",
        "the importance ratio is biased",
        only="changed",
    ),
    Idle(
        "rollout.stop",
        lambda e, stop: not e.evaluation.stop and ", ".join(map(repr, stop)),
        "give evaluation.stop the same texts",
        "evaluation does not stop where training does",
    ),
    Idle(
        "rollout.max_staleness",
        lambda e, staleness: 1 < e.training.steps <= staleness + 1 and f"{staleness}, in {e.training.steps} steps",
        "1 is enough to sample while training",
        "the initial policy samples every batch",
    ),
    Idle("rollout.trust_logprobs", _untrusted),
    _ENGINE_GPUS,
    Idle(
        "evaluation.top_p evaluation.top_k",
        _with("evaluation.temperature", 0),
        "raise evaluation.temperature: at 0 the likeliest token is taken",
        only="changed",
    ),
    Idle(
        "evaluation.samples_per_problem",
        lambda e, samples: samples > 1 and _with("evaluation.temperature", 0)(e, samples),
        "1 sample is enough for greedy decoding",
        "every sample of a problem is the same",
    ),
    Idle(
        "evaluation.checkpoints",
        lambda e, which: which == "all" and _with("training.export_every_steps", 0)(e, which),
        "set training.export_every_steps",
        "only the first and the last checkpoint can be evaluated",
    ),
    Idle(
        "evaluation.every_steps",
        _past_the_end,
        "lower every_steps, or leave it out: the last step is evaluated after training in any case",
        "nothing is evaluated during training",
    ),
    Idle("evaluation.concurrent_ranks", _with("evaluation.checkpoints", "final"), "write checkpoints: all"),
    Idle("record.sampled_share", _with("record.tokens", "all", "none"), "write tokens: sampled", only="set"),
    Idle("record.keep_days", _with("record.tokens", "none")),
)
"""Rows for an experiment that trains."""
_NOTHING_TRAINED = "an evaluation, which neither trains nor samples for training"
OF_A_MODEL = (
    _ENGINE_GPUS,
    Idle(
        "evaluation.checkpoints evaluation.every_steps evaluation.concurrent_ranks"
        " rollout.dynamic_sampling rollout.correction rollout.trust_logprobs rollout.max_staleness",
        lambda *_: _NOTHING_TRAINED,
        only="set",
    ),
    Idle(
        "rollout.temperature rollout.top_p rollout.top_k rollout.stop",
        lambda *_: _NOTHING_TRAINED,
        "write it under evaluation",
        only="set",
    ),
)
"""Rows for the evaluation of a model without training."""
