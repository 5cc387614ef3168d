"""Queries over a home: the promised tables and views, before and after ingesting."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specs.records import TABLES
from storage import QueryError, Store
from storage.columns import NATIVE, columns
from storage.database import connect, sql
from storage.ingest import ingest
from tests.storage.recording import NOON, RecordedRun

REWARDS = "select step, value from metrics where name = 'reward/mean' order by step"
JOINED = """
    select r.step, r.rollout_id, r.num_tokens, count(*) as n, sum(t.logprob) as logprob
    from rollouts r join tokens t on t.run_id = r.run_id and t.step = r.step and t.rollout_id = r.rollout_id
    group by all order by all
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    run = RecordedRun(tmp_path, "sums-1")
    run.start(1)
    run.steps(1, 4, each=2)
    run.checkpoint(4)
    run.evaluate()
    return tmp_path


def test_the_rewards_of_a_run_are_read_before_and_after_ingesting(home: Path) -> None:
    expected = [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    with Store.open(home) as store:
        assert store.query(REWARDS).rows == expected
        store.ingest()
        store.refresh()
        assert store.query(REWARDS).rows == expected


@pytest.mark.more
def test_all_queries_of_an_open_store_see_one_moment(home: Path) -> None:
    run = RecordedRun(home, "sums-1")
    with Store.open(home) as store, Store.open(home) as later:
        before = store.query(REWARDS).rows
        run.steps(5, 6)
        run.state["status"] = "failed"
        run.save()
        ingest(home)
        assert len(later.query(REWARDS).rows) == 6
        assert store.query(REWARDS).rows == before
        assert store.query("select max(step) from tokens").rows == [(4,)]
        assert store.query("select status from runs").rows == [("finished",)]
        store.refresh()
        assert len(store.query(REWARDS).rows) == 6
        assert store.query("select status from runs").rows == [("failed",)]
        assert store.query("select max(step) from tokens").warnings == ()


def test_a_file_that_is_gone_moves_the_snapshot_on_and_says_so(home: Path) -> None:
    with Store.open(home) as store:
        assert store.query("select max(step) from metrics").warnings == ()
        next((home / "runs/sums-1/segments/tokens").glob("a0001-s000003-000004-*.parquet")).unlink()
        result = store.query("select max(step) from tokens")
        assert result.rows == [(2,)]
        assert "a later moment than earlier answers" in result.warnings[0]
        assert store.query("select max(step) from metrics").warnings == result.warnings
        store.refresh()
        assert store.query("select max(step) from tokens").warnings == ()


def test_a_query_for_a_file_elsewhere_moves_no_snapshot(home: Path) -> None:
    with Store.open(home) as store:
        store.query("select count(*) from tokens")
        with pytest.raises(QueryError, match="outside the store"):
            store.query("select * from 'elsewhere.parquet'")
        assert store.query("select count(*) from tokens").warnings == ()


def test_threads_may_share_a_store(home: Path) -> None:
    with Store.open(home) as store, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: store.query(JOINED).rows, range(16)))
    assert len(answers[0]) == 8
    assert answers.count(answers[0]) == 16


def test_what_one_statement_makes_is_not_there_for_the_next(home: Path) -> None:
    with Store.open(home) as store:
        with pytest.raises(QueryError, match="more than one statement"):
            store.query("create table metrics2 as from metrics; from metrics2")
        for _ in range(2):
            assert len(store.query("pivot (from metrics) on name using max(value) group by step").rows) == 4


def test_every_token_joins_its_rollout(home: Path) -> None:
    rows = Store.open(home).query(JOINED).rows
    assert len(rows) == 8
    assert {row[2:] for row in rows} == {(3, 3, -1.5)}


@pytest.mark.more
def test_every_table_has_the_columns_of_its_record(home: Path) -> None:
    hidden, of_evaluations = {"attempt", "fingerprint"}, {"turns": ["dataset", "problem_id", "sample"]}
    for name in TABLES:
        expected = [column for column, _ in columns(name) if column not in hidden] + of_evaluations.get(name, [])
        assert list(Store.open(home).query(f"from {name}").columns) == expected


