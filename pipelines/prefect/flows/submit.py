"""Submits frozen experiments to the workers of a Prefect server: one flow run per run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.state import RunState
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.prefect.flows import frozen
from pipelines.prefect.flows.experiment import flow_run_name, flow_tags
from pipelines.prefect.flows.notices import ensure_notices
from pipelines.prefect.server.api import running_services
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.deployments import (
    EXPERIMENTS,
    POOL,
    Priority,
    ensure_deployment,
    ensure_queue,
    record_pages,
    workers_of,
)
from pipelines.prefect.server.outbox import send
from pipelines.running.experiment_page import experiment_markdown
from pipelines.running.messages import Message
from pipelines.running.run import register_experiment, register_runs
from specs.errors import Issue, SpecError
from specs.secrets import hide

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from specs.loader import Document

_AT_ONCE = 20
"""Number of flow runs in one request. Prefect accepts 100, but a request is one transaction, and SQLite executes one
writing transaction at a time. Workers' heartbeats and new states of flow runs wait for it."""
_RETRY_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each new request for the flow runs that the server has refused."""
_WORKER_STARTS_SECONDS = 20.0
"""Longest time in seconds that the worker of `rpg up` takes to start. After them it is reported as missing."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A flow run that waits for a worker."""

    run_id: str
    name: str
    flow_run_id: str
    link: str
    """URL of its page on the dashboard."""

    def as_data(self) -> dict[str, str]:
        """Returns the fields for `--json`."""
        return asdict(self)


def submit_document(
    document: "Document",
    home: Home,
    profile: str = "",
    *,
    pool: str = "",
    priority: Priority = "normal",
    scheduled: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[Submitted]:
    """Creates a flow run for each run of the experiment. The frozen document is sent once, and the flow runs refer to
    its digest.

    Args:
        profile: an API's URL or the name of a Prefect profile; empty means the server of `rpg up`.
        pool: the work pool; empty means the spec's, else the pool of `rpg up`.
        priority: decides in which of the pool's work queues the flow runs wait.
        scheduled: a schedule submits the experiment: finished runs are left out, and notices stay as they are.
        say: receives a line for each step that takes a while, and one if no worker takes flow runs from the pool at
            present.
    Raises:
        SpecError: there is no such server, it does not answer, or it refuses.
    """
    url = api_url(home, profile)
    pool = pool or document.experiment.launcher.pool or POOL
    plan = make_plan(document, home)
    say(f"submitting {document.experiment.name} to {url}")
    with prefect_client(home, url) as client:
        deployment = ensure_deployment(client, EXPERIMENTS, pool)
        queue = ensure_queue(client, pool, priority)
        digest = frozen.send(client, document.to_json(), f"Frozen spec of {document.experiment.name}")
        if not scheduled:
            ensure_notices(client, document)
        register_experiment(home, document, plan.runs)
        submitted: list[Submitted] = []
        wanted = [run for run in plan.in_turn if not scheduled or any(stage.action != "CACHED" for stage in run.stages)]
        for start in range(0, len(wanted), _AT_ONCE):
            runs = wanted[start : start + _AT_ONCE]
            register_runs(home, document, runs, durable=False)
            flow_run_ids = _create_flow_runs(client, deployment, queue, digest, runs)
            for run, flow_run_id in zip(runs, flow_run_ids, strict=True):
                state = RunState(home, run.run_id)
                is_begun = state.record["flow_run_id"] == flow_run_id  # a worker may have finished it by now
                if not is_begun and status_of(home, run.run_id) != "running":
                    state.submitted(flow_run_id, url)
                link = flow_run_link(home, url, flow_run_id)
                submitted.append(Submitted(run.run_id, flow_run_name(run), flow_run_id, link))
            say(f"  {len(submitted)} of {len(wanted)} runs submitted")
        _publish_page(client, home, document.experiment.name)
        note_idle_pool(client, home, pool, say)
    return submitted


def _publish_page(client: "SyncPrefectClient", home: Home, experiment: str) -> None:
    """Shows the experiment's page on the dashboard. The flow of each run renews the page at its end."""
    page = hide(experiment_markdown(home, experiment, record_pages(client)))
    fields = {"key": experiment, "type": "markdown", "data": page, "description": f"Runs of {experiment}"}
    send(client, Message("page", fields))


def _create_flow_runs(
    client: "SyncPrefectClient", deployment: UUID, queue: str, digest: str, runs: Sequence[RunPlan]
) -> list[str]:
    """Creates a flow run for each of these runs, in one request. Returns the flow runs' ids, in the runs' order.

    Args:
        queue: the work queue's name; empty means the deployment's own.
        digest: digest of the frozen document that the runs come from.
    Raises:
        SpecError: the server refused some of them.
    """
    submission = uuid4()
    wanted = {
        run.run_id: {
            "name": flow_run_name(run),
            "parameters": {"name": flow_run_name(run), "run_id": run.run_id, "document": digest},
            "tags": flow_tags(run),
            "work_queue_name": queue or None,
            "idempotency_key": f"{submission}-{run.run_id}",
        }
        for run in runs
    }
    created: dict[str, str] = {}
    for seconds in _RETRY_SECONDS:
        # SQLite refuses a whole request, `database is locked`, if another writer comes between its read and write.
        time.sleep(seconds)
        missing = [run_id for run_id in wanted if run_id not in created]
        body = [wanted[run_id] for run_id in missing]
        path: Any = f"/deployments/{deployment}/create_flow_run/bulk"  # a route that Prefect's client lacks
        results = client.request("POST", path, json=body).json()["results"]
        answers = list(zip(missing, results, strict=True))
        created |= {run_id: result["flow_run_id"] for run_id, result in answers if result["status"] == "CREATED"}
        if len(created) == len(wanted):
            return [created[run.run_id] for run in runs]
    refused = [result["error"] for _, result in answers if result["status"] != "CREATED"]
    message = f"the server created {len(created)} of {len(wanted)} flow runs"
    raise SpecError(
        Issue(message, given=refused[0], hint="submit again; work that a worker finishes until then is not repeated")
    )


def note_idle_pool(client: "SyncPrefectClient", home: Home, pool: str, say: Callable[[str], None]) -> None:
    """Prints a line if no worker takes flow runs from a pool at present. The worker of `rpg up` may still be
    starting."""
    services = running_services(home)
    is_ours = services is not None and pool == POOL and str(client.api_url).rstrip("/") == services.url
    deadline = time.monotonic() + (_WORKER_STARTS_SECONDS if is_ours else 0.0)
    while not (found := workers_of(client, pool)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not found:
        say(f"no worker takes runs from the pool {pool} now; `rpg worker --pool {pool}` starts one")


def flow_run_link(home: Home, url: str, flow_run_id: str) -> str:
    """Returns the URL of a flow run's page. On our own servers it is in the newer dashboard, which draws the artifacts'
    diagrams."""
    services = running_services(home)
    version = "/v2" if services is not None and services.url == url else ""
    return f"{url.removesuffix('/api')}{version}/runs/flow-run/{flow_run_id}"
