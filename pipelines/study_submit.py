"""Hands a frozen study to a Prefect server: one flow run for the whole of it."""

from typing import TYPE_CHECKING
from uuid import UUID

from pipelines.home import Home
from pipelines.server import client_settings
from pipelines.submit import POOL, api_url, ensure_deployment, flow_run_link
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

DEPLOYMENT = "studies"
ENTRYPOINT = "pipelines.study_flow.run_study_flow"


def submit_study(document: StudyDocument, home: Home, profile: str = "") -> str:
    """Hands a frozen study to a server's workers and returns the flow run's page on the dashboard.

    Args:
        profile: an API's URL or the name of a Prefect profile; empty: what `rpg up` started.
    Raises:
        SpecError: no server is meant, or it does not answer.
    """
    url = api_url(home, profile)
    with client_settings(home, url):
        from prefect.client.orchestration import get_client
        from prefect.states import Scheduled

        name = f"study {document.study.name}"
        with get_client(sync_client=True) as client:
            created = client.create_flow_run_from_deployment(
                _deployment(client),
                name=name,
                parameters={"name": name, "document": document.to_json()},
                tags=[f"study:{document.study.name}"],
                state=Scheduled(),
            )
    return flow_run_link(home, url, str(created.id))


def _deployment(client: "SyncPrefectClient") -> UUID:
    from pipelines.study_flow import run_study_flow

    ensure_deployment(client)
    return client.create_deployment(
        flow_id=client.create_flow(run_study_flow),
        name=DEPLOYMENT,
        entrypoint=ENTRYPOINT,
        work_pool_name=POOL,
        enforce_parameter_schema=False,
        description="All trials of a hyperparameter study, one after another.",
    )