def test_the_native_tables_are_as_the_records_say() -> None:
    connection = connect()
    connection.execute(sql("schema.sql"))
    for name in NATIVE:
        described = connection.execute(f"select column_name, column_type from (describe {name})").fetchall()
        assert described == [*columns(name)]


def test_an_empty_home_has_all_tables_and_no_rows(tmp_path: Path) -> None:
    names = [*TABLES, "experiments", "runs", "stages", "studies", "trials", "confirmations", "artifacts"]
    views = ["learning_curves", "accuracy_curves", "leaderboard", "last_and_best", "run_summary"]
    for name in (*names, *views):
        assert Store.open(tmp_path / "nothing").query(f"from {name}").rows == []


@pytest.mark.parametrize("query", ["show tables", "select table_name from information_schema.tables"])
def test_the_list_of_tables_has_all_of_them(home: Path, query: str) -> None:
    names = {row[0] for row in Store.open(home).query(query).rows}
    assert {*TABLES, "runs", "learning_curves", "leaderboard"} <= names


def test_times_are_utc(home: Path) -> None:
    ((recorded_at, started_at),) = (
        Store.open(home)
        .query("select max(recorded_at), max(runs.started_at) from metrics join runs using (run_id)")
        .rows
    )
    assert recorded_at == started_at == NOON
    assert recorded_at.utcoffset().total_seconds() == 0


def test_sums_of_integers_are_integers(home: Path) -> None:
    ((total,),) = Store.open(home).query("select sum(num_tokens) from rollouts").rows
    assert total == 24
    assert isinstance(total, int)


def test_parameters_are_bound(home: Path) -> None:
    store = Store.open(home)
    assert store.query("select count(*) from metrics where step > ? and name = ?", [2, "entropy"]).rows == [(2,)]
    assert store.query("select count(*) from metrics where step > $step", {"step": 2}).rows == [(6,)]


def test_the_views_sum_a_run_up(home: Path) -> None:
    store = Store.open(home)
    summary = "select run_id, status, seconds, step, reward_last, accuracy_before, accuracy_after from run_summary"
    assert store.query(summary).rows == [("sums-1", "finished", 600.0, 4, 0.5, 0.4, 0.7)]
    assert store.query("select step, reward, entropy from learning_curves").rows[-1] == (4, 0.5, 1.0)


def test_the_leaderboard_ranks_cells_by_the_mean_over_seeds(home: Path) -> None:
    for seed, accuracy in ((1, 0.9), (2, 0.8)):
        RecordedRun(home, f"other-{seed}", seed=seed, experiment="other").evaluate(accuracy=accuracy)
    rows = Store.open(home).query("select rank, experiment, round(value, 6), num_seeds, run_ids from leaderboard").rows
    assert rows == [(1, "other", 0.85, 2, ["other-1", "other-2"]), (2, "sums", 0.7, 1, ["sums-1"])]


@pytest.mark.parametrize("path", ["training.steps", "objective.clip.low", "code"])
def test_runs_that_differ_in_more_than_the_seed_are_no_seeds_of_one_setting(tmp_path: Path, path: str) -> None:
    for seed, given, accuracy in ((0, 10, 0.5), (1, 10, 0.7), (2, 20, 0.9)):
        run = RecordedRun(tmp_path, f"sums-{seed}", seed=seed)
        run.evaluate(accuracy=accuracy)
        run.plan(seed, {}, results=given) if path == "code" else run.plan(seed, {path: given})
    rows = Store.open(tmp_path).query("select rank, round(value, 6), run_ids, setting from leaderboard").rows
    assert [row[:3] for row in rows] == [(1, 0.9, ["sums-2"]), (2, 0.6, ["sums-0", "sums-1"])]
    assert None not in {row[3] for row in rows}


