"""Publishing a stage's result: filled aside, hashed, synced, renamed. What has its final name is whole."""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipelines.home import Home
from pipelines.state import read_json, write_json
from rpg.files import now, versions_of

_CHEAP_BYTES = 8 * 2**20
"""Files up to this size are hashed again before a result is taken as it is; of larger ones the size is compared."""
_PACKAGES = ("rpg-experiments", "torch", "transformers", "datasets", "reasoning-gym", "deepspeed")
"""Packages that shape what a stage makes."""


@contextlib.contextmanager
def filling(output: Path) -> Iterator[Path]:
    """A new directory beside `output` to fill; gone at the end if it was not published."""
    output.parent.mkdir(parents=True, exist_ok=True)
    _sweep(output)
    aside = output.parent / f".{output.name}.{os.getpid()}.{time.monotonic_ns()}"
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(output: Path) -> None:
    """Removes what a killed process left of the same result; its lock is ours now, so nobody is filling it."""
    for left in output.parent.glob(f".{output.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def publish(aside: Path, output: Path, manifest: dict[str, Any]) -> None:
    """Gives a filled directory its manifest and its name.

    Args:
        aside: what `filling` gave.
        output: the final name; what stands there (damaged, or the same) is replaced.
        manifest: stage, fingerprint, identity, inputs; files, created_at and versions are added.
    """
    files = {}
    for file in sorted(path for path in aside.rglob("*") if path.is_file()):
        _sync(file)
        files[str(file.relative_to(aside))] = {"sha256": digest_of(file), "bytes": file.stat().st_size}
    write_json(
        aside / "manifest.json", manifest | {"files": files, "created_at": now(), "versions": versions_of(*_PACKAGES)}
    )
    for directory in [*(path for path in aside.rglob("*") if path.is_dir()), aside]:
        _sync(directory)
    if output.exists():
        old = output.parent / f".{output.name}.old"
        os.replace(output, old)
        os.replace(aside, output)
        shutil.rmtree(old)
    else:
        os.replace(aside, output)
    _sync(output.parent)


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, hex."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def damage(directory: Path, manifest_name: str, fingerprint: str) -> str:
    """What is wrong with a published result; empty where it can be taken as it is.

    Sizes of all files are compared, digests of those that are cheap to read.
    """
    manifest = read_json(directory / manifest_name)
    if manifest.get("fingerprint") != fingerprint:
        return f"{manifest_name} is missing or of another fingerprint"
    for name, entry in manifest.get("files", {}).items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        wanted = entry if isinstance(entry, dict) else {"sha256": entry}
        size = file.stat().st_size
        if size != wanted.get("bytes", size):
            return f"{name} has {size} bytes, not {wanted['bytes']}"
        if size <= _CHEAP_BYTES and digest_of(file) != wanted["sha256"]:
            return f"{name} has another content than its manifest says"
    return ""


@contextlib.contextmanager
def locked(home: Home, name: str, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds a lock between processes; `waiting` is called while another one holds it, and may raise to give up."""
    path = home.lock(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            waiting()
    try:
        yield
    finally:
        lock.release()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
