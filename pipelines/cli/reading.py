"""The home that a reading verb uses: this machine's, or with `--profile` the mirror of a server's record."""

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.home.home import Home
from pipelines.home.runs import read_state
from pipelines.home.starting import starting
from specs.errors import RpgError

if TYPE_CHECKING:
    from pipelines.cli.server_record import ServerRecord

_LOCAL_SECONDS = 0.5
_SERVER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A home to read, which is kept up to date while a command follows a run."""

    home: Home
    record: "ServerRecord | None" = None
    """The record that the home mirrors. None if the home is not a mirror."""

    def refresh(self, tables: Collection[str] | None = None, *, logs: bool = False, only: Collection[str] = ()) -> None:
        """Updates a mirror from the server's record; does nothing for a home of this machine.

        Args:
            tables: tables whose rows are needed; None: all but the two large ones.
            logs: whether the runs' logs are needed.
            only: units that are needed, such as `runs/RUN`; empty: all.
        Raises:
            RpgError: the server or its record cannot be read.
        """
        if self.record is None:
            return
        from pipelines.remote.mirror import SMALL

        self.record.refresh(SMALL if tables is None else tables, logs=logs, only=only)

    def note_looks(self, names: Sequence[str]) -> None:
        """Records that answers of experiments were shown. Does nothing for a mirror: its server's
        record belongs to others."""
        if self.record is None:
            from pipelines.report.answer import note_looks

            note_looks(self.home, names)

    def wait(self, run_ids: Sequence[str]) -> None:
        """Waits a moment, then reads the runs' new records. Reads nothing while the server does not answer."""
        if self.record is None:
            time.sleep(_LOCAL_SECONDS)
            return
        time.sleep(_SERVER_SECONDS)
        with contextlib.suppress(RpgError):
            self.record.refresh((), logs=True, only=[f"runs/{run_id}" for run_id in run_ids])


@contextlib.contextmanager
def reading(profile: str) -> Iterator[Reading]:
    """Yields this machine's home, or that of the server that a profile names; see `ServerRecord` for the errors."""
    if not profile:
        home = Home.from_environment()
        yield Reading(home)
        if another := home.another():
            print(another, file=sys.stderr)
        return
    record = open_server(profile)
    try:
        yield Reading(record.home, record)
    finally:
        record.close()


def wait_for_start(reading: Reading, names: Collection[str]) -> None:
    """Waits until no command here is starting an experiment of these names, because its runs are recorded only then."""
    told = set[str]()
    while reading.record is None and (awaited := [name for name in starting(reading.home) if name in names]):
        for name in awaited if not told else ():
            print(is_starting(name), file=sys.stderr)
        told.update(awaited)
        time.sleep(_LOCAL_SECONDS)


def is_starting(name: str) -> str:
    """Returns the words for an experiment or a study that is starting."""
    return f"{name} is starting: its data and its model are being checked"


def open_server(profile: str) -> "ServerRecord":
    """Returns the record of the server that a profile names; see `ServerRecord` for the errors."""
    from pipelines.cli.server_record import ServerRecord
    from pipelines.remote.mirror import mirror_home

    home = Home.from_environment()
    if not home.root.exists():
        home = mirror_home(profile)  # Prefect needs a directory, and a reading command creates no home
        home.prefect.mkdir(parents=True, exist_ok=True)
    return ServerRecord(home, profile)


def print_waiting_elsewhere(reading: Reading, run_ids: Sequence[str]) -> None:
    """Warns on stderr about runs that were submitted to another server: this home may never see them start."""
    from pipelines.prefect.server.api import running_services

    states = [read_state(reading.home, run_id) for run_id in run_ids] if reading.record is None else []
    waiting = {state["api_url"] for state in states if state.get("status") == "pending" and state.get("api_url")}
    services = running_services(reading.home) if waiting else None
    for url in waiting - {services.url if services else ""}:
        print(f"submitted to {url}; if its workers have another home, add --profile {url}", file=sys.stderr)