def test_the_leaderboard_has_finished_runs_alone(tmp_path: Path) -> None:
    for number, status in enumerate(("finished", "failed", "cancelled")):
        RecordedRun(tmp_path, f"sums-{number}", status=status, seed=number).evaluate(accuracy=0.5)
    assert Store.open(tmp_path).query("select run_ids from leaderboard").rows == [(["sums-0"],)]


def test_a_run_has_its_last_and_its_best_step_on_each_set(tmp_path: Path) -> None:
    for seed, on_the_way in ((0, {3: 0.9, 6: 0.9}), (1, {3: 0.1, 6: 0.2})):
        run = RecordedRun(tmp_path, f"sums-{seed}", seed=seed)
        run.start(1)
        for step, accuracy in on_the_way.items():
            run.evaluate_on_the_way(step, accuracy)
        run.evaluate(accuracy=0.5)  # of step 10, and 0.4 of the base model
    store = Store.open(tmp_path)
    curves = store.query("select seed, step, accuracy, is_last, is_best from accuracy_curves order by seed, step").rows
    assert curves[:4] == [
        (0, 0, 0.4, False, False),
        (0, 3, 0.9, False, False),
        (0, 6, 0.9, False, True),
        (0, 10, 0.5, True, False),
    ]
    assert [row[1] for row in curves[4:] if row[4]] == [10]
    columns = "experiment, dataset, metric, last, round(best, 6), num_evaluated, num_seeds, best_steps, run_ids"
    assert store.query(f"select {columns} from last_and_best").rows == [
        ("sums", "sums", "mean@8", 0.5, 0.7, 3, 2, [6, 10], ["sums-0", "sums-1"])
    ]


def test_the_base_model_is_no_runs_best_step(tmp_path: Path) -> None:
    RecordedRun(tmp_path, "sums-0").evaluate(accuracy=0.1)
    assert Store.open(tmp_path).query("select last, best, best_steps from last_and_best").rows == [(0.1, 0.1, [10])]


def test_an_evaluation_counts_while_the_state_names_it(home: Path) -> None:
    run = RecordedRun(home, "sums-1")
    run.evaluate("f" * 64, accuracy=0.9, current=False)
    query = "select value from evaluations where step = 10"
    store = Store.open(home)
    assert store.query(query).rows == []
    run.state["evaluation"] = "f" * 64
    run.save()
    store.ingest()
    store.refresh()
    assert store.query(query).rows == [(0.9,)]
    assert store.query("select count(*) from evaluation_samples").rows == [(1,)]
    run.state["evaluation"] = "e" * 64
    run.save()
    store.refresh()
    assert store.query(query).rows == [(0.7,)]


def test_a_path_with_brackets_and_quotes_is_read_as_it_stands(tmp_path: Path) -> None:
    home = tmp_path / "it's [1] *"
    run = RecordedRun(home, "sums-1")
    run.start(1)
    run.steps(1, 2)
    assert len(Store.open(home).query(REWARDS).rows) == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select * from metrix", "hint: did you mean `metrics`?"),
        ("select valu from metrics", 'Referenced column "valu" not found'),
        ("selec 1", 'syntax error at or near "selec"'),
        ("", "the query is empty"),
        ("select 1; select 2", "more than one statement"),
        ("drop table runs", "DROP is not a query"),
        ("copy (select 1) to 'x.csv'", "COPY is not a query"),
        ("set threads = 1", "SET is not a query"),
        ("attach 'x.db'", "ATTACH is not a query"),
        ("select * from read_text('/etc/passwd')", "accesses something outside the store"),
        ("select 1/0::int + 'x'", "Conversion Error"),
    ],
)
def test_a_wrong_query_is_explained(home: Path, query: str, message: str) -> None:
    with pytest.raises(QueryError) as caught:
        Store.open(home).query(query)
    assert message in str(caught.value)


def test_pivot_works(home: Path) -> None:
    rows = (
        Store.open(home)
        .query("pivot (select step, name, value from metrics) on name using max(value) order by step")
        .rows
    )
    assert rows[0] == (1, 1.0, 0.5, 0.1)
