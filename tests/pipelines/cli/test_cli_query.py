"""The reading verbs: their output, its stream, and their exit codes."""

import contextlib
import csv
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Literal

import psutil
import pyarrow.parquet as pq
import pytest
from places import ROOT
from recorded_home import record_conversation, record_evaluated_conversation
from waiting import wait_for

from pipelines.cli import main
from pipelines.cli.output import as_objects, csv_text, json_text
from pipelines.home.home import Home
from rpg.certificate.certificate import certificate_record, certify, certify_over_training
from specs import parse_objective
from specs.machine.liveness import start_of
from storage import Store, rebuild
from tests.storage.recording import FINGERPRINT, SPEC, RecordedRun, write_json

MAIN = "from pipelines.cli import main; main()"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "home"
    monkeypatch.setenv("RPG_HOME", str(root))
    for seed, name in enumerate(("sums-s0-aaaa1111", "sums-s1-bbbb2222")):
        run = RecordedRun(root, name, seed=seed)
        run.start(1)
        run.steps(1, 3)
        run.evaluate()
        (run.path / "logs").mkdir()
        (run.path / "logs" / "train.log").write_text("step 1\nstep 2\n")
        (run.path / "logs" / "data.log").write_text("10 problems\n")
        metrics = {"reward/mean": 0.5, "time/step": 2.0}
        write_json(run.path / "progress.json", {"step": 3, "steps": 3, "phase": "done", "metrics": metrics})
    return root


