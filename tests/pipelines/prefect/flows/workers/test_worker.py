"""`rpg worker`: its runs are executed once and completely, whatever happens to it and its processes."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from live import Lab, finished
from waiting import wait_for

from pipelines.prefect.server.api import EmbeddedServer
from specs.machine.files import read_json

OVERRIDES = ("training.steps=40", "training.checkpoint.every_steps=5")
ADOPTED_SECONDS = 30.0
"""From the death of a worker to the flow run's being scheduled again."""


class Cluster:
    """A Prefect server, and workers that share a home with those who submit."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.server = EmbeddedServer(lab.home)
        self.url = self.server.url
        self.server.start()
        self.server.wait()

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def start_worker(self) -> "subprocess.Popen[str]":
        """Starts a worker as a script's `rpg worker &` does: with SIGINT ignored."""
        begin = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from pipelines.cli import main; main()"
        return self.lab.start_program(begin, "worker", "--profile", self.url)

    def submit(self, *overrides: str) -> tuple[str, str]:
        """Ids of the run and of its flow run."""
        result = self.lab.rpg("submit", str(self.lab.spec), "--profile", self.url, "--json", overrides=overrides)
        assert result.code == 0, result.err
        (submitted,) = json.loads(result.out)
        return submitted["run_id"], submitted["flow_run_id"]

    def state(self, flow_run_id: str) -> str:
        """The type of a flow run's state."""
        return str(self.call(f"flow_runs/{flow_run_id}")["state"]["type"])

    def set_state(self, flow_run_id: str, kind: str, name: str) -> None:
        """Does the work of the dashboard's buttons."""
        self.call(f"flow_runs/{flow_run_id}/set_state", {"state": {"type": kind, "name": name}})

    def tasks(self, flow_run_id: str) -> list[tuple[str, str]]:
        """Stages and the states of their task runs, over all attempts."""
        tasks = self.call("task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        tasks.sort(key=lambda task: task["start_time"])
        return [(task["name"], task["state"]["type"]) for task in tasks]

    def flow(self) -> int:
        """Process id of the flow that runs."""
        (note,) = self.lab.home.prefect.glob("flows/*.json")
        return int(json.loads(note.read_text())["pid"])


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Cluster]:
    cluster = Cluster(lab)
    yield cluster
    cluster.server.stop()


def wait_for_step(lab: Lab, run_id: str, step: int) -> None:
    wait_for(lambda: lab.progress(run_id) >= step, timeout=240, what=f"step {step}")


def metrics(lab: Lab, run_id: str) -> list[Any]:
    """All but times, rates and memory, which differ from run to run."""
    return lab.query(
        f"select step, name, value from metrics where run_id = '{run_id}' and name not like 'time/%'"
        " and name not like 'memory/%' and name not like 'tokens_per_second/%' order by all"
    )


def undisturbed_metrics(lab: Lab) -> list[Any]:
    """Metrics of the same run in a home of its own, on the same data and base model."""
    alone = Lab(lab.root.parent / "alone", lab.spec)
    alone.root.mkdir()
    (alone.root / "artifacts").symlink_to(lab.root / "artifacts")
    try:
        result = alone.rpg("run", str(alone.spec), overrides=OVERRIDES)
        assert result.code == 0, result.err
        return metrics(alone, alone.run_ids()[0])
    finally:
        alone.clean_up()


