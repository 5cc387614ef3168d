"""Submitting to a Prefect server that asks for a password, and cancelling there: one real server for all tests."""

import json
import re
import shutil
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from guarded import PASSWORD, Server
from live import SPEC, Lab, finished
from waiting import wait_for

from pipelines import load
from pipelines.home.home import Home
from pipelines.prefect.server.deployments import EXPERIMENTS
from pipelines.prefect.server.settings import client_environment

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def server(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = Home(tmp_path_factory.mktemp("server"))
    shutil.copytree(prepared_home / "prefect", home.prefect, ignore=shutil.ignore_patterns("*.json", "*.toml"))
    server = Server(home)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(lab: Lab, server: Server, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A home and a command line that know the server and its password."""
    monkeypatch.setenv("RPG_PROFILE", server.url)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    return lab


class Receiver:
    """An HTTP server on this machine that stores posted data in order of arrival."""

    def __init__(self) -> None:
        posted: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                posted.append({"path": self.path, **json.loads(self.rfile.read(length))})
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_arguments: Any) -> None:
                pass

        self.posted = posted
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


NOTIFY = """\
notify:
  - {type: webhook, url: env:HOOK, on: [failure, completion, guard]}
  - {type: slack, url: env:SLACK_HOOK, on: [failure]}
"""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Both addresses of NOTIFY lead to it."""
    receiver = Receiver()
    monkeypatch.setenv("HOOK", f"{receiver.url}/hook")
    monkeypatch.setenv("SLACK_HOOK", f"{receiver.url}/slack")
    try:
        yield receiver
    finally:
        receiver.close()


def submitted(client: Lab, *arguments: str, overrides: tuple[str, ...] = ()) -> list[dict[str, str]]:
    result = client.rpg("submit", str(client.spec), "--json", *arguments, overrides=overrides)
    assert result.code == 0, result.err
    runs: list[dict[str, str]] = json.loads(result.out)
    return runs


def test_a_document_is_sent_once_and_its_flow_runs_stay_small(client: Lab, server: Server) -> None:
    runs = submitted(client, overrides=("seeds=[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24]",))
    assert len({run["flow_run_id"] for run in runs}) == 25
    assert {client.state(run["run_id"])["flow_run_id"] for run in runs} == {run["flow_run_id"] for run in runs}
    shown = server.flow_run(runs[-1]["flow_run_id"])
    assert (shown["name"], shown["state_type"]) == ("tiny: seed 24", "SCHEDULED")
    assert {"experiment:tiny", "seed:24", "objective:rpg"} <= set(shown["tags"])
    assert len(json.dumps(shown)) < 4000
    key = f"document-{shown['parameters']['document']}"
    assert json.loads(server.call(f"/artifacts/{key}/latest")["data"])["source"]["name"] == "tiny"
    submitted(client, overrides=("seeds=[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24]",))
    kept = server.call("/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})
    assert len(kept) == 1


def test_the_pool_is_the_commands_else_the_specs_and_an_idle_one_is_noted(client: Lab, server: Server) -> None:
    client.spec.write_text(SPEC + "launcher: {type: local, pool: night}\n")
    result = client.rpg("submit", str(client.spec), "--json")
    assert "no worker takes runs from the pool night now; `rpg worker --pool night` starts one" in result.err
    by_spec = server.flow_run(json.loads(result.out)[0]["flow_run_id"])
    assert by_spec["work_pool_name"] == "night"
    by_command = server.flow_run(submitted(client, "--pool", "gpu")[0]["flow_run_id"])
    assert by_command["work_pool_name"] == "gpu"
    assert by_command["parameters"]["run_id"] == by_spec["parameters"]["run_id"]


def test_a_script_submits_runs_and_studies_as_the_command_does(
    client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(client.root))
    pages = load(client.spec, set={"seeds": [0, 1]}).submit()
    for seed, (run_id, page) in enumerate(pages):
        flow_run_id = page.rpartition("/")[2]
        assert client.state(run_id)["flow_run_id"] == flow_run_id
        shown = server.flow_run(flow_run_id)
        assert (shown["name"], shown["parameters"]["run_id"]) == (f"tiny: seed {seed}", run_id)
    study = {
        "name": "rates",
        "experiment": str(client.spec),
        "goal": {"dataset": "held_out", "metric": "mean@2"},
        "trials": 4,
        "parallel": 2,
        "parameters": {"training.optimizer.learning_rate": {"float": [1.0e-5, 1.0e-3], "log": True}},
    }
    workers = load(study).submit()
    assert [name for name, _ in workers] == ["rates", "rates"]
    kinds = {server.flow_run(page.rpartition("/")[2])["parameters"]["name"] for _, page in workers}
    assert kinds == {"study rates"}


@pytest.mark.long
def test_workers_are_given_runs_of_higher_priority_first(client: Lab, server: Server) -> None:
    for priority, seed in (("low", 1), ("normal", 2), ("high", 3)):
        submitted(client, "--pool", "queued", "--priority", priority, overrides=(f"seeds=[{seed}]",))
    waiting = server.call("/work_pools/queued/get_scheduled_flow_runs", {})
    assert [entry["flow_run"]["name"] for entry in waiting] == ["tiny: seed 3", "tiny: seed 2", "tiny: seed 1"]


@pytest.mark.parametrize("verb", ["submit", "worker", "cancel"])
def test_without_the_password_a_command_says_where_to_put_it(
    client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    arguments = {"submit": (str(client.spec),), "worker": (), "cancel": ("tiny",)}[verb]
    if verb == "cancel":
        submitted(client)
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    result = client.rpg(verb, *arguments)
    assert result.code == 2
    begun = f"checking the data and the model\nsubmitting tiny to {server.url}\n" if verb == "submit" else ""
    assert result.err == begun + (
        f"the Prefect server at {server.url} requires a user and a password\n"
        "  given: no user and password\n"
        "  hint: set PREFECT_API_AUTH_STRING=user:password, or use --profile with a Prefect profile that contains it\n"
        f"1 error; {'its runs continue' if verb == 'cancel' else 'nothing was run'}\n"
    )


def test_a_prefect_profile_brings_its_password(
    client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".prefect").mkdir()
    settings = f'PREFECT_API_URL = "{server.url}"\nPREFECT_API_AUTH_STRING = "{PASSWORD}"\n'
    (tmp_path / ".prefect" / "profiles.toml").write_text(f"[profiles.team]\n{settings}")
    assert submitted(client, "--profile", "team")


@pytest.mark.long
def test_a_flow_run_that_was_deleted_on_the_server_cannot_be_cancelled_and_says_so(client: Lab, server: Server) -> None:
    (run,) = submitted(client)
    server.call(f"/flow_runs/{run['flow_run_id']}", method="DELETE")
    result = client.rpg("cancel", run["run_id"])
    assert result.code == 2
    assert "the run's flow run was deleted on the server" in result.err
    assert "hint: no worker will start the run; `rpg submit FILE` submits it again" in result.err


@pytest.mark.long
def test_a_deployment_that_was_deleted_is_made_again(client: Lab, server: Server) -> None:
    submitted(client)
    deployment = server.call(f"/deployments/name/{EXPERIMENTS.flow}/{EXPERIMENTS.name}")["id"]
    server.call(f"/deployments/{deployment}", method="DELETE")
    (run,) = submitted(client)
    assert server.flow_run(run["flow_run_id"])["state_type"] == "SCHEDULED"


def test_a_run_that_has_ended_is_never_changed_by_a_cancel(client: Lab, server: Server) -> None:
    (run,) = submitted(client)
    state = {"state": {"type": "COMPLETED", "name": "Completed"}, "force": True}
    server.call(f"/flow_runs/{run['flow_run_id']}/set_state", state)
    result = client.rpg("cancel", run["run_id"])
    assert result.code == 2
    assert "the run is not running but finished" in result.err
    assert server.flow_run(run["flow_run_id"])["state_type"] == "COMPLETED"


@pytest.mark.long
def test_a_client_with_a_home_of_its_own_stops_a_worker_elsewhere_and_a_guard_that_acted_there_is_told(
    client: Lab, server: Server, receiver: Receiver, tmp_path: Path
) -> None:
    """The worker creates its pool; the client learns the run's true status."""
    client.spec.write_text(SPEC + NOTIFY)
    lasting = ("training.steps=5000", "training.guards=[{metric: entropy, above: 0.0, action: warn}]")
    machine = Lab(tmp_path / "machine", client.spec)
    shutil.copytree(client.root / "artifacts", machine.root / "artifacts")
    try:
        machine.start("worker", "--pool", "elsewhere")
        wait_for(lambda: "elsewhere" in pools(server), what="the worker's pool")
        (run,) = submitted(client, "--pool", "elsewhere", overrides=lasting)
        wait_for(lambda: machine.progress(run["run_id"]) >= 2, what="step 2 at the worker")
        assert client.state(run["run_id"])["status"] == "pending"
        result = client.rpg("cancel", run["run_id"])
        assert result.code == 0, result.err
        assert "is cancelled; if submitted again, it continues from its last checkpoint" in result.err
        assert server.flow_run(run["flow_run_id"])["state_type"] == "CANCELLED"
        machine.wait_until(run["run_id"], "cancelled", timeout=30)
        assert machine.training_pid() == 0
        assert client.state(run["run_id"])["status"] == "cancelled"
        row = f"| [{run['run_id']}](/v2/runs/flow-run/{run['flow_run_id']}) | cancelled | 0 |"
        wait_for(lambda: row in page(server, "tiny"), timeout=30, what="the experiment's page")
        wait_for(lambda: receiver.posted, timeout=60, what="the guard's notice")
        assert receiver.posted[0]["event"] == "guard"
        assert re.fullmatch(r"step \d: entropy .* is above 0", receiver.posted[0]["message"])
    finally:
        machine.clean_up()


def page(server: Server, experiment: str) -> str:
    """An experiment's page on the dashboard."""
    text: str = server.call(f"/artifacts/{experiment}/latest")["data"]
    return text


def pools(server: Server) -> list[str]:
    return [pool["name"] for pool in server.call("/work_pools/filter", {})]


def test_failures_and_completions_are_told_by_the_server(client: Lab, server: Server, receiver: Receiver) -> None:
    client.spec.write_text(SPEC.replace("name: tiny", "name: noticed") + NOTIFY)
    failing, finishing = submitted(client, overrides=("seeds=[1,2]",))
    failed = {"type": "FAILED", "name": "Failed", "message": 'train: "out" of memory'}
    finished = {"type": "COMPLETED", "name": "Completed", "message": "all stages done"}
    for run, state in ((failing, failed), (finishing, finished)):
        server.call(f"/flow_runs/{run['flow_run_id']}/set_state", {"state": state, "force": True})
    wait_for(lambda: len(receiver.posted) == 3, timeout=60, what="three notices")
    notices = {(notice.pop("path"), notice.get("event")): notice for notice in receiver.posted}
    link = notices["/hook", "failure"].pop("link")
    assert link.endswith(f"/runs/flow-run/{failing['flow_run_id']}")
    about = {"experiment": "noticed", "run": "noticed: seed 1", "message": 'train: "out" of memory'}
    assert notices["/hook", "failure"] == {"event": "failure", **about}
    assert notices["/hook", "completion"]["run"] == "noticed: seed 2"
    assert notices["/slack", None] == {"text": f'noticed: seed 1: failed: train: "out" of memory {link}'}


@pytest.mark.long
def test_a_new_submission_replaces_the_notices_and_their_addresses(
    client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example.org/of-mine")
    monkeypatch.setenv("SLACK_HOOK", "https://hooks.example.org/slack")
    monkeypatch.setenv("MAIL", "smtps://me:correct@mail.example.org:465")
    mail = "  - {type: email, server: env:MAIL, sender: rpg@example.org, to: [a@example.org]}\n"
    client.spec.write_text(SPEC.replace("name: tiny", "name: told") + NOTIFY + mail)
    submitted(client)
    submitted(client)
    assert automations(server) == [
        "told: completion by webhook 0",
        "told: failure by email 2",
        "told: failure by slack 1",
        "told: failure by webhook 0",
        "told: guard by email 2",
        "told: guard by webhook 0",
    ]
    shown = json.dumps(server.call("/block_documents/filter", {}))
    assert shown.count("told-notify-") == 3
    assert "of-mine" not in shown
    assert "correct" not in shown
    client.spec.write_text(SPEC.replace("name: tiny", "name: told"))
    submitted(client)
    assert automations(server) == []
    assert "told-notify-" not in json.dumps(server.call("/block_documents/filter", {}))


def automations(server: Server) -> list[str]:
    """Names of the automations of the experiment `told`."""
    tagged = server.call("/automations/filter", {"automations": {"tags": {"all_": ["experiment:told"]}}})
    return sorted(automation["name"] for automation in tagged)


def test_an_address_that_is_not_on_this_machine_is_told_at_its_line_before_anything_is_submitted(
    client: Lab, server: Server
) -> None:
    client.spec.write_text(SPEC + NOTIFY)
    before = len(server.call("/flow_runs/filter", {"limit": 200}))
    result = client.rpg("submit", str(client.spec))
    assert result.code == 2
    assert ": notify.0.url: url is env:HOOK, and there is no variable HOOK on this machine" in result.err
    assert len(server.call("/flow_runs/filter", {"limit": 200})) == before


@pytest.mark.long
def test_a_schedule_is_listed_replaced_and_removed(client: Lab, server: Server) -> None:
    wrong = client.rpg("submit", str(client.spec), "--cron", "0 99 * * *")
    assert (wrong.code, wrong.err.splitlines()[1]) == (2, "no cron expression")
    for cron, pool in (("0 3 * * *", "rpg"), ("5 4 * * 1", "night")):
        assert client.rpg("submit", str(client.spec), "--cron", cron, "--pool", pool).out == f"tiny  {cron}\n"
        assert client.rpg("schedules").out == f"tiny  {cron}  pool {pool}\n"
    (deployment,) = [entry for entry in server.call("/deployments/filter", {}) if entry["schedules"]]
    assert (deployment["name"], deployment["work_pool_name"]) == ("schedules-night", "night")
    (schedule,) = deployment["schedules"]
    assert schedule["schedule"] == {"cron": "5 4 * * 1", "timezone": "UTC", "day_or": True}
    assert schedule["parameters"]["priority"] == "normal"
    assert client.rpg("schedules", "--remove", "tiny").code == 0
    assert client.rpg("schedules").out == ""
    gone = client.rpg("schedules", "--remove", "tiny")
    assert (gone.code, gone.err.splitlines()[0]) == (2, "the experiment has no schedule")


@pytest.mark.long
def test_a_schedule_submits_what_is_left_to_do(client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow that a worker calls at the scheduled time, called here."""
    client.spec.write_text(SPEC.replace("name: tiny", "name: nightly"))
    assert client.rpg("submit", str(client.spec), "--cron", "0 3 * * *").code == 0
    deployment = server.call("/deployments/name/rpg-submit/schedules")
    parameters = deployment["schedules"][0]["parameters"]
    program = (
        "import json, sys; from pipelines.prefect.flows.schedules import submit_scheduled;"
        " print(submit_scheduled(**json.loads(sys.argv[1]), return_state=True).message)"
    )
    for variable, value in client_environment(client.home, server.url, PASSWORD).items():
        monkeypatch.setenv(variable, value)
    result = finished(client.start_program(program, json.dumps(parameters)))
    assert result.out == "nightly: 1 runs submitted\n", result.err
    flow_runs = server.call("/flow_runs/filter", {"flow_runs": {"tags": {"all_": ["experiment:nightly"]}}})
    assert [flow_run["state_type"] for flow_run in flow_runs] == ["SCHEDULED"]


class MailServer(socketserver.StreamRequestHandler):
    """Takes mail as an SMTP server does, and keeps it."""

    received: ClassVar[list[str]] = []

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().decode().strip():
            if line.upper() == "DATA":
                self.wfile.write(b"354 go on\r\n")
                self.received.append("".join(iter(lambda: self.rfile.readline().decode(), ".\r\n")))
            elif line.upper() == "QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.received.append(line)
            self.wfile.write(b"250 ok\r\n")


@pytest.mark.long
def test_mail_goes_through_the_server_that_the_reference_names(
    client: Lab, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), MailServer) as mail:
        threading.Thread(target=mail.serve_forever, daemon=True).start()
        monkeypatch.setenv("MAIL", f"smtp://127.0.0.1:{mail.server_address[1]}")
        notice = "notify: [{type: email, server: env:MAIL, sender: rpg@lab.org, to: [a@lab.org, b@lab.org]}]\n"
        client.spec.write_text(SPEC.replace("name: tiny", "name: mailed") + notice)
        (run,) = submitted(client)
        state = {"type": "FAILED", "name": "Failed", "message": "out of memory"}
        server.call(f"/flow_runs/{run['flow_run_id']}/set_state", {"state": state, "force": True})
        wait_for(lambda: "out of memory" in "".join(MailServer.received), timeout=60, what="the mail")
        mail.shutdown()
    text = "\n".join(MailServer.received)
    assert "mail FROM:<rpg@lab.org>" in text
    assert {"rcpt TO:<a@lab.org>", "rcpt TO:<b@lab.org>"} <= set(MailServer.received)
    assert "Subject: mailed: seed 0: failed" in text
