"""The API proxy of our servers: which requests it accepts, and what accepted requests may have run."""

import asyncio
import base64
import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import websockets
from listeners import listeners, rows, rows_on_page
from live import SPEC, Lab, copy_prefect_database, finished
from waiting import wait_for

from pipelines.prefect.server.api import Services, running_services
from pipelines.prefect.server.credentials import auth_string
from pipelines.prefect.server.deployments import EXPERIMENTS
from pipelines.prefect.server.proxy import objection
from pipelines.prefect.server.settings import origins_of
from pipelines.prefect.services.supervisord import Supervisor
from specs.machine.files import read_json
from tests.pipelines.prefect.flows.test_submit import log_in

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("signals_arrive")]

NOBODY = 65534
"""An ordinary user's number, who owns nothing of ours."""
CHROMIUM = shutil.which("chromium")
FOREIGN = "http://elsewhere.example"


class Up:
    """A home whose services are up, and calls of its API without a password."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        services = running_services(lab.home)
        assert services is not None
        self.services: Services = services

    def secret(self, name: str = "auth") -> str:
        return (self.lab.home.services / "secrets" / name).read_text().strip()

    def call(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Any:
        """Returns the API's answer to a client with the password. Asked again, as Prefect's own clients do, while its
        SQLite is locked by another process (503)."""
        headers = {"authorization": basic(self.secret()), "content-type": "application/json"} | headers
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.services.url + path, data=data, headers=headers, method=method)
        for attempt in range(10):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or attempt == 9:
                    raise
                time.sleep(2**attempt / 10)
        raise AssertionError

    def deployment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/deployments/name/{EXPERIMENTS.flow}/{EXPERIMENTS.name}")
        return found

    def state_of(self, flow_run: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/flow_runs/{flow_run['id']}")["state"]
        return found


def basic(shown: str) -> str:
    return f"Basic {base64.b64encode(shown.encode()).decode()}"


def status(url: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer; a name's `_` is a header's `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {name.lower(): value for name, value in error.headers.items()}


@contextmanager
def services_up(prepared_home: Path, directory: Path) -> Iterator[Up]:
    lab = Lab(directory / "home", directory / "tiny.yaml")
    lab.spec.write_text(SPEC)
    copy_prefect_database(prepared_home, lab.root)
    shutil.copytree(prepared_home / "artifacts", lab.root / "artifacts")
    try:
        result = lab.rpg("up")
        assert result.code == 0, result.err
        yield Up(lab)
    finally:
        lab.rpg("down")
        lab.clean_up()


@pytest.fixture(scope="module")
def up(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A home whose embedded profile is up."""
    with services_up(prepared_home, tmp_path_factory.mktemp("up")) as services:
        yield services


