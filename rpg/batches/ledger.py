"""What is known of each sampled token of a step, laid end to end as in StepRollouts.

Each rank fills in the tokens it trains on.
"""

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch
from rpg.processes import ranks


class TokenLedger:
    """Columns of one float32 a token, on the host; NaN where nothing is known."""

    COLUMNS = ("old_logprobs", "ref_logprobs", "logprobs", "ratios", "entropies", "clipped")

    def __init__(self, num_tokens: int) -> None:
        self._values = torch.full((len(self.COLUMNS), num_tokens), torch.nan)
        self._mine = torch.zeros(num_tokens, dtype=torch.bool)

    def write(self, batch: Microbatch, **columns: Tensor) -> None:
        """Fills in columns for a pass's tokens, [n] each. A pass that does not count is left out."""
        if not batch.counts:
            return
        self._mine[batch.tokens] = True
        for name, values in columns.items():
            self._values[self.COLUMNS.index(name), batch.tokens] = values.detach().to("cpu", torch.float32)

    def read(self, column: str, batch: Microbatch) -> Tensor:
        """One column for a pass's tokens, on the pass's device. [n]"""
        return self._values[self.COLUMNS.index(column), batch.tokens].to(batch.input_ids.device)

    def gather(self) -> dict[str, Tensor]:
        """The columns over all ranks, on every rank; each token is trained on by one of them."""
        if ranks.world_size() > 1:
            self._values = ranks.total(torch.where(self._mine, self._values, 0.0))
            seen = ranks.total(self._mine.to(torch.int32))
            self._values[:, seen == 0] = torch.nan
        return dict(zip(self.COLUMNS, self._values, strict=True))
