"""Transfer of the learner's weights to an engine in another process: as safetensors on CPUs, with vLLM's nccl and ipc
on GPUs."""

import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from rpg.pretrained import config_of
from rpg.samplers.vllm.engine import AnyEngineSettings, process_restored

CallFn = Callable[..., Any]
"""Function (method, **arguments) -> results of that method of the engines' VllmSampler; see `DedicatedSampler.call`."""
Weights = Iterable[tuple[str, Tensor]]


class WeightTransfer(Protocol):
    """One way of transferring weights."""

    def send(self, weights: Weights, policy_version: int) -> None:
        """Transfers the weights. Returns when the engine samples with them."""
        ...

    def close(self) -> None:
        """Frees its resources."""
        ...


def open_transfer(
    settings: AnyEngineSettings, call: CallFn, *, sender_address: str = "", engines: int = 1
) -> WeightTransfer:
    """Opens the transfer that the settings name. For nccl and ipc, this rank's GPU must be the current CUDA device.

    Args:
        settings: settings of each engine.
        call: calls a method of all engines.
        sender_address: address at which the engines' machine reaches this one; empty if it is this one.
        engines: number of engines.
    """
    if settings.transfer:
        return VllmTransfer(settings, call, sender_address=sender_address, engines=engines)
    return SafetensorsTransfer(settings.weights_dir, call, same_machine=not sender_address)


def open_guests_transfer(settings: AnyEngineSettings) -> WeightTransfer:
    """Opens a transfer for a guest of another rank's engine. All ranks send at the same time."""
    return VllmTransfer(settings, _no_call, sends=False) if settings.transfer == "ipc" else GatherOnlyTransfer()


def _no_call(method: str, /, **_: Any) -> None:
    """Replaces a call that only the rank that holds the engine makes."""
    del method


class GatherOnlyTransfer:
    """A transfer that sends nothing but reads the weights, because at ZeRO 3 all ranks must take part in gathering each
    weight."""

    def send(self, weights: Weights, policy_version: int) -> None:
        """Reads the weights. Returns when every weight was gathered."""
        del policy_version
        for _ in weights:
            pass

    def close(self) -> None:
        """Does nothing, because no resources are held."""


class SafetensorsTransfer:
    """Transfer as safetensors. On one machine the engine reads them from this process's memory; otherwise they go over
    its connection."""

    def __init__(self, config_dir: Path, call: CallFn, *, same_machine: bool) -> None:
        self._config_dir = config_dir
        self._call = call
        self._same_machine = same_machine

    def send(self, weights: Weights, policy_version: int) -> None:
        """Sends the weights. Each is copied, since at ZeRO 3 it is whole only for a moment."""
        from safetensors.torch import save

        tensors = {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights}
        metadata = {"format": "pt"}
        if not self._same_machine:
            content = save(tensors, metadata=metadata)
            self._call("load_safetensors", content=content, policy_version=policy_version)
            return
        with directory_in_memory(self._config_dir, save(tensors, metadata=metadata)) as directory:
            self._call("load_directory", weights_dir=directory, policy_version=policy_version)

    def close(self) -> None:
        """Does nothing, because no resources are held."""


