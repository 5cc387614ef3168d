"""Homes for tests that run real experiments: data, base model and the Prefect database are made once a session."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from live import SPEC, Lab, copy_prefect_database
from server_profile import BACKENDS, ServerLab, server_profile

from pipelines.home.home import Home
from tests.needs import skip_without


@pytest.fixture(scope="session")
def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the tiny experiment has run once, to its end. Who needs it first makes it for all workers."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # each worker has a part of it
    directory = directory / "prepared"
    directory.mkdir(exist_ok=True)
    lab = Lab(directory / "home", directory / "tiny.yaml")
    with FileLock(directory / "lock"):
        if not (directory / "made").exists():
            lab.spec.write_text(SPEC)
            try:
                result = lab.rpg("run", str(lab.spec), anew=True, timeout=500)
            finally:
                lab.clean_up()
            assert result.code == 0, result.err
            (directory / "made").touch()
    return lab.root


@pytest.fixture
def lab(prepared_home: Path, tmp_path: Path) -> Iterator[Lab]:
    """A home of its own with the shared stages published and an empty run history."""
    lab = Lab(tmp_path / "home", tmp_path / "tiny.yaml")
    shutil.copytree(prepared_home / "artifacts", lab.root / "artifacts")
    copy_prefect_database(prepared_home, lab.root)
    lab.spec.write_text(SPEC)
    yield lab
    lab.clean_up()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home in which nothing is yet."""
    return Home(tmp_path / "home")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls `rpg` in this process; the exit code, stdout and stderr."""
    from pipelines.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rpg", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def server_lab() -> Iterator[ServerLab]:
    """A home whose server profile is up, with one worker. Its first run makes what several runs share."""
    skip_without(*BACKENDS)
    with server_profile() as lab:
        yield lab


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A file system at `disk`, and what fills it but for some bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")

    def fill(leave: int = 0) -> None:
        with (disk / "filler").open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            file.truncate(file.tell() - leave)

    yield fill
    subprocess.run(["umount", "-l", disk], check=True)
