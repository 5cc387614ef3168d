"""Sampling with engines in their own processes, on their own GPUs if there are any.

A process answers calls over a connection. It is a child of the rank (`child_engine`), or on a machine without ranks
(`remote_engine`); docs/decisions/0009-dedicated-engine.md compares both with vLLM's server.

A rank may have several engines. The prompts of a call are dealt over them by their order alone, and while prompts or
turns are admitted the engines wait for each other, as ranks do. So timing decides nothing, and a resume is exact.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from multiprocessing.connection import wait
from typing import Any, Protocol

from torch import Tensor

from rpg.samplers.base import response_limits
from rpg.samplers.vllm.engine import AnyEngineSettings
from rpg.samplers.vllm.engine_process import Reply
from rpg.samplers.vllm.weight_transfer import WeightTransfer, open_transfer
from rpg.types import Admit, NextTurns, OnResponse, Pause, Rollout, RolloutGroup, Sampling, TurnRequest
from specs.errors import SpecError

_POLL_SECONDS = 0.5


class EngineProcessError(RuntimeError):
    """Error raised if the engine's process failed or has ended."""


class EngineConnection(Protocol):
    """Connection that sends and receives one value at a time, in order: `multiprocessing.connection.Connection` on one
    machine."""

    def send(self, value: Any, /) -> None:
        """Sends a value. Raises OSError if the connection has ended."""
        ...

    def recv(self) -> Any:
        """Returns the next value. Raises EOFError or OSError if the connection has ended."""
        ...

    def fileno(self) -> int:
        """Returns the file descriptor, which is readable when there is something to receive."""
        ...

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Returns whether there is something to receive. The end of the connection counts."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class EngineProcess(Protocol):
    """A process that serves an engine (`engine_process.serve`), as the rank that holds the engine uses it."""

    @property
    def connection(self) -> EngineConnection:
        """Returns the connection to the process."""
        ...

    sender_address: str
    """The address at which the process reaches this machine; empty if the process is on this machine."""

    def has_ended(self) -> bool:
        """Returns whether the engine is known to have ended. The end of the connection also shows this."""
        ...

    def end_error(self, method: str) -> EngineProcessError:
        """Returns the exception to raise if the engine has ended during a call of a method."""
        ...

    def close(self) -> None:
        """Ends the connection, and the process with it."""
        ...


