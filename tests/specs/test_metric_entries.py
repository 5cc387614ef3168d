"""The entries of the metrics, and what follows from them in a spec."""

import doctest

import pytest
from spec_text import changed, message, warnings

from specs import metrics
from specs.json_schema import json_schema
from specs.metrics import BY_NAME, METRICS

GUARDABLE = [metric.name for metric in METRICS if metric.guardable]


def test_examples_hold():
    assert doctest.testmod(metrics).failed == 0


def test_every_metric_is_described_once():
    assert len(BY_NAME) == len(METRICS)


def test_what_a_guard_can_watch_is_recorded_at_every_step_of_every_run_and_again_in_a_repeated_one():
    assert all(BY_NAME[name].repeatable and not BY_NAME[name].recorded_with for name in GUARDABLE)


def test_the_json_schema_lists_what_can_be_guarded_and_what_the_best_is_chosen_by():
    definitions = json_schema("experiment")["$defs"]
    assert definitions["Guard"]["properties"]["metric"]["enum"] == ["not_finite", *GUARDABLE]
    assert definitions["KeepBest"]["properties"]["metric"]["enum"] == GUARDABLE


def test_a_time_is_refused_as_the_measure_of_the_best_checkpoint():
    said = message(changed("steps: 4", "steps: 4\n  checkpoint: {keep_best: {metric: time/step}}"))
    assert "training.checkpoint.keep_best.metric: " in said
    assert "allowed: " + ", ".join(GUARDABLE) in said


@pytest.mark.more
@pytest.mark.parametrize("name", GUARDABLE)
def test_a_guard_at_a_bound_that_no_value_passes_is_warned_of(name: str):
    metric = BY_NAME[name]
    for side, bound in (("below", metric.least), ("above", metric.most)):
        told = warnings(
            changed("steps: 4", f"steps: 4\n  guards: [{{metric: {name}, {side}: {min(max(bound, -9), 9)}}}]")
        )
        assert ("the guard can never fire" in told) == (abs(bound) < 9), (side, bound)
