"""Digests of files and directories that are too large to be read at every plan."""

import hashlib
from functools import lru_cache
from pathlib import Path

from specs.machine.files import digest
from specs.machine.manifests import NOTES

_WHOLE_FILE = 64 * 2**20
_END = 2**20


def directory_digest(directory: Path) -> str:
    """SHA-256, hexadecimal, of the names and the contents of a directory's files; see `file_digest`."""
    content = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != NOTES:
            content.update(f"{file.relative_to(directory)}\0{file_digest(file)}\n".encode())
    return content.hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256, hexadecimal, of a file. Of one beyond 64 MiB the first and the last MiB are hashed, with its size and
    its time of change: a model of many gigabytes cannot be read at every plan."""
    status = file.stat()
    return _file_digest(str(file), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(path: str, size: int, modified_ns: int) -> str:
    if size <= _WHOLE_FILE:
        return digest(Path(path))
    with open(path, "rb") as file:
        ends = hashlib.sha256(f"{size} {modified_ns} ".encode() + file.read(_END))
        file.seek(-_END, 2)
        ends.update(file.read())
    return ends.hexdigest()
