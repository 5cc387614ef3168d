"""Uploads for a GPU machine without a network: files arrive to the byte, without code for other GPUs."""

import random
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.pack_vllm import MIB, check, main, pack, without_other_gpus

CODE = {(2, 80): b"code for an A100", (2, 90): b"code for an H100", (1, 90): b"PTX for an H100 "}
"""Kind and architecture of an entry of a fat binary -> its content."""


def library() -> bytes:
    """An ELF file whose only section, beside that of the names, holds a fat binary with this code."""
    fat = b""
    for (kind, architecture), code in CODE.items():
        head = struct.pack("<HHIQ", kind, 0, 0x40, len(code)).ljust(0x1C, b"\0") + struct.pack("<I", architecture)
        fat += head.ljust(0x40, b"\0") + code
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(fat)) + fat
    names = b"\0.nv_fatbin\0.shstrtab\0"
    sections = [(0, 0, 0), (1, 0x40, len(fat)), (12, 0x40 + len(fat), len(names))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    head = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 0x40 + len(fat) + len(names))
    return head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(sections), 2) + fat + names + table


def test_code_for_other_gpus_becomes_zeros_and_all_else_stays() -> None:
    expected = library()
    for (kind, architecture), code in CODE.items():
        if (kind, architecture) != (2, 90):
            expected = expected.replace(code, bytes(len(code)))
    assert without_other_gpus(library(), 90) == expected
    assert without_other_gpus(b"no library", 90) == b"no library"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    contents = {
        "vllm/_C.abi3.so": library(),
        "vllm/weights.bin": random.Random(0).randbytes(5 * MIB // 2),
        "vllm/third_party/deep_gemm/kernel.so": b"not needed",
        "vllm-0.32.0.data/purelib/vllm/top.py": b"x = 1\n",
    }
    with zipfile.ZipFile(directory / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", "w") as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)
    return directory


def test_uploads_are_below_the_limit_and_arrive_to_the_byte(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, site = tmp_path / "out", tmp_path / "site"
    assert pack(wheels, out, architecture=90, limit=2 * MIB) == 3
    sizes = [sum(file.stat().st_size for file in upload.iterdir()) for upload in sorted(out.iterdir())]
    assert len(sizes) == 3
    assert max(sizes) < 2 * MIB
    site.mkdir()
    unpack = f"cat {out}/upload-*/part-* | tar -xJ -C {site}"
    subprocess.run(unpack, shell=True, check=True)
    assert sorted(str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()) == [
        "vllm/_C.abi3.so",
        "vllm/top.py",
        "vllm/weights.bin",
    ]
    assert (site / "vllm/_C.abi3.so").read_bytes() == without_other_gpus(library(), 90)
    digests = out / "upload-1" / "digests.json"
    main(["check", str(site), str(digests)])
    assert "all files are those that were packed" in capsys.readouterr().out
    (site / "vllm/top.py").write_text("x = 2\n")
    assert check(site, digests) == ["vllm/top.py"]
    with pytest.raises(SystemExit, match=r"1 files are missing or differ, vllm/top\.py first"):
        main(["check", str(site), str(digests)])


def test_a_directory_that_is_not_new_is_refused(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not empty: name a new directory"):
        main(["pack", str(wheels), str(tmp_path)])
    with pytest.raises(SystemExit, match="holds no wheel"):
        main(["pack", str(tmp_path), str(tmp_path / "out")])
