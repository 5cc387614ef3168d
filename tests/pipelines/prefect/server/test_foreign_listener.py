"""Passwords are not sent to another user who listens at the port of a server or a tunnel."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from foreign_listener import HTTP, listening
from live import COMMAND
from places import ROOT

from pipelines.home.home import Home
from pipelines.prefect.server.api import ServiceError, client_settings, status_of_answer
from pipelines.sinks.tracker import open_session
from pipelines.studies.storage import StudyStorageError, open_database
from rpg.rewards.judges.endpoint import Drawn, Endpoint, EndpointSettings, trouble_of
from specs.errors import RpgError, SpecError
from specs.schema.execution import MlflowSink

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can listen as another user")
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
GARBAGE = b"\x00\xff" * 600


def rpg(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"RPG_HOME": str(home), "PREFECT_API_AUTH_STRING": "rpg:topsecret"} | environment
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.more
@pytest.mark.parametrize("answer", [HTTP, GARBAGE, b""], ids=["welcome", "garbage", "nothing"])
def test_a_command_tells_another_users_server_nothing_and_says_who_listens_in_one_line(
    tmp_path: Path, answer: bytes
) -> None:
    spec = ROOT / "specs" / "experiments" / "quickstart.yaml"
    with listening(tmp_path / "sent", answer) as taken:
        url = f"http://localhost:{taken.port}"
        said = f"port {taken.port} of this machine has been taken by another user, nobody: no password is sent there"
        for words, variables in (
            (("runs", "--profile", url), {}),
            (("sql", "select 1", "--profile", f"{url}/api"), {}),
            (("submit", str(spec)), {"RPG_PROFILE": url}),
        ):
            result = rpg(tmp_path / "home", *words, **variables)
            assert (result.returncode, result.stdout) == (2, ""), result.stderr
            assert result.stderr.startswith(said)
            assert result.stderr.count("\n") == 1, result.stderr
        assert not taken.sent


@pytest.mark.more
@pytest.mark.parametrize("answer", [HTTP, JSON, GARBAGE, b""], ids=["page", "JSON", "garbage", "nothing"])
def test_what_is_no_server_is_named_without_a_traceback(tmp_path: Path, answer: bytes) -> None:
    with listening(tmp_path / "sent", answer, user=os.geteuid()) as own:
        result = rpg(tmp_path / "home", "runs", "--profile", f"http://127.0.0.1:{own.port}")
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert len(result.stderr.splitlines()) <= 3, result.stderr


@pytest.mark.more
def test_a_named_account_may_serve(tmp_path: Path) -> None:
    with listening(tmp_path / "sent") as taken:
        rpg(tmp_path / "home", "runs", "--profile", f"http://127.0.0.1:{taken.port}", RPG_TRUSTED_USERS="nobody")
        assert "authorization: basic" in taken.sent.lower()


def test_a_long_lived_client_sends_nothing_once_its_tunnel_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "rpg:topsecret")
    with listening(tmp_path / "own", user=os.geteuid()) as tunnel:
        url = f"http://127.0.0.1:{tunnel.port}/api"
        home = Home(tmp_path)
        home.prefect.mkdir(parents=True)
        with client_settings(home, url):
            from prefect.client.orchestration import get_client
            from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
                client.request("GET", "/hello")
                assert "GET /api/hello" in tunnel.sent
                os.kill(tunnel.pid, 9)
                os.waitid(os.P_PID, tunnel.pid, os.WEXITED | os.WNOWAIT)
                with listening(tmp_path / "sent", port=tunnel.port) as taken:
                    with pytest.raises(httpx.ConnectError, match="taken by another user"):
                        client.request("GET", "/hello")
                    assert not taken.sent
    with listening(tmp_path / "sent", port=tunnel.port), pytest.raises(ServiceError), client_settings(home, url):
        pass


def test_no_judge_no_tracker_and_no_database_of_another_user_gets_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "topsecret")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "topsecret")
    with listening(tmp_path / "sent") as taken:
        url = f"http://127.0.0.1:{taken.port}/v1"
        judge = Endpoint(EndpointSettings(url, "judge", "env:JUDGE_KEY", ("reward",), 5.0, 5.0))
        with pytest.raises(SpecError, match="taken by another user, nobody"):
            judge.ask([{"role": "user", "content": "Is it right?"}], Drawn(0.0, 5, 0))
        assert "taken by another user" in trouble_of(url, "env:JUDGE_KEY", (), seconds=5)
        with pytest.raises(RpgError, match="taken by another user"):
            open_session(MlflowSink(type="mlflow", tracking_uri=url), None, Home(tmp_path))  # type: ignore[arg-type]
        with pytest.raises(StudyStorageError, match="taken by another user"):
            open_database(f"postgresql://rpg:topsecret@localhost:{taken.port}/studies")
        assert not taken.sent


def test_an_answer_that_is_no_http_is_no_status(tmp_path: Path) -> None:
    with listening(tmp_path / "sent", GARBAGE, user=os.geteuid()) as own:
        assert status_of_answer(f"http://127.0.0.1:{own.port}") == 0
