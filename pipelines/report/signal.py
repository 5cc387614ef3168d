"""The whole answer: the headline, and that there was nothing to learn from or that runs are missing, where it is so."""

from collections.abc import Sequence

import numpy as np

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.versions import is_experiment, runs_of
from pipelines.planning.calibration import trust_in
from pipelines.report.answer import Answer, headline, percent
from pipelines.report.evidence import Curves, Group
from storage import Store

NO_SIGNAL = 0.99
"""Share of all groups whose rewards are all equal, from which a run counts as one that had nothing to learn from."""
_WITHIN_GROUPS = ("group_mean", "leave_one_out")
"""Baselines of an advantage that is zero where a group's rewards are all equal."""


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


def whole_answer(
    home: Home, name: str, groups: Sequence[Group], found: Sequence[Answer], curves: Curves, failed: str = ""
) -> str:
    """The answer in a few sentences.

    Args:
        name: what was asked about: an experiment, whose missing runs are told, or a run.
        curves: of `zero_std_fraction` and `reward/mean`.
        failed: how often the reward failed, see `not_scored`.
    """
    silent = _without_signal(groups, curves)
    told = len(groups) == 1 or any(answer.claims for answer in found) or len(silent) < len(groups)
    trust = trust_in(home, (group.runs[0].spec for group in groups))
    headlined = headline(found) if told else ""
    sentences = [nothing_to_learn(groups, curves), headlined, trust, failed, incomplete(home, name)]
    return " ".join(sentence for sentence in sentences if sentence)


def _without_signal(groups: Sequence[Group], curves: Curves) -> list[Group]:
    """The groups in whose runs nearly every prompt's responses all had the same reward, throughout training."""
    within = [group for group in groups if _is_within_groups(group)]
    return [group for group in within if _of_group(group, curves, "zero_std_fraction") >= NO_SIGNAL]


def not_scored(store: Store, groups: Sequence[Group]) -> str:
    """How many responses the reward failed on, and why, in training and in evaluations; empty where on none."""
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


def incomplete(home: Home, name: str) -> str:
    """`3 of 4 runs; incomplete.`, where runs of an experiment have not finished; else empty."""
    run_ids = runs_of(home, name) if is_experiment(home, name) else []
    finished = sum(status_of(home, run_id) == "finished" for run_id in run_ids)
    return f"{finished} of {len(run_ids)} runs; incomplete." if finished < len(run_ids) else ""


def nothing_to_learn(groups: Sequence[Group], curves: Curves) -> str:
    """That some groups had nothing to learn from, and what to change; empty where all had something."""
    silent = _without_signal(groups, curves)
    if not silent:
        return ""
    share = min(_of_group(group, curves, "zero_std_fraction") for group in silent)
    rewards = [_of_group(group, curves, "reward/mean") for group in silent]
    low, high = min(rewards), max(rewards)
    reward = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    where = "" if len(silent) == len(groups) else f" in {', '.join(group.label for group in silent)}"
    return (
        f"There was nothing to learn from{where}: in {percent(share)} of the groups all responses had the same reward "
        f"(mean {reward}), so none was better than another. Where all fail: take easier problems, a warm_up, or a "
        "reward that marks part of an answer. Where all succeed: take harder problems. A larger training.group_size or "
        "rollout.temperature lets responses differ."
    )


def _is_within_groups(group: Group) -> bool:
    advantage = group.runs[0].spec.get("advantage") or {}
    return advantage.get("baseline", "group_mean") in _WITHIN_GROUPS


def _of_group(group: Group, curves: Curves, metric: str) -> float:
    """The mean over all steps of all its runs; NaN where none has the metric."""
    by_run = curves.get(metric, {})
    values = [by_run[run_id][:, 1] for run_id in group.run_ids if run_id in by_run]
    return float(np.concatenate(values).mean()) if values else float("nan")
