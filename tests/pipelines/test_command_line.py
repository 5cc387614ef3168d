"""The command line as a whole: its version, and what a shell completes."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

RPG = [sys.executable, "-c", "from pipelines.cli import main; main()"]


def rpg(*arguments: str, **environment: str) -> str:
    """What the command line prints."""
    done = subprocess.run(
        [*RPG, *arguments],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout


def test_the_version_is_the_packages() -> None:
    assert rpg("--version") == f"rpg-experiments {version('rpg-experiments')}\n"


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
