"""The user's own cache directory, for files outside a home and for the code that torch, Triton and vLLM compile.

If other users could write there, they could run code as this user, or forge cached results. So the directory is made
with mode 0700, and each process that uses it checks it. The check fails if another user owns the directory, can write
it or replace it, or owns a file that is about to be read from it, or can write it by a hard link elsewhere. Root is
trusted.
"""

import errno
import grp
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from specs.errors import RpgError
from specs.machine.files import user_name, versions_of

_OF_LIBRARIES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
"""Environment variable of a library -> directory for the code that it compiles, below `compiled`."""
_SWITCHED_OFF = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_ENABLE_CACHING_MODULE": "0"}
"""Caches that torch 2.13 keeps in `/tmp/torchinductor_USER` even if TORCHINDUCTOR_CACHE_DIR is set."""
_SHARED_BY_MACHINES = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb", "weka")
"""Prefixes of the names of network file systems."""
_MOST_LINKS = 40


class UnsafeDirectoryError(RpgError):
    """Error for a file or directory that another user controls, or could control, in a place for this user's own files
    only."""

    def __init__(self, path: Path, reason: str, status: os.stat_result) -> None:
        found = f"{reason} (owner {user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o})"
        hint = "remove it, or check its content and make it yours alone with chown and chmod -R go-w"
        super().__init__(f"{path} is not safe to use: {found}\n  hint: {hint}; XDG_CACHE_HOME names another place")