def as_user(uid: int, *request: Any, **headers: str) -> int:
    """The status that a process of another user gets."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, str(status(*request, **headers)[0]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as told:
        answered = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(answered)


def a_command(mark: Path) -> dict[str, Any]:
    return {"name": "attack", "job_variables": {"command": f"touch {mark}"}, "state": {"type": "SCHEDULED"}}


@pytest.mark.parametrize(
    "uid",
    [
        pytest.param(os.getuid(), id="the same user"),
        pytest.param(
            NOBODY, id="another user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="root alone becomes another")
        ),
    ],
)
def test_who_has_no_password_starts_no_command(up: Up, uid: int, tmp_path: Path) -> None:
    mark, url = tmp_path / "mark", up.services.url
    create = f"{url}/deployments/{up.deployment()['id']}/create_flow_run"
    asked: Any = as_user if uid != os.getuid() else (lambda _uid, *request, **headers: status(*request, **headers)[0])
    assert asked(uid, create, a_command(mark), content_type="application/json") == 401
    assert asked(uid, create, a_command(mark), content_type="text/plain") == 401
    assert asked(uid, f"{url}/flow_runs/filter", {}, content_type="application/json") == 401
    assert asked(uid, f"{url}/flow_runs/filter", {}, authorization=basic("rpg:wrong")) == 401
    assert asked(uid, f"{url}/admin/settings") == 401
    assert asked(uid, f"{url}/openapi.json") == 401
    assert asked(uid, f"{up.services.studies_url}/api/studies") == 401
    assert asked(uid, f"{up.services.record_url}/waiting") == 401
    assert [flow_run for flow_run in up.call("/flow_runs/filter", {}) if flow_run["name"] == "attack"] == []
    assert not mark.exists()
    # What would let another user in stands in directories that are their owner's alone.
    services = up.lab.home.services
    assert {path.stat().st_mode & 0o077 for path in (services, services / "secrets", *services.glob("*.json"))} == {0}


def test_the_password_stands_on_no_command_line_and_in_no_log(up: Up) -> None:
    secrets = [path.read_text().strip().partition(":")[2] for path in (up.lab.home.services / "secrets").iterdir()]
    secrets = [secret for secret in secrets if secret]
    assert len(secrets) >= 3
    shown = [" ".join(process.cmdline()) for process in up.lab.processes()]
    shown += [path.read_text(errors="replace") for path in up.lab.home.logs.rglob("*") if path.is_file()]
    assert [text[:200] for text in shown if any(secret in text for secret in secrets)] == []


def test_a_request_under_another_name_or_of_another_origin_is_refused(up: Up) -> None:
    url, shown = up.services.url, basic(up.secret())
    port = url.rpartition(":")[2].removesuffix("/api")
    for host in ("elsewhere.example", f"elsewhere.example:{port}", "127.0.0.1.elsewhere.example"):
        assert status(f"{url}/admin/version", host=host, authorization=shown)[0] == 403
        assert status(up.services.dashboard, host=host)[0] == 403
        assert status(f"{up.services.studies_url}/api/studies", host=host, authorization=shown)[0] == 403
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert status(f"{url}/admin/version", host=host, authorization=shown)[0] == 200
    for origin in (FOREIGN, "null", "http://127.0.0.1:1", f"http://127.0.0.1.elsewhere.example:{port}"):
        answered, headers = status(f"{url}/admin/version", origin=origin, authorization=shown)
        assert answered == 403
        assert "access-control-allow-origin" not in headers
        asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
        answered, headers = status(f"{url}/flow_runs/filter", method="OPTIONS", origin=origin, **asked)
        assert answered == 403
        assert not [name for name in headers if name.startswith("access-control")]
        known = f"http://localhost:{port}"
        answered, headers = status(f"{url}/flow_runs/filter", method="OPTIONS", origin=known, **asked)
        assert (answered, headers["access-control-allow-origin"]) == (200, known)


@pytest.mark.parametrize("path", ["/events/in", "/events/out", "/logs/out"])
def test_a_websocket_is_refused_without_the_password_and_of_another_origin(up: Up, path: str) -> None:
    address = up.services.url.replace("http://", "ws://") + path
    wanted = {"/events/in": None, "/events/out": {"type": "filter", "filter": {}}, "/logs/out": {"type": "filter"}}

    async def greeted(token: str, **options: Any) -> str:
        try:
            async with websockets.connect(address, subprotocols=["prefect"], **options) as socket:
                await socket.send(json.dumps({"type": "auth", "token": token}))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 20))["type"]
                if wanted[path]:
                    await socket.send(json.dumps(wanted[path]))
                return str(answer)
        except (websockets.exceptions.InvalidStatus, websockets.exceptions.ConnectionClosed) as refused:
            return type(refused).__name__

    async def without_subprotocol() -> str:
        try:
            async with websockets.connect(address) as socket:
                await asyncio.wait_for(socket.recv(), 20)
                return "answered"
        except (websockets.exceptions.InvalidStatus, websockets.exceptions.ConnectionClosed) as refused:
            return type(refused).__name__

    assert asyncio.run(greeted(up.secret())) == "auth_success"
    assert "Connection" in asyncio.run(greeted("rpg:wrong"))
    assert asyncio.run(without_subprotocol()) != "answered"
    assert asyncio.run(greeted(up.secret(), origin=FOREIGN)) == "InvalidStatus"
    assert asyncio.run(greeted(up.secret("reader"))) != "auth_success"
    foreign_host = {"additional_headers": {"Host": "elsewhere.example"}}
    assert asyncio.run(greeted(up.secret(), **foreign_host)) != "auth_success"


@contextmanager
def page_of_another_origin(script: str) -> Iterator[str]:
    """The address of a page with this script, at a port of its own."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<!doctype html><title>page</title><script>{script}</script>".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.needs("chromium")
