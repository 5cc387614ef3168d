"""A study in a worker: one flow run does all its trials, one after another."""

from functools import partial
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from pipelines.cancel import Stop
from pipelines.execute import execute_document
from pipelines.home import Home
from pipelines.report import write_study_report
from pipelines.report.study import answer, best_trial
from pipelines.study import StudyInterruptedError, run_study
from specs.study_document import StudyDocument


@flow(name="rpg-study", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def run_study_flow(name: str, document: dict[str, Any]) -> "State[Any]":
    """Runs what is left of a study; each trial's runs are flow runs below this one.

    Args:
        name: what the dashboard calls it.
        document: the frozen study, `StudyDocument.to_json()`.
    """
    home, stop = Home.from_environment(), Stop()
    logger = get_run_logger()
    execute = partial(execute_document, home=home, stop=stop)
    try:
        with stop.on_signals():
            record = run_study(StudyDocument.from_json(document), home, execute, say=logger.info)
    except StudyInterruptedError:
        return Cancelled(message=f"{name} goes on from here when it is submitted again")
    write_study_report(home, record["name"])
    ending = Completed if best_trial(record) else Failed
    return ending(message=answer(home, record))
