"""Storage of studies (Optuna's journal in the home, or PostgreSQL), and the short lock under which they change.

The journal (`studies/NAME/journal.log`) is the default. A database's URL in RPG_STUDIES_URL replaces it for every
study, so that workers on several machines share them: `postgresql://user:password@host/database`.
"""

import contextlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from filelock import FileLock

from pipelines.home.home import Home
from specs.errors import Issue, RpgError, SpecError
from specs.machine.foreign.listeners import foreign_listener

if TYPE_CHECKING:
    import sqlalchemy
    from optuna.storages import BaseStorage

URL = "RPG_STUDIES_URL"
JOURNAL = "journal.log"
"""A study's journal, in its directory."""
OUTAGE_SECONDS = 600.0
"""Longest time in seconds that a worker waits for a database that does not answer. Its trial continues later."""
_RETRY_SECONDS = 1.0
_AWAY = re.compile("the database system is|refused|closed the connection|timed out|timeout expired")
"""Messages of PostgreSQL or its driver that mean that a database is starting, is about to end, or was not reached."""
_LOCKED_BY: "ContextVar[sqlalchemy.Connection | None]" = ContextVar("_LOCKED_BY", default=None)
"""The connection through which this thread holds a database's lock."""
Result = TypeVar("Result")


class StudyStorageError(RpgError):
    """Error for a database of studies that does not answer."""


class StudyStorageAwayError(StudyStorageError):
    """Error for a storage that does not answer yet, because it is starting or nothing listens at its address."""


@dataclass(frozen=True, slots=True)
class StudyStorage:
    """The storage of one study, and its lock."""

    name: str
    storage: "BaseStorage"
    lock: Callable[[], contextlib.AbstractContextManager[Any]]
    """Held while a worker reads the trials and decides, never while it trains. It is released if the worker that holds
    it dies.
    """

    def study_id(self, name: str, directions: "list[Any]") -> int:
        """Returns the id of an Optuna study in this storage, and creates the study if it is missing. Call it under the
        lock."""
        from optuna.exceptions import DuplicatedStudyError

        try:
            return int(self.storage.create_new_study(directions, name))
        except DuplicatedStudyError:
            return int(self.storage.get_study_id_from_name(name))

    def transaction(self, work: Callable[[], Result], stopping: Callable[[], bool] = lambda: False) -> Result:
        """Runs `work` under the lock. Runs it again from the beginning if the database becomes unreachable meanwhile.

        `work` reads the present state before it writes, so that it completes the half-done work of a lost connection.

        Args:
            stopping: called while the database is unreachable; true gives up.
        Raises:
            StudyStorageError: it stayed unreachable for OUTAGE_SECONDS.
        """
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import DBAPIError

        deadline = time.monotonic() + OUTAGE_SECONDS
        while True:
            try:
                with self.lock():
                    return work()
            except (DBAPIError, StorageInternalError) as error:
                if stopping() or time.monotonic() > deadline:
                    reason = str(error.__cause__ or error).splitlines()[0]
                    message = f"the database of study {self.name} does not answer: {reason}"
                    raise StudyStorageError(f"{message}; the same command continues from here") from None
                self.storage.remove_session()
                time.sleep(_RETRY_SECONDS)


