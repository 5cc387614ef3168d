"""Names of segments, the files with a run's rows. The trainer writes these files, and the store reads them."""

import hashlib
import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

_NAME = re.compile(r"([ac])(\d+)-s(\d+)-(\d+)(?:-r(\d+)of(\d+))?-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The name `a<attempt>-s<first step>-<last step>-<digest>.parquet`, or `c<generation>-...` for a merged segment.

    If several ranks wrote a table, each file has a share of its rows: `...<last
    step>-r<rank>of<ranks>-<digest>.parquet`.
    """

    is_compacted: bool
    number: int
    """Number of the trainer's start that wrote the segment. For a compacted segment, the number of times that its rows
    were merged."""
    first_step: int
    last_step: int
    digest: str
    """Digest of the content (the first 16 hexadecimal digits of its SHA-256); empty before it is written."""
    rank: int = 0
    """Rank that wrote the share, from 0."""
    ranks: int = 1
    """Number of shares. Rows count only once all shares are on disk."""

    def __str__(self) -> str:
        digest = f"-{self.digest}" if self.digest else ""
        kind = "c" if self.is_compacted else "a"
        share = f"-r{self.rank:04}of{self.ranks:04}" if self.ranks > 1 else ""
        return f"{kind}{self.number:04}-s{self.first_step:06}-{self.last_step:06}{share}{digest}.parquet"

    def share(self, rank: int) -> "SegmentName":
        """Returns the name of another rank's share of the same rows. It lacks the digest, which only the writer
        knows."""
        return replace(self, digest="", rank=rank)

    @property
    def first_share(self) -> "SegmentName":
        """Name of rank 0's share, which is the same for all shares of the same rows."""
        return self.share(0)

    @property
    def stem(self) -> str:
        """Returns the name up to the digest."""
        return str(replace(self, digest="")).removesuffix(".parquet")


def parse_segment_name(name: str) -> SegmentName | None:
    """Returns the parts of a segment's file name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, number, first_step, last_step, rank, ranks, digest = match.groups()
    return SegmentName(
        kind == "c", int(number), int(first_step), int(last_step), digest, int(rank or 0), int(ranks or 1)
    )


def content_digest(path: Path) -> str:
    """Returns the digest for the name of a segment with this content. Reads the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class DigestedFile(io.FileIO):
    """A new file, written sequentially, with the digest of its content."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Writes all of the content."""
        rest = memoryview(content).cast("B")
        self._hash.update(rest)
        size = len(rest)
        while len(rest):
            rest = rest[super().write(rest) :]
        return size

    @property
    def digest(self) -> str:
        """Returns the digest of the content so far."""
        return self._hash.hexdigest()[:16]
