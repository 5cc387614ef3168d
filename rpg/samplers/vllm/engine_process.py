"""The process that a DedicatedSampler starts as the rank's child: `python -m rpg.samplers.vllm.engine_process
CONNECTION PARENT`.

It receives the settings of an engine, then calls of its methods one after another, until the connection ends. It
ignores signals that ask the trainer to stop: the trainer stops at the end of its step, and needs the engine until then.
"""

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from specs.errors import SpecError
from specs.machine.parent import before_torch, die_with_parent

Call = tuple[str, dict[str, Any]]
"""Method and its arguments."""
Reply = tuple[str, Any]
"""Kind and content. During `generate` or `stream`: ("response", (index, rollout)). During `stream` also ("admit",
None), a question: the trainer answers how many prompts may start, or None. During `serve` also ("next_turns", pause), a
question, and ("unfinished", (number, rollout)). At the end of a call: ("result", returned
value), ("spec_error", issues), ("value_error", message) or ("failed", traceback)."""

METHODS = frozenset(
    {
        *("generate", "stream", "serve", "logprobs", "forget"),
        *("load_directory", "load_safetensors", "call_workers", "finish_load", "wake_weights"),
    }
)
"""The methods of VllmSampler that may be called."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for ranks. vLLM must not see them, or it would take its process for a
rank."""


def prepare() -> None:
    """Prepares this process for an engine. Call it before vLLM is imported."""
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # an engine's own processes are all on this machine
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.dup2(2, 1)  # vLLM's output must not go to the trainer's stdout


def serve(connection: Any) -> None:
    """Serves one engine.

    Args:
        connection: the connection to its rank, see `dedicated.EngineConnection`.
    """
    settings: Any = connection.recv()
    from rpg.samplers.vllm.sampler import VllmSampler

    try:
        sampler = VllmSampler(settings)
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send(("result", None))
    try:
        while True:
            method, arguments = connection.recv()
            if arguments.get("on_response"):
                arguments["on_response"] = lambda *response: connection.send(("response", response))
            if arguments.get("on_unfinished"):
                arguments["on_unfinished"] = lambda *response: connection.send(("unfinished", response))
            if arguments.get("admit"):
                arguments["admit"] = lambda: _ask(connection, "admit")
            if arguments.get("next_turns"):
                arguments["next_turns"] = lambda pause: _ask(connection, "next_turns", pause)
            connection.send(_answer(sampler, method, arguments))
    except (EOFError, OSError):  # the trainer has closed its end, or has died
        sampler.close()
        os._exit(0)  # the interpreter's own cleanup would take seconds to free memory that the system frees anyway


def _ask(connection: Any, question: str, value: Any = None) -> Any:
    """Asks the trainer what may start, and returns its answer."""
    connection.send((question, value))
    return connection.recv()


def _answer(sampler: Any, method: str, arguments: dict[str, Any]) -> Reply:
    assert method in METHODS, method
    try:
        return "result", getattr(sampler, method)(**arguments)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Reply:
    if isinstance(error, SpecError):
        return "spec_error", error.issues
    if isinstance(error, ValueError):
        return "value_error", str(error)
    return "failed", traceback.format_exc()


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    before_torch()
    die_with_parent(int(sys.argv[2]))
    prepare()
    serve(Connection(int(sys.argv[1])))
