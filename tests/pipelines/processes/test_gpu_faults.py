"""Faults of GPUs, as drivers and kernels report them; the programs that tell of them are played by scripts."""

import socket
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.doctor.gpu_checks.session import _on_all
from pipelines.doctor.installation import examine
from pipelines.home.examined import note_examined
from pipelines.home.home import Home
from pipelines.jobs.plan import never_examined
from pipelines.processes.gpu_faults import gpu_faults
from pipelines.processes.supervisor import failure
from specs.schema.launchers import SlurmLauncher

DMESG = """2026-11-27T10:00:00,000000+00:00 NVRM: Xid (PCI:0000:65:00): 31, pid=12, name=python, MMU Fault
2026-11-27T11:00:00,000000+00:00 NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus.
2026-11-27T12:00:00,000000+00:00 usb 1-1: new device
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs, which print the files `ecc`, `rows` and `dmesg.txt` beside them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "ecc": "0, 0\n1, 0\n",
        "rows": "0000:17:00.0, 0, 0\n0000:65:00.0, 0, 0\n",
        "dmesg.txt": "",
    }.items():
        (programs / name).write_text(text)
    scripts = {
        "nvidia-smi": f'case "$1" in *remapped*) cat {programs}/rows;; *ecc*) cat {programs}/ecc;; esac',
        "dmesg": f"cat {programs}/dmesg.txt",
    }
    for name, body in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return programs


def test_healthy_gpus_have_no_faults(told: Path) -> None:
    assert gpu_faults() == []
    (told / "ecc").write_text("0, [N/A]\n")  # a card without ECC
    assert gpu_faults() == []


def test_errors_of_memory_and_of_hardware_are_faults_and_a_programs_are_not(told: Path) -> None:
    (told / "ecc").write_text("0, 0\n1, 2\n")
    (told / "rows").write_text("0000:17:00.0, 1, 0\n0000:65:00.0, Yes, Yes\n")
    (told / "dmesg.txt").write_text(DMESG)
    assert gpu_faults() == [
        "GPU 1 has had 2 uncorrected memory errors since the driver was loaded (ECC)",
        "GPU 0000:17:00.0 replaces a memory row when it is reset: drain the node and reset it",
        "GPU 0000:65:00.0 could not replace a memory row: exchange the GPU",
        "GPU 0000:65:00: XID 79, has fallen off the bus, at 2026-11-27 11:00:00",
    ]
    later = datetime.fromisoformat("2026-11-27T11:30:00+00:00").timestamp()
    assert not any("XID" in fault for fault in gpu_faults(since=later))


def test_a_kernels_log_that_may_not_be_read_tells_nothing(told: Path) -> None:
    (told / "dmesg").write_text("#!/bin/sh\necho 'dmesg: read kernel buffer failed' >&2; exit 1\n")
    assert gpu_faults() == []


def test_no_gpu_has_no_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_faults() == []


def test_the_doctor_and_the_recorded_cause_of_a_failure_name_them(told: Path, tmp_path: Path) -> None:
    (told / "dmesg.txt").write_text(DMESG)
    found = [finding for finding in examine(Home(tmp_path / "home")) if finding.name == "gpu faults"]
    assert [(finding.status, finding.message) for finding in found] == [("broken", gpu_faults()[0])]
    error = failure("train", 1, tmp_path / "log", faults=gpu_faults())
    assert str(error).startswith("train exited with code 1; GPU 0000:65:00: XID 79, has fallen off the bus, at 2026")


@pytest.mark.usefixtures("told")
def test_a_plan_asks_for_a_check_of_gpus_that_had_none(home: Home) -> None:
    here = _on_all(1)
    on_slurm = here.model_copy(update={"launcher": SlurmLauncher(type="slurm")})
    assert [each.message for each in never_examined([here, on_slurm], home)] == [
        "the GPUs of this machine were never checked",
        "GPUs of this launcher were never checked",
    ]
    note_examined(home, {socket.gethostname()}, "local")
    assert [each.path for each in never_examined([here, on_slurm], home)] == [("launcher", "type")]
    note_examined(home, {"node-1", ""}, "slurm")
    assert not list(never_examined([here, on_slurm], home))
    on_cpu = here.model_copy(update={"resources": here.resources.model_copy(update={"device": "cpu"})})
    assert not list(never_examined([on_cpu], Home(home.root / "another")))