@contextmanager
def directory_in_memory(config_dir: Path, safetensors: bytes) -> Iterator[str]:
    """Yields a transformers directory whose weights are in memory. It exists during the block.

    The memory is a file without a name, so that nothing large stays behind when a process is killed.

    Args:
        config_dir: directory of a model of the same shape.
        safetensors: the weights, as the content of a safetensors file.
    """
    memory = os.memfd_create("weights")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(safetensors)
        del safetensors  # otherwise they would be in memory twice
        with tempfile.TemporaryDirectory(prefix="rpg-weights-") as directory:
            shutil.copy(config_dir / "config.json", directory)
            Path(directory, "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
            yield directory
    finally:
        os.close(memory)


class VllmTransfer:
    """Transfer by vLLM's own API, which only the rank that holds the engine calls.

    nccl broadcasts to the engine's GPUs over a separate communicator. With ipc, an engine on the GPUs of the ranks that
    it serves reads the weights from a buffer on each. Either way the weights go in chunks, so that they are never all
    gathered or merged at once. With ipc all ranks of the run exchange the locations of their buffers in their default
    group.
    """

    def __init__(
        self,
        settings: AnyEngineSettings,
        call: CallFn,
        *,
        sends: bool = True,
        sender_address: str = "",
        engines: int = 1,
    ) -> None:
        """Opens the transfer. `sends`: whether this rank holds the engine; otherwise only its buffer is read. For the
        rest see `open_transfer`.

        Raises:
            EngineProcessError: the engine failed or has ended.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._call = call
        self._source = _source(settings.weights_dir)
        info = _init_info(settings, self._source, sends=sends, sender_address=sender_address, engines=engines)
        ended: SimpleQueue[Any] = SimpleQueue()
        first_workers = range(1, 1 + engines * settings.tensor_parallel_size, settings.tensor_parallel_size)
        client = _Client(call, ended.put, self.close, first_workers)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def open_sender() -> None:
            try:
                if device is not None:  # a thread starts with device 0
                    torch.cuda.set_device(device)
                with process_restored():
                    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)
            except BaseException as error:
                sender = error
            ended.put(sender)

        # vLLM waits for the engine's processes, in NCCL without end. If the engine ends first, that wait continues
        # in its thread, which does not keep this process from ending.
        threading.Thread(target=open_sender, name="transfer", daemon=True).start()
        self._sender: Any = ended.get()
        if isinstance(self._sender, BaseException):
            raise self._sender

    def send(self, weights: Weights, policy_version: int) -> None:
        """Sends the weights. The engine drops cached states of the old weights before it confirms the new ones.

        Raises:
            EngineProcessError: the engine failed or has ended. The broadcast to it is aborted.
        """
        self._call("wake_weights")
        self._source.take(weights)
        # vLLM reads the weights on its own streams, which do not wait for the stream that wrote them.
        torch.cuda.synchronize()
        self._sender.send_weights()
        self._call("finish_load", policy_version=policy_version)

    def close(self) -> None:
        """Leaves the communicator, which ends a broadcast that waits in it."""
        if hasattr(self._sender, "shutdown"):
            self._sender.shutdown()


def _init_info(
    settings: AnyEngineSettings, source: Any, *, sends: bool = True, sender_address: str = "", engines: int = 1
) -> Any:
    """Returns vLLM's settings. vLLM assumes that the sender is rank 0, which the workers of all engines reach at this
    machine's address."""
    if settings.transfer == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

        # A weight must fit the buffer whole: the output head of a 7B model is larger than vLLM's 1 GiB.
        size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, source.largest_bytes)
        return IPCTrainerInitInfo(rank=0 if sends else 1, packed=True, packed_buffer_size_bytes=size)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address = sender_address or "127.0.0.1"
    with socket.create_server((address, 0)) as free:
        port = int(free.getsockname()[1])
    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=1 + engines * settings.tensor_parallel_size, rank=0
    )


class _Client:
    """vLLM's weight-sync protocol over the engine's connection. The methods are those of vLLM's workers."""

    def __init__(
        self,
        call: CallFn,
        fail: Callable[[BaseException], None],
        abort: Callable[[], None],
        first_workers: Sequence[int] = (1,),
    ) -> None:
        """Takes the function that calls the engines.

        Args:
            call: calls a method of all engines.
            fail: gets the error that ends the engines' part in opening the transfer.
            abort: ends the sender's broadcast in progress.
            first_workers: rank of each engine's first worker in the communicator.
        """
        self._call = call
        self._fail = fail
        self._abort = abort
        self._first_workers = first_workers

    def _workers(self, method: str, **arguments: Any) -> None:
        self._call("call_workers", method=method, arguments=arguments)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the engines' part. For nccl, vLLM calls it in a separate thread while it waits for the engines'
        processes, and counts the workers' ranks as if there were a single engine."""
        offsets = [{"rank_offset": rank} if "rank_offset" in init_info else {} for rank in self._first_workers]
        each = [{"arguments": {"init_info": init_info | offset}} for offset in offsets]
        try:
            self._call("call_workers", method="init_weight_transfer_engine", each=each)
        except BaseException as error:
            self._fail(error)
            raise

    def start_weight_update(self) -> None:
        self._workers("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Updates the engine's weights. vLLM calls it in a separate thread during the broadcast. It detects an engine
        that fails or ends, for which the broadcast would wait forever."""
        try:
            self._workers("update_weights", update_info=update_info)
        except BaseException:
            self._abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version
        self._workers("finish_weight_update")


def _source(weights_dir: Path) -> Any:
    """Returns a vLLM WeightSource that gets new weights for each load."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM is not typed
        """A source of weights whose names and shapes come from the model's config, so that no weight has to be gathered
        for them.

        The dtype is that of the first weight sent.
        """

        def __init__(self) -> None:
            self._shapes = _shapes(weights_dir)
            self._weights: Iterator[tuple[str, Tensor]] = iter(())
            self._dtype = torch.float32

        @property
        def largest_bytes(self) -> int:
            """Returns the bytes of the largest single weight, in float32."""
            return max(4 * math.prod(shape) for shape in self._shapes.values())

        def take(self, weights: Weights) -> None:
            remaining = iter(weights)
            first = next(remaining)
            self._dtype = first[1].dtype
            self._weights = chain([first], remaining)

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, self._dtype, shape) for name, shape in self._shapes.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            device = torch.device("cuda", torch.cuda.current_device())
            for name, weight in self._weights:
                yield name, weight.detach().to(device)

    return Source()


def _shapes(weights_dir: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of the transformers model, in the model's order."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config_of(weights_dir)
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
