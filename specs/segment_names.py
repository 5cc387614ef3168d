"""Names of segments, the files that hold a run's rows: the trainer writes them, and the store reads them."""

import hashlib
import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

_NAME = re.compile(r"([ac])(\d+)-s(\d+)-(\d+)(?:-r(\d+)of(\d+))?-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """`a<attempt>-s<first step>-<last step>-<digest>.parquet`; with `c<generation>`, others were merged into it.

    Where several ranks wrote a table, each has a share of its rows: `...<last step>-r<rank>of<ranks>-<digest>.parquet`.
    """

    is_compacted: bool
    number: int
    """Which start of the trainer wrote it; of a compacted one how often rows of it were merged."""
    first_step: int
    last_step: int
    digest: str
    """Digest of the content: the first 16 hexadecimal digits of its SHA-256; empty before it is written."""
    rank: int = 0
    """Whose share it is, from 0."""
    ranks: int = 1
    """How many shares there are. The rows of none of them count before all are on disk."""

    def __str__(self) -> str:
        digest = f"-{self.digest}" if self.digest else ""
        kind = "c" if self.is_compacted else "a"
        share = f"-r{self.rank:04}of{self.ranks:04}" if self.ranks > 1 else ""
        return f"{kind}{self.number:04}-s{self.first_step:06}-{self.last_step:06}{share}{digest}.parquet"

    def share(self, rank: int) -> "SegmentName":
        """Segment of a share that the rank writes beside it; without the digest, which the writer alone knows."""
        return replace(self, digest="", rank=rank)

    @property
    def first_share(self) -> "SegmentName":
        """Name of rank 0's share, the same for all shares of the same rows."""
        return self.share(0)

    @property
    def stem(self) -> str:
        """The name up to the digest."""
        return str(replace(self, digest="")).removesuffix(".parquet")


def parse_segment_name(name: str) -> SegmentName | None:
    """Parts of a file's name; None where it is not named like a segment."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, number, first_step, last_step, rank, ranks, digest = match.groups()
    return SegmentName(
        kind == "c", int(number), int(first_step), int(last_step), digest, int(rank or 0), int(ranks or 1)
    )


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
        """Digest of what was written so far."""
        return self._hash.hexdigest()[:16]
