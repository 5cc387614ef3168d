"""`rpg up` and `rpg down`: start and end the programs of a profile."""

import contextlib
import importlib.util
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.flows.workers.flow_process import flow_processes, identity, stop_flows
from pipelines.prefect.server.api import (
    SERVER_COMMAND,
    ServiceError,
    Services,
    is_healthy,
    refuse_anothers,
    running_services,
    services_file,
)
from pipelines.prefect.server.credentials import PASSWORDS_VARIABLE, make_passwords
from pipelines.prefect.server.deployments import POOL, name_record, renew_deployments
from pipelines.prefect.server.settings import API_ONLY, API_PROCESSES, Profile, embedded_environment
from pipelines.prefect.services.server_profile import ServerProfile
from pipelines.prefect.services.supervisord import Program, Supervisor, end_supervisor, write_private
from pipelines.processes.reap import ProcessRecord, reap
from pipelines.processes.stop import GRACE_SECONDS
from specs.errors import RpgError
from specs.machine.files import read_json
from specs.machine.liveness import is_alive

DEFAULT_PORT = 4200
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of `rpg up`."""

    port: int = 0
    """Port of the Prefect dashboard; 0 means `next_port`."""
    profile: Profile | None = None
    """The profile. None means the profile that is up, else embedded."""
    workers: int = 0
    """Number of workers. 0 means as many as are up, else one."""


def up(home: Home, wanted: Wanted, *, say: Callable[[str], None] = lambda _: None) -> Services:
    """Starts the programs of a profile that do not run, and renews the deployments.

    Returns when the dashboards answer, also if the studies' dashboard does not start.

    Args:
        say: receives a line before each step that takes a while, and the reason if there is no dashboard of studies.
    Raises:
        RpgError: the requested port is in use. Nothing has been written.
        ServiceError: a program does not start, or other settings are up than the requested ones.
    """
    if wanted.port and running_services(home) is None and not _is_free(wanted.port, home):
        hint = "name another port, or omit --port to use a free one"
        raise RpgError(f"port {wanted.port} is in use\n  hint: {hint}")
    home.create()
    reap(home)
    with home.locked("services", waiting=lambda: None):
        services = running_services(home)
        if services is None:
            _end_recorded(home)
            return _start(home, wanted, say)
        supervisor = Supervisor(home, services.control_port)
        _refuse_another(services, supervisor, wanted)
        if not is_healthy(services.url, timeout=10.0):
            raise ServiceError(f"the Prefect server at {services.url} does not answer; `rpg down` ends it")
        renew_deployments(home, services.url)
        supervisor.run_all()
        return services


def stay(home: Home, services: Services) -> bool:
    """Waits until supervisord has ended. Returns whether `rpg down` ended it."""
    while is_alive(services.supervisor.pid, services.supervisor.started):
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while services_file(home).exists():  # `rpg down` removes it last
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def give_back(home: Home, services: Services) -> None:
    """Ends all programs that are up. The workers' runs save their state and go back to the queue."""
    end_supervisor(services.supervisor)
    services_file(home).unlink(missing_ok=True)


def _refuse_another(services: Services, supervisor: Supervisor, wanted: Wanted) -> None:
    """Raises ServiceError if programs with other settings than the requested ones are up."""
    workers = len([process for process in supervisor.states() if process.program == "worker"])
    differences = {
        f"--profile {wanted.profile}": wanted.profile not in (None, services.profile),
        f"--port {wanted.port}": wanted.port not in (0, services.port),
        f"--workers {wanted.workers}": wanted.workers not in (0, workers),
    }
    if asked := " ".join(option for option, differs in differences.items() if differs):
        counted = f"{workers} worker" + "s" * (workers != 1)
        up_already = f"profile {services.profile} is up at {services.dashboard} with {counted}"
        raise ServiceError(f"{up_already}; `rpg down`, then `rpg up {asked}`")


def _start(home: Home, wanted: Wanted, say: Callable[[str], None]) -> Services:
    port = wanted.port or next_port(home)
    studies_port, record_port = free_port(port + 1), free_port(port + 2)
    url = f"http://127.0.0.1:{port}/api"
    make_passwords(home)
    if wanted.profile == "server":
        server = ServerProfile.prepare(home, url)
        api = _api(port, server.environment | API_ONLY, API_PROCESSES)
        beside = [server.background_services()]
        of_workers, of_pages = server.of_workers, server.of_pages
    else:
        server, api, beside = None, _api(port, embedded_environment(home, url), 1), []
        of_workers = {"RPG_HOME": str(home.root)}
        of_pages = of_workers | {PASSWORDS_VARIABLE: "home"}
    record = _record_page(record_port, of_pages)
    studies = _studies_page(studies_port, of_pages, say)
    worker = _worker(url, of_workers, wanted.workers or 1)

    programs = [*(server.backends if server else []), api, *beside, record, *studies, worker]
    supervisor, process = Supervisor.start(home, programs)
    record_url = f"http://127.0.0.1:{record_port}"
    services = Services(url, process, supervisor.port, wanted.profile or "embedded", record_url=record_url)
    services.write(home)
    write_private(_port_file(home), json.dumps({"port": port}))
    try:
        if server:
            say("starting PostgreSQL and Redis")
            server.start_backends(supervisor)
        say(f"starting the Prefect server at {url}")
        for program in (api, *beside, record, *studies):
            refuse_anothers(program.address)
            supervisor.run(program.name)
        for program in (api, *beside):
            supervisor.wait_for_address(program)
        say("registering the flows and starting the worker" + "s" * (worker.processes != 1))
        renew_deployments(home, url)
        name_record(home, url, record_url)
        supervisor.run(worker.name)
        supervisor.wait_for_address(record)
        for page in studies:
            say("waiting for the dashboard of studies")
            services = replace(services, studies_url=_wait_for_page(supervisor, page, say))
        services.write(home)
    except BaseException:
        end_supervisor(process)
        services_file(home).unlink(missing_ok=True)
        raise
    return services


