"""Clients with a home of their own see in a server's record what its workers' home holds."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from guarded import PASSWORD, Server
from live import Lab
from recorded_home import record_experiment, record_run, write
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers
from pipelines.prefect.server.deployments import EXPERIMENTS
from pipelines.prefect.server.waiting import waiting_runs
from pipelines.remote.mirror import SMALL, Mirror, mirror_home
from pipelines.remote.record_files import FileVersion, Listing
from pipelines.remote.sources import Changes, SourceError, WebSource
from specs.machine.files import read_json
from specs.records import TABLES
from storage import Record, Store, open_record
from storage.ingest import ingest
from tests.pipelines.prefect.flows.test_submit import call as call_api
from tests.storage.recording import RecordedRun


@dataclass
class Web:
    """The web application over a home, in a process of its own."""

    url: str
    process: "subprocess.Popen[bytes]"


def serve(home: Home, **environment: str) -> Web:
    port = free_port()
    where = {"RPG_HOME": str(home.root), "RPG_WEB_PORT": str(port)} | environment
    process = subprocess.Popen([sys.executable, "-m", "pipelines.web"], env=os.environ | where)
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the web application")
    return Web(f"http://127.0.0.1:{port}", process)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, Web]]:
    home = Home(tmp_path_factory.mktemp("served") / "home")
    record_experiment(home, [record_run(home, f"sums-s{seed}", seed=seed, steps=5, problems=4) for seed in range(2)])
    log = home.run("sums-s0") / "logs" / "train.log"
    log.parent.mkdir()
    log.write_text("one\n")
    web = serve(home, PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    yield home, web
    web.process.kill()
    web.process.wait()


@pytest.fixture
def mirror(served: tuple[Home, Web], tmp_path: Path) -> Iterator[Mirror]:
    source = WebSource(served[1].url, PASSWORD)
    yield Mirror(Home(tmp_path / "mirror"), source)
    source.close()


def rows(home: Home, query: str) -> list[Any]:
    with Store.open(home.root) as store:
        return list(store.query(query).rows)


@pytest.mark.more
def test_a_mirror_answers_as_the_home_does_and_only_who_made_it_may_look(served, mirror: Mirror) -> None:
    home, _ = served
    mirror.pull(TABLES)
    for table in ("runs", "run_summary", "metrics", "evaluations"):
        query = f"from {table} order by all"
        assert rows(mirror.home, query) == rows(home, query) != []
    assert mirror.home.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.more
def test_rows_that_come_to_a_mirror_later_are_seen_there(served, mirror: Mirror) -> None:
    home, _ = served
    mirror.pull(SMALL - {"metrics"})
    hour_ago = time.time() - 3600
    for directory in mirror.home.root.glob("runs/*"):
        for path in (directory, *directory.rglob("*")):
            os.utime(path, (hour_ago, hour_ago))
    ingest(mirror.home.root)
    assert rows(mirror.home, "from metrics") == []
    mirror.pull(SMALL)
    assert rows(mirror.home, "from metrics order by all") == rows(home, "from metrics order by all") != []


def test_what_a_query_does_not_need_stays_where_it_is(served, mirror: Mirror) -> None:
    home, _ = served
    write(home.run("sums-s1") / "segments/tokens/a0001-s000001-000002-0123456789abcdef.parquet", "millions of rows")
    mirror.pull(SMALL)
    assert not list(mirror.home.root.glob("runs/*/segments/tokens/*"))
    assert not list(mirror.home.root.glob("runs/*/logs/*"))
    mirror.pull(TABLES, logs=True)
    assert len(list(mirror.home.root.glob("runs/*/segments/tokens/*"))) == 1
    assert (mirror.home.run("sums-s0") / "logs/train.log").read_text() == "one\n"


class Served:
    """A served record as `open_record` takes it, without a Prefect server that names the place."""

    def __init__(self, mirror: Mirror) -> None:
        self.root = mirror.home.root
        self.refresh = mirror.pull

    def close(self) -> None:
        """The fixture closes the source."""


def test_a_record_elsewhere_is_fetched_as_queries_name_its_tables(served, mirror: Mirror) -> None:
    home, _ = served
    run = RecordedRun(home.root, "more-s0")
    run.start(1)
    run.steps(1, 2)
    with Record(Store.open(mirror.home.root), Served(mirror)) as record, Store.open(home.root) as at_home:
        record.refresh()
        assert record.sql("select count(*) from metrics").rows == at_home.query("select count(*) from metrics").rows
        assert not list(mirror.home.root.glob("runs/*/segments/rollouts/*"))
        responses = "select count(*) from Rollouts"
        assert record.sql(responses).rows == at_home.query(responses).rows != [(0,)]


def test_a_second_pull_reads_what_is_new_and_drops_what_is_gone(served, mirror: Mirror) -> None:
    home, _ = served
    mirror.pull(logs=True)
    before = {path: path.stat().st_mtime_ns for path in mirror.home.root.glob("runs/**/*.parquet")}
    with (home.run("sums-s0") / "logs/train.log").open("a") as log:
        log.write("two\n")
    state = read_json(home.run("sums-s1") / "state.json")
    write(home.run("sums-s1") / "state.json", state | {"reason": "changed"})
    removed = home.run("sums-s1") / "logs/gone.log"
    write(removed, "")
    mirror.pull(logs=True)
    removed.unlink()
    mirror.pull(logs=True, only=["runs/sums-s1"])
    assert (mirror.home.run("sums-s0") / "logs/train.log").read_text().endswith("two\n")
    assert read_json(mirror.home.run("sums-s1") / "state.json")["reason"] == "changed"
    assert not (mirror.home.run("sums-s1") / "logs/gone.log").exists()
    assert before == {path: path.stat().st_mtime_ns for path in mirror.home.root.glob("runs/**/*.parquet")}


@contextmanager
def answering(answer: Any) -> Iterator[str]:
    """A server that answers every request with this JSON, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.more
