"""Every table, view and column says what it means, on the page and in the database."""

from storage.documentation import _in_sql, comments, descriptions

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
        " 'Of the distribution of the next token, at the sampling temperature, nats.'",
    ]
