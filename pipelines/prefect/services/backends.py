"""PostgreSQL and Redis of the server profile. They listen on loopback, require passwords, and keep their data in the
home's services/."""

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import ServiceError, refuse_anothers
from pipelines.prefect.server.credentials import password
from pipelines.prefect.services.supervisord import Program

_DEBIAN = Path("/usr/lib/postgresql")
"""Directory in which Debian keeps a directory for each major version of PostgreSQL, outside PATH."""
_SERVER_USER = "postgres"
"""User that runs PostgreSQL if the caller is root, which PostgreSQL refuses. Debian's package creates it."""
PREFECT_DATABASE = "prefect"
STUDIES_DATABASE = "rpg_studies"


@dataclass(frozen=True, slots=True)
class Postgres:
    """One cluster with a database for Prefect and one for studies, each with an owner of the same name.

    A worker knows only the password of the studies' database: its programs cannot read or change Prefect's database.
    """

    home: Home
    binaries: Path
    port: int

    @classmethod
    def prepare(cls, home: Home) -> "Postgres":
        """Creates the cluster if it is missing.

        Raises:
            ServiceError: PostgreSQL is not installed, its data were written by another major version, or the user that
                has to run it cannot reach them.
        """
        data = home.services / "postgres"
        written_by = data / "PG_VERSION"
        binaries = _binaries(written_by.read_text(encoding="utf-8").strip() if written_by.exists() else "")
        cluster = cls(home, binaries, free_port())
        if not written_by.exists():
            cluster._initialize(data)
        return cluster

    def _initialize(self, data: Path) -> None:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        user = _user()
        if user:
            _let_in(user, self.home, data)
        with tempfile.NamedTemporaryFile("w", prefix="rpg-", encoding="utf-8") as password_file:
            password_file.write(password(self.home, "postgres"))
            password_file.flush()
            if user:
                shutil.chown(password_file.name, user)
            command = [str(self.binaries / "initdb"), "--pgdata", str(data), "--username=postgres", "--encoding=UTF8"]
            options = ["--auth=scram-sha-256", f"--pwfile={password_file.name}", "--locale=C.UTF-8"]
            done = _run_as(user, [*command, *options])
        if done.returncode != 0:
            raise ServiceError(f"PostgreSQL's initdb failed:\n{done.stderr.strip()}")

    def program(self) -> Program:
        """Returns the server program. It listens only on its loopback port, not on a Unix socket, whose path might
        be too long."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "password_encryption": "scram-sha-256",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return Program(
            "postgres",
            [str(self.binaries / "postgres"), "-D", str(self.home.services / "postgres"), *options],
            user=_user(),
            directory="/",
            # "fast" disconnects clients; SIGTERM would wait until the last one has left.
            stop_signal="SIGINT",
        )

    def address(self, database: str) -> str:
        """Returns `user:password@host:port/name` of a database, with its owner."""
        return f"{database}:{password(self.home, database)}@127.0.0.1:{self.port}/{database}"

    def answers(self) -> bool:
        """Returns whether the server accepts its administrator's password.

        Raises:
            ServiceError: it does not, or a process of an unexpected user listens.
        """
        import psycopg

        refuse_anothers(f"postgresql://127.0.0.1:{self.port}", _user())
        try:
            psycopg.connect(self._administrator, connect_timeout=2).close()
        except psycopg.OperationalError as error:
            if "authentication failed" in str(error):
                place = self.home.services / "secrets" / "postgres"
                raise ServiceError(f"PostgreSQL rejects the password in {place}") from None
            return False
        return True

    def make_databases(self) -> None:
        """Creates both databases and their owners if they are missing, and sets the owners' passwords."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(self._administrator, autocommit=True) as connection:
            for database in (PREFECT_DATABASE, STUDIES_DATABASE):
                name = sql.Identifier(database)
                if not connection.execute("select 1 from pg_roles where rolname = %s", [database]).fetchone():
                    connection.execute(sql.SQL("create role {} login").format(name))
                secret = sql.Literal(password(self.home, database))
                connection.execute(sql.SQL("alter role {} password {}").format(name, secret))
                if not connection.execute("select 1 from pg_database where datname = %s", [database]).fetchone():
                    connection.execute(sql.SQL("create database {} owner {}").format(name, name))
                connection.execute(sql.SQL("revoke connect on database {} from public").format(name))

    @property
    def _administrator(self) -> str:
        return f"postgresql://postgres:{password(self.home, 'postgres')}@127.0.0.1:{self.port}/postgres"


