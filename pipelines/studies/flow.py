"""A study on a Prefect server: its submission, and the flow run in which a worker does all its trials."""

from datetime import UTC
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Cancelled, Completed, Failed

from pipelines.home import Home
from pipelines.services.deployments import STUDIES, ensure_deployment
from pipelines.services.server import client_settings
from pipelines.services.submit import api_url, flow_run_link
from pipelines.studies.answers.answer import answer
from pipelines.studies.answers.report import write_study_report
from pipelines.studies.answers.results import StudyRecord
from pipelines.studies.study import StudyInterruptedError
from pipelines.studies.workers import StudyStop, work
from specs.study_document import StudyDocument


@flow(name="rpg-study", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def run_study_flow(name: str, document: dict[str, Any]) -> "State[Any]":
    """Runs what is left of a study; each trial's runs are flow runs below this one.

    Args:
        name: what the dashboard calls it.
        document: the frozen study, `StudyDocument.to_json()`.
    """
    home, study = Home.from_environment(), StudyDocument.from_json(document)
    # A flow run that waited in the queue while the study was cancelled is cancelled with it.
    asked_for = this_flow_run.scheduled_start_time.astimezone(UTC).isoformat(timespec="milliseconds")
    try:
        data = work(study, home, StudyStop(home, study.study.name, asked_for), say=get_run_logger().info)
    except StudyInterruptedError:
        return Cancelled(message=f"{name} goes on from here when it is submitted again")
    record = StudyRecord.of(data)
    write_study_report(home, record.name)
    ending = Completed if record.finished else Failed
    return ending(message=answer(home, record).sentence)


def submit_study(document: StudyDocument, home: Home, profile: str = "", *, workers: int = 1) -> list[str]:
    """Hands a frozen study to a server's workers and returns the flow runs' pages on the dashboard.

    Args:
        profile: an API's URL or the name of a Prefect profile; empty: what `rpg up` started.
        workers: flow runs that share the study's trials.
    Raises:
        SpecError: no server is meant, or it does not answer.
    """
    url = api_url(home, profile)
    with client_settings(home, url):
        from prefect.client.orchestration import get_client
        from prefect.states import Scheduled

        name = f"study {document.study.name}"
        with get_client(sync_client=True) as client:
            deployment = ensure_deployment(client, STUDIES)
            created = [
                client.create_flow_run_from_deployment(
                    deployment,
                    name=name if workers == 1 else f"{name} ({number} of {workers})",
                    parameters={"name": name, "document": document.to_json()},
                    tags=[f"study:{document.study.name}"],
                    state=Scheduled(),
                )
                for number in range(1, workers + 1)
            ]
    return [flow_run_link(home, url, str(flow_run.id)) for flow_run in created]
