"""`rpg worker`: takes flow runs from a pool and executes them on this machine."""

import os
import socket
import sys
from pathlib import Path

from pipelines.home import Home
from pipelines.processes.stop import WORKER_GRACE
from pipelines.remote.sharing import keep_sending
from pipelines.running.run import WORKER
from pipelines.server.api import auth_string_for
from pipelines.server.deployments import renew_deployments
from pipelines.server.settings import client_environment
from pipelines.workers.reconciliation import Reconciliation
from pipelines.workers.supervision import WorkerSupervisor


def worker_name(pool: str) -> str:
    """What the dashboard and the lease of a run call a worker of this host; of several under supervisord each has its
    number.
    """
    number = os.environ.get("SUPERVISOR_PROCESS_NAME", "").rpartition("-")[2]
    return f"{socket.gethostname()}-{pool}" + f"-{number}" * (number not in ("", "0"))


def worker_command(pool: str, limit: int = 1) -> list[str]:
    """The command line of Prefect's worker. It takes one flow run at a time: a run may use the whole machine."""
    return [
        *(sys.executable, "-m", "pipelines.workers.process_worker", "worker", "start", "--type", "rpg"),
        *("--pool", pool, "--name", worker_name(pool), "--limit", str(limit)),
    ]


def worker_environment(home: Home, url: str, pool: str, grace: float) -> dict[str, str]:
    """The variables by which Prefect's worker, and the flow runs that it starts, find the home and the API."""
    return client_environment(home, url, auth_string_for(home, url)) | {
        "RPG_HOME": str(home.root),
        WORKER: worker_name(pool),
        WORKER_GRACE: str(grace),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # `python` of the deployments' command is this one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def run_worker(home: Home, url: str, pool: str, limit: int, grace: float) -> None:
    """Works for the pool until SIGTERM or SIGINT; then the flows under way save and give their runs back.

    Args:
        limit: flow runs at once.
        grace: seconds that each flow has for its stage to save.
    """
    renew_deployments(home, url, pool)
    Reconciliation(home, pool).keep_on(url)
    keep_sending(home)
    environment = worker_environment(home, url, pool, grace)
    WorkerSupervisor(home, worker_command(pool, limit), environment, grace).run()
