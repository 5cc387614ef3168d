"""The diagnosis of a run: findings on its metrics as in `docs/reading-metrics.md`, each with the figure and the keys to
change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.report.answer.wording import percent
from pipelines.report.evidence import DRAWN, Curve, Curves, Group, Run, metric_curves
from storage import Store

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment

EXPLODED = 0.5
"""Value of `kl/reverse`, in nats per token, above which the policy no longer resembles its reference."""
JUMP = 10.0
"""Least ratio of `kl/reverse` to its median over the steps before that counts as an explosion, not as growth."""
COLLAPSED = 0.02
"""Value of `entropy`, in nats per token, below which a policy has stopped exploring."""
NO_SIGNAL = 0.99
"""A run has no learning signal if at least this share of all its groups have equal rewards."""
SIGNAL_LOST = 0.9
"""A step has almost no learning signal if at least this share of its groups have equal rewards."""
CUT_OFF = 0.5
"""The length limit is too small for the task if at least this share of a step's responses is cut off."""
APART = 0.01
"""Value of `kl/rollout`, in nats per token, above which the engine's policy differs from the learner's."""
STILL = 1e-3
"""A policy does not move if a step's updates change a token's probability by less than this share."""
LASTING = 5
"""Number of steps for which a finding must hold; in a shorter run, all steps. An exploding divergence is reported at
once."""
LONG = 10
"""Number of steps for findings that a few steps cannot prove: a lost signal, or a clip that does not act."""
MOSTLY = 0.8
"""Share of the steps, from the finding's first step to the last, in which it must hold."""
_WITHIN_GROUPS = ("group_mean", "leave_one_out")
"""Baselines with which the advantage is zero if a group's rewards are all equal."""
_CLIPPED = ("clip_fraction/low", "clip_fraction/high", "clip_fraction/dual")
DIAGNOSED = (*DRAWN, "kl/rollout", "rollout_ratio/max", "reward/std")
"""Metrics that a diagnosis reads: those that reports draw, and more."""
_NOTHING = "There was nothing to learn from"
_MORE_SIGNAL = (
    "Read some responses first: the reward itself may be wrong. If all fail: use easier problems, a warm_up, or a "
    "reward that gives partial credit. If all succeed: use harder problems. A larger training.group_size or "
    "rollout.temperature lets responses differ."
)
_FAILED = """
    WITH trained AS (
        SELECT avg(value) AS share FROM metrics
        WHERE list_contains($runs, run_id) AND name = 'reward/error_fraction'
    ),
    said AS (
        SELECT arg_max(message, step) AS why FROM events WHERE list_contains($runs, run_id) AND kind = 'reward_failed'
    ),
    evaluated AS (
        SELECT count(reward_error) AS failed, count(*) AS total, mode(reward_error) AS reason
        FROM evaluation_samples WHERE list_contains($runs, run_id)
    )
    FROM trained, said, evaluated
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run."""

    kind: str
    """A word for programs."""
    sentence: str
    """The problem, its figure, and the first step at which it holds."""
    remedy: str
    """The keys to change."""
    metric: str
    """The metric that shows it."""
    step: int | None
    """The first step at which it holds; None if it does not depend on a step."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One run's spec and metrics."""

    run: Run
    curves: Mapping[str, Curve]

    @property
    def spec(self) -> "Experiment":
        """The run's spec."""
        return self.run.spec

    @property
    def is_off_policy(self) -> bool:
        """Whether some updates are made at weights other than the sampling policy's."""
        return self.run.off_policy["updates"] > 1 or self.run.off_policy["max_staleness"] > 0

    @property
    def has_no_clip(self) -> bool:
        """Whether the objective clips nothing."""
        clip = getattr(self.spec.objective, "clip", None)  # rivals' clips have no type
        return getattr(clip, "type", "") == "none"

    @property
    def clip_fractions(self) -> list[Curve]:
        """Returns the shares of tokens that each side of the clip affected."""
        return [self.curves[name] for name in _CLIPPED if name in self.curves]

    @property
    def is_solved(self) -> bool:
        """Whether rewards became equal because the task is solved: they are as high as they ever were."""
        spread, reward = self.curves.get("reward/std"), self.curves.get("reward/mean")
        if spread is None or reward is None:
            return False
        alike = _at_the_end(spread) < spread[:, 1].max() / 4
        return alike and _at_the_end(reward) >= float(np.quantile(reward[:, 1], 0.9))


