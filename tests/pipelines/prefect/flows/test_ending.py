"""Whatever a run's record and its flow run say: after `rpg cancel` nothing of it runs again, and both say the same."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from flow_site import Site, new_site
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.flow_engine import run_flow_sync
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Late,
    Pending,
    Running,
    Scheduled,
    State,
    Suspended,
)
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.prefect.flows import cancel, flow, stop
from pipelines.prefect.flows.cancel import cancel_run
from pipelines.prefect.flows.stop import NotStoppedError
from pipelines.prefect.flows.workers import reconciliation
from pipelines.prefect.flows.workers.reconciliation import Reconciliation
from pipelines.prefect.server.api import client_settings
from pipelines.prefect.server.deployments import POOL
from pipelines.prefect.server.flow_runs import OPEN, flow_runs, is_called_off, run_id_of
from pipelines.prefect.server.outbox import Outbox, schedule_again
from specs.errors import SpecError
from specs.machine.files import read_json, write_json
from specs.machine.lease import acquire
from specs.machine.liveness import FINAL, newest_lease

RECORDS = ("submitted", "given back", "alive", "dead", *FINAL)
"""How a run stands on record: it waits, never begun or begun; it is executed; who executed it is gone; it has ended."""
STATES: dict[str, State[Any] | None] = {
    "none": None,
    "Scheduled": Scheduled(),
    "Late": Late(scheduled_time=datetime.now(UTC)),
    "AwaitingRetry": AwaitingRetry(scheduled_time=datetime.now(UTC)),
    "Pending": Pending(),
    "Running": Running(),
    "Suspended": Suspended(),
    "Cancelling": Cancelling(),
    "Cancelled": Cancelled(),
    "Crashed": Crashed(),
    "Failed": Failed(message="no file"),
    "Completed": Completed(),
}
TYPES = {"finished": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}


class EndingSite(Site):
    """A site with runs that stand as `RECORDS` and `STATES` say."""

    def run(self, record: str, state: State[Any] | None, *, experiment: str = "tiny") -> tuple[str, UUID | None]:
        """A run that stands so on record and on the server, and its flow run."""
        run_id = self.new_run()
        flow_run_id = None if state is None else self.flow_run(run_id, state, experiment)
        begun = record != "submitted"
        waits = record in ("submitted", "given back")
        status = "pending" if waits else "running" if record in ("alive", "dead") else record
        at = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        fields = {"started_at": at if begun else None, "api_url": self.url}
        directory = self.record(run_id, status, flow_run_id, **fields)
        write_json(directory / "run.json", {"run_id": run_id, "experiment": experiment, "name": run_id})
        if begun and record != "alive":
            self.lease(directory, seconds_ago=3600, released=record != "dead")
        return run_id, flow_run_id

    def cancel(self, run_id: str) -> tuple[bool, str]:
        """Whether `rpg cancel` says that the run is stopped, and its words."""
        try:
            return True, cancel_run(self.home, run_id, 0.0)
        except (NotStoppedError, SpecError) as error:
            return False, str(error.issues[0].message if isinstance(error, SpecError) else error)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndingSite]:
    with pytest.MonkeyPatch.context() as patch, new_site(tmp_path_factory.mktemp("site")) as site:
        for module, name, seconds in (
            (stop, "CLOSING_SECONDS", 0.2),
            (stop, "_NOTICE_SECONDS", 0.2),
            (stop, "_TELLING_SECONDS", 0.2),
            (stop, "_LOOK_SECONDS", 0.05),
            (reconciliation, "_STARTING", timedelta(0)),
            (reconciliation, "_ENDING_SECONDS", 0.0),
        ):
            patch.setattr(module, name, seconds)
        yield EndingSite(site.home, site.url, site.client)


@pytest.mark.more
@pytest.mark.parametrize(
    "record",
    [
        # The same is expected of them as of `submitted` and of `finished`.
        pytest.param(record, marks=[pytest.mark.long] if record in ("given back", "failed", "cancelled") else [])
        for record in RECORDS
    ],
)
def test_after_a_cancel_nothing_runs_again_and_record_and_server_agree(site: EndingSite, record: str) -> None:
    cancelled = []
    for name, state in STATES.items():
        run_id, flow_run_id = site.run(record, state)
        holder = executing(site, run_id) if record == "alive" else None
        stopped, words = site.cancel(run_id)
        cancelled.append((name, run_id, flow_run_id, stopped, words))
        if holder:
            holder.join()
    site.compare()  # Does the periodic work of a worker of the pool.
    for name, run_id, flow_run_id, stopped, words in cancelled:
        status, kind = site.status(run_id), site.kind(flow_run_id) if flow_run_id else ""
        where = f"{record} on record, {name} on the server: {status} and {kind}; {words}"
        waited = record in ("submitted", "given back")
        assert not kind or kind in TYPES.values(), f"a worker would take it: {where}"
        assert not is_held(site, run_id), where
        if waited and name in ("none", "Completed"):
            # It waited nowhere; or a worker has completed it in a home of its own, which has its results.
            assert (stopped, status) == (False, "pending"), where
            assert words == f"the run is not running but {'finished' if kind else 'pending'}", where
        elif record in FINAL and (not kind or name in ("Completed", "Failed", "Cancelled")):
            assert (stopped, words) == (False, f"the run is not running but {record}"), where
        else:
            assert status == record if record in FINAL else status in ("cancelled", "failed"), where
            assert kind in ("", TYPES[status]), where
            assert status in words or (not stopped and "still cancelling on the server" in words), where
            ended = ("Cancelled", "Failed", *(["Crashed"] if record in FINAL else []))
            assert stopped or name in (*ended, "Pending", "Running", "Cancelling"), where
        if "last checkpoint" in words:
            assert record != "submitted" or name not in ("Scheduled", "Late", "AwaitingRetry", "Pending"), where


def is_held(site: EndingSite, run_id: str) -> bool:
    lease = newest_lease(site.home.run(run_id))
    return lease is not None and lease.is_held()


def executing(site: EndingSite, run_id: str) -> threading.Thread:
    """A flow that holds the run, and ends it when it is asked to stop."""
    held = acquire(site.home.run(run_id))

    def flow() -> None:
        wait_for((site.home.run(run_id) / "cancel.json").exists)
        RunState(site.home, run_id, held.fence).end("cancelled", "train: cancelled")
        held.release()

    thread = threading.Thread(target=flow)
    thread.start()
    return thread


def test_a_run_that_was_submitted_twice_is_cancelled_twice(site: EndingSite) -> None:
    run_id, flow_run_id = site.run("submitted", Scheduled())
    again = site.flow_run(run_id, Scheduled())
    assert site.cancel(run_id) == (True, f"{run_id} was waiting and is cancelled")
    assert [site.kind(flow_run_id), site.kind(again)] == ["CANCELLED", "CANCELLED"]


def test_a_run_that_had_ended_and_waits_on_the_server_again_is_taken_back(site: EndingSite) -> None:
    for status in FINAL:
        run_id, flow_run_id = site.run(status, Scheduled())
        words = f"{run_id} is {status} already; its pending flow runs on the server are withdrawn"
        assert site.cancel(run_id) == (True, words)
        assert (site.status(run_id), site.kind(flow_run_id)) == (status, TYPES[status])


def test_a_run_that_is_taken_over_while_it_is_ended_is_asked_to_stop(site: EndingSite, monkeypatch) -> None:
    run_id, flow_run_id = site.run("dead", Scheduled())
    end_everywhere, holders = cancel.end_everywhere, []

    def taken_meanwhile(*arguments: Any, **options: Any) -> str:
        if not holders:
            holders.append(executing(site, run_id))
        return end_everywhere(*arguments, **options)

    monkeypatch.setattr(cancel, "end_everywhere", taken_meanwhile)
    stopped, words = site.cancel(run_id)
    holders[0].join()
    assert (stopped, words) == (
        True,
        f"{run_id} is cancelled; `rpg resume {run_id}` continues from its last checkpoint",
    )
    assert site.kind(flow_run_id) == "CANCELLED"


@pytest.mark.more
@pytest.mark.parametrize("record", ["submitted", "dead"])
def test_a_flow_that_starts_while_it_is_cancelled_executes_nothing(site: EndingSite, record: str, monkeypatch) -> None:
    """Its worker has it already and starts it all the same; one that is cancelled the server lets be running again."""
    run_id, flow_run_id = site.run(record, Pending())
    flow_run = site.client.read_flow_run(flow_run_id)
    stopped, words = site.cancel(run_id)
    assert stopped == (record == "dead"), words
    monkeypatch.setenv("RPG_HOME", str(site.home.root))
    leases = sorted(site.home.run(run_id).glob("leases/*"))
    with client_settings(site.home, site.url):
        run_flow_sync(flow.execute_run, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
    assert sorted(site.home.run(run_id).glob("leases/*")) == leases, "nobody has taken the run since"
    if record == "dead":
        states = [state.type.value for state in site.client.read_flow_run_states(flow_run_id)]
        assert states[-3:] == ["CANCELLED", "RUNNING", "CANCELLED"]
    site.compare()
    assert (site.status(run_id), site.kind(flow_run_id)) == ("cancelled", "CANCELLED")
    # Scheduled once more, as by the dashboard's Retry, it is executed.
    for state in (Scheduled(), Running()):
        site.client.set_flow_run_state(flow_run_id, state, force=True)
    assert not is_called_off(site.client, flow_run_id)


def test_a_run_that_is_cancelled_while_its_worker_gives_it_back_is_not_scheduled_again(site: EndingSite) -> None:
    _, flow_run_id = site.run("given back", Cancelled())
    with client_settings(site.home, site.url):
        ending = Outbox(site.home, str(flow_run_id))
        ending.start()
        assert ending.close(20.0, schedule=True)
    assert site.kind(flow_run_id) == "CANCELLED"


class Meanwhile:
    """A client beside which something happens: once, right after its first answer to one of the calls."""

    def __init__(self, client: SyncPrefectClient, call: str, happens: Callable[[], object]) -> None:
        self._client, self._call, self._happens = client, call, [happens]

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._client, name)
        return self._then(answer) if name == self._call and self._happens else answer

    def _then(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            result = answer(*arguments, **options)
            for happens in self._happens[:]:
                self._happens.clear()
                happens()
            return result

        return called


@pytest.mark.more
@pytest.mark.parametrize("record", ["given back", "dead"])
@pytest.mark.parametrize("call", ["read_flow_run", "read_task_runs"])
def test_a_run_that_is_cancelled_while_a_worker_gives_it_back_to_the_queue_stays_so(
    site: EndingSite, record: str, call: str
) -> None:
    run_id, flow_run_id = site.run(record, Crashed())
    flow_run = site.client.read_flow_run(flow_run_id)
    cancels = threading.Thread(target=cancelling, args=(site, run_id))

    def begin() -> None:
        cancels.start()
        cancels.join(1.0)

    between: Any = Meanwhile(site.client, call, begin)
    Reconciliation(site.home, POOL)._schedule_again(between, flow_run, False)
    cancels.join()
    assert (site.status(run_id), site.kind(flow_run_id)) == ("cancelled", "CANCELLED")


def cancelling(site: EndingSite, run_id: str) -> None:
    """`rpg cancel` in a process of its own, which has connections of its own."""
    with contextlib.suppress(SpecError):
        cancel_run(site.home, run_id, 0.0)


def test_a_run_that_is_submitted_again_while_its_flow_run_is_settled_keeps_its_new_flow_run(site: EndingSite) -> None:
    run_id, flow_run_id = site.run("dead", Running())
    assert flow_run_id is not None
    other = site.flow_run(run_id, Scheduled())
    for status, state in (("running", Cancelling()), ("cancelled", Crashed())):
        fields = {"status": status, "flow_run_id": str(flow_run_id)}
        write_json(site.home.run(run_id) / "state.json", read_json(site.home.run(run_id) / "state.json") | fields)
        site.client.set_flow_run_state(flow_run_id, state, force=True)
        rounds = Reconciliation(site.home, POOL)
        ending = rounds._ending

        def submitted(*arguments: Any, decided: Callable[..., Any] = ending) -> Any:
            answer = decided(*arguments)
            RunState(site.home, run_id).submitted(str(other), site.url)
            return answer

        rounds._ending = submitted  # type: ignore[method-assign]
        rounds._settle_run(site.client, site.client.read_flow_run(flow_run_id), None)
        state_now = read_json(site.home.run(run_id) / "state.json")
        assert (state_now["status"], state_now["flow_run_id"]) == ("pending", str(other))
        assert site.kind(other) == "SCHEDULED"


def test_a_run_that_is_submitted_again_while_what_waits_of_it_is_taken_back_keeps_its_record(
    site: EndingSite, monkeypatch
) -> None:
    run_id, _ = site.run("failed", Scheduled())
    again = site.flow_run(run_id, Scheduled())
    live = stop._live

    def submitted(*arguments: Any, **options: Any) -> bool:
        answer = live(*arguments, **options)
        monkeypatch.setattr(stop, "_live", live)
        RunState(site.home, run_id).submitted(str(again), site.url)
        return answer

    monkeypatch.setattr(stop, "_live", submitted)
    site.cancel(run_id)
    record = read_json(site.home.run(run_id) / "state.json")
    assert (record["status"], record["reason"]) == ("pending", "submitted")


def test_a_run_that_is_cancelled_while_its_worker_sends_what_is_left_is_not_scheduled_again(
    site: EndingSite, monkeypatch
) -> None:
    _, flow_run_id = site.run("given back", Running())
    send_all = Outbox._send_all

    def cancelled_meanwhile(ending: Outbox, client: SyncPrefectClient) -> None:
        client.set_flow_run_state(flow_run_id, Cancelling(), force=True)
        send_all(ending, client)

    monkeypatch.setattr(Outbox, "_send_all", cancelled_meanwhile)
    with client_settings(site.home, site.url):
        ending = Outbox(site.home, str(flow_run_id))
        ending.start()
        assert ending.close(20.0, schedule=True)
    assert site.kind(flow_run_id) == "CANCELLING"


def test_a_flow_run_that_is_cancelled_just_before_it_is_scheduled_again_is_not(site: EndingSite) -> None:
    _, flow_run_id = site.run("given back", Running())
    flow_run = site.client.read_flow_run(flow_run_id)
    client: Any = Meanwhile(
        site.client, "read_flow_run_states", lambda: site.client.set_flow_run_state(flow_run_id, Cancelling())
    )
    schedule_again(client, flow_run, "given back")
    assert site.kind(flow_run_id) == "CANCELLING"


@pytest.mark.more
@pytest.mark.parametrize("is_known", [True, False])
def test_a_flow_run_that_is_given_back_although_it_was_to_be_cancelled_is_cancelled(
    site: EndingSite, is_known: bool, tmp_path: Path, monkeypatch
) -> None:
    run_id, flow_run_id = site.run("submitted", Running())
    ask = stop.ask_to_stop

    def given_back(client: SyncPrefectClient, *arguments: Any) -> None:
        ask(client, *arguments)
        client.set_flow_run_state(flow_run_id, Scheduled(), force=True)

    monkeypatch.setattr(stop, "ask_to_stop", given_back)
    if is_known:
        stopped, words = site.cancel(run_id)
        assert stopped, words
        assert site.status(run_id) == "cancelled"
    else:
        found = [site.client.read_flow_run(flow_run_id)]
        stop.stop_flow_runs(Home(tmp_path), site.client, found, 0.0)
    assert site.kind(flow_run_id) == "CANCELLED"


def test_a_run_that_was_submitted_to_a_server_and_is_executed_by_a_command_here_is_stopped_here_too(
    site: EndingSite, call: Callable[..., tuple[int, str, str]], monkeypatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(site.home.root))
    run_id, flow_run_id = site.run("alive", Scheduled())
    own = {"flow_run_id": str(uuid4())}  # of the command's own server
    write_json(site.home.run(run_id) / "state.json", read_json(site.home.run(run_id) / "state.json") | own)
    holder = executing(site, run_id)
    code, _, err = call("cancel", run_id, "--profile", site.url, "--grace", "0")
    holder.join(5.0)
    asked = not holder.is_alive()
    write_json(site.home.run(run_id) / "cancel.json", {})
    holder.join()
    assert (code, asked) == (0, True), err
    assert (site.status(run_id), site.kind(flow_run_id)) == ("cancelled", "CANCELLED")


def test_a_run_whose_own_server_does_not_answer_keeps_no_other_from_being_cancelled(
    site: EndingSite, call: Callable[..., tuple[int, str, str]], monkeypatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(site.home.root))
    runs = dict(site.run("given back", Scheduled(), experiment="apart") for _ in range(2))
    first, last = (run_id_of(found) for found in flow_runs(site.client, OPEN, experiment="apart"))
    elsewhere = {"api_url": "http://127.0.0.1:1/api"}
    write_json(site.home.run(first) / "state.json", read_json(site.home.run(first) / "state.json") | elsewhere)
    code, _, err = call("cancel", "apart", "--profile", site.url)
    assert code == 2
    assert "the Prefect server at http://127.0.0.1:1/api, which has the run, does not answer" in err
    flow_run_id = runs[last]
    assert (site.status(last), site.kind(flow_run_id)) == ("cancelled", "CANCELLED")


@pytest.mark.more
def test_runs_of_a_server_are_cancelled_by_whoever_may_enter(
    site: EndingSite, call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch
) -> None:
    """By a home that knows nothing of them: one waits, another one is executed and does not answer."""
    waiting, waits = site.run("submitted", Scheduled())
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "elsewhere"))
    code, _, err = call("cancel", waiting, "--profile", site.url)
    assert (code, err) == (0, f"{waiting} was waiting and is cancelled\n")
    executed, runs = site.run("submitted", Running())
    code, _, err = call("cancel", executed.rpartition("-")[2], "--profile", site.url, "--grace", "0")
    assert code == 1
    assert f"{executed} was asked to stop and is still cancelling on the server: http://" in err
    assert [site.kind(waits), site.kind(runs)] == ["CANCELLED", "CANCELLING"]
    code, _, err = call("cancel", waiting, "--profile", site.url)
    assert code == 2
    assert err.startswith(f"no such run is waiting or running on the server at {site.url}\n  given: {waiting}\n")


def test_an_experiment_is_cancelled_on_its_server_and_on_record_here(
    site: EndingSite, call: Callable[..., tuple[int, str, str]], monkeypatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(site.home.root))
    runs = [site.run("given back", Scheduled(), experiment="sums") for _ in range(2)]
    code, _, err = call("cancel", "sums", "--profile", site.url)
    assert code == 0, err
    for run_id, flow_run_id in runs:
        assert f"{run_id} is cancelled; `rpg resume {run_id}` continues from its last checkpoint\n" in err
        assert (site.status(run_id), site.kind(flow_run_id)) == ("cancelled", "CANCELLED")


def test_a_run_that_is_taken_over_waits_for_a_worker_in_the_place_that_it_had(site: EndingSite) -> None:
    run_id, flow_run_id = site.run("dead", Running())
    site.lease(site.home.run(run_id))
    assert flow_run_id is not None
    asked_at = site.client.read_flow_run(flow_run_id).expected_start_time
    later, _ = site.run("submitted", Scheduled())
    site.compare()
    record = read_json(site.home.run(run_id) / "state.json")
    assert (site.status(run_id), record["reason"]) == ("pending", "waiting for a worker")
    flow_run = site.client.read_flow_run(flow_run_id)
    assert (flow_run.state_type, flow_run.next_scheduled_start_time) == (StateType.SCHEDULED, asked_at)
    waiting = site.client.get_scheduled_flow_runs_for_work_pool(POOL, scheduled_before=datetime.now(UTC))
    queue = [entry.flow_run.parameters["run_id"] for entry in waiting]
    assert queue.index(run_id) < queue.index(later)
    # The process that takes it over finds the dead one's state, and three deaths count as three.
    with acquire(site.home.run(run_id)) as lease:
        assert lease.is_takeover
    for number, again_and_again in ((3, False), (4, True)):
        site.lease(site.home.run(run_id), number)
        assert reconciliation._crashes_again_and_again(site.home.run(run_id)) == again_and_again


def test_a_run_that_a_worker_could_not_give_back_on_a_full_disk_is_cancelled_when_there_is_room(
    site: EndingSite, tmp_path: Path, full_disk: Callable[..., None]
) -> None:
    """The worker, this process, lives on."""
    full = EndingSite(Home(tmp_path / "disk" / "home"), site.url, site.client)
    full.new_run = site.new_run  # type: ignore[method-assign]
    run_id, flow_run_id = full.run("dead", Running())
    full.lease(full.home.run(run_id))
    full_disk(leave=4096)  # room for a lease, and for nothing else
    full.compare()
    assert newest_lease(full.home.run(run_id)).number == 2
    assert (full.status(run_id), full.kind(flow_run_id)) == ("crashed", "RUNNING")
    (tmp_path / "disk" / "filler").unlink()
    assert full.cancel(run_id) == (True, f"{run_id} had crashed; it is marked cancelled")
    assert (full.status(run_id), full.kind(flow_run_id)) == ("cancelled", "CANCELLED")