class DedicatedSampler:
    """A sampler with one or several engines, each in its own process."""

    def __init__(self, settings: AnyEngineSettings, processes: Sequence[EngineProcess]) -> None:
        """Starts the engines and waits until they are ready.

        Args:
            settings: settings of each engine.
            processes: the processes that serve them. The sampler ends them.
        Raises:
            SpecError: vLLM cannot run this model, or not with these settings.
            EngineProcessError: a process failed.
        """
        self.policy_version = 0
        self.engines = len(processes)
        self._max_length = settings.max_length
        self._processes = tuple(processes)
        self._transfer: WeightTransfer | None = None
        try:
            for process in processes:
                process.connection.send(settings)
            self._results("start")
            address = processes[0].sender_address
            self._transfer = open_transfer(settings, self.call, sender_address=address, engines=self.engines)
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
        shares = self._shares(len(prompts))
        most = response_limits(prompts, sampling, seeds, limits, max_length=self._max_length)
        busy = [engine for engine, share in enumerate(shares) if share]
        for engine in busy:
            arguments = _arguments(prompts, seeds, shares[engine], group_size, sampling)
            of_share = [most[place] for place in shares[engine]]
            self._send(engine, "generate", arguments | {"limits": of_share, "on_response": on_response is not None})
        ended = _in_call(shares, group_size, on_response) if on_response else None
        results: list[list[RolloutGroup]] = self._results("generate", ended, of=busy)
        groups = dict(zip(chain(*shares), chain(*results), strict=True))
        return [groups[place] for place in range(len(prompts))]

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
        """Samples prompts as they are admitted; see Sampler. All engines wait during `admit`."""
        shares = self._shares(len(prompts))
        response_limits(prompts, sampling, seeds, None, max_length=self._max_length)
        for engine, share in enumerate(shares):
            arguments = _arguments(prompts, seeds, share, group_size, sampling)
            self._send(engine, "stream", arguments | {"admit": True, "on_response": True})

        def admitted(_: Sequence[Any]) -> list[int | None]:
            count = admit()
            return [None if count is None else sum(place < count for place in share) for share in shares]

        return sum(self._results("stream", _in_call(shares, group_size, on_response), admitted))

    def serve(
        self,
        next_turns: NextTurns,
        *,
        sampling: Sampling,
        on_response: OnResponse,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Samples turns as they are requested; see Sampler. All engines wait during `next_turns`. All turns of a prompt
        go to the same engine. If there are several engines, they ask for turns every ADMISSION_STEPS steps, and not
        when a turn has ended."""
        asks = "always" if self.engines == 1 else "together"
        wanted = {"next_turns": asks, "on_response": True, "on_unfinished": on_unfinished is not None}
        for engine in range(self.engines):
            self._send(engine, "serve", {"sampling": sampling, **wanted})
        numbers: list[list[int]] = [[] for _ in self._processes]
        count = 0

        def turns(pauses: Sequence[Pause]) -> list[list[TurnRequest] | None]:
            nonlocal count
            requested = next_turns(pauses[0] if len({*pauses}) == 1 else "steps")
            if requested is None:
                return [None] * self.engines
            begun: list[list[TurnRequest] | None] = [[] for _ in self._processes]
            for turn in requested:
                engine = self._engine_of(turn.prompt)
                begun[engine].append(turn)  # type: ignore[union-attr]
                numbers[engine].append(count)
                count += 1
            return begun

        def ended(engine: int, number: int, rollout: Rollout) -> None:
            on_response(numbers[engine][number], rollout)

        def cut(engine: int, number: int, rollout: Rollout) -> None:
            assert on_unfinished is not None
            on_unfinished(numbers[engine][number], rollout)

        return sum(self._results("serve", ended, turns, on_unfinished=cut))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Transfers the weights, by nccl or ipc on GPUs and as safetensors on a CPU."""
        assert self._transfer is not None
        self._transfer.send(weights, policy_version)
        self.policy_version = policy_version

    def logprobs(
        self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0, engine: int = 0
    ) -> list[float]:
        """Returns logprobs of the tokens after the prompt under an engine's weights, nats; see VllmSampler."""
        arguments = {"token_ids": list(token_ids), "prompt_length": prompt_length, "temperature": temperature}
        self._send(engine, "logprobs", arguments)
        logprobs: list[float] = self._results("logprobs", of=[engine])[0]
        return logprobs

    def forget(self) -> None:
        """See VllmSampler."""
        self.call("forget")

    def sleep(self) -> None:
        """Does nothing, because the engines' memory is separate."""

    def call(self, method: str, /, each: Sequence[Mapping[str, Any]] = (), **arguments: Any) -> list[Any]:
        """Calls a method of each engine's VllmSampler at the same time and returns the results.

        Args:
            method: the method's name.
            each: further arguments of each engine, if they differ.
            arguments: arguments for all.
        Raises:
            SpecError, ValueError: the method raised it.
            EngineProcessError: the method failed otherwise, or a process has ended.
        """
        for engine in range(self.engines):
            self._send(engine, method, arguments | dict(each[engine] if each else {}))
        return self._results(method)

    def _engine_of(self, place: int) -> int:
        """Returns the engine of a prompt. The order goes back and forth, so that prompts sorted by length are
        distributed evenly."""
        turn, engine = divmod(place, self.engines)
        return self.engines - 1 - engine if turn % 2 else engine

    def _shares(self, count: int) -> list[list[int]]:
        """Returns the indices of each engine's prompts, ascending."""
        return [[place for place in range(count) if self._engine_of(place) == each] for each in range(self.engines)]

    def _send(self, engine: int, method: str, arguments: Mapping[str, Any]) -> None:
        process = self._processes[engine]
        try:
            process.connection.send((method, dict(arguments)))
        except OSError:
            # The engine's end is the cause, not the connection: no rank was lost.
            raise process.end_error(method) from None

    def _results(
        self,
        method: str,
        on_response: Callable[[int, int, Rollout], None] | None = None,
        answers: Callable[[list[Any]], Sequence[Any]] | None = None,
        *,
        of: Sequence[int] | None = None,
        on_unfinished: Callable[[int, int, Rollout], None] | None = None,
    ) -> list[Any]:
        """Receives messages until each engine has sent its result. Returns the results.

        Args:
            method: method that the engines were called for.
            on_response: called with engine, index and response.
            answers: returns an answer for each engine, given the questions of all.
            of: engines that were called. If left out, all of them.
            on_unfinished: called with engine, index and the tokens so far of an unfinished turn.
        Raises:
            SpecError, ValueError: an engine raised it. By then all others have ended the call.
            EngineProcessError: an engine failed otherwise, or has ended.
        """
        engines = list(range(self.engines) if of is None else of)
        told = {"response": on_response, "unfinished": on_unfinished}
        results: dict[int, Any] = {}
        questions: dict[int, Any] = {}
        refusals: list[Exception] = []
        while len(results) < len(engines):
            for engine in self._ready(method, engines):
                kind, value = self._receive(engine, method)
                if kind == "question":
                    questions[engine] = value
                elif kind not in told:
                    results[engine] = value
                    refusals += _refusal(method, kind, value)
                elif not refusals:
                    callback = told[kind]
                    assert callback is not None
                    callback(engine, *value)
            if refusals or len(questions) == len(engines):
                asked = list(questions)
                given = answers([questions[engine] for engine in engines]) if answers and not refusals else None
                for engine in asked:
                    self._processes[engine].connection.send(given[engine] if given else None)
                questions.clear()
        if refusals:
            raise refusals[0]
        return [results[engine] for engine in engines]

    def _ready(self, method: str, engines: Sequence[int]) -> list[int]:
        """Waits until engines have sent messages, and returns these engines."""
        connections: list[Any] = [self._processes[engine].connection for engine in engines]
        while not (ready := wait(connections, _POLL_SECONDS)):
            for engine in engines:
                process = self._processes[engine]
                if process.has_ended() and not process.connection.poll():
                    raise process.end_error(method)
        return [engine for engine, connection in zip(engines, connections, strict=True) if connection in ready]

    def _receive(self, engine: int, method: str) -> Reply:
        process = self._processes[engine]
        try:
            reply: Reply = process.connection.recv()
            return reply
        except (EOFError, OSError):
            raise process.end_error(method) from None

    def close(self) -> None:
        """Ends the engines' processes."""
        if self._transfer is not None:
            self._transfer.close()
        for process in self._processes:
            process.connection.close()  # all end at the same time
        for process in self._processes:
            process.close()


def _arguments(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int], share: Sequence[int], group_size: int, sampling: Sampling
) -> dict[str, Any]:
    """Returns an engine's arguments for its share of the prompts."""
    dealt = [list(prompts[place]) for place in share]
    return {
        "prompts": dealt,
        "group_size": group_size,
        "sampling": sampling,
        "seeds": [seeds[place] for place in share],
    }


def _in_call(
    shares: Sequence[Sequence[int]], group_size: int, on_response: OnResponse
) -> Callable[[int, int, Rollout], None]:
    """Returns a callback that passes on an engine's response with its index in the whole call."""

    def ended(engine: int, index: int, rollout: Rollout) -> None:
        place, member = divmod(index, group_size)
        on_response(shares[engine][place] * group_size + member, rollout)

    return ended


def _refusal(method: str, kind: str, value: Any) -> list[Exception]:
    """Returns the error with which an engine refused a call, if it did.

    Raises:
        EngineProcessError: the call failed.
    """
    if kind == "failed":
        raise EngineProcessError(f"the engine's process failed in {method}:\n{value}")
    if kind == "spec_error":
        return [SpecError(*value)]
    return [ValueError(value)] if kind == "value_error" else []
