"""Runs in a store that is slow or away, or taken over meanwhile. It lies in memory here; `test_object_store` has S3."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_home import write
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.remote import sharing
from pipelines.remote.object_store import ObjectStore
from pipelines.remote.sharing import SharedRun, StoreAwayError, send_unsent
from specs.machine import lease as leases
from specs.machine.fence import lease_file
from specs.machine.files import read_json
from specs.machine.liveness import newest_lease

RUN = "sums-s0"
STATE, CHECKPOINT = f"runs/{RUN}/state.json", f"runs/{RUN}/checkpoints/step-000005/learner.safetensors"
TAKEN = json.dumps({"number": 2, "host": "elsewhere"}).encode()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty store, which this process' runs share."""
    url = f"memory://{tmp_path.name}/team"
    monkeypatch.setenv("RPG_STORE", url)
    monkeypatch.setattr(sharing, "_SECONDS", 0.05)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    return url


def machine(tmp_path: Path, url: str, name: str) -> tuple[Home, SharedRun]:
    home = Home(tmp_path / name)
    return home, SharedRun(ObjectStore(url), home, RUN)


def stored(url: str, path: str) -> Any:
    with contextlib.suppress(FileNotFoundError):
        return json.loads(ObjectStore(url).read(path))


def listed(url: str) -> set[str]:
    return set(ObjectStore(url).listings([f"runs/{RUN}"]).get(f"runs/{RUN}", {}))


def record_checkpoint(home: Home, status: str) -> None:
    write(home.root / CHECKPOINT, {"step": 5})
    write(home.root / STATE, {"status": status})


