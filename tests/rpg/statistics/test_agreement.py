"""A judge's agreement with labels, worked out by hand."""

import math

import numpy as np
import pytest

from rpg.statistics.agreement import Agreement, Judgements, agreement_of, cohens_kappa
from rpg.statistics.factors import student


def measured(judged: list[float], labels: list[float], **fields: list[float]) -> Agreement:
    count = len(judged)
    return agreement_of(
        Judgements(
            judged=np.array(judged),
            labels=np.array(labels),
            length=np.array(fields.get("length", [0.0] * count)),
            own=np.array(fields.get("own", [0.0] * count), dtype=bool),
            clusters=[str(place) for place in fields.get("clusters", list(range(count)))],
        )
    )


def test_kappa_of_a_table_of_two_by_two_is_that_of_a_calculation_by_hand() -> None:
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: they agree on 35 of 50; by chance on 25/50 * 30/50 + 25/50 * 20/50.
    judged = [1.0] * 25 + [0.0] * 25
    labels = [1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15
    found = measured(judged, labels)
    assert found.agreement.value == pytest.approx(0.7)
    assert found.kappa.value == pytest.approx((0.7 - 0.5) / (1 - 0.5))
    # Of two numbers the squares are 0 or 1, so that the weights change nothing.
    assert found.weighted_kappa.value == pytest.approx(0.4)
    # 5 too high, 10 too low.
    assert found.leniency.value == pytest.approx((5 - 10) / 50)
    # The jackknife by hand: without one of each of the four kinds, as often as there are of it.
    cells = {(1, 1): 20, (1, 0): 5, (0, 1): 10, (0, 0): 15}
    without = []
    for left_out, times in cells.items():
        left = {cell: number - (cell == left_out) for cell, number in cells.items()}
        agreed = (left[1, 1] + left[0, 0]) / 49
        first, second = (left[1, 1] + left[1, 0]) / 49, (left[1, 1] + left[0, 1]) / 49
        by_chance = first * second + (1 - first) * (1 - second)
        without += [(agreed - by_chance) / (1 - by_chance)] * times
    error = math.sqrt(49 / 50 * sum((each - sum(without) / 50) ** 2 for each in without))
    half = student(49, 0.95) * error
    assert (found.kappa.low, found.kappa.high) == pytest.approx((0.4 - half, 0.4 + half))
    # Fleiss, Cohen and Everitt's formula for large samples gives 0.127 here.
    assert error == pytest.approx(0.127, abs=0.005)


def test_biases_are_told_in_points_of_the_scale() -> None:
    # Half a point more for each doubling of the length, and a point more for its own.
    labels = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
    length = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
    judged = [label + 0.5 * doubling for label, doubling in zip(labels, length, strict=True)]
    assert measured(judged, labels, length=length).length.value == pytest.approx(0.5)
    own = [0.0] * 4 + [1.0] * 4
    judged = [label + mine for label, mine in zip(labels, own, strict=True)]
    found = measured(judged, labels, length=length, own=own)
    assert (found.own.value, found.own.low) == pytest.approx((1.0, 1.0))
    assert found.length.value == pytest.approx(0.0)
    assert math.isnan(measured(judged, labels).own.value)
    assert math.isnan(measured(judged, labels).length.value)


def test_answers_to_one_problem_count_as_one_and_perfect_agreement_is_not_taken_for_certain() -> None:
    judged, labels = [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    alone = measured(judged, labels)
    copied = measured(judged * 10, labels * 10, clusters=[0, 1, 2, 3] * 10)
    assert copied.kappa == alone.kappa
    perfect = measured([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert perfect.kappa.value == 1.0
    assert perfect.kappa.low < 0.6
    with pytest.raises(ValueError, match="two problems"):
        measured(judged, labels, clusters=[0, 0, 0, 0])


def test_two_who_only_ever_say_one_number_have_no_kappa() -> None:
    assert math.isnan(cohens_kappa(np.ones(3), np.ones(3)))
