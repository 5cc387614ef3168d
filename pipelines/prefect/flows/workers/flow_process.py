"""The process of a flow run under a worker, and the small parent process that Prefect's worker sees instead.

Prefect's worker kills the processes that it has started when it gives up in an outage, and when it ends. So it starts a
small process, `python -m pipelines.prefect.flows.workers.flow_process`, which starts the flow in a session of its own,
waits for it and passes no signal on. The flow itself notices a cancellation on the server.
"""

import contextlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pipelines.home.home import Home
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.supervisor import start
from specs.machine.files import read_json, write_json
from specs.machine.foreign.listeners import guard_connections
from specs.machine.liveness import is_alive, start_of

SUPERVISOR = "RPG_SUPERVISOR"
"""Environment variable with the `identity` of the process that supervises the worker."""
_ENTRY = "execute"
_CLOSING_SECONDS = 25.0
"""Longest time in seconds that a flow takes, after its stage has ended, to record the end and to report it to the
server (5 s)."""


@dataclass(frozen=True, slots=True)
class FlowProcess:
    """A flow that runs, or has run, on this host."""

    flow_run_id: str
    process: ProcessRecord
    supervisor: str
    """`identity` of the process that supervises its worker; empty for a worker that was started with Prefect's own
    command."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return is_alive(self.process.pid, self.process.started)

    @property
    def is_at_work(self) -> bool:
        """Whether the process runs and was not stopped (SIGSTOP)."""
        with contextlib.suppress(psutil.Error):
            return self.is_alive and psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED
        return False

    def kill(self) -> None:
        """Kills the flow and its process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pgid, signal.SIGKILL)

    @property
    def is_orphan(self) -> bool:
        """Whether the process that supervised the flow's worker is gone. A flow without a supervisor is never an
        orphan."""
        if not self.supervisor:
            return False
        pid, _, started = self.supervisor.partition(" ")
        return not (pid.isdecimal() and is_alive(int(pid), started))


def identity(pid: int) -> str:
    """Returns a text that distinguishes a process from every other: its pid and its start time."""
    return f"{pid} {start_of(pid)}"


def flow_processes(home: Home) -> list[FlowProcess]:
    """Returns the workers' flows on this host: running ones, and killed ones whose notes are not yet removed."""
    flows = []
    for path in sorted(_directory(home).glob("*.json")):
        fields = read_json(path)
        if fields.get("host") == socket.gethostname() and (process := ProcessRecord.parse(fields, path.parent)):
            flows.append(FlowProcess(path.stem, process, fields.get("supervisor", "")))
    return flows


def is_noted(home: Home, flow_run_id: str) -> bool:
    """Returns whether a worker of this home, on any host, began the flow run and its process is not known to have
    ended."""
    return (_directory(home) / f"{flow_run_id}.json").exists()


def forget(home: Home, flow: FlowProcess) -> None:
    """Removes the note of a flow that has ended, unless a later attempt has replaced the note."""
    path = _directory(home) / f"{flow.flow_run_id}.json"
    if ProcessRecord.read(path) == flow.process:
        path.unlink(missing_ok=True)


def stop_flows(flows: Iterable[FlowProcess], number: signal.Signals, grace: float) -> None:
    """Asks flows to stop and waits until they have. Kills those that do not stop in time.

    Args:
        number: SIGTERM: each saves and gives its run back to the queue; SIGINT: each saves and is cancelled.
        grace: seconds that a flow leaves its stage.
    """
    flows = [flow for flow in flows if flow.is_alive]
    for flow in flows:
        with contextlib.suppress(ProcessLookupError):
            os.kill(flow.process.pid, number)
    deadline = time.monotonic() + grace + _CLOSING_SECONDS
    while any(flow.is_alive for flow in flows) and time.monotonic() < deadline:
        time.sleep(0.1)
    for flow in flows:
        if flow.is_alive:
            flow.kill()


def main() -> None:
    """Runs the flow as a child process. Exits with the flow's code, or with 0 if the flow was killed, since another
    worker then takes over the run."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # Not SIG_IGN, which the flow would inherit.
    home, flow_run_id = Home.from_environment(), os.environ["PREFECT__FLOW_RUN_ID"]
    # The control channel belongs to Prefect's worker, which the flow may outlive.
    for name in ("PREFECT__CONTROL_PORT", "PREFECT__CONTROL_TOKEN"):
        os.environ.pop(name, None)
    # Prefect's worker removes a flow's working directory when it ends.
    os.chdir(home.root)
    process = start([sys.executable, "-P", "-m", __spec__.name, _ENTRY], home.logs / "flows.log", attached=False)
    path = _directory(home) / f"{flow_run_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = ProcessRecord.of(process.pid, "flow", path.parent)
    flow = FlowProcess(flow_run_id, record, os.environ.get(SUPERVISOR, ""))
    write_json(path, asdict(record) | {"host": socket.gethostname(), "supervisor": flow.supervisor})
    if flow.is_orphan:  # The worker was stopped before it could know of this flow.
        process.terminate()
    code = process.wait()
    if code == 0:  # else reconciliation uses this note to send the server what it did not receive
        forget(home, flow)
    sys.exit(max(code, 0))


def execute() -> None:
    """Runs the flow in Prefect's engine, and ends without waiting for a server."""
    from pipelines.prefect.server.api import drain

    guard_connections(os.environ.get("PREFECT_API_URL", ""))
    sys.argv = ["prefect.engine"]
    code = 0
    try:
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    drain()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # At the interpreter's end Prefect would wait minutes for an unreachable server.


def _directory(home: Home) -> Path:
    return home.prefect / "flows"


if __name__ == "__main__":
    execute() if sys.argv[1:] == [_ENTRY] else main()
