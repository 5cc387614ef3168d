"""What tests of several packages begin with."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """SIGINT and SIGHUP end what a test starts, also where `nohup` or a script's `&` has them ignored for the tests.

    A program begins with a handler's signal as by default, and with an ignored one ignored. This process goes on
    without them: its own handler does nothing.
    """
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny base model and its data: see tests/rpg/tiny_run.py."""
    from tests.rpg.tiny_run import make_inputs

    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    return directory