@pytest.mark.parametrize(
    ("unit", "path"),
    [
        ("runs/a", "runs/a/../../../outside.json"),
        ("runs/a", "../outside.json"),
        ("runs/a", "/tmp/outside.json"),
        ("runs/a", "runs/b/run.json"),
        ("../a", "../a/run.json"),
        ("runs/..", "runs/../run.json"),
        ("prefect", "prefect/profiles.toml"),
    ],
)
def test_a_server_cannot_have_a_mirror_write_outside_of_the_record(tmp_path: Path, unit: str, path: str) -> None:
    listing = {"digest": "1", "files": {path: [1, "1"]}}
    with answering({"changed": {unit: listing}, "gone": ["../outside"]}) as url:
        source = WebSource(url)
        with pytest.raises(SourceError, match="has no record"):
            Mirror(Home(tmp_path / "mirror"), source).pull()
        source.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_record_that_does_not_answer_is_named(tmp_path: Path) -> None:
    source = WebSource(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SourceError, match="cannot be read"):
        Mirror(Home(tmp_path), source).pull()
    source.close()


@pytest.mark.more
def test_a_password_is_asked_for_and_sent(served) -> None:
    home, _ = served
    web = serve(home, PREFECT_SERVER_API_AUTH_STRING="team:secret")
    try:
        for auth, outcome in (("", "password"), ("team:wrong", "password")):
            source = WebSource(web.url, auth)
            with pytest.raises(SourceError, match=outcome):
                source.changes({})
            source.close()
        source = WebSource(web.url, "team:secret")
        assert "runs/sums-s0" in source.changes({}).changed
        source.close()
    finally:
        web.process.kill()
        web.process.wait()


@pytest.mark.parametrize("name", ["base", "train", "manifest", "sums"])
def test_an_experiment_of_any_name_is_read_once_by_a_mirror(tmp_path: Path, name: str) -> None:
    unit = f"experiments/{name}"
    path = f"{unit}/experiment.json"
    reads: list[str] = []

    class Record:
        """One experiment that does not change."""

        def changes(self, known: Mapping[str, str], only: Collection[str] = ()) -> Changes:
            listing = Listing.of({path: FileVersion(2, "1")})
            assert not only
            return Changes({} if known.get(unit) == listing.digest else {unit: listing}, [])

        def read(self, path: str, start: int = 0) -> tuple[bytes, str]:
            reads.append(path)
            return b"{}"[start:], "1"

        def close(self) -> None: ...

    for _ in range(2):
        Mirror(Home(tmp_path), Record()).pull()
    assert reads == [path]


def test_mirrors_of_two_records_do_not_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = mirror_home("http://a:4200/api http://a:4202"), mirror_home("http://a:4200/api http://a/4202")
    assert first != second
    assert first.root.is_relative_to(tmp_path)


def test_a_listing_knows_whether_anything_of_a_unit_has_changed() -> None:
    one, other = (Listing.of({"runs/a/run.json": FileVersion(1, version)}) for version in "ab")
    assert one.digest != other.digest
    assert one == Listing.from_json("runs/a", json.loads(json.dumps(one.to_json())))


