"""The server profile, started for real: PostgreSQL, Redis, two API processes, background services, pages, workers."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live import COMMAND, SPEC, Lab

from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import running_services
from pipelines.prefect.services.supervisord import Supervisor

BACKENDS = ("postgresql", "redis-server")
"""Debian packages of the server profile."""


@dataclass
class ServerLab(Lab):
    """A home whose server profile is up."""

    url: str = ""
    """The API's."""
    auth_string: str = ""
    """Credentials of a client."""

    @property
    def supervisor(self) -> Supervisor:
        services = running_services(self.home)
        assert services is not None, "the server profile is not up"
        return Supervisor(self.home, services.control_port)

    def pids(self, program: str) -> list[int]:
        """The processes of `api`, `services`, `postgres`, `redis`, `worker`, `studies` or `record` that run now."""
        return self.supervisor.pids(program)

    def call(self, path: str, body: Any = None, *, auth_string: str | None = None) -> Any:
        """Returns the API's answer. Raises urllib.error.HTTPError.

        Args:
            path: below the API's URL, with its slash.
            body: of a POST; None: a GET.
            auth_string: another one than the right one; empty: none.
        """
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        if shown := self.auth_string if auth_string is None else auth_string:
            request.add_header("authorization", f"Basic {base64.b64encode(shown.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def start_worker(
        self, *options: str, home: Path | None = None, prefix: tuple[str, ...] = (), **environment: str
    ) -> "subprocess.Popen[str]":
        """One more `rpg worker`, as on another machine: it is no program of `rpg up`.

        Args:
            options: of `rpg worker`.
            home: its RPG_HOME; None: this one.
            prefix: a command that runs it.
            environment: on top of this process's own.
        """
        told = {"RPG_HOME": str(home or self.root), "PREFECT_API_AUTH_STRING": self.auth_string}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", COMMAND, "worker", "--profile", self.url, *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | told | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process


@contextmanager
def server_profile(prepared: Path | None = None, workers: int = 1) -> Iterator[ServerLab]:
    """A home whose server profile is up at free ports, and down at the end of the block whatever happens.

    Args:
        prepared: a home whose artifacts it has from the beginning; None: it has none.
    """
    # Where PostgreSQL's own user may enter, as root's own temporary directories let nobody in.
    directory = Path(tempfile.mkdtemp(prefix="rpg-server-"))
    directory.chmod(0o755)
    lab = ServerLab(directory / "home", directory / "tiny.yaml")
    lab.spec.write_text(SPEC)
    try:
        if prepared is not None:
            shutil.copytree(prepared / "artifacts", lab.root / "artifacts")
        port = str(free_port())
        result = lab.rpg("up", "--profile", "server", "--port", port, "--workers", str(workers), "--json", timeout=560)
        assert result.code == 0, result.err
        lab.url = json.loads(result.out)["api"]
        lab.auth_string = (lab.home.services / "secrets" / "auth").read_text()
        yield lab
    finally:
        lab.rpg("down")
        lab.clean_up()
        shutil.rmtree(directory, ignore_errors=True)
