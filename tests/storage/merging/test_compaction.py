"""Merged segments: every row stays once, wherever a compaction is killed, and whatever is done to its files."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specs.segment_names import content_digest, parse_segment_name
from storage import Store, check, compact, rebuild
from storage.ingest import ingest
from storage.merging import compaction as module
from storage.merging.compaction import MOST_SMALL, compact_run
from tests.storage.recording import RecordedRun, flip, segment, write_json

TABLES = ("metrics", "rollouts", "tokens", "events", "evaluations", "evaluation_samples", "checkpoints")


def everything(home: Path) -> dict[str, list[tuple[object, ...]]]:
    with Store.open(home) as store:
        return {table: store.query(f"from {table} order by all").rows for table in (*TABLES, "runs")}


def files(run: RecordedRun) -> list[str]:
    return [path.name for path in run.path.glob("segments/*/*.parquet")]


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path, "sums-1", status="running")
    run.start(1)
    run.steps(1, 6)
    run.evaluate_on_the_way(4, 0.5)
    run.start(2, resumed_from_step=4)
    run.steps(5, 9, reward=0.7)
    run.checkpoint(9)
    run.evaluate()
    return run


@pytest.mark.more
def test_a_run_that_has_ended_has_one_file_a_table_and_answers_as_before(tmp_path: Path, run: RecordedRun) -> None:
    before = everything(tmp_path)
    assert before["metrics"]
    ingest(tmp_path, compact="sums-1", whole=True)
    assert everything(tmp_path) == before
    assert compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0).num_merged == 0
    assert everything(tmp_path) == before
    names = [parse_segment_name(name) for name in files(run)]
    assert len(names) == len(TABLES)
    assert sum(name is not None and name.is_compacted for name in names) == 4, "of a single file none is made"
    ingest(tmp_path)
    assert everything(tmp_path) == before
    rebuild(tmp_path)
    assert everything(tmp_path) == before
    assert check(tmp_path, full=True) == []


def test_a_run_that_goes_on_after_it_was_merged_is_merged_again(tmp_path: Path, run: RecordedRun) -> None:
    for resumed in (9, 7):
        compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
        run.start(run.attempt + 1, resumed_from_step=resumed)
        run.steps(resumed + 1, resumed + 3, reward=0.1 * run.attempt)
        before = everything(tmp_path)
        compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
        assert everything(tmp_path) == before
    compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
    assert sum(name.startswith("c0003") for name in files(run)) == 4
    assert [row[1] for row in before["metrics"] if row[2] == "reward/mean"] == list(range(1, 11))


@pytest.mark.more
def test_a_run_under_way_has_few_files_and_each_row_is_written_again_a_few_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SMALL", 4)
    run = RecordedRun(tmp_path, "sums-1", status="running")
    run.start(1)
    merged, most = 0, 0
    for step in range(1, 101):
        run.steps(step, step)
        merged += compact_run(tmp_path, "sums-1", whole=False, keep_seconds=0.0).num_merged
        compact_run(tmp_path, "sums-1", whole=False, keep_seconds=0.0)
        most = max(most, len(list((run.path / "segments/metrics").iterdir())))
    assert MOST_SMALL > 4
    assert most <= 4 + 8
    assert merged < 100 * 4 * 2, "segments are merged once, and what they became a few times"
    with Store.open(tmp_path) as store:
        assert store.query("select count(*), count(distinct step) from tokens").rows == [(600, 100)]


def test_what_was_merged_stays_for_readers_and_is_deleted_only_while_the_merged_file_is_whole(
    tmp_path: Path, run: RecordedRun
) -> None:
    before = everything(tmp_path)
    compact_run(tmp_path, "sums-1", whole=True)
    kept = len(files(run))
    compact_run(tmp_path, "sums-1", whole=True)
    assert len(files(run)) == kept
    (merged,) = (run.path / "segments/metrics").glob("c*.parquet")
    flip(merged, 60)
    compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
    assert len(list((run.path / "segments/metrics").iterdir())) > 1
    assert len(list((run.path / "segments/tokens").iterdir())) == 1
    assert f"metrics/{merged.name}: damaged: its content has changed" in check(tmp_path)[0]
    merged.unlink()
    assert everything(tmp_path) == before, "the segments that were merged count again"


def test_what_was_merged_of_runs_that_have_ended_is_deleted_by_a_later_ingest(tmp_path: Path, run: RecordedRun) -> None:
    before = everything(tmp_path)
    ingest(tmp_path, compact="sums-1", whole=True)
    assert len(files(run)) > len(TABLES)
    ingest(tmp_path)
    assert len(files(run)) > len(TABLES), "readers may have them open"
    ingest(tmp_path, keep_seconds=0.0)
    assert len(files(run)) == len(TABLES)
    assert everything(tmp_path) == before
    assert check(tmp_path) == []


def test_a_damaged_segment_stays_beside_what_the_others_become_and_is_named(tmp_path: Path, run: RecordedRun) -> None:
    ingest(tmp_path)
    broken = segment(run, "metrics", 2)
    flip(broken, 60)
    with Store.open(tmp_path) as store:
        rows = "select count(*) from recorded.metrics where step <> 2"
        before = store.query(rows).rows
        done = ingest(tmp_path, compact="sums-1", whole=True, keep_seconds=0.0)
        assert done.skipped == (f"{broken.relative_to(tmp_path)}: damaged: its content has changed",)
        store.refresh()
        assert store.query(rows).rows == before
        assert store.query("select count(*) from metrics where step = 2").rows == [(0,)]
        assert store.query("from metrics").warnings == (f"skipped {done.skipped[0]}",)
    ingest(tmp_path, compact="sums-1", whole=True, keep_seconds=0.0)
    first, second = sorted((run.path / "segments/metrics").iterdir())
    assert (first, second.name[0]) == (broken, "c")
    for full in (False, True):
        (line,) = check(tmp_path, full=full)
        assert line.endswith("learning curves, compare and report lack these steps")
    flip(broken, 60)
    assert ingest(tmp_path).skipped == ()
    assert len(Store.open(tmp_path).query("from metrics where step = 2").rows) == 3


def test_a_run_that_nobody_merged_is_merged_when_another_one_ends(tmp_path: Path, run: RecordedRun) -> None:
    left = [RecordedRun(tmp_path, f"left-{status}", status=status) for status in ("failed", "finished")]
    for other in left:
        other.start(1)
        other.steps(1, 3)
    ingest(tmp_path)
    before = everything(tmp_path)
    ingest(tmp_path, compact="sums-1", keep_seconds=0.0)
    assert [len(files(other)) for other in left] == [12, 12], "while a run goes on nothing of others is merged"
    for _ in range(3):
        ingest(tmp_path, compact="sums-1", whole=True, keep_seconds=0.0)
        merged = [len(list(other.path.glob("segments/metrics/c*"))) for other in left]
        assert sum(merged) > 0
    assert merged == [1, 1]
    assert [len(files(other)) for other in left] == [4, 4]
    assert len(files(run)) == len(TABLES)
    assert everything(tmp_path) == before
    assert check(tmp_path, full=True) == []


def test_a_run_that_cannot_be_merged_keeps_no_other_one_from_it(tmp_path: Path, run: RecordedRun) -> None:
    left = RecordedRun(tmp_path, "left")
    left.start(1)
    left.steps(1, 3)
    (left.path / f"segments/metrics/.c0001.{os.getpid()}.partial").mkdir()  # in the place of the file to be written
    ingest(tmp_path)
    before = everything(tmp_path)
    ingest(tmp_path, compact="sums-1", whole=True, keep_seconds=0.0)
    ingest(tmp_path, keep_seconds=0.0)
    assert len(files(run)) == len(TABLES)
    assert len(files(left)) == 12
    assert everything(tmp_path) == before


@pytest.mark.parametrize("after", [3, *(pytest.param(after, marks=pytest.mark.long) for after in (0, 6, 11))])
def test_a_compaction_killed_at_any_call_loses_and_doubles_nothing(
    tmp_path: Path, run: RecordedRun, after: int
) -> None:
    before = everything(tmp_path)
    ingest(tmp_path)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "calls = 0\n"
        "def hook(event, arguments):\n"
        "    global calls\n"
        "    if event in ('os.rename', 'os.remove', 'os.replace') and 'segments' in str(arguments[0]):\n"
        "        calls += 1\n"
        f"        if calls > {after}: os._exit(9)\n"
        "sys.addaudithook(hook)\n"
        "root = Path(sys.argv[1])\n"
        "from storage.merging.compaction import compact_run\n"
        "compact_run(root, 'sums-1', whole=True, keep_seconds=0.0)\n"
        "compact_run(root, 'sums-1', whole=True, keep_seconds=0.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert everything(tmp_path) == before
    run.state["status"] = "finished"
    run.save()
    before = everything(tmp_path)
    compact(tmp_path, keep_seconds=0.0)
    assert everything(tmp_path) == before
    assert len(files(run)) == len(TABLES)
    assert check(tmp_path, full=True) == []


def test_a_home_that_was_copied_or_moved_is_read_as_before(tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = RecordedRun(home, "sums-1")
    run.start(1)
    run.steps(1, 5)
    ingest(home, compact="sums-1", whole=True)
    before = everything(home)
    copied = Path(shutil.copytree(home, tmp_path / "step=5" / "copied"))
    assert everything(copied) == before
    assert check(copied) == []
    moved = home.rename(tmp_path / "moved")
    assert everything(moved) == before
    assert check(moved) == []
    inner = moved / "runs"
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    assert everything(moved) == before


def test_names_hold_the_digest_of_the_content(tmp_path: Path, run: RecordedRun) -> None:
    compact_run(tmp_path, "sums-1", whole=True)
    for path in run.path.glob("segments/*/*.parquet"):
        name = parse_segment_name(path.name)
        assert str(name) == path.name
        assert name.digest == content_digest(path)


def test_what_killed_writers_left_aside_goes_after_a_day(tmp_path: Path, run: RecordedRun) -> None:
    old, new = (run.path / "segments/metrics" / f".{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"PAR1")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    compact_run(tmp_path, "sums-1", whole=True)
    assert new.exists()
    assert not old.exists()


def test_rows_that_were_left_out_or_freed_on_purpose_are_nothing_wrong(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "sums-1")
    run.start(1)
    run.steps(1, 3)
    write_json(run.path / "progress.json", {"step": 3})
    ingest(tmp_path)
    assert check(tmp_path) == []
    for table in ("rollouts", "tokens"):
        shutil.rmtree(run.path / "segments" / table)
    assert len(check(tmp_path)) == 7, "each segment, and the steps of rollouts"
    write_json(run.path / "attempts" / "0001.json", {"resumed_from_step": 0, "record": {"rollouts": "none"}})
    assert {line.split("/")[3] for line in check(tmp_path)} == {"tokens"}
    write_json(run.path / "freed.json", {"tokens": {"freed_at": "2026-11-22", "keep_days": 1}})
    assert check(tmp_path) == []
