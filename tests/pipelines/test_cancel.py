"""How a request to stop reaches the work."""

import os
import signal

import pytest

from pipelines.home import Home
from pipelines.processes.stop import Stop, clear_request, request_cancel


def test_a_request_is_for_one_run_and_carries_its_grace(tmp_path):
    home, stop = Home(tmp_path), Stop()
    request_cancel(home, "run-1", 0.5)
    request = stop.requested(home.run("run-1"))
    assert request is not None
    assert (request.reason, request.grace, request.whole_command) == ("cancelled", 0.5, False)
    assert stop.requested(home.run("run-2")) is None
    clear_request(home, "run-1")
    assert stop.requested(home.run("run-1")) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_stops_the_whole_command(tmp_path, number):
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), number)
        request = stop.requested(tmp_path)
    assert request is not None
    assert request.whole_command
    assert request.reason == f"interrupted by {number.name}"


def test_a_second_signal_interrupts_at_once():
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_before_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
