"""Unpacks the home that an earlier version left: see earlier_home/make.py."""

import os
import sqlite3
import tarfile
from pathlib import Path

RECORDED = Path(__file__).with_name("earlier_home")
ROOT = "/tmp/recorded-home"
"""Directory of the recording, as its files name it."""


def unpack(place: Path) -> None:
    """Unpacks everything and puts its new place in."""
    with tarfile.open(RECORDED / "home.tar.xz") as archive:
        archive.extractall(place, filter="data")
        for entry in archive:
            changed = int(entry.pax_headers["mtime"].replace(".", ""))
            os.utime(place / entry.name, ns=(changed, changed))
    for path in place.rglob("*"):
        if path.suffix in (".json", ".html", ".log") and ROOT in (text := path.read_text()):
            path.write_text(text.replace(ROOT, str(place)))
    with sqlite3.connect(place / "home" / "prefect" / "prefect.db") as database:
        database.execute("UPDATE flow_run SET parameters = replace(parameters, ?, ?)", (ROOT, str(place)))
    database.close()
