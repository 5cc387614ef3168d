"""bubblewrap: the options that work on this machine, and the files that a sealed process sees."""

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rpg.sandbox.enter import entered
from rpg.sandbox.hidden import hidden

_TRIAL_SECONDS = 60.0
_SCRATCH_BYTES = 64 << 20
_LIBRARIES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories of the system's programs and libraries. They are links into /usr, or separate directories."""
_LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/nix/store", "/gnu/store")
"""Files by which the loader finds libraries."""
_ALWAYS = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--new-session")
CODE = Path("/rpg-sandbox")
"""Directory in which a process that runs a policy's text sees the files of this package that start it."""
_BEGINS = ("enter.py", "keeper.py")
_INSTALL = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
_ALLOW = "allow unprivileged user namespaces here; docs/own-reward.md says how, for a machine and for a container"


@dataclass(frozen=True, slots=True)
class NamespaceSetup:
    """A way to create namespaces."""

    options: tuple[str, ...]
    """Options of bwrap."""
    nobody: bool = False
    """Whether the process starts as root and becomes another user itself."""
    keeps: tuple[str, ...] = ("--cap-add", "CAP_SYS_ADMIN")
    """Further options for the keeper, which creates namespaces for each program."""


_OF_ROOT = NamespaceSetup(
    ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    nobody=True,
    keeps=("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_KILL"),
)
"""Without a user namespace, because the limit on processes does not bind processes that are root outside."""
_OF_USERS = NamespaceSetup(("--unshare-user", "--uid", "65534", "--gid", "65534"))
"""With a user namespace, which any user may create if the kernel permits it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason why this machine cannot run processes in a sandbox."""

    reason: str
    hint: str
    """What to do: the program to install, or the setting to change."""


def missing() -> Missing | None:
    """Returns the obstacle that keeps this machine from sealing processes; None if there is no obstacle. Tested once a
    process."""
    way = _way()
    return way if isinstance(way, Missing) else None


def sealing(readable: Iterable[Path], *, keeps: bool = False, hides: bool = False) -> tuple[list[str], NamespaceSetup]:
    """Returns the command that seals another one, and the way in which it creates namespaces.

    Args:
        readable: files and directories that the process may read, besides Python and the system's libraries.
        keeps: whether the command is the keeper of programs.
        hides: whether to hide the packages with problems and scorers, see `hidden`, unless `readable` names them.
    Raises:
        RuntimeError: this machine cannot seal processes.
    """
    way = _way()
    if isinstance(way, Missing):
        raise RuntimeError(f"{way.reason}: {way.hint}")
    return _command(way, readable, way.keeps if keeps else (), hides=hides), way


@lru_cache(maxsize=1)
def _way() -> NamespaceSetup | Missing:
    """Returns the first way that works on this machine, or the reason why none does."""
    if shutil.which("bwrap") is None:
        return Missing("bubblewrap is not installed", _INSTALL)
    said = ""
    for way in (_OF_ROOT, _OF_USERS) if os.geteuid() == 0 else (_OF_USERS,):
        trial = [*_command(way), *entered([sys.executable, "-P", "-c", "import rpg"], {}, nobody=way.nobody)]
        try:
            done = subprocess.run(trial, capture_output=True, env={}, timeout=_TRIAL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            said = f"no answer within {_TRIAL_SECONDS:g} s"
            continue
        if done.returncode == 0:
            return way
        said = " ".join(done.stderr.decode(errors="replace").split()[:40]) or f"exit {done.returncode}"
    return Missing(f"bubblewrap may not make namespaces ({said})", _ALLOW)


def _command(
    way: NamespaceSetup, readable: Iterable[Path] = (), rights: Iterable[str] = (), *, hides: bool = False
) -> list[str]:
    """Returns bwrap with options for everything that a sealed process sees. Only /tmp is writable, and there is no
    /proc."""
    program = shutil.which("bwrap") or "bwrap"
    command = [program, *_ALWAYS, "--die-with-parent", *way.options, *rights, *_scratch()]
    for name in _LIBRARIES:
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
    seen = [Path("/usr"), *(Path(name) for name in _LIBRARIES if not os.path.islink(name))]
    package = Path(__file__).parents[1]
    named = [*seen, *map(Path, _LOADER), *_runtime(), *([] if hides else [package]), *readable]
    paths = _outermost(named)
    command += ["--dir", "/dev", *_bound(paths)]
    # so that RPG_HOME does not lead a process to the record
    home = Path(os.environ.get("RPG_HOME") or ".rpg").resolve()
    for path in _within(paths, [home, *(hidden(paths) if hides else ())]):
        if path.is_dir():
            inside = _outermost(each for each in named if each.is_relative_to(path))
            command += ["--tmpfs", str(path), *_bound(inside, path), "--remount-ro", str(path)]
        elif path not in named:
            command += ["--ro-bind", os.devnull, str(path)]
    if hides:
        for name in _BEGINS:
            command += ["--ro-bind", str(package / "sandbox" / name), str(CODE / "rpg" / "sandbox" / name)]
    # Nothing else of /dev: subprocesses and some libraries open it.
    command += ["--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/"]
    return [*command, "--chdir", "/tmp", "--"]


def _bound(paths: Iterable[Path], root: Path = Path("/")) -> Iterator[str]:
    """Yields the options that show paths below the root."""
    paths = [*paths]
    # Each directory separately: directories that a mount creates implicitly are closed to all users but root.
    for directory in sorted({parent for path in paths for parent in path.parents if root in parent.parents}):
        yield from ("--dir", str(directory))
    for path in paths:
        yield from ("--ro-bind", str(path), str(path))


def _within(paths: Iterable[Path], targets: Iterable[Path]) -> list[Path]:
    """Returns the names, outer ones first, under which the targets are reachable within the paths. Targets are real
    paths."""
    real = [(path, path.resolve()) for path in paths]
    names = {path / target.relative_to(place) for target in targets for path, place in real if place in target.parents}
    return sorted(name for name in names if name.exists())


@lru_cache(maxsize=1)
def _scratch() -> tuple[str, ...]:
    """Returns the options for a small /tmp in memory, which some libraries need when they are imported."""
    # bubblewrap before 0.7 cannot limit its size; then only the length of a file is limited.
    described = subprocess.run(
        ["bwrap", "--help"], capture_output=True, encoding="utf-8", env={"PATH": os.environ["PATH"]}
    )
    size = ("--size", str(_SCRATCH_BYTES)) if "--size" in described.stdout + described.stderr else ()
    return (*size, "--tmpfs", "/tmp")


def _runtime() -> Iterator[Path]:
    """Yields the directories of Python and the installed packages."""
    yield from map(Path, (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    libraries = map(Path, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    yield from (path for path in libraries if not Path.home().is_relative_to(path))
    if site.ENABLE_USER_SITE:
        yield Path(site.getusersitepackages())


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Returns the existing paths, under their given and their real names, without paths inside another one."""
    there = {name for path in paths if path.is_absolute() and path.exists() for name in (path, path.resolve())}
    whole = {path for path in there if path != Path("/")}
    return sorted(path for path in whole if not any(parent in whole for parent in path.parents))
