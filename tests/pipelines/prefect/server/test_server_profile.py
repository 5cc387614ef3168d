"""`rpg up --profile server`: the whole topology, real, on this machine."""

import base64
import urllib.error
import urllib.request

import pytest
from listeners import listeners, rows, rows_on_page
from server_profile import ServerLab
from waiting import wait_for

from pipelines.prefect.server.api import running_services

pytestmark = pytest.mark.more


def test_every_program_runs_and_two_processes_share_the_apis_port(server_lab: ServerLab) -> None:
    programs = [state.program for state in server_lab.supervisor.states()]
    assert sorted(programs) == ["api", "api", "postgres", "record", "redis", "services", "studies", "worker"]
    wait_for(lambda: {state.state for state in server_lab.supervisor.states()} == {"RUNNING"}, what="all programs")
    (worker,) = wait_for(lambda: server_lab.call("/work_pools/rpg/workers/filter", {}), what="the worker's heartbeat")
    assert worker["status"] == "ONLINE"


def test_who_shows_no_password_is_let_in_nowhere(server_lab: ServerLab) -> None:
    for auth_string in ("", "rpg:wrong"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server_lab.call("/flow_runs/filter", {}, auth_string=auth_string)
        refused.value.close()
        assert refused.value.code == 401
    assert server_lab.call("/flow_runs/filter", {}) == []


def test_what_listens_of_the_server_profile_is_what_the_page_says(server_lab: ServerLab) -> None:
    assert rows("server profile", listeners(server_lab, "worker")) == rows_on_page("server profile")


def test_readers_have_a_password_of_their_own_which_the_api_does_not_take(server_lab: ServerLab) -> None:
    services = running_services(server_lab.home)
    reader = (server_lab.home.services / "secrets" / "reader").read_text()
    for shown in (reader, server_lab.auth_string):
        header = {"authorization": f"Basic {base64.b64encode(shown.encode()).decode()}"}
        for page in (services.record_url, f"{services.studies_url}/api/studies", f"{services.record_url}/waiting"):
            with urllib.request.urlopen(urllib.request.Request(page, headers=header), timeout=60) as answer:
                assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        server_lab.call("/flow_runs/filter", {}, auth_string=reader)
    refused.value.close()
    assert refused.value.code == 401
