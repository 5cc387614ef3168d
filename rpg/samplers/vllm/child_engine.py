"""Processes of engines that are children of their ranks."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from rpg.samplers.vllm.dedicated import EngineProcessError

_CLOSE_SECONDS = 30.0


class ChildEngine:
    """An engine's process, connected by a socket pair. It ends with this process, even if this process dies."""

    sender_address = ""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        """Starts the process.

        Args:
            gpus: the GPUs that it may use, in the form of CUDA_VISIBLE_DEVICES; empty on a CPU.
        """
        parent_end, child_end = socket.socketpair()
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        with child_end:
            arguments = [str(child_end.fileno()), str(os.getpid())]
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "rpg.samplers.vllm.engine_process", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **visible},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection: Connection[Any, Any] = Connection(parent_end.detach())

    def has_ended(self) -> bool:
        """See EngineProcess."""
        return self.child.poll() is not None

    def end_error(self, method: str) -> EngineProcessError:
        """Returns the error for an ended engine, with the exit code or the signal."""
        try:
            code = self.child.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineProcessError(f"the engine's process stopped answering in {method}")
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return EngineProcessError(f"the engine's process ended {how} in {method}; its output is above")

    def close(self) -> None:
        """Ends the process."""
        self.connection.close()
        try:
            self.child.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
