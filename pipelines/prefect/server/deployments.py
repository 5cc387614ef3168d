"""Work pools, their queues, and a deployment of each of our flows. Prefect workers take flow runs from the pools."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from pipelines.home.home import Home
from pipelines.prefect.server.client import prefect_client

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "rpg"
"""The work pool of the workers that `rpg up` starts."""
Priority = Literal["high", "normal", "low"]
"""Priority of a flow run within its pool: workers take higher priorities first."""
RECORD_VARIABLE = "rpg_record"
"""The Prefect variable with the address of the workers' record: the URL of its web application, or of a store."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings with which workers run one of our flows. The flow is named as text, so that submitting does not import
    it."""

    flow: str
    """The flow's name on the server."""
    name: str
    entrypoint: str
    """Module and function, which the worker imports."""
    description: str

    @property
    def job(self) -> dict[str, str]:
        """Returns the command with which a worker starts a flow run; see
        `pipelines.prefect.flows.workers.flow_process`."""
        return {"command": "python -P -m pipelines.prefect.flows.workers.flow_process"}

    def name_in(self, pool: str) -> str:
        """Returns the deployment's name in a pool."""
        return self.name if pool == POOL else f"{self.name}-{pool}"


EXPERIMENTS = Deployment(
    "rpg-run",
    "experiments",
    "pipelines.prefect.flows.flow.execute_run",
    "One run of an experiment: stage the data, make the base model, train, evaluate, report.",
)
STUDIES = Deployment(
    "rpg-study",
    "studies",
    "pipelines.studies.flow.run_study_flow",
    "All trials of a hyperparameter study, one after another.",
)

SCHEDULES = Deployment(
    "rpg-submit",
    "schedules",
    "pipelines.prefect.flows.schedules.submit_scheduled",
    "Submits an experiment at the times of a schedule.",
)
DEPLOYMENTS = (EXPERIMENTS, STUDIES, SCHEDULES)


def ensure_deployment(client: "SyncPrefectClient", deployment: Deployment, pool: str = POOL) -> UUID:
    """Creates the work pool and the deployment if they are missing. Returns the deployment's id.

    A deployment with another entrypoint or command is updated, so that flow runs which were scheduled for it can run.
    Its schedules stay.
    """
    from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    name = deployment.name_in(pool)
    try:
        present = client.read_deployment_by_name(f"{deployment.flow}/{name}")
    except ObjectNotFound:
        present = None
    written = (present.entrypoint, present.work_pool_name, present.job_variables) if present else None
    if present and written == (deployment.entrypoint, pool, deployment.job):
        return present.id
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):  # Another command or worker was first.
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    if present:  # Creating it again would remove its schedules.
        current = DeploymentUpdate(
            entrypoint=deployment.entrypoint,
            work_pool_name=pool,
            job_variables=deployment.job,
            description=deployment.description,
        )
        client.update_deployment(present.id, current)
        return present.id
    return client.create_deployment(
        flow_id=client.create_flow_from_name(deployment.flow),
        name=name,
        entrypoint=deployment.entrypoint,
        work_pool_name=pool,
        job_variables=deployment.job,
        enforce_parameter_schema=False,
        description=deployment.description,
    )


def ensure_queue(client: "SyncPrefectClient", pool: str, priority: Priority) -> str:
    """Creates the pool's work queue of this priority if it is missing. Returns its name; empty means the pool's own
    queue.

    In Prefect the queue of number 1 goes first; a queue that takes a number increases the numbers of those after it by
    one.
    """
    from prefect.exceptions import ObjectNotFound

    if priority == "normal":
        return ""
    try:
        client.read_work_queue_by_name(priority, work_pool_name=pool)
    except ObjectNotFound:
        client.create_work_queue(priority, priority=1 if priority == "high" else None, work_pool_name=pool)
    return priority


def workers_of(client: "SyncPrefectClient", pool: str) -> list[str]:
    """Returns the names of the workers that take flow runs from a pool now."""
    return [worker.name for worker in client.read_workers_for_work_pool(pool) if worker.status == "ONLINE"]


def renew_deployments(home: Home, url: str, pool: str = POOL) -> None:
    """Creates our deployments in a pool if they are missing or come from another version.

    Call it before a worker starts: the worker imports the entrypoints of flow runs that were scheduled for it, by
    another version too.
    """
    with prefect_client(home, url) as client:
        for deployment in DEPLOYMENTS:
            ensure_deployment(client, deployment, pool)


def name_record(home: Home, url: str, place: str) -> None:
    """Sets the server's Prefect variable with the address of its workers' record, unless a user has set an address for
    other machines.

    Args:
        place: the URL of the record's web application on this machine.
    """
    from prefect.client.schemas.actions import VariableCreate, VariableUpdate

    with prefect_client(home, url) as client:
        present = client.read_variable_by_name(RECORD_VARIABLE)
        if present is None:
            client.create_variable(VariableCreate(name=RECORD_VARIABLE, value=place))
        elif str(present.value).startswith("http://127.0.0.1:"):
            client.update_variable(VariableUpdate(name=RECORD_VARIABLE, value=place))


def record_pages(client: "SyncPrefectClient") -> str:
    """Returns the URL of the web application with the record's report pages; empty if the server does not name it."""
    variable = client.read_variable_by_name(RECORD_VARIABLE)
    place = "" if variable is None else str(variable.value)
    return place.rstrip("/") if place.startswith(("http://", "https://")) else ""