@pytest.mark.more
def test_a_server_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lab = Lab(tmp_path / "home", tmp_path / "tiny.yaml")
    nowhere = lab.rpg("runs", "--profile", f"http://127.0.0.1:{free_port()}/api")
    assert nowhere.code == 2
    assert "no Prefect server answers" in nowhere.err
    assert not lab.root.exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a password."""
    server = Server(Home(tmp_path_factory.mktemp("guarded")))
    yield server
    server.stop()


@pytest.mark.more
def test_a_record_behind_a_password_is_read_and_a_run_that_was_cancelled_before_it_began_is_listed(
    served, guarded: Server, call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch
) -> None:
    home, _ = served
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    web = serve(home, PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    try:
        guarded.call("/variables/", {"name": "rpg_record", "value": web.url})
        flow = guarded.call("/flows/", {"name": EXPERIMENTS.flow})["id"]
        for run_id, began in (("early-s0", False), ("late-s0", True)):
            created = guarded.call("/flow_runs/", {"flow_id": flow, "parameters": {"run_id": run_id}})
            for kind in (["RUNNING"] if began else []) + ["CANCELLED"]:
                guarded.call(f"/flow_runs/{created['id']}/set_state", {"state": {"type": kind}, "force": True})
        code, out, err = call("runs", "--profile", guarded.url, "--json")
        assert code == 0, err
        listed = {run["run_id"]: run["status"] for run in json.loads(out)}
        assert {"sums-s0", "sums-s1"} <= set(listed)
        assert listed["early-s0"] == "cancelled"
        assert "late-s0" not in listed, "it had begun, and its workers' home has no record of it"
    finally:
        web.process.kill()
        web.process.wait()


def test_a_run_that_was_cancelled_before_it_began_and_submitted_again_waits() -> None:
    def post(_path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            told(kind, 0) for kind in body["flow_runs"]["state"]["type"]["any_"] if kind in ("SCHEDULED", "CANCELLED")
        ]

    assert [(run.run_id, run.state["status"]) for run in waiting_runs(post)] == [("sums-s0", "pending")]


def test_of_flow_runs_that_were_cancelled_the_latest_are_looked_at() -> None:
    asked = []

    def post(_path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body["flow_runs"]["state"]["type"]["any_"] != ["CANCELLED"]:
            return []
        asked.append(body)
        return [told("CANCELLED", 1)] * body["limit"]

    assert waiting_runs(post) == []
    assert {body["sort"] for body in asked} == {"END_TIME_DESC"}
    assert sum(body["limit"] for body in asked) == 1000


def told(kind: str, run_count: int) -> dict[str, Any]:
    """A flow run as a server tells of it."""
    state = {"type": kind, "name": kind, "timestamp": "2026-01-01T00:00:00Z"}
    of_run = {"parameters": {"run_id": "sums-s0"}, "name": "sums: seed 0", "created": "2026-01-01T00:00:00Z"}
    return of_run | {"id": kind, "tags": [], "state": state, "run_count": run_count}


@pytest.fixture
def server(lab: Lab) -> Iterator[tuple[Lab, str]]:
    """A home with server and worker, and its API's address."""
    result = lab.rpg("up", "--json")
    assert result.code == 0, result.err
    yield lab, json.loads(result.out)["api"]
    lab.rpg("down")


@pytest.mark.long
def test_clients_that_share_no_files_see_what_the_workers_home_holds(
    server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, api = server
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    submitting, looking = (Lab(tmp_path / name, lab.spec) for name in ("submitting", "looking"))
    unnamed = looking.rpg("runs", "--profile", api)
    assert unnamed.code == 2
    assert "does not publish its record's address" in unnamed.err
    web = serve(lab.home)
    try:
        call_api(f"{api}/variables/", {"name": "rpg_record", "value": web.url}, home=lab.home)
        runs = json.loads(
            submitting.rpg("submit", str(lab.spec), "--profile", api, "--json", overrides=("seeds=[0,1]",)).out
        )
        assert_seen_alike(lab, looking, api, sorted(run["run_id"] for run in runs))
    finally:
        web.process.kill()
        web.process.wait()
    # The submitting home has the address: no process writes into it.
    told = submitting.start("watch", runs[0]["run_id"])
    assert "--profile" in told.stderr.readline()
    submitting.clean_up()


def assert_seen_alike(lab: Lab, looking: Lab, api: str, run_ids: list[str]) -> None:
    """From pending to finished, a client with nothing but the server's address sees what the workers' home holds."""
    listed = {run["run_id"]: run for run in json.loads(looking.rpg("runs", "--profile", api, "--json").out)}
    assert sorted(listed) == run_ids
    last = listed[run_ids[1]]
    assert (last["status"], last["experiment"], last["name"], last["seed"]) == ("pending", "tiny", "seed 1", 1)
    for run_id in run_ids:
        watched = looking.rpg("watch", run_id, "--profile", api, timeout=400)
        assert watched.code == 0, watched.err
    for verb in (
        ("runs", "--json"),
        ("sql", "from metrics order by all", "--format", "csv"),
        ("sql", "from tokens order by all", "--format", "csv"),
        ("logs", run_ids[0]),
        ("compare", *run_ids),
    ):
        here, there = lab.rpg(*verb), looking.rpg(*verb, "--profile", api)
        out = there.out.replace(f" --profile {api}", "")  # in the next command
        assert (there.code, out) == (here.code, here.out), there.err
        assert here.out.count("\n") > 1
    for query in ("from metrics order by all", "from tokens order by all"):
        with open_record(api) as elsewhere, open_record(lab.home.root) as record:
            assert elsewhere.sql(query).rows == record.sql(query).rows != []
    page = Path(looking.rpg("report", "tiny", "--profile", api).out.strip()).read_text()
    here = Path(lab.rpg("report", "tiny").out.strip()).read_text()
    assert page.rpartition("Written ")[0] == here.rpartition("Written ")[0]
    assert not looking.root.exists()


@pytest.mark.more
def test_whether_a_record_is_there_is_not_waited_for_as_long_as_for_the_record() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes the connection and says nothing
        source, began = WebSource(f"http://127.0.0.1:{silent.getsockname()[1]}"), time.monotonic()
        assert not source.is_record()
    assert time.monotonic() - began < 30
