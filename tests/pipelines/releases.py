"""Releases for tests: the code as it stands, with the results numbers that a test wants."""

from dataclasses import replace

import pytest

from pipelines.planning.code import Code, Release, release


def as_released(**results: int) -> Release:
    """The code as it stands, as a release with these results numbers in place of today's."""
    code, known = Code(), release()
    digests = {name: code.digest(name) for name in known.code}
    return replace(known, results=known.results | results, code=digests)


def let_release_be(monkeypatch: pytest.MonkeyPatch, one: Release) -> None:
    """Has plans take this for the release that the code is of, or was edited from."""
    for module in ("code", "fingerprint", "plan", "reasons"):
        monkeypatch.setattr(f"pipelines.planning.{module}.release", lambda: one)
