"""Sampling with a vLLM engine in a process of its own, on GPUs of its own where there are any.

The process answers calls over a connection. It is a child of the rank (`child_engine`), or on a machine without ranks
(`remote_engine`); docs/decisions/0009-dedicated-engine.md weighs both against vLLM's server.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from rpg.samplers.vllm.engine import EngineSettings
from rpg.samplers.vllm.engine_process import Call, Reply
from rpg.samplers.vllm.weight_transfer import WeightTransfer, open_transfer
from rpg.types import Admit, NextTurns, OnResponse, RolloutGroup, Sampling
from specs.errors import SpecError

_POLL_SECONDS = 0.5


class EngineProcessError(RuntimeError):
    """The engine's process failed or has ended."""


class EngineConnection(Protocol):
    """Carries a value at a time, in order: `multiprocessing.connection.Connection` on one machine."""

    def send(self, value: Any, /) -> None:
        """Raises OSError where it has ended."""
        ...

    def recv(self) -> Any:
        """Raises EOFError or OSError where it has ended."""
        ...

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Whether there is something to receive, be it the end."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class EngineProcess(Protocol):
    """A process that serves an engine (`engine_process.serve`), as the rank sees it that holds the engine."""

    @property
    def connection(self) -> EngineConnection:
        """To it."""
        ...

    sender_address: str
    """The address at which it reaches this machine; empty where it is on this machine."""

    def has_ended(self) -> bool:
        """Whether the engine is known to have ended. The end of the connection says so too."""
        ...

    def end_error(self, method: str) -> EngineProcessError:
        """The exception to raise where the engine has ended in a call of a method."""
        ...

    def close(self) -> None:
        """Ends the connection, and the process with it."""
        ...


class DedicatedSampler:
    """An engine in a process of its own."""

    def __init__(self, settings: EngineSettings, process: EngineProcess) -> None:
        """Starts the engine and waits until it is ready.

        Args:
            settings: of the engine.
            process: which is to serve it. The sampler ends it.
        Raises:
            SpecError: vLLM does not run this model, or not with these settings.
            EngineProcessError: the process failed.
        """
        self.policy_version = 0
        self._process = process
        self._connection = process.connection
        self._transfer: WeightTransfer | None = None
        try:
            self._connection.send(settings)
            self._reply("start")
            self._transfer = open_transfer(settings, self.call, sender_address=process.sender_address)
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

    def serve(self, next_turns: NextTurns, *, sampling: Sampling, on_response: OnResponse) -> int:
        """Samples turns as they are asked for; see Sampler. The engine waits while `next_turns` is asked."""
        self._send(("serve", {"sampling": sampling, "next_turns": True, "on_response": True}))
        while True:
            kind, value = self._receive("serve")
            if kind == "response":
                on_response(*value)
            elif kind == "next_turns":
                self._connection.send(next_turns(value))
            else:
                unfinished: int = self._result("serve", kind, value)
                return unfinished

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Hands the weights over: by nccl or ipc on GPUs, as safetensors on a CPU."""
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

    def sleep(self) -> None:
        """Its memory is its own."""

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
            # The end is the cause, not the connection: it is no lost rank.
            raise self._process.end_error(call[0]) from None

    def _reply(self, method: str) -> Any:
        return self._result(method, *self._receive(method))

    def _receive(self, method: str) -> Reply:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.has_ended() and not self._connection.poll():
                    raise self._process.end_error(method)
            reply: Reply = self._connection.recv()
            return reply
        except (EOFError, OSError):
            raise self._process.end_error(method) from None

    def _result(self, method: str, kind: str, value: Any) -> Any:
        if kind == "spec_error":
            raise SpecError(*value)
        if kind == "value_error":
            raise ValueError(value)
        if kind == "failed":
            raise EngineProcessError(f"the engine's process failed in {method}:\n{value}")
        return value

    def close(self) -> None:
        """Ends the engine's process."""
        if self._transfer is not None:
            self._transfer.close()
        self._process.close()
