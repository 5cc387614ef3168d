"""Allowed settings of the recorded rows."""

import pytest
from spec_text import GOOD, message, warnings, write

from specs import load_experiment


def with_record(fields: str) -> str:
    return f"{GOOD}record: {{{fields}}}\n"


def test_all_rows_are_recorded_and_kept_where_nothing_else_is_said() -> None:
    record = load_experiment(write(GOOD)).record
    assert (record.rollouts, record.tokens, record.share, record.keep_days) == ("all", "all", 1.0, 0)
    assert load_experiment(write(with_record("tokens: sampled, sampled_share: 0.25"))).record.share == 0.25
    assert load_experiment(write(with_record("tokens: none"))).record.share == 0


def test_tokens_without_their_responses_are_refused() -> None:
    assert message(with_record("rollouts: none")) == (
        "spec.yaml:24: record.tokens: token rows would contain the responses that record.rollouts leaves out\n"
        "    24 | record: {rollouts: none}\n"
        "  given: all with `rollouts: none`    allowed: none\n"
        "  hint: write `tokens: none` too, or leave `rollouts` out\n"
        "1 error; nothing was run"
    )
    assert warnings(with_record("rollouts: none, tokens: none")) == "0 warnings"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("tokens: some", "record.tokens: not one of the values allowed\n"),
        ("tokens: sampled, sampled_share: 1", "record.sampled_share: must be less than 1\n"),
        ("tokens: sampled, sampled_share: 0", "record.sampled_share: must be greater than 0\n"),
        ("keep_days: -1", "record.keep_days: must be at least 0\n"),
        ("keep: 30", "record.keep: unknown field\n"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: str, expected: str) -> None:
    assert f"spec.yaml:24: {expected}" in message(with_record(fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("sampled_share: 0.5", "record.sampled_share: sampled_share has no effect\n"),
        ("tokens: none, keep_days: 30", "record.keep_days: keep_days has no effect\n"),
    ],
)
def test_what_cannot_act_is_named(fields: str, expected: str) -> None:
    named = warnings(with_record(fields))
    assert f": {expected}" in named
    assert named.endswith("\n1 warning")
