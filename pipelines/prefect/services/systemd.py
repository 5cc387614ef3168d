"""The systemd unit of a home, which starts at boot what `rpg up` starts, and starts it again when supervisord dies.

One unit: supervisord is its main process and keeps the programs alive, as without systemd. So `rpg up`, `rpg down`,
`rpg doctor` and the logs are the same on both kinds of machine.
"""

import getpass
import hashlib
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.home.home import Home
from pipelines.prefect.server.api import START_SECONDS, ServiceError
from pipelines.prefect.services.supervisord import stop_seconds
from specs.errors import RpgError

_ANSWER_SECONDS = 30.0
"""How long systemctl may take to say something; to start or stop a unit takes as long as the unit does."""
_OF_SESSION = ("_", "DBUS_", "DISPLAY", "OLDPWD", "PWD", "SHLVL", "SSH_", "TERM", "TMUX", "WAYLAND_", "XAUTH", "XDG_")
"""How the names of variables begin that a log-in or a terminal sets."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A service of the whole machine where root calls, else of the user's own manager."""

    home: Home
    is_system: bool = field(default_factory=lambda: os.geteuid() == 0)

    @property
    def name(self) -> str:
        """Each home has a unit of its own."""
        return f"rpg-{hashlib.sha256(os.fsencode(self.home.root)).hexdigest()[:8]}.service"

    @property
    def path(self) -> Path:
        """Where the manager reads it: the first directory of systemd's own SYSTEMD_UNIT_PATH, if that is set."""
        if given := os.environ.get("SYSTEMD_UNIT_PATH", "").split(":")[0]:
            return Path(given) / self.name
        if self.is_system:
            return Path("/etc/systemd/system") / self.name
        settings = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(settings) / "systemd/user" / self.name

    @property
    def is_installed(self) -> bool:
        """Whether the unit has been written."""
        return self.path.is_file()

    def text(self) -> str:
        """The unit file. It holds no secret: the environment stands in services/at-boot.json."""
        root = str(self.home.root)
        if not root.isprintable():
            raise RpgError(f"RPG_HOME={root!r}: a systemd unit cannot name a path with control characters")
        online = "Wants=network-online.target\nAfter=network-online.target\n" if self.is_system else ""
        return f"""\
[Unit]
Description=rpg: experiments of {_literal(root)}
RequiresMountsFor={_quoted(root, of_command=False)}
{online}StartLimitIntervalSec=0

[Service]
Type=forking
ExecStart={" ".join(map(_quoted, (sys.executable, "-P", "-m", "pipelines.prefect.services.at_boot", root)))}
PIDFile={_literal(root)}/services/supervisord.pid
# A supervisord that was told to end stays down until the next boot.
Restart=on-failure
RestartSec=5
TimeoutStartSec={math.ceil(3 * START_SECONDS)}
# supervisord alone is told to end: it ends its programs, and a worker's runs save first.
KillMode=mixed
TimeoutStopSec={math.ceil(stop_seconds())}
# A trainer that is killed for memory is a run that failed, not the end of the services.
OOMPolicy=continue
TasksMax=infinity

[Install]
WantedBy={"multi-user.target" if self.is_system else "default.target"}
"""

    def write(self) -> None:
        """Writes the unit file. Raises RpgError where that is not allowed."""
        text = self.text()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RpgError(f"{self.path} cannot be written: {error.strerror}") from None

    @property
    def commands(self) -> list[str]:
        """Commands that enable and start the unit, for a shell."""
        orders = [["daemon-reload"], ["enable", "--now", self.name]]
        commands = [shlex.join([*self._systemctl, *order]) for order in orders]
        return [*commands, *self.until_log_in]

    @property
    def until_log_in(self) -> list[str]:
        """The command without which a user's own manager starts at the first log-in and ends with the last; none where
        it has been given, and for a service of the machine.
        """
        user = getpass.getuser()
        lingers = self.is_system or Path("/var/lib/systemd/linger", user).exists()
        return [] if lingers else [f"loginctl enable-linger {user}"]

    def is_managed(self) -> bool:
        """Whether a manager that could start it answers."""
        return self._ask("show-environment")

    def is_active(self) -> bool:
        """Whether the manager has it running."""
        return self._ask("is-active", self.name)

    def start(self) -> None:
        """Enables and starts it; returns when all is up. Raises ServiceError where that fails."""
        self._order("daemon-reload")
        self._order("enable", "--now", self.name)

    def stop(self) -> None:
        """Ends what it has started; returns when all is down. It starts again at the next boot."""
        self._order("stop", self.name)

    def remove(self) -> None:
        """Deletes it where it has been written, so that nothing starts at boot any more."""
        if not self.is_installed:
            return
        if self.is_managed():
            self._order("disable", self.name)
        self.path.unlink(missing_ok=True)
        if self.is_managed():
            self._order("daemon-reload")

    @property
    def _systemctl(self) -> list[str]:
        return ["systemctl"] if self.is_system else ["systemctl", "--user"]

    def _ask(self, *words: str) -> bool:
        try:
            command = [*self._systemctl, *words]
            return subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def _order(self, *words: str) -> None:
        command = [*self._systemctl, *words]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode != 0:
            journal = shlex.join(["journalctl", *self._systemctl[1:], "--unit", self.name])
            raise ServiceError(f"{shlex.join(command)}:\n{done.stderr.strip()}\nits words: {journal}")


def _literal(text: str) -> str:
    """A value that takes the rest of its line, where `%` alone means something."""
    return text.replace("%", "%%")


def _quoted(word: str, *, of_command: bool = True) -> str:
    """A word of a command line, where `$` means something, or of a list."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_literal(escaped.replace("$", "$$") if of_command else escaped)}"'


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """A shell's environment without what names its session, which is over at the next boot."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_SESSION)}
