"""Handing frozen experiments to a Prefect server: which one, and one flow run per run."""

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pipelines.home import Home
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.running.experiment import flow_run_name, flow_tags
from pipelines.running.run import register_experiment, register_run
from pipelines.services.deployments import EXPERIMENTS, ensure_deployment
from pipelines.services.server import client_settings, is_healthy, running_services
from pipelines.state import RunState
from specs.errors import Issue, SpecError
from storage import liveness

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from specs.loader import Document


@dataclass(frozen=True, slots=True)
class Submitted:
    """One flow run that a worker will take up."""

    run_id: str
    name: str
    flow_run_id: str
    link: str
    """Its page on the dashboard."""

    def as_data(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def submit_document(document: "Document", home: Home, profile: str = "") -> list[Submitted]:
    """Makes a flow run for each run of the experiment, with the frozen document in its parameters.

    Args:
        profile: an API's URL or the name of a Prefect profile; empty: what `rpg up` started.
    Raises:
        SpecError: there is no such server, or it does not answer.
    """
    url = api_url(home, profile)
    plan = make_plan(document, home)
    register_experiment(home, document, plan.runs)
    with client_settings(home, url):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            deployment = ensure_deployment(client, EXPERIMENTS)
            return [_submit_run(client, deployment, url, document, run, home) for run in plan.runs]


def _submit_run(
    client: "SyncPrefectClient", deployment: UUID, url: str, document: "Document", run: RunPlan, home: Home
) -> Submitted:
    from prefect.states import Scheduled

    name = flow_run_name(run)
    created = client.create_flow_run_from_deployment(
        deployment,
        name=name,
        parameters={"name": name, "run_id": run.run_id, "document": document.to_json()},
        tags=flow_tags(run),
        state=Scheduled(),
    )
    register_run(home, document, run)
    state = RunState(home, run.run_id)
    if state.status != "running" or not liveness.is_executed(home.run(run.run_id), state.record):
        state.update(status="pending", reason="submitted", flow_run_id=str(created.id), api_url=url)
    return Submitted(run.run_id, name, str(created.id), flow_run_link(home, url, str(created.id)))


def flow_run_link(home: Home, url: str, flow_run_id: str) -> str:
    """A flow run's page. On a server of ours that of the newer dashboard, which draws the artifacts' diagrams."""
    services = running_services(home)
    version = "/v2" if services is not None and services.url == url else ""
    return f"{url.removesuffix('/api')}{version}/runs/flow-run/{flow_run_id}"


def cancel_flow_run(home: Home, url: str, flow_run_id: str) -> None:
    """Cancels a flow run that no worker has taken up yet. Raises SpecError where the server does not answer."""
    if not is_healthy(url, timeout=10.0):
        raise SpecError(Issue(f"the Prefect server at {url}, which has the run, does not answer"))
    with client_settings(home, url):
        from prefect.client.orchestration import get_client
        from prefect.states import Cancelled

        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(flow_run_id), Cancelled(message="rpg cancel"), force=True)


def api_url(home: Home, profile: str) -> str:
    """The URL of the API that a profile names; without one, that of `rpg up`. Raises SpecError where none answers."""
    if not profile:
        services = running_services(home)
        if services is None:
            raise SpecError(Issue("no Prefect server", hint="start one with `rpg up`, or name one with --profile"))
        url = services.url
    elif "://" in profile:
        url = profile.rstrip("/") if profile.rstrip("/").endswith("/api") else f"{profile.rstrip('/')}/api"
    else:
        url = _profile_url(profile)
    if not is_healthy(url, timeout=10.0):
        raise SpecError(Issue(f"no Prefect server answers at {url}", given=profile))
    return url


def _profile_url(name: str) -> str:
    path = Path.home() / ".prefect" / "profiles.toml"
    profiles: dict[str, Any] = {}
    if path.is_file():
        profiles = tomllib.loads(path.read_text(encoding="utf-8")).get("profiles", {})
    if name not in profiles:
        raise SpecError(Issue("no such Prefect profile", given=name, allowed=", ".join(profiles) or f"none in {path}"))
    url = profiles[name].get("PREFECT_API_URL")
    if not url:
        raise SpecError(Issue("the Prefect profile has no PREFECT_API_URL", given=name))
    return str(url).rstrip("/")
