"""`rpg ...` as a fork of a process that has imported what commands, their API and their stages need.

    python -m tests.pipelines.forked_command REQUEST

To import Prefect, torch and transformers takes longer than a tiny run does. A command of the tests is otherwise what it
is everywhere: it has a session, an environment and signal handlers of its own, and begins processes of its own. Two
things it finds there already: Prefect, of which it reads the settings anew, and the server from which its stages are
forked (`pipelines.processes.forking`), which is a fork as well.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from multiprocessing import forkserver, util
from pathlib import Path

from pipelines.processes import fork_server
from specs.machine.parent import die_with_parent
from tests.forks import READ_LATE, ROOM

_LONGEST = 1 << 16


def main() -> None:
    """Runs the command; in a fork of its server, that fork's program."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[1]).unlink()
    for descriptor, name in ((1, "output"), (2, "errors")):
        opened = os.open(asked[name], os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (both stay open)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["environment"])
    _show_home(os.environ["RPG_HOME"])
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
    _use_prefect()
    _keep_server()
    fork_server.show_as(" ".join(["rpg", *asked["words"]]))
    sys.argv = ["-c", *asked["words"]]
    from pipelines.cli import main as rpg

    rpg()


def _show_home(home: str) -> None:
    """Writes the home where `psutil` reads the environment of this process and of its forks: over the placeholder with
    which the first of them was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    room = f"RPG_HOME={ROOM}".encode()
    place = ctypes.string_at(begin, end - begin).index(room)
    told = f"RPG_HOME={home}\0REST=".encode()
    assert len(told) <= len(room), home
    ctypes.memmove(begin + place, told.ljust(len(room), b"x"), len(room))


def _use_prefect() -> None:
    """Has Prefect read its settings at the moment at which it would be imported."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    from pipelines.home.home import Home
    from pipelines.prefect.server import api
    from pipelines.prefect.server.settings import client_environment

    is_read = False

    def read_settings(home: Home, url: str) -> None:
        nonlocal is_read
        if not is_read:
            os.environ.update(client_environment(home, url) | api._SILENT)
            refresh_global_settings_context()
            setup_logging()
            is_read = True

    api._import_prefect = read_settings


def _keep_server() -> None:
    """Forks the server from which stages are forked, and uses it in place of a new one."""
    environment = dict(os.environ)
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        channel.close()
        _serve(parent, theirs)
    theirs.close()
    begin_anew, kept = util.spawnv_passfds, [pid]

    def begin(path: str, arguments: list[str], descriptors: list[int]) -> int:
        differing = {name for name, _ in os.environ.items() ^ environment.items()}
        fits = all(name.startswith(READ_LATE) for name in differing)
        if not kept or "forkserver" not in arguments[-1] or not fits:
            return int(begin_anew(path, arguments, descriptors))
        socket.send_fds(channel, [json.dumps(dict(os.environ)).encode()], descriptors)
        return kept.pop()

    util.spawnv_passfds = begin


def _serve(parent: int, theirs: socket.socket) -> None:
    """Serves as the server of the tests does, once it is asked to."""
    die_with_parent(parent)
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    message, descriptors, _, _ = socket.recv_fds(theirs, _LONGEST, 2)
    if message:
        os.environ.clear()
        os.environ.update(json.loads(message))
        fork_server._began_with.clear()
        fork_server.prepare(())
        signal.signal(signal.SIGINT, usual)
        forkserver.main(*descriptors, [])
    os._exit(0)


if __name__ == "__main__":
    main()
