"""Workers that share no files share their runs through an S3-compatible store."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import SIGNAL, Lab, kill
from recorded_home import record_run, write
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers
from pipelines.remote import sharing
from pipelines.remote.mirror import Mirror, open_source
from pipelines.remote.object_store import ObjectStore
from pipelines.remote.sharing import SharedRun
from pipelines.remote.sources import SourceError
from specs.machine.fence import SupersededError, lease_file
from specs.machine.files import digest, read_json
from specs.machine.lease import RunBusyError
from specs.machine.liveness import newest_lease
from storage import Store

RUN = "sums-s0"

LONG = ("training.steps=300", "training.checkpoint.every_steps=20", *SIGNAL)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A moto server, and its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{url}/moto-api/"), what="moto")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def url(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty store, for this process and those that it starts."""
    import boto3

    settings = {"AWS_ENDPOINT_URL": s3, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (settings | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    bucket = "b" + "".join(character for character in tmp_path.name if character.isalnum())[-40:].lower()
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    monkeypatch.setattr(sharing, "_SECONDS", 0.2)
    return f"s3://{bucket}/team"


def machine(tmp_path: Path, url: str, name: str) -> tuple[Home, SharedRun]:
    """A home of its own, and the run in it and in the store."""
    home = Home(tmp_path / name)
    return home, SharedRun(ObjectStore(url), home, RUN)


def in_store(url: str) -> dict[str, str]:
    """Path -> digest of each file that the store's listing of the run names; each is there."""
    store = ObjectStore(url)
    listed = store.listings([f"runs/{RUN}"]).get(f"runs/{RUN}", {})
    return {path: file.version for path, file in listed.items()}


def test_a_run_goes_to_another_machine_as_it_was_left(tmp_path: Path, url: str) -> None:
    first, run = machine(tmp_path, url, "first")
    with run.held("a", []):
        record_run(first, RUN, steps=5, problems=4)
        checkpoint = first.run(RUN) / "checkpoints" / "step-000005"
        write(checkpoint / "manifest.json", {"step": 5})
        (checkpoint / "learner.safetensors").write_bytes(os.urandom(9 * 2**20))
        write(first.run(RUN) / "process.json", {"pid": 1})
        write(first.run(RUN) / "checkpoints/.step-000006.partial/manifest.json", {})
    second, run = machine(tmp_path, url, "second")
    with run.held("b", []) as lease:
        assert lease.number == 2
        for path in first.run(RUN).rglob("[!.]*.*"):
            inside = path.relative_to(first.root)
            kept = path.is_file() and path.name != "process.json" and not any(p.startswith(".") for p in inside.parts)
            assert (second.root / inside).is_file() == kept, inside
            assert not kept or inside.parts[2] == "leases" or digest(path) == digest(second.root / inside)


def test_what_has_not_changed_is_not_sent_again_and_what_is_gone_is_removed(tmp_path: Path, url: str) -> None:
    home, run = machine(tmp_path, url, "first")
    record_run(home, RUN, steps=5, problems=4)
    old, new = (home.run(RUN) / "checkpoints" / f"step-00000{step}" / "manifest.json" for step in (2, 4))
    write(old, {"step": 2})
    sent: list[str] = []
    store = run._store
    send = store.send
    store.send = lambda root, path: (sent.append(path), send(root, path))[1]  # type: ignore[method-assign]
    with run.held("a", []):
        wait_for(lambda: str(old.relative_to(home.root)) in in_store(url), what="the checkpoint")
        old.unlink()
        write(new, {"step": 4})
        wait_for(lambda: str(new.relative_to(home.root)) in in_store(url), what="the next checkpoint")
    assert str(old.relative_to(home.root)) not in in_store(url)
    with pytest.raises(FileNotFoundError):
        store.read(str(old.relative_to(home.root)))
    others = [path for path in sent if "/leases/" not in path]
    assert sorted(others) == sorted(set(others))


def test_a_machine_that_never_had_a_run_learns_how_it_stands(tmp_path: Path, url: str) -> None:
    first, run = machine(tmp_path, url, "first")
    second, elsewhere = machine(tmp_path, url, "second")
    elsewhere.fetch_standing()
    assert not second.run(RUN).exists()
    with run.held("a", []):
        write(first.run(RUN) / "state.json", {"status": "running"})
        wait_for(lambda: f"runs/{RUN}/state.json" in in_store(url), what="the state")
        elsewhere.fetch_standing()
        assert read_json(second.run(RUN) / "state.json") == {"status": "running"}
        assert newest_lease(second.run(RUN)).is_held()
        # What this home records is newer here than in the store.
        write(first.run(RUN) / "state.json", {"status": "finished"})
        run.fetch_standing()
        assert read_json(first.run(RUN) / "state.json") == {"status": "finished"}
    elsewhere.fetch_standing()
    assert not newest_lease(second.run(RUN)).is_held()


def test_one_of_two_machines_gets_the_run(tmp_path: Path, url: str) -> None:
    _, first = machine(tmp_path, url, "first")
    second_home, second = machine(tmp_path, url, "second")
    with first.held("a", []), pytest.raises(RunBusyError), second.held("b", []):
        pass
    # Both found it free, and the other was first to enter its lease into the store.
    store = ObjectStore(url)
    fetch_leases = second.fetch_leases
    looked = iter([fetch_leases])

    def look_then_lose() -> int:
        newest = next(looked, fetch_leases)()
        store.create(f"runs/{RUN}/leases/0002.json", json.dumps({"number": 2, "host": "elsewhere"}).encode())
        return newest

    second.fetch_leases = look_then_lose  # type: ignore[method-assign]
    with pytest.raises(RunBusyError, match="another machine"), second.held("b", []):
        pass
    assert newest_lease(second_home.run(RUN)).host == "elsewhere"


def test_a_machine_that_was_cut_off_learns_that_its_run_was_taken_and_sends_nothing_more(
    tmp_path: Path, url: str
) -> None:
    home, run = machine(tmp_path, url, "first")
    with run.held("a", []) as lease:
        write(home.run(RUN) / "state.json", {"status": "running"})
        wait_for(lambda: f"runs/{RUN}/state.json" in in_store(url), what="the state")
        taken = json.dumps({"number": 2, "host": "elsewhere"}).encode()
        assert ObjectStore(url).create(f"runs/{RUN}/leases/0002.json", taken)
        wait_for(lambda: lease.superseded, timeout=20, what="the fence")
        with pytest.raises(SupersededError):
            lease.fence.check()
        before = in_store(url)[f"runs/{RUN}/state.json"]
        write(home.run(RUN) / "state.json", {"status": "finished"})
        time.sleep(1)
    assert in_store(url)[f"runs/{RUN}/state.json"] == before


def test_an_artifact_is_made_on_one_machine_and_fetched_on_another(tmp_path: Path, url: str) -> None:
    first, run = machine(tmp_path, url, "first")
    unit = "artifacts/base/0123456789abcdef"
    (first.root / unit / "deep").mkdir(parents=True)
    (first.root / unit / "deep" / "model.safetensors").write_bytes(b"weights")
    with run.held("a", [unit]):
        time.sleep(0.5)
        assert unit not in ObjectStore(url).tokens()  # not whole yet
        write(first.root / unit / "manifest.json", {"fingerprint": "0123456789abcdef"})
    second, run = machine(tmp_path, url, "second")
    run.fetch_artifact(second.root / unit)
    assert (second.root / unit / "deep" / "model.safetensors").read_bytes() == b"weights"
    assert read_json(second.root / unit / "manifest.json") == {"fingerprint": "0123456789abcdef"}


def test_a_client_reads_the_store_as_it_would_the_home(tmp_path: Path, url: str) -> None:
    home, run = machine(tmp_path, url, "first")
    with run.held("a", []):
        record_run(home, RUN, steps=5, problems=4)
        write(home.run(RUN) / "weights/step-000005/config.json", {})
    source = open_source(url, "")
    mirror = Mirror(Home(tmp_path / "mirror"), source)
    mirror.pull()
    assert rows(mirror.home, "from run_summary") == rows(home, "from run_summary") != []
    assert not (mirror.home.run(RUN) / "weights").exists()
    with run.held("a", []):
        write(home.run(RUN) / "state.json", read_json(home.run(RUN) / "state.json") | {"reason": "changed"})
    mirror.pull()
    assert read_json(mirror.home.run(RUN) / "state.json")["reason"] == "changed"


def rows(home: Home, query: str) -> list[Any]:
    with Store.open(home.root) as store:
        return list(store.query(query).rows)


def test_a_store_cannot_have_a_machine_write_outside_of_the_run(tmp_path: Path, url: str) -> None:
    _, run = machine(tmp_path, url, "first")
    store = ObjectStore(url)
    for path in (f"runs/{RUN}/../../outside", "/etc/passwd", "prefect/profiles.toml", f"runs/{RUN}/.hidden"):
        document = json.dumps({"files": {path: [1, "0"]}}).encode()
        store._files.pipe_file(f"{store._root}/listings/runs/{RUN}.json", document)
        with pytest.raises(SourceError, match="outside"), run.held("a", []):
            pass
    assert not (tmp_path / "outside").exists()


def test_training_goes_on_while_the_store_is_away(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, run = machine(tmp_path, url, "first")
    store = run._store
    with run.held("a", []):
        with monkeypatch.context() as away:
            away.setattr(store, "_root", "no-such-bucket/team")
            write(home.run(RUN) / "state.json", {"status": "running"})
            time.sleep(1)
        wait_for(lambda: f"runs/{RUN}/state.json" in in_store(url), what="what was recorded meanwhile")


def test_a_store_that_nothing_opens_is_named() -> None:
    for place in ("nonsense", "nosuchkind://a/b"):
        with pytest.raises(SourceError, match=place.partition(":")[0]):
            open_source(place, "")


@pytest.mark.long
def test_a_worker_of_another_machine_goes_on_from_the_checkpoint_of_one_that_died(
    lab: Lab, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two homes that share nothing; a third one reads. Figures are those of a run that nothing happened to."""
    whole = lab.rpg("run", str(lab.spec), overrides=LONG)
    assert whole.code == 0, whole.err
    monkeypatch.setenv("RPG_STORE", url)
    first, second = (Lab(tmp_path / name, lab.spec) for name in ("first", "second"))
    dying = first.start("run", str(lab.spec), overrides=LONG)
    run_id = lab.run_ids()[0]
    store = ObjectStore(url)

    def sent_checkpoint() -> bool:
        listed = store.listings([f"runs/{run_id}"]).get(f"runs/{run_id}", {})
        return any("/checkpoints/" in path for path in listed)

    wait_for(sent_checkpoint, timeout=240, what="a checkpoint in the store")
    trainer = first.training_pid()
    kill(dying.pid)
    if trainer:
        kill(trainer)
    result = second.rpg("run", str(lab.spec), overrides=LONG)
    assert result.code == 0, result.err
    attempts = sorted(path.stem for path in (second.home.run(run_id) / "attempts").glob("*.json"))
    assert attempts == ["0001", "0002"]
    assert read_json(second.home.run(run_id) / "attempts/0002.json")["resumed_from_step"] > 0
    assert lease_file(second.home.run(run_id), 2).exists()
    source = open_source(url, "")
    mirror = Mirror(Home(tmp_path / "third"), source)
    mirror.pull()
    figures = (
        "select step, name, value from metrics where name not like 'time/%' and name not like '%per_second%'"
        " and name not like 'memory/%' order by all"
    )
    assert rows(mirror.home, figures) == rows(second.home, figures) == rows(lab.home, figures) != []
    assert rows(mirror.home, "select run_id, status, step from runs") == [(run_id, "finished", 300)]
    second.assert_trained(run_id)
    for lab_ in (first, second):
        lab_.clean_up()