@dataclass(frozen=True, slots=True)
class Redis:
    """Redis with an append-only file, for the Prefect server's events, leases and queues."""

    home: Home
    binary: str
    port: int

    @classmethod
    def prepare(cls, home: Home) -> "Redis":
        """Writes its configuration. Raises ServiceError if Redis is not installed."""
        binary = shutil.which("redis-server")
        if binary is None:
            raise ServiceError("redis-server is not installed; on Debian: apt install redis-server")
        server = cls(home, binary, free_port())
        directory = home.services / "redis"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        configuration = directory / "redis.conf"
        lines = [
            "bind 127.0.0.1",
            f"port {server.port}",
            f"requirepass {password(home, 'redis')}",
            "appendonly yes",
            'save ""',
        ]
        configuration.touch(mode=0o600)
        configuration.write_text("\n".join(lines) + "\n", encoding="ascii")
        return server

    def program(self) -> Program:
        """Returns the server program."""
        return Program("redis", [self.binary, "redis.conf"], directory=str(self.home.services / "redis"))

    @property
    def address(self) -> str:
        """Returns `:password@host:port`."""
        return f":{password(self.home, 'redis')}@127.0.0.1:{self.port}"

    def answers(self) -> bool:
        """Returns whether Redis accepts the password and has read its append-only file. Raises ServiceError if
        another user listens."""
        import redis

        refuse_anothers(f"redis://127.0.0.1:{self.port}")
        try:
            with redis.Redis.from_url(f"redis://{self.address}/0", socket_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def installed_postgres() -> dict[str, Path]:
    """Returns the directory of programs of each installed major version, the newest first; empty if there is none."""
    places = sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]), reverse=True)
    if places or not (elsewhere := shutil.which("postgres")):
        return {path.parts[-3]: path.parent for path in places}
    version = subprocess.run([elsewhere, "--version"], capture_output=True, encoding="utf-8").stdout.split()[2]
    return {version.partition(".")[0]: Path(elsewhere).parent}


def _binaries(version: str) -> Path:
    """Returns the directory of a major version's programs; an empty version means the newest."""
    installed = installed_postgres()
    if not installed:
        raise ServiceError("PostgreSQL is not installed; on Debian: apt install postgresql")
    if version and version not in installed:
        others = ", ".join(installed)
        way_out = f"on Debian: apt install postgresql-{version}"
        raise ServiceError(f"the databases were written by PostgreSQL {version}, but {others} is installed; {way_out}")
    return installed[version] if version else next(iter(installed.values()))


def _user() -> str:
    """Returns the user that runs PostgreSQL; empty means the calling user."""
    if os.geteuid() != 0:
        return ""
    try:
        return pwd.getpwnam(_SERVER_USER).pw_name
    except KeyError:
        raise ServiceError(f"PostgreSQL does not run as root, and there is no user {_SERVER_USER}") from None


def _let_in(user: str, home: Home, data: Path) -> None:
    """Makes the user the owner of the directory, and lets only this user reach it through the home.

    Raises ServiceError if a directory above the home denies the user access, or the home belongs to another group.
    """
    shutil.chown(data, user)
    group = pwd.getpwnam(user).pw_gid
    for directory in (home.root, home.services):
        mode = stat.S_IMODE(directory.stat().st_mode)
        if not mode & stat.S_IXOTH:
            if mode & stat.S_IRWXG and directory.stat().st_gid != group:
                way_out = f"do not run as root, or allow access: chmod o+x {directory}"
                raise ServiceError(
                    f"PostgreSQL runs as {user} if root starts it, but only a group can enter {directory}; {way_out}"
                )
            os.chown(directory, -1, group)
            directory.chmod(mode | stat.S_IXGRP)
    if _run_as(user, ["ls", str(data)]).returncode != 0:
        way_out = "put RPG_HOME in a directory that this user may enter, or do not run as root"
        raise ServiceError(f"PostgreSQL runs as {user} when root starts it, but cannot enter {data}; {way_out}")


def _run_as(user: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end as another user, in that user's own group only. An empty user means the current one."""
    identity: dict[str, Any] = {}
    if user:
        identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd="/", **identity)
