"""A study on a Prefect server: its submission, and the flow run in which a worker executes all its trials."""

import os
from collections.abc import Callable
from datetime import UTC
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Cancelled, Completed, Failed

from pipelines.home.home import Home
from pipelines.prefect.flows import frozen
from pipelines.prefect.flows.flow import is_called_off_here
from pipelines.prefect.flows.submit import flow_run_link, note_idle_pool
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.deployments import POOL, STUDIES, ensure_deployment
from pipelines.prefect.server.outbox import Outbox
from pipelines.processes.stop import GIVEN_BACK
from pipelines.running.run import WORKER
from pipelines.studies.answers.answer import answer
from pipelines.studies.answers.report import write_study_report
from pipelines.studies.answers.results import StudyRecord
from pipelines.studies.trials import StudyInterruptedError
from pipelines.studies.workers import StudyStop, note_submission, work
from specs.machine.lease import RunBusyError, acquire
from specs.study_document import StudyDocument

_CLOSE_SECONDS = 5.0
"""Longest time in seconds that a flow waits for the server at its end."""


@flow(name="rpg-study", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def run_study_flow(name: str, document: str) -> "State[Any]":
    """Runs the unfinished part of a study. The runs of each trial are flow runs below this one.

    Args:
        name: the flow run's name on the dashboard.
        document: the digest of the frozen study, which the server keeps.
    """
    if is_called_off_here():
        return Cancelled(message="cancelled before it began")
    home, study = Home.from_environment(), StudyDocument.from_json(frozen.fetch(document))
    outbox = Outbox(home, this_flow_run.id)
    outbox.start()
    # A flow run that waits in the queue during the study's cancellation is cancelled with it.
    asked_for = this_flow_run.scheduled_start_time.astimezone(UTC).isoformat(timespec="milliseconds")
    directory = home.study_flow(study.study.name, this_flow_run.id)
    try:
        with acquire(directory, worker=os.environ.get(WORKER, "")) as lease:
            stop = StudyStop(home, study.study.name, asked_for, outbox=outbox, lease=lease)
            ending = _work(name, study, home, stop)
            goes_on = stop.goes_on if ending is None else ""
    except RunBusyError:
        outbox.close(_CLOSE_SECONDS)
        raise Abort(f"another process executes this flow run of {name}") from None
    except BaseException:
        outbox.close(_CLOSE_SECONDS)
        raise
    if not outbox.close(_CLOSE_SECONDS, schedule=goes_on == GIVEN_BACK):
        raise Abort("the Prefect server does not answer; its pending updates are kept")
    if ending is None:
        raise Abort(goes_on)
    return ending


def _work(name: str, study: StudyDocument, home: Home, stop: StudyStop) -> "State[Any] | None":
    """Executes the unfinished part of the study and returns the flow's last state.

    Returns None if the server's state has to stay, because the flow run continues later: `StudyStop.goes_on`.
    """
    try:
        data = work(study, home, stop, say=get_run_logger().info)
    except StudyInterruptedError:
        if stop.goes_on:
            return None
        return Cancelled(message=f"{name} continues from here when it is submitted again")
    record = StudyRecord.of(data)
    write_study_report(home, record.name)
    ending = Completed if record.finished else Failed
    return ending(message=answer(home, record).sentence)


def submit_study(
    document: StudyDocument,
    home: Home,
    profile: str = "",
    *,
    workers: int = 1,
    pool: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Submits a frozen study to a server's workers and returns the flow runs' pages on the dashboard.

    Args:
        profile: an API's URL or the name of a Prefect profile; empty means the server of `rpg up`.
        workers: flow runs that share the study's trials.
        pool: the work pool; empty means the pool of the study's experiment, else that of `rpg up`.
        say: receives a line before each step that takes a while, and one if no worker takes flow runs from the pool at
            present.
    Raises:
        SpecError: no server is named, it does not answer, or it refuses.
    """
    url = api_url(home, profile)
    pool = pool or document.experiment.experiment.launcher.pool or POOL
    name = f"study {document.study.name}"
    say(f"submitting {name} to {url}")
    with prefect_client(home, url) as client:
        deployment = ensure_deployment(client, STUDIES, pool)
        digest = frozen.send(client, document.to_json(), f"Frozen {name}")
        created = [
            client.create_flow_run_from_deployment(
                deployment,
                name=name if workers == 1 else f"{name} ({number} of {workers})",
                parameters={"name": name, "document": digest},
                tags=[f"study:{document.study.name}"],
            )
            for number in range(1, workers + 1)
        ]
        note_submission(home, document.study.name, url)
        note_idle_pool(client, home, pool, say)
    return [flow_run_link(home, url, str(flow_run.id)) for flow_run in created]
