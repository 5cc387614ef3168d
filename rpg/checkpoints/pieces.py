"""Writes and reads checkpoints in pieces: each rank writes the parts of tensors that it has, and reads those that it
needs.

A piece is a contiguous range of a flattened tensor, stored under the tensor's name. The reading ranks may be more or
fewer than the writing ranks, and may cut their tensors elsewhere: each copies the parts that overlap. So no rank ever
gathers a whole model, and any layout can read the checkpoint of another. DeepSpeed's universal checkpoint is the same
idea, but it is a second program that rewrites a finished checkpoint, and it knows only optimizers with Adam's two
moments.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rpg.processes import ranks
from specs.machine.files import sync
from specs.machine.standstill import show_work

_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NOTES = "notes"
_STRIP = 2**26
"""Bytes copied from a device at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in memory."""

    name: str
    """Name of the whole tensor; the same on every rank."""
    start: int
    """Index of the piece's first element in the flattened tensor."""
    values: Tensor
    """A view into the tensor, [n]; n may be 0."""


class StateCopy:
    """This rank's part of a checkpoint, copied to host memory first so that training continues while it is written."""

    def __init__(self) -> None:
        self._files: dict[str, list[memoryview]] = {}

    def pieces(self, stem: str, pieces: Iterable[Piece], notes: dict[str, Any] | None = None) -> None:
        """Adds a safetensors file of this rank with pieces, and notes of plain values."""
        copies = [(f"{piece.start}@{piece.name}", _on_host(piece.values)) for piece in pieces if piece.values.numel()]
        # The widest types come first, as safetensors requires for alignment; then by name, so that equal states give
        # equal files.
        copies.sort(key=lambda named: (-named[1].element_size(), named[0]))
        header: dict[str, Any] = {"__metadata__": {_NOTES: json.dumps(notes or {}, sort_keys=True)}}
        end = 0
        for name, values in copies:
            begin, end = end, end + values.nbytes
            shape = list(values.shape)
            header[name] = {"dtype": _DTYPES[values.dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = memoryview(len(text).to_bytes(8, "little") + text)
        body = [values.view(torch.uint8).numpy().data for _, values in copies]
        self._files[f"{stem}-rank{ranks.rank():05}.safetensors"] = [head, *body]

    def document(self, name: str, value: Any) -> None:
        """Adds a JSON file of plain values, on rank 0 only."""
        if ranks.rank() == 0:
            self._files[name] = [memoryview(json.dumps(value, indent=1).encode())]

    def values(self, stem: str, value: Any) -> None:
        """Adds a file of this rank with plain values and tensors, which `load_values` reads back."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._files[_values_file(stem)] = [buffer.getbuffer()]

    @property
    def num_bytes(self) -> int:
        """Returns the size of all files."""
        return sum(block.nbytes for blocks in self._files.values() for block in blocks)

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Writes and syncs the files. Returns their digests and sizes by name."""
        return {name: _write(directory / name, blocks) for name, blocks in self._files.items()}


class PieceFiles:
    """The pieces that any number of ranks wrote under one stem."""

    def __init__(self, directory: Path, stem: str) -> None:
        """Opens the files. Raises FileNotFoundError if no rank wrote any."""
        paths = sorted(directory.glob(f"{stem}-rank*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{directory} holds no {stem}")
        self._directory = directory
        self._files: list[Any] = [safe_open(path, framework="pt", device="cpu") for path in paths]
        self.notes: list[dict[str, Any]] = [json.loads(file.metadata()[_NOTES]) for file in self._files]
        """Notes of each rank."""
        self._index: dict[str, list[tuple[int, int, Any]]] = {}
        for file in self._files:
            for key in file.keys():  # noqa: SIM118  a method of safetensors' file, which is no mapping
                start, _, name = key.partition("@")
                values = file.get_slice(key)
                self._index.setdefault(name, []).append((int(start), values.get_shape()[0], values))

    def names(self) -> list[str]:
        """Returns the names of the whole tensors, sorted."""
        return sorted(self._index)

    def fill(self, piece: Piece) -> None:
        """Copies the values from the files into a piece in memory. Raises RuntimeError if the files lack some."""
        begin, end = piece.start, piece.start + piece.values.numel()
        filled = 0
        for start, count, values in self._index.get(piece.name, []):
            low, high = max(begin, start), min(end, start + count)
            if low < high:
                piece.values[low - begin : high - begin].copy_(values[low - start : high - start])
                filled += high - low
        if filled != end - begin:
            raise RuntimeError(f"{self._directory} holds {filled} of the {end - begin} values of {piece.name}")


def load_values(directory: Path, stem: str, *, rank: int | None = None) -> Any:
    """Returns the values that a rank, by default this one, gave to `StateCopy.values`; None if no such rank wrote."""
    path = directory / _values_file(stem, rank)
    return torch.load(path, weights_only=True) if path.exists() else None


def count_values(directory: Path, stem: str) -> int:
    """Returns how many ranks passed values to `StateCopy.values`."""
    return len(list(directory.glob(f"{stem}-rank*.pt")))


def _values_file(stem: str, rank: int | None = None) -> str:
    return f"{stem}-rank{ranks.rank() if rank is None else rank:05}.pt"


def _on_host(values: Tensor) -> Tensor:
    """Returns a copy in host memory."""
    values = values.detach()
    if values.device.type != "cuda" or values.nbytes < _STRIP:
        return values.to("cpu", copy=True)
    found = torch.empty(values.shape, dtype=values.dtype)
    staging = [torch.empty(_STRIP // values.element_size(), dtype=values.dtype, pin_memory=True) for _ in range(2)]
    copy_in_strips(values, found, staging)
    return found


def copy_in_strips(source: Tensor, target: Tensor, staging: Sequence[Tensor]) -> None:
    """Copies a tensor [n] from a device to the host in strips, through page-locked memory.

    While a strip arrives, all threads copy the strip before it to its target. A direct copy to pageable memory would
    use one thread, which waits for every new page.

    Args:
        staging: two buffers, each as long as a strip.
    """
    length = len(staging[0])
    arrivals: list[tuple[Tensor, Tensor, torch.cuda.Event | None]] = []
    for number, start in enumerate(range(0, len(source), length)):
        strip, into = source[start : start + length], target[start : start + length]
        through = staging[number % 2][: len(strip)]
        through.copy_(strip, non_blocking=True)
        arrivals.append((through, into, torch.cuda.current_stream().record_event() if strip.is_cuda else None))
        if len(arrivals) == 2:
            _copy_on(*arrivals.pop(0))
    for arrival in arrivals:
        _copy_on(*arrival)


def _copy_on(arrived: Tensor, into: Tensor, when: "torch.cuda.Event | None") -> None:
    if when:
        when.synchronize()
    into.copy_(arrived)


def _write(path: Path, blocks: Iterable[memoryview]) -> dict[str, Any]:
    """Writes a file, computes its digest while writing, and waits until the file is durable."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            for part in _parts(block.cast("B")):
                digest.update(part)
                _write_all(file, part)
                show_work()
        os.fsync(file.fileno())
    sync(path.parent)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _parts(block: memoryview, size: int = 2**22) -> Iterator[memoryview]:
    """Yields the block in strips that are short enough to stay in the cache between digest and write."""
    for start in range(0, len(block), size):
        yield block[start : start + size]


def _write_all(file: io.FileIO, part: memoryview) -> None:
    """Writes the whole part, because a single raw write may write less."""
    while part:
        part = part[file.write(part) :]
