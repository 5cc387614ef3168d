"""Confined processes: their start, and their end with all descendants."""

import math
import os
import shutil
import signal
import site
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rpg.sandbox import enter
from rpg.sandbox.bubblewrap import CODE, sealing
from rpg.sandbox.filter import program

SYSTEM_PATH = "/usr/bin:/bin"
"""Default PATH of a confined process."""
_PASSED_ON = (
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)
"""Environment variables that every confined process gets, if they are set."""
_OF_USER = (
    *("PATH", "HOME", "USER", "LOGNAME", "TEMP", "TMP", "TMPDIR"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that a process outside bubblewrap gets: the directories of its user's files, and the devices that it may
use."""
_FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_OF_KEEPER = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(CODE)}
"""Variables of the keeper. They make programs print sets of texts in the same order every time."""
_END_SECONDS = 5.0
"""Seconds to wait for a watcher to kill the descendants of its command, which takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a confined process. Each process that it starts gets limits of the same size."""

    memory_bytes: int = 8 << 30
    """Address space, in bytes. An answer such as 10^10^10 takes this much before it raises a MemoryError."""
    processes: int = 1
    """Largest number of processes and threads of a sealed command, itself included; 0: as many as its user may have.
    The limit does not bind root, so a sealed process of root becomes another user. A command that is not sealed gets no
    limit: the kernel would count all processes of its user."""
    file_bytes: int = 1 << 20
    """Longest file that the process may write, in bytes."""
    open_files: int = 256
    seconds: float = 10.0
    """Wall time of a program of `Sandbox`, or of a call of a session."""
    cpu_seconds: int = 0
    """CPU time of each process of such a program; 0 means a second more than the wall time. All processes of a session
    together may use this much for each call."""
    output_bytes: int = 1 << 20
    """Largest number of bytes that such a program may write to standard output, and to standard error."""

    @property
    def cpu_limit(self) -> int:
        """Returns the CPU seconds of each process of a program, or of a call of a session."""
        return self.cpu_seconds or math.ceil(self.seconds) + 1


class Confined:
    """A running process, started by `start`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Returns the process id of the watcher, which is the first process."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """Returns the process's standard input, if it was requested as a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Returns the process's standard output, if it was requested as a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    def ending(self, timeout_seconds: float) -> str:
        """Waits until the process ends, and ends it after the time limit. Returns how it ended, such as `exit 1` or
        `SIGKILL`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self.end()
        code = self._process.returncode
        number = -code if code < 0 else code - 128
        with suppress(ValueError):
            return signal.Signals(number).name if number > 0 else f"exit {code}"
        return f"exit {code}"

    def end(self) -> None:
        """Kills the process and all its descendants, and closes its pipes."""
        if self._process.poll() is None:
            self._process.send_signal(enter.END)
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()


def start(
    command: Sequence[str],
    *,
    sealed: bool,
    limits: Limits | None = None,
    readable: Iterable[Path] = (),
    variables: Iterable[str] = (),
    settings: Mapping[str, str] | None = None,
    keeps: bool = False,
    hides: bool = False,
    door: tuple[Path, int] | None = None,
    cgroup: Path | None = None,
    **pipes: Any,
) -> Confined:
    """Starts a command in its own session, within limits, with only the listed environment variables.

    It ends with the thread that started it, and so do its descendants: a watcher ends them. If it is sealed, they also
    end if the watcher is killed, together with the first process of their namespace.

    Args:
        command: the absolute path of a program, and arguments.
        sealed: whether to run it in bubblewrap, see `missing`.
        limits: its limits. None: the default ones.
        readable: files and directories that a sealed process may read, besides Python and the system's libraries.
        variables: names of further environment variables that an unsealed process gets, besides those of the list.
        settings: further environment variables with their values.
        keeps: whether the command is the keeper of programs. It is sealed, but may create namespaces, in which it
            confines each program.
        hides: whether the sealed command may run text of a policy: then it does not see the packages with problems and
            scorers. The keeper never sees them.
        door: a unix socket of the machine, and the port of its own loopback at which a sealed command reaches it. None:
            it has no network at all.
        cgroup: directory of the cgroup into which the command and its descendants are put, if possible. It is removed
            with them.
        pipes: stdin, stdout and stderr of subprocess.Popen. The limit on files also applies to a file that it writes
            to.
    Raises:
        RuntimeError: this machine cannot seal processes.
    """
    limits = limits or Limits()
    if sealed:
        hides = hides or keeps
        sealer, way = sealing([*readable, *([door[0]] if door else ())], keeps=keeps, hides=hides)
        entered = enter.entered(
            command,
            {} if keeps else _rlimits(limits, limits.processes),
            nobody=way.nobody and not keeps,
            filtered=b"" if keeps else program(loopback=door is not None),
            door=(str(door[0]), door[1]) if door else None,
            seen_as=str(CODE / "rpg" / "sandbox" / "enter.py") if hides else "",
        )
        inside = [*sealer, *entered]
        names: Iterable[str] = ("LD_LIBRARY_PATH",) if keeps else _PASSED_ON
    else:
        inside = enter.entered(command, _rlimits(limits, 0))
        names = (*_PASSED_ON, *_OF_USER, *variables)
    environment = {"PATH": SYSTEM_PATH, **_passed_on(names), **_FIXED, **(_OF_KEEPER if keeps else {})}
    if not sealed:
        from specs.machine.own_cache import library_variables  # the keeper of programs imports nothing of specs

        environment |= library_variables()
    environment |= settings or {}
    # Also for bubblewrap: if it is killed while it starts, it leaves a process behind.
    watched = enter.entered(inside, {}, watched_by=os.getpid(), cgroup=str(cgroup or ""))
    return Confined(subprocess.Popen(watched, env=environment, start_new_session=True, **pipes))


def watched(command: Sequence[str]) -> list[str]:
    """Returns the command line for a command that ends, with its descendants, when the thread that starts it ends. It
    is not sealed, and its program may be found on the PATH."""
    program = shutil.which(command[0]) or command[0]
    return enter.entered(enter.entered([program, *command[1:]], {}), {}, watched_by=os.getpid())


def _rlimits(limits: Limits, processes: int) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_bytes,
        **({"RLIMIT_NPROC": processes} if processes else {}),
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def _passed_on(names: Iterable[str]) -> dict[str, str]:
    environment = {name: os.environ[name] for name in names if name in os.environ}
    if site.ENABLE_USER_SITE:  # otherwise found through the home directory
        environment["PYTHONUSERBASE"] = site.getuserbase()
    return environment