def next_port(home: Home) -> int:
    """Returns the dashboard's default port: the last one that this home used, at first 4200, or any free port."""
    return free_port(read_json(_port_file(home)).get("port") or DEFAULT_PORT)


def _port_file(home: Home) -> Path:
    """Returns the file with the last port of the home's dashboard: records of submitted runs, links and clients use
    it."""
    return home.services / "port.json"


def _api(port: int, environment: dict[str, str], processes: int) -> Program:
    """Returns the Prefect API and its dashboard."""
    address = f"http://127.0.0.1:{port}/api/ready"
    return Program(
        "api", SERVER_COMMAND, environment, log="prefect-server.log", processes=processes, port=port, address=address
    )


def _worker(url: str, environment: dict[str, str], processes: int) -> Program:
    """Returns the worker program. Each process takes one flow run at a time: a run may use the whole machine."""
    command = [sys.executable, "-P", "-c", "from pipelines.cli import main; main()", "worker"]
    options = ["--pool", POOL, "--profile", url]
    return Program("worker", [*command, *options], environment, log="prefect-worker.log", processes=processes)


def _record_page(port: int, environment: dict[str, str]) -> Program:
    """Returns the program that serves the reports and the record's files, read-only."""
    environment, address = environment | {"RPG_WEB_PORT": str(port)}, f"http://127.0.0.1:{port}/ready"
    return Program("record", [sys.executable, "-P", "-m", "pipelines.web"], environment, address=address)


def _studies_page(port: int, environment: dict[str, str], say: Callable[[str], None]) -> list[Program]:
    """Returns the optuna-dashboard program; empty, with a message that says why, if it is not installed."""
    if importlib.util.find_spec("optuna_dashboard") is None:
        say("no dashboard of studies: pip install 'rpg-experiments[dashboard]'")
        return []
    command, address = [sys.executable, "-P", "-m", "pipelines.studies.web", str(port)], f"http://127.0.0.1:{port}"
    return [Program("studies", command, environment, log="optuna-dashboard.log", address=f"{address}/ready")]


def _wait_for_page(supervisor: Supervisor, page: Program, say: Callable[[str], None]) -> str:
    """Waits until the page answers and returns its address. If it does not start, prints the reason and returns an
    empty text; the other programs continue."""
    try:
        supervisor.wait_for_address(page)
    except ServiceError as error:
        supervisor.stop(page.name)
        say(str(error))
        return ""
    return page.address.removesuffix("/ready")


def _is_free(port: int, home: Home) -> bool:
    """Returns whether the port is free, once the programs of a killed supervisord have ended."""
    deadline = time.monotonic() + (GRACE_SECONDS if services_file(home).exists() else 0.0)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def down(home: Home) -> bool:
    """Cancels the workers' runs, then ends everything that `up` has started. Returns whether anything was up."""
    services = running_services(home)
    if services is not None:
        with contextlib.suppress(ServiceError):
            _cancel_runs(home, Supervisor(home, services.control_port))
    was_up = _end_recorded(home) or services is not None
    reap(home)
    return was_up


def _cancel_runs(home: Home, supervisor: Supervisor) -> None:
    """Stops the workers' flows as `rpg cancel` does. A worker that ends normally would give its runs back to the
    queue."""
    workers: dict[str, psutil.Process] = {}
    try:
        for pid in supervisor.pids("worker"):
            with contextlib.suppress(psutil.Error):  # It has ended since, for example because it cannot start.
                workers[identity(pid)] = psutil.Process(pid)
                workers[identity(pid)].suspend()
        supervisor.stop("worker")  # so that none is restarted
    finally:
        for worker in workers.values():
            with contextlib.suppress(psutil.Error):
                worker.kill()
    flows = [flow for flow in flow_processes(home) if flow.supervisor in workers or flow.is_orphan]
    stop_flows(flows, signal.SIGINT, GRACE_SECONDS)


def _end_recorded(home: Home) -> bool:
    """Ends the supervisor that server.json names, with its programs. Returns whether it was alive."""
    record = ProcessRecord.parse(read_json(services_file(home)).get("supervisor") or {}, home.prefect)
    was_up = record is not None and end_supervisor(record)
    services_file(home).unlink(missing_ok=True)
    return was_up
