"""Homes below directories whose names mean something to a URL, to a pattern or to SQL."""

import shutil
from pathlib import Path

import pytest

from specs.errors import RpgError
from storage import Store, check, compact, rebuild
from storage.export import export_run
from storage.ingest import ingest
from tests.storage.recording import RecordedRun

NAMES = ("what now?", "a#b%2Fc;d=\"'e", "[1]", "a*b", "[!a]", "Prüfung\\1")
ROWS = "select count(*), min(run_id), max(run_id) from tokens"
REWARDS = "select step, value from metrics where name = 'reward/mean' order by step"


def record(root: Path, run_id: str, steps: int) -> Path:
    run = RecordedRun(root, run_id)
    run.start(1)
    run.steps(1, steps, each=2)
    run.evaluate()
    return root


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_a_home_is_read_whatever_its_directory_is_called(name: str, tmp_path: Path) -> None:
    root = record(tmp_path / name / "home", "own", 3)
    for like_it in ("1", "axb", "c", "whatxnow"):  # whose names fit the same patterns
        shutil.copytree(root, tmp_path / like_it / "home")
        for segment in (tmp_path / like_it).rglob("*.parquet"):
            segment.write_bytes(b"another home's")
    beside = set(tmp_path.iterdir())
    expected = ([(1, 0.5), (2, 0.5), (3, 0.5)], [(18, "own", "own")])
    for change in (None, ingest, compact, rebuild):
        if change is rebuild and "?" in name:
            with pytest.raises(RpgError, match="keeps no database below a directory whose name has a `\\?`"):
                rebuild(root)
        elif change:
            change(root)
        with Store.open(root) as store:
            assert (store.query(REWARDS).rows, store.query(ROWS).rows) == expected, change
    assert not check(root)
    (tmp_path / name / "out").mkdir()
    assert export_run(root, "own", tmp_path / name / "out")["tokens"] == 18
    assert set(tmp_path.iterdir()) == beside
