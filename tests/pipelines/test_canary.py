"""A secret in the environment that every stage prints stands nowhere afterwards: in no file of the home, Prefect's
database and its logs included, and in no answer of the command line."""

import os
import re
from pathlib import Path

import pytest
from live import Lab

from pipelines.home.home import Home

TELLTALE = Path(__file__).parent / "telltale"
CANARY = "canary-7f3b9a20c4e8"
PASSWORD = "canary-0d1e2f3a4b5c"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TELLTALE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("RPG_FORK_STAGES", "0")  # the telltale speaks where a process begins
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    # Forwarded to other machines and recorded in launch.json; a password in a URL, as that of a database.
    monkeypatch.setenv("RPG_DATASETS_URL", f"postgresql://rpg:{PASSWORD}@nowhere/rpg")


def files_that_hold(root: Path, *secrets: str) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets)
    ]


def assert_untold(lab: Lab, *outputs: str) -> None:
    (run,) = lab.run_ids()
    answers = [lab.rpg(*command) for command in (("show", run), ("show", run, "--json"), ("logs", run))]
    answers.append(lab.rpg("sql", "SELECT * FROM events", "--format", "json"))
    outputs += tuple(text for answer in answers for text in (answer.out, answer.err))
    assert [text for text in outputs if CANARY in text or PASSWORD in text] == []
    assert files_that_hold(lab.root, CANARY, PASSWORD) == []
    # The filter was put to the test: the stages did print, and the rest of their lines is there.
    log = (lab.home.run(run) / "logs" / "train.log").read_text()
    assert "telltale CANARY_TOKEN (hidden) '(hidden)'" in log
    assert re.search(r"telltale RPG_DATASETS_URL postgresql://rpg:\(hidden\)@nowhere/rpg", log)


@pytest.mark.long
@pytest.mark.usefixtures("told")
def test_a_secret_that_the_stages_print_is_nowhere_after_a_run(lab: Lab, tmp_path: Path) -> None:
    result = lab.rpg("run", str(lab.spec))
    assert result.code == 0, result.err
    (run,) = lab.run_ids()
    assert_untold(lab, result.out, result.err)
    assert '"RPG_DATASETS_URL": "(hidden)"' in (lab.home.run(run) / "launch.json").read_text()
    exported = lab.rpg("export", run, str(tmp_path / "exported"))
    assert exported.code == 0, exported.err
    assert files_that_hold(tmp_path / "exported", CANARY, PASSWORD) == []


@pytest.mark.long
@pytest.mark.usefixtures("told")
def test_a_secret_in_an_error_is_nowhere_after_a_run_that_failed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELLTALE", "fail")
    result = lab.rpg("run", str(lab.spec), overrides=("stages.train.retries=1", "stages.train.retry_delay_seconds=0"))
    assert result.code == 1, result.err
    assert "401 for (hidden)" in result.err
    assert_untold(lab, result.out, result.err)
    assert lab.prefect_rows("SELECT count(*) FROM log WHERE message LIKE '%401 for (hidden)%'")[0][0] > 0


def test_the_home_of_these_tests_is_searched_where_secrets_would_be(lab: Lab) -> None:
    (lab.root / "runs").mkdir()
    (lab.root / "runs" / "a.log").write_bytes(b"x" + CANARY.encode())
    assert files_that_hold(Home(lab.root).root, CANARY) == ["runs/a.log"]
