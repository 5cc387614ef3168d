"""Every table, view and column has a description, on the page and in the database."""

from pathlib import Path

import duckdb

from specs.metrics import BY_NAME
from storage import Store
from storage.documentation import _in_sql, comments, descriptions
from tests.storage.recording import RecordedRun

SQL = """\
-- The file.

-- One row per thing.
-- Of each.
CREATE TABLE things (
    name VARCHAR,                   -- what it is called
    size INTEGER,                   -- bytes
    "values" JSON                   -- of each: (a, b)
);

CREATE VIEW things2 AS SELECT * FROM things;
-- What to look at first.
--   name: as in things
--   size: of the largest,
--     in bytes
CREATE VIEW large AS
SELECT name, max(size) AS size
FROM things;
"""


def test_the_comments_of_a_statement_and_of_its_columns_are_read() -> None:
    found = dict(_in_sql(SQL))
    assert list(found) == ["things", "large"]
    assert found["things"].about == "One row per thing. Of each."
    assert found["things"].columns == {"name": "what it is called", "size": "bytes", "values": "of each: (a, b)"}
    assert found["large"].about == "What to look at first."
    assert found["large"].columns == {"name": "as in things", "size": "of the largest, in bytes"}


def test_a_recorded_table_is_described_by_its_row_class() -> None:
    described = descriptions()["tokens"]
    assert described.about.startswith("One response token.")
    assert described.columns["ratio"].startswith("exp(logprob - old_logprob), without a unit;")


def test_comments_are_statements_with_quoted_texts() -> None:
    columns = [("tokens", "entropy", True), ("tokens", "unheard_of", True), ("elsewhere", "a", False)]
    assert list(comments(columns)) == [
        f"COMMENT ON VIEW \"tokens\" IS '{descriptions()['tokens'].about}'",
        'COMMENT ON COLUMN "tokens"."entropy" IS'
        " 'Entropy of the distribution of the next token, at the sampling temperature, nats.'",
    ]


WITHOUT = """
    SELECT table_name, column_name FROM duckdb_columns()
    WHERE schema_name = 'main' AND NOT internal AND comment IS NULL
    UNION ALL SELECT view_name, '' FROM duckdb_views()
    WHERE schema_name = 'main' AND NOT internal AND comment IS NULL
    UNION ALL SELECT table_name, '' FROM duckdb_tables() WHERE schema_name = 'main' AND comment IS NULL
"""
"""What any program may ask for, and nothing says what it is."""
README = """
    select r.correct, avg(t.entropy) entropy, avg(t.ratio) ratio, count(*) tokens
    from rollouts r join tokens t using (run_id, step, rollout_id) group by all order by all
"""
MEANING = (
    "FROM duckdb_columns() SELECT comment WHERE (schema_name, table_name, column_name) = ('main', 'tokens', 'ratio')"
)


def test_no_table_view_or_column_lacks_a_comment_in_the_index_or_in_a_query(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert store.query(WITHOUT).rows == []
        ((asked,),) = store.query(MEANING).rows
        store.ingest()
    with duckdb.connect(str(tmp_path / "experiments.duckdb"), read_only=True) as index:
        assert index.execute(WITHOUT).fetchall() == []
        assert index.execute(MEANING).fetchall() == [(asked,)]
    assert asked == descriptions()["tokens"].columns["ratio"]


def test_a_program_that_knows_only_duckdb_reads_every_table_in_the_index(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "sums-s0")
    run.start(1)
    run.steps(1, 3)
    run.evaluate()
    with Store.open(tmp_path) as store:
        store.ingest()
        names = [name for (name,) in store.query("show tables").rows]
        counts = [store.query(f"select count(*) from {name}").rows for name in names]
        by_outcome = store.query(README).rows
    with duckdb.connect(str(tmp_path / "experiments.duckdb"), read_only=True) as index:
        assert [name for (name,) in index.execute("show tables").fetchall()] == names
        assert [index.execute(f"select count(*) from {name}").fetchall() for name in names] == counts
        frame = index.sql(README).df()
    assert list(frame.itertuples(index=False, name=None)) == by_outcome != []


def test_every_metric_stands_with_its_unit_and_meaning(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        rows = {row[0]: row[1:] for row in store.query("from metric_names").rows}
    assert rows.keys() == BY_NAME.keys()
    title, unit, better, least, most, recorded_with, meaning = rows["sentinel/difference"]
    metric = BY_NAME["sentinel/difference"]
    assert (title, unit, better, least, most) == (metric.title, "nats", "lower", 0.0, None)
    assert (recorded_with, meaning) == ("a vllm engine", metric.meaning)
    assert rows["reward/mean"][3] is None, "a reward has no bound"
