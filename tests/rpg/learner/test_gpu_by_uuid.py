"""DeepSpeed on a GPU that CUDA_VISIBLE_DEVICES names by its UUID, as a slot does. NVML and the GPU are made up here."""

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.more

NVML = """
class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetMemoryInfo(handle):
    raise AssertionError("asked of another GPU")
"""
ASKS = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
from deepspeed.accelerator import get_accelerator
{before}
accelerator = get_accelerator()
assert accelerator.device_name() == "cuda"
accelerator.total_memory = lambda index: 80
accelerator.memory_allocated = lambda index: 30
print("free:", accelerator.available_memory())
"""


def ask(tmp_path: Path, before: str) -> "subprocess.CompletedProcess[str]":
    """What DeepSpeed says of the GPU's free memory, in a process of its own, where pynvml can be imported."""
    (tmp_path / "pynvml.py").write_text(NVML)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "DS_ACCELERATOR": "cuda",
        "CUDA_VISIBLE_DEVICES": "GPU-5f1c2b3a-0000-1111-2222-333344445555",
    }
    command = [sys.executable, "-W", "ignore", "-c", ASKS.format(before=before)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_free_memory_is_asked_of_torch(tmp_path: Path) -> None:
    done = ask(tmp_path, "from rpg.learner.deepspeed_inside import ask_torch_for_memory\nask_torch_for_memory()")
    assert done.returncode == 0, done.stderr
    assert "free: 50" in done.stdout


def test_deepspeed_still_reads_a_uuid_as_a_number(tmp_path: Path) -> None:
    done = ask(tmp_path, "")
    mended = "DeepSpeed takes UUIDs now: ask_torch_for_memory in rpg/learner/deepspeed_inside.py can go"
    assert done.returncode != 0, mended
    assert "ValueError: invalid literal for int()" in done.stderr, f"{mended}\n{done.stderr}"


def test_a_learner_asks_torch_before_anything_is_initialized() -> None:
    """The call stands before `deepspeed.initialize`, which asks for the memory."""
    source = (ROOT / "rpg" / "learner" / "deepspeed.py").read_text()
    assert source.index("        ask_torch_for_memory()\n") < source.index("deepspeed.initialize(")
