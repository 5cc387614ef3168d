"""A confined process: begun, and ended with all that came of it."""

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
"""PATH of a confined process that is given no other."""
_PASSED_ON = (
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)
"""Environment variables that every confined process gets, where they are set."""
_OF_USER = (
    *("PATH", "HOME", "USER", "LOGNAME", "TEMP", "TMP", "TMPDIR"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that an unsealed process gets: where its user's files are, and which devices it may use."""
_FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_OF_KEEPER = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(CODE)}
"""What a program prints of a set of texts is the same in each."""
_END_SECONDS = 5.0
"""A watcher kills the descendants of its command, which takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a confined process. A process that it starts has limits of its own, of the same size."""

    memory_bytes: int = 8 << 30
    """Address space: what an answer such as 10^10^10 may ask for before it is a MemoryError."""
    processes: int = 1
    """Processes and threads of a sealed command with itself; 0: as many as its user may have. Does not bind root: a
    sealed process of root's becomes another user. Of a command that is not sealed the kernel would count all that its
    user has, whatever else runs: it has no limit of ours."""
    file_bytes: int = 1 << 20
    """Length of a file that it writes."""
    open_files: int = 256
    seconds: float = 10.0
    """Wall time of a program of `Sandbox`, or of a call of a session."""
    cpu_seconds: int = 0
    """CPU time of each process of such a program; 0: a second more than the wall time. All processes of a session
    together may use so much for each of its calls."""
    output_bytes: int = 1 << 20
    """What such a program may write on standard output, and on standard error."""

    @property
    def cpu_limit(self) -> int:
        """CPU seconds of each process of a program, or of a call of a session."""
        return self.cpu_seconds or math.ceil(self.seconds) + 1


class Confined:
    """A running process, made by `start`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Number of its first process, the watcher."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """Its input, if it was asked for as a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Its output, if it was asked for as a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    def ending(self, timeout_seconds: float) -> str:
        """How it ended, `exit 1` or `SIGKILL`, as soon as it has; after the time limit it is ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self.end()
        code = self._process.returncode
        number = -code if code < 0 else code - 128
        with suppress(ValueError):
            return signal.Signals(number).name if number > 0 else f"exit {code}"
        return f"exit {code}"

    def end(self) -> None:
        """Kills it and all that came of it, and closes its pipes."""
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
    """Begins a command with an environment made from a list, in a session of its own, within limits.

    It ends with the thread that started it, and so does all that it started: a watcher ends its descendants. Sealed,
    they end where the watcher is killed too, with the first process of their namespace.

    Args:
        command: a program by its whole path, and arguments.
        sealed: in bubblewrap, see `missing`.
        limits: left out, the default ones.
        readable: files and directories that a sealed process may read beside Python and the system's libraries.
        variables: names of environment variables that one gets which is not sealed, beside those of the list.
        settings: further environment variables with their values.
        keeps: the command is the keeper of programs, sealed but with the right to make namespaces: it confines each.
        hides: the command, sealed, may run what a policy writes, and does not see the packages with problems and
            scorers. So does the keeper, in any case.
        door: a unix socket of the machine, and the port of its own loopback at which a sealed command reaches it. Else
            it has no network at all.
        cgroup: directory of one that the command and all that comes of it are put into, where that is possible. It is
            removed with them.
        pipes: stdin, stdout and stderr of subprocess.Popen. A file that it writes to has the limit of files.
    Raises:
        RuntimeError: this machine can seal nothing.
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
    # bubblewrap too: one that is killed while it begins leaves a process behind.
    watched = enter.entered(inside, {}, watched_by=os.getpid(), cgroup=str(cgroup or ""))
    return Confined(subprocess.Popen(watched, env=environment, start_new_session=True, **pipes))


def watched(command: Sequence[str]) -> list[str]:
    """The command, which ends with the thread that starts it, and so does all that it starts. It is not sealed, and its
    program may be found on the PATH."""
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
    if site.ENABLE_USER_SITE:  # found through the home directory else
        environment["PYTHONUSERBASE"] = site.getuserbase()
    return environment
