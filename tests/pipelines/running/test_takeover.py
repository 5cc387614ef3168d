"""A run whose flow and trainer no longer execute is taken over, and a returning process does not change it."""

import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import ELSEWHERE, SPEC, Lab, finished
from waiting import wait_for

from specs.machine.fence import lease_file
from specs.machine.files import read_json, write_json
from specs.machine.liveness import newest_lease

STEPS = 14
OVERRIDES = (f"training.steps={STEPS}", "training.checkpoint.every_steps=4")
REPRODUCIBLE = """
    select step, name, value from metrics
    where not starts_with(name, 'time/') and not starts_with(name, 'tokens_per_second/')
    and not starts_with(name, 'memory/') order by all
"""


@pytest.fixture
def undisturbed(lab: Lab, tmp_path: Path) -> list[Any]:
    """Returns the metrics of the same run in a home without interruptions."""
    other = Lab(tmp_path / "undisturbed", lab.spec)
    other.spec.write_text(SPEC)
    (tmp_path / "undisturbed").mkdir()
    for shared in ("artifacts", "prefect"):
        subprocess.run(["cp", "-r", lab.root / shared, other.root / shared], check=True)
    try:
        result = other.rpg("run", str(other.spec), overrides=OVERRIDES)
    finally:
        other.clean_up()
    assert result.code == 0, result.err
    return other.query(REPRODUCIBLE)


def stopped_while_it_trains(lab: Lab) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """A run's flow, and the processes that it started; all stopped, as by a debugger or a hypervisor, for a long time.

    Its heartbeat is set back instead of waited for.
    """
    flow = lab.start("run", str(lab.spec), overrides=OVERRIDES)
    wait_for(lambda: lab.training_pid() or flow.poll() is not None, what="the trainer")
    (run_id,) = lab.run_ids()
    wait_for(lambda: lab.progress(run_id) >= 5 or flow.poll() is not None, what="steps")
    # The flow first: it would take a trainer that does not answer for one that works.
    processes = [psutil.Process(flow.pid), *psutil.Process(lab.training_pid()).children(recursive=True)]
    processes.insert(1, psutil.Process(lab.training_pid()))
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    lease = lease_file(lab.home.run(run_id), 1)
    long_ago = datetime.now(UTC) - timedelta(minutes=1)
    write_json(lease, read_json(lease) | {"at": long_ago.isoformat()})
    return flow, processes


def wake(processes: list[psutil.Process]) -> None:
    for process in reversed(processes):
        process.send_signal(signal.SIGCONT)


def assert_as_undisturbed(lab: Lab, undisturbed: list[Any]) -> None:
    """Finished, every row there once, the metrics equal to those of the run that nothing happened to."""
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["status"] == "finished"
    assert lab.query(REPRODUCIBLE) == undisturbed
    assert lab.query("select count(*), count(distinct (step, rollout_id)) from rollouts") == [(STEPS * 16, STEPS * 16)]


@pytest.mark.long
def test_a_run_of_a_stopped_host_is_taken_over_by_another_and_what_wakes_up_changes_nothing(
    lab: Lab, undisturbed: list[Any]
) -> None:
    flow, processes = stopped_while_it_trains(lab)
    (run_id,) = lab.run_ids()
    assert lab.query("select status from runs") == [("crashed",)]
    resumed = lab.start("resume", run_id, prefix=ELSEWHERE)
    wait_for(lambda: len(list(lab.home.run(run_id).glob("attempts/*"))) == 2 or resumed.poll() is not None)
    assert [process.status() for process in processes] == ["stopped"] * len(processes), "they are another host's"
    wake(processes)
    ousted = finished(flow)
    assert ousted.code == 1
    assert f"{run_id} was taken over (lease 1 is superseded): nothing more is written" in ousted.err
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    result = finished(resumed)
    assert result.code == 0, result.err
    lease = newest_lease(lab.home.run(run_id))
    assert (lease.number, lease.host, lease.released) == (2, "elsewhere", True)
    assert_as_undisturbed(lab, undisturbed)


@pytest.mark.long
def test_a_run_that_is_taken_over_on_its_own_host_loses_its_stopped_trainer_at_once(
    lab: Lab, undisturbed: list[Any]
) -> None:
    flow, processes = stopped_while_it_trains(lab)
    result = lab.rpg("resume", *lab.run_ids())
    assert result.code == 0, result.err
    assert f"ended train {processes[1].pid}" in result.err
    before = lab.state(lab.run_ids()[0])
    wake(processes[:1])
    assert finished(flow).code == 1
    assert lab.state(lab.run_ids()[0]) == before
    assert_as_undisturbed(lab, undisturbed)
