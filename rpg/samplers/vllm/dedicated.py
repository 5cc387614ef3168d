"""Sampling with a vLLM engine in a process of its own, on GPUs of its own where there are any.

The process is a child that answers calls over a socket pair: docs/decisions/0009-dedicated-engine.md weighs it against
vLLM's server.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rpg.samplers.vllm.engine import EngineSettings
from rpg.samplers.vllm.engine_process import Call, Reply
from rpg.samplers.vllm.weight_transfer import WeightTransfer, open_transfer
from rpg.types import Admit, OnResponse, RolloutGroup, Sampling
from specs.errors import SpecError

_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 30.0
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for ranks. The engine's process must not take itself for one."""


class EngineProcessError(RuntimeError):
    """The engine's process failed or has ended."""


class DedicatedSampler:
    """An engine in a child process. The child ends with this process, however that ends."""

    def __init__(self, settings: EngineSettings, *, gpus: Sequence[str] = ()) -> None:
        """Starts the engine and waits until it is ready.

        Args:
            settings: of the engine.
            gpus: the GPUs that its process may see, as CUDA_VISIBLE_DEVICES names them; none on a CPU.
        Raises:
            SpecError: vLLM does not run this model, or not with these settings.
            EngineProcessError: the process failed.
        """
        self.policy_version = 0
        parent_end, child_end = socket.socketpair()
        with child_end:
            arguments = [str(child_end.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rpg.samplers.vllm.engine_process", *arguments],
                env=_environment(gpus),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection: Connection[Call | EngineSettings | int | None, Reply] = Connection(parent_end.detach())
        self._transfer: WeightTransfer | None = None
        try:
            self._connection.send(settings)
            self._reply("start")
            self._transfer = open_transfer(settings, self.call)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """`group_size` responses to each prompt; see VllmSampler."""
        arguments = {
            "prompts": [list(prompt) for prompt in prompts],
            "group_size": group_size,
            "sampling": sampling,
            "seeds": list(seeds),
            "limits": None if limits is None else list(limits),
        }
        self._send(("generate", arguments | {"on_response": on_response is not None}))
        while True:
            kind, value = self._receive("generate")
            if kind == "response":
                assert on_response is not None
                on_response(*value)
                continue
            groups: list[RolloutGroup] = self._result("generate", kind, value)
            return groups

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """Samples prompts as they are admitted; see Sampler. The engine waits while `admit` is asked."""
        arguments = {
            "prompts": [list(prompt) for prompt in prompts],
            "group_size": group_size,
            "sampling": sampling,
            "seeds": list(seeds),
        }
        self._send(("stream", arguments | {"admit": True, "on_response": True}))
        while True:
            kind, value = self._receive("stream")
            if kind == "response":
                on_response(*value)
            elif kind == "admit":
                self._connection.send(admit())
            else:
                unfinished: int = self._result("stream", kind, value)
                return unfinished

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Hands the weights over: by nccl or ipc on GPUs, from a directory on a CPU."""
        assert self._transfer is not None
        self._transfer.send(weights, policy_version)
        self.policy_version = policy_version

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """Logprobs of the tokens after the prompt, nats; see VllmSampler."""
        logprobs: list[float] = self.call(
            "logprobs", token_ids=list(token_ids), prompt_length=prompt_length, temperature=temperature
        )
        return logprobs

    def forget(self) -> None:
        """See VllmSampler."""
        self.call("forget")

    def call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a method of the engine's VllmSampler and returns its result.

        Raises:
            SpecError, ValueError: the method raised it.
            EngineProcessError: the method failed otherwise, or the process has ended.
        """
        self._send((method, arguments))
        return self._reply(method)

    def _send(self, call: Call) -> None:
        try:
            self._connection.send(call)
        except OSError:
            raise self._end_error(call[0]) from None  # the end is the cause, not the connection: it is no lost rank

    def _reply(self, method: str) -> Any:
        return self._result(method, *self._receive(method))

    def _receive(self, method: str) -> Reply:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.poll() is not None and not self._connection.poll():
                    raise self._end_error(method)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._end_error(method) from None

    def _result(self, method: str, kind: str, value: Any) -> Any:
        if kind == "spec_error":
            raise SpecError(*value)
        if kind == "value_error":
            raise ValueError(value)
        if kind == "failed":
            raise EngineProcessError(f"the engine's process failed in {method}:\n{value}")
        return value

    def _end_error(self, method: str) -> EngineProcessError:
        try:
            code = self._process.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineProcessError(f"the engine's process stopped answering in {method}")
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return EngineProcessError(f"the engine's process ended {how} in {method}; what it said stands above")

    def close(self) -> None:
        """Ends the engine's process."""
        if self._transfer is not None:
            self._transfer.close()
        self._connection.close()
        try:
            self._process.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(gpus: Sequence[str]) -> dict[str, str]:
    """This process's environment without the variables of a rank, with the engine's GPUs and the same number of
    threads."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
