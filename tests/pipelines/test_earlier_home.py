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
from releases import as_released, let_release_be
from unpacked_home import RECORDED, ROOT, unpack
from waiting import wait_for

from pipelines.cli import main
from pipelines.planning.code import release
from pipelines.prefect.server.deployments import EXPERIMENTS, SCHEDULES, STUDIES
from storage import check
from storage import ingest as ingesting
from storage.columns import NATIVE
from storage.contents import inspect, merged_away, read
from storage.ingest import ingest
from storage.segments import Segment, run_segments

ANSWERS = json.loads((RECORDED / "answers.json").read_text())
FINISHED, STOPPED, WAITING = "finished-s0-5c295933", "stopped-s0-991d3519", "waiting-s0-0836304d"
SINCE = f"gives other results since {release().version}"
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


@pytest.mark.more
@pytest.mark.parametrize("known", ANSWERS, ids=lambda known: " ".join(known["question"][:2])[:60])
def test_it_answers_as_it_answered_the_version_that_wrote_it(unpacked: Path, ask: Ask, known: dict[str, Any]) -> None:
    assert_still_true(answer(ask, unpacked, known["question"]), known["answer"])


def answer(ask: Ask, place: Path, question: list[str]) -> list[Any]:
    found = json.loads(ask(place, *question))
    return found if isinstance(found, list) else [found]


def assert_still_true(now: Any, then: Any) -> None:
    """Asserts that nothing has changed, except for additional output."""
    if isinstance(then, dict):
        assert set(then) <= set(now)
        for name, value in then.items():
            assert_still_true(now[name], value)
    elif isinstance(then, list):
        assert len(now) == len(then)
        for left, right in zip(now, then, strict=True):
            assert_still_true(left, right)
    else:
        assert now == then


def test_a_plan_names_each_stage_that_gives_other_results_by_now(unpacked: Path, ask: Ask) -> None:
    for run in json.loads(ask(unpacked, "plan", f"{ROOT}/specs/finished.yaml", "--json"))["runs"]:
        stages = {stage["stage"]: stage for stage in run["stages"]}
        assert {stage["action"] for stage in stages.values()} == {"RUN"}
        for name in ("data", "train", "evaluate"):
            assert stages[name]["reason"].startswith(f"{name} {SINCE}")


def test_what_is_done_has_the_fingerprints_that_it_was_written_with(
    unpacked: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_release_be(monkeypatch, as_released(data=1, base=1, train=2, evaluate=1))
    runs = json.loads(ask(unpacked, "plan", f"{ROOT}/specs/finished.yaml", "--json"))["runs"]
    assert [{stage["action"] for stage in run["stages"]} for run in runs] == [{"CACHED"}] * 2
    assert runs[0]["run_id"] == FINISHED


@pytest.mark.more
def test_its_record_is_whole_and_its_database_is_made_again_the_same(moved: Lab, ask: Ask) -> None:
    place = moved.root.parent
    assert all(line.startswith("experiments.duckdb: of schema version ") for line in check(moved.root))
    assert "skipped" not in ask(place, "db", "rebuild")
    assert ask(place, "db", "check") == "all is well\n"
    for known in ANSWERS:
        if known["question"][0] == "sql":
            assert_still_true(answer(ask, place, known["question"]), known["answer"])


@pytest.mark.more
def test_migrating_reads_the_footer_of_each_segment_and_the_rows_of_small_tables_and_then_nothing(
    moved: Lab, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []

    def noted(root: Path, segment: Segment) -> pa.Table:
        tables.append(segment.table)
        return read(root, segment)

    monkeypatch.setattr(ingesting, "read", noted)
    segments = [segment for run_id in moved.run_ids() for segment in run_segments(moved.root, run_id)]
    merged = merged_away(moved.root, segments)
    listed = [segment for segment in segments if segment.key not in merged]
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


@pytest.mark.more
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
    """The numbers with four places on a page, as measures are given, without those in charts."""
    text = re.sub(r"<svg\b.*?</svg>", "", page.read_text(), flags=re.DOTALL)
    found = set(re.findall(r">\s*(0\.\d{4})\b", text))
    assert found, page
    return found


@pytest.mark.more
def test_running_it_again_runs_nothing_where_its_results_are_accepted(moved: Lab) -> None:
    before = {run_id: moved.state(run_id) for run_id in moved.run_ids()}
    flow_runs = prefect_rows(moved, "SELECT count(*) FROM flow_run")
    result = moved.rpg("run", str(moved.spec), "--accept-code")
    assert result.code == 0, result.err
    assert result.err.count(" cached\n") == 10
    for run_id in moved.run_ids():
        assert moved.state(run_id) == before[run_id]
        assert not (moved.home.run(run_id) / "attempts" / "0002.json").exists()
    assert prefect_rows(moved, "SELECT count(*) FROM flow_run") == flow_runs, "what is done needs no server"


@pytest.mark.more
def test_what_is_half_done_does_not_go_on_by_code_that_gives_other_results(moved: Lab) -> None:
    resumed = moved.rpg("resume", STOPPED)
    assert (resumed.code, resumed.out) == (2, "")
    assert f"cannot continue as {STOPPED}: data {SINCE}" in resumed.err
    study = moved.rpg("study", "run", str(moved.spec.with_name("halfway.yaml")))
    assert study.code == 2
    other = "run by other code than the stored study's trials; it differs in: data, (base, )?train, evaluate"
    assert re.search(other, study.err), study.err


def prefect_rows(lab: Lab, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(lab.home.prefect / "prefect.db") as database:
        found = database.execute(sql).fetchall()
    database.close()
    return found


@pytest.mark.long
def test_of_what_waited_on_its_server_a_worker_begins_what_has_no_results_yet(moved: Lab) -> None:
    assert moved.rpg("up").code == 0
    try:
        entrypoints = dict(prefect_rows(moved, "SELECT name, entrypoint FROM deployment"))
        assert entrypoints == {ours.name: ours.entrypoint for ours in (EXPERIMENTS, SCHEDULES, STUDIES)}
        waiting = "SELECT name, state_type FROM flow_run WHERE name IN ('study later', 'waiting: seed 0') ORDER BY name"
        done = [("study later", "COMPLETED"), ("waiting: seed 0", "FAILED")]
        wait_for(lambda: prefect_rows(moved, waiting) == done, timeout=500, what="the run and the study")
    finally:
        moved.rpg("down")
    assert "the code another version" in moved.state(WAITING)["reason"]
    assert moved.query("SELECT state, value IS NULL FROM trials WHERE study = 'later'") == [("finished", False)]
    assert (moved.home.study("later") / "report.html").is_file()
