"""What went wrong in runs and what was done about it: guards that acted, attempts that failed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage import Store

KINDS = ("guard_warned", "guard_stopped", "rolled_back", "attempt_failed", "failed", "reward_failed")
MOST = 20
_TROUBLE = """
    SELECT run_id, step, kind, message, recorded_at FROM events
    WHERE list_contains($runs, run_id) AND list_contains($kinds, kind) ORDER BY recorded_at, step LIMIT $most
"""


def trouble_of(store: "Store", run_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The first so many events of these kinds, oldest first."""
    result = store.query(_TROUBLE, {"runs": list(run_ids), "kinds": list(KINDS), "most": MOST})
    return [dict(zip(result.columns, row, strict=True)) for row in result.rows]