def open_storage(home: Home, name: str, away: Callable[[str], bool] = lambda _: True) -> StudyStorage:
    """Returns the storage of a study.

    Args:
        away: called repeatedly with the reason while the database starts or is unreachable; true gives up.
    Raises:
        SpecError: RPG_STUDIES_URL names no PostgreSQL database, or its driver is not installed.
        StudyStorageError: the database does not answer, and `away` or OUTAGE_SECONDS end the wait.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url := os.environ.get(URL, ""):
        if (home.study(name) / JOURNAL).is_file():
            message = f"study {name} is stored in a journal here, but {URL} names a database"
            raise SpecError(Issue(message, given=name, hint=f"unset {URL}, or give the study another name"))
        storage, engine = _open_patiently(url, away)
        return StudyStorage(name, storage, lambda: _held(engine, f"rpg study {name}"))
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    home.create()
    path = home.study(name) / JOURNAL
    path.parent.mkdir(parents=True, exist_ok=True)
    # Optuna's own lock is a link that outlives a killed process; the kernel frees this one.
    lock = _JournalLock(path)
    journal = JournalStorage(JournalFileBackend(str(path), lock_obj=cast("Any", lock)))
    return StudyStorage(name, journal, lambda: home.locked(f"study-{name}", waiting=lambda: None))


def _open_patiently(url: str, away: Callable[[str], bool]) -> "tuple[BaseStorage, sqlalchemy.Engine]":
    """Opens the storage like `open_database`; for arguments and errors see `open_storage`."""
    deadline = time.monotonic() + OUTAGE_SECONDS
    while True:
        try:
            return open_database(url)
        except StudyStorageAwayError as error:
            if away(str(error)) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def open_database(url: str) -> "tuple[BaseStorage, sqlalchemy.Engine]":
    """Returns the storage of all studies in a database, and an engine whose connections take locks.

    Raises:
        SpecError: the URL is not PostgreSQL's, or its driver is not installed.
        StudyStorageError: the database does not answer; StudyStorageAwayError if it may in a moment.
    """
    import optuna
    import sqlalchemy

    scheme, separator, rest = url.partition("://")
    if scheme not in ("postgresql", "postgresql+psycopg") or not separator:
        hint = "leave it unset to keep studies in journals under RPG_HOME"
        message = f"{URL} names no database of studies"
        raise SpecError(Issue(message, given=scheme, allowed="postgresql://...", hint=hint))
    full = f"postgresql+psycopg://{rest}"

    def refuse_foreign(*_connection: object) -> None:
        if why := foreign_listener(full):
            raise StudyStorageError(f"the database of {URL} cannot be opened: {why}")

    refuse_foreign()
    try:
        # No pool: a worker holds no connection while it trains, and keeps none that a restart has cut.
        engine = sqlalchemy.create_engine(full, poolclass=sqlalchemy.NullPool)
        # Workers that start together would create the tables at the same time.
        with _held(engine, "rpg studies"):
            storage = optuna.storages.RDBStorage(full, engine_kwargs={"poolclass": sqlalchemy.NullPool})
        sqlalchemy.event.listen(storage.engine, "commit", _assert_locked)
        for opened in (engine, storage.engine):
            sqlalchemy.event.listen(opened, "do_connect", refuse_foreign)
    except ImportError:
        hint = "pip install 'rpg-experiments[postgres]'"
        raise SpecError(Issue(f"{URL} needs PostgreSQL's driver", hint=hint)) from None
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:  # ValueError: the port is not a number
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        kind = StudyStorageAwayError if _AWAY.search(str(error)) else StudyStorageError
        raise kind(f"the database of {URL} cannot be opened: {reason}") from None
    return optuna.storages.get_storage(storage), engine


@contextlib.contextmanager
def _held(engine: "sqlalchemy.Engine", lock: str) -> Iterator[None]:
    """Holds a transaction's lock. PostgreSQL releases it when the transaction ends, or the worker or connection
    dies."""
    import sqlalchemy

    statement = sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)").bindparams(key=zlib.crc32(lock.encode()))
    with engine.connect() as connection:
        connection.execute(statement)
        before = _LOCKED_BY.set(connection)
        try:
            yield
        finally:
            _LOCKED_BY.reset(before)


def _assert_locked(_writing: object) -> None:
    """Asserts before a commit under a lock that the lock is still held.

    A restarted database has given it to another worker. A new connection must not write a decision that is based on
    earlier reads; a connection from before the restart can no longer commit.
    """
    import sqlalchemy

    if (locked_by := _LOCKED_BY.get()) is not None:
        locked_by.execute(sqlalchemy.text("SELECT 1"))


class _JournalLock:
    """A lock with Optuna's interface that the kernel releases if the process that holds it dies. It is held while a
    line is added.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._lock = FileLock(f"{journal}.lock")

    def acquire(self) -> bool:
        self._lock.acquire()
        self._drop_torn_line()
        return True

    def _drop_torn_line(self) -> None:
        """Removes an incomplete line, left by a writer that was killed or had no disk space. Optuna does not read lines
        after it."""
        with contextlib.suppress(FileNotFoundError), open(self._journal, "r+b") as file:
            if not file.seek(0, os.SEEK_END):
                return
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def release(self) -> None:
        self._lock.release()
