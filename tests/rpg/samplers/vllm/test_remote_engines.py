"""Engines on machines without ranks, as far as that shows without vLLM: how each finds its rank, and the transferred
data."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore

from rpg.processes import ranks
from rpg.samplers.sampling_ranks import own_samplers
from rpg.samplers.vllm import meeting
from rpg.samplers.vllm.engine import EngineSettings
from rpg.samplers.vllm.meeting import MeetingError, PlainConnection, await_rank, meet_engine
from rpg.samplers.vllm.opening import transfer_to_engines
from rpg.samplers.vllm.weight_transfer import directory_in_memory, open_transfer
from specs.machine.launch import ENGINES_ELSEWHERE
from specs.schema.rollout import VllmRollout

OURS, ANOTHER = b"the launch's key", b"another launch's"


@pytest.fixture
def store() -> HashStore:
    """The launch's."""
    return HashStore()


def in_a_thread(work: Callable[[], Any]) -> "Future[Any]":
    """Its result; one that waits for ever keeps no test from ending."""
    future: Future[Any] = Future()
    threading.Thread(target=lambda: future.set_result(work()), daemon=True).start()
    return future


def test_an_engine_meets_its_own_rank_whoever_else_has_connected_before(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening: Future[Any] = Future()

    class Listener(socket.socket):
        def listen(self, backlog: int = 128) -> None:
            super().listen(backlog)
            listening.set_result(self.getsockname())

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Listener)
        engine = in_a_thread(lambda: await_rank(3, "127.0.0.2", OURS, store))
        place = listening.result(30)
    with socket.create_connection(place) as babbler:
        babbler.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    socket.create_connection(place).close()
    with pytest.raises(MeetingError, match=r"the process at 127\.0\.0\.2:\d+ for engine 3 has another launch's key"):
        meet_engine(3, ANOTHER, store)
    met = meet_engine(3, OURS, store)
    assert (met.host, met.own_address) == (socket.gethostname(), "127.0.0.1")
    there: PlainConnection = engine.result(30)
    for end in (there, met.connection):
        with socket.socket(fileno=os.dup(end.fileno())) as shared:
            assert shared.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert shared.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    there.close()
    with pytest.raises(EOFError):
        met.connection.recv()


def test_one_who_connects_and_says_nothing_does_not_keep_the_rank_away(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_PROOF_SECONDS", 1)
    engine = in_a_thread(lambda: await_rank(0, "127.0.0.1", OURS, store))
    address, listens_at, _ = json.loads(store.get("rpg/engine/0"))
    with socket.create_connection((address, listens_at)):
        met = meet_engine(0, OURS, store)
    time.sleep(1.1)  # which is no limit once they have met
    met.connection.send("now")
    assert engine.result(30).recv() == "now"


def test_an_engine_that_does_not_come_is_named(store: HashStore) -> None:
    with pytest.raises(MeetingError, match=r"engine 1 has not reported its address within 0\.2 s"):
        meet_engine(1, OURS, store, seconds=0.2)


def test_an_engine_elsewhere_serves_neighbours_of_the_run_whatever_their_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five ranks, three on the first machine and two on the second, two to an engine."""
    rollout = VllmRollout(engine="vllm", placement="dedicated", ranks_per_engine=2)

    monkeypatch.setattr(ranks, "world_size", lambda: 5)

    def holders() -> list[int]:
        held = []
        for rank, (local_rank, size) in enumerate(((0, 3), (1, 3), (2, 3), (0, 2), (1, 2))):
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            monkeypatch.setenv("LOCAL_SIZE", str(size))
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            held += [rank] * len(own_samplers(rollout))
        return held

    assert holders() == [0, 2, 3], "the first of each machine's own"
    monkeypatch.setenv(ENGINES_ELSEWHERE, "1")
    assert holders() == [0, 2, 4]
    assert transfer_to_engines(rollout) == "nccl"


def test_weights_for_an_engine_on_another_machine_go_over_the_connection_and_lie_in_memory_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = EngineSettings(tmp_path, (1,), "cpu", max_length=8, max_concurrent=4)
    weights, sent = {"head": torch.randn(3, 2), "norm": torch.randn(2)}, {}

    def call(method: str, /, **arguments: Any) -> None:
        sent.update(arguments, method=method)

    open_transfer(settings, call, sender_address="10.0.0.1").send(weights.items(), 7)
    assert (sent["method"], sent["policy_version"]) == ("load_safetensors", 7)
    with directory_in_memory(tmp_path, sent["content"]) as directory:
        file = Path(directory, "model.safetensors")
        assert file.readlink().is_relative_to("/proc")
        held = load_file(file)
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], weight) for name, weight in weights.items())
        assert Path(directory, "config.json").read_text() == "{}"
    assert not Path(directory).exists()
