"""A query reads what is recorded: whatever it is written like, it changes no file and reaches no other one."""

import hashlib
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import duckdb
import pytest

from specs.errors import RpgError
from storage import QueryError, Store
from storage.statements.reading import REFUSED
from tests.storage.recording import RecordedRun


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sandbox") / "home"
    run = RecordedRun(root, "sums-1")
    run.start(1)
    run.steps(1, 2)
    run.evaluate()
    (root / "prefect").mkdir()
    (root / "prefect" / "prefect.db").write_bytes(b"flow runs")
    (root / "secret.csv").write_text("password\nhunter2\n")
    (root / "runs" / "sums-1" / "stolen.json").write_text('{"password": "hunter2"}')
    return root


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[Store]:
    with Store.open(home) as store:
        yield store


def digest(root: Path) -> str:
    """Digest of every name and file under a directory."""
    content = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        content.update(f"{path.relative_to(root)} {path.stat().st_mode}".encode())
        if path.is_file():
            content.update(path.read_bytes())
    return content.hexdigest()


@pytest.fixture(autouse=True)
def nothing_changes(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No query of a test changes a file of the home or of the working directory."""
    monkeypatch.chdir(tmp_path)
    store.query("select 1")
    before = digest(store.root)
    yield
    assert digest(store.root) == before
    assert not list(tmp_path.glob("*.*"))


def refused(store: Store, sql: str) -> str:
    """The message of a refusal."""
    with pytest.raises(QueryError) as caught:
        store.query(sql)
    return str(caught.value)


WRITES = [
    "copy (select 1) to 'FILE'",
    "copy (select 1) to 'out.csv'",
    "copy metrics from 'FILE'",
    "insert into runs select * from runs",
    "update runs set status = 'finished'",
    "delete from runs",
    "truncate runs",
    "drop view metrics",
    "alter table runs add column x int",
    "merge into runs using metrics on true when matched then delete",
    "comment on table runs is 'x'",
    "create table t as select 1",
    "create or replace view metrics as select 1",
    "create macro f() as table from read_text('FILE')",
    "create type t as enum ('a')",
    "create persistent secret s (type s3)",
    "attach 'FILE' as other",
    "attach 'out.db' as other",
    "detach store",
    "use store",
    "install httpfs",
    "load httpfs",
    "set memory_limit = '1TB'",
    "set global allowed_directories = ['/']",
    "reset lock_configuration",
    "pragma enable_profiling",
    "pragma import_database('FILE')",
    "pragma version = 1",
    "pragma table_info(read_text('FILE'))",
    "export database 'out'",
    "import database 'out'",
    "checkpoint",
    "vacuum",
    "begin",
    "commit",
    "prepare p as copy (select 1) to 'FILE'",
    "execute p",
    "call enable_logging()",
    "call enable_logging(storage_path = 'logs')",
    "call enable_profiling()",
    "call checkpoint()",
]
AROUND = [
    "{}",
    "{};",
    "explain {}",
    "EXPLAIN ANALYZE {}",
    "explain (analyze) {}",
    "explain (format json, analyze) {}",
    "/* -- */ explain -- analyze\n analyze /* */ {}",
    "explain\u00a0analyze {}",
    "select 1; {}",
    "{}; select 1",
    "pivot metrics on name using max(value); {}",
    "create type t as enum ('a'); {}",
    "prepare p as {}",
    "explain analyze explain analyze {}",
]


@pytest.mark.more
@pytest.mark.parametrize("write", WRITES)
def test_nothing_but_reading_runs_in_any_wrapping(store: Store, write: str) -> None:
    state = store.root / "runs" / "sums-1" / "state.json"
    for around in AROUND:
        refused(store, around.format(write.replace("FILE", str(state))))


FILES = [
    "'SEGMENT'",
    '"SEGMENT"',
    "'{}/*/*.json'",
    "secret.csv",
    "main.csv",
    "memory.main.csv",
    "'https://example.com/x.parquet'",
    "read_text('SECRET')",
    "READ_TEXT('SECRET')",
    "\"read_text\"('SECRET')",
    "system.main.read_text('SECRET')",
    "read_blob('SECRET')",
    "read_csv('SECRET')",
    "read_csv_auto('SECRET')",
    "read_json('STOLEN')",
    "read_json_objects('STOLEN')",
    "read_parquet('SEGMENT')",
    "parquet_scan('SEGMENT')",
    "parquet_metadata('SEGMENT')",
    "parquet_file_metadata('SEGMENT')",
    "parquet_kv_metadata('SEGMENT')",
    "parquet_bloom_probe('SEGMENT', 'step', 1)",
    "read_duckdb('SECRET')",
    "sniff_csv('SECRET')",
    "glob('/**')",
    "query('from read_text(''SECRET'')')",
    "query_table('SECRET')",
    "query_table(['SECRET'])",
    "histogram('SECRET', password)",
    "json_execute_serialized_sql('{}')",
    "duckdb_secrets()",
    "duckdb_settings()",
    "which_secret('s3://x', 's3')",
    "enable_logging()",
    "arrow_scan(1, 2, 3)",
    "pandas_scan(1)",
    "python_map_function(1)",
]
PLACES = [
    "from {}",
    "select * from {} as t",
    "explain select * from {}",
    "explain analyze select * from {}",
    "select (select count(*) from {})",
    "select 1 where exists (from {})",
    "select count(*) filter (exists (from {})) from metrics",
    "with a as (from {}) from a",
    "with recursive a(n) as (select 1 union all select n + 1 from a, {}) from a",
    "select 1 union all select 2 from {}",
    "from metrics, {}",
    "from metrics positional join {}",
    "from metrics order by (select 1 from {})",
    "from metrics limit (select 1 from {})",
    "select list_transform([1], x -> (select 1 from {}))",
    "pivot (from {}) on password using count(*)",
    "pivot {} on password using count(*)",
    "pivot metrics on name using max((select 1 from {}))",
    "from (pivot (from {}) on password using count(*))",
    "with a as (pivot {} on password) from a",
    "unpivot {} on password",
    "describe from {}",
    "summarize from {}",
    "values ((select 1 from {}))",
    "select * replace ((select 1 from {}) as step) from metrics",
    "from (values (1)) t(a) where a in (select 1 from {})",
]


EVERYWHERE = ["'SEGMENT'", "read_text('SECRET')", "query('from read_text(''SECRET'')')"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("file", "place"), [*product(EVERYWHERE, PLACES), *product(FILES, ["from {}", "explain analyze select * from {}"])]
)
def test_no_file_is_read_from_any_place_in_a_query(store: Store, home: Path, file: str, place: str) -> None:
    segment = next((home / "runs").rglob("*.parquet"))
    stolen = home / "runs" / "sums-1" / "stolen.json"
    named = file.replace("SEGMENT", str(segment)).replace("SECRET", str(home / "secret.csv"))
    message = refused(store, place.replace("{}", named.replace("STOLEN", str(stolen))))
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "call", ["read_text('SECRET')", "duckdb_secrets()", "pragma_version(); select 1", "seq_scan()"]
)
def test_call_takes_what_from_takes(store: Store, call: str) -> None:
    refused(store, f"call {call}")


@pytest.mark.parametrize(
    "expression",
    [
        "getenv('HOME')",
        "current_setting('secret_directory')",
        "write_log('x')",
        "sleep_ms(1)",
        "json_serialize_plan('')",
    ],
)
def test_no_expression_reaches_the_environment(store: Store, expression: str) -> None:
    for place in (
        "select {}",
        "select max({}) from metrics",
        "from metrics where {} is null",
        "select x.{} from runs x",
    ):
        refused(store, place.format(expression))


def confined(home: Path) -> duckdb.DuckDBPyConnection:
    """A snapshot's connection, to which anything may be said."""
    store = Store.open(home)
    store.query("select 1")
    assert store._snapshot
    return store._snapshot.connection


@pytest.mark.parametrize(
    "statement",
    [
        "from read_text('{home}/secret.csv')",
        "from '{home}/prefect/prefect.db'",
        "from read_text('/etc/passwd')",
        "copy (select 1) to '{home}/out.csv'",
        "attach 'x.db'",
        "set memory_limit = '1TB'",
        "load httpfs",
        "create persistent secret s (type s3)",
    ],
)
def test_duckdb_itself_refuses_files_outside_the_record_settings_and_extensions(home: Path, statement: str) -> None:
    with pytest.raises(duckdb.Error):
        confined(home).execute(statement.format(home=home)).fetchall()


@pytest.mark.more
@pytest.mark.parametrize(
    "statement",
    [
        "explain analyze copy (select 1) to '{runs}/written.json'",
        "from read_text('{runs}/sums-1/stolen.json')",
        "from '{runs}/sums-1/stolen.json'",
        "from glob('{runs}/**')",
        "from enable_logging(storage_path = '{runs}/log')",
        "from duckdb_settings()",
        "select current_setting('secret_directory')",
        "select sleep_ms(1)",
    ],
)
def test_what_duckdb_has_no_setting_against_is_refused_before_it_runs(
    store: Store, tmp_path: Path, statement: str
) -> None:
    """Each of these runs on a connection that DuckDB's settings close as far as they can."""
    copy = shutil.copytree(store.root, tmp_path / "home")
    confined(copy).execute(statement.format(runs=copy / "runs")).fetchall()
    refused(store, statement.format(runs=store.root / "runs"))


READS = [
    "select 1;",
    "from metrics",
    "table metrics",
    "values (1, 'x.parquet')",
    "describe metrics",
    "desc metrics",
    "summarize metrics",
    "show tables",
    "pragma table_info('metrics')",
    "pragma show_tables",
    "PRAGMA version",
    "show all tables",
    "explain select 1",
    "explain analyze (select 1)",
    "explain (format json) select 1",
    "explain (analyze, format json) (select 1)",
    "call duckdb_tables()",
    "pivot metrics on name using max(value)",
    "pivot metrics on name",
    "pivot metrics on name, step % 2 using max(value), min(value) group by run_id order by run_id limit 3",
    "pivot metrics on name || '-' || step using max(value)",
    "pivot metrics on name in ('entropy') using max(value) group by step",
    "pivot (select * from metrics m join runs r on m.run_id = r.run_id) on name using max(value)",
    "with a as (pivot metrics on name using max(value)) from a join (pivot metrics on step using max(value)) on true",
    "pivot (pivot metrics on name using max(value) group by step) on step using count(*)",
    "unpivot (select 1 a, 2 b) on a, b",
    'with "my table" as (select 1) from "my table"',
    "with recursive t(n) as (select 1 union all select n + 1 from t where n < 5) from t",
    "from information_schema.tables",
    "from metrics, lateral (select step + 1)",
    "select name like '%x%', name glob 'a*', name ~ 'x', name similar to 'x', name collate nocase from metrics",
    "select {'a': 1}.a, [1, 2][1:], [x + 1 for x in [1]], map {'a': 1}['a'], '{}'::json->>'a', 5!, @ -1, 2 ** 3",
    "select extract(year from now()), interval 1 day, now() at time zone 'UTC', current_date, try(1 / 0)",
    "select if(true, 1, 2), case when true then 1 end, nullif(1, 2), ifnull(1, 2)",
    "select rank() over w, grouping(step), columns(*) from range(1) t(step) group by step window w as ()",
    "select unnest([1, 2]), 'é' -- a comment; select 2",
]


@pytest.mark.parametrize("sql", READS)
def test_what_reads_runs(store: Store, sql: str) -> None:
    assert store.query(sql).columns


def test_a_refusal_says_what_was_meant(store: Store) -> None:
    assert refused(store, "explain analyze copy (select 1) to 'x'").startswith("COPY is not a query")
    assert refused(store, "from read_text('x')").startswith("the function `read_text` accesses something outside")
    assert refused(store, "from 'x.parquet'").startswith("`x.parquet` is not a table or view")
    assert refused(store, "from x.parquet").startswith("this query accesses something outside the store")
    assert 'Did you mean "upper"?' in refused(store, "select uper('a')")
    assert refused(store, "select " + "abs(" * 950 + "1" + ")" * 950) == "the query is nested too deeply"
    assert refused(store, "select 1\0; drop table runs").startswith("the query is not text")
    assert refused(store, "select '\ud800'").startswith("the query is not text")
    assert refused(store, "; -- nothing") == "the query is empty"
    assert "give each column's values" in refused(store, "pivot metrics on name in (select 'a') using max(value)")


def test_names_with_quotes_harm_nothing(tmp_path: Path) -> None:
    name = "it's; drop table runs; --\"x"
    RecordedRun(tmp_path / name, "sums-1").evaluate()
    with Store.open(tmp_path / name) as store:
        assert store.query("select distinct run_id from evaluations").rows == [("sums-1",)]
        with pytest.raises(RpgError, match="is not a table or view"):
            store.query(f"""from "{name.replace('"', '""')}" """)


def test_a_new_function_of_values_is_looked_at_before_queries_may_call_it() -> None:
    """Fails with a DuckDB that has other functions. New ones after FROM are refused (`TABLE`). Of the others, add to
    REFUSED what writes, waits, or reads files, settings or memory; then renew the digest."""
    rows = duckdb.connect().execute(
        "select distinct lower(function_name) as name from duckdb_functions()"
        " where function_type in ('scalar', 'aggregate', 'macro') order by name"
    )
    names = [name for (name,) in rows.fetchall()]
    assert {*names, "getenv"} >= REFUSED
    assert hashlib.sha256(" ".join(names).encode()).hexdigest()[:12] == "321e71ecd77b"
