"""Submission of a document to the workers of a Prefect server, after a check of the data and models that it names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from pipelines.prefect.flows.schedules import Schedule
    from pipelines.prefect.flows.submit import Submitted
    from pipelines.prefect.server.deployments import Priority
    from specs.document import Document
    from specs.study_document import StudyDocument


def submit(
    document: Document, home: Home, profile: str, *, pool: str = "", priority: Priority = "normal"
) -> list[Submitted]:
    """Submits an experiment's or an evaluation's runs; reports slow steps on stderr.

    Arguments and errors are those of `submit_document`; also raises SpecError if a stage would refuse the document's
    data or model.
    """
    from pipelines.prefect.flows.submit import submit_document

    _look(document, home, profile)
    return submit_document(document, home, profile, pool=pool, priority=priority, say=_say)


def schedule(
    document: Document, home: Home, profile: str, cron: str, *, pool: str = "", priority: Priority = "normal"
) -> Schedule:
    """Schedules the submission on the server at the times of a cron expression; see `submit`."""
    from pipelines.prefect.flows.schedules import schedule_document

    _look(document, home, profile)
    return schedule_document(document, home, profile, cron, pool=pool, priority=priority, say=_say)


def submit_study(document: StudyDocument, home: Home, profile: str, *, workers: int = 0, pool: str = "") -> list[str]:
    """Submits a study and returns the flow runs' pages; see `submit`. `workers`: 0 means the study's own number."""
    from pipelines.studies import flow

    _look(document, home, profile)
    workers = workers or document.study.parallel
    return flow.submit_study(document, home, profile, workers=workers, pool=pool, say=_say)


def _look(document: Document | StudyDocument, home: Home, profile: str) -> None:
    from pipelines.jobs.plan import runs_document
    from pipelines.jobs.preflight import refuse_what_a_stage_would
    from pipelines.planning.plan import make_plan
    from pipelines.prefect.server.client import api_url

    api_url(home, profile)  # before the check of the data, which takes long
    refuse_what_a_stage_would(document, make_plan(runs_document(document), home).runs, None)


def _say(note: str) -> None:
    print(note, file=sys.stderr)
