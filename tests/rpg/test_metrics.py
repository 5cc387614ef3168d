"""Metrics of a step: the same however the tokens are cut into passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rpg.batches.batch import Microbatch, microbatch
from rpg.batches.packing_plan import IDLE, Rows
from rpg.metrics import UpdateMetrics, rollout_metrics
from rpg.rewards import Score
from rpg.types import Problem
from tests.rpg.batches.test_batch import example

NAMES = ("kl_reverse", "kl_forward", "kl_behaviour", "ratio", "weight", "entropy", "rollout_ratio", "kl_rollout")
SIDES = ("clipped_low", "clipped_high", "clipped_dual", "corrected")


def per_token(batch: Microbatch) -> dict[str, torch.Tensor]:
    """Made-up values that follow from a token's place in the step."""
    place = batch.tokens.float()
    values = {name: place * (number + 1) for number, name in enumerate(NAMES)}
    return values | {name: batch.tokens % 3 == number for number, name in enumerate(SIDES)}


def reduced(*passes: Rows) -> dict[str, float]:
    metrics = UpdateMetrics()
    for rows in passes:
        batch = microbatch(example(), rows, torch.device("cpu"))
        metrics.add(batch, per_token(batch), torch.tensor(0.5 * batch.counts))
    metrics.update_done(2.0)
    metrics.update_done(4.0)
    return metrics.reduce()


def test_metrics_worked_out_by_hand() -> None:
    # Tokens 0 to 6: ratios 4 * token, weights 5 * token; of seven tokens 3, 2, 2 have remainder 0, 1, 2.
    values = reduced(Rows((0, 1, 2, 3)))
    tokens = np.arange(7)
    assert values["ratio/mean"] == 12
    assert values["ratio/max"] == 24
    assert values["rollout_ratio/max"] == 42
    assert values["ratio/ess"] == pytest.approx(tokens.sum() ** 2 / (7 * (tokens**2).sum()))
    assert values["weight/variance"] == pytest.approx((5 * tokens).var())
    assert values["clip_fraction/low"] == pytest.approx(3 / 7)
    assert values["clip_fraction/dual"] == pytest.approx(2 / 7)
    assert values["grad_norm"] == 3
    assert values["loss"] == 0.25  # one pass of 0.5 over two updates


def test_a_further_metric_of_each_rank_is_reduced_to_the_largest() -> None:
    metrics = UpdateMetrics()
    batch = microbatch(example(), Rows((0, 1, 2, 3)), torch.device("cpu"))
    metrics.add(batch, per_token(batch), torch.tensor(0.5))
    metrics.update_done(2.0)
    values = metrics.reduce({"sentinel/difference": 0.125})
    assert values.pop("sentinel/difference") == 0.125
    assert values == metrics.reduce()


def test_passes_that_do_not_count_and_the_cut_change_no_metric() -> None:
    whole = reduced(Rows((0, 1, 2, 3)))
    cut = reduced(Rows((3,)), Rows((0, 2)), Rows((1,)), IDLE)
    del whole["loss"], cut["loss"]
    assert whole == pytest.approx(cut)


def test_the_rewards_and_terms_of_each_training_set_have_means_of_their_own() -> None:
    # Rewards 0, 1 of the first group | 2, 3 of the second.
    problems = [Problem("p", "?", "1", name) for name in ("sums", "unused", "code")]
    scores = [*example().scores[:2], *(Score(4.0, True, terms={"tests": each, "short": 1.0}) for each in (1.0, 0.0))]
    step = replace(example(), problems=(0, 2), scores=tuple(scores))
    values = rollout_metrics(step, problems=problems)
    named = {name: value for name, value in values.items() if name.count("/") > 1 or name == "reward/mean"}
    assert named == {
        "reward/mean": 2.25,
        "reward/mean/sums": 0.5,
        "reward/mean/code": 4.0,
        "reward/tests/mean": 0.5,
        "reward/short/mean": 1.0,
        "reward/tests/mean/code": 0.5,
        "reward/short/mean/code": 1.0,
    }
    alike = [replace(problem, dataset="sums") for problem in problems]
    assert "reward/mean/sums" not in rollout_metrics(step, problems=alike)


def test_groups_without_a_signal_are_those_of_equal_trained_rewards() -> None:
    assert rollout_metrics(example(), np.array([0.5, 0.5, 2.0, 3.0]))["zero_std_fraction"] == 0.5


def test_metrics_of_the_responses_before_training() -> None:
    # Rewards 0, 1 | 2, 3; lengths 3, 1 | 2, 1; one of four responses was cut.
    values = rollout_metrics(example())
    assert values["reward/mean"] == 1.5
    assert values["reward/std"] == pytest.approx(np.std([0, 1, 2, 3], ddof=1))
    assert values["zero_std_fraction"] == 0
    assert values["response_length/mean"] == 1.75
    assert values["response_length/max"] == 3
    assert values["truncated_fraction"] == 0.25
