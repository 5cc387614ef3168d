"""Sampling with a vLLM engine in its own process, on its own GPUs if there are any.

The process answers calls over a connection. It is a child of the rank (`child_engine`), or on a machine without ranks
(`remote_engine`); docs/decisions/0009-dedicated-engine.md compares both with vLLM's server.
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
    """Connection that carries one value at a time, in order: `multiprocessing.connection.Connection` on one machine."""

    def send(self, value: Any, /) -> None:
        """Sends a value. Raises OSError if the connection has ended."""
        ...

    def recv(self) -> Any:
        """Returns the next value. Raises EOFError or OSError if the connection has ended."""
        ...

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Returns whether there is something to receive; the end of the connection counts."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class EngineProcess(Protocol):
    """A process that serves an engine (`engine_process.serve`), seen from the rank that holds the engine."""

    @property
    def connection(self) -> EngineConnection:
        """Returns the connection to the process."""
        ...

    sender_address: str
    """The address at which the process reaches this machine; empty if it is on this machine."""

    def has_ended(self) -> bool:
        """Returns whether the engine is known to have ended. The end of the connection shows that too."""
        ...

    def end_error(self, method: str) -> EngineProcessError:
        """Returns the exception to raise if the engine has ended during a call of a method."""
        ...

    def close(self) -> None:
        """Ends the connection, and the process with it."""
        ...


class DedicatedSampler:
    """A sampler with an engine in its own process."""

    def __init__(self, settings: EngineSettings, process: EngineProcess) -> None:
        """Starts the engine and waits until it is ready.

        Args:
            settings: settings of the engine.
            process: the process that serves it. The sampler ends it.
        Raises:
            SpecError: vLLM cannot run this model, or not with these settings.
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
        """Returns `group_size` responses to each prompt; see VllmSampler."""
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
        """Samples prompts as they are admitted; see Sampler. The engine waits during `admit`."""
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

    def serve(
        self,
        next_turns: NextTurns,
        *,
        sampling: Sampling,
        on_response: OnResponse,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Samples turns as they are requested; see Sampler. The engine waits during `next_turns`."""
        wanted = {"next_turns": True, "on_response": True} | ({"on_unfinished": True} if on_unfinished else {})
        self._send(("serve", {"sampling": sampling, **wanted}))
        while True:
            kind, value = self._receive("serve")
            if kind == "response":
                on_response(*value)
            elif kind == "unfinished":
                assert on_unfinished is not None
                on_unfinished(*value)
            elif kind == "next_turns":
                self._connection.send(next_turns(value))
            else:
                unfinished: int = self._result("serve", kind, value)
                return unfinished

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Transfers the weights: by nccl or ipc on GPUs, as safetensors on a CPU."""
        assert self._transfer is not None
        self._transfer.send(weights, policy_version)
        self.policy_version = policy_version

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """Returns logprobs of the tokens after the prompt, nats; see VllmSampler."""
        logprobs: list[float] = self.call(
            "logprobs", token_ids=list(token_ids), prompt_length=prompt_length, temperature=temperature
        )
        return logprobs

    def forget(self) -> None:
        """See VllmSampler."""
        self.call("forget")

    def sleep(self) -> None:
        """Does nothing: the engine's memory is separate."""

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
            # The engine's end is the cause, not the connection: no rank was lost.
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
