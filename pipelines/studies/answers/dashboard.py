"""A study on the dashboard: one Markdown artifact that is updated as trials end."""

import logging
from collections.abc import Sequence

from pipelines.home.home import Home
from pipelines.prefect.server.outbox import send
from pipelines.report.evidence import show
from pipelines.running.messages import Message
from pipelines.studies.answers.answer import amount, answer, with_interval
from pipelines.studies.answers.results import StudyRecord, Trial, cost_words
from pipelines.terminal.cells import markdown_cell

_MOST_ROWS = 50
_log = logging.getLogger("pipelines.studies")


def publish_study(home: Home, record: StudyRecord) -> None:
    """Updates the artifact `study-NAME` of the API that this process reports to: answer, counts, the best trials.

    If the API is unreachable, only the artifact is outdated until the next call.
    """
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():  # the client would start a server of its own
        return
    try:
        shown = {"type": "markdown", "key": f"study-{record.name}", "description": f"Study {record.name}"}
        fields = shown | {"data": study_markdown(home, record), "flow_run_id": flow_run.id or None}
        with get_client(sync_client=True) as client:
            send(client, Message("artifact" if flow_run.id else "page", fields))
    except Exception as error:  # any exception of the client: the study does not depend on it
        _log.warning("the dashboard does not show the progress of study %s: %s", record.name, error)


def study_markdown(home: Home, record: StudyRecord) -> str:
    """Returns the answer, the number of trials in each state, the confirmation, and the best trials as a table."""
    conclusion = answer(home, record)
    said = (record.question or record.name, conclusion.sentence, conclusion.note)
    question, sentence, note = map(markdown_cell, said)
    lines = [f"# {question}", "", f"**{sentence}**", "", note, ""]
    lines += [", ".join(_counts(record)), ""]
    if conclusion.arms:
        rows = [
            [result.arm.label, with_interval(record.first, result.mean), f"{len(result.arm.finished)} seeds"]
            for result in conclusion.arms
        ]
        lines += [*_table(["fresh seeds", record.first.metric, "runs"], rows), ""]
    paths = list(record.parameters)
    trials = sorted(record.trials, key=lambda trial: _rank(record, trial))[:_MOST_ROWS]
    shown = [
        [str(trial.number), _state(trial), _value(record, trial), *_settings(record, trial, paths)] for trial in trials
    ]
    lines += _table(["trial", "state", record.first.measure, *paths], shown)
    if len(record.trials) > _MOST_ROWS:
        lines += ["", f"The best {_MOST_ROWS} of {len(record.trials)} trials."]
    return "\n".join(lines)


def _counts(record: StudyRecord) -> list[str]:
    counts = [f"{record.num_ended} of {record.trials_wanted} trials ended"]
    states = ("finished", "pruned", "failed", "cancelled", "paused", "running")
    counts += [f"{number} {state}" for state in states if (number := record.count(state))]
    cost = cost_words(**record.spent)
    return [*counts, *([cost] if cost else [])]


def _rank(record: StudyRecord, trial: Trial) -> tuple[bool, float, int]:
    """Returns a sort key: finished trials by their value, then the others by their number."""
    merit = record.first.better(trial.value) if trial.finished else 0.0
    return not trial.finished, -merit, trial.number


def _state(trial: Trial) -> str:
    return f"{trial.state}{' (baseline)' if trial.baseline else ''}{f': {trial.reason}' if trial.reason else ''}"


def _value(record: StudyRecord, trial: Trial) -> str:
    if trial.interval is not None:
        return with_interval(record.first, trial.interval)
    return f"{amount(record.first, trial.last.value)} at step {trial.rung}" if trial.last else "-"


def _settings(record: StudyRecord, trial: Trial, paths: Sequence[str]) -> list[str]:
    params = record.params_of(trial)
    return [show(params[path]) if path in params else "-" for path in paths]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(markdown_cell(text) for text in row)} |" for row in lines]
