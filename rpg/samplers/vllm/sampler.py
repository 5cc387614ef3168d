"""Sampling with a vLLM engine in this process, which gets new weights without copies through files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpg.processes.device_memory import peak_of_gpu
from rpg.samplers.base import AdmitMore, InProcessSampler, pause_of
from rpg.samplers.stop_texts import tokenizer_in
from rpg.samplers.vllm.engine import EngineSettings, asleep_bytes, process_restored, shut_down, start
from rpg.samplers.vllm.weight_transfer import directory_in_memory
from rpg.types import FinishReason, OnResponse, Rollout, Sampling, Turn
from specs.machine.standstill import show_work

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

Request = tuple[dict[str, list[int]], "SamplingParams"]
"""Prompt of a response, and its sampling settings."""


class VllmSampler(InProcessSampler):
    """The vLLM engine of a rank.

    Each response is a request with its own seed; vLLM's prefix caching shares the prompt. Batch-mates may change the
    last bits of logprobs. Weights are copied in this process, from the learner's tensors. vLLM's weight-transfer API
    (nccl, ipc) is for engines in separate processes, see rpg/samplers/vllm/dedicated.py.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Starts the engine. Raises SpecError if vLLM cannot run this model, or not with these settings."""
        self._settings = settings
        self._owns_distributed = not torch.distributed.is_initialized()
        self._llm = start(settings)
        self._asleep = False
        """Whether the GPU's memory is freed: all of it, or all except the weights."""
        self._has_weights = True

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int],
        on_response: OnResponse,
        admit: AdmitMore | None = None,
        *,
        open_ended: bool = False,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        if sampling.stop:
            self._need_tokenizer()

        def requests(begun: int, admitted: int) -> list[Request]:
            return [
                self._request(prompts[i], sampling, limit=limits[i], seed=_response_seed(seeds[i], member))
                for i in range(begun, admitted)
                for member in range(group_size)
            ]

        def finished(index: int, output: "RequestOutput") -> None:
            rollout = _rollout(output, certain=sampling.temperature == 0)
            if sampling.tells_experts:
                rollout = replace(rollout, experts=_experts(output))
            on_response(index, rollout)

        return self._run(requests, len(prompts), finished, admit, open_ended=open_ended, on_unfinished=on_unfinished)

    @property
    def max_length(self) -> int:
        """See InProcessSampler."""
        return self._settings.max_length

    def _request(self, prompt: Sequence[int], sampling: Sampling, *, limit: int, seed: int) -> "Request":
        """Returns the engine's request for one response."""
        from vllm import SamplingParams

        return {"prompt_token_ids": list(prompt)}, SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop),
            max_tokens=limit,
            stop_token_ids=list(self._settings.eos_ids),
            seed=seed,
            logprobs=0,
            detokenize=bool(sampling.stop),
        )

    def _need_tokenizer(self) -> None:
        """Sets the policy's tokenizer for vLLM's search for stop texts. The engine starts without a tokenizer."""
        processor = self._llm.llm_engine.output_processor
        processor.tokenizer = processor.tokenizer or tokenizer_in(self._settings.weights_dir)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Loads the weights, renews their packed copies for kernels, and drops cached states of the old weights."""
        self.wake_weights()
        self._reload(weights)
        self.finish_load(policy_version)

    def load_directory(self, weights_dir: str, *, policy_version: int) -> None:
        """Loads weights from the safetensors of a transformers directory."""
        self.wake_weights()
        self.call_workers("reload_weights", {"weights_path": weights_dir})
        self.finish_load(policy_version)

    def load_safetensors(self, content: bytes, *, policy_version: int) -> None:
        """Loads weights from the bytes of such a directory's safetensors."""
        with directory_in_memory(self._settings.weights_dir, content) as directory:
            self.load_directory(directory, policy_version=policy_version)

    def finish_load(self, policy_version: int) -> None:
        """Finishes a load of weights, however they were transferred.

        Raises:
            RuntimeError: requests are still running.
        """
        if self._settings.device_type == "cpu":
            self._repack()
        self._has_weights = True
        self.forget()
        self.policy_version = policy_version

    def forget(self) -> None:
        """Empties the prefix cache. A sleeping engine has none.

        Raises:
            RuntimeError: requests are still running.
        """
        if not self._asleep and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.call_workers("reload_weights", {"weights_iterator": weights})

    def _repack(self) -> None:
        self.call_workers("pack_weights_again")

    def call_workers(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Calls a method of vLLM's workers by name."""
        with process_restored():
            results: list[Any] = self._llm.collective_rpc(method, kwargs=arguments or {})
        return results

    def logprobs(
        self,
        token_ids: Sequence[int],
        *,
        prompt_length: int,
        temperature: float = 1.0,
        engine: int = 0,  # noqa: ARG002  # there is one
    ) -> list[float]:
        """Returns logprobs of the tokens after the prompt, nats, from a prefill that does not read the cache.

        Raises:
            ValueError: a temperature other than 1, which vLLM does not apply to given tokens.
        """
        from vllm import SamplingParams

        if temperature != 1.0:
            raise ValueError(f"vLLM returns logprobs of given tokens only at temperature 1, not {temperature}")
        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs: list[RequestOutput] = []
        request = {"prompt_token_ids": list(token_ids)}, parameters
        self._run(lambda _, __: [request], 1, lambda _, output: outputs.append(output))
        assert outputs[0].prompt_logprobs is not None
        entries = zip(token_ids, outputs[0].prompt_logprobs, strict=True)  # the first token's entry is None
        return [entry[token].logprob for token, entry in entries if entry is not None][prompt_length - 1 :]

    def _run(
        self,
        requests: Callable[[int, int], list["Request"]],
        num_prompts: int,
        finished: "Callable[[int, RequestOutput], None]",
        admit: AdmitMore | None = None,
        *,
        open_ended: bool = False,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Runs the requests of all prompts or, until `admit` ends the call, of those that it allows.

        Args:
            requests: (first, end) -> the requests of these prompts, in order.
            num_prompts: number of all prompts.
            finished: called with the index and the output of each request as it ends. If `finished` or `admit` raises,
                the other requests are aborted.
            admit: see InProcessSampler.
            open_ended: see InProcessSampler.
            on_unfinished: see InProcessSampler; called in the order of the requests.
        Returns:
            Sampled tokens of the requests that had not ended.
        """
        self.wake()
        engine = self._llm.llm_engine
        indices: dict[str, int] = {}
        begun = count = 0

        def begin(admitted: int) -> None:
            nonlocal begun, count
            added = requests(begun, admitted)
            names = self._llm.enqueue([prompt for prompt, _ in added], [drawn for _, drawn in added], use_tqdm=False)
            # The engine appends a suffix to a name to make it unique, and omits the suffix in its outputs.
            indices.update((name.partition("-")[0], count + place) for place, name in enumerate(names))
            begun, count = admitted, count + len(added)

        with process_restored():
            try:
                if not admit:
                    begin(num_prompts)
                steps, asks = 0, False
                while indices or admit:
                    pause = pause_of(idle=not indices, steps=steps, ended=asks)
                    if admit and pause:
                        admitted, asks = admit(pause), False
                        steps = steps if pause == "ended" else 0
                        if admitted is None:
                            break
                        if admitted > begun:
                            begin(admitted)
                        continue
                    for output in engine.step():
                        if output.finished:
                            finished(indices.pop(output.request_id), output)
                            asks = open_ended
                    show_work()
                    steps += 1
                states = engine.output_processor.request_states
                if on_unfinished:
                    for name, index in indices.items():
                        state = next(state for key, state in states.items() if key.partition("-")[0] == name)
                        if state.detokenizer.num_output_tokens():
                            on_unfinished(index, _unfinished(state))
                return sum(state.detokenizer.num_output_tokens() for state in states.values())
            finally:
                if indices:
                    engine.abort_request(list(indices))

    def sleep(self) -> None:
        """Frees the GPU's memory if the spec lets the engine sleep. The weights' memory is freed too, because new
        weights come before anything is sampled."""
        if self._settings.sleeps:
            self._llm.sleep(level=2)
            peak_of_gpu().unmapped(asleep_bytes())
            self._asleep, self._has_weights = True, False

    def wake_weights(self) -> None:
        """Reallocates only the memory of the weights, if the engine is asleep. The cache is not allocated while new
        weights are transferred, because the learner may then hold gathered or merged copies of its weights. The engine
        wakes fully before it samples.
        """
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
            peak_of_gpu().unmapped(asleep_bytes())

    def wake(self) -> None:
        """Reallocates the engine's memory if it is asleep.

        Raises:
            RuntimeError: no weights were loaded since it went to sleep.
        """
        if not self._has_weights:
            raise RuntimeError("vLLM was asleep and has received no weights since")
        if self._asleep:
            self._llm.wake_up()
            peak_of_gpu().unmapped(asleep_bytes())
            self._asleep = False

    def close(self) -> None:
        """Ends the engine. A process group that existed before it stays."""
        shut_down(self._llm, owns_distributed=self._owns_distributed)
        del self._llm


def _response_seed(seed: int, member: int) -> int:
    """Returns a seed in [0, 2^63). With vLLM's own rule, seed + member, prompts with neighbouring seeds would share
    seeds."""
    state = np.random.SeedSequence([seed % 2**64, member]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def _rollout(output: "RequestOutput", *, certain: bool) -> Rollout:
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    assert completion.logprobs is not None
    drawn = zip(tokens, completion.logprobs, strict=True)
    logprobs = tuple(0.0 if certain else entry[token].logprob for token, entry in drawn)
    reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
    return Rollout((Turn(tokens, logprobs),), reason)


def _unfinished(state: Any) -> Rollout:
    """Returns the tokens so far of a request that the engine's output processor still holds (vLLM's own interface)."""
    tokens, drawn = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
    logprobs = tuple(entry[token].logprob for token, entry in zip(tokens, drawn, strict=True))
    return Rollout((Turn(tuple(tokens), logprobs),), "length")


def _experts(output: "RequestOutput") -> NDArray[np.integer[Any]]:
    """Returns the experts of each token of prompt and response except the last. [prompt + response - 1, layers, experts
    per token]

    Raises:
        RuntimeError: the engine did not return them.
    """
    completion, prompt = output.outputs[0], output.prompt_token_ids or []
    count = len(prompt) + len(completion.token_ids) - 1
    experts: NDArray[np.integer[Any]] | None = completion.routed_experts
    if experts is None or len(experts) < count:
        told = "none" if experts is None else str(len(experts))
        raise RuntimeError(f"vLLM returned the experts of {told} of {count} tokens")
    return experts[:count]
