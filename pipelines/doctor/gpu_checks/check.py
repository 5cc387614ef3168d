"""One check: what it needs, where it computes, and what came of it. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "failed", "skipped"]
Figures = dict[str, float | str]
"""What a check measured; units are in the names."""
Scope = Literal["gpu", "host", "all"]
"""gpu: every rank alone, on its own GPU. host: the first rank of each host, which sees the host's GPUs. all: the ranks
together, in one process group."""


_ENGINE_SECONDS = 1800.0


class CheckFailedError(Exception):
    """The measured value is not as it should be."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Device and directory that a check computes on."""

    device: "torch.device"
    directory: Path
    """Empty at first, and deleted afterwards. Ranks that check together share it."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """That in which this device trains by default."""
        return "bfloat16" if self.device.type == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name."""

    name: str
    function: str
    """`MODULE.FUNCTION` in this folder; it takes a Bench, returns figures, and raises CheckFailedError."""
    about: str
    """What works where it passes."""
    remedy: str
    """What to do where it fails."""
    scope: Scope = "gpu"
    ranks: int = 1
    """It needs so many."""
    gpus: int = 0
    """It needs so many GPUs on the host; 0: a CPU will do."""
    package: Literal["", "vllm"] = ""
    """It needs this optional package."""
    limit_seconds: float = 180.0
    """After these it is killed and has failed. A check of vLLM: after these without progress."""

    @property
    def most_seconds(self) -> float:
        """Seconds that it may take in all. An engine's first start compiles, which may take minutes; its log grows
        then, or its processes compute."""
        return _ENGINE_SECONDS if self.package == "vllm" else self.limit_seconds

    def load(self) -> Callable[[Bench], Figures]:
        """Imports the function."""
        module, _, name = self.function.partition(".")
        function: Callable[[Bench], Figures] = getattr(import_module(f"pipelines.doctor.gpu_checks.{module}"), name)
        return function


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check on one rank."""

    check: str
    status: Status
    message: str = ""
    """Why it failed or was skipped."""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    rank: int = 0
    host: str = ""
