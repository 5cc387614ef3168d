"""Several workers at one study, in processes of their own: on the journal and on PostgreSQL, killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.study import StudyDirection
from places import ROOT, TESTS
from postgres import Postgres, postgres
from tiny_study import Evaluator, load_study, write_study

from pipelines.home.home import Home
from pipelines.prefect.server.outbox import SUSPENDED, Outbox
from pipelines.processes.stop import StopRequest
from pipelines.studies import storage
from pipelines.studies.ledger import TrialLedger
from pipelines.studies.study import run_study
from pipelines.studies.workers import StudyStop, request_study_cancel
from specs import SpecError, load_study_document
from specs.document import Document
from specs.machine.fence import lease_file
from specs.machine.files import create_json, now, read_json, write_json
from specs.machine.lease import acquire
from specs.machine.liveness import LeaseRecord, place_of

HERE = TESTS / "pipelines"
SEED = int(os.environ.get("RPG_KILL_SEED", random.SystemRandom().randrange(2**31)))
"""Seed of the moments; a failing test names it, and setting it gives the same moments again."""
FIRST_WORKER = """
import sys, time, psutil
from pathlib import Path
from pipelines.home.home import Home
from pipelines.studies.workers import more_workers
from specs import load_study_document

with more_workers(load_study_document(sys.argv[1]), Home(Path(sys.argv[2])), "http://127.0.0.1:9/api", 1):
    print(psutil.Process().children()[0].pid, flush=True)
    time.sleep(600)
"""
"""Starts a second worker, prints its number, and waits."""
ONE_SEED = ("trials: 8", "seeds_per_trial: 1\nsampler: {type: random}\ntrials: 16")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


def keep_in(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has studies kept in a fresh database."""
    fresh = f"t{random.randrange(2**40)}"
    subprocess.run(["psql", "-q", server.url, "-c", f"CREATE DATABASE {fresh}"], check=True)
    monkeypatch.setenv(storage.URL, server.url.replace("/postgres", f"/{fresh}"))


@pytest.fixture(params=["journal", pytest.param("postgresql", marks=pytest.mark.long)])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Place of the study's storage."""
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("server")
        keep_in(server, monkeypatch)
    return str(request.param)


def study(directory: Path, trials: int = 16, *more: tuple[str, str], sampler: str = "random") -> Path:
    text = ONE_SEED[1].replace("trials: 16", f"trials: {trials}").replace("random", sampler)
    path = write_study(directory, (ONE_SEED[0], text), *more)
    path.write_text(path.read_text().replace("sampler: {startup_trials: 3}\n", ""))
    return path


