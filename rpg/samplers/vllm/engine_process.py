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
from functools import partial
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from rpg.processes.numa import bind_to_visible_gpus, unbind
from specs.errors import SpecError
from specs.machine.parent import before_torch, die_with_parent

Call = tuple[str, dict[str, Any]]
"""Method and its arguments."""
Reply = tuple[str, Any]
"""Kind and content. While sampling: ("response", (index, rollout)). During `stream` also ("question", None), to which
the trainer answers how many prompts may start, or None. During `serve` also ("question", pause), to which the trainer
answers which turns begin, or None, after which ("unfinished", (number, rollout)) follows for each unfinished turn. At
the end of a call: ("result", returned value), ("spec_error", issues), ("value_error", message) or ("failed",
traceback)."""

METHODS = frozenset(
    {
        *("generate", "stream", "serve", "logprobs", "forget"),
        *("load_directory", "load_safetensors", "call_workers", "finish_load", "wake_weights"),
    }
)
"""The methods of VllmSampler that may be called."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for ranks. vLLM must not see them, because it would treat its process as a
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
    if settings.device_type == "cuda":
        bind_to_visible_gpus()
    try:
        sampler = resolve_name(settings.sampler)(settings)
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
                arguments["admit"] = lambda: _ask(connection)
            if asks := arguments.get("next_turns"):
                arguments["next_turns"] = partial(_ask_for_turns, connection, asks)
            connection.send(_answer(sampler, method, arguments))
    except (EOFError, OSError):  # the trainer has closed its end, or has died
        sampler.close()
        os._exit(0)  # the interpreter's own cleanup would take seconds to free memory that the system frees anyway


def _ask(connection: Any, pause: str | None = None) -> Any:
    """Asks the trainer how many prompts may start, and returns its answer."""
    connection.send(("question", pause))
    return connection.recv()


def _ask_for_turns(connection: Any, asks: str, pause: str) -> Any:
    """Asks the trainer which turns begin. An engine that must wait for others does not ask when a turn has ended."""
    return () if asks == "together" and pause == "ended" else _ask(connection, pause)


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
    unbind()
    prepare()
    serve(Connection(int(sys.argv[1])))
