"""An experiment's page on the dashboard: its runs with their states and results, and links to their reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.terminal.cells import markdown_cell
from specs.machine.files import read_json
from specs.records import EVALUATION
from storage import Store


def experiment_markdown(home: Home, experiment: str, record_url: str = "") -> str:
    """Returns the page, from the record in this home; empty if this home does not have the experiment.

    Args:
        record_url: URL of the web application with the linked report pages; empty shows the names of their files
            instead.
    """
    record = read_json(home.experiment(experiment) / "experiment.json")
    run_ids: list[str] = record.get("current", [])
    if not run_ids:
        return ""
    runs = [read_json(home.run(run_id) / "run.json") for run_id in run_ids]
    statuses = [status_of(home, run_id) for run_id in run_ids]
    trains = any(run.get("kind") != EVALUATION for run in runs)
    varied = list(dict.fromkeys(path for run in runs for path in run.get("values", {}))) if trains else []
    is_over = not {"pending", "running"} & set(statuses)
    with Store.open(home.root) as store:
        accuracies = _accuracies(store, experiment)
        answer = [_answer(home, store, experiment), ""] if is_over else []
    datasets = sorted({dataset for of_run in accuracies.values() for dataset in of_run})
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    lines = [f"# {experiment}", "", *([markdown_cell(record["question"]), ""] if record.get("question") else [])]
    lines += [f"{len(run_ids)} runs: {counts}", ""]
    lines += answer
    if set(statuses) != {"pending"}:
        live = [f"[Live curves]({record_url}/live?of={quote(experiment)})"] if record_url else []
        lines += [" · ".join([_report("Report of all runs", home.experiment(experiment), record_url), *live]), ""]
    headings = ["run", "status", *varied, "seed" if trains else "model", *datasets, "report"]
    lines += [_row(headings), _row(["---"] * len(headings))]
    for run_id, run, status in zip(run_ids, runs, statuses, strict=True):
        cells = [
            _linked(run_id, read_json(home.run(run_id) / "state.json")),
            status,
            *(str(run.get("values", {}).get(path, "")) for path in varied),
            str(run.get("seed" if trains else "name", "")),
            *_shown(accuracies.get(run_id, {}), datasets),
            "" if status == "pending" else _report("report", home.run(run_id), record_url),
        ]
        lines.append(_row(cells))
    return "\n".join(lines)


def _answer(home: Home, store: Store, experiment: str) -> str:
    """Returns the joint answer of the runs, all of which have ended."""
    from pipelines.report.answer import answers_of, headline, note_looks
    from pipelines.report.evidence import experiment_groups

    groups = experiment_groups(home, experiment)
    found = answers_of(home, store, groups, [experiment])
    note_looks(home, [experiment])
    return f"**{markdown_cell(headline(found))}**"


def _accuracies(store: Store, experiment: str) -> dict[str, dict[str, float]]:
    """Returns the accuracies of each run's last measured weights, by run and by evaluation set with its metric."""
    sql = (
        "select run_id, metric || ' on ' || dataset, arg_max(value, step) from evaluations"
        " where (metric like 'mean@%' or metric like 'score@%')"
        " and run_id in (select run_id from runs where experiment = ?) group by 1, 2"
    )
    accuracies: dict[str, dict[str, float]] = {}
    for run_id, dataset, value in store.query(sql, (experiment,)).rows:
        accuracies.setdefault(run_id, {})[dataset] = value
    return accuracies


def _shown(accuracies: Mapping[str, float], datasets: Sequence[str]) -> list[str]:
    return [f"{accuracies[dataset]:.3f}" if dataset in accuracies else "" for dataset in datasets]


def _linked(run_id: str, state: Mapping[str, Any]) -> str:
    """Returns the run's id as a link to its flow run's page on the same dashboard."""
    flow_run = state.get("flow_run_id")
    return f"[{run_id}](/v2/runs/flow-run/{flow_run})" if flow_run else run_id


def _report(text: str, directory: Path, record_url: str) -> str:
    """Returns a link to the report of a run or an experiment, or the name of its file; empty without a report."""
    unit = f"{directory.parent.name}/{directory.name}"
    if record_url:
        return f"[{text}]({record_url}/{unit})"
    return f"{text}: `{unit}/report.html`" if (directory / "report.html").is_file() else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_cell, cells)) + " |"