def test_a_page_of_another_origin_neither_reads_nor_starts_anything(up: Up, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    create = f"{up.services.url}/deployments/{up.deployment()['id']}/create_flow_run"
    body = json.dumps(json.dumps(a_command(tmp_path / "mark")))
    script = f"""
        const tries = [
            ["{create}", {{method: "POST", body: {body}, headers: {{"content-type": "application/json"}}}}],
            ["{create}", {{method: "POST", body: {body}, headers: {{"content-type": "text/plain"}}, mode: "no-cors"}}],
            ["{up.services.url}/admin/settings", {{}}],
            ["{up.services.url}/health", {{}}],
            ["{up.services.dashboard}/ui-settings", {{}}],
            ["{up.services.studies_url}/api/studies", {{}}],
        ];
        Promise.all(tries.map(([url, options]) => fetch(url, options).then(
            answer => answer.type === "opaque" ? "opaque" : "read " + answer.status, error => "refused"
        ))).then(outcomes => {{ window.outcomes = outcomes; }});
    """
    with page_of_another_origin(script) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function("window.outcomes", timeout=120_000)
        outcomes = page.evaluate("window.outcomes")
        browser.close()
    assert outcomes == ["refused", "opaque", *["refused"] * 4]
    assert [flow_run for flow_run in up.call("/flow_runs/filter", {}) if flow_run["name"] == "attack"] == []
    assert not (tmp_path / "mark").exists()


@pytest.mark.needs("chromium")
def test_the_dashboard_is_entered_with_what_its_file_holds_and_shows_what_it_asks_for(up: Up) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        refused: list[str] = []
        page.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
        log_in(page, up.services.dashboard.replace("127.0.0.1", "localhost"), up.secret())
        page.goto(f"{up.services.dashboard.replace('127.0.0.1', 'localhost')}/v2/deployments")
        page.get_by_text(EXPERIMENTS.name).first.wait_for()
        browser.close()
    assert refused == []


def test_the_worker_runs_no_command_but_ours_whoever_asks(up: Up, tmp_path: Path) -> None:
    ours, (first, second, third, fourth) = up.deployment(), (tmp_path / name for name in "abcd")
    create = f"/deployments/{ours['id']}/create_flow_run"
    asked = {
        "job variables": up.call(create, a_command(first)),
        "environment": up.call(
            create, {"name": "attack", "job_variables": {"env": {"PYTHONPATH": str(tmp_path)}}, "state": None}
        ),
        "directory": up.call(create, {"name": "attack", "job_variables": {"working_dir": str(tmp_path)}}),
    }
    shell = [{"prefect.deployments.steps.run_shell_script": {"script": f"touch {second}"}}]
    flow = up.call("/flows/", {"name": f"evil-{uuid4()}"})["id"]
    for flow_id, name in ((flow, "evil"), (ours["flow_id"], "evil")):
        other = up.call(
            "/deployments/",
            {
                "name": name,
                "flow_id": flow_id,
                "work_pool_name": "rpg",
                "entrypoint": "pipelines.prefect.flows.flow.execute_run",
                "pull_steps": shell,
                "job_variables": {"command": f"touch {third}"},
            },
        )
        asked[f"deployment of {flow_id}"] = up.call(f"/deployments/{other['id']}/create_flow_run", {"name": "attack"})
    template = up.call("/work_pools/rpg")["base_job_template"]
    changed = {
        "job_configuration": {"command": f"touch {fourth}", "env": {"PYTHONPATH": str(tmp_path)}},
        "variables": {"type": "object", "properties": {}},
    }
    up.call("/work_pools/rpg", {"base_job_template": changed}, "PATCH")
    nonsense = {"name": "nonsense", "run_id": "no-such-run", "document": "no such document"}
    try:
        asked["pool"] = up.call(create, {"name": "attack", "parameters": nonsense})
        states = {}
        for way, flow_run in asked.items():
            wait_for(
                lambda flow_run=flow_run: up.state_of(flow_run)["type"] in ("FAILED", "CRASHED", "COMPLETED"),
                timeout=120,
                what=way,
            )
            states[way] = up.state_of(flow_run)
    finally:
        up.call("/work_pools/rpg", {"base_job_template": template}, "PATCH")
    assert {state["type"] for state in states.values()} == {"FAILED"}
    for way, variable in (("job variables", "command"), ("environment", "env"), ("directory", "working_dir")):
        assert f"job variables of its own: {variable}" in states[way]["message"]
    assert "is not from this package" in states[f"deployment of {flow}"]["message"]
    assert [path.name for path in (first, second, third, fourth) if path.exists()] == []


def test_what_listens_of_rpg_up_is_what_the_page_says(up: Up) -> None:
    assert rows("`rpg up`", listeners(up.lab, "worker")) == rows_on_page("`rpg up`")


def test_what_listens_of_rpg_report_is_what_the_page_says(lab: Lab) -> None:
    lab.start("report", "--serve", anew=True)
    assert rows("`rpg report --serve`", listeners(lab, "report")) == rows_on_page("`rpg report --serve`")


@pytest.mark.parametrize("forks", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_the_api_of_a_command_has_the_password_too_and_no_stage_gets_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, forks: str
) -> None:
    monkeypatch.setenv("RPG_FORK_STAGES", forks)
    running = lab.start("run", str(lab.spec), overrides=("training.steps=2000",), anew=True)
    wait_for(lambda: lab.training_pid() and lab.progress(lab.run_ids()[0]) >= 1, what="the trainer")
    (record,) = lab.home.prefect.glob("embedded-*.json")
    url = read_json(record)["url"]
    assert status(f"{url}/flow_runs/filter", {}, content_type="application/json")[0] == 401
    assert status(f"{url}/health")[0] == 200
    shown = {"authorization": basic(auth_string(lab.home)), "content_type": "application/json"}
    assert status(f"{url}/flow_runs/filter", {}, **shown)[0] == 200
    assert status(f"{url}/flow_runs/filter", {}, origin=FOREIGN, **shown)[0] == 403
    assert status(f"{url}/flow_runs/filter", {}, host="elsewhere.example", **shown)[0] == 403
    asked = {"origin": FOREIGN, "access_control_request_method": "POST"}
    assert status(f"{url}/flow_runs/filter", method="OPTIONS", **asked)[0] == 403
    trainer = psutil.Process(lab.training_pid())
    held = [path.read_text().partition(":")[2] for path in (lab.home.services / "secrets").iterdir()]
    assert [value for value in trainer.environ().values() if any(secret in value for secret in held)] == []
    commands = [" ".join(process.cmdline()) for process in lab.processes()]
    assert [command for command in commands if any(secret in command for secret in held)] == []
    if forks == "0":  # a single rank that is forked listens nowhere
        assert rows("`rpg run`", listeners(lab, "trainer")) == rows_on_page("`rpg run`")
    running.send_signal(signal.SIGINT)
    finished(running)
    assert lab.state(lab.run_ids()[0])["status"] == "cancelled"


def statuses(up: Up, shown: str) -> tuple[int, int]:
    """Returns the answers of the API and the page of studies to a password."""
    addresses = f"{up.services.url}/admin/version", f"{up.services.studies_url}/api/studies"
    api, studies = (status(address, authorization=basic(shown))[0] for address in addresses)
    return api, studies


def test_a_reader_reads_and_submits_nothing_and_sees_what_waits(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert statuses(up, up.secret("reader")) == (401, 200)
    record = up.services.record_url
    assert [status(record, authorization=basic(shown))[0] for shown in ("", "reader:wrong")] == [401, 401]
    assert {status(record, authorization=basic(up.secret(name)))[0] for name in ("auth", "reader")} == {200}
    try:
        submitted = up.lab.rpg("submit", str(up.lab.spec), "--pool", "nobodys", "--json")
        assert submitted.code == 0, submitted.err
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", up.secret("reader"))
        elsewhere = Lab(tmp_path / "elsewhere", up.lab.spec)
        for address in (up.services.url, record):
            listed = elsewhere.rpg("runs", "--profile", address, "--json")
            assert listed.code == 0, listed.err
            (run,) = json.loads(listed.out)
            assert (run["run_id"], run["status"]) == (json.loads(submitted.out)[0]["run_id"], "pending")
        refused = elsewhere.rpg("submit", str(up.lab.spec), "--profile", up.services.url)
        assert refused.code == 2
        assert "requires a user and a password" in refused.err
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "reader:wrong")
        stranger = elsewhere.rpg("runs", "--profile", record)
        assert (stranger.code, "requires a password" in stranger.err) == (2, True), stranger.err
    finally:
        up.lab.rpg("cancel", "tiny")


def test_new_passwords_open_at_once_and_the_former_ones_no_more(up: Up) -> None:
    former, reader = up.secret(), up.secret("reader")
    before = [process.pid for process in Supervisor(up.lab.home, up.services.control_port).states()]
    result = up.lab.rpg("up", "--new-password", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    new = Path(told["password"]).read_text().strip(), Path(told["reader"]).read_text().strip()
    assert len({former, reader, *new}) == 4
    assert [statuses(up, shown) for shown in (former, reader)] == [(401, 401)] * 2
    assert [statuses(up, shown) for shown in new] == [(200, 200), (401, 200)]
    assert [process.pid for process in Supervisor(up.lab.home, up.services.control_port).states()] == before
    # The worker continues: it accepts and refuses new flow runs.
    create = f"/deployments/{up.deployment()['id']}/create_flow_run"
    asked = up.call(create, {"name": "attack", "job_variables": {"command": "true"}})
    wait_for(lambda: up.state_of(asked)["type"] == "FAILED", what="the worker's refusal")


@pytest.mark.long
def test_passwords_are_changed_while_a_run_trains_and_nothing_of_it_is_lost(up: Up) -> None:
    (run,) = json.loads(up.lab.rpg("submit", str(up.lab.spec), "--json", overrides=("training.steps=40",)).out)
    wait_for(lambda: up.lab.progress(run["run_id"]) >= 1, timeout=240, what="a step in the worker")
    assert up.lab.rpg("up", "--new-password").code == 0
    assert rows("`rpg up`, training", listeners(up.lab, "trainer")) == rows_on_page("`rpg up`, training")
    up.lab.wait_until(run["run_id"], "finished", timeout=400)
    flow_run = {"id": run["flow_run_id"]}
    wait_for(lambda: up.state_of(flow_run)["type"] == "COMPLETED", timeout=60, what="its end on the server")
    keys = {artifact["key"] for artifact in up.call("/artifacts/filter", {"limit": 200})}
    assert {f"{run['run_id']}-{name}" for name in ("plan", "learning-curve", "results")} <= keys


@pytest.mark.parametrize(
    ("host", "origin", "refused"),
    [
        ("127.0.0.1:4200", "", ""),
        ("localhost", "http://localhost:4200", ""),
        ("prefect.example.org", "https://prefect.example.org", ""),
        ("127.0.0.1:4200", "https://prefect.example.org", ""),
        ("prefect.example.org.evil.example", "", "this server does not have the name"),
        ("", "", "this server does not have the name"),
        ("[::1", "", "this server does not have the name"),
        ("127.0.0.1@evil.example", "", "this server does not have the name"),
        ("prefect.example.org", "https://evil.example", "a page of"),
        ("prefect.example.org", "http://127.0.0.1:5000", "a page of"),
        ("127.0.0.1:4200", "null", "a page of"),
    ],
)
def test_the_hosts_that_a_proxy_answers_under_are_named(
    host: str, origin: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_TRUSTED_HOSTS", "prefect.example.org, Studies.example.org")
    assert objection(host, origin, origins_of("http://127.0.0.1:4200/api")).startswith(refused)
    assert bool(objection(host, origin, origins_of("http://127.0.0.1:4200/api"))) == bool(refused)
