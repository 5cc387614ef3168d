"""Queries for the flow runs of experiments' runs on a Prefect server, and their states."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.prefect.server.deployments import EXPERIMENTS, STUDIES

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

Item = TypeVar("Item")
LIVE = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
"""State types of flow runs that have not ended. A crashed flow run that a worker lists may continue too."""
OPEN = (*LIVE, "CRASHED")
"""Live states and crashed, because a worker may schedule a crashed flow run again."""
_PAGE = 200


def flow_runs(
    client: "SyncPrefectClient", types: Sequence[str], *, name: str = "", experiment: str = "", study: str = ""
) -> Iterator["FlowRun"]:
    """Yields the flow runs of experiments' runs, or of a study, whose states are of these types.

    Args:
        name: only flow runs with this name on the dashboard; empty means all.
        experiment: only flow runs of this experiment; empty means of all.
        study: the flow runs of this study, without its trials'; empty means those of runs.
    """
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    of_types = filters.FlowRunFilterStateType(any_=[StateType(kind) for kind in types])
    tag = f"study:{study}" if study else f"experiment:{experiment}" if experiment else ""
    wanted = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=of_types),
        name=filters.FlowRunFilterName(any_=[name]) if name else None,
        tags=filters.FlowRunFilterTags(all_=[tag]) if tag else None,
    )
    flow = STUDIES if study else EXPERIMENTS
    of_flow = filters.FlowFilter(name=filters.FlowFilterName(any_=[flow.flow]))
    return pages(
        lambda limit, offset: client.read_flow_runs(
            flow_filter=of_flow, flow_run_filter=wanted, sort=FlowRunSort.ID_DESC, limit=limit, offset=offset
        )
    )


def pages(read: Callable[[int, int], Sequence[Item]]) -> Iterator[Item]:
    """Yields all items of a paged query. `read`: function that returns a page, given its length and offset."""
    offset, page = 0, _PAGE
    while page == _PAGE:
        found = read(_PAGE, offset)
        yield from found
        page, offset = len(found), offset + len(found)


def run_id_of(flow_run: "FlowRun") -> str:
    """Returns the run that a flow run executes; empty if its parameters name none."""
    return str(flow_run.parameters.get("run_id", ""))


def study_of(flow_run: "FlowRun") -> str:
    """Returns the study that a flow run executes, by its parameter `study NAME`; empty for the flow run of a run."""
    return "" if run_id_of(flow_run) else str(flow_run.parameters.get("name", "")).removeprefix("study ")


def state_of(flow_run: "FlowRun") -> "State[Any]":
    """Returns the flow run's state, which the server gives every flow run."""
    assert flow_run.state is not None, "the server gives every flow run a state"
    return flow_run.state


def set_state(client: "SyncPrefectClient", flow_run: "FlowRun", state: "State[Any]") -> bool:
    """Sets a flow run's state, unless the state has changed since it was read. Returns whether it was set.

    A change between the two calls is overwritten. Prefect (3.7.7) cannot set a state conditionally: its rules, which
    `force=False` leaves on, compare the types of both states, not their ids, and the filter of `bulk_set_state` is read
    before the row is locked.
    """
    if not is_unchanged(client, flow_run):
        return False
    client.set_flow_run_state(flow_run.id, state, force=True)
    return True


def is_unchanged(client: "SyncPrefectClient", flow_run: "FlowRun") -> bool:
    """Returns whether a flow run still has the state that it had when it was read."""
    from prefect.exceptions import ObjectNotFound

    with contextlib.suppress(ObjectNotFound):
        return state_of(client.read_flow_run(flow_run.id)).id == state_of(flow_run).id
    return False


def has_begun(flow_run: "FlowRun") -> bool:
    """Returns whether a worker has ever begun the flow run. The start time does not show this, because any final state
    sets it."""
    return flow_run.run_count > 0


def is_called_off(client: "SyncPrefectClient", flow_run_id: "UUID") -> bool:
    """Returns whether a flow run was cancelled since it was last scheduled.

    A worker that already had it still starts it, and the server then shows it as running.
    """
    states = sorted(client.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp, reverse=True)
    last = (state for state in states if state.is_scheduled() or state.is_cancelling() or state.is_cancelled())
    return any(not state.is_scheduled() for state in [next(last, None)] if state)
