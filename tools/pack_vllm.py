#!/usr/bin/env python3
"""Packs vLLM's CUDA wheel and the wheels that it needs into small uploads, for a GPU machine without a network.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        -d WHEELS vllm==0.32.0                           # and each package that vLLM imports
    python tools/pack_vllm.py pack WHEELS OUT            # OUT/upload-1, OUT/upload-2, each below 64 MiB
    cat OUT/upload-*/part-* | tar -xJ -C SITE            # on that machine
    python tools/pack_vllm.py check SITE OUT/upload-1/digests.json
    PYTHONPATH=SITE python benchmarks/gpu.py campaign --parts vllm

WHEELS holds the wheels, for that machine's Python. GPU code for architectures other than `--architecture` becomes
zeros, which take no space; libraries keep their layout, so that they load. Parts of vLLM that no dense or
mixture-of-experts model needs are left out. The machine has torch and transformers itself, and needs `xz`.
"""

import argparse
import hashlib
import io
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20
_LEFT_OUT = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs")
"""Beginnings of the names of files that are not packed: kernels of other architectures, and a server's binary."""
_FAT_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_FAT_MAGIC = 0xBA55ED50
_CUBIN = 2
"""Kind of an entry that holds code of a GPU. Kind 1 is PTX, which a driver compiles."""
_LONGEST_HEADER = 4096


def without_other_gpus(library: bytes, architecture: int) -> bytes:
    """Returns a shared library in which the GPU code for all other architectures, and all PTX, is zeros."""
    kept = bytearray(library)
    for begin, size in _sections(library):
        place, end = begin, begin + size
        while place + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, place)
            if magic != _FAT_MAGIC:
                place += 8
                continue
            place += header
            _zero_entries(kept, place, place + length, architecture)
            place += length
    return bytes(kept)


def _zero_entries(library: bytearray, place: int, end: int, architecture: int) -> None:
    """Zeroes the entries of one fat binary."""
    while place + 0x40 <= end:
        kind, _, header, length = struct.unpack_from("<HHIQ", library, place)
        (of,) = struct.unpack_from("<I", library, place + 0x1C)
        if kind not in (1, _CUBIN) or not 0x20 <= header <= _LONGEST_HEADER:
            return  # padding after the last entry
        if (kind, of) != (_CUBIN, architecture):
            library[place + header : place + header + length] = bytes(length)
        place += header + length


def _sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Yields offset and size of each ELF section that holds fat binaries."""
    if library[:4] != b"\x7fELF":
        return
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + number * entry) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if library[name : library.index(b"\0", name)] in _FAT_SECTIONS:
            yield header[4], header[5]


def files_of(wheels: Path, architecture: int) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of each file of the wheels, in order."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith("/") or name.startswith(_LEFT_OUT):
                    continue
                content = archive.read(name)
                _, _, pure = name.partition(".data/purelib/")
                yield pure or name, without_other_gpus(content, architecture) if name.endswith(".so") else content


def pack(wheels: Path, out: Path, *, architecture: int, limit: int) -> int:
    """Writes the uploads. Returns their number.

    Args:
        wheels: directory of the wheels.
        out: directory that gets the uploads; it must be empty or new.
        architecture: that of the GPU, such as 90.
        limit: bytes of an upload.
    """
    if not list(wheels.glob("*.whl")):
        sys.exit(f"{wheels} holds no wheel")
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty: name a new directory")
    out.mkdir(parents=True, exist_ok=True)
    packed, digests = out / "site.tar.xz", {}
    with (
        open(packed, "wb") as file,
        subprocess.Popen(["xz", "-T0", "-6", "-c"], stdin=subprocess.PIPE, stdout=file) as xz,
    ):
        assert xz.stdin
        with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
            for name, content in files_of(wheels, architecture):
                digests[name] = hashlib.sha256(content).hexdigest()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        xz.stdin.close()
    if xz.returncode:
        sys.exit(f"xz failed with {xz.returncode}")
    listed = json.dumps(digests, indent=0)
    room = limit - MIB  # for the digests and the names of the parts
    number = 0
    with open(packed, "rb") as file:
        while part := file.read(room):
            number += 1
            upload = out / f"upload-{number}"
            upload.mkdir()
            (upload / f"part-{number:02}").write_bytes(part)
    (out / "upload-1" / "digests.json").write_text(listed, encoding="utf-8")
    packed.unlink()
    return number


def check(site: Path, digests: Path) -> list[str]:
    """Returns the names of the files in a directory that are missing or differ from those that were packed."""
    expected = json.loads(digests.read_text(encoding="utf-8"))
    return [
        name
        for name, digest in expected.items()
        if not (site / name).is_file() or hashlib.sha256((site / name).read_bytes()).hexdigest() != digest
    ]


def main(arguments: list[str]) -> None:
    """Packs wheels, or checks the unpacked files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("wheels", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--architecture", type=int, default=90, help="the GPU's: 90 for H100 and H200")
    packing.add_argument("--limit-mib", type=int, default=64, help="size of an upload")
    checking = commands.add_parser("check")
    checking.add_argument("site", type=Path)
    checking.add_argument("digests", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "check":
        if wrong := check(asked.site, asked.digests):
            sys.exit(f"{len(wrong)} files are missing or differ, {wrong[0]} first")
        print("all files are those that were packed")
        return
    count = pack(asked.wheels, asked.out, architecture=asked.architecture, limit=asked.limit_mib * MIB)
    print(f"{count} uploads in {asked.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