def diagnose(store: Store, run: Run) -> list[Finding]:
    """Returns the findings of one run, the most serious first; empty if the run trained nothing."""
    return findings_of(run, metric_curves(store, [run.run_id], DIAGNOSED), not_scored(store, [Group("", (run,))]))


def findings_of(run: Run, curves: Curves, failed: str = "") -> list[Finding]:
    """Returns the findings of one run.

    Args:
        curves: curves of `DIAGNOSED`.
        failed: failures of its reward, see `not_scored`.
    """
    if not run.trains:
        return []
    recorded = _Recorded(run, {name: by_run[run.run_id] for name, by_run in curves.items() if run.run_id in by_run})
    rules = (_diverged, _truncated, _without_a_signal, _collapsed, _disagree, _still, _clip_idle)
    found = [finding for rule in rules if (finding := rule(recorded))]
    kinds = {finding.kind for finding in found}
    if kinds & {"no_signal", "still"}:  # a policy that does not move never reaches a clip
        found = [finding for finding in found if finding.kind != "clip_idle"]
    if "no_signal" in kinds:  # and without a gradient it does not move
        found = [finding for finding in found if finding.kind != "still"]
    if failed:
        remedy = "`rpg logs` has the exception with its file and line. Fix it, or stop such runs with training.guards."
        found.insert(0, Finding("reward_failed", failed, remedy, "reward/error_fraction", None))
    return found


def findings_over(runs: Sequence[Run], curves: Curves, said: str) -> list[tuple[str, str]]:
    """Returns (sentence, remedy) for each kind of finding in the runs: the finding of the first run that has it, and
    the number of other runs with it.

    Args:
        said: the answer on the same page, which may already say it.
    """
    by_kind: dict[str, list[tuple[Run, Finding]]] = {}
    for run in runs:
        for finding in findings_of(run, curves):
            by_kind.setdefault(finding.kind, []).append((run, finding))
    told = []
    for (first, finding), *others in by_kind.values():
        if finding.kind != "no_signal" or _NOTHING not in said:
            whose = f"{first.name or first.run_id}: " if len(runs) > 1 else ""
            likewise = f" Likewise {len(others)} more of {len(runs)} runs." if others else ""
            told.append((f"{whose}{finding.sentence}{likewise}", finding.remedy))
    return told


def _diverged(of: _Recorded) -> Finding | None:
    """Returns the finding that the divergence from the reference has exploded."""
    curve = of.curves.get("kl/reverse")
    if curve is None or (start := _since(curve, lambda values: ~(values <= EXPLODED), 1)) is None:
        return None
    before = float(np.median(curve[max(0, start - LONG) : start, 1])) if start else 0.0
    step, value = curve[start]
    if value < JUMP * before:
        return None
    figure = f"{value:.2g} nats a token" if np.isfinite(value) else "no finite number"
    was = f", after {before:.2g}" if start else ""
    has_none = getattr(of.spec.objective, "divergence", "") == "none"  # rivals do not name theirs
    more = "give the objective a divergence" if has_none else "raise objective.kl_coef"
    return Finding(
        "diverged",
        f"The divergence exploded at step {step:.0f}: kl/reverse is {figure}{was}.",
        f"Lower training.optimizer.learning_rate, tighten objective.clip, or {more}.",
        "kl/reverse",
        int(step),
    )


def _without_a_signal(of: _Recorded) -> Finding | None:
    """Returns the finding that in almost all groups the responses have equal rewards."""
    curve, group = of.curves.get("zero_std_fraction"), Group(of.run.name, (of.run,))
    if curve is None or not _is_within_groups(group):
        return None
    if said := _silence([group], {name: {of.run.run_id: each} for name, each in of.curves.items()}):
        return Finding("no_signal", said, _MORE_SIGNAL, "zero_std_fraction", int(curve[0, 0]))
    start = _since(curve, lambda values: values >= SIGNAL_LOST, LONG)
    if start is None or of.is_solved:
        return None
    return Finding(
        "no_signal",
        f"There is next to nothing to learn from{_since_step(curve, start)}: in {percent(_at_the_end(curve))} of the "
        "groups all responses have the same reward.",
        "Take other problems in data.train, a larger training.group_size or rollout.temperature, or "
        "rollout.dynamic_sampling.",
        "zero_std_fraction",
        int(curve[start, 0]),
    )


