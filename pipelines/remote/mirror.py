"""A mirror: a copy of another home's record, which is updated by reading the record's changes.

Reading commands use a mirror like any home. It lacks weights and checkpoints, and those tables' rows that no command
has requested yet: rollouts and tokens are most of a record.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipelines.home.home import Home
from pipelines.remote.object_store import StoreSource
from pipelines.remote.record_files import Listing
from pipelines.remote.sources import FileGoneError, Source, SourceError, WebSource
from specs.machine.files import replacing, write_json
from specs.machine.own_cache import place
from specs.records import LARGE_TABLES, TABLES

SMALL = frozenset(TABLES) - {*LARGE_TABLES}
"""Tables that are read by default."""
_CONNECTIONS = 8
_ROUNDS = 5
"""Number of times that a unit is listed again because a document changed before it was read. Then the document is
accepted as read."""


def mirror_home(record: str) -> Home:
    """Returns the home of the mirror of a record, in the user's own cache directory.

    Args:
        record: the URL that the record is read from.
    Raises:
        UnsafeDirectoryError: another user controls that directory.
    """
    name = re.sub(r"[^A-Za-z0-9]+", "-", record.partition("://")[2]).strip("-")[:40]
    return Home(place("mirrors", f"{name}-{hashlib.sha256(record.encode()).hexdigest()[:8]}"))


def open_source(place: str, auth: str) -> Source:
    """Returns the source of the record at a path or URL.

    Args:
        place: the URL of a web application (http, https), or of an object store (s3, or another kind that fsspec
            opens).
        auth: `user:password` of the server that names the place, for a web application; empty if none is needed.
    Raises:
        SourceError: the place cannot be read.
    """
    if place.startswith(("http://", "https://")):
        return WebSource(place, auth)
    if "://" in place:
        return StoreSource(place)
    raise SourceError(f"the record's address is {place!r}, which is not a URL")


@dataclass(slots=True)
class _Unit:
    """A unit of the record, with the state of its files in the mirror."""

    listing: Listing
    versions: dict[str, str]
    """Path -> version of the file in the mirror."""

    def outdated(self, tables: Collection[str], logs: bool) -> list[str]:
        """Returns the paths of the wanted files whose listed version the mirror lacks: documents after other files, a
        run's state at the end."""
        files = [path for path, file in self.listing.files.items() if self.versions.get(path) != file.version]
        wanted = [path for path in files if _is_wanted(path, tables, logs)]
        return sorted(wanted, key=lambda path: (path.endswith(".json"), path.endswith("/state.json"), path))


class Mirror:
    """A home that follows a record elsewhere. Several processes may update the same mirror."""

    def __init__(self, home: Home, source: Source) -> None:
        self.home = home
        self._source = source
        home.root.mkdir(parents=True, exist_ok=True)
        home.root.chmod(0o700)
        self._index = home.root / "mirror"
        """Directory with a document for each unit: its listing, and the versions of the files in the mirror."""

    def pull(self, tables: Collection[str] = SMALL, *, logs: bool = False, only: Collection[str] = ()) -> None:
        """Updates the mirror from the record.

        Args:
            tables: tables whose rows are wanted. Other tables have the rows that an earlier call wanted.
            logs: whether the runs' logs are wanted.
            only: units to update; empty means all.
        Raises:
            SourceError: the record cannot be read.
        """
        with self.home.locked("mirror", waiting=lambda: None), ThreadPoolExecutor(_CONNECTIONS) as threads:
            units = self._read_index(only)
            for _ in range(_ROUNDS):
                changes = self._source.changes({unit: known.listing.digest for unit, known in units.items()}, only)
                for unit in changes.gone:
                    self._remove(unit, units.pop(unit))
                for unit, listing in changes.changed.items():
                    units[unit] = _Unit(listing, units[unit].versions if unit in units else {})
                renewed = threads.map(
                    lambda unit: self._renew(unit, units[unit], tables, logs),
                    [unit for unit in units if unit in changes.changed or units[unit].outdated(tables, logs)],
                )
                if all(list(renewed)):
                    return

    def units(self) -> set[str]:
        """Returns the units that the mirror has."""
        return {str(path.relative_to(self._index).with_suffix("")) for path in self._index.rglob("*.json")}

    def _renew(self, unit: str, known: _Unit, tables: Collection[str], logs: bool) -> bool:
        """Reads the wanted files of a unit whose listed version the mirror lacks, and removes files that are no longer
        listed.

        Returns whether the mirror's files are consistent: a state that is newer than the listing may name rows that the
        listing lacks. Other documents, such as progress, heartbeats and logs, change all the time and are accepted in
        any version.
        """
        unlisted = [path for path in known.versions if path not in known.listing.files]
        outdated = known.outdated(tables, logs)
        for path in unlisted:
            (self.home.root / path).unlink(missing_ok=True)
            del known.versions[path]
        fits = True
        for path in outdated:
            try:
                version = self._read(path, known)
            except FileGoneError:
                fits = False
                continue
            known.versions[path] = version
            fits &= version == known.listing.files[path].version or not path.endswith(("/state.json", ".parquet"))
        write_json(self._index / f"{unit}.json", known.listing.to_json() | {"here": known.versions}, durable=False)
        if unlisted or outdated:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.home.root / unit)  # shows the store that a run that has ended got files
        return fits

    def _read(self, path: str, known: _Unit) -> str:
        """Copies a file, or the new part of a log. Returns the version that the mirror then has."""
        here = self.home.root / path
        size = here.stat().st_size if path.endswith(".log") and path in known.versions and here.exists() else 0
        start = size if size < known.listing.files[path].size else 0
        content, version = self._source.read(path, start)
        with replacing(here, durable=False) as aside:
            aside.write_bytes((here.read_bytes() if start else b"") + content)
        return version

    def _remove(self, unit: str, known: _Unit) -> None:
        """Removes the files of a unit that the record no longer has."""
        for path in known.versions:
            (self.home.root / path).unlink(missing_ok=True)
        (self._index / f"{unit}.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            shutil.rmtree(self.home.root / unit)

    def _read_index(self, only: Collection[str]) -> dict[str, _Unit]:
        """Returns the index of known units. Ignores a document that an interrupted command left incomplete."""
        units = {}
        for unit in only or self.units():
            # Not `read_json`, which expects a run's document by the file's name.
            with contextlib.suppress(OSError, ValueError):
                document = json.loads((self._index / f"{unit}.json").read_bytes())
                units[unit] = _Unit(Listing.from_json(unit, document), dict(document.get("here", {})))
        return units


def _is_wanted(path: str, tables: Collection[str], logs: bool) -> bool:
    if path.endswith(".parquet"):
        return path.split("/")[-2] in tables
    return logs or not path.endswith(".log")
