"""Sampling with a vLLM engine that lives in this process, so that new weights reach it without leaving memory."""

import gc
import os
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rpg.engines.prompts import check_prompts, response_limits
from rpg.types import FinishReason, Rollout, RolloutGroup, Sampling
from specs.errors import Problem, SpecError

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

_BYTES_PER_GIB = 2**30


class VllmSampler:
    """A vLLM engine, one a rank.

    Each response is a request with a seed of its own; vLLM's prefix caching shares the prompt. Weights are handed over
    in this process, from the learner's tensors: vLLM's weight-transfer API (nccl, ipc) is for engines in processes of
    their own.
    """

    def __init__(
        self,
        weights_dir: Path,
        *,
        eos_ids: Sequence[int],
        device: torch.device,
        max_length: int,
        max_concurrent: int,
        memory_fraction: float,
        cpu_cache_gib: float,
        seed: int,
    ) -> None:
        """
        Args:
            weights_dir: config and safetensors of a transformers model.
            eos_ids: any of them ends a response.
            device: cpu or cuda.
            max_length: tokens of prompt and response together at most.
            max_concurrent: responses in flight at once.
            memory_fraction: share of a GPU's memory that the engine may take.
            cpu_cache_gib: its KV cache on a CPU, GiB.
            seed: the engine's own; responses have theirs.
        Raises:
            SpecError: vLLM does not run this model, or not with this memory.
        """
        self._eos_ids = list(eos_ids)
        self._max_length = max_length
        self._owns_distributed = not torch.distributed.is_initialized()
        on_cpu = device.type == "cpu"
        memory: dict[str, Any] = {"gpu_memory_utilization": memory_fraction}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": int(cpu_cache_gib * _BYTES_PER_GIB)}
        with _our_process_untouched():
            if on_cpu:
                _check_head_size(weights_dir)
            self._llm = _start_engine(
                model=str(weights_dir),
                dtype="float32" if on_cpu else "auto",
                enforce_eager=on_cpu,
                max_model_len=max_length,
                max_num_seqs=max_concurrent,
                seed=seed,
                **memory,
            )
        self.policy_version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[RolloutGroup]:
        """`group_size` responses to each prompt; see Sampler. Batch-mates may change the last bits of the arithmetic.

        Raises:
            ValueError: a prompt that is empty or leaves no room for a response, or seeds that do not match the prompts.
        """
        from vllm import SamplingParams

        check_prompts(prompts, seeds, max_length=self._max_length)
        limits = response_limits(prompts, sampling, max_length=self._max_length)
        requests, parameters = [], []
        for prompt, seed, limit in zip(prompts, seeds, limits, strict=True):
            for member in range(group_size):
                requests.append({"prompt_token_ids": list(prompt)})
                parameters.append(
                    SamplingParams(
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        max_tokens=limit,
                        stop_token_ids=self._eos_ids,
                        seed=_response_seed(seed, member),
                        logprobs=0,
                        detokenize=False,
                    )
                )
        outputs = self._run(requests, parameters)
        certain = sampling.temperature == 0
        rollouts = [_rollout(output, certain=certain) for output in outputs]
        return [
            RolloutGroup(tuple(prompt), tuple(rollouts[i * group_size : (i + 1) * group_size]), self.policy_version)
            for i, prompt in enumerate(prompts)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Copies the weights in, packs again those that a kernel keeps packed, and drops what the old ones cached."""
        self._reload(weights)
        self._repack()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")
        self.policy_version = policy_version

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with _our_process_untouched():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _repack(self) -> None:
        # On a CPU, vLLM multiplies by packed copies of the weights, and its reload leaves that of a tied head as it
        # was. Nothing reports that; logprobs are off by as much as the weights have moved.
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in _model(self._llm).modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """Of the tokens after the prompt, nats, by a prefill that reads no cache.

        Raises:
            ValueError: a temperature other than 1, which vLLM does not apply to given tokens.
        """
        from vllm import SamplingParams

        if temperature != 1.0:
            raise ValueError(f"vLLM gives the logprobs of given tokens at temperature 1 only, not {temperature}")
        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        output = self._run([{"prompt_token_ids": list(token_ids)}], [parameters])[0]
        assert output.prompt_logprobs is not None
        given = zip(token_ids, output.prompt_logprobs, strict=True)
        return [entry[token].logprob for token, entry in given if entry is not None][prompt_length - 1 :]

    def _run(self, requests: list[dict[str, list[int]]], parameters: list[Any]) -> "list[RequestOutput]":
        with _our_process_untouched():
            outputs: list[RequestOutput] = self._llm.generate(requests, parameters, use_tqdm=False)
        return outputs

    def close(self) -> None:
        """Ends the engine. A process group that was there before it stays."""
        client = self._llm.llm_engine.engine_core
        if self._owns_distributed:
            client.shutdown()
        else:
            _shut_down_beside_learner(client)
        del self._llm


def _shut_down_beside_learner(client: Any) -> None:
    """What the engine's own shutdown does, except that it destroys the default process group: here, the learner's."""
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


def _start_engine(**settings: Any) -> "LLM":
    """In this process, without a tokenizer, its logprobs those of the distribution that it samples from."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the learner's threads are bound as well
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    # A process group of several ranks is there already, and each of them has an engine of its own.
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    try:
        return LLM(
            **settings,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            enable_prefix_caching=True,
            distributed_executor_backend="external_launcher" if several else "uni",
        )
    except ValueError as error:  # of what it is given: architecture, length, memory
        said = " ".join(str(error).rpartition("Value error, ")[2].split())
        hint = f"it says: {textwrap.shorten(said, 300)}"
        raise SpecError(
            Problem("vLLM does not start with this model and these settings", ("rollout",), hint=hint)
        ) from error


def _check_head_size(weights_dir: Path) -> None:
    """Raises SpecError where vLLM's attention for CPUs lacks the model's head size; else the first token would fail."""
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(weights_dir)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise SpecError(
            Problem(
                "vLLM on a CPU has no attention for the model's head size",
                path=("rollout", "engine"),
                given=f"head_dim {size}",
                allowed=", ".join(map(str, sizes)),
                hint="engine: transformers takes any",
            )
        )


def _model(llm: "LLM") -> torch.nn.Module:
    models: list[torch.nn.Module] = llm.collective_rpc("get_model")
    return models[0]


def _response_seed(seed: int, member: int) -> int:
    """In [0, 2^63). vLLM's own for siblings is seed + member, which neighbouring seeds of prompts would share."""
    state = np.random.SeedSequence([seed % 2**64, member]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def _rollout(output: "RequestOutput", *, certain: bool) -> Rollout:
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    assert completion.logprobs is not None
    drawn = zip(tokens, completion.logprobs, strict=True)
    logprobs = tuple(0.0 if certain else entry[token].logprob for token, entry in drawn)
    reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
    return Rollout(tokens, logprobs, reason)


@contextmanager
def _our_process_untouched() -> Iterator[None]:
    """vLLM in this process seeds the global generators, draws from them, and replaces torch.set_num_threads: undone."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):  # of what it uses that is deprecated
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
