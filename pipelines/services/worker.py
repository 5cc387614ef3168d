"""What `rpg up` starts on this machine: the server, a worker and the studies' dashboard; and their end."""

import contextlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipelines.home import Home
from pipelines.launchers.network import free_port
from pipelines.processes.reap import ProcessRecord, end, reap
from pipelines.processes.supervisor import start
from pipelines.running.run import WORKER
from pipelines.services.client import prefect_client
from pipelines.services.deployments import EXPERIMENTS, POOL, STUDIES, ensure_deployment
from pipelines.services.flow_process import flow_processes, stop_flows
from pipelines.services.reconciliation import Reconciliation
from pipelines.services.server import (
    ServiceError,
    Services,
    environment,
    is_healthy,
    running_services,
    server_command,
    services_file,
    wait_until_answers,
    wait_until_healthy,
)
from pipelines.services.supervision import WorkerSupervisor
from storage.liveness import is_alive

DEFAULT_PORT = 4200


def up(home: Home, port: int = 0, *, say: Callable[[str], None] = lambda _: None) -> Services:
    """Starts the server, a worker and the studies' dashboard, unless they run, and renews the deployments.

    Returns when both dashboards answer. Without that of studies it returns too.

    Args:
        port: of the Prefect dashboard; 0: 4200, or any free one where that is taken.
        say: is given a message where there is no dashboard of studies: why.
    Raises:
        ServiceError: the server does not come up, or one that runs does not answer.
    """
    reap(home)
    services = running_services(home) or _start_server(home, port)
    if not is_healthy(services.url, timeout=10.0):
        raise ServiceError(f"the Prefect server at {services.url} does not answer; `rpg down` ends it")
    _renew_deployments(home, services.url, POOL)
    if services.worker is None or not is_alive(services.worker.pid, services.worker.started):
        services = _start_worker(home, services)
    if services.studies is None or not is_alive(services.studies.pid, services.studies.started):
        services = _start_studies_dashboard(home, services, say)
    return services


def _start_server(home: Home, port: int) -> Services:
    chosen = port or _free_port_like(DEFAULT_PORT)
    if port and not _is_free(port):
        raise ServiceError(f"port {port} is taken")
    home.create()
    home.prefect.mkdir(parents=True, exist_ok=True)
    url, log = f"http://127.0.0.1:{chosen}/api", home.logs / "prefect-server.log"
    command = server_command("127.0.0.1", chosen)
    process = start(command, log, environment=environment(home, url), attached=False)
    services = Services(url, ProcessRecord.of(process.pid, "server"))
    services.write(home)
    try:
        wait_until_healthy(url, process, log)
    except BaseException:
        down(home)
        raise
    return services


def _start_worker(home: Home, services: Services) -> Services:
    rpg = [sys.executable, "-c", "from pipelines.cli import main; main()"]
    command = [*rpg, "worker", "--pool", POOL, "--profile", services.url]
    settings = {"RPG_HOME": str(home.root)}
    process = start(command, home.logs / "prefect-worker.log", environment=settings, attached=False)
    with_worker = replace(services, worker=ProcessRecord.of(process.pid, "worker"))
    with_worker.write(home)
    return with_worker


def _start_studies_dashboard(home: Home, services: Services, say: Callable[[str], None]) -> Services:
    """Starts optuna-dashboard at the port after the server's, or at any free one where that is taken."""
    without = replace(services, studies=None, studies_url="")
    if importlib.util.find_spec("optuna_dashboard") is None:
        say("no dashboard of studies: pip install 'rpg-experiments[dashboard]'")
        return without
    port = _free_port_like(int(services.dashboard.rpartition(":")[2]) + 1)
    log = home.logs / "optuna-dashboard.log"
    command = [sys.executable, "-m", "pipelines.studies.web", str(port)]
    process = start(command, log, environment={"RPG_HOME": str(home.root)}, attached=False)
    record = ProcessRecord.of(process.pid, "studies")
    with_studies = replace(services, studies=record, studies_url=f"http://127.0.0.1:{port}")
    with_studies.write(home)
    try:
        wait_until_answers(with_studies.studies_url, "optuna-dashboard", process, log)
    except ServiceError as error:
        end(record)
        without.write(home)
        say(str(error))
        return without
    return with_studies


def _renew_deployments(home: Home, url: str, pool: str) -> None:
    """Before a worker starts: what was scheduled for it, by an earlier version too, must be there for it to import."""
    with prefect_client(home, url) as client:
        for deployment in (EXPERIMENTS, STUDIES):
            ensure_deployment(client, deployment, pool)


def worker_name(pool: str) -> str:
    """What the dashboard and the lease of a run call a worker of this host."""
    return f"{socket.gethostname()}-{pool}"


def worker_command(pool: str) -> list[str]:
    """The command line of Prefect's worker. It takes one flow run at a time: a run may use the whole machine."""
    return [
        *(sys.executable, "-m", "prefect", "worker", "start", "--type", "process"),
        *("--pool", pool, "--name", worker_name(pool), "--limit", "1"),
    ]


def worker_environment(home: Home, url: str, pool: str) -> dict[str, str]:
    """The variables by which Prefect's worker, and the flow runs that it starts, find the home and the API."""
    return environment(home, url) | {
        "RPG_HOME": str(home.root),
        WORKER: worker_name(pool),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # `python` of the deployments' command is this one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def down(home: Home) -> bool:
    """Stops the worker's flow runs, then everything that `up` has started. Returns whether anything was up."""
    services = running_services(home)
    if services is None:
        services_file(home).unlink(missing_ok=True)
        return False
    if services.worker is not None:
        # First, so that no further flow begins and none is given back.
        with contextlib.suppress(ProcessLookupError):
            os.kill(services.worker.pid, signal.SIGKILL)
        stop_flows(flow_processes(home), signal.SIGINT)
    if services.studies is not None:
        end(services.studies, grace=1.0)
    end(services.server, grace=5.0)
    services_file(home).unlink(missing_ok=True)
    reap(home)
    return True


def _free_port_like(preferred: int) -> int:
    """The preferred port where it is free, else any that is."""
    return preferred if _is_free(preferred) else free_port()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def run_worker(home: Home, url: str, pool: str) -> None:
    """Works for the pool until SIGTERM or SIGINT; then the flows under way save and give their runs back."""
    _renew_deployments(home, url, pool)
    Reconciliation(home, pool).keep_on(url)
    WorkerSupervisor(home, worker_command(pool), worker_environment(home, url, pool)).run()
