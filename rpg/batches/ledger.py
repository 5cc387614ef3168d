"""What is known of each sampled token that this rank holds, laid end to end as in StepRollouts."""

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch


class TokenLedger:
    """Columns of one float32 a token, on the host; NaN where nothing is known: of a token that was not trained on."""

    COLUMNS = ("old_logprobs", "ref_logprobs", "logprobs", "ratios", "entropies", "clipped")

    def __init__(self, num_tokens: int) -> None:
        self.columns = {name: torch.full((num_tokens,), torch.nan) for name in self.COLUMNS}
        """[M] each."""

    def write(self, batch: Microbatch, **columns: Tensor) -> None:
        """Fills in columns for a pass's tokens, [n] each. A pass that does not count is left out."""
        if not batch.counts:
            return
        for name, values in columns.items():
            self.columns[name][batch.tokens] = values.detach().to("cpu", torch.float32)

    def read(self, column: str, batch: Microbatch) -> Tensor:
        """One column for a pass's tokens, on the pass's device. [n]"""
        return batch.look_up(self.columns[column])
