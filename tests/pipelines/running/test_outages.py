"""The Prefect server is unreachable while a run trains: training continues, and the dashboard catches up."""

import os
import signal

import pytest
from live import Lab, finished
from waiting import wait_for

from specs.machine.files import read_json

LONG = ("training.steps=12", "seeds=[0,1]")


def embedded_server(lab: Lab) -> int:
    """The process id of the server that `rpg run` has started."""
    (record,) = lab.home.prefect.glob("embedded-*.json")
    return int(read_json(record)["pid"])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_goes_on_when_its_server_is_gone(lab: Lab, number: signal.Signals) -> None:
    run = lab.start("run", str(lab.spec), overrides=LONG)
    wait_for(lambda: any(lab.progress(run_id) >= 2 for run_id in lab.run_ids()), what="step 2")
    os.kill(embedded_server(lab), number)
    result = finished(run)
    assert result.code == 0, result.err
    assert [lab.state(run_id)["status"] for run_id in lab.run_ids()] == ["finished", "finished"]
    assert result.err.count("not shown on the dashboard") == 1
    assert lab.processes() == []
