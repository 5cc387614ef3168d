"""Programs that attack the sandbox, and what came of each as JSON. Run by test_room_attacks.py.

    python room_attacks.py DIRECTORY

DIRECTORY is writable for everybody and holds `secret`.
"""

import ctypes
import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from rpg.sandbox import Limits, Program, Sandbox

LIMITS = Limits(
    seconds=3.0, memory_bytes=512 << 20, processes=8, file_bytes=1 << 20, open_files=64, output_bytes=1 << 16
)
EVIDENCE = """
import ctypes, json, os, platform, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def tried(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__
def call(name, *arguments):
    ctypes.set_errno(0)
    numbers = SYSCALLS[name]
    done = libc.syscall(numbers[0 if platform.machine() == "x86_64" else 1], *arguments)
    return "done" if done >= 0 else os.strerror(ctypes.get_errno())
def capabilities():
    text = ctypes.create_string_buffer(24)
    libc.capget(ctypes.create_string_buffer(b"\\x22\\x05\\x08\\x20" + bytes(4)), text)
    return set(text.raw)
def linked(make):
    make(DIRECTORY + "/secret", "/tmp/link")
    return open("/tmp/link").read()
print(json.dumps({
    "environment": sorted(os.environ),
    "capabilities": sorted(capabilities()),
    "rights": libc.prctl(39, 0, 0, 0, 0),
    "descriptors": [fd for fd in range(64) if tried(lambda: os.fstat(fd)) != "OSError"],
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "wrote": tried(lambda: open(DIRECTORY + "/written", "w")),
    "wrote the runtime": tried(lambda: open(RUNTIME, "a")),
    "wrote the root": tried(lambda: open("/written", "w")),
    "read": tried(lambda: open(DIRECTORY + "/secret").read()),
    "home": tried(lambda: os.listdir(HOME)),
    "users": tried(lambda: open("/etc/passwd").read()),
    "processes": tried(lambda: os.listdir("/proc")),
    "system": tried(lambda: os.listdir("/sys")),
    "symlink": tried(lambda: linked(os.symlink)),
    "hard link": tried(lambda: linked(os.link)),
    "device": tried(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0))),
    "connected": tried(lambda: socket.create_connection(("127.0.0.1", PORT), 2)),
    "raw": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "netlink": tried(lambda: socket.socket(16, socket.SOCK_RAW)),
    "abstract": tried(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + ABSTRACT)),
    "local": tried(lambda: socket.socket(socket.AF_UNIX).connect(DIRECTORY + "/socket")),
    "signal to a stranger": tried(lambda: os.kill(STRANGER, signal.SIGKILL)),
    "ptrace": call("ptrace", 16, 1, 0, 0),
    "memory of another": call("process_vm_readv", STRANGER, 0, 0, 0, 0, 0),
    "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, 0),
    "unshare": call("unshare", 0x10000000),
    "clone": call("clone", 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": call("clone3", 0, 0),
    "setns": call("setns", 0, 0),
    "keyctl": call("keyctl", 0, 0, 0, 0, 0),
    "bpf": call("bpf", 0, 0, 0),
    "perf": call("perf_event_open", 0, 0, 0, 0, 0),
    "userfaultfd": call("userfaultfd", 1),
    "io_uring": call("io_uring_setup", 1, 0),
    "kexec": call("kexec_load", 0, 0, 0, 0),
    "module": call("init_module", 0, 0, 0),
    "shared memory": call("shmget", 0, 1 << 30, 0o1600),
    "memory file": call("memfd_create", b"x", 0),
}))
"""
FORGED = {"ended": "exited", "exit_status": 0, "seconds": 0, "cpu_seconds": 0, "alive": False, "lengths": [2, 0]}
PROGRAMS = {
    "forks": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "takes memory": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "takes memory in many": (
        "import os\nfor _ in range(2): os.fork()\nheld = []\n"
        "try:\n while len(held) < 600: held.append(bytearray(1 << 26))\nexcept MemoryError: held = []\n"
        "raise MemoryError"
    ),
    "writes without end": "while True: print('x' * 1000)",
    "writes errors without end": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "burns": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "closes its outputs and sleeps": "import os, time; os.close(1); os.close(2); time.sleep(1000)",
    "ignores signals": (
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except Exception: pass\n"
        "time.sleep(1000)"
    ),
    "leaves grandchildren": (
        "import subprocess\nsubprocess.Popen(['setsid', 'sh', '-c', 'sleep NAP & sleep NAP & wait'])\nprint('left')"
    ),
    "leaves grandchildren with its output": "import os\nos.system('setsid sleep NAP &')\nprint('left')",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('still here')",
    "kills the first": "import os, signal\nos.kill(1, signal.SIGKILL)\nos.abort()",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "fills its directory": (
        "n = 0\ntry:\n while True:\n  open(f'/tmp/{n}', 'wb').write(bytes(1 << 20)); n += 1\n"
        "except OSError as error: print(error.strerror, n < 100)"
    ),
    "makes a long file": (
        "import os\nopen('/tmp/long', 'wb', 0).write(bytes(2 << 20))\nprint(os.stat('/tmp/long').st_size)"
    ),
    "makes many files": (
        "n = 0\ntry:\n while True: open(f'/tmp/{n}', 'w').close(); n += 1\n"
        "except OSError as error: print(error.strerror)"
    ),
    "nests directories": (
        "import os\ntry:\n while True: os.mkdir('d'); os.chdir('d')\nexcept OSError as error: print(error.strerror)"
    ),
    "finds what was left": "import os; print(os.listdir('/tmp'))",
    "forges its outcome": (
        f"import json, os\nhead = json.dumps({FORGED}).encode()\n"
        "frame = len(head).to_bytes(8, 'little') + head + b'no'\n"
        "for fd in range(3, 1024):\n try: os.write(fd, frame)\n except OSError: pass\n"
        "os.write(1, frame); raise SystemExit(7)"
    ),
}
SECRETS = ("the earlier source", "its input, as it was", "what it has put out")
"""Left by an earlier program."""
SEARCH = """
import ctypes, os
libc = ctypes.CDLL(None)
read, write = os.pipe()
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p
mine = "mine " + "to be found"
# Texts and pages are compared backwards, so that the search does not find itself.
wanted = [(b"mine " + b"to be found")[::-1], *BACKWARDS]
found = set()
def look(begin, end):
    for place in range(begin, end, 4096):
        if libc.write(write, place, 4096) == 4096:  # a page that is not there is no crash
            page = os.read(read, 4096)
            found.update(number for number, text in enumerate(wanted) if text in page[::-1])
end = libc.sbrk(0)
look(end - (32 << 20) & ~4095, end)
for near in {id(object()) & ~4095, id(mine) & ~4095, id(found) & ~4095}:
    look(near - (32 << 20), near + (32 << 20))
print(sorted(found))
"""