def _truncated(of: _Recorded) -> Finding | None:
    """Returns the finding that most responses are cut off before they end."""
    curve = of.curves.get("truncated_fraction")
    if curve is None or (start := _since(curve, lambda values: values >= CUT_OFF, LASTING)) is None:
        return None
    longest = of.spec.rollout.max_response_length
    limit = f" at {longest} {'token' if longest == 1 else 'tokens'}"
    return Finding(
        "truncated",
        f"{percent(_at_the_end(curve))} of the responses are cut off{limit}{_since_step(curve, start)}, before their "
        "answers are given.",
        "Raise rollout.max_response_length, reduce the reward of long responses by reward.overlong, or exclude those "
        "that are cut off by training.mask_truncated.",
        "truncated_fraction",
        int(curve[start, 0]),
    )


def _collapsed(of: _Recorded) -> Finding | None:
    """Returns the finding that the policy has stopped exploring before the task is solved."""
    curve = of.curves.get("entropy")
    if curve is None or (start := _since(curve, lambda values: values < COLLAPSED, LASTING)) is None or of.is_solved:
        return None
    began, value = f"{curve[0, 1]:.2g} at step {curve[0, 0]:.0f}", f"{_at_the_end(curve):.2g} nats a token"
    collapsed = f"The entropy collapsed at step {curve[start, 0]:.0f}: it is {value}, after {began}"
    return Finding(
        "entropy_collapsed",
        f"{collapsed if start else f'The entropy is near 0 from the first step on: {value}'}. Nothing is explored.",
        "Raise objective.clip.high or objective.kl_coef, set training.entropy_coef, or lower "
        "training.optimizer.learning_rate.",
        "entropy",
        int(curve[start, 0]),
    )


def _disagree(of: _Recorded) -> Finding | None:
    """Returns the finding that the engine samples from another policy than the learner assumes."""
    curve, ratios = of.curves.get("kl/rollout"), of.curves.get("rollout_ratio/max")
    if curve is None or (start := _since(curve, lambda values: values > APART, LASTING)) is None:
        return None
    largest = f", and a token's ratio reaches {ratios[start:, 1].max():.3g}" if ratios is not None else ""
    return Finding(
        "sampler_disagrees",
        f"Sampler and learner disagree{_since_step(curve, start)}: kl/rollout is {_at_the_end(curve):.2g} nats a token"
        f"{largest}.",
        "Set rollout.correction (truncate or mask), or use the same arithmetic in both: training.precision float32.",
        "kl/rollout",
        int(curve[start, 0]),
    )


def _still(of: _Recorded) -> Finding | None:
    """Returns the finding that the updates of a step hardly change the policy."""
    curve, spread = of.curves.get("ratio/max"), of.curves.get("reward/std")
    if curve is None or not of.is_off_policy or len(curve) < LASTING or not (curve[:, 1] < 1 + STILL).all():
        return None
    if spread is not None and _at_the_end(spread) == 0:  # equal rewards of all responses: there is no gradient
        return None
    if any(curve[:, 1].any() for curve in of.clip_fractions):  # ratios of whole responses are small
        return None
    return Finding(
        "still",
        f"The policy hardly moves: in {len(curve)} steps no update made a token more than {curve[:, 1].max() - 1:.2g} "
        "likelier, as a share of its probability.",
        "Raise training.optimizer.learning_rate.",
        "ratio/max",
        int(curve[0, 0]),
    )


