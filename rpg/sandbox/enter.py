"""The first program of a confined process. It drops rights and sets limits, then becomes the command or supervises it.

It is run by its path with `python -I -S` and imports only the standard library, so that it starts in milliseconds.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_STEP = 8
"""Bytes of one filter instruction."""
END = signal.SIGHUP
"""Signal that asks a watcher to end its command and all descendants. SIGTERM cannot be used, because Slurm sends it to
every process of a run that must save its state, and the command must continue after it."""


def entered(
    command: Sequence[str],
    limits: Mapping[str, int],
    *,
    nobody: bool = False,
    filtered: bytes = b"",
    watched_by: int = 0,
    door: tuple[str, int] | None = None,
    cgroup: str = "",
    seen_as: str = "",
) -> list[str]:
    """Returns the command line that starts the command through this program; see `main`. `seen_as` is the path of this
    file in the command's file system, if it differs."""
    settings = json.dumps(
        {
            **{"limits": dict(limits), "nobody": nobody, "filter": filtered.hex(), "watched_by": watched_by},
            **{"door": door, "cgroup": cgroup},
        }
    )
    return [sys.executable, "-I", "-S", seen_as or str(Path(__file__).resolve()), settings, *command]


def main(settings: dict[str, Any], command: list[str]) -> None:
    """Becomes the command, or starts and supervises it.

    Args:
        settings: `limits`, by the name of the resource; `nobody`: whether root becomes another user; `filter`: the
            filter of system calls, hexadecimal, empty for none; `watched_by`: id of the process with which a watcher
            ends, 0 if the command needs no watcher; `door`: a unix socket and a loopback port that is forwarded to it,
            or null; `cgroup`: directory of the cgroup into which a watched command is put, and which is removed with
            it, empty for none.
        command: a program and its arguments.
    """
    if settings["watched_by"]:
        _watch(settings["watched_by"], settings, command)
    _become(settings, command)


def _become(settings: dict[str, Any], command: list[str]) -> None:
    if settings["nobody"]:
        os.chmod("/tmp", 0o1777)  # /tmp of the sandbox
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if settings["door"]:
        _open_door(*settings["door"])
    # After the change of user: the limit on processes would otherwise count against the command.
    limit(settings["limits"])
    refuse_calls(bytes.fromhex(settings["filter"]))
    os.execv(command[0], command)


def _open_door(path: str, port: int) -> None:
    """Starts a process that forwards a loopback port to a unix socket, in both directions. It is not a child of the
    command, which may wait for all its children."""
    listening = socket.create_server(("127.0.0.1", port), backlog=256)
    if between := os.fork():
        listening.close()
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    for standard in (0, 1, 2):  # otherwise the reader of the command's output would not see its end
        os.close(standard)
    while True:
        inside, _ = listening.accept()
        threading.Thread(target=_pass_through, args=(inside, path), daemon=True).start()


def _pass_through(inside: socket.socket, path: str) -> None:
    with inside, socket.socket(socket.AF_UNIX) as outside, suppress(OSError):
        outside.connect(path)
        asking = threading.Thread(target=_pass_on, args=(inside, outside), daemon=True)
        asking.start()
        _pass_on(outside, inside)
        asking.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copies data until the source ends. The other direction may continue."""
    try:
        while content := source.recv(1 << 16):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def limit(limits: Mapping[str, int]) -> None:
    """Sets limits of this process by the resource's name. No limit is raised above the present hard limit."""
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))


def refuse_calls(filtered: bytes) -> None:
    """Installs a system-call filter for this process and all its descendants. Raises OSError if the kernel rejects
    it."""
    if not filtered:
        return
    steps = ctypes.create_string_buffer(filtered, len(filtered))
    # struct sock_fprog: number of instructions, and their address.
    program = ctypes.create_string_buffer(struct.pack("@HP", len(filtered) // _STEP, ctypes.addressof(steps)))
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    for option, value, place in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, 2, ctypes.addressof(program))):
        if call(option, value, place, 0, 0):
            raise OSError(ctypes.get_errno(), "the system-call filter cannot be installed")


def _watch(parent: int, settings: dict[str, Any], command: list[str]) -> None:
    """Waits until the command or the parent ends, or for END, whichever is first. Then ends all descendants and this
    process."""

    def end(code: int) -> None:
        _end_descendants()
        if settings["cgroup"]:
            with suppress(OSError):
                os.rmdir(settings["cgroup"])
        os._exit(code)

    signal.signal(END, lambda *_: end(128 + END))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a descendant whose parent ends becomes a child of this process
    _prctl(_PR_SET_PDEATHSIG, END)
    if os.getppid() != parent:
        os._exit(1)
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(END, signal.SIG_DFL)
        if settings["cgroup"]:
            with suppress(OSError):
                Path(settings["cgroup"], "cgroup.procs").write_text("0", encoding="utf-8")
        if os.getppid() == watcher:
            _become(settings, command)
        os._exit(1)
    for standard in (0, 1):  # otherwise the reader of the command's output would not see its end
        os.close(standard)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            end(code if code >= 0 else 128 - code)


def _end_descendants() -> None:
    """Kills children until none is left. The children of a killed process become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError, OSError):
        while True:
            for child in children.read_text(encoding="utf-8").split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
