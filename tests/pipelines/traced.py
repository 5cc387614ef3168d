"""Commands of an ordinary user whose files are listed: which of those that they read or write could be another's."""

import os
import pwd
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from as_users import Shared, as_user
from live import COMMAND
from places import ROOT

from tests.needs import skip_without

_CALLS = (
    *("open", "openat", "openat2", "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "execve", "connect", "bind"),
)
_NEW = re.compile(r"^(?:(?:mkdir|link)(?:at)?\(.* = 0$|(?:open(?:at)?)\(.*O_CREAT\|.*O_EXCL.* = \d)")
"""A call that has made a file or directory, and would have failed if there had been one."""
_AT = re.compile(r"(?:AT_FDCWD|\d+)<([^<>]*)>, \"((?:[^\"\\]|\\.)*)\"")
_PATH = re.compile(r"\"(/(?:[^\"\\]|\\.)*)\"")
_UNGUESSABLE = re.compile(
    r"(?:tmp|pymp-|listener-|sem\.(?:joblib|loky)-\d+-|rpg-[a-z]+-)?[a-z0-9_]{8}(?:prefect)?(?:\.\w+)?"  # tempfile
    r"|etilqs_[0-9a-f]{15,16}"  # SQLite
    r"|cc[A-Za-z0-9]{6}(?:\.\w+)+"  # GCC
    r"|rpg-slot-.+@[0-9a-f]{16}\.lock"
    r"|psm_[0-9a-f]{8}|sem\.(?:mp-)?\w{6,8}|\w{6}"  # shared memory of Python, and of the C library
    r"|torch_\d+_\d{6,}_\d+"
)
"""Names that no other user can guess. A name below a directory that all may write has to be one of these, and new."""

_LONG = re.compile(r"(?:vllm_dist_)?(?:[0-9a-f]{32}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})")
"""Names of 122 random bits, which need not be new: no other user could have guessed them."""


class Traced:
    """An ordinary user's commands, under strace."""

    def __init__(self, machine: Shared) -> None:
        skip_without("strace")
        self.machine = machine
        self.home = machine.home / "rpg"
        self._user = pwd.getpwnam(machine.user)
        self._logs = machine.root / "logs"
        self._logs.mkdir()
        self._logs.chmod(0o777)
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.environment = kept | {
            "HOME": str(machine.home),
            "TMPDIR": str(machine.tmp),
            "RPG_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, program: str, *arguments: str, output: Path | None = None) -> subprocess.Popen[str]:
        """Starts a Python program of the user's in the background."""
        number = len(list(self._logs.iterdir()))
        strace = ["strace", "-ff", "--seccomp-bpf", "-y", "-qq", "-s", "4096", "-e", f"trace={','.join(_CALLS)}"]
        command = [*strace, "-o", str(self._logs / f"{number}"), sys.executable, "-c", program, *arguments]
        with open(output or self.machine.root / f"output-{number}", "w") as stdout:
            return subprocess.Popen(
                as_user("an ordinary user", command, number=self._user.pw_uid),
                env=self.environment,
                cwd=self.machine.home,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, program: str, *arguments: str, timeout: float = 500) -> str:
        """Runs such a program to its end. Returns its output. It has to succeed."""
        output = self.machine.root / "output"
        process = self.start(program, *arguments, output=output)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        assert code == 0, output.read_text()
        return output.read_text()

    def rpg(self, *arguments: str, timeout: float = 500) -> str:
        """Runs `rpg ...` to its end. Returns its output."""
        return self.run(COMMAND, *arguments, timeout=timeout)

    def used(self) -> list[str]:
        """Returns the paths outside the home that the commands have read or written."""
        inside = f"{self.home}/"
        return sorted({path for path, _ in self._calls() if path != str(self.home) and not path.startswith(inside)})

    def anothers(self) -> dict[str, str]:
        """Returns the paths among them that another user made or could have made, and how."""
        new = {path for path, is_new in self._calls() if is_new}
        return {path: how for path in self.used() if (how := self._could_be_anothers(path, new))}

    def _calls(self) -> Iterator[tuple[str, bool]]:
        for log in self._logs.iterdir():
            for line in log.read_text(errors="replace").splitlines():
                is_new = bool(_NEW.match(line))
                paths = [os.path.join(*at) for at in _AT.findall(line)]
                # The first argument of execve is the program; the others are its command line.
                paths += _PATH.findall(line)[: 1 if line.startswith("execve") else None]
                for path in paths:
                    yield os.path.normpath(path), is_new

    def _could_be_anothers(self, path: str, new: set[str]) -> str:
        """Returns how another user could have made the file at a path, or an empty text if that is impossible."""
        if path.startswith("/proc/"):  # the kernel's
            return ""
        at = Path("/")
        for name in Path(path).parts[1:]:
            shared, at = at.stat(), at / name
            is_open = shared.st_mode & stat.S_IWOTH
            if is_open and not shared.st_mode & stat.S_ISVTX:
                return f"all may write {at.parent}"
            if not os.path.lexists(at):
                return self._guessable(at, new) if is_open else ""
            owner = at.lstat().st_uid
            if owner not in (0, self._user.pw_uid):
                return f"{at} is another user's"
            if is_open and owner and (how := self._guessable(at, new)):
                return how
            if not at.is_dir():
                break
        return ""

    def _guessable(self, path: Path, new: set[str]) -> str:
        if _LONG.fullmatch(path.name):
            return ""
        if not _UNGUESSABLE.fullmatch(path.name):
            return f"the name {path.name} can be guessed"
        return "" if str(path) in new else f"{path} may have been there"
