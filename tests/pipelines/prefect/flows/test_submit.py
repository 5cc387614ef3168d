"""`rpg up`, `submit`, cancellation from both sides, `down`: one real server and one real worker."""

import importlib
import json
import re
import shutil
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest
from live import SPEC, Lab, finished, kill
from playwright.sync_api import Page, sync_playwright
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.prefect.server.api import answers, is_healthy, running_services
from pipelines.prefect.server.credentials import auth_string, header_with
from pipelines.prefect.server.deployments import EXPERIMENTS, POOL, SCHEDULES, STUDIES, Deployment
from pipelines.prefect.services.supervisord import Supervisor
from specs.machine.files import read_json

LONG = ("training.steps=2000", "training.checkpoint.every_steps=500", "seeds=[0,1]")


@pytest.fixture
def stack(lab: Lab):
    """A home with the dashboard stack up, and its API's address."""
    result = lab.rpg("up", "--json")
    assert result.code == 0, result.err
    api = json.loads(result.out)["api"]
    assert result.err.splitlines() == [
        f"starting the Prefect server at {api}",
        "registering the flows and starting the worker",
        "waiting for the dashboard of studies",
    ]
    yield lab, api
    lab.rpg("down")


def call(url: str, body: Any = None, *, home: Home) -> Any:
    """Returns a home server's answer to a client with the password."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": header_with(auth_string(home))}
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def linked(run: dict[str, str]) -> str:
    """A submitted run's cell in the table on the experiment's page."""
    return f"| [{run['run_id']}](/v2/runs/flow-run/{run['flow_run_id']})"


@pytest.mark.more
def test_submitted_runs_are_executed_cancelled_and_seen_on_the_dashboard(stack):
    lab, api = stack

    def page() -> str:
        return str(call(f"{api}/artifacts/tiny/latest", home=lab.home)["data"])

    submitting = lab.rpg("submit", str(lab.spec), "--json", overrides=LONG)
    begun = ["checking the data and the model", f"submitting tiny to {api}", "  2 of 2 runs submitted"]
    assert submitting.err.splitlines() == begun
    submitted = json.loads(submitting.out)
    first, second = submitted
    assert first["link"].endswith(f"/v2/runs/flow-run/{first['flow_run_id']}")
    assert lab.state(second["run_id"])["status"] == "pending"
    shown = call(f"{api}/flow_runs/{first['flow_run_id']}", home=lab.home)
    assert shown["name"] == "tiny: seed 0"
    assert {"experiment:tiny", "seed:0", "objective:rpg"} <= set(shown["tags"])

    # One that waits is taken off the server; one that trains is stopped from the dashboard, as its Cancel button does.
    cancelled = lab.rpg("cancel", second["run_id"])
    assert cancelled.code == 0, cancelled.err
    assert call(f"{api}/flow_runs/{second['flow_run_id']}", home=lab.home)["state"]["type"] == "CANCELLED"
    wait_for(lambda: lab.progress(first["run_id"]) >= 2, what="step 2 in the worker")
    wait_for(lambda: f"{linked(first)} | running |" in page(), timeout=30, what="the page of the experiment")
    state = {"type": "CANCELLING", "name": "Cancelling"}
    call(f"{api}/flow_runs/{first['flow_run_id']}/set_state", {"state": state}, home=lab.home)
    lab.wait_until(first["run_id"], "cancelled", timeout=30)
    assert lab.training_pid() == 0
    wait_for(
        lambda: call(f"{api}/flow_runs/{first['flow_run_id']}", home=lab.home)["state"]["type"] == "CANCELLED",
        timeout=60,
        what="the dashboard",
    )

    # A run to its end, by the worker; after that the same spec here reports to the same server and finds it done.
    (short,) = json.loads(lab.rpg("submit", str(lab.spec), "--json").out)
    lab.wait_until(short["run_id"], "finished", timeout=180)
    wait_for(lambda: f"{linked(short)} | finished |" in page(), timeout=30, what="the page of the experiment")
    here = lab.rpg("run", str(lab.spec))
    assert here.code == 0, here.err
    assert here.err.count("cached") == 5
    assert call(f"{api}/flow_runs/{short['flow_run_id']}", home=lab.home)["state"]["type"] == "COMPLETED"
    newest = call(f"{api}/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1}, home=lab.home)[0]
    assert newest["id"] == lab.state(short["run_id"])["flow_run_id"] != short["flow_run_id"]
    assert newest["state"]["type"] == "COMPLETED"

    # Its report opens from the dashboard, also with the readers' password.
    reader = (lab.home.services / "secrets" / "reader").read_text()
    (address,) = re.findall(rf"\[report\]\((\S+/runs/{short['run_id']})\)", page())
    for shown in (auth_string(lab.home), reader):
        opened = urllib.request.Request(address, headers={"authorization": header_with(shown)})
        with urllib.request.urlopen(opened, timeout=60) as answer:
            assert "Where its values come from" in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(address, timeout=60)
    refused.value.close()
    assert refused.value.code == 401
    printed = lab.rpg("up").out
    assert f"\nto read only, at studies and record: {lab.home.services / 'secrets' / 'reader'}\n" in printed
    assert f"\nrecord: {address.partition('/runs/')[0]}\n" in printed

    assert_seen_in_a_browser(lab, api, short["run_id"])
    studies = read_json(lab.home.prefect / "server.json")["studies_url"]
    assert call(f"{studies}/api/studies", home=lab.home) == {"study_summaries": []}
    findings = {entry["name"]: entry for entry in json.loads(lab.rpg("doctor", "--json").out)}
    assert {findings[name]["status"] for name in ("dashboard", "worker", "studies", "password")} == {"ok"}
    assert findings["studies"]["message"] == studies
    assert lab.rpg("down").code == 0
    assert lab.processes() == []


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_fifty_submitted_runs_finish_and_every_row_of_them_is_in_sql(lab: Lab) -> None:
    assert lab.rpg("up", "--workers", "2").code == 0
    try:
        matrix = "matrix.product.training.optimizer.learning_rate=[1e-4, 2e-4]"
        overrides = (matrix, f"seeds={list(range(25))}", "training.steps=2")
        submitted = json.loads(lab.rpg("submit", str(lab.spec), "--json", overrides=overrides).out)
        run_ids = sorted(run["run_id"] for run in submitted)
        assert len(set(run_ids)) == 50

        def are_over() -> bool:
            statuses = {lab.state(run_id)["status"] for run_id in run_ids}
            assert statuses <= {"pending", "running", "finished"}
            return statuses == {"finished"}

        # A run takes 20 s of a core: it imports torch twice, and does little else.
        wait_for(are_over, timeout=5000, what="the runs' ends")
        assert lab.query("select run_id, status from runs order by run_id") == [(each, "finished") for each in run_ids]

        services = running_services(lab.home)

        def states() -> set[str]:
            shown = [call(f"{services.url}/flow_runs/{run['flow_run_id']}", home=lab.home) for run in submitted]
            return {flow_run["state"]["type"] for flow_run in shown}

        wait_for(lambda: states() == {"COMPLETED"}, what="the flow runs' ends")
        rows = lab.query("select run_id, step, list(name order by name) from metrics group by all order by all")
        assert [row[:2] for row in rows] == [(run_id, step) for run_id in run_ids for step in (1, 2)]
        names = rows[0][2]
        assert {"reward/mean", "grad_norm", "time/step"} <= set(names)
        assert len(set(names)) == len(names)
        assert all(row[2] == names for row in rows), "each step has every metric once"
        counted = "select run_id, count(*) from {} group by run_id order by run_id"
        assert lab.query(counted.format("rollouts")) == [(run_id, 32) for run_id in run_ids]
        assert lab.query(counted.format("stages where status = 'finished'")) == [(run_id, 5) for run_id in run_ids]
        # Two samples of each of ten problems, of the base model and of the trained one.
        assert lab.query(counted.format("evaluation_samples")) == [(run_id, 40) for run_id in run_ids]
    finally:
        lab.rpg("down")


def log_in(page: Page, dashboard: str, shown: str) -> None:
    """Enters the dashboard by its one field."""
    page.set_default_timeout(120_000)
    page.goto(dashboard)
    page.get_by_placeholder("admin:pass").fill(shown)
    page.get_by_role("button", name="Login").click()
    page.wait_for_url("**/dashboard**")


def assert_seen_in_a_browser(lab: Lab, api: str, run_id: str) -> None:
    """The plan's graph and the learning curve are drawn, not shown as text. Nothing is looked at without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return
    artifacts = {entry["key"]: entry["id"] for entry in call(f"{api}/artifacts/filter", {}, home=lab.home)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        log_in(page, api.removesuffix("/api"), auth_string(lab.home))
        for name, drawn in (("plan", "flowchart-v2"), ("learning-curve", "xychart")):
            page.goto(f"{api.removesuffix('/api')}/v2/artifacts/artifact/{artifacts[f'{run_id}-{name}']}")
            page.locator(f'[aria-roledescription="{drawn}"]').first.wait_for(timeout=120_000)
        browser.close()


@pytest.mark.parametrize("deployment", [EXPERIMENTS, SCHEDULES, STUDIES], ids=lambda deployment: deployment.name)
def test_the_entrypoint_of_a_deployment_is_the_flow_that_it_names(deployment: Deployment) -> None:
    module, _, function = deployment.entrypoint.rpartition(".")
    assert getattr(importlib.import_module(module), function).name == deployment.flow


@pytest.mark.long
def test_a_deployment_of_an_earlier_version_is_renewed_and_one_of_this_version_keeps_its_schedules(stack) -> None:
    lab, api = stack
    made = write_as_before(lab, api)
    assert "\nstudies: http://127.0.0.1:" in lab.rpg("up").out
    renewed = {name: call(f"{api}/deployments/name/{name}", home=lab.home) for name in made}
    assert {name: deployment["id"] for name, deployment in renewed.items()} == made
    assert {deployment["entrypoint"] for deployment in renewed.values()} == {EXPERIMENTS.entrypoint, STUDIES.entrypoint}
    assert all(deployment["job_variables"] == EXPERIMENTS.job for deployment in renewed.values())
    for deployment in made.values():
        call(f"{api}/deployments/{deployment}/schedules", [{"schedule": {"cron": "0 0 1 1 *"}}], home=lab.home)
    assert lab.rpg("up").code == 0
    assert [len(call(f"{api}/deployments/name/{name}", home=lab.home)["schedules"]) for name in made] == [1, 1]


@pytest.mark.long
def test_where_optuna_dashboard_is_not_installed_the_rest_starts_and_says_so(lab: Lab) -> None:
    uninstalled = "import sys; sys.modules['optuna_dashboard'] = None; from pipelines.cli import main; main()"
    result = finished(lab.start_program(uninstalled, "up"))
    try:
        assert result.code == 0
        said = result.err.splitlines()
        assert said[0] == "no dashboard of studies: pip install 'rpg-experiments[dashboard]'"
        assert [line.split(" ")[0] for line in said[1:]] == ["starting", "registering"]
        assert result.out.count("http://") == 2, "the dashboard and the record"
    finally:
        lab.rpg("down")


@pytest.mark.long
def test_what_dies_is_started_again_and_up_says_what_it_cannot_change(stack) -> None:
    lab, api = stack
    services = running_services(lab.home)
    supervisor = Supervisor(lab.home, services.control_port)
    before = {program: supervisor.pids(program) for program in ("api", "record", "studies", "worker")}
    assert all(len(pids) == 1 for pids in before.values())
    for pids in before.values():
        kill(pids[0])
    pages = (f"{services.studies_url}/ready", f"{services.record_url}/ready")
    wait_for(lambda: is_healthy(api) and all(map(answers, pages)), what="all pages, once more")
    again = lab.rpg("up", "--json")
    assert json.loads(again.out)["api"] == api
    after = {program: supervisor.pids(program) for program in before}
    assert all(len(pids) == 1 and pids != before[program] for program, pids in after.items()), "one of each"

    other = lab.rpg("up", "--port", "9", "--workers", "2")
    assert other.code == 1
    up_already = f"profile embedded is up at {services.dashboard} with 1 worker"
    assert other.err == f"{up_already}; `rpg down`, then `rpg up --port 9 --workers 2`\n"


@pytest.mark.long
def test_the_programs_of_a_killed_supervisord_end_and_the_next_up_starts_one_of_each(stack) -> None:
    lab, _ = stack
    services = running_services(lab.home)
    programs = [psutil.Process(services.supervisor.pid), *psutil.Process(services.supervisor.pid).children()]
    kill(services.supervisor.pid)
    assert lab.rpg("up").code == 0
    assert not any(program.is_running() for program in programs)
    started = running_services(lab.home)
    states = Supervisor(lab.home, started.control_port).states()
    assert {state.program: state.state for state in states if state.pid}.keys() == {
        "api",
        "record",
        "studies",
        "worker",
    }
    assert lab.rpg("down").err == "the services have stopped\n"
    assert lab.rpg("down").err == "no services were running\n"


@pytest.mark.long
def test_a_run_that_was_scheduled_by_an_earlier_version_runs_after_the_upgrade(stack) -> None:
    lab, api = stack
    services = running_services(lab.home)
    # No worker takes it meanwhile.
    Supervisor(lab.home, services.control_port).stop("worker")
    (submitted,) = json.loads(lab.rpg("submit", str(lab.spec), "--json").out)
    write_as_before(lab, api)
    assert lab.rpg("up").code == 0
    lab.wait_until(submitted["run_id"], "finished", timeout=240)


def write_as_before(lab: Lab, api: str) -> dict[str, str]:
    """Gives our deployments the entrypoints and the command of earlier versions. Returns their ids by name."""
    entrypoints = {EXPERIMENTS: "pipelines.flows.run_experiment", STUDIES: "pipelines.study_flow.run_study_flow"}
    job = {"command": "python -m pipelines.prefect.services.flow_process"}
    made = {}
    for deployment, entrypoint in entrypoints.items():
        flow = call(f"{api}/flows/", {"name": deployment.flow}, home=lab.home)["id"]
        place = {"work_pool_name": POOL, "job_variables": job}
        body = {"flow_id": flow, "name": deployment.name, "entrypoint": entrypoint, **place}
        made[f"{deployment.flow}/{deployment.name}"] = call(f"{api}/deployments/", body, home=lab.home)["id"]
    return made


def test_submitting_without_a_server_says_what_to_do(lab):
    lab.spec.write_text(SPEC)
    result = lab.rpg("submit", str(lab.spec))
    assert result.code == 2
    assert "no Prefect server" in result.err
    assert "checking the data" not in result.err, "its server comes first"
    assert "hint: start one with `rpg up`, or name one with --profile" in result.err


@pytest.mark.more
def test_an_unknown_profile_and_a_server_that_does_not_answer_are_the_users_to_put_right(lab):
    unknown = lab.rpg("submit", str(lab.spec), "--profile", "nowhere")
    assert unknown.code == 2
    assert "no such Prefect profile" in unknown.err
    silent = lab.rpg("submit", str(lab.spec), "--profile", "http://127.0.0.1:9")
    assert silent.code == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api" in silent.err
