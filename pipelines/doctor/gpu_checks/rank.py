"""One rank of the checks, started by a launcher like a run's ranks.

`python -m pipelines.doctor.gpu_checks.rank JOB.json`

JOB: {device: cpu|cuda, checks: names, out: directory of the results, scratch: directory that all ranks see}. The rank
starts a process for each check, with a time limit. Ranks begin a check together: they meet in the store of the first
one, at the address that the launcher chose, and so do the processes of a check that all ranks run together.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipelines.doctor.gpu_checks.catalogue import CHECKS
from pipelines.doctor.gpu_checks.check import Check, Result
from specs.machine.files import write_json
from specs.machine.parent import before_torch, die_with_parent

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_SECONDS = 5.0
_COMPUTES = 0.02
"""CPU seconds per second above which a process counts as computing."""
_LATE_SECONDS = 60.0
"""Seconds by which another rank may finish a check after this one."""


class CheckingRank:
    """A rank that runs its checks in step with the other ranks."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._device: str = job["device"]
        self._checks = [check for check in CHECKS if check.name in job["checks"]]
        self._rank, self._world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._out, self._scratch = Path(job["out"]), Path(job["scratch"])
        self._store: Store | None = None
        if self._world > 1:
            from rpg.processes.store import launch_store

            self._store = launch_store(keeps=self._rank == 0)

    def run(self) -> None:
        """Writes a result for every check."""
        for check in self._checks:
            reason = self._reason_to_skip(check)
            result = self._skipped(check, reason) if reason else self._make(check)
            if result:
                write_json(self._result(check), asdict(result), allow_nan=True)
            self._meet(check)

    def _result(self, check: Check) -> Path:
        return self._out / f"{check.name}-{self._rank:05}.json"

    def _reason_to_skip(self, check: Check) -> str:
        if check.scope == "host" and self._local_rank:
            return "made by the first rank of the host"
        if self._world < check.ranks:
            return f"needs {check.ranks} ranks"
        if check.package and find_spec(check.package) is None:
            return "vLLM is not installed"
        if check.gpus and self._device == "cpu":
            return "needs a GPU"
        if check.gpus > 1 and len(self._gpus()) < check.gpus:
            return f"needs {check.gpus} GPUs on a host"
        return ""

    def _gpus(self) -> list[str]:
        """Returns the GPUs that this rank sees, as CUDA_VISIBLE_DEVICES names them."""
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            return visible.split(",")
        import torch

        return [str(index) for index in range(torch.cuda.device_count())]

    def _skipped(self, check: Check, reason: str) -> Result:
        return Result(check.name, "skipped", reason, rank=self._rank, host=socket.gethostname())

    def _make(self, check: Check) -> Result | None:
        """Runs the check's process, which normally writes its own result. If it did not, returns a result with the
        cause of the process's end."""
        directory = self._scratch / check.name / ("all" if check.scope == "all" else str(self._rank))
        directory.mkdir(parents=True, exist_ok=True)
        log = self._out / f"{check.name}-{self._rank:05}.log"
        together = check.scope == "all" and self._store is not None
        command = [
            sys.executable,
            "-P",
            "-m",
            "pipelines.doctor.gpu_checks.child",
            check.name,
            self._device,
            str(directory),
        ]
        command += [str(self._result(check)), *(["together"] if together else [])]
        start = time.monotonic()
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **({} if together else self._alone(check))},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            try:
                code = ended(process, log, stands_still=check.limit_seconds, most=check.most_seconds)
                how = (
                    f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"
                )
            except subprocess.TimeoutExpired as error:
                how = f"{error.cmd} {error.timeout:g} s and was killed"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the engines that it has started
                process.wait()
        if not together or self._rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        if self._result(check).exists():
            return None
        seconds = time.monotonic() - start
        message = f"{how}; see {log}"
        return Result(check.name, "failed", message, seconds=seconds, rank=self._rank, host=socket.gethostname())

    def _alone(self, check: Check) -> dict[str, str]:
        """Returns the environment of a rank that runs alone, with its own GPU or with all GPUs of its host."""
        gpus = self._gpus() if self._device == "cuda" else []
        visible = ",".join(gpus if check.scope == "host" else gpus[self._local_rank : self._local_rank + 1])
        alone = {"WORLD_SIZE": "1", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}
        return alone | ({"CUDA_VISIBLE_DEVICES": visible, "RPG_GPUS": visible} if gpus else {})

    def _meet(self, check: Check) -> None:
        """Waits until all ranks have finished the check."""
        if self._store is None:
            return
        if self._store.add(f"{check.name} done", 1) == self._world:
            self._store.set(f"{check.name} over", "")
        self._store.wait([f"{check.name} over"], timedelta(seconds=check.most_seconds + _LATE_SECONDS))


def ended(process: "subprocess.Popen[bytes]", log: Path, *, stands_still: float, most: float) -> int:
    """Waits for the process. Returns its exit code.

    Raises:
        subprocess.TimeoutExpired: it took longer than `most` seconds in all; or, if `most` exceeds `stands_still`, its
            log did not grow for `stands_still` seconds, and it and its children computed nothing. Its command says
            which.
    """
    start = last = time.monotonic()
    before = log.stat().st_size, 0.0
    poll = min(stands_still / 4, _POLL_SECONDS)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(poll)
        now = time.monotonic()
        work = log.stat().st_size, _cpu_seconds(process.pid)
        # When a child ends, the sum loses its time.
        if work[0] > before[0] or work[1] > before[1] + _COMPUTES * poll or work[1] < before[1]:
            last = now
        before = work
        if now - start >= most:
            raise subprocess.TimeoutExpired("it took longer than", most)
        if most > stands_still and now - last >= stands_still:
            raise subprocess.TimeoutExpired("it made no progress for", stands_still)


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and its living descendants."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(each.cpu_times()[:2])
    return total


if __name__ == "__main__":
    die_with_parent()
    before_torch()
    CheckingRank(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run()
