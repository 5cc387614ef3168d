"""Start and end of vLLM in this process. Afterwards the process is in its former state."""

import gc
import os
import random
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch

from rpg.messages import message
from rpg.pretrained import config_of
from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from vllm import LLM

_BYTES_PER_GIB = 2**30

Transfer = Literal["", "nccl", "ipc"]
"""How vLLM itself transfers weights to an engine in another process; empty if they come from a directory, or if the
engine is in this process."""


class AnyEngineSettings(Protocol):
    """The settings that all engines in their own processes have."""

    @property
    def weights_dir(self) -> Path:
        """Returns the directory with the model's config."""
        ...

    @property
    def device_type(self) -> str:
        """Returns cpu or cuda."""
        ...

    @property
    def max_length(self) -> int:
        """Returns the largest number of tokens of prompt and response together."""
        ...

    @property
    def transfer(self) -> Transfer:
        """Returns how weights reach the engine."""
        ...

    @property
    def tensor_parallel_size(self) -> int:
        """Returns the number of processes over which each weight matrix is split."""
        ...

    @property
    def sampler(self) -> str:
        """Returns the function that opens the engine with these settings, as MODULE:NAME."""
        ...


@message
@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings with which an engine is started."""

    sampler: ClassVar = "rpg.samplers.vllm.sampler:VllmSampler"
    weights_dir: Path
    """Directory with config and safetensors of a transformers model, and its tokenizer if there are stop texts."""
    eos_ids: tuple[int, ...]
    """Ids of the end tokens. Each ends a response."""
    device_type: str
    """cpu or cuda."""
    max_length: int
    """Largest number of tokens of prompt and response together."""
    max_concurrent: int
    """Largest number of responses in flight at once."""
    memory_fraction: float = 0.4
    """Share of a GPU's memory that the engine may take."""
    cpu_cache_gib: float = 1.0
    """Size of the KV cache on a CPU, GiB."""
    seed: int = 0
    """Seed of the engine itself. Each response has its own seed."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: the model's type, or eight bits."""
    prefix_caching: bool = True
    """Whether the cached states of a prompt are kept for prompts with the same prefix."""
    tensor_parallel_size: int = 1
    """Number of processes over which each weight matrix is split."""
    sleeps: bool = False
    """Whether the engine frees the GPU's memory after each call of `generate`."""
    transfer: Transfer = ""
    returns_experts: bool = False
    """Whether responses contain the experts of their tokens. Possible only on GPUs."""