def directory() -> Path:
    """Returns the user's own cache directory; creates it if it is missing.

    Raises:
        UnsafeDirectoryError: another user controls it.
        OSError: it cannot be created.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    parent = Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache"))
    if not parent.is_absolute():
        raise PermissionError(errno.EACCES, "this user has no home directory; set XDG_CACHE_HOME", str(parent))
    return _checked(parent / "rpg")


def place(*names: str) -> Path:
    """Returns a path below that directory. Its existing parts are checked.

    Raises:
        UnsafeDirectoryError: another user controls the directory, or owns a part of the path or can write the file.
        OSError: the directory cannot be created.
    """
    path = directory()
    for name in names:
        path /= name
        with suppress(FileNotFoundError):
            _check_owner(path, path.lstat())
    return path


def place_to_save_time(*names: str) -> Path | None:
    """Returns the same path as `place`, or None if that is impossible. If another user is the cause, the first call
    warns."""
    try:
        return place(*names)
    except UnsafeDirectoryError as error:
        _warn(str(error))
    except OSError:  # a missing or read-only home directory
        pass
    return None


def local_directory(name: str) -> Path:
    """Returns a directory on a disk of this machine that is this user's alone.

    It is in the cache directory; if that is on a network file system, among the temporary files; if neither is safe, it
    is a new directory that no later process uses.

    Raises:
        UnsafeDirectoryError: other users control the directory for temporary files.
    """
    try:
        top = directory()
        if _is_shared_by_machines(top):
            top = _checked(Path(tempfile.gettempdir()) / f"rpg-{os.geteuid()}")
        if (top / name).is_dir():
            _check_contents(top / name, closed=True)
        return top / name
    except UnsafeDirectoryError as error:
        _warn(str(error))
    except OSError:
        pass
    return _temporary(os.geteuid()) / name


def library_variables() -> dict[str, str]:
    """Returns environment variables that make torch, Triton and vLLM keep compiled code where only this user can write.

    A value set by the user stays if it is safe.
    """
    return dict(_library_variables(tuple(os.environ.get(name, "") for name in _OF_LIBRARIES), os.geteuid()))


@cache
def _library_variables(given: tuple[str, ...], _user: int) -> Mapping[str, str]:
    """Returns the result of `library_variables`. It is cached, because a process may start thousands of programs."""
    own = local_directory("compiled")
    # Torch adds version names only below its own default directory.
    versions = "-".join([str(sys.implementation.cache_tag), *versions_of("torch").values()])
    chosen = {name: own / kind for name, kind in _OF_LIBRARIES.items()}
    chosen["TORCH_EXTENSIONS_DIR"] /= versions
    stay = {name: value for name, value in zip(_OF_LIBRARIES, given, strict=True) if value and _stays(name, value)}
    return {name: stay.get(name, str(path)) for name, path in chosen.items()} | _SWITCHED_OFF


def _stays(variable: str, value: str) -> bool:
    """Returns whether a library's directory from the environment is kept. A directory in our cache is not, because we
    may have chosen it for another machine."""
    path = Path(value).expanduser().absolute()
    try:
        if path.is_relative_to(place("compiled")):
            return False
        _check_contents(_checked(path, closed=False), closed=False)
    except UnsafeDirectoryError as error:
        _warn(f"{variable}: {error}")
        return False
    except OSError as error:
        _warn(f"{variable}: {value} is not used: {error.strerror}")
        return False
    return True


def _checked(path: Path, *, closed: bool = True) -> Path:
    """Returns the real path of a directory that only this user can write or replace. Missing directories are created.

    Args:
        closed: whether no other user may enter it, so that its files may have any mode.
    Raises:
        UnsafeDirectoryError: another user owns it, can write it, or controls a directory or link on the way to it.
    """
    here, names, links = Path("/"), list(path.absolute().parts[1:]), 0
    status = here.lstat()
    while names:
        name = names.pop(0)
        step = here.parent if name == ".." else here / name
        with suppress(FileExistsError):
            if not os.path.lexists(step):
                step.mkdir(mode=0o700)
        status = step.lstat()
        if stat.S_ISLNK(status.st_mode):
            _check_owner(step, status, link=True)
            if (links := links + 1) > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(step))
            target = Path(os.readlink(step))
            here = Path("/") if target.is_absolute() else here
            names = [part for part in target.parts if part != "/"] + names
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(step))
        _check_owner(step, status)
        # Users cannot replace each other's files in a sticky directory.
        if _others_may_write(status) and (not names or not status.st_mode & stat.S_ISVTX):
            raise UnsafeDirectoryError(step, "other users may write it", status)
        here = step
    if status.st_uid != os.geteuid():
        raise UnsafeDirectoryError(here, "another user owns it", status)
    if closed and status.st_mode & 0o077:
        _check_contents(here, closed=False)
        here.chmod(0o700)
    return here


def _check_contents(top: Path, *, closed: bool) -> None:
    """Raises UnsafeDirectoryError if another user owns, or can write, something in a directory.

    Args:
        closed: whether no other user can enter the directory.
    """
    with os.scandir(top) as entries:
        for entry in entries:
            status, path = entry.stat(follow_symlinks=False), Path(entry.path)
            is_link = stat.S_ISLNK(status.st_mode)
            _check_owner(path, status, link=is_link)
            if not closed and not is_link and _others_may_write(status):
                raise UnsafeDirectoryError(path, "other users may write it", status)
            if stat.S_ISDIR(status.st_mode):
                _check_contents(path, closed=closed or not status.st_mode & 0o011)


def _check_owner(path: Path, status: os.stat_result, *, link: bool = False) -> None:
    """Raises UnsafeDirectoryError if another user owns a file, or can write to it in any way."""
    if status.st_uid not in (os.geteuid(), _root()):
        raise UnsafeDirectoryError(path, "another user created this link" if link else "another user owns it", status)
    # In a closed directory a file may have any mode, unless it also has a hard link elsewhere.
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and _others_may_write(status):
        raise UnsafeDirectoryError(path, "other users may write it through another hard link", status)


@cache
def _root() -> int:
    """Returns root's user id, which is different in a user namespace."""
    with suppress(OSError):
        return os.stat("/proc/sys").st_uid
    return 0


def _others_may_write(status: os.stat_result) -> bool:
    """Returns whether the mode lets others write. Members of a group count as others, unless it is this user's own
    group."""
    if status.st_mode & stat.S_IWOTH or not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    with suppress(KeyError):
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
        return (group.gr_name, group.gr_gid) != (user.pw_name, user.pw_gid) or bool({*group.gr_mem} - {user.pw_name})
    return True


def _is_shared_by_machines(path: Path, mounts: str = "") -> bool:
    """Returns whether a directory is on a network file system.

    Args:
        mounts: text in the form of /proc/self/mountinfo; empty means the mounts of this process.
    """
    with suppress(OSError):
        mounts = mounts or Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    # A later mount on the same directory hides the earlier one.
    kinds = {line.split()[4]: line.partition(" - ")[2].split()[0] for line in mounts.splitlines()}
    mounted = next((kinds[str(place)] for place in (path, *path.parents) if str(place) in kinds), "")
    return mounted.startswith(_SHARED_BY_MACHINES)


@cache
def _temporary(_user: int) -> Path:
    return _checked(Path(tempfile.mkdtemp(prefix="rpg-")))


@cache
def _warn(message: str) -> None:
    """Prints a warning on one line, once per text."""
    print("warning: " + message.replace("\n  hint:", ";"), file=sys.stderr)
