"""Figures of a step: the same however the tokens are cut into passes."""

import numpy as np
import pytest
import torch

from rpg.batches.batch import Microbatch, Rows, microbatch
from rpg.metrics import UpdateMetrics, rollout_metrics
from tests.rpg.test_batch import example

NAMES = ("kl_reverse", "kl_forward", "kl_behaviour", "ratio", "weight", "entropy", "rollout_ratio", "kl_rollout")
SIDES = ("clipped_low", "clipped_high", "clipped_dual", "corrected")


def seen(batch: Microbatch) -> dict[str, torch.Tensor]:
    """Made-up figures that follow from where a token stands."""
    place = batch.tokens.float()
    values = {name: place * (number + 1) for number, name in enumerate(NAMES)}
    return values | {name: batch.tokens % 3 == number for number, name in enumerate(SIDES)}


def reduced(*passes: Rows) -> dict[str, float]:
    metrics = UpdateMetrics()
    for rows in passes:
        batch = microbatch(example(), rows, torch.device("cpu"))
        metrics.add(batch, seen(batch), torch.tensor(0.5 * batch.counts))
    metrics.update_done(2.0)
    metrics.update_done(4.0)
    return metrics.reduce()


def test_figures_by_hand() -> None:
    # Tokens 0 to 6: ratios 4 * token, weights 5 * token; of seven tokens 3, 2, 2 have remainder 0, 1, 2.
    figures = reduced(Rows((0, 1, 2, 3)))
    tokens = np.arange(7)
    assert figures["ratio/mean"] == 12
    assert figures["ratio/max"] == 24
    assert figures["rollout_ratio/max"] == 42
    assert figures["ratio/ess"] == pytest.approx(tokens.sum() ** 2 / (7 * (tokens**2).sum()))
    assert figures["weight/variance"] == pytest.approx((5 * tokens).var())
    assert figures["clip_fraction/low"] == pytest.approx(3 / 7)
    assert figures["clip_fraction/dual"] == pytest.approx(2 / 7)
    assert figures["grad_norm"] == 3
    assert figures["loss"] == 0.25  # one pass of 0.5 over two updates


def test_a_figure_of_the_rank_joins_those_of_which_the_largest_counts() -> None:
    metrics = UpdateMetrics()
    batch = microbatch(example(), Rows((0, 1, 2, 3)), torch.device("cpu"))
    metrics.add(batch, seen(batch), torch.tensor(0.5))
    metrics.update_done(2.0)
    figures = metrics.reduce({"sentinel/difference": 0.125})
    assert figures.pop("sentinel/difference") == 0.125
    assert figures == metrics.reduce()


def test_passes_that_do_not_count_and_the_cut_change_no_figure() -> None:
    whole = reduced(Rows((0, 1, 2, 3)))
    cut = reduced(Rows((3,)), Rows((0, 2)), Rows((1,)), Rows((1,), counts=False))
    del whole["loss"], cut["loss"]
    assert whole == pytest.approx(cut)


def test_what_the_responses_say() -> None:
    # Rewards 0, 1 | 2, 3; lengths 3, 1 | 2, 1; one of four responses was cut.
    figures = rollout_metrics(example())
    assert figures["reward/mean"] == 1.5
    assert figures["reward/std"] == pytest.approx(np.std([0, 1, 2, 3], ddof=1))
    assert figures["zero_std_fraction"] == 0
    assert figures["response_length/mean"] == 1.75
    assert figures["response_length/max"] == 3
    assert figures["truncated_fraction"] == 0.25