def _clip_idle(of: _Recorded) -> Finding | None:
    """Returns the finding that the clip affects no token, although some updates are made at weights other than the
    sampling policy's.
    """
    fractions = of.clip_fractions
    if not fractions or not of.is_off_policy or of.has_no_clip:
        return None
    steps = len(fractions[0])
    if steps < LONG or any(curve[:, 1].any() for curve in fractions):
        return None
    ratios = of.curves.get("ratio/max")
    largest = f": no ratio is above {ratios[:, 1].max():.4g}" if ratios is not None else ""
    return Finding(
        "clip_idle",
        f"The clip never acted in {steps} steps{largest}. Without it training would have been the same.",
        "A step may give more: raise training.optimizer.learning_rate, training.minibatches or training.epochs; or "
        "narrow objective.clip.low and objective.clip.high.",
        "clip_fraction/high",
        int(fractions[0][0, 0]),
    )


def _since(curve: Curve, holds: Callable[[NDArray[np.float64]], NDArray[np.bool_]], least: int) -> int | None:
    """Returns the first step from which on a condition holds in a share `MOSTLY` of the steps. None if it holds for
    fewer than `least` steps, or in a shorter run for fewer than all of them.

    >>> _since(np.array([[1, 0.0], [2, 0.9], [3, 0.1], [4, 0.9], [5, 0.8]]), lambda values: values > 0.5, 2)
    3
    """
    held = holds(curve[:, 1])
    for start in np.flatnonzero(held):
        if held[start:].mean() >= MOSTLY:
            return int(start) if len(held) - start >= min(least, len(held)) else None
    return None


def _since_step(curve: Curve, start: int) -> str:
    return f" since step {curve[start, 0]:.0f}" if start else ""


def _at_the_end(curve: Curve) -> float:
    return float(np.median(curve[-LASTING:, 1]))


def without_signal(groups: Sequence[Group], curves: Curves) -> list[Group]:
    """Returns the groups without a learning signal: throughout training, nearly every prompt's responses had equal
    rewards."""
    within = [group for group in groups if _is_within_groups(group)]
    return [group for group in within if _of_group(group, curves, "zero_std_fraction") >= NO_SIGNAL]


def not_scored(store: Store, groups: Sequence[Group]) -> str:
    """Describes the responses on which the reward failed, in training and evaluations: their number and the reason.
    Empty without failures."""
    runs = {"runs": [run.run_id for group in groups for run in group.runs]}
    ((share, why, count, total, reason),) = store.query(_FAILED, runs).rows
    said = []
    if share:
        last = f"; the last: {why}" if why else ""
        said.append(
            f"The reward failed on {percent(share)} of the training responses, which count with the least score{last}."
        )
    if count:
        said.append(
            f"The reward failed on {count} of {total} evaluated responses, which count with the least score: {reason}."
        )
    return " ".join(said)


def nothing_to_learn(groups: Sequence[Group], curves: Curves) -> str:
    """Returns a sentence that names the groups without a learning signal, and the remedy; empty if all groups had
    one."""
    said = _silence(groups, curves)
    return f"{said} {_MORE_SIGNAL}" if said else ""


def _silence(groups: Sequence[Group], curves: Curves) -> str:
    silent = without_signal(groups, curves)
    if not silent:
        return ""
    share = min(_of_group(group, curves, "zero_std_fraction") for group in silent)
    rewards = [_of_group(group, curves, "reward/mean") for group in silent]
    low, high = min(rewards), max(rewards)
    reward = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    where = "" if len(silent) == len(groups) else f" in {', '.join(group.named for group in silent)}"
    return (
        f"{_NOTHING}{where}: in {percent(share)} of the groups all responses had the same reward "
        f"(mean {reward}), so none was better than another."
    )


def _is_within_groups(group: Group) -> bool:
    """Returns whether the runs learn only from differences between a group's responses."""
    spec = group.runs[0].spec
    return spec.reward.type != "none" and spec.advantage.baseline in _WITHIN_GROUPS  # none: only a divergence


def _of_group(group: Group, curves: Curves, metric: str) -> float:
    """Returns the mean of a metric over all steps of all runs of a group; NaN if no run has the metric."""
    by_run = curves.get(metric, {})
    values = [by_run[run_id][:, 1] for run_id in group.run_ids if run_id in by_run]
    return float(np.concatenate(values).mean()) if values else float("nan")
