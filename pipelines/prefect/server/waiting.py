"""Runs that wait for a worker, or were cancelled before a worker began them. Only a server knows them.

The process that serves the record lists them, so that a read-only user needs no call of the Prefect API.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from pipelines.prefect.server.deployments import EXPERIMENTS
from pipelines.prefect.server.flow_runs import LIVE, pages

_CANCELLED = 1000
"""Largest number of cancelled flow runs that are read, latest first, because a server keeps all of them."""
Post = Callable[[str, dict[str, Any]], Any]
"""Function that posts JSON to a path below an API's URL, and returns the JSON of the answer."""


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """A waiting run, from its flow run."""

    run_id: str
    run: dict[str, Any]
    """Content of run.json."""
    state: dict[str, Any]
    """Content of state.json."""

    def as_data(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def waiting_runs(post: Post) -> list[WaitingRun]:
    """Returns the runs whose flow runs have not ended, and the recently cancelled runs that no worker had begun."""
    by_run: dict[str, WaitingRun] = {}
    for flow_run in _flow_runs(post):
        waiting = _waiting_run(flow_run)
        by_run.setdefault(waiting.run_id, waiting)  # A run that was cancelled and submitted again is waiting.
    return list(by_run.values())


def _flow_runs(post: Post) -> Iterator[dict[str, Any]]:
    yield from _listed(post, LIVE, "ID_DESC")
    cancelled = islice(_listed(post, ("CANCELLED",), "END_TIME_DESC"), _CANCELLED)
    # The start time does not tell whether a run began: any final state sets it.
    yield from (flow_run for flow_run in cancelled if not flow_run["run_count"])


def _listed(post: Post, types: Sequence[str], sort: str) -> Iterator[dict[str, Any]]:
    """Yields our flow runs whose states are of these types, as the API returns them."""
    body = {
        "flows": {"name": {"any_": [EXPERIMENTS.flow]}},
        "flow_runs": {"state": {"type": {"any_": list(types)}}},
        "sort": sort,
    }
    return pages(lambda limit, offset: post("/flow_runs/filter", body | {"limit": limit, "offset": offset}))


def _waiting_run(flow_run: dict[str, Any]) -> WaitingRun:
    tags = dict(tag.partition(":")[::2] for tag in flow_run["tags"])
    run_id, state = str(flow_run["parameters"].get("run_id")), flow_run["state"] or {}
    identity = {
        "run_id": run_id,
        "experiment": tags.get("experiment"),
        "name": flow_run["name"].partition(": ")[2],
        "seed": int(tags["seed"]) if tags.get("seed", "").isdecimal() else None,
        "objective": tags.get("objective"),
        "created_at": _isoformat(flow_run["created"]),
    }
    cancelled = state.get("type") == "CANCELLED"
    standing = {
        "status": "cancelled" if cancelled else "pending",
        "reason": "cancelled before it began" if cancelled else f"on the server: {state.get('name', 'unknown')}",
        "flow_run_id": flow_run["id"],
        "ended_at": _isoformat(state["timestamp"]) if cancelled else None,
    }
    return WaitingRun(run_id, identity, standing)


def _isoformat(time: str | None) -> str | None:
    """Returns a server's time in Python's notation: `Z` becomes `+00:00`."""
    return time.replace("Z", "+00:00") if time else None
