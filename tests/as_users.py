"""Commands run as root or as an ordinary user, regardless of the tests' user."""

import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USERS = ["root", "an ordinary user"]


def as_user(user: str, command: list[str], *, number: int = 65534) -> list[str]:
    """Returns the command as root, or as an ordinary user within the limits of a container: no capability, no new
    privilege.

    Args:
        number: the ordinary user's.
    """
    if user == "root":
        if os.geteuid() != 0:
            pytest.skip("not root")
        return command
    if os.geteuid() != 0:
        return command
    needed = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, ROOT)} | {Path(p) for p in (sys.prefix, ROOT)}
    # Other users cannot enter root's home, and Python may be there.
    closed = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    outer = ["bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    outer += [word for path in sorted(closed) for word in ("--tmpfs", str(path), "--chmod", "0755", str(path))]
    hidden = [path for path in sorted(needed) if any(path.is_relative_to(parent) for parent in closed)]
    for path in hidden:
        outer += [word for parent in reversed(path.parents[:-1]) for word in ("--dir", str(parent))]
        outer += ["--ro-bind", str(path), str(path)]
    user_of = ["setpriv", "--reuid", str(number), "--regid", str(number), "--clear-groups", "--inh-caps", "-all"]
    return [*outer, *user_of, "--ambient-caps", "-all", "--bounding-set", "-all", "--no-new-privs", *command]


@dataclass(frozen=True)
class Shared:
    """Directories of a machine with two ordinary users, neither of whom is root."""

    root: Path

    @property
    def tmp(self) -> Path:
        """Where all may write, as in /tmp."""
        return self.root / "tmp"

    @property
    def home(self) -> Path:
        """The first user's home directory."""
        return self.root / "home"

    @property
    def user(self) -> str:
        """The first user. Its group has no other member."""
        return "daemon"

    @property
    def other(self) -> str:
        """The second user, who attacks the first."""
        return "mail"


@contextmanager
def shared_machine() -> Iterator[Shared]:
    """Makes the directories; skips the test if it may not become other users."""
    if os.geteuid() != 0:
        pytest.skip("not root")
    machine = Shared(Path(tempfile.mkdtemp(prefix="rpg-users-")))
    try:
        machine.root.chmod(0o755)
        machine.tmp.mkdir()
        machine.tmp.chmod(0o1777)
        machine.home.mkdir(mode=0o755)
        shutil.chown(machine.home, machine.user, machine.user)
        yield machine
    finally:
        shutil.rmtree(machine.root)


@contextmanager
def acting_as(user: str, umask: int = 0o022) -> Iterator[None]:
    """Within the block this process has the rights of an ordinary user, and this umask."""
    entry, groups, before = pwd.getpwnam(user), os.getgroups(), os.umask(umask)
    os.setgroups([])
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)