def rpg(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the command's exit code; its output is captured."""
    monkeypatch.setattr(sys, "argv", ["rpg", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Call:  # noqa: ARG001
    def run(*arguments: str) -> tuple[int, str, str]:
        code = rpg(monkeypatch, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_sql_prints_a_table(call: Call) -> None:
    code, out, err = call(
        "sql", "select step, value from metrics where name = 'reward/mean' and run_id like '%1111' order by 1"
    )
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["step", "value"],
        ["─" * 12],
        ["1", "0.5"],
        ["2", "0.5"],
        ["3", "0.5"],
    ]


def test_sql_writes_csv_and_json_to_stdout(call: Call) -> None:
    time = "timestamptz '2026-11-20 12:00:00Z'"
    query = f"select 1 as a, 'x,\"y' as b, null as c, 'nan'::double as d, [1, 2] as e, {time} as f"
    _, out, _ = call("sql", query, "--format", "csv")
    assert list(csv.reader(io.StringIO(out))) == [
        list("abcdef"),
        ["1", 'x,"y', "", "nan", "[1, 2]", "2026-11-20T12:00:00+00:00"],
    ]
    _, out, _ = call("sql", query, "--format", "json")
    expected = {"a": 1, "b": 'x,"y', "c": None, "d": None, "e": [1, 2], "f": "2026-11-20T12:00:00+00:00"}
    assert json.loads(out) == [expected]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.json"])
def test_sql_writes_the_format_that_the_file_name_says(call: Call, tmp_path: Path, name: str) -> None:
    code, out, _ = call("sql", "select count(*) as n from tokens", "-o", str(tmp_path / name))
    assert (code, out) == (0, "")
    content = (tmp_path / name).read_bytes()
    expected = {"rows.csv": b"n\n36\n", "rows.json": b'[\n {\n  "n": 36\n }\n]\n'}
    if name in expected:
        assert content == expected[name]
    else:
        assert pq.read_table(tmp_path / name).to_pylist() == [{"n": 36}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sql", "from metrix"), "there is no table or view `metrix`\n  there are: accuracy_curves, artifacts, "),
        (("sql", "selec"), 'Parser Error: syntax error at or near "selec"'),
        (("sql", "delete from runs"), "DELETE is not a query"),
        (("sql", "select 1", "-o", "rows.what"), "rows.what: cannot infer the format from the name"),
        (
            ("sql", "select 1", "-o", "/no/such/place/rows.csv"),
            "/no/such/place/rows.csv cannot be written: No such file",
        ),
        (("show", "sums"), "`sums` matches 2 runs; write more of the id:\n  sums-s0-aaaa1111\n  sums-s1-bbbb2222"),
        (("show", "sums-s2-bbbb"), "there is no run `sums-s2-bbbb`; the nearest:\n  sums-s1-bbbb2222"),
        (("show", "zzz"), "there is no run `zzz`; `rpg runs` lists them"),
        (("logs", "aaaa", "--stage", "base"), "has no log of `base`; there are: data, train"),
    ],
)
def test_a_mistake_is_told_in_words_with_exit_code_2(call: Call, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_damaged_segment_is_warned_of_once_on_stderr(
    call: Call, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = next((home / "runs/sums-s0-aaaa1111/segments/tokens").glob("a0001-s000001-000001-*.parquet"))
    broken.write_bytes(broken.read_bytes()[:100])
    code, out, err = call("sql", "select count(*) as n from tokens", "--format", "csv")
    assert (code, out) == (0, "n\n30\n")
    assert err.count(f"warning: skipped {broken.relative_to(home)}") == 1
    assert not caplog.messages, "the log goes to stderr too"


def test_values_are_bound_in_turn_or_by_name(call: Call) -> None:
    count = "select count(*) as n from metrics where name = {} and step > {}"
    for query, params in ((count.format("?", "?"), ("entropy", "1")), (count.format("$n", "$s"), ("s=1", "n=entropy"))):
        options = [word for value in params for word in ("--param", value)]
        assert call("sql", query, *options, "--format", "csv") == (0, "n\n4\n", "")
    _, out, _ = call("sql", "select typeof(?), ?", "--param", "2.5", "--param", '"a=b"', "--format", "csv")
    assert out.splitlines()[-1] == "DOUBLE,a=b"
    code, _, err = call("sql", "select ?, $x", "--param", "1", "--param", "x=1")
    assert (code, "name all values (NAME=VALUE)" in err) == (2, True)


def test_saved_queries_of_the_working_directory_come_before_those_of_the_home(
    call: Call, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, answer in ((tmp_path, "here"), (home, "home")):
        (place / "queries").mkdir()
        (place / "queries" / "mine.sql").write_text(f"-- What is\n-- mine?\n\nselect '{answer}' as a -- not this\n")
    (home / "queries" / "other.sql").write_text("select 'other' as a")
    assert call("sql", "@mine", "--format", "csv") == (0, "a\nhere\n", "")
    assert call("sql", "@other", "--format", "csv") == (0, "a\nother\n", "")
    _, out, _ = call("sql", "@", "--format", "json")
    listed = {row["name"]: row["question"] for row in json.loads(out)}
    assert listed["@mine"] == "What is mine?"
    assert listed["@other"] == ""
    code, _, err = call("sql", "@mien")
    assert (code, err.splitlines()[-1]) == (2, "  hint: did you mean `@mine`?")


def test_the_saved_queries_that_come_with_it_have_answers(call: Call) -> None:
    _, out, _ = call("sql", "@", "--format", "json")
    shipped = json.loads(out)
    assert len(shipped) == 5
    for row in shipped:
        assert row["question"]
        code, out, err = call("sql", row["name"], "--format", "json")
        assert (code, err) == (0, "")
        assert json.loads(out), row["name"]


def test_a_result_of_many_batches_is_written_whole_in_each_format(call: Call, tmp_path: Path) -> None:
    query = "select range as n, range::hugeint as h, 'x' || range as text from range(40000)"
    for name in ("rows.csv", "rows.json", "rows.parquet"):
        assert call("sql", query, "-o", str(tmp_path / name)) == (0, "", "")
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["n", "h", "text"]
    assert rows[-1] == ["39999", "39999", "x39999"]
    objects = json.loads((tmp_path / "rows.json").read_text())
    assert objects == pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(objects) == len(rows) - 1 == 40_000
    assert call("sql", "select 1 where false", "--format", "json") == (0, "[]\n", "")
    code, _, err = call("sql", "select (2::hugeint << 70) as h", "-o", str(tmp_path / "wide.parquet"))
    assert (code, "cast integers of more than 64 bits" in err) == (2, True)
    assert not (tmp_path / "wide.parquet").exists()


EDGES = """
    SELECT * EXCLUDE (n), n::FLOAT / 3 AS real, (n * 1e15)::DOUBLE / 7 AS double, n::HUGEINT << 65 AS huge,
        CASE n % 3 WHEN 0 THEN true WHEN 1 THEN false END AS flag,
        timestamptz '2026-11-20 12:00:00Z' + to_microseconds(n * 500000) AS at, n::UTINYINT AS small
    FROM (VALUES
        (0, 'plain', 0.0), (1, '', 'nan'), (2, NULL, 'inf'), (3, 'a,b', '-inf'), (4, 'say "no"', 1e-5),
        (5, E'two\nlines', 1e16),
        (6, 'é 漢 \U0001f600', 123456789.0), (7, ' spaces ', -0.0), (8, E'tab\t/\\\\', 1e300), (9, 'null', 5e-324)
    ) AS edges(n, "a ""name"" it's", number)
    ORDER BY n
"""


@pytest.mark.parametrize("form", ["csv", "json"])
def test_duckdb_writes_rows_as_python_does(home: Path, form: Literal["csv", "json"]) -> None:
    one_column = f"""SELECT "a ""name"" it's" AS only FROM ({EDGES})"""
    queries = [
        EDGES,
        one_column,
        "SELECT 1 AS one -- said\n ; ",
        "SELECT now() AS at WHERE false",
        "SELECT 1 AS a, 2 AS a",
    ]
    for query in queries:
        with Store.open(home) as store:
            with store.stream(query, form=form) as answer:
                texts = answer.texts()
                assert texts is not None, query
                written = [text for batch in texts for text in batch]
                columns = answer.columns
            with store.stream(query) as answer:
                rows = [row for batch in answer.rows() for row in batch]
                assert answer.columns == columns
        if form == "csv":
            assert [f"{line}\n" for line in written] == [csv_text([row]) for row in rows]
        else:
            assert written == [
                "\n " + json_text(row).rstrip().replace("\n", "\n ") for row in as_objects(columns, rows)
            ]


@pytest.mark.parametrize("query", ["SELECT [1, 2] AS a", "SELECT 1.5 AS a", "SHOW TABLES", "SELECT 1 AS a; -- done"])
def test_what_duckdb_would_write_otherwise_is_left_to_python(home: Path, query: str) -> None:
    with Store.open(home) as store, store.stream(query, form="json") as answer:
        assert answer.texts() is None
        assert [row for batch in answer.rows() for row in batch]


def test_rows_as_text_are_not_held_and_come_in_order(home: Path) -> None:
    with (
        Store.open(home) as store,
        store.stream("FROM range(100000) AS _(n) ORDER BY n DESC", form="csv") as answer,
    ):
        texts = answer.texts()
        first = next(texts)
        assert first[:2] == ["99999", "99998"]
        assert len(first) < 100_000
        assert [int(text) for batch in texts for text in batch][-1] == 0


def test_values_of_every_type_are_written_in_each_format(call: Call) -> None:
    infinite = ("date_array", "timestamp_array", "timestamptz_array")
    texts = ", ".join(f"{name}::VARCHAR[] AS {name}" for name in infinite)
    for kind in ("table", "csv", "json"):
        code, out, err = call("sql", "from test_all_types()", "--format", kind)
        assert (code, "may be an infinite time\n  hint: cast the column" in err) == (2, True), kind
        code, out, err = call("sql", f"select * replace ({texts}) from test_all_types()", "--format", kind)
        assert (code, err) == (0, ""), kind
    first, second, _ = json.loads(out)
    assert second["date_array"] == ["1970-01-01", "infinity", "-infinity", None, "2022-05-12"]
    assert first["map"] == {}
    assert first["fixed_int_array"] == [None, 2, 3]
    assert first["uuid"] == "00000000-0000-0000-0000-000000000000"


def test_sql_over_what_is_ingested_needs_neither_arrow_nor_pandas(home: Path) -> None:
    for path in home.rglob("*"):
        if path.is_dir():
            os.utime(path, (0, 0))  # a directory that has just changed may change again and is read by itself
    rebuild(home)
    query = (
        "select run_id, c.step, reward, started_at, cell from learning_curves c join runs using (run_id)"
        " where run_id like '%1111' order by c.step"
    )
    code = f"import sys\ntry:\n    {MAIN}\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "sql", query, "--format", "csv"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1].startswith("sums-s0-aaaa1111,1,0.5,2026-11-20T12:00:00+00:00")
    assert not {"pandas", "pyarrow", "numpy", "torch", "prefect"} & {*done.stderr.split()}


def test_an_output_replaces_plain_files_only(call: Call, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.csv", tmp_path / "link.csv", tmp_path / "pipe.csv"
    target.write_text("precious")
    link.symlink_to(target)
    os.mkfifo(pipe)
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.csv").mkdir()
    for name in ("link.csv", "dangling.csv", "pipe.csv", "folder.csv"):
        code, out, err = call("sql", "select 1 as a", "-o", str(tmp_path / name))
        assert (code, out) == (2, "")
        assert "was not changed; name a new file or a regular file" in err
    assert target.read_text() == "precious"
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert call("sql", "select 1 as a", "-o", str(target))[0] == 0
    assert target.read_text() == "a\n1\n"
    assert call("sql", "select error('no') from range(10)", "-o", str(target))[0] == 2
    assert target.read_text() == "a\n1\n"
    assert not list(tmp_path.glob(".*.partial"))


ENDLESS = "select count(*) from range(1000000) a, range(1000000) b where a.range * b.range % 7 = 3"


def test_limits_are_told_with_the_option_that_changes_them(call: Call) -> None:
    code, _, err = call("sql", ENDLESS, "--timeout", "0.5")
    assert (code, "its time limit\n  hint: `--timeout SECONDS`" in err) == (2, True)
    code, _, err = call("sql", "select len(range(1000000000))", "--memory", "200MB")
    assert (code, "the memory limit\n  hint: `--memory SIZE`" in err) == (2, True)
    assert "write it as 4GiB" in call("sql", "select 1", "--memory", "much")[2]


@pytest.mark.more
@pytest.mark.usefixtures("signals_arrive")
def test_ctrl_c_stops_a_heavy_query_at_once(home: Path) -> None:
    command = [sys.executable, "-c", MAIN, "sql", ENDLESS]
    environment = {**os.environ, "RPG_HOME": str(home)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            # More than starting takes: the query runs.
            wait_for(lambda: psutil.Process(process.pid).cpu_times().user > 6)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "")
    assert time.monotonic() - began < 5


@pytest.mark.more
@pytest.mark.usefixtures("signals_arrive")
def test_watch_asks_again_until_ctrl_c(home: Path) -> None:
    command = [sys.executable, "-c", MAIN, "sql", "select max(step) as s from metrics", "--watch", "--every", "0.1"]
    environment = {**os.environ, "RPG_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    command += ["--format", "csv"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        deadline = Timer(60, process.kill)
        deadline.start()
        try:
            assert process.stdout
            assert [process.stdout.readline() for _ in range(4)] == ["s\n", "3\n", "s\n", "3\n"]
            RecordedRun(home, "sums-s1-bbbb2222").steps(4, 4)
            assert "4\n" in iter(process.stdout.readline, "")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            deadline.cancel()
            process.kill()
    assert process.returncode == 130


def test_a_response_cannot_command_the_terminal(call: Call) -> None:
    _, out, _ = call("sql", "select 'a' || chr(27) || '[31m' || chr(10) || 'b [bold]c' as text")
    assert out.splitlines()[-1] == r"a\nb [bold]c"


def test_a_long_table_says_what_it_leaves_out(call: Call) -> None:
    _, out, err = call("sql", "select * from range(1500)")
    assert len(out.splitlines()) == 1002
    assert err == "500 more rows are not shown; `--format csv` or `-o FILE` writes all rows\n"


@pytest.mark.more
def test_statements_from_a_pipe_go_up_to_the_semicolon(home: Path) -> None:
    script = "select 1 as a,\n 2 as b;\n.tables\n.schema runs\nselect count(*) as n\nfrom runs"
    done = _process(["sql", "--format", "csv"], home, script)
    assert done.returncode == 0
    assert done.stdout.startswith("a,b\n1,2\nname\naccuracy_curves\nartifacts\n")
    assert ["runs", "run_id", "VARCHAR"] in [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.endswith("n\n2\n")
    assert _process(["sql"], home, "select 1;\nfrom nowhere;\nselect 2;").returncode == 2


@pytest.mark.more
def test_the_prompt_answers_explains_and_remembers(home: Path) -> None:
    main_end, other_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "sql"], stdin=other_end, stdout=other_end, stderr=other_end,
        env={**os.environ, "RPG_HOME": str(home), "TERM": "dumb"}, close_fds=True,
    ) as prompt:  # fmt: skip
        os.close(other_end)
        os.write(main_end, b"select 40 + 2\nas answer;\nfrom metrix;\n.quit\n")
        said = b""
        with contextlib.suppress(OSError):  # the terminal is gone once the prompt has ended
            while chunk := os.read(main_end, 4096):
                said += chunk
    os.close(main_end)
    assert prompt.returncode == 0
    for expected in (b"rpg> ", b"...> ", b"answer", b"42", b"did you mean `metrics`?"):
        assert expected in said
    assert "as answer;" in (home / "sql_history").read_text()


def test_a_reader_of_stdout_may_leave_early(home: Path) -> None:
    command = f"{sys.executable} -c '{MAIN}' sql 'select * from range(200000)' --format csv | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "RPG_HOME": str(home)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("range\n", "")


def test_runs_are_listed(call: Call, home: Path) -> None:
    code, out, _ = call("runs")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["run", "what", "status", "step", "reward", "accuracy", "started", "took"]
    assert re.split(r"\s{2,}", lines[2])[:6] == [
        "sums-s0-aaaa1111", "kl_coef=0.01 seed=0", "finished", "3/3", "0.500", "0.400 -> 0.700",
    ]  # fmt: skip
    _, out, _ = call("runs", "--json")
    assert [(run["run_id"], run["cell"], run["reward_last"]) for run in json.loads(out)] == [
        ("sums-s0-aaaa1111", {"objective.kl_coef": 0.01}, 0.5),
        ("sums-s1-bbbb2222", {"objective.kl_coef": 0.01}, 0.5),
    ]
    path = home / "runs/sums-s1-bbbb2222/state.json"
    write_json(path, json.loads(path.read_text()) | {"status": "pending", "api_url": "http://team:4200/api"})
    for verb in (("runs",), ("show", "sums-s1")):
        elsewhere = "submitted to http://team:4200/api; if its workers have another home, add --profile"
        assert elsewhere in call(*verb)[2], "this home may never see it start"
    assert call("runs", "--status", "failed") == (0, "", f"no failed runs in {home}\n")
    assert json.loads(call("runs", "--experiment", "other", "--json")[1]) == []


def test_a_run_is_shown_whole(call: Call, home: Path) -> None:
    spec = SPEC | {"training": SPEC["training"] | {"checkpoint": {"keep_best": {"accuracy_on": "sums"}}}}
    write_json(home / "runs/sums-s0-aaaa1111/spec.json", spec)
    for step in (10, 5):
        (home / f"runs/sums-s0-aaaa1111/weights/step-{step:06}").mkdir(parents=True)
    code, out, _ = call("show", "sums-s0", "--all")
    assert code == 0
    for expected in (
        "sums-s0-aaaa1111  finished\nsums: kl_coef=0.01 seed=0\nDoes it add?\n",
        "started 2026-11-20 12:00:00 UTC   ended 2026-11-20 12:10:00 UTC   step 3/3\n",
        "  training.steps                             3\n",
        "sums      mean@8     10   last, best     0.7     0.65      0.75            200\n",
        f"  directory       {home}/runs/sums-s0-aaaa1111\n",
        "  exported steps  5, 10\n",
    ):
        assert expected in out
    shown = json.loads(call("show", "aaaa", "--json")[1])
    assert shown["status"] == "finished"
    assert [metric["name"] for metric in shown["metrics"]] == ["entropy", "reward/mean", "reward/std"]
    assert shown["evaluations"][-1]["ci_high"] == pytest.approx(0.75)
    assert shown["files"]["best weights"] == f"{home}/runs/sums-s0-aaaa1111/weights/step-000010"
    assert shown["files"]["log of train"].endswith("logs/train.log")


def test_a_submission_to_a_server_says_how_to_follow_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.jobs.submit.submit", lambda *_, **__: [])
    _, _, err = call("submit", str(ROOT / "specs/experiments/quickstart.yaml"), "--profile", "http://team:4200/api")
    assert err == "follow it: rpg watch quickstart --profile http://team:4200/api\n"


def test_a_run_is_shown_on_one_screen_with_what_to_ask_next(call: Call, home: Path) -> None:
    out = call("show", "sums-s0")[1]
    assert len(out.splitlines()) <= 24
    assert out.startswith("sums-s0-aaaa1111  finished\nsums: kl_coef=0.01 seed=0\nDoes it add?\n")
    assert "\nstep 3: reward 0.5" in out
    assert "directory" not in out
    assert "\nnext\n  rpg show sums-s0-aaaa1111 --all" in out
    path = home / "runs/sums-s0-aaaa1111/state.json"
    write_json(path, json.loads(path.read_text()) | {"status": "failed", "reason": "out of memory"})
    out = call("show", "sums-s0")[1]
    assert out.startswith("sums-s0-aaaa1111  failed: out of memory\n")
    assert re.findall(r"^  (rpg \w+)", out, re.MULTILINE) == ["rpg logs", "rpg resume", "rpg show"]


@pytest.mark.more
def test_responses_of_a_run_are_shown_turn_by_turn(call: Call, home: Path) -> None:
    turns = [
        {"text": "[37*48]", "sampled": True},
        {"text": "(1776)\nstep 9, response 0", "sampled": False, "tool": "calculator", "seconds": 0.25},
        {"text": "\n", "sampled": True, "reward": 1.0},
    ]
    record_conversation(Home(home), "sums-s0-aaaa1111", turns, step=9)
    assert call("show", "sums-s0", "--sample") == (
        0,
        """\
step 9, response 0   reward 1   advantage +0.5   8 tokens   stop
  prompt
    │ 37*48=
  policy: 7 tokens sampled · calls calculator
    │ [37*48]
  tool calculator: 25 tokens given · 0.25 s
    │ (1776)
    │ step 9, response 0
  policy: 1 token sampled · reward of the turn 1
    │
""",
        "",
    )
    (shown,) = json.loads(call("show", "sums-s0", "--sample", "--response", "0", "--json")[1])
    assert [turn["tool"] for turn in shown["turns"]] == [None, "calculator", None]
    best, worst = json.loads(call("show", "sums-s0", "--sample", "--step", "2", "--json")[1])
    assert best["reward"] >= worst["reward"]
    assert best["rollout_id"] != worst["rollout_id"]
    assert best["turns"] == []
    assert best["response"] in call("show", "sums-s0", "--sample", "--step", "2")[1]
    code, _, error = call("show", "sums-s0", "--sample", "--step", "4")
    assert code == 2
    assert "step 4 of sums-s0-aaaa1111 is not recorded; its last recorded step is 9" in error
    assert call("show", "sums-s0", "--step", "4")[0] == 2


@pytest.mark.more
def test_responses_of_an_evaluation_are_shown_turn_by_turn(call: Call, home: Path) -> None:
    turns = [
        {"text": "[37*48]", "sampled": True},
        {"text": "(1776)", "sampled": False, "tool": "calculator", "seconds": 0.25},
        {"text": "1776", "sampled": True},
    ]
    record_evaluated_conversation(Home(home), "sums-s0-aaaa1111", turns, step=3, fingerprint=FINGERPRINT)
    shown = call("show", "sums-s0", "--sample", "--dataset", "two-terms")
    assert shown == (
        0,
        """\
step 3, two-terms, response 0   score 9   4 tokens   stop
  prompt
    │ 11 + 88 =
  policy: 7 tokens sampled · calls calculator
    │ [37*48]
  tool calculator: 6 tokens given · 0.25 s
    │ (1776)
  policy: 4 tokens sampled
    │ 1776
""",
        "",
    )
    (row,) = json.loads(call("show", "sums-s0", "--sample", "--dataset", "two-terms", "--response", "0", "--json")[1])
    assert [turn["tool"] for turn in row["turns"]] == [None, "calculator", None]
    plain = json.loads(call("show", "sums-s0", "--sample", "--dataset", "sums", "--json")[1])
    assert {tuple(response["turns"]) for response in plain} == {()}
    query = "select dataset, problem_id, sample, turn, tool from turns where rollout_id is null order by turn"
    told = json.loads(call("sql", query, "--format", "json")[1])
    of_it = {"dataset": "two-terms", "problem_id": "talk", "sample": 0}
    assert told == [{**of_it, "turn": turn, "tool": tool} for turn, tool in enumerate((None, "calculator", None))]
    code, _, error = call("show", "sums-s0", "--sample", "--dataset", "nowhere")
    assert code == 2
    assert "no evaluation of sums-s0-aaaa1111 on nowhere is recorded; its evaluation sets: " in error
    code, _, error = call("show", "sums-s0", "--sample", "--dataset", "two-terms", "--step", "1")
    assert code == 2
    assert "step 1 of sums-s0-aaaa1111 on two-terms is not recorded; the last evaluation was at step 3" in error
    assert call("show", "sums-s0", "--dataset", "two-terms")[0] == 2


def test_a_run_shows_where_its_values_come_from(call: Call, home: Path) -> None:
    run = home / "runs/sums-s0-aaaa1111"
    write_json(run / "provenance.json", {"origins": [[["training", "steps"], "file", "specs/sums.yaml", 12]]})
    code, out, _ = call("show", "aaaa", "--origin")
    assert code == 0
    assert re.search(r"^spec +training.steps +3 +file +specs/sums.yaml +12", out, re.MULTILINE)
    (row,) = json.loads(call("show", "aaaa", "--origin", "--json")[1])
    assert row == {
        **{"run_id": "sums-s0-aaaa1111", "kind": "spec", "name": "training.steps", "value": "3", "origin": "file"},
        **{"file": "specs/sums.yaml", "line": 12, "attempt": None},
    }


@pytest.mark.more
def test_a_run_shows_its_certificate(call: Call, home: Path) -> None:
    assert json.loads(call("show", "aaaa", "--json")[1])["certificate"] == {}
    assert "Certificate" not in call("show", "aaaa", "--all")[1]
    certificate = json.loads(json.dumps(certify(parse_objective({"type": "grpo"})).as_json()))
    write_json(home / "runs" / "sums-s0-aaaa1111" / "certificate.json", certificate)
    out = call("show", "aaaa", "--all")[1]
    assert "Certificate: no claim; compared with expected reward less the reverse KL of each token" in out
    assert re.search(r"on policy +apart +25 % .* forward KL of each token", out)
    assert json.loads(call("show", "aaaa", "--json")[1])["certificate"] == certificate


def test_a_run_whose_objective_changes_shows_a_certificate_for_each_phase(call: Call, home: Path) -> None:
    margin = {"schedule": [[1, 0.1], [9, 0.3]], "between": "linear"}
    objective = parse_objective({"type": "rpg", "clip": {"type": "dual", "low": margin}})
    phases = certificate_record(certify_over_training(objective))
    write_json(home / "runs" / "sums-s0-aaaa1111" / "certificate.json", phases)
    out = call("show", "aaaa", "--all")[1]
    assert re.findall(r"Certificate at step (\d+): exact on policy, holds", out) == ["1", "5", "9"]
    assert json.loads(call("show", "aaaa", "--json")[1])["certificate"] == json.loads(json.dumps(phases))


def test_a_run_under_way_without_rows_is_shown(call: Call, home: Path) -> None:
    RecordedRun(home, "new-s0-cccc3333", status="pending")
    assert call("show", "new")[0] == 0
    assert call("logs", "new") == (2, "", "new-s0-cccc3333 has no log yet\n")


def test_logs_come_in_the_order_of_the_stages(call: Call) -> None:
    assert call("logs", "aaaa")[1] == "==> data <==\n10 problems\n==> train <==\nstep 1\nstep 2\n"
    assert call("logs", "aaaa", "--stage", "train")[1] == "step 1\nstep 2\n"


def test_an_experiments_name_stands_for_the_runs_that_it_has_now_and_a_runs_whole_id_for_the_run(
    call: Call, home: Path
) -> None:
    runs = ["sums-s0-aaaa1111", "sums-s1-bbbb2222"]
    for name, current in (("sums", runs), (runs[1], [])):
        write_json(home / "experiments" / name / "experiment.json", {"runs": ["gone-1", *runs], "current": current})
    lines = "".join(f"{run_id}  finished  step 3/3  reward 0.5\n" for run_id in runs)
    assert call("watch", "sums") == (0, lines, "")
    assert call("watch", runs[1]) == (0, "finished  step 3/3  reward 0.5\n", "")
    logs = call("logs", "sums", "--stage", "train")[1]
    assert logs == "".join(f"==> {run_id} train <==\nstep 1\nstep 2\n" for run_id in runs)
    told = "`sums` is an experiment of 2 runs: `rpg compare sums` and `rpg report sums` show all of them; for one run,"
    assert call("show", "sums")[2].startswith(told)
    assert call("resume", "sums") == (0, "", "".join(f"{run_id} is finished\n" for run_id in runs))
    code, _, err = call("cancel", "sums")
    assert (code, "no run of the experiment is running or waits on a server" in err) == (2, True)
    RecordedRun(home, "sums-s2-cccc3333", status="failed")
    write_json(home / "experiments" / "sums" / "experiment.json", {"current": ["sums-s2-cccc3333", runs[0]]})
    code, out, _ = call("watch", "sums")
    assert (code, out.split("\n")[0]) == (1, "sums-s2-cccc3333  failed")


def test_a_log_is_followed_and_its_last_line_watched_until_the_run_ends(home: Path) -> None:
    run = RecordedRun(home, "live-s0-dddd4444", status="running")
    (run.path / "logs").mkdir()
    log = run.path / "logs" / "train.log"
    log.write_text("first\n")
    with subprocess.Popen(["sleep", "60"]) as keeper:
        try:
            run.state |= {"pid": keeper.pid, "pid_started": start_of(keeper.pid)}
            run.save()
            following = subprocess.Popen(
                [sys.executable, "-c", MAIN, "logs", "-f", "live"],
                env={**os.environ, "RPG_HOME": str(home)}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert [following.stdout.readline() for _ in range(2)] == ["==> train <==\n", "first\n"]
            with open(log, "a") as file:
                file.write("second\n")
            assert following.stdout.readline() == "second\n"
            watching = subprocess.Popen(
                [sys.executable, "-c", MAIN, "watch", "live"],
                env={**os.environ, "RPG_HOME": str(home)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert watching.stderr.readline() == "running  train  second\n"
            with open(log, "a") as file:
                file.write("last\n")
            run.state["status"] = "finished"
            run.save()
            assert following.communicate(timeout=30)[0] == "last\n"
            assert following.returncode == 0
            assert watching.communicate(timeout=30)[0] == "finished\n"
        finally:
            keeper.kill()


def test_watching_ends_with_the_run_and_its_outcome(call: Call, home: Path) -> None:
    assert call("watch", "aaaa") == (0, "finished  step 3/3  reward 0.5\n", "")
    run = RecordedRun(home, "gone-s0-eeee5555", status="running")
    run.state |= {"pid": None}
    run.save()
    assert call("watch", "gone")[:2] == (1, "crashed\n")


def _process(arguments: list[str], home: Path, stdin: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        env={**os.environ, "RPG_HOME": str(home)}, input=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_tables_for_papers_say_what_the_table_says(call: Call) -> None:
    code, latex, _ = call("compare", "sums-s0-aaaa1111", "sums-s1-bbbb2222", "--format", "latex")
    assert code == 0
    assert latex.startswith("\\begin{table}\n\\centering\n\\caption{Means over 1 seed")
    assert "\\toprule\nresult & group & value" in latex
    assert latex.endswith("\\bottomrule\n\\end{tabular}\n\\end{table}\n")
    assert "\\\\\n\\midrule\n" in latex
    _, markdown, _ = call("compare", "sums-s0-aaaa1111", "sums-s1-bbbb2222", "--format", "markdown")
    assert set(markdown.splitlines()[1]) == {"|", "-"}
    _, rows, _ = call("compare", "sums-s0-aaaa1111", "sums-s1-bbbb2222", "--format", "csv")
    assert len(list(csv.reader(io.StringIO(rows)))) == len(markdown.splitlines()) - 1
    _, of_one, _ = call("report", "sums-s0-aaaa1111", "--format", "markdown")
    assert of_one.splitlines()[0].startswith("| result | ")


def test_sql_writes_tables_for_papers(call: Call) -> None:
    query = "select 'a_b & 5 %' as what, 0.25 as value"
    assert call("sql", query, "--format", "latex")[1] == (
        "\\begin{tabular}{ll}\n\\toprule\nwhat & value \\\\\n\\midrule\na\\_b \\& 5 \\% & 0.25 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )
    assert call("sql", query, "--format", "html")[1] == (
        "<table>\n<thead><tr><th>what</th><th>value</th></tr></thead>\n<tbody>\n"
        "<tr><td>a_b &amp; 5 %</td><td>0.25</td></tr>\n</tbody>\n</table>\n"
    )
    assert call("sql", query, "--format", "markdown")[1] == "| what | value |\n|---|---|\n| a_b &amp; 5 % | 0.25 |\n"


@pytest.mark.parametrize("kind", ["table", "csv", "json", "markdown", "latex", "html"])
def test_rows_and_digits_of_a_query_are_chosen(call: Call, kind: str) -> None:
    query = "select * from (values ('kl/reverse', 1, 0.12345), ('entropy', 2, 0.5), ('kl/forward', 3, 2.5)) t(a, b, c)"
    code, told, _ = call("sql", query, "--format", kind, "--rows", "kl", "--digits", "2")
    assert code == 0
    assert re.findall("[a-z]+/[a-z]+(?=[^>])|entropy", told.replace("</", " ")) == ["kl/reverse", "kl/forward"]
    # Programs that read JSON round for themselves.
    assert re.findall(r"\d\.\d+", told) == (["0.12345", "2.5"] if kind == "json" else ["0.12", "2.50"])


def test_parquet_has_every_row_and_digit(call: Call) -> None:
    code, _, error = call("sql", "select 1", "--format", "parquet", "-o", "rows.parquet", "--digits", "2")
    assert code == 2
    assert "Parquet always has all rows and digits" in error


def test_a_difference_that_holds_keeps_its_star_in_a_paper() -> None:
    from pipelines.cli.output import TableFormat, table_for_papers

    text = table_for_papers(["a"], [["0.5 [0.4, 0.6]\n  +0.1 *"]], TableFormat.latex)
    assert "0.5 [0.4, 0.6] +0.1$^{*}$" in text


def test_a_reports_charts_are_written_for_a_paper(tmp_path: Path, call: Call) -> None:
    code, out, _ = call("report", "sums-s0-aaaa1111", "--figures", str(tmp_path / "figures"))
    assert code == 0
    names = {Path(line).name for line in out.splitlines()}
    assert {"accuracy-sums.pdf", "accuracy-sums.svg", "accuracy-sums-wide.png"} <= names
    assert all(Path(line).stat().st_size for line in out.splitlines())
