"""Handing weights to an engine on GPUs, as far as that shows without one: the order of things, and a dead engine."""

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rpg.samplers.vllm import engine, weight_transfer
from rpg.samplers.vllm.dedicated import EngineProcessError
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from rpg.samplers.vllm.sampler import _experts
from tests.rpg.tiny_engine import EOS, MAX_LENGTH, qwen3, save

pytest.importorskip("vllm", exc_type=ImportError)
pytestmark = pytest.mark.vllm


def settings(directory: Path, transfer: Transfer) -> EngineSettings:
    save(qwen3(), directory)
    return EngineSettings(directory, (EOS,), "cuda", MAX_LENGTH, max_concurrent=4, transfer=transfer)


@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
def test_the_weights_are_written_before_vllm_reads_them_on_its_own_streams(
    transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    happened: list[str] = []
    given: list[Any] = []

    class Sender:
        def send_weights(self) -> None:
            happened.append("send_weights")

    def trainer_init(init_info: Any, **_: Any) -> Sender:
        given.append(init_info)
        return Sender()

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    way = weight_transfer.open_transfer(settings(tmp_path, transfer), lambda method, **_: happened.append(method))
    way.send(qwen3().named_parameters(), 1)
    assert happened == ["wake_weights", "synchronize", "send_weights", "finish_load"]
    (init_info,) = given
    assert init_info.packed, "else all gathered or merged weights would live at once"


def test_an_engine_on_another_machine_meets_the_sender_at_the_address_at_which_that_has_reached_it(
    tmp_path: Path,
) -> None:
    chosen = settings(tmp_path, "nccl")
    source = weight_transfer._source(tmp_path)
    assert weight_transfer._init_info(chosen, source, sender_address="127.0.0.2").master_address == "127.0.0.2"
    assert weight_transfer._init_info(chosen, source).master_address == "127.0.0.1"


def test_opening_a_transfer_leaves_the_trainers_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    # Without a GPU there are no streams; what restores this thread's restores the random state too.
    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", lambda *_, **__: random.seed(1))
    before = random.getstate()
    weight_transfer.open_transfer(settings(tmp_path, "nccl"), lambda *_, **__: None)
    assert random.getstate() == before


@pytest.mark.parametrize(("transfer", "steps"), [("nccl", []), ("ipc", ["synchronize", "send_weights"])])
def test_a_rank_that_shares_an_engine_gathers_the_weights_and_with_ipc_lends_them(
    transfer: Transfer, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    happened: list[str] = []

    class Lender:
        def __init__(self, source: Any) -> None:
            self._source = source

        def send_weights(self) -> None:
            happened.append("send_weights")
            self._source._weights = deque(self._source._weights, maxlen=0)

    def trainer_init(init_info: Any, *, client: Any, source: Any) -> Lender:
        assert not init_info.is_sender
        client.start_weight_update()  # nobody hears it
        return Lender(source)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, weight in qwen3().named_parameters():
            gathered.append(name)
            yield name, weight

    way = weight_transfer.open_guests_transfer(settings(tmp_path, transfer))
    way.send(weights(), 1)
    way.close()
    assert happened == steps
    assert gathered == [name for name, _ in qwen3().named_parameters()]


def test_the_buffer_of_ipc_takes_the_largest_weight_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"lm_head.weight": (152_064, 3_584), "model.norm.weight": (3_584,)}
    monkeypatch.setattr(weight_transfer, "_shapes", lambda _: shapes)
    chosen = settings(tmp_path, "ipc")
    info = weight_transfer._init_info(chosen, weight_transfer._source(tmp_path))
    assert info.packed_buffer_size_bytes == 152_064 * 3_584 * 4


def test_an_engine_on_a_gpu_does_not_round_logits_and_leaves_other_gpus_random_states_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = engine._device_settings(settings(tmp_path, "nccl"))
    assert chosen["hf_overrides"] == {"head_dtype": "float32"}
    assert engine._own_gpu() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert engine._own_gpu() == [3]


@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_an_engine_on_a_gpu_keeps_its_cache_in_the_type_that_the_spec_names(tmp_path: Path, kept: str) -> None:
    from vllm.config.cache import CacheConfig

    chosen = engine._device_settings(replace(settings(tmp_path, "nccl"), kv_cache=kept))
    assert CacheConfig(cache_dtype=chosen["kv_cache_dtype"]).cache_dtype == kept


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_on_a_gpu_is_asked_for_experts_by_vllms_own_name(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    chosen = engine._device_settings(replace(settings(tmp_path, "nccl"), returns_experts=True))
    asked = EngineArgs(enable_return_routed_experts=chosen["enable_return_routed_experts"])
    assert asked.aux_output_config.enable_return_routed_experts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_experts_of_all_tokens_but_the_last_are_what_vllm_tells_of_them() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    def told(experts: "np.ndarray[Any, Any] | None") -> RequestOutput:
        response = CompletionOutput(0, "", [7, 8], None, None, routed_experts=experts)
        return RequestOutput("0", None, [4, 5, 6], None, [response], finished=True)

    experts = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    assert np.array_equal(_experts(told(experts)), experts[:4])
    for missing, count in ((None, "none"), (experts[:3], "3")):
        with pytest.raises(RuntimeError, match=f"the experts of {count} of 4 tokens"):
            _experts(told(missing))


def test_an_engine_that_dies_while_the_transfer_is_opened_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def call(_: str, *, method: str, each: list[dict[str, Any]]) -> None:
        assert method == "init_weight_transfer_engine"
        given.update(each[0]["arguments"]["init_info"])
        time.sleep(0.2)  # by then vLLM waits for the engine at that port
        raise EngineProcessError("the engine's process ended by signal 9 in call_workers")

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with pytest.raises(EngineProcessError, match="ended by signal 9"):
        weight_transfer.open_transfer(settings(tmp_path, "nccl"), call)
    [waiting] = [thread for thread in threading.enumerate() if thread.name == "transfer"]
    assert waiting.daemon, "else this process could not end"
    late = torch.distributed.TCPStore(given["master_address"], given["master_port"], 2, use_libuv=False)
    waiting.join(30)
    assert not waiting.is_alive()
    del late


class WaitingGroup:
    """A communicator whose broadcast waits for a peer that never comes, until it is aborted."""

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def broadcast(self, *_: Any, **__: Any) -> None:
        assert self._aborted.wait(30), "the broadcast was left to hang"

    def destroy(self) -> None:
        self._aborted.set()


def test_an_engine_that_dies_in_the_middle_ends_the_broadcast_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    class OneWeight(WeightSource):  # type: ignore[misc]  # vLLM is not typed
        def metadata(self) -> list[Any]:
            return [ParamMeta("weight", torch.float32, (2,))]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield "weight", torch.zeros(2)

    def call(_: str, *, method: str, arguments: dict[str, Any]) -> None:
        del arguments
        if method == "update_weights":
            time.sleep(0.2)  # by then the broadcast waits
            raise EngineProcessError("the engine's process ended by signal 9 in call_workers")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    client = weight_transfer._Client(call, lambda _: None, lambda: sender.shutdown())
    sender = NCCLTrainerWeightTransferEngine(client=client, source=OneWeight(), packed=False)
    sender.model_update_group = WaitingGroup()
    with pytest.raises(EngineProcessError, match="ended by signal 9"):
        sender.send_weights()