def worker(path: Path, home: Home, seconds: float = 0.0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "ignore", str(HERE / "tiny_study.py"), str(path), str(home.root), str(seconds)]
    search = os.pathsep.join([str(HERE), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": search}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def wait(processes: list["subprocess.Popen[str]"], timeout: float = 300) -> list[str]:
    """Returns their output; all must have succeeded."""
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, (SEED, err[-3000:])
        printed.append(out)
    return printed


def end(process: "subprocess.Popen[str]") -> None:
    """kill -9."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def assert_whole(home: Home, trials: int) -> None:
    """Every trial is there once, under its number, and has ended; none is doubled."""
    record = read_json(home.study("clips") / "study.json")
    assert [trial["number"] for trial in record["trials"]] == list(range(trials)), SEED
    assert Counter(trial["state"] for trial in record["trials"]) == {"finished": trials}, SEED
    assert len({json.dumps(trial["params"]) for trial in record["trials"]}) == trials, SEED
    assert {trial.state.name for trial in load_study(home, "clips").trials} == {"COMPLETE"}, SEED
    assert record["status"] == "finished"


@pytest.mark.more
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("sampler", [pytest.param("random", marks=pytest.mark.long), "auto"])
def test_workers_share_a_study(home: Home, tmp_path: Path, sampler: str) -> None:
    path = study(tmp_path / "specs", 12, sampler=sampler)
    printed = wait([worker(path, home, 0.2) for _ in range(3)])
    assert_whole(home, 12)
    begun = [line.split()[1] for out in printed for line in out.splitlines() if line.startswith("trial ")]
    assert sorted(map(int, begun)) == list(range(12)), "each was done by one worker"
    assert sum(bool(out.count("trial ")) for out in printed) > 1, "more than one worked"


@pytest.mark.more
@pytest.mark.usefixtures("kept")
def test_a_killed_workers_trial_is_taken_up_by_another(home: Home, tmp_path: Path) -> None:
    path = study(tmp_path / "specs", 6)
    killed = worker(path, home, 60)
    assert killed.stdout.readline().startswith("trial 0"), SEED
    time.sleep(1)
    end(killed)
    wait([worker(path, home)])
    assert_whole(home, 6)


@pytest.mark.more
@pytest.mark.usefixtures("kept")
def test_a_worker_that_was_given_up_for_dead_tells_nothing(home: Home, tmp_path: Path) -> None:
    document = load_study_document(study(tmp_path / "specs", 1))
    evaluator, lines = Evaluator(home), []
    leases = home.study("clips") / "trials" / "0"

    def overtaken(trial: Document, until: int) -> Any:
        outcomes = evaluator(trial, until)
        if len(evaluator.calls) == 1:  # meanwhile another has taken it up
            silent = LeaseRecord(2, "elsewhere", 1, "x", at="2026-01-01T00:00:00+00:00", place=place_of(leases))
            create_json(lease_file(leases, 2), asdict(silent))
        return outcomes

    record = run_study(document, home, overtaken, say=lines.append)
    assert any("another worker has taken it over" in line for line in lines)
    assert [trial["state"] for trial in record["trials"]] == ["finished"], "silent for long, that one is dead too"


def test_a_trial_is_taken_up_by_whoever_meets_no_living_lease_on_it(home: Home, tmp_path: Path) -> None:
    document = load_study_document(study(tmp_path / "specs", 2))
    directory = home.study("clips")
    directory.mkdir(parents=True)
    one, other = (
        TrialLedger(document, storage.open_storage(home, "clips"), directory, lambda: False, "") for _ in range(2)
    )
    one.open()
    other.open()
    claimed = one.claim(one.to_take_up(one.trials()), 0)
    assert (claimed.state, one.holds(claimed)) == ("running", True)
    assert one.to_take_up(one.trials()) == claimed, "it goes on with its own"
    assert other.to_take_up(other.trials()) is None
    one.release(claimed)
    assert [trial.state for trial in other.trials()] == ["pending"]
    taken = other.claim(other.to_take_up(other.trials()), 0)
    assert (one.holds(claimed), other.holds(taken)) == (False, True)
    leases = directory / "trials" / "0"
    for number, at, state in ((3, now(), "running"), (4, "2026-01-01T00:00:00+00:00", "pending")):
        elsewhere = LeaseRecord(number, "elsewhere", 1, "x", at=at, place=place_of(leases))
        create_json(lease_file(leases, number), asdict(elsewhere))
        assert not other.holds(taken)
        fresh = TrialLedger(document, storage.open_storage(home, "clips"), directory, lambda: False, "")
        fresh.open()
        (seen,) = fresh.trials()
        fresh._watch._seen = {leases: ((number, 0), -1e9 if state == "pending" else time.monotonic())}
        assert [trial.state for trial in fresh.trials()] == [state]
        assert (fresh.to_take_up(fresh.trials()) is not None) == (state == "pending"), seen


@pytest.mark.more
def test_a_worker_has_a_session_of_its_own_and_dies_with_the_one_that_started_it(home: Home, tmp_path: Path) -> None:
    search = os.pathsep.join([str(HERE), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", FIRST_WORKER, str(study(tmp_path / "specs")), str(home.root)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": search})
    try:
        second = psutil.Process(int(first.stdout.readline()))
        assert os.getsid(second.pid) == second.pid, "a terminal's Ctrl-C does not reach it beside the request to stop"
    finally:
        end(first)
    second.wait(timeout=30)


@pytest.mark.long
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("repetition", range(5))
def test_workers_are_killed_again_and_again(home: Home, tmp_path: Path, repetition: int) -> None:
    sampler = "auto" if repetition % 2 else "random"
    path, moments = study(tmp_path / "specs", 12, sampler=sampler), random.Random(SEED + repetition)
    running = [worker(path, home, 0.3) for _ in range(2)]
    for _ in range(4):
        time.sleep(moments.uniform(1, 4))
        end(running.pop(0))
        running.append(worker(path, home, 0.3))
    wait(running)
    assert_whole(home, 12)


def test_a_request_to_cancel_is_for_the_workers_that_it_met(home: Home) -> None:
    stop = StudyStop(home, "clips")
    assert stop.requested() is None
    time.sleep(0.01)
    request_study_cancel(home, "clips", grace=3)
    request = stop.requested()
    assert (request.grace, request.whole_command) == (3, True)
    time.sleep(0.01)
    assert StudyStop(home, "clips").requested() is None, "the next call goes on"


def test_a_study_stops_when_its_flow_run_is_cancelled_on_the_server(home: Home) -> None:
    outbox = Outbox(home, None)
    stop = StudyStop(home, "clips", outbox=outbox)
    assert stop.requested() is None
    outbox.request = StopRequest("cancelled", 5.0, whole_command=False)
    request = stop.requested(home.run("clips-s0"))
    assert request.whole_command, "no further trial is begun"
    assert stop.goes_on == ""


def test_a_suspended_study_goes_on_when_it_is_resumed_even_before_it_has_stopped(home: Home) -> None:
    outbox = Outbox(home, None)
    stop = StudyStop(home, "clips", outbox=outbox)
    outbox.request = StopRequest(SUSPENDED, 5.0, whole_command=False, status="pending")
    request = stop.requested()
    assert request.status == "cancelled", "the trial's own flow run is not to be scheduled"
    outbox.request = None
    assert stop.requested() == request
    assert stop.goes_on == SUSPENDED


def test_a_study_that_another_process_has_taken_over_stops(home: Home) -> None:
    directory = home.study_flow("clips", "0")
    with acquire(directory) as lease:
        stop = StudyStop(home, "clips", lease=lease)
        assert stop.requested() is None
        write_json(lease_file(directory, lease.number + 1), {})
        assert stop.requested() is not None
        assert stop.goes_on


def outage(server: Postgres, seconds: float) -> None:
    server.kill()
    time.sleep(seconds)
    server.start()


@pytest.mark.long
def test_a_killed_database_costs_no_trial(
    home: Home, tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    survive_outages(home, tmp_path, server, monkeypatch, outages=1, seed=SEED)


@pytest.mark.long
@pytest.mark.parametrize("repetition", range(5))
def test_a_database_is_killed_again_and_again(
    home: Home, tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch, repetition: int
) -> None:
    survive_outages(home, tmp_path, server, monkeypatch, outages=4, seed=SEED + repetition)


@pytest.mark.more
def test_nothing_is_written_under_a_lock_that_a_restart_has_taken_away(
    home: Home, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in(server, monkeypatch)
    kept = storage.open_storage(home, "clips")
    attempts = []

    def add_a_trial() -> int:
        study_id = kept.study_id("clips", [StudyDirection.MAXIMIZE])
        attempts.append(len(kept.storage.get_all_trials(study_id)))
        if len(attempts) == 1:
            outage(server, 0)
        kept.storage.create_new_trial(study_id)
        return study_id

    study_id = kept.transaction(add_a_trial)
    assert attempts == [0, 0], "started again from its input, without traces of the first attempt"
    assert len(kept.storage.get_all_trials(study_id)) == 1


@pytest.mark.more
def test_a_worker_that_opens_its_database_while_that_is_away_waits_and_says_so_once(
    home: Home, tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in(server, monkeypatch)
    server.kill()
    asked: list[str] = []

    def away(reason: str) -> bool:
        asked.append(reason)
        if len(asked) == 2:  # refused so far; from now on it is starting
            server.start()
        return False

    kept = storage.open_storage(home, "clips", away)
    assert kept.storage.get_all_studies() == []
    assert "cannot be opened: connection failed" in asked[0]
    # One that was just killed says for a while that it is starting up.
    assert storage._AWAY.search("FATAL:  the database system is starting up")
    assert not storage._AWAY.search('FATAL:  password authentication failed for user "rpg"')
    said: list[str] = []
    server.kill()
    document = load_study_document(study(tmp_path / "specs"))
    with pytest.raises(storage.StudyStorageError, match="cannot be opened"):
        run_study(document, home, Evaluator(home), say=said.append, stopping=lambda: bool(said))
    assert [line.partition(":")[0] for line in said] == ["waiting"]
    server.start()


def survive_outages(
    home: Home, tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch, *, outages: int, seed: int
) -> None:
    moments = random.Random(seed)
    keep_in(server, monkeypatch)
    path = study(tmp_path / "specs", 8 + 6 * outages)
    running = [worker(path, home, 0.3) for _ in range(2)]
    for process in running:
        process.stdout.readline()
    for _ in range(outages):
        time.sleep(moments.uniform(0.2, 3))
        outage(server, moments.uniform(0, 3))
    wait(running)
    assert_whole(home, 8 + 6 * outages)


@pytest.mark.long
def test_four_workers_do_two_hundred_trials_on_postgresql(
    home: Home, tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(storage.URL, server.url)
    path = study(tmp_path / "specs", 200)
    wait([worker(path, home) for _ in range(4)], timeout=1500)
    assert_whole(home, 200)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "names no database of studies"),
        ("postgresql://rpg@127.0.0.1:1/x", "cannot be opened"),
        ("postgresql://rpg@127.0.0.1:port/x", "cannot be opened"),
    ],
)
def test_a_database_that_is_not_one_is_named(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    monkeypatch.setenv(storage.URL, url)
    monkeypatch.setattr(storage, "OUTAGE_SECONDS", 0.0)
    with pytest.raises((SpecError, storage.StudyStorageError), match=message):
        run_study(load_study_document(study(tmp_path / "specs")), home, Evaluator(home))
