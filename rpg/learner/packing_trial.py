"""Tests, before training, whether sequences in a packed row are computed as if each were alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rpg.learner.packing import Packing
from rpg.pretrained import context_of
from rpg.processes import ranks

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Precision -> largest accepted mean difference between logprobs in a packed row and those of the same sequence alone,
as a share of the logprobs' standard deviation. Measured on random models of 2 to 12 layers on a CPU: at most 8e-7 and
0.012 if the sequences are kept separate, at least 0.54 if not."""
_LONGEST = 88
"""Number of tokens of the longest sequence, if the model's context allows it."""


@dataclass(frozen=True, slots=True)
class PackingTrial:
    """The result of the test, the same on all ranks."""

    difference: float
    """Mean difference of the responses' logprobs, divided by their standard deviation, on the rank with the largest
    value. Infinite if the model's attention does not know packed rows or returns NaN."""
    tolerance: float

    @property
    def keeps_apart(self) -> bool:
        """Whether a pass may hold several sequences in a row."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        if not math.isfinite(self.difference):
            return "responses are padded, which takes longer: the model's attention does not keep them apart in a row"
        given = f"in one row their logprobs differ by {self.difference:.1e} of their spread from those of each alone"
        if self.keeps_apart:
            return f"responses are packed: {given}"
        return f"responses are padded, which takes longer: {given}, allowed {self.tolerance:g}"


@torch.no_grad()
def try_packing(
    policy: Callable[..., tuple[Tensor, Tensor]], config: PretrainedConfig, device: torch.device, *, precision: str
) -> PackingTrial:
    """Compares the logprobs of three responses to a prompt, packed in one row after another sequence, with those of
    each response alone.

    All ranks call it. The policy is tested, since no list of architectures would cover all failures: layers of another
    kind, a state that runs along the row, or sequence bounds that do not reach the attention. The mean over many tokens
    distinguishes rounding from error; a few tokens in bfloat16 do not.
    """
    text = config.get_text_config()
    longest = min(_LONGEST, context_of(config) or _LONGEST)
    prompt = longest // 4
    responses = [(longest - prompt) * share // 6 for share in (6, 4, 5)]
    packing = Packing(((prompt,), (prompt, *responses)), device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text.vocab_size, (2 * prompt + sum(responses),), generator=generator).to(device)
    start, differences, logprobs = 2 * prompt, [], []
    for length in responses:
        sources = torch.arange(start, start + length - 1, device=device)
        together, _ = policy(ids[None], sources, ids[sources + 1], packing=packing)
        sequence = torch.cat([ids[prompt : 2 * prompt], ids[start : start + length]])
        alone, _ = policy(sequence[None], sources - start + prompt, ids[sources + 1])
        differences.append((together - alone).abs())
        logprobs.append(alone)
        start += length
    share = float(torch.cat(differences).mean() / torch.cat(logprobs).std().clamp(min=1e-9))
    known = packing.layers == text.num_hidden_layers * len(responses) and math.isfinite(share)
    here = torch.tensor(share if known else math.inf, dtype=torch.float64)
    return PackingTrial(float(ranks.largest(here)), TOLERANCE[precision])
