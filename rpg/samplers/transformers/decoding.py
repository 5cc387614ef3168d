"""One call of the transformers sampler. Responses enter a slot of the cache, get one token per step, and leave at their
end."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rpg.routing import pop_choices
from rpg.samplers.base import AdmitMore, pause_of
from rpg.samplers.stop_texts import StopTextWatch
from rpg.samplers.transformers.cache import KeptRows, KeysValues, ReturningContexts, SlotCache, laid_out
from rpg.samplers.transformers.draws import BLOCK, draw, uniforms
from rpg.types import OnResponse, Rollout, Sampling, Turn
from specs.machine.standstill import show_work

_PREFILL_TOKENS = 8192
"""Largest number of prompt tokens, including padding, of one prefill pass."""
_FIRST_CAPACITY = 64
"""Number of response positions for which the cache has room at first. It grows with the sampled tokens, not with the
maximum."""

_WIDTHS = {"cuda": 64}
"""Kind of device -> number of which the number of keys in attention is a multiple; 1 if the device is not listed.
cuDNN's kernels, which torch prefers on Hopper, make a plan for each number of keys. A plan takes about 30 ms, a step
10. With the multiple these kernels are no slower than others: on an H200, a step with 64 slots of a 1.7B model takes
36.6 ms with them and 38.7 ms without."""

WatchFn = Callable[[Sequence[int]], StopTextWatch]
"""Function from prompt token ids to a detector of stop texts in one response to that prompt."""


class Decoding:
    """State of the decoding loop. Its control data are NumPy arrays on the host, with one entry per slot. The first
    `active` slots are in use.

    A prompt's keys and values are computed once, without its last token, and copied to the slots of its group. The last
    token is the first one that a slot is fed, so that the first response token comes out of the same step as all
    others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        group_size: int,
        sampling: Sampling,
        eos_ids: Sequence[int],
        pad_id: int,
        max_concurrent: int,
        limits: Sequence[int],
        admitted: int,
        watch: WatchFn | None = None,
        open_ended: bool = False,
        max_length: int = 0,
        taken: list[torch.Tensor] | None = None,
    ) -> None:
        """See Sampler. The first `admitted` of the prompts may start at once; their responses have slots, at most
        `max_concurrent`. With `open_ended`, prompts, seeds and limits are lists that grow during the call. A new prompt
        may continue a response that has ended. Keys and values of such responses are kept while the slots leave room:
        slots and kept rows together have `max_length` positions per slot. `taken` is the list to which the experts of
        each pass are appended (see `rpg.routing.choices_taken`); with it, prompts do not continue responses."""
        self.model, self.device = model, model.device
        self.prompts, self.seeds, self.group_size, self.sampling = prompts, seeds, group_size, sampling
        self.pad_id, self.eos_ids = pad_id, np.array(eos_ids)
        self.limits = limits
        """Largest number of response tokens of each prompt."""
        self.admitted = admitted
        """Number of prompts that may have started."""
        self.entered = 0
        """Number of responses that have had a slot. They get slots in order: response i is number i mod group_size of
        prompt i // group_size."""
        self.max_concurrent = max_concurrent
        slots = min(max_concurrent, max(admitted, 1) * group_size)
        longest = max([sampling.max_response_length if open_ended else 0, *limits], default=0)
        self.responses = np.zeros(slots, dtype=np.int64)
        """Index of the response in each slot."""
        self.lengths = np.zeros(slots, dtype=np.int64)
        """Number of positions of each slot in the cache, without the token that is fed next."""
        self.counts = np.zeros(slots, dtype=np.int64)
        """Number of response tokens sampled so far."""
        self.most = np.zeros(slots, dtype=np.int64)
        """Largest number of response tokens."""
        self.feed = np.zeros(slots, dtype=np.int64)
        """Token that each slot is fed next."""
        self.noise = np.zeros((slots, min(longest, BLOCK)))
        self.watch = watch
        """Function that makes detectors of stop texts; None if no text ends a response."""
        self.watches = np.empty(slots if watch else 0, dtype=object)
        self.taken = taken
        """List of the experts of each pass; None if they are not requested."""
        self.experts = np.empty(slots if taken is not None else 0, dtype=object)
        """Experts of the tokens that each slot has been fed, in parts. [tokens, layers, experts per token] each"""
        self.optional = [name for name, used in (("watches", watch), ("experts", taken is not None)) if used]
        """Names of those arrays above, with one entry per slot, that only some calls use."""
        self.prefilled_experts: list[NDArray[np.int16]] = []
        """Experts of the prompts in `prefilled`, in the order of its rows."""
        self.active = 0
        self.tokens = np.empty((slots, longest), dtype=np.int64)
        self.logprobs = np.empty((slots, longest), dtype=np.float32)
        capacity = max((len(prompt) for prompt in prompts), default=0) + min(longest, _FIRST_CAPACITY)
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, slots=slots, capacity=capacity)
        self.prefilled: list[KeysValues] = []
        self.prefilled_range = range(0)
        """Prompts whose keys and values are in `prefilled`."""
        self.prefilled_rows = np.zeros(0, dtype=np.int64)
        """Row of each of these prompts in `prefilled`. Equal consecutive prompts share a row."""
        self.open_ended = open_ended
        self.max_length = max_length
        self.returning = ReturningContexts()

    def run(
        self, on_response: OnResponse, admit: AdmitMore | None = None, on_unfinished: OnResponse | None = None
    ) -> int:
        """Samples until all responses to the admitted prompts have ended, or `admit` ends the call; see
        InProcessSampler.

        Returns the tokens of the responses that have not ended.
        """
        self._admit(np.arange(len(self.responses)))
        steps, asks = 0, False
        while self.active or admit:
            pause = pause_of(idle=not self.active, steps=steps, ended=asks)
            if admit and pause:
                admitted, asks = admit(pause), False
                steps = steps if pause == "ended" else 0
                if admitted is None:
                    break
                self.admitted = admitted
                self._add_slots()
                self._admit(np.arange(self.active, len(self.responses)))
                continue
            self._step()
            show_work()
            steps += 1
            ended = np.isin(self.feed[: self.active], self.eos_ids)
            if self.watch:
                fed = zip(self.watches[: self.active], self.feed[: self.active].tolist(), strict=True)
                ended |= [watch.completes(token) for watch, token in fed]
            done = ended | (self.counts[: self.active] >= self.most[: self.active])
            if done.any():
                for slot in np.flatnonzero(done):
                    if self.open_ended and ended[slot] and not on_unfinished:
                        self._keep(int(slot))
                    on_response(int(self.responses[slot]), self._rollout(slot, stopped=bool(ended[slot])))
                self._refill(np.flatnonzero(done))
                asks = self.open_ended
        if on_unfinished:
            for slot in np.flatnonzero(self.counts[: self.active]):
                on_unfinished(int(self.responses[slot]), self._rollout(slot, stopped=False))
        return int(self.counts[: self.active].sum())

    def _add_slots(self) -> None:
        """Adds slots, up to `max_concurrent`, if more responses are running than at first."""
        under_way = self.active + self.admitted * self.group_size - self.entered
        missing = min(under_way, self.max_concurrent) - len(self.responses)
        for name in ("responses", "lengths", "counts", "most", "feed", "noise", "tokens", "logprobs", *self.optional):
            values = getattr(self, name)
            added = np.zeros((max(missing, 0), *values.shape[1:]), dtype=values.dtype)
            setattr(self, name, np.concatenate([values, added]))

    def _rollout(self, slot: np.int64, *, stopped: bool) -> Rollout:
        count = self.counts[slot]
        tokens, logprobs = self.tokens[slot, :count].tolist(), self.logprobs[slot, :count].tolist()
        experts = np.concatenate(self.experts[slot]) if self.taken is not None else None
        turns = (Turn(tuple(tokens), tuple(logprobs)),)
        return Rollout(turns, "stop" if stopped else "length", experts=experts)

    def _keep(self, slot: int) -> None:
        """Keeps the keys and values of a response that has ended, because its environment may continue it."""
        length = int(self.lengths[slot])
        if length <= self._room():
            prompt = self.prompts[self.responses[slot] // self.group_size]
            tokens = (*prompt, *self.tokens[slot, : self.counts[slot] - 1].tolist())
            self.returning.keep(tokens, self.cache.rows_of(slot, length))
            self.returning.shrink(self._room())

    def _room(self) -> int:
        """Returns the number of positions that may be kept."""
        return len(self.responses) * self.max_length - self.cache.slots * self.cache.capacity

    def _reserve(self, slots: int, width: int) -> None:
        """Makes room in the slots for this number of positions. Slots have priority over kept rows."""
        self.cache.reserve(slots=slots, width=width)
        self.returning.shrink(self._room())

    def _step(self) -> None:
        """Samples one token for every active slot."""
        active = self.active
        lengths = self.lengths[:active]
        multiple = _WIDTHS.get(self.device.type, 1)
        width = -(-(int(lengths.max()) + 1) // multiple) * multiple
        more_may_enter = self.open_ended or self.entered < len(self.prompts) * self.group_size
        self._reserve(len(self.responses) if more_may_enter else active, width)
        rows, ends = torch.arange(active, device=self.device), self._device(lengths)
        self.cache.aim(rows, ends, width=width)
        hidden = torch.arange(width, device=self.device) > ends[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        logits = self.model(
            input_ids=self._device(self.feed[:active])[:, None],
            position_ids=ends[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        if self.taken is not None:
            for parts, own in zip(self.experts[:active], pop_choices(self.taken), strict=True):
                parts.append(own[None])
        tokens, logprobs = draw(
            logits.float(),
            self._device(self.noise[np.arange(active), self.counts[:active] % BLOCK]),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
        )
        self._record(tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _device(self, values: NDArray[np.generic]) -> torch.Tensor:
        # A copy: otherwise the tensor on the CPU would share memory with data that the next step changes.
        return torch.from_numpy(values.copy()).to(self.device, non_blocking=True)

    def _record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        active = self.active
        slots = np.arange(active)
        self.tokens[slots, self.counts[:active]] = tokens
        self.logprobs[slots, self.counts[:active]] = logprobs
        self.feed[:active] = tokens
        self.counts[:active] += 1
        self.lengths[:active] += 1
        for slot in np.flatnonzero(self.counts[:active] % BLOCK == 0):
            self._renew_noise(int(slot))

    def _renew_noise(self, slot: int) -> None:
        prompt, member = divmod(int(self.responses[slot]), self.group_size)
        block = int(self.counts[slot]) // BLOCK
        self.noise[slot] = uniforms(self.seeds[prompt], member, block, self.noise.shape[1])

    def _refill(self, free: NDArray[np.int64]) -> None:
        """Fills free slots with waiting responses. If no response waits, the last active slots move into the free
        ones."""
        admitted = self._admit(free)
        unfilled = free[admitted:]
        remaining = self.active - len(unfilled)
        targets = unfilled[unfilled < remaining]
        tail = np.arange(remaining, self.active)
        sources = tail[~np.isin(tail, unfilled)]
        if len(targets):
            self.cache.move(self._device(sources), self._device(targets))
            for values in (
                self.responses,
                self.lengths,
                self.counts,
                self.most,
                self.feed,
                self.noise,
                self.tokens,
                self.logprobs,
            ):
                values[targets] = values[sources]
            if self.watch:
                self.watches[targets] = self.watches[sources]
            if self.taken is not None:
                self.experts[targets] = self.experts[sources]
        self.active = remaining

    def _admit(self, free: NDArray[np.int64]) -> int:
        """Puts waiting responses into the first free slots. Returns how many."""
        number = min(len(free), self.admitted * self.group_size - self.entered)
        done = 0
        while done < number:
            prompt = self.entered // self.group_size
            if prompt not in self.prefilled_range:
                self._prefill(prompt)
            ready = self.prefilled_range.stop * self.group_size - self.entered
            slots = free[done : min(done + ready, number)]
            self._enter(slots, np.arange(self.entered, self.entered + len(slots)))
            done += len(slots)
        if number and int(free[:number].max()) >= self.active:
            self.active = int(free[:number].max()) + 1
        return number

    def _enter(self, slots: NDArray[np.int64], responses: NDArray[np.int64]) -> None:
        """Starts the responses in the slots. Their prompts are already prefilled."""
        prompts = responses // self.group_size
        self.responses[slots], self.counts[slots] = responses, 0
        self.lengths[slots] = [len(self.prompts[prompt]) - 1 for prompt in prompts]
        self.most[slots] = [self.limits[prompt] for prompt in prompts]
        self.feed[slots] = [self.prompts[prompt][-1] for prompt in prompts]
        for slot in slots:
            self._renew_noise(int(slot))
            if self.watch:
                self.watches[slot] = self.watch(self.prompts[self.responses[slot] // self.group_size])
            if self.taken is not None:
                row = self.prefilled_rows[self.responses[slot] // self.group_size - self.prefilled_range.start]
                self.experts[slot] = [self.prefilled_experts[row]] if self.prefilled_experts else []
        self.entered += len(slots)
        longest = int(self.lengths[slots].max())
        if longest:
            self._reserve(len(self.responses), longest)
            source_rows = self._device(self.prefilled_rows[prompts - self.prefilled_range.start])
            self.cache.admit(self._device(slots), self.prefilled, source_rows, length=longest)

    def _prefill(self, first: int) -> None:
        """Computes the keys and values of prompts from `first` on, as many as one pass holds, each without its last
        token. The prompts of a pass are all new, or all continue kept rows."""
        longest = 0
        block: list[Sequence[int]] = []
        kept: list[KeptRows] = []
        rows: list[int] = []
        for prompt in self.prompts[first : self.admitted]:
            if not block or prompt != block[-1]:
                known = self.returning.of(prompt)
                longest = max(longest, len(prompt) - 1)
                if block and (longest * (len(block) + 1) > _PREFILL_TOKENS or bool(known) != bool(kept[0])):
                    break
                block.append(prompt)
                kept.append(known)
            rows.append(len(block) - 1)
        self.prefilled, self.prefilled_range = [], range(first, first + len(rows))
        self.prefilled_experts = []
        self.prefilled_rows = np.array(rows)
        if kept[0]:
            self.prefilled = self._gone_on(block, kept)
        elif longest:
            # Padding comes after the prompt, so causal attention excludes it from the prompt's own states.
            padded = [[*prompt[:-1], *[self.pad_id] * (longest + 1 - len(prompt))] for prompt in block]
            ids = torch.tensor(padded, device=self.device)
            cache = DynamicCache()
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self.prefilled = [_states(layer) for layer in cache.layers]
            if self.taken is not None:
                of_rows = np.split(pop_choices(self.taken), len(block))
                self.prefilled_experts = [own[: len(prompt) - 1] for own, prompt in zip(of_rows, block, strict=True)]

    def _gone_on(self, prompts: Sequence[Sequence[int]], kept: Sequence[KeptRows]) -> list[KeysValues]:
        """Returns the keys and values of prompts whose prefixes are kept. Only the tokens after the kept prefixes are
        computed."""
        before = torch.tensor([rows[0][0].shape[1] for rows in kept], device=self.device)
        most = int(before.max())
        new = [prompt[rows[0][0].shape[1] : -1] for prompt, rows in zip(prompts, kept, strict=True)]
        longest = max(map(len, new))
        ids = torch.tensor([[*tokens, *[self.pad_id] * (longest - len(tokens))] for tokens in new], device=self.device)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(laid_out(kept)):
            cache.update(keys, values, layer)
        place = torch.arange(longest, device=self.device)
        # A token sees the kept part of its own prompt, and the new tokens up to itself.
        old = (torch.arange(most, device=self.device) < before[:, None])[:, None].expand(-1, longest, -1)
        seen = torch.cat([old, (place[:, None] >= place).expand(len(new), -1, -1)], dim=-1)
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        self.model(
            input_ids=ids,
            position_ids=before[:, None] + place,
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        # New tokens are placed after the longest kept part; here each prompt's are moved to the end of its own.
        position = torch.arange(max(map(len, prompts)) - 1, device=self.device)
        source = torch.where(position < before[:, None], position, most + position - before[:, None])
        source = source.clamp_(max=most + longest - 1)[:, None, :, None]
        return [
            (
                keys.gather(2, source.expand(-1, keys.shape[1], -1, keys.shape[3])),
                values.gather(2, source.expand(-1, values.shape[1], -1, values.shape[3])),
            )
            for keys, values in map(_states, cache.layers)
        ]


def _states(layer: object) -> KeysValues:
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values
