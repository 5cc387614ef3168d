"""What `notify` and `launcher.pool` may say, and that neither changes a run."""

import pytest
from spec_text import GOOD, message, write

from pipelines.planning.fingerprint import train_identity
from specs.loader import load_experiment


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_pool_and_notices_leave_the_fingerprint_alone():
    plain = load_experiment(write(GOOD))
    told = load_experiment(
        write(
            GOOD
            + "launcher: {type: local, pool: night}\n"
            + "notify:\n"
            + "  - {type: webhook, url: env:HOOK, on: [completion]}\n"
            + "  - {type: email, server: file:/run/secrets/mail, sender: rpg@lab.org, to: [a@lab.org, b@lab.org]}\n"
        )
    )
    assert train_identity(told) == train_identity(plain)
    assert [notice.on for notice in told.notify] == [("completion",), ("failure", "guard")]


def test_an_address_in_the_spec_is_refused_and_not_repeated():
    told = message(GOOD + 'notify:\n  - {type: slack, url: "https://hooks.slack.com/services/T0/B0/x"}\n')
    assert told == (
        "spec.yaml:25: notify.0.url: give a reference to the secret, not the secret itself\n"
        "    25 | (hidden)\n"
        "  given: (hidden)    allowed: env:NAME or file:/PATH, which is read when it is used\n"
        "  hint: a spec is stored and shared; keep it in a variable or a file\n"
        "1 error; nothing was run"
    )


@pytest.mark.parametrize(
    ("notice", "told"),
    [
        ("{type: pager, url: env:X}", "notify.0.type: unknown type"),
        ("{type: slack, url: env:X, on: [fail]}", "notify.0.on.0: not one of the values allowed"),
        ("{type: slack, url: env:X, on: []}", "notify.0.on: must have at least 1 item"),
        ("{type: email, server: env:X, sender: me, to: [a@b.org]}", "notify.0.sender: has the wrong form"),
    ],
)
def test_a_notice_that_cannot_be_is_told_at_its_line(notice, told):
    assert message(GOOD + f"notify:\n  - {notice}\n").startswith(f"spec.yaml:25: {told}")


def test_a_pools_name_can_be_part_of_an_address():
    assert "launcher.pool: has the wrong form" in message(GOOD + "launcher: {type: local, pool: a/b}\n")
