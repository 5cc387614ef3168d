"""A finished run stays finished when any command asks for it again: on a real server, with the record of a real run."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live import SPEC
from prefect.client.orchestration import SyncPrefectClient
from prefect.flow_engine import run_flow_sync
from prefect.states import Cancelled, Crashed, Pending

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.state import RunState, run_ids
from pipelines.jobs.execute import run_here
from pipelines.prefect.flows.cancel import cancel_experiment, cancel_run, frozen_document
from pipelines.prefect.flows.experiment import execute_experiment
from pipelines.prefect.flows.flow import execute_run
from pipelines.prefect.flows.submit import submit_document
from pipelines.prefect.flows.workers import reconciliation
from pipelines.prefect.flows.workers.reconciliation import Reconciliation
from pipelines.prefect.server.api import EmbeddedServer, client_settings
from pipelines.prefect.server.client import prefect_client
from pipelines.prefect.server.deployments import POOL
from pipelines.prefect.server.flow_runs import OPEN, flow_runs
from specs.document import Document
from specs.errors import SpecError
from specs.loader import load_document
from specs.machine.files import read_json, write_json


class Site:
    """A home in which everything is done, and what commands and workers do there."""

    def __init__(self, home: Home, document: Document, server: EmbeddedServer, client: SyncPrefectClient) -> None:
        self.home, self.document, self.server, self.client = home, document, server, client
        (self.run_id,) = run_ids(home)
        self.finished = self.state

    @property
    def state(self) -> dict[str, Any]:
        return read_json(self.home.run(self.run_id) / "state.json")

    def standing(self) -> dict[str, Any]:
        return {name: self.state.get(name) for name in ("status", "started_at", "ended_at", "stages", "cause")}

    # What may be asked for.

    def run(self) -> None:
        """`rpg run`, and `rpg evaluate`, whose runs are executed in the same way."""
        run_here(self.document, self.home, quiet=True)

    def resume(self) -> None:
        run_here(frozen_document(self.home, self.run_id), self.home, self.run_id, quiet=True)

    def study(self) -> None:
        """A trial with the same values, which pauses on its way."""
        with client_settings(self.home, self.server.url):
            execute_experiment(self.document, self.home, until=2, in_study=True)

    def submit(self) -> None:
        submit_document(self.document, self.home, self.server.url)

    def cancel(self) -> None:
        with suppress(SpecError):  # there may be nothing to cancel
            cancel_run(self.home, self.run_id, 0.0)

    def cancel_experiment(self) -> None:
        with suppress(SpecError):
            list(cancel_experiment(self.home, "tiny", 0.0))

    # What happens to a flow run.

    def work(self) -> None:
        """A worker executes what waits."""
        for flow_run in list(flow_runs(self.client, ["SCHEDULED"])):
            with client_settings(self.home, self.server.url):
                run_flow_sync(execute_run, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")

    def die(self) -> None:
        """A worker claims each waiting flow run, and dies before it begins."""
        for flow_run in list(flow_runs(self.client, ["SCHEDULED"])):
            for state in (Pending(), Crashed()):
                self.client.set_flow_run_state(flow_run.id, state, force=True)

    def delete(self) -> None:
        for flow_run in list(flow_runs(self.client, OPEN)):
            self.client.set_flow_run_state(flow_run.id, Cancelled(), force=True)

    def compare(self) -> None:
        Reconciliation(self.home, POOL).compare(self.client)


VERBS: list[Callable[[Site], None]] = [
    *(Site.run, Site.resume, Site.study, Site.submit, Site.cancel, Site.cancel_experiment),
    *(Site.work, Site.die, Site.delete, Site.compare),
]


@pytest.fixture(scope="module")
def site(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    home = Home(root / "home")
    shutil.copytree(prepared_home, home.root, ignore=shutil.ignore_patterns("embedded-*.json"))
    (root / "tiny.yaml").write_text(SPEC)
    server = EmbeddedServer(home)
    server.start()
    try:
        server.wait()
        with prefect_client(home, server.url) as client, pytest.MonkeyPatch.context() as patch:
            patch.setenv("RPG_HOME", str(home.root))
            patch.setattr(reconciliation, "_STARTING", reconciliation.timedelta(0))
            patch.setattr(reconciliation, "_ENDING_SECONDS", 0.0)
            patch.setattr("pipelines.prefect.flows.submit.note_idle_pool", lambda *_: None)
            yield Site(home, load_document(root / "tiny.yaml"), server, client)
    finally:
        server.stop()


@pytest.mark.more
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(VERBS), min_size=3, max_size=5))
def test_a_finished_run_stays_finished_whatever_is_asked_for(site: Site, verbs: list[Callable[[Site], None]]) -> None:
    assert_stays_finished(site, verbs)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(VERBS), min_size=2, max_size=8))
def test_a_finished_run_stays_finished_through_long_histories(site: Site, verbs: list[Callable[[Site], None]]) -> None:
    assert_stays_finished(site, verbs)


def assert_stays_finished(site: Site, verbs: list[Callable[[Site], None]]) -> None:
    site.delete()
    write_json(site.home.run(site.run_id) / "state.json", site.finished)
    before = site.standing()
    for verb in verbs:
        verb(site)
        assert site.standing() == before, f"after {verb.__name__}"
        assert status_of(site.home, site.run_id) == "finished"


@pytest.mark.more
@pytest.mark.parametrize("verbs", [[Site.submit], [Site.submit, Site.work], [Site.submit, Site.submit]])
def test_a_finished_run_that_was_submitted_again_is_taken_back_by_a_cancel(
    site: Site, verbs: list[Callable[[Site], None]]
) -> None:
    site.delete()
    write_json(site.home.run(site.run_id) / "state.json", site.finished)
    before = site.standing()
    for verb in verbs:
        verb(site)
    waited = Site.work not in verbs
    assert RunState(site.home, site.run_id).waits == waited
    if waited:
        taken_back = f"{site.run_id} is finished already; its pending flow runs on the server are withdrawn"
        assert cancel_run(site.home, site.run_id, 0.0) == taken_back
    assert not list(flow_runs(site.client, OPEN))
    assert site.standing() == before
    assert not RunState(site.home, site.run_id).waits


@pytest.mark.more
def test_a_finished_run_of_which_a_stage_is_left_waits_and_is_finished_until_that_is_done(site: Site) -> None:
    site.delete()
    write_json(site.home.run(site.run_id) / "state.json", site.finished)
    report = site.home.run(site.run_id) / "report.html"
    report.unlink()
    site.submit()
    site.die()
    site.compare()
    assert (site.state["status"], RunState(site.home, site.run_id).waits) == ("finished", True)
    assert len(list(flow_runs(site.client, ["SCHEDULED"]))) == 1, "another worker does what is left"
    site.work()
    assert report.exists()
    assert site.state["status"] == "finished"
    assert site.state["ended_at"] > site.finished["ended_at"]
