"""What a launcher chose, written where `rpg show` finds it: the run directory's launch.json."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.state import read_json, write_json
from rpg.files import now

_PASSED_ON = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "VLLM_", "RPG_", "CUDA_", "DS_", "LD_")
_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "RPG_SLOTS", "RPG_SLOT_DIR", "RPG_GPUS")
"""What is said of this machine's GPUs holds for no other."""


def write_launch(run_directory: Path, launcher: str, **chosen: Any) -> None:
    """Replaces launch.json."""
    write_json(run_directory / "launch.json", {"launcher": launcher, "started_at": now(), **chosen})


def read_launch(run_directory: Path) -> dict[str, Any]:
    """The last launch; empty where there was none."""
    return read_json(run_directory / "launch.json")


def passed_on(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that ranks on other machines get too."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PASSED_ON) and name not in _NOT_PASSED_ON
    }
