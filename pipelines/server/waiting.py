"""Runs that wait for a worker, or were cancelled before one began them: a server alone knows of them.

Whoever serves the record asks for them, so that who may only read needs no call of the Prefect API.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.server.deployments import EXPERIMENTS
from pipelines.server.flow_runs import LIVE

_PAGE = 200
Post = Callable[[str, dict[str, Any]], Any]
"""Sends JSON to a path below an API's URL, and returns the JSON that is answered."""


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """What a flow run tells of its run."""

    run_id: str
    run: dict[str, Any]
    """As run.json has it."""
    state: dict[str, Any]
    """As state.json has it."""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def waiting_runs(post: Post) -> list[WaitingRun]:
    """The runs whose flow runs have not ended, and those that were cancelled before a worker began them."""
    return [_waiting_run(flow_run) for flow_run in _flow_runs(post)]


def _flow_runs(post: Post) -> Iterator[dict[str, Any]]:
    yield from _listed(post, LIVE)
    # Its start time does not tell whether a run began: any final state sets that.
    yield from (flow_run for flow_run in _listed(post, ("CANCELLED",)) if not flow_run["run_count"])


def _listed(post: Post, types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Our flow runs in states of some types, as the API gives them."""
    offset, page = 0, _PAGE
    while page == _PAGE:
        body = {
            "flows": {"name": {"any_": [EXPERIMENTS.flow]}},
            "flow_runs": {"state": {"type": {"any_": list(types)}}},
            "sort": "ID_DESC",
            "limit": _PAGE,
            "offset": offset,
        }
        read = post("/flow_runs/filter", body)
        yield from read
        page, offset = len(read), offset + len(read)


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
    """A time of the server's, as Python writes it: `Z` is `+00:00`."""
    return time.replace("Z", "+00:00") if time else None
