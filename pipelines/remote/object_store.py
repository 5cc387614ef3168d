"""A record on shared storage: an S3-compatible object store, or another kind that fsspec opens.

Below the store's URL, `files/` holds files by their path in a home, and `listings/` for each unit (a run, an artifact,
an experiment) a document that names its files with their SHA-256. Files are written first and the listing last, so that
the files of a listing exist.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec

from pipelines.remote.record_files import FileVersion, Listing, is_recorded
from pipelines.remote.sources import Changes, FileGoneError, SourceError

_WHOLE_BYTES = 8 * 2**20
"""Size in bytes up to which a file is read only once, so that the digest is of exactly the bytes that are sent."""


class ObjectStore:
    """The files and listings below one URL. Threads may share it.

    Endpoint and credentials come from the usual settings of the URL's kind of storage, for S3 the AWS variables. Every
    method raises OSError, or an error of the storage's own library, if the storage does not answer.
    """

    def __init__(self, url: str) -> None:
        """Raises SourceError if no installed package opens such URLs."""
        try:
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            hint = "; pip install 'rpg-experiments[s3]'" if url.startswith("s3:") else ""
            raise SourceError(f"the object store {url} cannot be opened: {error}{hint}") from error
        self._root = str(root).rstrip("/")

    def tokens(self) -> dict[str, str]:
        """Returns a text for each unit in the store. The text changes when the unit changes."""
        prefix = f"{self._root}/listings/"
        found = self._files.find(prefix.rstrip("/"), detail=True)
        return {path.removeprefix(prefix).removesuffix(".json"): _token(entry) for path, entry in found.items()}

    def listings(self, units: Collection[str]) -> dict[str, dict[str, FileVersion]]:
        """Returns the files, by path, of those of the units that the store has."""
        paths = {f"{self._root}/listings/{unit}.json": unit for unit in units}
        contents = self._files.cat(list(paths), on_error="omit") if paths else {}
        return {paths[path]: _parse(paths[path], content) for path, content in contents.items()}

    def write_listing(self, unit: str, files: Mapping[str, FileVersion]) -> None:
        """Writes the listing of a unit, whose files are already in the store."""
        document = {"files": {path: [file.size, file.version] for path, file in sorted(files.items())}}
        self._files.pipe_file(f"{self._root}/listings/{unit}.json", json.dumps(document).encode())

    def send(self, root: Path, path: str) -> FileVersion:
        """Copies a file of a home into the store; returns the version that was sent."""
        local = root / path
        if (size := local.stat().st_size) <= _WHOLE_BYTES:
            return self.write(path, local.read_bytes())
        with local.open("rb") as file:
            version = hashlib.file_digest(file, "sha256").hexdigest()
        self._files.put_file(str(local), f"{self._root}/files/{path}")
        return FileVersion(size, version)

    def write(self, path: str, content: bytes) -> FileVersion:
        """Writes a file of the store; returns the version that was written."""
        self._files.pipe_file(f"{self._root}/files/{path}", content)
        return FileVersion(len(content), hashlib.sha256(content).hexdigest())

    def fetch(self, path: str, local: Path) -> None:
        """Copies a file of the store to a path in an existing directory."""
        self._files.get_file(f"{self._root}/files/{path}", str(local))

    def read(self, path: str, start: int = 0) -> bytes:
        """Returns a file's content from byte `start` on. Raises FileNotFoundError."""
        content: bytes = self._files.cat_file(f"{self._root}/files/{path}", start=start or None)
        return content

    def create(self, path: str, content: bytes) -> bool:
        """Writes a file unless it exists. If several callers try at the same time, one succeeds. Returns whether this
        caller did."""
        try:
            self._files.pipe_file(f"{self._root}/files/{path}", content, mode="create")
        except FileExistsError:
            return False
        return True

    def names(self, directory: str) -> list[str]:
        """Returns the names of the files of a directory."""
        try:
            entries = self._files.ls(f"{self._root}/files/{directory}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(os.path.basename(entry) for entry in entries)

    def remove(self, paths: Iterable[str]) -> None:
        """Removes files; missing files count as removed."""
        for path in paths:
            try:
                self._files.rm_file(f"{self._root}/files/{path}")
            except FileNotFoundError:
                continue


class StoreSource:
    """The record in an object store, for a mirror. See `Source`."""

    def __init__(self, url: str) -> None:
        """Raises SourceError if the store cannot be opened."""
        self._url, self._store = url, ObjectStore(url)

    def changes(self, known: Mapping[str, str], only: Collection[str] = ()) -> Changes:
        """See `Source`. A listing's digest is the store's token for it."""
        try:
            tokens = {unit: token for unit, token in self._store.tokens().items() if not only or unit in only}
            listed = self._store.listings([unit for unit, token in tokens.items() if known.get(unit) != token])
        except Exception as error:  # an exception class of the storage's library
            raise SourceError(f"the record in {self._url} cannot be read: {error}") from error
        changed = {}
        for unit, files in listed.items():
            if recorded := {path: file for path, file in files.items() if is_recorded(path)}:
                changed[unit] = Listing(tokens[unit], recorded)
        return Changes(changed, [unit for unit in known if unit not in tokens])

    def read(self, path: str, start: int = 0) -> tuple[bytes, str]:
        """See `Source`."""
        try:
            content = self._store.read(path, start)
        except FileNotFoundError:
            raise FileGoneError(path) from None
        except Exception as error:
            raise SourceError(f"the record in {self._url} cannot be read: {error}") from error
        return content, "" if start else hashlib.sha256(content).hexdigest()

    def waiting(self) -> list[dict[str, Any]] | None:
        """See `Source`."""
        return None

    def close(self) -> None:
        """See `Source`."""


def _token(entry: Mapping[str, Any]) -> str:
    return str(entry.get("ETag") or f"{entry.get('size')}-{entry.get('mtime') or entry.get('created')}")


def _parse(unit: str, content: bytes) -> dict[str, FileVersion]:
    """Returns the files that a listing names. Raises SourceError if one is outside its unit."""
    try:
        listed = json.loads(content)["files"]
        files = {path: FileVersion(int(size), str(version)) for path, (size, version) in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"the store's listing of {unit} cannot be read: {error!r}") from error
    for path in files:
        inside = path.removeprefix(f"{unit}/")
        if inside == path or any(not part or part.startswith(".") for part in inside.split("/")):
            raise SourceError(f"the store's listing of {unit} names {path!r}, which lies outside of it")
    return files