def start(settings: EngineSettings) -> "LLM":
    """Starts vLLM in this process, without a tokenizer. Its logprobs are those of the distribution that it samples
    from.

    Raises:
        SpecError: vLLM cannot run this model, or not with these settings.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Else vLLM splits the default process group, which has no device here, and an assertion fails.
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the learner's threads are bound as well
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    on_cpu = settings.device_type == "cpu"
    with process_restored():
        if on_cpu:
            _check_head_size(settings.weights_dir)
        from vllm import LLM

        try:
            llm = LLM(
                model=str(settings.weights_dir),
                trust_remote_code=False,
                dtype="float32" if on_cpu else "auto",
                enforce_eager=on_cpu,
                max_model_len=settings.max_length,
                max_num_seqs=settings.max_concurrent,
                seed=settings.seed,
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                enable_prefix_caching=settings.prefix_caching,
                tensor_parallel_size=settings.tensor_parallel_size,
                distributed_executor_backend=_executor(settings),
                worker_extension_cls="rpg.samplers.vllm.worker.WorkerExtension",
                **_device_settings(settings),
            )
        except ValueError as error:  # vLLM does not support this architecture, length or memory
            message = " ".join(str(error).rpartition("Value error, ")[2].split())
            hint = f"it says: {textwrap.shorten(message, 300)}"
            raise SpecError(
                Issue("vLLM does not start with this model and these settings", ("rollout",), hint=hint)
            ) from error
        if settings.tensor_parallel_size > 1:  # otherwise the worker is in this process
            llm.collective_rpc("follow_engine")
        return llm


def _executor(settings: EngineSettings) -> str:
    if settings.tensor_parallel_size > 1:
        return "mp"
    # If the trainer has several ranks, their process group already exists, and each rank has its own engine.
    several_ranks = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return "external_launcher" if several_ranks else "uni"


def _device_settings(settings: EngineSettings) -> dict[str, Any]:
    if settings.device_type == "cpu":
        # vLLM rewinds the generator of a request whose prompt it splits between passes, and a CPU's generator cannot be
        # rewound. To avoid splits, a pass holds at least max_model_len tokens.
        unsplit = {"enable_chunked_prefill": False}
        return {"kv_cache_memory_bytes": int(settings.cpu_cache_gib * _BYTES_PER_GIB), **unsplit}
    # Like the learner's, the logits of bfloat16 weights are not rounded to bfloat16.
    head = {"head_dtype": "float32"}
    chosen: dict[str, Any] = {"gpu_memory_utilization": settings.memory_fraction, "hf_overrides": head}
    chosen["kv_cache_dtype"] = settings.kv_cache
    if settings.sleeps:
        chosen["enable_sleep_mode"] = True
    if settings.returns_experts:
        chosen["enable_return_routed_experts"] = True
    if settings.transfer:
        chosen["weight_transfer_config"] = {"backend": settings.transfer}
    return chosen


def _check_head_size(weights_dir: Path) -> None:
    """Raises SpecError if vLLM's attention for CPUs does not support the model's head size.

    Without this check the first token would fail.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = config_of(weights_dir)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise SpecError(
            Issue(
                "vLLM on a CPU has no attention for the model's head size",
                path=("rollout", "engine"),
                given=f"head_dim {size}",
                allowed=", ".join(map(str, sizes)),
                hint="engine: transformers supports any",
            )
        )


def asleep_bytes() -> int:
    """Returns the bytes of the engine's tensors in this process whose memory is freed although torch still counts
    them."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return sum(each.handle[1] for each in allocator.pointer_to_data.values() if each.is_asleep) if allocator else 0


def shut_down(llm: "LLM", *, owns_distributed: bool) -> None:
    """Ends the engine. A process group that existed before it stays."""
    client = llm.llm_engine.engine_core
    if owns_distributed:
        client.shutdown()
    else:
        _shut_down_beside_learner(client)


def _shut_down_beside_learner(client: Any) -> None:
    """Shuts down the engine but keeps the default process group, which is the learner's."""
    from vllm.distributed import destroy_model_parallel, parallel_state

    client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    destroy_model_parallel()
    parallel_state.get_world_group().destroy()
    parallel_state._WORLD = None


@contextmanager
def process_restored() -> Iterator[None]:
    """Restores, at the end of the block, the state that vLLM changes in this process: the global random generators,
    which it seeds and draws from, and torch.set_num_threads, which it replaces."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with (
            torch.random.fork_rng(devices=_own_gpu()),
            warnings.catch_warnings(action="ignore"),  # vLLM uses deprecated functions
            _on_engine_stream(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def _own_gpu() -> list[int]:
    """Returns the current GPU, whose random state vLLM changes. The GPUs of other ranks must not be touched."""
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


@contextmanager
def _on_engine_stream() -> Iterator[None]:
    """Runs vLLM on one CUDA stream, whichever thread calls it. Its work is ordered after the caller's earlier work and
    before the caller's later work.

    vLLM keeps the stream of its first step and leaves the thread on it. On any other stream it would copy sampled
    tokens to the host without waiting for them.
    """
    if not torch.cuda.is_available():
        yield
        return
    caller, engine = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
    engine.wait_stream(caller)
    try:
        with torch.cuda.stream(engine):
            yield
    finally:
        caller.wait_stream(engine)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