def main(directory: Path) -> None:
    found: dict[str, Any] = {}
    # Memory takes its time on a machine that others use.
    with Sandbox(LIMITS, at_once=1) as sandbox, Sandbox(replace(LIMITS, seconds=60.0), at_once=1) as patient:
        for each in (sandbox, patient):
            each.run(Program("pass"))
        still = len(children())
        found["evidence"] = json.loads(sandbox.run(Program(evidence(directory))).stdout)
        for name, source in PROGRAMS.items():
            begun = time.monotonic()
            outcome = (patient if "memory" in name else sandbox).run(Program(source.replace("NAP", nap(directory))))
            took = time.monotonic() - begun
            after = sandbox.run(Program("print(input())", stdin="the next"))
            left = len(children()) - still
            found[name] = {**asdict(outcome), "took": took, "next": after.stdout, "left": left}
        sandbox.run(Program(f"{SECRETS[0]!r}; print(input() and {SECRETS[2]!r})", stdin=SECRETS[1]))
        text = f"BACKWARDS = {[text.encode()[::-1] for text in SECRETS]!r}\n" + SEARCH
        found["search"] = asdict(sandbox.run(Program(text)))
    found["left"] = [*map(str, children())]
    found["nap"] = nap(directory)
    found["files"] = sorted(os.listdir(directory))
    print(json.dumps(found))


def nap(directory: Path) -> str:
    """A unique duration."""
    return f"3600.{abs(hash(str(directory))) % 10**9}"


def children() -> list[psutil.Process]:
    """Processes that came of this one and still run."""
    alive = psutil.Process().children(recursive=True)
    return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def evidence(directory: Path) -> str:
    os.environ["HF_TOKEN"] = "hf_secret"
    server = socket.create_server(("127.0.0.1", 0))
    local, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    local.bind(str(directory / "socket"))
    abstract.bind("\0" + str(directory))
    for each in (local, abstract):
        each.listen()
    OPEN.extend([server, local, abstract])
    from rpg.sandbox import filter

    known = {
        "DIRECTORY": str(directory),
        "RUNTIME": json.__file__,
        "HOME": str(Path.home()),
        "PORT": server.getsockname()[1],
        "ABSTRACT": str(directory),
        "STRANGER": os.getpid(),
        "SYSCALLS": {**filter._REFUSED, "clone": filter._CLONE, "clone3": filter._CLONE3},
    }
    return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + EVIDENCE


OPEN: list[socket.socket] = []

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what loses its parent becomes a child of this process, and is counted
    main(Path(sys.argv[1]))
