"""Code that runs in `multiprocessing`'s fork server, and in its forks.

Importing torch and transformers takes longer than a tiny run; here each module is imported once for all stages of a
command. A fork runs a program as a new process would. If it cannot, it replaces itself by a new process.
"""

import atexit
import gc
import importlib
import io
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from specs.machine.parent import before_torch, die_with_parent

IMPORTS = (
    "specs.document",
    "pyarrow.dataset",  # imported when a file of problems is read; imports pandas
    "rpg.data.staging",
    "rpg.data.reasoning_gym_imported",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "rpg.preflight",
    "rpg.base.stage",
    "rpg.learner.deepspeed_imported",
    "rpg.components",
    "rpg.run_recorder.recorder",
    "rpg.rollouts.source",
    "rpg.trainer",
    "rpg.evaluation.stage",
)
"""Modules that the stages of a command need. No module is a program that a process runs, or computes anything at
import."""
OF_SERVER = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"}
"""Environment variables that the server gets in addition to the command's."""
READ_LATE = ("PREFECT_", "DO_NOT_TRACK", "COLUMNS", "LINES", *OF_SERVER)
"""Prefixes of variables that no module reads at import, and that may change later: a command sets Prefect's variables
once it has a server, and readline sets the terminal's size."""
_MAY_BE_LOST = {"jemalloc_bg_thd"}
"""Threads that a fork can lack. Without its thread, pyarrow's allocator still returns memory."""

_began_with: dict[str, str] = {}
"""The server's environment at its start."""
_changed_at: dict[str, int] = {}
"""Modification time of each imported file."""
_imported = False
"""Whether forks can use the imports: no import has failed or left a thread."""


def prepare(imports: Sequence[str]) -> None:
    """Prepares the server: starts a session that ends with the command, and imports the modules that its forks
    share."""
    global _imported
    os.setsid()
    die_with_parent()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    show_as(f"{sys.executable} -P -m {__name__}")  # first of all: it finds the title's memory by the first variable
    for name in ("PYTHONSAFEPATH", "COLUMNS", "LINES"):
        os.environ.pop(name, None)
    _began_with.update(os.environ)
    before_torch()
    gc.disable()  # imported objects stay alive, and scanning them takes a fifth of the time
    try:
        for name in imports:
            importlib.import_module(name)
    except BaseException:  # the process that imports the module itself reports the error
        return
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    _changed_at.update((path, _change_of(path)) for path in paths if path)
    _imported = not lost_threads()
    gc.freeze()  # no fork scans the imported objects again, and their memory stays shared
    gc.enable()


@dataclass(frozen=True, slots=True)
class Program:
    """A program that a fork runs as `python -m` would."""

    words: tuple[str, ...]
    """The program's module and arguments."""
    directory: str
    inherited: Mapping[str, str]
    """The command's environment."""
    environment: Mapping[str, str]
    """Variables in addition to the server's. No module reads them at import."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Runs the program and returns its exit code. The server calls this in the fork, with a pipe from the
        command."""
        parent = os.getppid()
        os.setsid()
        die_with_parent(parent)
        output = (forkserver.get_inherited_fds() or [])[0]
        for standard in (1, 2):
            os.dup2(output, standard)
        for descriptor in (output, parent_sentinel, *_descriptors_of_server()):
            os.close(descriptor)
        os.chdir(self.directory)
        command = [sys.executable, "-P", "-m", *self.words]
        environment = {**self.inherited, "PYTHONUNBUFFERED": "1", **self.environment}
        if not _imported or self._is_outdated():
            os.execve(sys.executable, command, environment)
        os.environ.update(environment)
        for name in ("stdout", "stderr"):
            _reopen(name)
        importlib.invalidate_caches()
        # Unlike the state of `random`, these would be the same in each fork.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        show_as(" ".join(command))
        return _run(self.words)

    def _is_outdated(self) -> bool:
        """Returns whether a module's import would now give another result than the server's: its file or a variable
        has changed."""
        differing = {name for name, _ in self.inherited.items() ^ _began_with.items()}
        return any(not name.startswith(READ_LATE) for name in differing) or any(
            _change_of(path) != time for path, time in _changed_at.items()
        )


def _descriptors_of_server() -> list[int]:
    """Returns the descriptors that `multiprocessing` keeps open in a fork, and removes them from its records."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    kept = [server._forkserver_alive_fd, tracker._fd, sys.stdin.fileno()]
    server._forkserver_alive_fd = tracker._fd = None
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, open(0, encoding="utf-8", closefd=False))  # noqa: SIM115 (it stays open)
    return kept


def _run(words: Sequence[str]) -> int:
    """Runs a program as `python -m` would and returns its exit code."""
    code = 1
    sys.argv = list(words)
    sys.modules.pop(words[0], None)  # another module may have imported it
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and leaving.code is not code:
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


def _reopen(name: str) -> None:
    """Opens a standard stream again, because the old object remembers whether its former descriptor could seek."""
    old = getattr(sys, name)
    raw = open(old.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 (it stays open)
    settings = {key: getattr(old, key) for key in ("encoding", "errors", "line_buffering")}
    stream = io.TextIOWrapper(raw, newline="\n", write_through=True, **settings)  # unbuffered, as -u has it
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def lost_threads() -> list[str]:
    """Returns the names of the threads that a fork would lack. First forks a process that ends at once: OpenBLAS
    ends its threads at a fork, and starts them again in either process when it needs them."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = Path("/proc/self/task")
    others = (tasks / name / "comm" for name in os.listdir(tasks) if int(name) != os.getpid())
    return [name for comm in others if (name := comm.read_text(encoding="utf-8").strip()) not in _MAY_BE_LOST]


def show_as(title: str) -> None:
    """Sets the title that `ps` shows for this process. The title does not overwrite the memory of the environment, by
    which programs find a home's processes."""
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(title)
    del os.environ["SPT_NOENV"]


def _change_of(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