class _Away:
    """A storage that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("connection refused")


@contextlib.contextmanager
def away(run: SharedRun) -> Iterator[None]:
    files, run._store._files = run._store._files, _Away()
    yield
    run._store._files = files


def while_moving(run: SharedRun, name: str, path: str, what: Callable[[], None]) -> None:
    """Has something happen while the store fetches or sends one file."""
    move = getattr(run._store, name)

    def moved(*arguments: Any) -> Any:
        if path in arguments:
            what()
        return move(*arguments)

    setattr(run._store, name, moved)


def test_a_run_whose_checkpoint_takes_long_to_fetch_or_to_send_does_not_look_dead(tmp_path: Path, url: str) -> None:
    first_home, first = machine(tmp_path, url, "first")
    second_home, second = machine(tmp_path, url, "second")
    lease = f"runs/{RUN}/leases/{{:04}}.json"

    def beats(number: int) -> None:
        path = lease.format(number)
        wait_for(lambda: stored(url, path) is not None, what="the lease")
        before = stored(url, path)
        assert not before["released"]
        wait_for(lambda: stored(url, path)["beat"] > before["beat"] + 1, timeout=10, what="the heartbeat")
        assert not stored(url, path)["released"]

    with first.held("a", []):
        wait_for(lambda: first._listing.acquire(), what="the listing")  # what is recorded now is sent at the end
        record_checkpoint(first_home, "finished")
        while_moving(first, "send", CHECKPOINT, lambda: beats(1))
        first._listing.release()
    assert stored(url, lease.format(1))["released"]
    fetched: list[int] = []
    while_moving(second, "fetch", CHECKPOINT, lambda: (beats(2), fetched.append(2))[0])
    with second.held("b", []):
        assert fetched
        assert read_json(second_home.root / STATE) == {"status": "finished"}
    assert stored(url, lease.format(2))["released"]


def test_a_lease_that_is_released_in_the_store_says_that_the_record_is_there(tmp_path: Path, url: str) -> None:
    home, run = machine(tmp_path, url, "first")
    lease, sent = f"runs/{RUN}/leases/0001.json", []
    send = run._store.send

    def note(root: Path, path: str) -> Any:
        version = send(root, path)
        sent.append((path, stored(url, lease)["released"]))
        return version

    run._store.send = note  # type: ignore[method-assign]
    with run.held("a", []):
        record_checkpoint(home, "finished")
    assert {STATE, CHECKPOINT} <= {path for path, _ in sent}
    assert [path for path, released in sent if released] == [lease]
    assert {STATE, CHECKPOINT, lease} <= listed(url)


def test_a_run_that_is_taken_while_its_record_is_sent_keeps_the_other_machines_record(tmp_path: Path, url: str) -> None:
    home, run = machine(tmp_path, url, "first")
    others = {f"runs/{RUN}/leases/0002.json", f"runs/{RUN}/state.json", f"runs/{RUN}/attempts/0002.json"}
    store = ObjectStore(url)

    def take() -> None:
        if store.create(f"runs/{RUN}/leases/0002.json", TAKEN):
            versions = {path: store.write(path, b'{"status": "elsewhere"}') for path in others if "leases" not in path}
            lease = store.listings([f"runs/{RUN}"]).get(f"runs/{RUN}", {})
            store.write_listing(f"runs/{RUN}", lease | versions)

    while_moving(run, "send", CHECKPOINT, take)
    with run.held("a", []) as lease:
        write(home.root / STATE, {"status": "running"})
        wait_for(lambda: STATE in listed(url), what="the listing")
        record_checkpoint(home, "finished")
        wait_for(lambda: lease.superseded, what="the fence")
        time.sleep(0.3)  # some heartbeats
    assert others - {f"runs/{RUN}/leases/0002.json"} <= listed(url)
    assert stored(url, STATE) == {"status": "elsewhere"}
    assert stored(url, f"runs/{RUN}/attempts/0002.json") == {"status": "elsewhere"}
    send_unsent(home)
    assert stored(url, STATE) == {"status": "elsewhere"}


def end_while_away(tmp_path: Path, url: str) -> tuple[Home, SharedRun]:
    """A machine whose run finished while the store was away."""
    home, run = machine(tmp_path, url, "first")
    with contextlib.ExitStack() as outage, run.held("a", []):
        write(home.root / STATE, {"status": "running"})
        wait_for(lambda: stored(url, STATE) == {"status": "running"}, what="the state")
        outage.enter_context(away(run))
        record_checkpoint(home, "finished")
    assert stored(url, STATE) == {"status": "running"}
    return home, run


def test_what_a_run_recorded_while_the_store_was_away_at_its_end_is_sent_later(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = end_while_away(tmp_path, url)
    lease = f"runs/{RUN}/leases/0001.json"
    released: list[bool] = []
    send = ObjectStore.send

    def note(store: ObjectStore, root: Path, path: str) -> Any:
        released.append(stored(url, lease)["released"])
        return send(store, root, path)

    monkeypatch.setattr(ObjectStore, "send", note)
    send_unsent(home)
    assert stored(url, STATE) == {"status": "finished"}
    assert stored(url, lease)["released"]
    assert released.count(False) >= 3  # state, checkpoint, lease
    assert {STATE, CHECKPOINT} <= listed(url)
    assert not list((home.root / "remote").rglob("*.json"))


def test_what_was_not_sent_is_dropped_when_another_machine_has_the_run(tmp_path: Path, url: str) -> None:
    home, _ = end_while_away(tmp_path, url)
    ObjectStore(url).create(f"runs/{RUN}/leases/0002.json", TAKEN)
    send_unsent(home)
    assert stored(url, STATE) == {"status": "running"}
    assert CHECKPOINT not in listed(url)
    assert newest_lease(home.run(RUN)).host == "elsewhere"


def test_what_was_not_sent_is_kept_while_the_store_is_away_and_when_the_run_goes_on_here(
    tmp_path: Path, url: str
) -> None:
    home, run = end_while_away(tmp_path, url)
    with away(run):
        run.send_unsent()
    assert [path.stem for path in (home.root / "remote").rglob("*.json")] == [RUN]
    again = SharedRun(ObjectStore(url), home, RUN)
    with again.held("a", []) as lease:
        assert lease.number == 2
        assert read_json(home.root / STATE) == {"status": "finished"}
        assert (home.root / CHECKPOINT).exists()
        send_unsent(home)  # leaves it to who holds the run
        assert list((home.root / "remote").rglob("*.json"))
    assert stored(url, STATE) == {"status": "finished"}
    assert not list((home.root / "remote").rglob("*.json"))


def test_a_run_does_not_begin_while_the_store_is_away_and_can_be_tried_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run = machine(tmp_path, url, "first")
    with away(run), pytest.raises(StoreAwayError, match=f"{RUN} was not begun.*connection refused"), run.held("a", []):
        pass
    with monkeypatch.context() as outage:
        outage.setattr(run._store, "create", _Away().__getattr__)
        with pytest.raises(StoreAwayError), run.held("a", []):
            pass
    assert not lease_file(home.run(RUN), 1).exists()
    with monkeypatch.context() as outage:
        outage.setattr(run._store, "listings", _Away().__getattr__)
        with pytest.raises(StoreAwayError), run.held("a", []):
            pass
    assert stored(url, f"runs/{RUN}/leases/0001.json")["released"]
    with run.held("a", []) as lease:
        assert lease.number == 2


def test_two_machines_list_the_runs_of_both_in_their_experiment(tmp_path: Path, url: str) -> None:
    (first_home, first), (second_home, second) = (machine(tmp_path, url, name) for name in ("first", "second"))
    unit = "experiments/sums"

    def record(home: Home, run_id: str, at: str, fingerprint: str = "f") -> None:
        about = {"name": "sums", "runs": [run_id], "current": [run_id], "labels": {run_id: f"label of {run_id}"}}
        write(home.root / unit / "experiment.json", about | {"updated_at": at, "fingerprint": fingerprint})

    def send(*runs: SharedRun) -> dict[str, Any]:
        for run in runs:
            run._send_unit(unit)
        document = stored(url, f"{unit}/experiment.json")
        assert isinstance(document, dict)
        return document

    record(first_home, "a", "2026-01-02T00:00:00+00:00")
    record(second_home, "b", "2026-01-01T00:00:00+00:00")
    together = send(first, second)
    assert together["runs"] == together["current"] == ["a", "b"]
    assert together["labels"] == {"a": "label of a", "b": "label of b"}
    tokens = ObjectStore(url).tokens()
    assert send(first, second, first, second) == together
    assert ObjectStore(url).tokens() == tokens  # nobody sends it back and forth
    # Another spec: its runs are the current ones, and the older ones stay listed.
    record(second_home, "c", "2026-01-03T00:00:00+00:00", "g")
    changed = send(second, first, second)
    assert (changed["runs"], changed["current"]) == (["a", "b", "c"], ["c"])


def test_versions_of_the_same_cells_on_two_machines_are_one(tmp_path: Path, url: str) -> None:
    (first_home, first), (second_home, second) = (machine(tmp_path, url, name) for name in ("first", "second"))
    unit = "experiments/sums"

    def record(home: Home, at: str, *versions: tuple[int, str, str]) -> None:
        plain = [{"version": number, "recipes": [recipe], "runs": [run_id]} for number, recipe, run_id in versions]
        runs = [run_id for *_, run_id in versions]
        about = {"name": "sums", "runs": runs, "current": runs[-1:], "versions": plain, "updated_at": at}
        write(home.root / unit / "experiment.json", about | {"fingerprint": at})

    record(first_home, "2026-01-02T00:00:00+00:00", (1, "short", "short-s0"), (2, "long", "long-s0"))
    record(second_home, "2026-01-03T00:00:00+00:00", (1, "wide", "wide-s0"), (2, "short", "short-s1"))
    for run in (first, second, first, second):
        run._send_unit(unit)
    together = stored(url, f"{unit}/experiment.json")
    assert isinstance(together, dict)
    assert [(entry["version"], entry["runs"]) for entry in together["versions"]] == [
        *((2, ["long-s0"]), (3, ["wide-s0"]), (1, ["short-s0", "short-s1"])),
    ]
    assert together["current"] == ["short-s0", "short-s1"]
