"""Tables of values for each sampled token that this rank holds, laid end to end as in StepRollouts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """The reference's distributions at some tokens, in the form that a divergence summed over the vocabulary needs."""

    values: Tensor
    """Hidden states before the output head [n, hidden size]; or logprobs of the most likely tokens, nats [n, k]."""
    ids: Tensor | None = None
    """Ids of the most likely tokens [n, k]; None with hidden states."""
    weight: Tensor | None = None
    """Weight of the output head for these hidden states. [vocabulary, hidden size]"""
    bias: Tensor | None = None
    """Bias of that head. [vocabulary]"""


class ReferenceTable:
    """The reference's distributions at all M tokens of a step."""

    def __init__(self, num_tokens: int, *, copies_head: bool) -> None:
        """Makes an empty table. `copies_head`: whether the head's weight changes, or is freed, within the step."""
        self._num_tokens = num_tokens
        self._copies_head = copies_head
        self._rows: ReferenceRows | None = None

    def write(self, batch: Microbatch, rows: ReferenceRows) -> None:
        """Writes a pass's rows. Only the head of a pass that does not count is kept."""
        table = self._rows = self._rows or self._empty(rows)
        if batch.counts:
            table.values[batch.tokens] = rows.values
            if table.ids is not None and rows.ids is not None:
                table.ids[batch.tokens] = rows.ids

    def read(self, batch: Microbatch) -> ReferenceRows:
        """Returns the rows of a pass's tokens; 0 if it does not count."""
        assert self._rows is not None, "the reference's passes come first"
        ids = None if self._rows.ids is None else batch.look_up(self._rows.ids)
        return replace(self._rows, values=batch.look_up(self._rows.values), ids=ids)

    def _empty(self, rows: ReferenceRows) -> ReferenceRows:
        def table(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros(self._num_tokens, values.shape[1])

        def head(values: Tensor | None) -> Tensor | None:
            return values.clone() if values is not None and self._copies_head else values

        values = table(rows.values)
        assert values is not None
        return ReferenceRows(values, table(rows.ids), head(rows.weight), head(rows.bias))


class TokenLedger:
    """A table with columns of one float32 per token. NaN marks a missing value, as for tokens that were not trained on.

    The columns are on the device that computes them, so that no pass waits for a copy.
    """

    COLUMNS = ("old_logprobs", "ref_logprobs", "logprobs", "ratios", "entropies", "clipped")

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu") -> None:
        self._table = torch.full((len(self.COLUMNS), num_tokens), torch.nan, device=device)
        self.columns = dict(zip(self.COLUMNS, self._table, strict=True))
        """Columns by name. [M] each"""
        self.reference: ReferenceTable | None = None
        """Distributions of the reference; None if no divergence is summed over the vocabulary. They are only in
        memory."""

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
        """Returns the current columns, with a single copy from the device. On a CPU they share the table's memory. [M]
        each"""
        return dict(zip(self.COLUMNS, self._table.cpu(), strict=True))
