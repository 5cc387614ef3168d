"""A process's temporary directories go with it, however it ends."""

import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specs.machine.scratch import Scratch, sweep

HOLDER = """
import sys
from pathlib import Path
from specs.machine.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]), "query")
(scratch.path / "spilled").write_bytes(bytes(1000))
print(scratch.path, flush=True)
sys.stdin.read()
"""


def holder(root: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that has such a directory, and the directory."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], text=True, **pipes)
    return process, Path(process.stdout.readline().strip())


def test_the_directory_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    killed, left = holder(tmp_path)
    alive, kept = holder(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (left / "spilled").exists()
    with Scratch(tmp_path, "pages") as own:
        assert not left.exists()
        assert (kept / "spilled").exists()
        sweep(tmp_path)
        assert own.exists(), "nor its own"
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
    alive.communicate(timeout=30)
    sweep(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("root", ["/proc", "nowhere"])
def test_where_nothing_can_be_written_to_the_home_the_directory_is_one_of_the_systems(
    tmp_path: Path, root: str
) -> None:
    with Scratch(tmp_path / root, "query") as directory:
        assert directory.parent == Path(tempfile.gettempdir())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()
