"""Table of values for each sampled token that this rank holds, laid end to end as in StepRollouts."""

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch


class TokenLedger:
    """A table with columns of one float32 per token. NaN marks a missing value, as for tokens that were not trained on.

    The columns are on the device that computes them, so that no pass waits for a copy.
    """

    COLUMNS = ("old_logprobs", "ref_logprobs", "logprobs", "ratios", "entropies", "clipped")

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu") -> None:
        self._table = torch.full((len(self.COLUMNS), num_tokens), torch.nan, device=device)
        self.columns = dict(zip(self.COLUMNS, self._table, strict=True))
        """Columns by name. [M] each"""

    def write(self, batch: Microbatch, **columns: Tensor) -> None:
        """Writes columns for a pass's tokens, [n] each. Ignores a pass that does not count."""
        if not batch.counts:
            return
        for name, values in columns.items():
            self.columns[name][batch.tokens] = values.detach().to(torch.float32)

    def read(self, column: str, batch: Microbatch) -> Tensor:
        """Returns one column for a pass's tokens. [n]"""
        return batch.look_up(self.columns[column])

    def on_host(self) -> dict[str, Tensor]:
        """Returns the columns as they are now, with a single copy; on a CPU they share the ledger's memory. [M] each"""
        return dict(zip(self.COLUMNS, self._table.cpu(), strict=True))
