"""System-call filter for all untrusted code in the sandbox. It refuses calls that attacks use and that scorers and
programs do not need.

Only local sockets are allowed; a command with a forwarded port (`door`) may also use its own loopback. The process that
forwards the port has no filter.

The filter lists refused calls, since a library may start to use a new call at any time. The kernel's other barriers do
not depend on it: namespaces, no capability, no new privilege.
"""

import errno
import platform
import struct
from collections.abc import Iterator

_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x00000080
"""CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWNS and NEWTIME."""
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_X32 = 0x40000000
"""First number of the system calls of x86's other ABI (x32)."""

# Name -> number on x86-64 and on 64-bit ARM (None if it has no such call), from the kernel's tables.
_REFUSED: dict[str, tuple[int, int | None]] = {
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280)},
    # mounts and namespaces
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"unshare": (272, 97), "setns": (308, 268)},
    # the machine
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225)},
    **{"acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "sethostname": (170, 161)},
    **{"setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112)},
    **{"adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, None), "ioperm": (173, None)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262)},
    # keys
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # large attack surface in the kernel
    **{"userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "personality": (135, 92), "modify_ldt": (154, None)},
    # memory that our limits do not count, and that outlives a process
    **{"shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_TIMER_CREATE, _FCNTL = (222, 107), (72, 25)
_SET_SIGNAL = 10
"""F_SETSIG, which selects the signal that reports readable data."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which inject input into a terminal."""
_AUDIT = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column in the table above, and its number in the kernel."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in the kernel's seccomp_data. Those of arguments are of the low half."""


def program(*, loopback: bool = False, stoppable: bool = False) -> bytes:
    """Returns the filter as a sequence of struct sock_filter; empty on a machine whose calls are not known here.

    Args:
        loopback: whether internet sockets are allowed; only for a process with its own network namespace.
        stoppable: whether to refuse calls by which a stopped process can make the kernel send it SIGCONT.
    """
    if platform.machine() not in _AUDIT:
        return b""
    column, architecture = _AUDIT[platform.machine()]
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if loopback else (_AF_UNIX,)
    return b"".join(_instructions(column, architecture, families, stoppable))


def _instructions(column: int, architecture: int, families: tuple[int, ...], stoppable: bool) -> Iterator[bytes]:
    yield _step(_LOAD, _ARCHITECTURE)
    yield _step(_EQUAL, architecture, hit=1)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    if column == 0:
        yield from _refused_if(_AT_LEAST, _X32, errno.ENOSYS)
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            yield from _refused_if(_EQUAL, number, errno.EPERM)
    # Its arguments are in memory, which a filter cannot read; the C library then uses `clone`.
    yield from _refused_if(_EQUAL, _CLONE3[column], errno.ENOSYS)
    yield from _by_argument(_CLONE[column], _ARGUMENT, [*_refused_if(_ANY_BIT, _NAMESPACES, errno.EPERM)])
    if stoppable:
        yield from _refused_if(_EQUAL, _TIMER_CREATE[column], errno.EPERM)
        yield from _by_argument(_FCNTL[column], _SECOND_ARGUMENT, [*_refused_if(_EQUAL, _SET_SIGNAL, errno.EPERM)])
    last = len(families)
    allowed = [_step(_EQUAL, family, hit=last - number) for number, family in enumerate(families)]
    local = [*allowed, _step(_RETURN, _REFUSE | errno.EAFNOSUPPORT)]
    yield from _by_argument(_SOCKET[column], _ARGUMENT, local)
    typing = [step for request in _TERMINAL_INPUT for step in _refused_if(_EQUAL, request, errno.EPERM)]
    yield from _by_argument(_IOCTL[column], _SECOND_ARGUMENT, typing)
    yield _step(_RETURN, _ALLOW)


def _refused_if(test: int, value: int, error: int) -> Iterator[bytes]:
    yield _step(test, value, miss=1)
    yield _step(_RETURN, _REFUSE | error)


def _by_argument(number: int, argument: int, steps: list[bytes]) -> Iterator[bytes]:
    """Yields instructions that check an argument of one call. The call is allowed unless they refuse it. The call's
    number must be loaded before."""
    yield _step(_EQUAL, number, miss=len(steps) + 2)
    yield _step(_LOAD, argument)
    yield from steps
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, *, hit: int = 0, miss: int = 0) -> bytes:
    return struct.pack("=HBBI", code, hit, miss, value)
