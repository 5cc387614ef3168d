"""The record as a notebook opens it."""

import importlib.util
from pathlib import Path

import pytest

from specs.errors import RpgError
from storage import QueryError, open_record
from storage.record import SERVERS
from tests.storage.recording import RecordedRun


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / ".rpg"


@pytest.fixture
def run(home: Path) -> RecordedRun:
    run = RecordedRun(home, "sums-1")
    run.start(1)
    run.steps(1, 3)
    return run


@pytest.mark.usefixtures("run")
def test_an_answer_is_rows_arrow_or_a_data_frame(home: Path) -> None:
    with open_record(home) as record:
        answer = record.sql("select step, value from metrics where name = ? and step > ? order by step", ["entropy", 1])
        named = record.sql("select step from metrics where name = $name and step > 1 order by 1", {"name": "entropy"})
    assert answer.rows == [(2, 1.0), (3, 1.0)]
    assert answer.arrow().to_pylist() == [{"step": 2, "value": 1.0}, {"step": 3, "value": 1.0}]
    assert answer.df()["step"].tolist() == [2, 3]
    assert named.rows == [(2,), (3,)]


@pytest.mark.usefixtures("run")
def test_polars_is_asked_for_where_it_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = open_record(home).sql("select 1 as one")
    if importlib.util.find_spec("polars"):
        assert answer.pl()["one"].to_list() == [1]
    monkeypatch.setattr("storage.store.find_spec", lambda _: None)
    for frame, package in ((answer.pl, "polars"), (answer.df, "pandas")):
        with pytest.raises(ImportError, match=f"this needs {package}: `pip install {package}`"):
            frame()


def test_a_record_is_one_moment_until_it_is_refreshed(home: Path, run: RecordedRun) -> None:
    last = "select max(step) from metrics"
    with open_record(home) as record:
        assert record.sql(last).rows == [(3,)]
        run.steps(4, 5)
        assert record.sql(last).rows == [(3,)]
        record.refresh()
        assert record.sql(last).rows == [(5,)]


@pytest.mark.usefixtures("run")
def test_the_place_is_rpg_home_or_dot_rpg_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = "select count(*) from runs"
    monkeypatch.delenv("RPG_HOME", raising=False)
    monkeypatch.chdir(home.parent)
    assert open_record().sql(count).rows == [(1,)]
    monkeypatch.setenv("RPG_HOME", str(home / "other"))
    assert open_record().sql(count).rows == [(0,)]
    with pytest.raises(RpgError, match="is not a directory; `open_record` takes a home"):
        open_record("nowhere")


@pytest.mark.usefixtures("run")
def test_a_record_has_limits(home: Path) -> None:
    with open_record(home, timeout=0.2, memory="100MB") as record:
        with pytest.raises(QueryError, match="time limit"):
            record.sql("select count(*) from range(1000000) a, range(1000000) b where a.range * b.range % 7 = 3")
        with pytest.raises(QueryError, match="read-only"):
            record.sql("drop table runs")
    with pytest.raises(QueryError, match="not a memory size"):
        open_record(home, memory="much")


@pytest.mark.usefixtures("run")
def test_a_url_is_opened_by_the_installed_package_that_says_it_can(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "installed" / "opener-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: opener\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{SERVERS}]\nopener = opener:open_server\n")
    (described.parent / "opener.py").write_text(
        "from pathlib import Path\n"
        "class Copy:\n"
        f"    root = Path({str(home)!r})\n"
        "    def __init__(self, url): self.asked = [url]\n"
        "    def refresh(self, tables): self.asked.append(sorted(tables))\n"
        "    def close(self): self.asked.append('closed')\n"
        "def open_server(url):\n"
        "    global copy\n"
        "    copy = Copy(url)\n"
        "    return copy\n"
    )
    monkeypatch.syspath_prepend(str(described.parent))
    with open_record("http://server:4200/api") as record:
        assert record.sql("select count(*) from metrics").rows[0][0] > 0
    import opener  # type: ignore[import-not-found]

    url, tables, *rest = opener.copy.asked
    assert url == "http://server:4200/api"
    assert "metrics" in tables
    assert "tokens" not in tables
    assert rest == ["closed"]


def test_a_url_that_no_installed_package_opens_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.record.entry_points", lambda group: {"other": "x"}.get(group, ()))
    with pytest.raises(RpgError) as refused:
        open_record("http://server:4200/api")
    assert str(refused.value) == (
        "cannot open http://server:4200/api: no installed package has an entry point in `rpg.servers`\n"
        "  hint: install rpg-experiments again (`make install`, or `pip install -e .`)"
    )
