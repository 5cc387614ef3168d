"""Guards in a spec: errors, and warnings of guards that can never act."""

import pytest
from spec_text import changed, message, warnings

from specs.loader import load_experiment


def guarded(guard: str) -> str:
    return changed("steps: 4", f"steps: 4\n  guards: [{guard}]")


def test_a_guard_reads_as_written(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(guarded("{metric: kl/reverse, above: 0.1, action: roll_back}, {metric: not_finite}"))
    first, second = load_experiment(path).training.guards
    assert (first.above, first.for_steps, first.learning_rate_factor, first.at_most) == (0.1, 1, 0.5, 2)
    assert (second.metric, second.action) == ("not_finite", "stop")


def test_an_unknown_metric_gets_the_list():
    text = message(guarded("{metric: kl/revers, above: 1}"))
    assert "training.guards.0.metric" in text
    assert "zero_std_fraction" in text
    assert "did you mean `kl/reverse`?" in text


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("{metric: entropy}", "a guard needs a bound: above, below or both"),
        ("{metric: not_finite, above: 1}", "not_finite has no bounds"),
        ("{metric: not_finite, action: warn}", "stop or roll_back"),
    ],
)
def test_a_guard_that_cannot_be_is_refused(guard: str, expected: str):
    assert expected in message(guarded(guard))


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("{metric: kl/reverse, below: 0}", "given: kl/reverse below 0: it is never negative"),
        ("{metric: truncated_fraction, above: 1}", "given: truncated_fraction above 1: it is at most 1"),
        ("{metric: response_length/mean, above: 32}", "rollout.max_response_length is 32"),
        ("{metric: entropy, below: 0.1, for_steps: 5}", "given: 5 violating steps in a run of 4"),
        ("{metric: entropy, below: 0.1, at_most: 3}", "at_most has no effect"),
        ("{metric: entropy, below: 0.1, action: roll_back}", "the guard has nothing to roll back to"),
    ],
)
def test_a_guard_that_never_acts_is_warned_of(guard: str, expected: str):
    assert expected in warnings(guarded(guard))


def test_a_clip_guard_on_policy_is_warned_of_and_good_guards_are_not():
    text = guarded("{metric: clip_fraction/high, above: 0.2}")
    assert warnings(text) == "0 warnings"
    assert "the guard can never fire" in warnings(text.replace("minibatches: 2", "minibatches: 1"))
