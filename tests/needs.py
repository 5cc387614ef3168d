"""Debian packages that tests need: `@pytest.mark.needs("bubblewrap")` skips with the package's name without it."""

import shutil
from collections.abc import Callable
from functools import cache

import pytest

from pipelines.prefect.services.backends import installed_postgres
from rpg.sandbox import room


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin") is not None


CHECKS: dict[str, Callable[[], bool]] = {
    "bubblewrap": lambda: room.missing() is None,
    "chromium": _program("chromium"),
    "g++": _program("g++"),
    "iproute2": _program("ip"),
    "postgresql": lambda: bool(installed_postgres()),
    "redis-server": _program("redis-server"),
    "slurm-wlm": _program("sbatch"),
    "strace": _program("strace"),
    "systemd": _program("systemd-analyze"),
}
"""Package -> whether it is installed and works here."""


@cache
def _missing(package: str) -> bool:
    return not CHECKS[package]()


def skip_without(*packages: str) -> None:
    """Skips the test that is running if a package is missing. Each is looked for once in a process.

    Raises:
        KeyError: the table has no such package.
    """
    if lacking := [package for package in packages if _missing(package)]:
        pytest.skip(f"needs {' '.join(lacking)}: apt-get install {' '.join(lacking)}")
