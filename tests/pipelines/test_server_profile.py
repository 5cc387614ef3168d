"""`rpg up --profile server`: the whole topology, real, on this machine."""

import urllib.error

import pytest
from live import wait_for
from server_profile import ServerLab


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
