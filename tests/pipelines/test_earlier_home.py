"""A home that an earlier version left is asked, gone on with and reported on. How it was made: earlier_home/make.py."""

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from live import Lab
from unpacked_home import RECORDED, ROOT, unpack
from waiting import wait_for

from pipelines.cli import main
from pipelines.home.state import read_json
from pipelines.prefect.server.deployments import EXPERIMENTS, SCHEDULES, STUDIES
from storage import check
from storage import ingest as ingesting
from storage.columns import NATIVE
from storage.contents import inspect, read
from storage.ingest import ingest
from storage.segments import Segment, run_segments

ANSWERS = json.loads((RECORDED / "answers.json").read_text())
FINGERPRINTS = {
    "data": "c7d66bbc5851b036a6a49298fa154c6e411f12d32c7e95867db0fc1b4c15eb96",
    "base": "982e923420c6cd57125b82ef174c7203be200646c6118f0ec4c700fdcb4f9fca",
    "train": "28ab83f01ef262a49425b9254d7ad6a43424b0ef1dba87fe9e15c6097ba7aa59",
    "evaluate": "b0c1b6af4a7c71211208d789e04576be42a885973da2f1f51f1c64ae485b4ab5",
    "report": "233f1b8332ee8159d90cc5df4563a0d890e8bef9561e26cf8ffc26f69cb86017",
}
FINISHED, STOPPED, INTERRUPTED = "finished-s0-5c295933", "stopped-s0-991d3519", "halfway-s0-e08839fd"
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home with its specs and its data, at a place of its own."""
    place = tmp_path_factory.mktemp("recorded")
    unpack(place)
    return place


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[Lab]:
    """The home, to be changed."""
    unpack(tmp_path)
    lab = Lab(tmp_path / "home", tmp_path / "specs" / "finished.yaml")
    yield lab
    lab.clean_up()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """What a command prints, with what is named under `place` named as it was recorded."""

    def run(place: Path, *arguments: str) -> str:
        monkeypatch.setenv("RPG_HOME", str(place / "home"))
        monkeypatch.setattr(sys, "argv", ["rpg", *(argument.replace(ROOT, str(place)) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out.replace(str(place), ROOT)

    return run


@pytest.mark.parametrize("known", ANSWERS, ids=lambda known: " ".join(known["question"][:2])[:60])
def test_it_answers_as_it_answered_the_version_that_wrote_it(unpacked: Path, ask: Ask, known: dict[str, Any]) -> None:
    assert_still_true(answer(ask, unpacked, known["question"]), known["answer"])


def answer(ask: Ask, place: Path, question: list[str]) -> list[Any]:
    found = json.loads(ask(place, *question))
    if question[0] == "plan":
        found = found["runs"]
    return found if isinstance(found, list) else [found]


def assert_still_true(now: Any, then: Any) -> None:
    """Asserts that nothing has changed, but for what is told in addition."""
    if isinstance(then, dict):
        assert set(then) <= set(now)
        if now.get("stage") == "evaluate" and now.get("reason", "").startswith("evaluated as "):
            # An evaluation under another name was made once more then.
            assert (then["action"], now["action"]) == ("RUN", "CACHED")
            then = {name: value for name, value in then.items() if name not in ("action", "reason")}
        for name, value in then.items():
            assert_still_true(now[name], value)
    elif isinstance(then, list):
        assert len(now) == len(then)
        for left, right in zip(now, then, strict=True):
            assert_still_true(left, right)
    else:
        assert now == then


def test_what_is_done_is_cached_by_the_fingerprints_it_was_written_with(unpacked: Path, ask: Ask) -> None:
    runs = answer(ask, unpacked, ["plan", f"{ROOT}/specs/finished.yaml", "--json"])
    assert [{stage["action"] for stage in run["stages"]} for run in runs] == [{"CACHED"}] * 2
    assert runs[0]["run_id"] == FINISHED
    assert {stage["stage"]: stage["fingerprint"] for stage in runs[0]["stages"]} == FINGERPRINTS


def test_its_record_is_whole_and_its_database_is_made_again_the_same(moved: Lab, ask: Ask) -> None:
    place = moved.root.parent
    assert all(line.startswith("experiments.duckdb: of schema version ") for line in check(moved.root))
    assert "skipped" not in ask(place, "db", "rebuild")
    assert ask(place, "db", "check") == "all is well\n"
    for known in ANSWERS:
        if known["question"][0] == "sql":
            assert_still_true(answer(ask, place, known["question"]), known["answer"])


def test_migrating_reads_the_footer_of_each_segment_and_the_rows_of_small_tables_and_then_nothing(
    moved: Lab, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []

    def noted(root: Path, segment: Segment) -> pa.Table:
        tables.append(segment.table)
        return read(root, segment)

    monkeypatch.setattr(ingesting, "read", noted)
    listed = [segment for run_id in moved.run_ids() for segment in run_segments(moved.root, run_id)]
    inspect.cache_clear()
    ingest(moved.root)
    assert inspect.cache_info().misses == len(listed)
    assert sorted(tables) == sorted(segment.table for segment in listed if segment.table in NATIVE)
    for known in ANSWERS:
        if known["question"][0] == "sql":
            assert_still_true(answer(ask, moved.root.parent, known["question"]), known["answer"])
    for _ in range(2):  # the first deletes what had been merged, and the second looks at those runs again
        ingest(moved.root, keep_seconds=0.0)
        for directory in moved.root.rglob("*/"):  # what changed in the last seconds is looked at again in any case
            os.utime(directory, (0, 0))
    inspect.cache_clear()
    tables.clear()
    ingest(moved.root)
    assert (inspect.cache_info().misses, tables) == (0, [])


def test_its_runs_experiments_and_studies_are_reported_on(moved: Lab, ask: Ask) -> None:
    place = moved.root.parent
    pages = {
        FINISHED: (("report",), moved.home.run(FINISHED)),
        "finished": (("report",), moved.home.experiment("finished")),
        "clips": (("study", "report"), moved.home.study("clips")),
    }
    for name, (verb, directory) in pages.items():
        page = directory / "report.html"
        written = figures(page)
        page.unlink()
        assert ask(place, *verb, name) == f"{page}\n".replace(str(place), ROOT)
        assert written <= figures(page), name


def figures(page: Path) -> set[str]:
    """The numbers with four places on a page, as measures are given."""
    found = set(re.findall(r">\s*(0\.\d{4})\b", page.read_text()))
    assert found, page
    return found


def test_running_it_again_runs_nothing(moved: Lab) -> None:
    before = {run_id: moved.state(run_id) for run_id in moved.run_ids()}
    flow_runs = prefect_rows(moved, "SELECT count(*) FROM flow_run")
    result = moved.rpg("run", str(moved.spec))
    assert result.code == 0, result.err
    assert result.err.count(" cached\n") == 10
    for run_id in moved.run_ids():
        assert moved.state(run_id) == before[run_id]
        assert not (moved.home.run(run_id) / "attempts" / "0002.json").exists()
    assert prefect_rows(moved, "SELECT count(*) FROM flow_run") == flow_runs, "what is done needs no server"


def prefect_rows(lab: Lab, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(lab.home.prefect / "prefect.db") as database:
        found = database.execute(sql).fetchall()
    database.close()
    return found


@pytest.mark.long
def test_its_stopped_run_goes_on_from_its_checkpoint(moved: Lab) -> None:
    reached, steps = moved.progress(STOPPED), 40
    trained = f"SELECT step, name, value FROM metrics WHERE run_id = '{STOPPED}' AND step <= {reached} ORDER BY ALL"
    before = moved.query(trained)
    result = moved.rpg("resume", STOPPED, timeout=500)
    assert result.code == 0, result.err
    assert moved.state(STOPPED)["status"] == "finished"
    assert goes_on_from(moved, STOPPED) == reached
    assert moved.query(trained) == before
    rewards = f"SELECT step, count(*) FROM metrics WHERE run_id = '{STOPPED}' AND name = 'reward/mean' GROUP BY step"
    assert sorted(moved.query(rewards)) == [(step, 1) for step in range(1, steps + 1)]
    measured = f"SELECT DISTINCT step FROM evaluations WHERE run_id = '{STOPPED}' ORDER BY step"
    assert moved.query(measured) == [(0,), (steps,)]


def goes_on_from(lab: Lab, run_id: str) -> int:
    """The step whose checkpoint the second attempt took up."""
    return int(read_json(lab.home.run(run_id) / "attempts" / "0002.json")["resumed_from_step"])


@pytest.mark.long
def test_its_interrupted_study_goes_on_with_the_trial_under_way(moved: Lab) -> None:
    reached = moved.progress(INTERRUPTED)
    trials = "SELECT number, params, run_id, value FROM trials WHERE study = 'halfway' ORDER BY number"
    before = moved.query(trials)
    result = moved.rpg("study", "run", str(moved.spec.with_name("halfway.yaml")), timeout=500)
    assert result.code == 0, result.err
    first, second = moved.query(trials)
    assert first == before[0]
    assert second[:2] == before[1][:2]
    assert second[2] == INTERRUPTED
    assert second[3] is not None
    assert goes_on_from(moved, INTERRUPTED) == reached


@pytest.mark.long
def test_what_waited_on_its_server_is_taken_up_by_a_worker(moved: Lab) -> None:
    assert moved.rpg("up").code == 0
    try:
        entrypoints = dict(prefect_rows(moved, "SELECT name, entrypoint FROM deployment"))
        assert entrypoints == {ours.name: ours.entrypoint for ours in (EXPERIMENTS, SCHEDULES, STUDIES)}
        waiting = "SELECT name, state_type FROM flow_run WHERE name IN ('study later', 'waiting: seed 0') ORDER BY name"
        done = [("study later", "COMPLETED"), ("waiting: seed 0", "COMPLETED")]
        wait_for(lambda: prefect_rows(moved, waiting) == done, timeout=500, what="the run and the study")
    finally:
        moved.rpg("down")
    assert moved.query("SELECT status FROM runs WHERE experiment = 'waiting'") == [("finished",)]
    assert moved.query("SELECT state, value IS NULL FROM trials WHERE study = 'later'") == [("finished", False)]
    assert (moved.home.study("later") / "report.html").is_file()
