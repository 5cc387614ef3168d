"""Choice of the groups that have their own colour on a page: eight lines are distinguishable, a hundred are not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.report.answer import Outcome
from pipelines.report.charts import PALETTE
from pipelines.report.evidence import Group

_GREY = PALETTE - 1


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group, and its appearance in charts of many groups."""

    group: Group
    color: int
    """Index into the palette of the style sheet."""
    pale: bool
    """Whether the group has no colour of its own. Its lines are then thin, grey and unnamed."""


def drawn_groups(groups: Sequence[Group], results: Sequence[Outcome]) -> list[DrawnGroup]:
    """Returns the groups in their order. If there are more than PALETTE, the first group and the most accurate ones
    have a colour.

    Args:
        results: outcomes; those of the first dataset decide which groups are highest. Without outcomes the first groups
            have a colour.
    """
    if len(groups) <= PALETTE:
        return [DrawnGroup(group, color, pale=False) for color, group in enumerate(groups)]
    accuracy = {result.label: result.after.value for result in results if result.dataset == results[0].dataset}
    best = sorted(groups[1:], key=lambda group: -accuracy.get(group.label, -math.inf))
    chosen = {group.label for group in (groups[0], *best[: PALETTE - 2])}
    colors = iter(range(PALETTE - 1))
    return [
        DrawnGroup(group, next(colors), pale=False) if group.label in chosen else DrawnGroup(group, _GREY, pale=True)
        for group in groups
    ]
