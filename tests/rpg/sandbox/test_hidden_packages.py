"""A process that runs a policy's text finds no package with problems or scorers, however they were installed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from as_users import USERS, as_user
from places import ROOT, TESTS

from rpg.sandbox import Limits, start
from rpg.sandbox.hidden import hidden

LOOKS = Path(__file__).with_name("hidden_packages.py")
EXTENSION = "rpg_brevity"
HOLDS = {*(f"import {name}" for name in ("rpg", "specs", "storage", "pipelines", "reasoning_gym", EXTENSION))}

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """The interpreter of an environment into which this product, reasoning-gym and an extension are installed as wheels
    install them."""
    directory = Path(
        tempfile.mkdtemp(dir="/var/tmp")
    )  # other users may look into it, and programs have a /tmp of their own
    directory.chmod(0o755)
    try:
        build = directory / "build"
        for name in ("specs", "rpg", "storage", "pipelines"):
            shutil.copytree(ROOT / name, build / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, build)
        code = f"from setuptools import build_meta; build_meta.build_wheel({str(directory)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=build, check=True, capture_output=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "env")], check=True)
        (packages,) = (directory / "env/lib").glob("python3*/site-packages")
        (wheel,) = directory.glob("*.whl")
        shutil.unpack_archive(wheel, packages, "zip")
        for place, pattern in ((Path(sysconfig.get_path("purelib")), "reasoning_gym*"), (TESTS / "packages", "rpg_b*")):
            for found in place.glob(pattern):
                shutil.copytree(found, packages / found.name)
        shutil.rmtree(build)
        yield directory / "env/bin/python"
    finally:
        shutil.rmtree(directory)


def looked(user: str, python: Path, *names: str) -> dict[str, Any]:
    """Finds outside, and in each way to run a policy's text."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = as_user(user, [str(python), str(LOOKS), *names])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.more
@pytest.mark.parametrize("user", USERS)
def test_packages_of_a_checkout_are_hidden(user: str) -> None:
    found = looked(user, Path(sys.executable))
    assert {*found.pop("outside")} >= HOLDS - {f"import {EXTENSION}"}
    assert not any(found.values()), found
    assert len(found) == 5


@pytest.mark.more
@pytest.mark.parametrize("user", USERS)
def test_packages_that_are_installed_are_hidden(user: str, installed: Path) -> None:
    found = looked(user, installed, EXTENSION)
    assert {*found.pop("outside")} >= HOLDS
    assert not any(found.values()), found
    assert len(found) == 5


def test_copies_for_another_interpreter_are_hidden_too(tmp_path: Path) -> None:
    for place in ("lib/python3.9/site-packages", "local/lib/python3/dist-packages", "envs/a/lib/python3/site-packages"):
        file = tmp_path / place / "reasoning_gym" / "__init__.py"
        file.parent.mkdir(parents=True)
        file.touch()
        (tmp_path / place / "reasoning_gym-0.1.dist-info").mkdir()
        (tmp_path / place / "storage").mkdir()  # presumably another's
    found = [path.relative_to(tmp_path) for path in hidden([tmp_path]) if path.is_relative_to(tmp_path)]
    assert [(path.parts[0], path.name) for path in found] == [
        (first, name) for first in ("envs", "lib", "local") for name in ("reasoning_gym", "reasoning_gym-0.1.dist-info")
    ]


def seen(command: str, *readable: Path) -> str:
    """Returns the output of a shell that may run a policy's text."""
    options: dict[str, Any] = {"limits": Limits(processes=0), "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    process = start(["/bin/sh", "-c", command], sealed=True, hides=True, readable=readable, **options)
    written = process.stdout.read().decode()
    process.end()
    return written


def test_a_package_that_is_named_as_readable_is_shown() -> None:
    package = Path(sysconfig.get_path("purelib"), "reasoning_gym")
    command = f"ls {package}"
    assert (seen(command), "factory.py" in seen(command, package).split()) == ("", True)


def test_what_the_hub_keeps_and_the_record_are_hidden_in_a_directory_that_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    for name in ("hub", "home/artifacts", "else"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set.jsonl").write_text("gold\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    command = f"cd {tmp_path} && find . -type f | sort"
    assert seen(command, tmp_path).split() == ["./else/set.jsonl"]
    assert seen(command, tmp_path, tmp_path / "hub").split() == ["./else/set.jsonl", "./hub/set.jsonl"]
