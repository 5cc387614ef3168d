"""Commands run as root or as an ordinary user, whoever runs the tests."""

import os
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USERS = ["root", "an ordinary user"]


def as_user(user: str, command: list[str]) -> list[str]:
    """The command as root, or as an ordinary user in what a container allows: no capability, no new privilege."""
    if user == "root":
        if os.geteuid() != 0:
            pytest.skip("not root")
        return command
    if os.geteuid() != 0:
        return command
    needed = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, ROOT)} | {Path(p) for p in (sys.prefix, ROOT)}
    # Root's home lets nobody in, and Python may be there.
    closed = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    outer = ["bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    outer += [word for path in sorted(closed) for word in ("--tmpfs", str(path), "--chmod", "0755", str(path))]
    hidden = [path for path in sorted(needed) if any(path.is_relative_to(parent) for parent in closed)]
    for path in hidden:
        outer += [word for parent in reversed(path.parents[:-1]) for word in ("--dir", str(parent))]
        outer += ["--ro-bind", str(path), str(path)]
    user_of = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all"]
    return [*outer, *user_of, "--ambient-caps", "-all", "--bounding-set", "-all", "--no-new-privs", *command]
