"""The command line as a whole: its version, and completion in shells."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import specs
from pipelines.cli import verbs
from pipelines.cli.output import table_text
from tests.pipelines.unpacked_home import unpack

EXAMPLE = Path(specs.__file__).parent / "experiments" / "starter.yaml"
RPG = [sys.executable, "-c", "from pipelines.cli import main; main()"]


def rpg(*arguments: str, **environment: str) -> str:
    """Returns the output of the command line."""
    done = subprocess.run(
        [*RPG, *arguments],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout


def test_the_version_is_the_packages() -> None:
    assert rpg("--version") == f"rpg-experiments {version('rpg-experiments')}\n"


def test_the_help_lists_every_verb_in_a_group_in_the_order_of_use() -> None:
    modules = [path.stem for path in Path(verbs.__file__).parent.glob("[a-z]*.py")]
    assert sorted(modules) == sorted(verb for group in verbs.PANELS.values() for verb in group)
    shown = rpg("--help", COLUMNS="100")
    titles = re.findall(r"─ (\w+) ─+", shown)
    assert set(titles) == {"Options", *verbs.PANELS}
    begin = shown.partition("─ Begin ─")[2].partition("╰")[0]
    assert re.findall(r"│ ([a-z]+) ", begin) == list(verbs.PANELS["Begin"])


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rpg val", ["validate"]),
        ("rpg plan --reso", ["--resolved"]),
        ("rpg show sums-s", ["sums-s0-aaaa1111", "sums-s1-bbbb2222"]),
        ("rpg watch su", ["sums", "sums-s0-aaaa1111", "sums-s1-bbbb2222"]),
    ],
)
def test_a_shell_completes_verbs_options_and_what_is_recorded(tmp_path: Path, words: str, completed: list[str]) -> None:
    for name in ("runs/sums-s0-aaaa1111", "runs/sums-s1-bbbb2222", "experiments/sums"):
        (tmp_path / name).mkdir(parents=True)
    position = str(len(words.split()) - 1)
    shown = rpg(RPG_HOME=str(tmp_path), _RPG_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert shown.split() == completed


@pytest.mark.parametrize("stuck", ["", "limits._stuck.append(Future())"])
@pytest.mark.parametrize(("code", "expected"), [("'no such run'", (1, "no such run\n")), ("3", (3, "")), ("", (0, ""))])
def test_an_exit_code_and_its_message_survive_a_query_that_goes_on(
    code: str, expected: tuple[int, str], stuck: str
) -> None:
    program = (
        "import sys; from concurrent.futures import Future; from pipelines import cli\n"
        f"from storage.statements import limits\n{stuck}\n"
        f"cli.app = lambda **_: sys.exit({code})\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == expected


@pytest.mark.more
@pytest.mark.parametrize("words", [("validate", "spec.yaml"), ("schema",)])
def test_an_output_that_takes_nothing_is_named(words: tuple[str, ...], tmp_path: Path) -> None:
    """A few bytes are refused when the command ends, many while it writes."""
    (tmp_path / "spec.yaml").write_text(EXAMPLE.read_text())
    environment = {**os.environ, "PYTHONUNBUFFERED": "", "RPG_HOME": str(tmp_path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RPG, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: No space left on device\n")


def test_a_reader_that_left_before_a_short_answer_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(EXAMPLE.read_text())
    reading, writing = os.pipe()
    os.close(reading)
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(
            [*RPG, "validate", "spec.yaml"],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path, env=environment,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_narrow_terminal_keeps_first_columns_whole_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("quickstart-s0-65d6e96b", "finished", "0.438 -> 0.631", "2026-11-22 03:10:03")
    assert table_text(("run", "status", "accuracy", "started"), [row], width=60) == (
        "run                      status     accuracy\n"
        "──────────────────────────────────────────────────\n"
        "quickstart-s0-65d6e96b   finished   0.438 -> 0.631\n"
    )
    assert capsys.readouterr().err == "the terminal is too narrow for: started; `| cat` shows all\n"
    question = ("quickstart", "Does it teach a half-taught model to add and subtract?")
    assert table_text(("name", "question"), [question], width=40) == (
        "name         question\n────────────────────────────────────────\nquickstart   Does it teach a half-taugh…\n"
    )


@pytest.mark.more
def test_a_home_that_can_only_be_read_is_read_and_a_page_that_cannot_be_written_there_named(tmp_path: Path) -> None:
    unpack(tmp_path)
    home = tmp_path / "home"
    if subprocess.run(["mount", "--bind", home, home], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", home], check=True)
        assert "finished-s0-" in rpg("runs", RPG_HOME=str(home))
        done = subprocess.run(
            [*RPG, "report", "finished"],
            capture_output=True, text=True, timeout=60, env={**os.environ, "RPG_HOME": str(home)},
        )  # fmt: skip
    finally:
        subprocess.run(["umount", "-l", home], check=True)
    assert (done.returncode, done.stdout) == (1, "")
    page = home / "experiments" / "finished" / "report.html"
    assert done.stderr.splitlines()[-1].startswith(f"cannot write {page}: the file system is read-only; ")
    assert "Traceback" not in done.stderr