@pytest.mark.long
def test_a_run_outlives_its_workers_end_the_kill_of_prefects_worker_and_that_of_everything(cluster: Cluster) -> None:
    lab = cluster.lab
    first = cluster.start_worker()
    run_id, flow_run_id = cluster.submit(*OVERRIDES)

    # Asked to end, a worker saves and gives the run back to the queue.
    wait_for_step(lab, run_id, 6)
    first.terminate()
    stopped = finished(first, timeout=60)
    assert stopped.code == 0, stopped.err
    assert (lab.state(run_id)["status"], cluster.state(flow_run_id)) == ("pending", "SCHEDULED")
    assert lab.state(run_id)["reason"] == "waiting for a worker"
    assert [process.cmdline() for process in lab.processes() if "uvicorn" not in process.cmdline()] == []

    # Prefect's worker is killed: its flow continues, in the same process.
    second = cluster.start_worker()
    wait_for_step(lab, run_id, 14)
    flow = cluster.flow()
    (prefect_worker,) = psutil.Process(second.pid).children()
    prefect_worker.kill()
    wait_for_step(lab, run_id, 18)
    assert cluster.flow() == flow

    # Everything is killed, and another worker takes the run over.
    died_at = time.monotonic()
    for process in [psutil.Process(second.pid), psutil.Process(flow), *psutil.Process(flow).children(recursive=True)]:
        process.kill()
    third = cluster.start_worker()
    wait_for(lambda: cluster.state(flow_run_id) != "RUNNING", timeout=ADOPTED_SECONDS, what="another worker")
    print(f"noticed after {time.monotonic() - died_at:.1f} s")
    wait_for(lambda: cluster.state(flow_run_id) == "COMPLETED", timeout=300, what="the run's end")
    assert lab.state(run_id)["status"] == "finished"
    leases = [read_json(path) for path in (lab.home.run(run_id) / "leases").glob("*.json")]
    assert sum(not lease["settles"] for lease in leases) == 3
    tasks = cluster.tasks(flow_run_id)
    assert [state for name, state in tasks if name == "train"] == ["CANCELLED", "CRASHED", "COMPLETED"]
    assert {state for name, state in tasks if name != "train"} == {"COMPLETED"}
    assert metrics(lab, run_id) == undisturbed_metrics(lab)
    third.terminate()
    assert finished(third, timeout=60).code == 0


@pytest.mark.long
def test_the_dashboard_suspends_a_run_resumes_it_and_cancels_it_even_after_the_api_was_started_again(
    cluster: Cluster,
) -> None:
    lab = cluster.lab
    cluster.start_worker()
    run_id, flow_run_id = cluster.submit("training.steps=2000")
    wait_for_step(lab, run_id, 2)
    cluster.set_state(flow_run_id, "PAUSED", "Suspended")
    lab.wait_until(run_id, "pending", timeout=30)
    assert lab.state(run_id)["reason"] == "suspended on the server"
    stood_at = lab.progress(run_id)
    wait_for(lambda: not list(lab.home.prefect.glob("flows/*.json")), timeout=30, what="the flow's end")
    assert cluster.state(flow_run_id) == "PAUSED"
    cluster.call(f"flow_runs/{flow_run_id}/resume", {})
    wait_for_step(lab, run_id, stood_at + 2)

    cluster.server.stop()
    cluster.server.start()
    cluster.server.wait()
    wait_for_step(lab, run_id, lab.progress(run_id) + 2)
    cluster.set_state(flow_run_id, "CANCELLING", "Cancelling")
    lab.wait_until(run_id, "cancelled", timeout=30)
    wait_for(lambda: cluster.state(flow_run_id) == "CANCELLED", timeout=30, what="the dashboard")
    assert lab.training_pid() == 0


@pytest.mark.long
def test_what_happens_while_the_server_is_away_is_shown_when_it_is_back(cluster: Cluster) -> None:
    lab = cluster.lab
    worker = cluster.start_worker()
    run_id, flow_run_id = cluster.submit("training.steps=12")
    wait_for_step(lab, run_id, 2)
    (note,) = lab.home.prefect.glob("embedded-*.json")
    server = psutil.Process(json.loads(note.read_text())["pid"])
    server.suspend()
    lab.wait_until(run_id, "finished", timeout=300)
    # The flow waits for the server for some seconds, then ends.
    wait_for(lambda: not list(lab.home.prefect.glob("flows/*.json")), timeout=60, what="the flow's end")
    assert worker.poll() is None
    server.resume()
    wait_for(lambda: cluster.state(flow_run_id) == "COMPLETED", timeout=90, what="the dashboard")
    assert {state for _, state in cluster.tasks(flow_run_id)} == {"COMPLETED"}
    shown = {artifact["key"] for artifact in cluster.call("artifacts/filter", {})}
    assert {f"{run_id}-{name}" for name in ("plan", "training", "learning-curve", "results")} <= shown
