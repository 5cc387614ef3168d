"""One check: its requirements, its device, and its result. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "failed", "skipped"]
Figures = dict[str, float | str]
"""Measurements of a check; units are in the names."""
Scope = Literal["gpu", "host", "all"]
"""gpu: every rank runs alone, on its own GPU. host: the first rank of each host runs alone and sees all of the host's
GPUs. all: the ranks run together, in one process group."""


_ENGINE_SECONDS = 1800.0


class CheckFailedError(Exception):
    """Failure of a check whose measured value is outside its accepted range."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The device and the directory of a check."""

    device: "torch.device"
    directory: Path
    """Empty at first, and deleted afterwards. Ranks that run a check together share it."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """Returns the precision in which this device trains by default."""
        return "bfloat16" if self.device.type == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its requirements."""

    name: str
    function: str
    """`MODULE.FUNCTION` in this folder; it takes a Bench, returns figures, and raises CheckFailedError."""
    about: str
    """The feature that works if the check passes."""
    remedy: str
    """What to do if the check fails."""
    scope: Scope = "gpu"
    ranks: int = 1
    """Number of ranks that the check needs."""
    gpus: int = 0
    """Number of GPUs that the check needs on the host. 0: a CPU is enough."""
    package: Literal["", "vllm"] = ""
    """Optional package that the check needs. Empty if it needs none."""
    limit_seconds: float = 180.0
    """Seconds after which the check is killed and counts as failed. For a check of vLLM: seconds without progress."""

    @property
    def most_seconds(self) -> float:
        """Returns the most seconds that the check may take in all. An engine's first start may compile for minutes; its
        growing log or CPU time counts as progress."""
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
    """Reason why the check failed or was skipped."""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    rank: int = 0
    host: str = ""
