"""The server profile. It adds PostgreSQL, Redis, a process of background services and a password to the embedded
profile."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

from pipelines.home.home import Home
from pipelines.prefect.server.api import ServiceError
from pipelines.prefect.server.credentials import PASSWORDS_VARIABLE, own_string
from pipelines.prefect.server.settings import server_environment
from pipelines.prefect.services.backends import PREFECT_DATABASE, STUDIES_DATABASE, Postgres, Redis
from pipelines.prefect.services.supervisord import Program, Supervisor
from pipelines.processes.supervisor import log_size, log_tail


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The programs that only this profile has, and the environment that it gives the others."""

    home: Home
    url: str
    """The API's URL."""
    postgres: Postgres
    redis: Redis

    @classmethod
    def prepare(cls, home: Home, url: str) -> "ServerProfile":
        """Creates the database cluster if it is missing. Raises ServiceError if a program is not installed."""
        for package in ("prefect_redis", "psycopg"):
            if importlib.util.find_spec(package) is None:
                raise ServiceError(f"{package} is not installed: pip install 'rpg-experiments[server]'")
        return cls(home, url, Postgres.prepare(home), Redis.prepare(home))

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment of the Prefect server's processes. They need not register block types, because
        `start_backends` did."""
        return server_environment(
            self.home,
            self.url,
            database=self.postgres.address(PREFECT_DATABASE),
            redis=self.redis.address,
            auth_string=own_string(self.home),
        ) | {"PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false"}

    @property
    def backends(self) -> list[Program]:
        """Returns the backends that must answer before any process of the Prefect server starts."""
        return [self.postgres.program(), self.redis.program()]

    def start_backends(self, supervisor: Supervisor) -> None:
        """Starts the backends, and returns when both answer and Prefect's database is up to date. Raises
        ServiceError if that fails."""
        for program in self.backends:
            supervisor.run(program.name)
        for program, answers in zip(self.backends, (self.postgres.answers, self.redis.answers), strict=True):
            supervisor.wait(program, answers)
        self.postgres.make_databases()
        log = self.home.logs / "prefect-migration.log"
        command = [
            sys.executable,
            "-P",
            "-c",
            "from pipelines.prefect.server.api_process import prepare_database; prepare_database()",
        ]
        log_start = log_size(log)
        with log.open("ab") as output:
            done = subprocess.run(command, env=os.environ | self.environment, stdout=output, stderr=output)
        if done.returncode != 0:
            raise ServiceError(
                f"Prefect's database could not be brought up to date; {log}:\n{log_tail(log, since=log_start)}"
            )

    def background_services(self) -> Program:
        """Returns the process with scheduling, late runs, events and automations."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "pipelines.prefect.server.outage_log",
            "prefect",
            "server",
            "services",
            "start",
        ]
        return Program("services", command, self.environment, log="prefect-services.log")

    @property
    def of_workers(self) -> dict[str, str]:
        """Returns the environment of workers: the addresses of the home and the studies."""
        studies = f"postgresql://{self.postgres.address(STUDIES_DATABASE)}"
        return {"RPG_HOME": str(self.home.root), "RPG_STUDIES_URL": studies}

    @property
    def of_pages(self) -> dict[str, str]:
        """Returns the environment of the pages of studies and of the record, which require a password of the home."""
        return self.of_workers | {PASSWORDS_VARIABLE: "home"}
