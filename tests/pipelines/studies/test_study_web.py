"""optuna-dashboard shows the newest study of the home, or those of a database, and changes none."""

import base64
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from postgres import postgres
from tiny_study import Evaluator, write_study
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers
from pipelines.prefect.server.credentials import header_with
from pipelines.studies.storage import URL
from pipelines.studies.study import run_study
from specs import load_study_document

AUTH = "rpg:secret"
PAUSING = ("goal: {", "pruner: {type: asha, rungs: [1], eta: 2}\ngoal: {")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv(URL, raising=False)
    return Home(tmp_path / "home")


def add_study(home: Home, name: str, trials: int = 2, *changes: tuple[str, str]) -> None:
    specs = home.root.parent / "specs" / name
    path = write_study(specs, ("name: clips", f"name: {name}"), ("trials: 8", f"trials: {trials}"), *changes)
    run_study(load_study_document(path), home, Evaluator(home))


@contextmanager
def ended(command: list[str], **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has ended at the block's end at the latest."""
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(home: Home) -> Iterator[str]:
    """The page's address."""
    with served(home) as address:
        yield address


@contextmanager
def served(home: Home) -> Iterator[str]:
    """The page of a home; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "pipelines.studies.web", str(port)]
    with ended(command, RPG_HOME=str(home.root), PREFECT_SERVER_API_AUTH_STRING=AUTH):
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the page")
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_page_is_not_served_without_a_password(home: Home, host: str) -> None:
    command = [sys.executable, "-m", "pipelines.studies.web", str(free_port())]
    environment = {name: value for name, value in os.environ.items() if "AUTH_STRING" not in name}
    environment |= {"RPG_HOME": str(home.root), "RPG_WEB_HOST": host}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "others could read every study, without a password" in done.stderr
    assert "PREFECT_SERVER_API_AUTH_STRING=user:password" in done.stderr


def test_the_page_asks_for_the_password_where_the_server_has_one(home):
    port = free_port()
    command = [sys.executable, "-m", "pipelines.studies.web", str(port)]
    with ended(command, RPG_HOME=str(home.root), PREFECT_SERVER_API_AUTH_STRING="rpg:secret"):
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the page")
        request = urllib.request.Request(f"http://127.0.0.1:{port}/api/studies")
        for given in (None, "rpg:wrong"):
            if given:
                request.add_header("authorization", f"Basic {base64.b64encode(given.encode()).decode()}")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            refused.value.close()
            assert refused.value.code == 401
            assert refused.value.headers["www-authenticate"].startswith("Basic")
        request.add_header("authorization", f"Basic {base64.b64encode(b'rpg:secret').decode()}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read()) == {"study_summaries": []}


def asked(url: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": header_with(AUTH)}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def shown_studies(address: str) -> dict[str, int]:
    """Name and id of each study that the page lists."""
    status, answer = asked(f"{address}/api/studies")
    assert status == 200
    return {study["study_name"]: study["study_id"] for study in answer["study_summaries"]}


def refused(address: str, study: int, trial: int) -> None:
    """Each way to change a study is refused."""
    refusals = [
        asked(f"{address}/api/studies", "POST", {"study_name": "mine", "directions": ["minimize"]}),
        asked(f"{address}/api/studies/{study}", "DELETE", {}),
        asked(f"{address}/api/studies/{study}/note", "PUT", {"body": "mine", "version": 1}),
        asked(f"{address}/api/trials/{trial}/user-attrs", "POST", {"user_attrs": {"state": "mine"}}),
        asked(f"{address}/api/studies/{study}/rename", "POST", {"study_name": "mine"}),
    ]
    expected = (403, {"reason": "this page only shows studies; `rpg study` changes them"})
    assert refusals == [expected] * len(refusals)


@pytest.mark.more
def test_the_page_shows_the_newest_study_and_changes_none(home, page):
    assert shown_studies(page) == {}
    add_study(home, "first")
    assert list(shown_studies(page)) == ["first"]
    add_study(home, "early", 4, PAUSING)
    (study,) = shown_studies(page).values()
    _, detail = asked(f"{page}/api/studies/{study}")
    assert [trial["number"] for trial in detail["trials"]] == list(range(4))
    journals = {path: path.read_bytes() for path in home.root.glob("studies/*/journal.log")}
    refused(page, study, detail["trials"][0]["trial_id"])
    assert {path: path.read_bytes() for path in home.root.glob("studies/*/journal.log")} == journals

    # A connection that a browser opened ahead delays no other.
    with closing(socket.create_connection(("127.0.0.1", int(page.rpartition(":")[2])))):
        assert asked(f"{page}/api/studies")[0] == 200

    (home.study("early") / "journal.log").unlink()
    assert list(shown_studies(page)) == ["first"], "the newest of those that are left"
    (home.study("damaged")).mkdir()
    (home.study("damaged") / "journal.log").write_text("damaged\n{}\n")
    assert list(shown_studies(page)) == ["first"]


@pytest.mark.more
def test_with_a_database_its_studies_are_shown_and_not_changed(home, monkeypatch):
    add_study(home, "in-a-journal", 1)
    with postgres() as server:
        monkeypatch.setenv(URL, server.url)
        add_study(home, "in-the-database", 2)
        add_study(home, "another", 1)
        with served(home) as address:
            studies = shown_studies(address)
            assert set(studies) == {"in-the-database", "another"}
            _, detail = asked(f"{address}/api/studies/{studies['in-the-database']}")
            assert len(detail["trials"]) == 2
            refused(address, studies["another"], detail["trials"][0]["trial_id"])
            assert shown_studies(address) == studies


@pytest.mark.more
def test_optuna_dashboard_itself_opens_the_journal_of_a_study_whose_trials_are_paused(home):
    class StoppedError(Exception):
        pass

    def stop_at_a_rung(record: Mapping[str, Any]) -> None:
        if [trial["state"] for trial in record["trials"]].count("paused") == 2:
            raise StoppedError

    path = write_study(home.root.parent / "specs", PAUSING)
    with pytest.raises(StoppedError):
        run_study(load_study_document(path), home, Evaluator(home), ended=stop_at_a_rung)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    program = "from optuna_dashboard._cli import main; main()"
    command = [sys.executable, "-c", program, str(home.study("clips") / "journal.log"), "--port", str(port)]
    with ended(command):
        wait_for(lambda: answers(address), what="the index")
        status, answer = asked(f"{address}/api/studies")
        (study,) = answer["study_summaries"]
        _, detail = asked(f"{address}/api/studies/{study['study_id']}")
    assert (status, study["study_name"]) == (200, "clips")
    states = [trial["state"] for trial in detail["trials"]]
    assert states.count("Running") == 2
    paused = detail["trials"][states.index("Running")]
    assert [value["step"] for value in paused["intermediate_values"]] == [1]
    assert {parameter["name"] for parameter in paused["params"]} >= {"objective.clip.low"}
