"""Experiments that a Prefect server submits repeatedly, at the times of a cron expression."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from pipelines.home.home import Home
from pipelines.prefect.flows import frozen
from pipelines.prefect.flows.notices import ensure_notices
from pipelines.prefect.flows.submit import note_idle_pool, submit_document
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.deployments import POOL, SCHEDULES, Priority, ensure_deployment
from specs.document import Document
from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefect.client.orchestration import SyncPrefectClient


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which a server submits an experiment."""

    experiment: str
    cron: str
    """Cron expression in UTC."""
    pool: str
    active: bool
    """False if somebody paused the schedule on the dashboard."""

    def as_data(self) -> dict[str, Any]:
        """Returns the fields for `--json`."""
        return asdict(self)


@flow(name="rpg-submit", flow_run_name="submit {experiment}", validate_parameters=False, persist_result=False)
def submit_scheduled(experiment: str, document: str, pool: str, priority: Priority) -> "State[Any]":
    """Submits the unfinished runs of an experiment. There may be none if the files that its spec names are unchanged.

    Args:
        experiment: its name.
        document: the digest of its frozen document.
        pool, priority: see `submit_document`.
    """
    given = Document.from_json(frozen.fetch(document))
    url = PREFECT_API_URL.value() or ""
    submitted = submit_document(given, Home.from_environment(), url, pool=pool, priority=priority, scheduled=True)
    return Completed(message=f"{experiment}: {len(submitted)} runs submitted")


def schedule_document(
    document: Document,
    home: Home,
    profile: str,
    cron: str,
    *,
    pool: str,
    priority: Priority,
    say: "Callable[[str], None]",
) -> Schedule:
    """Schedules submissions of an experiment on a server, at the times of a cron expression (UTC). Replaces an earlier
    schedule.

    For arguments and errors see `submit_document`. An invalid expression raises SpecError too.
    """
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    try:
        times = CronSchedule(cron=cron, timezone="UTC")
    except ValueError:
        allowed = 'five fields: minute hour day month weekday, e.g. "0 3 * * *"'
        raise SpecError(Issue("no cron expression", given=cron, allowed=allowed)) from None
    experiment = document.experiment.name
    url = api_url(home, profile)
    pool = pool or document.experiment.launcher.pool or POOL
    say(f"scheduling {experiment} at {url}")
    with prefect_client(home, url) as client:
        deployment = ensure_deployment(client, SCHEDULES, pool)
        digest = frozen.send(client, document.to_json(), f"Frozen spec of {experiment}")
        ensure_notices(client, document)
        _remove(client, experiment)
        parameters = {"experiment": experiment, "document": digest, "pool": pool, "priority": priority}
        wanted = DeploymentScheduleCreate(schedule=times, slug=experiment, parameters=parameters)
        client.create_deployment_schedules(deployment, [wanted])
        note_idle_pool(client, home, pool, say)
    return Schedule(experiment, cron, pool, active=True)


def list_schedules(home: Home, profile: str) -> list[Schedule]:
    """Returns a server's schedules. Raises SpecError like `submit_document`."""
    with prefect_client(home, api_url(home, profile)) as client:
        return [schedule for schedule, *_ in _schedules(client)]


def remove_schedule(home: Home, profile: str, experiment: str) -> None:
    """Removes an experiment's schedule. Flow runs that have begun continue. Raises SpecError if it has none."""
    with prefect_client(home, api_url(home, profile)) as client:
        if not _remove(client, experiment):
            names = ", ".join(schedule.experiment for schedule, *_ in _schedules(client))
            raise SpecError(Issue("the experiment has no schedule", given=experiment, allowed=names or "there is none"))


def _remove(client: "SyncPrefectClient", experiment: str) -> bool:
    """Removes an experiment's schedules. Returns whether there was one."""
    present = [entry for entry in _schedules(client) if entry[0].experiment == experiment]
    for _, deployment, schedule in present:
        client.delete_deployment_schedule(deployment, schedule)
    return bool(present)


def _schedules(client: "SyncPrefectClient") -> list[tuple[Schedule, Any, Any]]:
    """Returns each schedule with the id of its deployment and its own id."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    of_ours = FlowFilter(name=FlowFilterName(any_=[SCHEDULES.flow]))
    return [
        (
            Schedule(
                entry.slug or "", getattr(entry.schedule, "cron", ""), deployment.work_pool_name or "", entry.active
            ),
            deployment.id,
            entry.id,
        )
        for deployment in client.read_deployments(flow_filter=of_ours)
        for entry in deployment.schedules
    ]
