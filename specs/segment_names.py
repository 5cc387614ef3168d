"""Names of segments, the files that hold a run's rows: the trainer writes them, and the store reads them."""

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"([ac])(\d+)-s(\d+)-(\d+)(?:-([0-9a-f]{16}))?\.parquet")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """`a<attempt>-s<first step>-<last step>-<digest>.parquet`; with `c<generation>`, others were merged into it."""

    is_compacted: bool
    number: int
    """Which start of the trainer wrote it; of a compacted one how often rows of it were merged."""
    first_step: int
    last_step: int
    digest: str
    """Of the content: the first 16 hexadecimal digits of its SHA-256; empty in names of earlier versions."""

    def __str__(self) -> str:
        digest = f"-{self.digest}" if self.digest else ""
        kind = "c" if self.is_compacted else "a"
        return f"{kind}{self.number:04}-s{self.first_step:06}-{self.last_step:06}{digest}.parquet"


def parse_segment_name(name: str) -> SegmentName | None:
    """What a file's name says; None where it is not named like a segment."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return SegmentName(match[1] == "c", int(match[2]), int(match[3]), int(match[4]), match[5] or "")


def content_digest(path: Path) -> str:
    """The digest that a segment of this content has in its name. Reads the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class DigestedFile(io.FileIO):
    """A new file that is written from its beginning to its end, and the digest of what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Writes all of it."""
        rest = memoryview(content).cast("B")
        self._hash.update(rest)
        size = len(rest)
        while len(rest):
            rest = rest[super().write(rest) :]
        return size

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return self._hash.hexdigest()[:16]
