"""An experiment's page on the dashboard says that a run has begun, and is not rewritten for each of many runs."""

import os
import time
from pathlib import Path

from live import SPEC

from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from pipelines.prefect.flows import dashboard
from pipelines.prefect.server.outbox import Outbox, unsent_file
from pipelines.running.run import RunExecution, register_experiment, register_runs
from specs.loader import load_document
from specs.machine.files import read_json


def begin(execution: RunExecution) -> None:
    execution.outbox = Outbox(execution.home, execution.run_id)
    execution.begin(execution.run_id)


def page(execution: RunExecution) -> str:
    """The experiment's page that an execution has put out for the server; empty where it has not."""
    execution.outbox.close(0)
    messages = read_json(unsent_file(execution.home, execution.run_id)).get("messages", [])
    return next((message["fields"]["data"] for message in messages if message["fields"]["key"] == "tiny"), "")


def test_the_page_says_that_a_run_has_begun_but_not_for_every_one_of_many(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC + "seeds: [0, 1]\n")
    document, home = load_document(tmp_path / "tiny.yaml"), Home(tmp_path / "home")
    plans = make_plan(document, home).runs
    register_runs(home, document, plans, durable=False)
    register_experiment(home, document, plans)
    first, second = (RunExecution(document, plan.run_id, home) for plan in plans)

    begin(first)
    dashboard.publish_begin(first)
    assert not page(first), "the server has not named the reports' address yet"
    first.outbox.record_url = "http://reports"
    dashboard.publish_begin(first)
    assert "2 runs: 1 running, 1 pending" in page(first)
    begin(second)
    second.outbox.record_url = "http://reports"
    dashboard.publish_begin(second)
    assert not page(second), "it was renewed a moment ago"
    renewed = home.prefect / "pages" / "tiny"
    os.utime(renewed, times=(time.time() - 60, time.time() - 60))
    dashboard.publish_begin(second)
    assert "2 runs: 2 running" in page(second)
    shown_at = renewed.stat().st_mtime_ns
    dashboard.publish_begin(first)
    assert renewed.stat().st_mtime_ns == shown_at, "the page of the second run's begin shows the first as well"


def test_a_trial_of_a_study_renews_no_page_of_its_experiment(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml"), Home(tmp_path / "home")
    (plan,) = make_plan(document, home).runs
    for in_study in (True, False):
        execution = RunExecution(document, plan.run_id, home, in_study=in_study)
        begin(execution)
        execution.outbox.record_url = "http://reports"
        dashboard.publish_begin(execution)
        dashboard.publish_experiment(execution)
        assert bool(page(execution)) is not in_study
