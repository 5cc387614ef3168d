"""Columns of what is known of each sampled token that this rank holds, laid end to end as in StepRollouts."""

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch


class TokenLedger:
    """Columns of one float32 a token; NaN where nothing is known: of a token that was not trained on.

    They are on the device that computes them, so that no pass waits for a copy.
    """

    COLUMNS = ("old_logprobs", "ref_logprobs", "logprobs", "ratios", "entropies", "clipped")

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu") -> None:
        self._table = torch.full((len(self.COLUMNS), num_tokens), torch.nan, device=device)
        self.columns = dict(zip(self.COLUMNS, self._table, strict=True))
        """[M] each."""

    def write(self, batch: Microbatch, **columns: Tensor) -> None:
        """Fills in columns for a pass's tokens, [n] each. A pass that does not count is left out."""
        if not batch.counts:
            return
        for name, values in columns.items():
            self.columns[name][batch.tokens] = values.detach().to(torch.float32)

    def read(self, column: str, batch: Microbatch) -> Tensor:
        """One column for a pass's tokens. [n]"""
        return batch.look_up(self.columns[column])

    def on_host(self) -> dict[str, Tensor]:
        """The columns as they are now, by one copy; on a CPU they are the ledger's own. [M] each"""
        return dict(zip(self.COLUMNS, self._table.cpu(), strict=True))
