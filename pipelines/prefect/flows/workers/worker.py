"""`rpg worker`: takes flow runs from a pool and executes them on this machine."""

import contextlib
import errno
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines.home.home import Home
from pipelines.prefect.flows.workers.reconciliation import Reconciliation
from pipelines.prefect.flows.workers.supervision import WorkerSupervisor
from pipelines.prefect.server.api import auth_string_for
from pipelines.prefect.server.deployments import renew_deployments
from pipelines.prefect.server.settings import client_environment
from pipelines.processes.stop import WORKER_GRACE
from pipelines.remote.sharing import keep_sending
from pipelines.running.run import WORKER


@contextlib.contextmanager
def worker_name(pool: str) -> Iterator[str]:
    """Reserves the name of this process on the dashboard and in a run's lease: the first of `HOST-POOL`, `HOST-POOL-2`
    and so on that no other worker of this host has.

    The name belongs to an abstract socket, which the kernel frees when this process ends in any way.
    """
    host = f"{socket.gethostname()}-{pool}"
    for number in itertools.count(1):
        name = host if number == 1 else f"{host}-{number}"
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0rpg worker {name}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
            yield name
            return


def worker_command(name: str, pool: str, limit: int = 1) -> list[str]:
    """Returns the command line of Prefect's worker. It takes one flow run at a time: a run may use the whole
    machine."""
    return [
        *(
            sys.executable,
            "-P",
            "-m",
            "pipelines.prefect.server.outage_log",
            "pipelines.prefect.flows.workers.process_worker",
        ),
        *("worker", "start", "--type", "rpg", "--pool", pool, "--name", name, "--limit", str(limit)),
    ]


def worker_environment(home: Home, url: str, name: str, grace: float) -> dict[str, str]:
    """Returns the environment in which Prefect's worker, and the flow runs that it starts, find the home and the
    API."""
    return client_environment(home, url, auth_string_for(home, url)) | {
        "RPG_HOME": str(home.root),
        WORKER: name,
        WORKER_GRACE: str(grace),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # `python` of the deployments' command is this interpreter.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def run_worker(home: Home, url: str, pool: str, limit: int, grace: float) -> None:
    """Executes the pool's flow runs until SIGTERM or SIGINT. Flows that are running then save their state and give
    their runs back.

    Args:
        limit: most concurrent flow runs.
        grace: seconds that each flow has for its stage to save.
    """
    renew_deployments(home, url, pool)
    Reconciliation(home, pool).keep_on(url)
    keep_sending(home)
    with worker_name(pool) as name:
        environment = worker_environment(home, url, name, grace)
        WorkerSupervisor(home, worker_command(name, pool, limit), environment, grace).run()
