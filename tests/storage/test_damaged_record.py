"""Files of a record that are damaged, missing, or not files: their effects, and the report of `check`."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specs.documents.reading import read_checked
from specs.machine.liveness import newest_lease, start_of
from storage import Store, check, rebuild, units
from storage.database import database_path
from storage.ingest import ingest
from tests.storage.recording import RecordedRun, rewritten, write_json

EVERYTHING = ("runs", "stages", "attempts", "metrics", "rollouts", "tokens", "events", "checkpoints", "evaluations")
EVERYTHING += ("evaluation_samples", "artifacts", "provenance", "run_summary")
STEPS = "select run_id, count(distinct step) as steps from tokens group by run_id order by run_id"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two runs that have ended, and their index."""
    for number in range(2):
        run = RecordedRun(tmp_path, f"a-{number}", seed=number)
        write_json(run.path / "provenance.json", {"origins": [[["training", "steps"], "file", "a.yaml", 1]]})
        run.start(1)
        run.steps(1, 3)
        run.checkpoint(3)
        run.evaluate()
        age(run.path)
    ingest(tmp_path)
    return tmp_path


def age(directory: Path) -> None:
    """Sets all times in a directory back by an hour."""
    hour_ago = time.time() - 3600
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            os.utime(path, (hour_ago, hour_ago))


def everything(home: Path) -> dict[str, list[tuple[object, ...]]]:
    with Store.open(home) as store:
        return {name: store.query(f"select * from {name} order by all").rows for name in EVERYTHING}


def looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that a query reads because the index does not have them as they are."""
    looked: list[str] = []
    read = units.read_unit
    with monkeypatch.context() as patch:
        patch.setattr(units, "read_unit", lambda root, unit, *rest: (looked.append(unit), read(root, unit, *rest))[1])
        with Store.open(home) as store:
            store.query("select 1")
    return looked


@pytest.mark.more
@pytest.mark.parametrize(
    "table",
    [
        "tokens",
        "metrics",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rollouts", "events", "evaluation_samples")),
    ],
)
def test_a_segment_that_is_gone_is_named_and_stops_nothing_else(home: Path, table: str) -> None:
    files = sorted(home.glob(f"runs/a-0/**/segments/{table}/*.parquet"))
    lost, kept = files[0], files[0].read_bytes()
    lost.unlink()
    key = lost.relative_to(home).as_posix()
    with Store.open(home) as store:
        rows = store.query(f"select count(*) from {table} where run_id = 'a-1'")
        store.query(f"select count(*) from {table}")
        assert rows.rows[0][0] > 0
        if table != "evaluation_samples":  # which the stage's manifest lists, and this one's does not
            assert rows.warnings == (f"skipped {key}: the file is gone",)
    shutil.rmtree(home / "runs" / "a-1")
    ingest(home)
    if table != "evaluation_samples":
        assert any(line.startswith(f"{key}: the file is gone") and "`rpg db rebuild`" in line for line in check(home))
    lost.write_bytes(kept)
    with Store.open(home) as store:
        assert store.query(f"from {table}").warnings == ()
    rebuild(home)
    lost.unlink()
    rebuild(home)
    with Store.open(home) as store:
        assert store.query(f"from {table}").warnings == ()


@pytest.mark.more
def test_a_segment_that_was_truncated_in_place_stops_no_query_of_others_and_no_ingest(home: Path) -> None:
    (path, *_) = sorted((home / "runs/a-0/segments/tokens").glob("*.parquet"))
    before = path.parent.stat().st_mtime_ns
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    assert path.parent.stat().st_mtime_ns == before, "its directory's time tells nothing"
    with Store.open(home) as store:
        result = store.query(STEPS)
    assert result.rows == [("a-0", 2), ("a-1", 3)]
    assert f"{path.name}: damaged: " in result.warnings[0]
    shutil.rmtree(home / "runs" / "a-1")
    ingest(home)
    assert Store.open(home).query(STEPS).rows == [("a-0", 2)]


@pytest.mark.more
def test_a_pipe_named_like_a_segment_keeps_nobody_waiting(home: Path) -> None:
    pipe = home / "runs/a-0/segments/tokens/a0001-s000009-000009-0123456789abcdef.parquet"
    os.mkfifo(pipe)
    with Store.open(home) as store:
        result = store.query(STEPS)
    assert result.rows == [("a-0", 3), ("a-1", 3)]
    assert result.warnings == (f"skipped {pipe.relative_to(home)}: no regular file",)
    assert ingest(home).skipped
    assert any("no regular file" in line for line in check(home))


def test_a_pipe_in_the_place_of_a_document_or_the_index_keeps_nobody_waiting(home: Path) -> None:
    (home / "runs/a-0/state.json").unlink()
    os.mkfifo(home / "runs/a-0/state.json")
    database_path(home).unlink()
    os.mkfifo(database_path(home))
    with Store.open(home) as store:
        assert store.query("select run_id, status from runs order by all").rows == [
            ("a-0", "pending"),
            ("a-1", "finished"),
        ]
    assert any(line.startswith("runs/a-0/state.json: ") for line in check(home))


@pytest.mark.more
def test_an_index_that_is_a_directory_is_made_again_and_the_directory_kept(home: Path) -> None:
    expected = everything(home)
    database_path(home).unlink()
    database_path(home).mkdir()
    (database_path(home) / "mine").touch()
    assert everything(home) == expected
    with Store.open(home) as store:
        assert store.query("select 1").warnings[0].startswith("experiments.duckdb is a directory; reading the segments")
    assert check(home) == ["experiments.duckdb: a directory; `rpg db rebuild` rebuilds it"]
    rebuild(home)
    assert check(home) == []
    assert everything(home) == expected
    assert [path.name for path in home.glob("experiments.duckdb.*.directory/*")] == ["mine"]


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_flipped_bit_of_the_index_changes_no_answer_or_is_named(home: Path, seed: int) -> None:
    expected, draws = everything(home), random.Random(seed)
    whole = database_path(home).read_bytes()
    for _ in range(10):
        flipped = bytearray(whole)
        flipped[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        database_path(home).write_bytes(flipped)
        with Store.open(home) as store:
            warnings = store.query("from provenance").warnings
        assert everything(home) == expected
        assert not warnings or "`rpg db rebuild` rebuilds it" in check(home)[0]
    rebuild(home)
    assert check(home) == []


@pytest.mark.more
def test_a_flipped_bit_that_only_the_provenance_has_is_named(home: Path) -> None:
    whole = database_path(home).read_bytes()
    place = whole.index(b"a.yaml")
    database_path(home).write_bytes(whole[:place] + b"b" + whole[place + 1 :])
    assert check(home)[0].startswith("experiments.duckdb: ")
    with Store.open(home) as store:
        assert {row[0] for row in store.query("select file from provenance where file is not null").rows} == {"a.yaml"}
    ingest(home)


@pytest.mark.more
def test_a_run_that_crashed_is_looked_at_once_and_again_when_it_is_taken_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(home, "c-0", status="running")
    lease = {"host": os.uname().nodename, "pid": 2**22 + 5, "pid_started": start_of(os.getpid()), "beat": 1}
    write_json(run.path / "leases/0001.json", lease | {"at": "2026-11-20T12:00:00+00:00"})
    run.start(1)
    run.steps(1, 2)
    age(run.path)
    ingest(home)
    assert looked_at(home, monkeypatch) == []
    assert Store.open(home).query("select status from runs where run_id = 'c-0'").rows == [("crashed",)]
    write_json(run.path / "leases/0002.json", lease | {"pid": os.getpid(), "at": "2026-11-20T12:00:00+00:00"})
    assert looked_at(home, monkeypatch) == ["runs/c-0"]
    assert Store.open(home).query("select status from runs where run_id = 'c-0'").rows == [("running",)]
    ingest(home)
    assert looked_at(home, monkeypatch) == ["runs/c-0"], "one that is executed is looked at each time"


def test_of_a_run_that_has_ended_a_reader_looks_at_its_attempts_and_at_the_tables_that_it_reads(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    time_of = units._time_of
    monkeypatch.setattr(units, "_time_of", lambda path: (looked.append(path), time_of(path))[1])

    def looked_at_for(sql: str) -> list[str]:
        looked.clear()
        with Store.open(home) as store:
            store.query(sql)
        return sorted(path.removeprefix(f"{home}/runs/a-0/") for path in looked if "/a-0/" in path)

    assert looked_at_for("from runs") == ["attempts"]
    assert looked_at_for("from tokens") == ["attempts", "segments", "segments/tokens"]
    assert looked_at_for("from run_summary") == ["attempts", "evaluate", "segments", "segments/evaluations"]
    write_json(home / "runs/a-0/attempts/0002.json", {"attempt": 2, "resumed_from_step": 3})
    assert looked_at(home, monkeypatch) == ["runs/a-0"]


def test_a_segment_that_is_gone_from_a_copied_home_is_named(home: Path) -> None:
    (lost, *_) = sorted(home.glob("runs/a-0/segments/tokens/*.parquet"))
    lost.unlink()
    later = time.time() + 60
    os.utime(home / "runs/a-0/run.json", (later, later))  # as `cp -r` without `-p` leaves it
    with Store.open(home) as store:
        assert store.query("from tokens").warnings == (f"skipped {lost.relative_to(home)}: the file is gone",)


def test_a_document_that_is_restored_in_place_counts_again(home: Path) -> None:
    path = home / "runs/a-0/state.json"
    whole = path.read_text()
    write_json(path, json.loads(whole) | {"stages": [1, 2]})
    age(home / "runs/a-0")
    ingest(home)
    path.write_text(whole)  # as `cp` does: the directory's time stays
    with Store.open(home) as store:
        result = store.query("select count(*) from stages where run_id = 'a-0'")
    assert (result.rows, result.warnings) == ([(2,)], ())


def test_an_evaluation_that_was_gone_and_is_restored_counts_again(home: Path) -> None:
    (file, *_) = sorted(home.glob("runs/a-0/evaluate/*/segments/evaluations/*.parquet"))
    write_json(file.parents[2] / "manifest.json", {"files": {f"segments/evaluations/{file.name}": "0" * 64}})
    kept = file.read_bytes()
    file.unlink()
    write_json(home / "runs/a-0/attempts/0002.json", {"attempt": 2, "resumed_from_step": 3})
    age(home / "runs/a-0")
    ingest(home)
    count = "select count(*) from evaluations where run_id = 'a-0'"
    with Store.open(home) as store:
        before = store.query(count)
    assert before.warnings == (f"skipped {file.relative_to(home)}: the file is gone",)
    file.write_bytes(kept)
    with Store.open(home) as store:
        after = store.query(count)
    assert after.rows[0][0] > before.rows[0][0]
    assert after.warnings == ()


@pytest.mark.more
@pytest.mark.parametrize("name", [b"\xff", b"a*", b"a[-]0"])
def test_a_run_whose_name_is_none_is_passed_over_and_named(home: Path, name: bytes) -> None:
    os.mkdir(bytes(home / "runs") + b"/" + name)
    shutil.copytree(home / "runs/a-0", home / "runs" / os.fsdecode(name), dirs_exist_ok=True)
    with Store.open(home) as store:
        assert store.query(STEPS).rows == [("a-0", 3), ("a-1", 3)]
    ingest(home)
    rebuild(home)
    with Store.open(home) as store:
        assert store.query(STEPS).rows == [("a-0", 3), ("a-1", 3)]
    (line,) = check(home)
    assert line.startswith("runs/")
    assert line.endswith(": not a valid run name; ignored")
    line.encode()


@pytest.mark.more
@pytest.mark.parametrize("name", [b"\xff.parquet", b"*.parquet"])
def test_an_evaluation_file_whose_name_is_none_is_passed_over_and_named(home: Path, name: bytes) -> None:
    (file, *_) = sorted(home.glob("runs/a-0/evaluate/*/segments/evaluations/*.parquet"))
    shutil.copyfile(file, file.with_name(os.fsdecode(name)))
    with Store.open(home) as store:
        before = store.query("select count(*) from evaluations").rows
    rebuild(home)
    with Store.open(home) as store:
        assert store.query("select count(*) from evaluations").rows == before
    (line,) = check(home)
    assert line.endswith(": not a valid segment name; ignored")
    line.encode()


def test_a_directory_in_the_place_of_a_document_leaves_no_file_open(home: Path) -> None:
    (home / "runs/a-0/spec.json").unlink()
    (home / "runs/a-0/spec.json").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert read_checked(home / "runs/a-0/spec.json") == ({}, ["no JSON object"])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.more
def test_a_run_whose_directory_is_gone_is_named_by_whoever_lists_it(home: Path) -> None:
    there = sorted(path.name for path in (home / "runs").iterdir())
    version = {"version": 1, "recipes": [], "runs": ["lost-1"], "looks": []}
    lists = {
        "experiments/sums/experiment.json": {"runs": [*there, "lost-0"], "versions": [version]},
        "studies/clips/study.json": {"trials": [{"number": 0, "run_ids": ["lost-2"]}]},
    }
    for path, document in lists.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(json.dumps(document))
    before = check(home)
    named = [line for line in check(home, full=True) if line not in before]
    assert [line.partition(";")[0] for line in named] == [
        "runs/lost-0: gone, and the experiment sums lists it",
        "runs/lost-1: gone, and the experiment sums lists it",
        "runs/lost-2: gone, and the study clips lists it",
    ]


def test_a_lease_that_says_in_words_whether_it_only_settles_was_to_execute_the_run(home: Path) -> None:
    run = home / "runs/a-0"
    write_json(run / "leases/0007.json", {"number": 7, "settles": "no"})
    lease = newest_lease(run)
    assert (lease.number, lease.settles) == (7, False)


@pytest.mark.more
def test_documents_of_another_shape_are_named_by_queries_and_by_check(home: Path) -> None:
    state = json.loads((home / "runs/a-0/state.json").read_text())
    write_json(home / "runs/a-0/state.json", state | {"stages": [1, 2]})
    write_json(home / "runs/a-1/run.json", {"seed": "0", "values": []})
    write_json(home / "experiments/sums/experiment.json", {"runs": {"a": 1}})
    lines = [
        "experiments/sums/experiment.json: runs: an object; expected a list",
        "runs/a-0/state.json: stages: a list; expected an object",
        "runs/a-1/run.json: seed: '0'; expected a whole number",
        "runs/a-1/run.json: values: a list; expected an object",
    ]
    for _ in range(2):
        with Store.open(home) as store:
            assert sorted(store.query("select 1").warnings) == [f"skipped {line}" for line in lines]
        assert [line.partition("; ignored; restore it from a backup")[0] for line in sorted(check(home))] == lines
        ingest(home)


@pytest.mark.more
@pytest.mark.parametrize("bad", ["no JSON", "[" * 1000, "", '{"judge": 1}', "[1, null]", '"text"'])
def test_a_text_of_a_row_that_is_no_verdict_breaks_no_view_and_is_named(tmp_path: Path, bad: str) -> None:
    good = json.dumps([{"judge": "m", "vote": 0, "text": "5", "score": 0.5}])
    turns = json.dumps([{"turn": 0, "sampled": True, "text": "1", "num_tokens": 1}])
    for number, (said, spoken) in enumerate([(good, turns), (bad, bad)]):
        run = RecordedRun(tmp_path, f"a-{number}", seed=number)
        run.start(1)
        run.steps(1, 3)
        run.evaluate()
        rewrite(run.path, "rollouts", verdicts=said, reward_terms="{}" if said == good else said)
        rewrite(run.path, "evaluation_samples", verdicts=said, turns=spoken)
        age(run.path)
    ingest(tmp_path)
    with Store.open(tmp_path) as store:
        for view, count in (("verdicts", 7), ("turns", 1)):
            readable = f"select count(*) from {view} where run_id = 'a-0'"
            assert store.query(readable).rows == [(count,)]
            assert store.query(f"select count(text) from {view}").rows == [(count,)]
    for full in (False, True):
        lines = [line for line in check(tmp_path, full=full) if line.startswith("runs/a-1: ")]
        named = [line.split(" have ")[1].split(" that")[0] for line in lines]
        assert named == ["verdicts", "verdicts", "turns"] + ["reward_terms"] * (not bad.startswith("{"))
        assert lines[0] == (
            "runs/a-1: 6 rows of rollouts, the first of step 1, have verdicts that are not a JSON list of objects;"
            " the view `verdicts` lacks them"
        )
        assert not [line for line in check(tmp_path, full=full) if line.startswith("runs/a-0: ")]


def rewrite(run: Path, table: str, **values: str) -> None:
    """Rewrites a run's segments of a table with these values in all rows."""
    for path in run.glob(f"**/segments/{table}/*.parquet"):
        rows = pq.read_table(path)
        for name, value in values.items():
            place = rows.column_names.index(name)
            rows = rows.set_column(place, rows.field(name), pa.array([value] * len(rows)))
        rewritten(path, rows)
