"""Values of every type of DuckDB's, in every format: equal when they are read back, or refused with a reason."""

import csv
import io
import json
import re
import sys
from pathlib import Path

import duckdb
import pytest

from pipelines.cli import main
from storage.statements.texts import written_by_duckdb
from tests.storage.recording import RecordedRun

VALUES = {
    "BOOLEAN": "true",
    "TINYINT": "-128",
    "SMALLINT": "-32768",
    "INTEGER": "2147483647",
    "BIGINT": "-9223372036854775808",
    "HUGEINT": "170141183460469231731687303715884105727",
    "UTINYINT": "255",
    "USMALLINT": "65535",
    "UINTEGER": "4294967295",
    "UBIGINT": "18446744073709551615",
    "UHUGEINT": "340282366920938463463374607431768211455",
    "BIGNUM": "123456789012345678901234567890123456789012345",
    "FLOAT": "0.1",
    "DOUBLE": "0.1",
    "DECIMAL(10,2)": "1.10",
    "DECIMAL(38,30)": "12345678.000000000000000000000000000001",
    "VARCHAR": 'ä, "x"',
    "BLOB": "\\xAA\\x00a",
    "BIT": "10101",
    "DATE": "2026-01-02",
    "TIME": "12:34:56.789012",
    "TIME_NS": "12:34:56.123456789",
    "TIME WITH TIME ZONE": "12:34:56+05:30",
    "TIMESTAMP": "2026-01-02 03:04:05",
    "TIMESTAMP_S": "2026-01-02 03:04:05",
    "TIMESTAMP_MS": "2026-01-02 03:04:05",
    "TIMESTAMP_NS": "2026-01-02 03:04:05.123456789",
    "TIMESTAMP WITH TIME ZONE": "2026-01-02 03:04:05+00",
    "INTERVAL": "1 month 2 days 03:04:05.000006",
    "UUID": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    "ENUM('a', 'b')": "b",
    "INTEGER[]": "[1, NULL, 3]",
    "INTEGER[3]": "[1, 2, 3]",
    "INTERVAL[]": "['1 month']",
    "HUGEINT[]": "[170141183460469231731687303715884105727]",
    "STRUCT(a INTEGER, b VARCHAR)": "{'a': 1, 'b': x}",
    "STRUCT(i TIME_NS)": "{'i': '12:34:56.123456789'}",
    "MAP(VARCHAR, INTEGER)": "{k=1}",
    "UNION(k INTEGER, t VARCHAR)": "x",
    "JSON": '{"a": 1.10}',
    "GEOMETRY": "POINT (1 2)",
    "VARIANT": "1",
}
"""Type -> a value of it, as a text that DuckDB casts."""
REFUSED = {("HUGEINT", "parquet"): "cast integers of more than 64 bits"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    RecordedRun(tmp_path / "home", "sums-1")
    return tmp_path


def sql(monkeypatch: pytest.MonkeyPatch, query: str, output: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["rpg", "sql", query, "-o", str(output)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def read_back(file: Path, kinds: list[str]) -> list[str]:
    """The values of the one row in a file, as DuckDB's texts of them."""
    found: list[object]
    names = [f"v{place}" for place in range(len(kinds))]
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        if file.suffix == ".parquet":
            texts = [f"{name}::{kind}::VARCHAR" for name, kind in zip(names, kinds, strict=True)]
            return list(connection.execute(f"SELECT {', '.join(texts)} FROM read_parquet('{file}')").fetchall()[0])
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".csv":
            found = list(csv.reader(io.StringIO(text, newline="")))[1]
        elif file.suffix == ".json":
            found = [json.loads(text)[0][name] for name in names]
        else:
            found = re.split(r" {3,}", text.splitlines()[2].strip())
        assert len(found) == len(kinds)
        given = [json.dumps(value) if isinstance(value, list | dict) else value for value in found]
        casts = [f"$1::VARCHAR::{'JSON::' if kind.startswith('MAP') else ''}{kind}::VARCHAR" for kind in kinds]
        return [
            str(connection.execute(f"SELECT {cast}", [value]).fetchall()[0][0])
            for cast, value in zip(casts, given, strict=True)
        ]


@pytest.mark.more
@pytest.mark.parametrize("suffix", ["csv", "json", "parquet", "table"])
@pytest.mark.parametrize("are_written_by_duckdb", [True, False])
def test_a_value_is_what_it_was_when_it_is_read_back(
    suffix: str, are_written_by_duckdb: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    form = "json" if suffix in ("parquet", "table") else suffix
    kinds = [
        kind
        for kind in VALUES
        if (kind, suffix) not in REFUSED
        and bool(written_by_duckdb("select 1", [("v", kind)], form)) is are_written_by_duckdb
    ]
    literals = [f"('{VALUES[kind].replace(chr(39), 2 * chr(39))}'::{kind})" for kind in kinds]
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        texts = ", ".join(f"{literal}::VARCHAR" for literal in literals)
        expected = dict(zip(kinds, connection.execute(f"SELECT {texts}").fetchall()[0], strict=True))
    columns = ", ".join(f"{literal} as v{place}" for place, literal in enumerate(literals))
    assert sql(monkeypatch, f"select {columns}", home / f"x.{suffix}") == 0, capsys.readouterr().err
    assert capsys.readouterr().err == ""
    assert dict(zip(kinds, read_back(home / f"x.{suffix}", kinds), strict=True)) == expected


@pytest.mark.parametrize(("kind", "suffix"), REFUSED)
def test_a_value_that_a_format_cannot_hold_is_refused_in_a_line(
    kind: str, suffix: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    assert sql(monkeypatch, f"select '{VALUES[kind]}'::{kind} as v", home / f"x.{suffix}") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert REFUSED[kind, suffix] in said
    assert not (home / f"x.{suffix}").exists()


def test_every_type_is_tried() -> None:
    with duckdb.connect() as connection:
        known = {name for (name,) in connection.execute("SELECT DISTINCT logical_type FROM duckdb_types()").fetchall()}
    tried = {kind.partition("(")[0] for kind in VALUES} | {"LIST", "ARRAY"}
    assert known - tried <= {"NULL", '"NULL"', "TYPE", "INVALID", "ANY", "SQLNULL"}, known - tried


@pytest.mark.more
@pytest.mark.parametrize("kind", ["DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"])
@pytest.mark.parametrize("value", ["infinity", "-infinity"])
def test_an_infinite_time_is_no_day_of_the_calendar(
    kind: str, value: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for suffix in ("csv", "json", "table"):
        code = sql(monkeypatch, f"select '{value}'::{kind} as v", home / f"x.{suffix}")
        said = capsys.readouterr().err
        written = (home / f"x.{suffix}").read_text(encoding="utf-8") if code == 0 else "infinity"
        assert (code, "may be an infinite time" in said) == (2, True) or value in written, suffix
    assert sql(monkeypatch, f"select '{value}'::{kind}::VARCHAR as v", home / "y.csv") == 0
    assert (home / "y.csv").read_text() == f"v\n{value}\n"


def test_columns_of_one_name_are_all_there_as_objects(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "select 1 as a, 2 as a, 3 as a_1, [4] as a"
    for text in (query.replace("[4]", "4"), query):
        assert sql(monkeypatch, text, home / "x.json") == 0
        (row,) = json.loads((home / "x.json").read_text())
        assert list(row) == ["a", "a_2", "a_1", "a_3"]
        assert [row["a"], row["a_2"], row["a_1"]] == [1, 2, 3]
        assert sql(monkeypatch, text, home / "x.parquet") == 0
        with duckdb.connect() as connection:
            names = [name for name, *_ in connection.execute(f"DESCRIBE FROM '{home}/x.parquet'").fetchall()]
        assert names == ["a", "a_2", "a_1", "a_3"]
    assert sql(monkeypatch, query, home / "x.csv") == 0
    assert (home / "x.csv").read_text().splitlines()[0] == "a,a,a_1,a"


def test_a_query_that_no_other_can_be_made_of_is_refused_with_the_cast(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    assert sql(monkeypatch, "select interval '1 day' as took -- so long", home / "x.parquet") in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
