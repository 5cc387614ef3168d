"""Sampling with a transformers model in this process, on its own weights or on the learner's.

The sampler does not use transformers' own methods. `generate` keeps every sequence in the batch until the longest ends,
and copies the whole cache at each token. Continuous batching (`generate_batch`) seeds and uses the process's one
generator, so that a response depends on its batch-mates, and the learner's random state on the sampler. They have 0.2
and 0.6 times this sampler's speed if lengths have a long tail, 0.7 and 0.4 times if they are equal (decision 31).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rpg.pretrained import context_of
from rpg.routing import choices_taken
from rpg.samplers.base import AdmitMore, InProcessSampler
from rpg.samplers.stop_texts import StopTextWatch, tokenizer_in
from rpg.samplers.transformers.attention import ATTENTION
from rpg.samplers.transformers.cache import caches_all_layers
from rpg.samplers.transformers.decoding import Decoding, WatchFn
from rpg.types import OnResponse, Sampling

_UNBOUNDED = 1 << 20
"""Largest number of tokens of prompt and response together for a model whose config has no bound."""


class TransformersSampler(InProcessSampler):
    """Sampler with continuous batching.

    ZeRO stage 3 is not supported: it gathers the parameters in each forward pass, in which all ranks must take part
    equally often.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_id: int | Sequence[int],
        pad_id: int,
        max_concurrent: int,
        max_length: int | None = None,
        shared: bool = False,
        tokenizer_dir: Path | None = None,
    ) -> None:
        """Takes the model.

        Args:
            model: a decoder with full attention in all layers (Qwen3, Llama, GPT-2).
            eos_id: the token, or the tokens, each of which ends a response.
            pad_id: fills prompts up to a common length; never seen by attention.
            max_concurrent: most responses in flight at once.
            max_length: most tokens of prompt and response together; None means the model's context.
            shared: whether the model is the learner's own; then loading weights only counts the version.
            tokenizer_dir: directory of the policy's tokenizer, which stop texts need.
        """
        if not caches_all_layers(model.config):
            raise ValueError(
                f"{type(model).__name__} has layers without full attention; the sampler cannot cache those"
            )
        self._model = model
        self._eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        self._pad_id = pad_id
        self._max_concurrent = max_concurrent
        self._max_length = max_length or context_of(model.config) or _UNBOUNDED
        self._shared = shared
        self._tokenizer_dir = tokenizer_dir

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
        admitted = admit("idle") if admit else len(prompts)
        if admitted is None:
            return 0
        takes = choices_taken(self._model) if sampling.tells_experts else nullcontext()
        with _evaluating(self._model), torch.no_grad(), takes as taken:
            decoding = Decoding(
                self._model,
                prompts,
                seeds,
                group_size=group_size,
                sampling=sampling,
                eos_ids=self._eos_ids,
                pad_id=self._pad_id,
                max_concurrent=self._max_concurrent,
                limits=limits,
                admitted=admitted,
                watch=self._watch(sampling.stop),
                open_ended=open_ended,
                max_length=self._max_length,
                taken=taken,
            )
            return decoding.run(on_response, admit, on_unfinished)

    @property
    def max_length(self) -> int:
        """See InProcessSampler."""
        return self._max_length

    def _watch(self, stop: tuple[str, ...]) -> WatchFn | None:
        if not stop:
            return None
        return partial(StopTextWatch, tokenizer_in(self._tokenizer_dir).backend_tokenizer, stop)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Copies the weights into the model, unless the module is shared and already has them.

        Raises:
            ValueError: a name is not in the model, or one of the model's names is missing.
        """
        if not self._shared:
            copy_weights(self._model, weights)
        self.policy_version = policy_version

    def logprobs(
        self,
        token_ids: Sequence[int],
        *,
        prompt_length: int,
        temperature: float = 1.0,
        engine: int = 0,  # noqa: ARG002  # there is one
    ) -> list[float]:
        """Returns logprobs of the tokens after the prompt, nats, from one pass without a cache."""
        return model_logprobs(self._model, token_ids, prompt_length=prompt_length, temperature=temperature)

    def forget(self) -> None:
        """Does nothing, because no state of earlier calls is kept."""

    def sleep(self) -> None:
        """Does nothing, because only the weights are held between calls."""

    def close(self) -> None:
        """Does nothing, because nothing is held between calls."""


def model_logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0
) -> list[float]:
    """Returns logprobs of token_ids[prompt_length:] under the model, nats, in float32 from one forward pass."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    with _evaluating(model), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return [float(x) for x in logprobs.gather(-1, ids[0, prompt_length:, None])[:, 0]]


def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies named tensors into the model's parameters. A tied parameter may have any of its names.

    Raises:
        ValueError: a name is not in the model, or one of the model's names is missing.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in targets.items()}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in targets:
                raise ValueError(f"the model has no parameter {name}")
            targets[name].copy_(tensor)
            missing.pop(id(targets[name]), None)
    if missing:
        raise ValueError(f"no weights were given for {', '.join(sorted(missing.values()))}")


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Puts the model into evaluation mode, with an attention for the cache; restores both afterwards."""
    training = [module for module in model.modules() if module.training]
    attention = model.config._attn_implementation
    try:
        for module in training:
            module.training = False
        if attention != "eager":  # a model that supports only eager attention may need its other effects
            model.config._attn_implementation = ATTENTION
        yield
    finally:
        model.config._attn_implementation = attention
        for module in training:
            module.training = True
