"""Records the provenance of a training process: its code, packages, machine, and the environment variables that affect
it.

It is written with each attempt of a run, since a run may resume elsewhere with other code or packages.
"""

import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import torch

from specs.schema.experiment import Experiment
from specs.secrets import HIDDEN, NAMES, hide, masked

DISTRIBUTION = "rpg-experiments"
STEERING = ("RPG_", "CUDA_", "CUBLAS_", "NCCL_", "NVIDIA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "DS_", "VLLM_")
"""Prefixes of the names of recorded variables."""
_GIT_SECONDS = 20.0
_FIELD = re.compile(r"^(Name|Version): *(.*\S)", re.MULTILINE)


def provenance_of(experiment: Experiment) -> dict[str, Any]:
    """Returns the provenance of an attempt: that of its process, and the rows that the spec makes it record."""
    return {**_process(), "record": experiment.record.model_dump(mode="json")}


@cache
def _process() -> dict[str, Any]:
    """Returns code, packages, machine and variables of this process. They are determined once.

    Returns:
        code: version; of a Git checkout also commit, and diff: SHA-256 of uncommitted changes, empty without changes.
        packages: name==version of every installed distribution, sorted; lock: SHA-256 of those lines.
        machine: python, platform, cpu, cpus and, on a machine with GPUs, gpu, gpus, cuda and driver.
        environment: the variables whose names have a prefix in `STEERING`, with secrets hidden.
    """
    packages = sorted({_name_and_version(package) for package in distributions()}, key=str.lower)
    return {
        "code": _code(Path(__file__).parents[2]),
        "packages": packages,
        "lock": hashlib.sha256("".join(f"{line}\n" for line in packages).encode()).hexdigest(),
        "machine": _machine(),
        "environment": steering_variables(dict(os.environ)),
    }


def _name_and_version(package: Distribution) -> str:
    """Returns NAME==VERSION from the beginning of the package's metadata, because parsing all metadata takes over half
    a second."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    head = dict(_FIELD.findall(text.partition("\n\n")[0]))
    return f"{head.get('Name') or package.name}=={head.get('Version') or package.version}"


def steering_variables(environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment variables that affect training, without secrets."""
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith(STEERING)}
    secret = environment.get(NAMES, "").split(",")
    return {name: HIDDEN if name in secret else hide(value, environment) for name, value in masked(chosen).items()}


def _code(root: Path) -> dict[str, str]:
    """Returns the product's version and, if it runs from a Git checkout, the state of that checkout."""
    try:
        code = {"version": distribution(DISTRIBUTION).version}
    except PackageNotFoundError:
        code = {"version": ""}
    # An environment may be inside another project's checkout: only a file that Git tracks counts.
    if _git(root, "ls-files", "--error-unmatch", "rpg/__init__.py") is None:
        return code
    commit, diff = _git(root, "rev-parse", "HEAD"), _git(root, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if commit is None or diff is None or untracked is None:
        return code
    digest = hashlib.sha256(diff)
    names = sorted(name for name in untracked.decode(errors="surrogateescape").split("\0") if name.endswith(".py"))
    for name in names:
        digest.update(f"{name}\0".encode(errors="surrogateescape") + (root / name).read_bytes())
    return code | {"commit": commit.decode().strip(), "diff": digest.hexdigest() if diff or names else ""}


def _git(root: Path, *arguments: str) -> bytes | None:
    """Returns Git's output; None without Git, outside a checkout, or if Git refuses."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count() or 0,
    }
    if torch.cuda.is_available():
        machine |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda or torch.version.hip or "",
            "driver": _driver(),
        }
    return machine


def _cpu() -> str:
    """Returns the processor's model; if Linux does not report it, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _driver() -> str:
    """Returns the version of NVIDIA's driver; empty if unknown."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
