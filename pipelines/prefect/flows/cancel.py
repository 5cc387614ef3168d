"""Stops runs of other commands, or reads their frozen spec to resume them."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.home.versions import runs_of, split_name
from pipelines.prefect.flows.ending import end_work
from pipelines.prefect.flows.stop import (
    CLOSING_SECONDS,
    EndedError,
    NotStoppedError,
    ask_to_stop,
    end_everywhere,
    stop_flow_runs,
    waiting_on_servers,
)
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.flow_runs import OPEN, flow_runs, run_id_of
from pipelines.processes.stop import clear_request, request_cancel
from specs.errors import Issue, SpecError, render_one
from specs.machine import liveness
from specs.machine.lease import RunBusyError
from specs.machine.liveness import FINAL

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from specs.loader import Document


def frozen_document(home: Home, run_id: str, experiment: str = "") -> "Document":
    """Returns the document that a run was last executed from.

    Args:
        experiment: the experiment whose frozen document is used if the run never began.
    Raises:
        SpecError: there is no such document.
    """
    from specs.document import Document

    frozen = Document.recorded(home.run(run_id) / "document.json")
    if frozen is None and experiment:
        frozen = Document.recorded(home.experiment(split_name(experiment)[0]) / "spec.json")
    if frozen is None:
        raise SpecError(Issue("the run has no frozen spec", given=run_id, hint="`rpg run FILE` continues it"))
    return frozen


def cancel_run(
    home: Home, run_id: str, grace: float, *, was_executed: bool = False, silent: set[str] | None = None
) -> str:
    """Stops a run and waits until it has stopped. Returns a sentence that says how it ended.

    A run without a live process is ended on record and on the server that it was submitted to together. If this home
    has no record of its beginning, it is stopped through that server: a worker with another home may execute it.

    Args:
        grace: seconds after which processes that still run are killed.
        was_executed: the process that executes the run was already asked to stop.
        silent: servers that have not answered this command, which stops several runs.
    Raises:
        SpecError: there is nothing to stop, or the server that a run waits on does not answer or does not have the run.
        NotStoppedError: the run was asked to stop and has not stopped yet.
    """
    silent = set() if silent is None else silent
    deadline = time.monotonic() + patience(grace)
    while True:
        if _is_executed(home, run_id):
            request_cancel(home.run(run_id), grace)
            was_executed = True
            if not _has_stopped(home, run_id, grace):
                return _give_up(home, run_id)
        try:
            return end_everywhere(home, run_id, grace, was_executed=was_executed, silent=silent)
        except RunBusyError:
            # Just taken over; or executed on a host with a wrong clock: only its moving heartbeat shows that.
            if time.monotonic() > deadline and not _is_executed(home, run_id):
                raise _clocks_differ(home, run_id) from None
            request_cancel(home.run(run_id), grace)
            was_executed = True
        finally:
            # The run was held by another command that has just ended it; such a command ignores requests.
            if RunState(home, run_id).status in FINAL:
                clear_request(home.run(run_id))


def cancel_experiment(home: Home, name: str, grace: float) -> Iterator[str]:
    """Stops an experiment's current runs, wherever they are executed or wait. Yields a sentence for each run that says
    how it ended.

    A command that executes the experiment's runs one by one begins none after the one under way.

    Args:
        grace: seconds after which processes that still run are killed.
    Raises:
        SpecError: none of its runs is running or waits on a server; or, at the end, some could not be asked to stop.
        NotStoppedError: at the end, if some were asked to stop and have not stopped yet; the message lists them, and
            those that could not be asked.
    """
    states = {run_id: RunState(home, run_id) for run_id in runs_of(home, name)}
    executed = [run_id for run_id in states if _is_executed(home, run_id)]
    left = [run_id for run_id, state in states.items() if state.status == "running" or state.waits]
    silent: set[str] = set()
    left += waiting_on_servers(home, split_name(name)[0], states, silent)
    left = [run_id for run_id in left if run_id not in executed]
    if not executed and not left:
        raise SpecError(Issue("no run of the experiment is running or waits on a server", given=name))
    request_cancel(home.experiment(split_name(name)[0]), grace, list(states))
    for run_id in executed:
        request_cancel(home.run(run_id), grace)
    unstopped: list[str] = []
    refused: dict[Issue, str] = {}  # reason why runs could not be asked -> the server that it concerns
    for run_id in [*left, *executed]:
        url: str = states[run_id].record.get("api_url", "")
        if run_id in left and url in refused.values():
            continue
        try:
            yield cancel_run(home, run_id, grace, was_executed=run_id in executed, silent=silent)
        except NotStoppedError as error:
            unstopped.append(str(error))
        except EndedError as error:
            yield f"{run_id}: {error.issues[0].message}"
        except SpecError as error:
            refused |= dict.fromkeys(error.issues, url)
    if unstopped:
        raise NotStoppedError("\n".join([*unstopped, *map(render_one, refused)]))
    if refused:
        raise SpecError(*refused, done="its runs continue")


def cancel_on_server(home: Home, profile: str, name: str, grace: float) -> Iterator[str]:
    """Stops the runs of that name on a server, whichever home submitted or executes them. Yields a sentence for each
    run that says how it ended.

    Args:
        profile: the server's URL or the name of a Prefect profile.
        name: an experiment's name; or a run's id, or a prefix of the id or of its last eight characters.
        grace: seconds after which processes that still run are killed.
    Raises:
        SpecError: no server answers, or no such run waits or is executed there.
        NotStoppedError: at the end, if some have not stopped yet.
    """
    url = api_url(home, profile)
    unstopped: list[str] = []
    refused: list[Issue] = []
    silent: set[str] = set()
    with prefect_client(home, url) as client:
        by_run = _named(flow_runs(client, OPEN), url, name)
        here = [run_id for run_id, found in by_run.items() if _is_of(home, run_id, url, found)]
        for found in (found for run_id, found in by_run.items() if run_id not in here):
            for flow_run in found:
                ask_to_stop(client, flow_run, grace)
        for run_id, found in by_run.items():
            try:
                if run_id in here:
                    yield cancel_run(home, run_id, grace, silent=silent)
                else:
                    yield stop_flow_runs(home, client, found, grace)
            except EndedError as error:
                yield f"{run_id}: {error.issues[0].message}"
            except NotStoppedError as error:
                unstopped.append(str(error))
            except SpecError as error:
                refused += error.issues
    if unstopped:
        raise NotStoppedError("\n".join([*unstopped, *map(render_one, refused)]))
    if refused:
        raise SpecError(*refused, done="their runs continue")


def _is_of(home: Home, run_id: str, url: str, found: "Sequence[FlowRun]") -> bool:
    """Returns whether this home records the run as a run of that server: under its flow run, or as submitted there and
    now executed by a command here under another flow run."""
    record = RunState(home, run_id).record
    if record["flow_run_id"] in [str(flow_run.id) for flow_run in found]:
        return True
    return record.get("api_url") == url and _is_executed(home, run_id)


def _named(found: "Iterator[FlowRun]", url: str, name: str) -> "dict[str, list[FlowRun]]":
    """Returns the open flow runs of the runs that a user names, by run. Raises SpecError if the name matches no run, or
    several."""
    by_run: dict[str, list[FlowRun]] = {}
    for flow_run in found:
        by_run.setdefault(run_id_of(flow_run), []).append(flow_run)
    of_experiment = [run_id for run_id, each in by_run.items() if f"experiment:{name}" in each[0].tags]
    fitting = [run_id for run_id in by_run if run_id.startswith(name) or run_id.rpartition("-")[2].startswith(name)]
    chosen = [name] if name in by_run else of_experiment or fitting
    if not chosen:
        hint = f"`rpg runs --profile {url}` lists the runs there"
        raise SpecError(Issue(f"no such run is waiting or running on the server at {url}", given=name, hint=hint))
    if chosen is fitting and len(fitting) > 1:
        raise SpecError(Issue("the name matches several runs", given=name, allowed=", ".join(fitting)))
    return {run_id: by_run[run_id] for run_id in chosen}


def _is_executed(home: Home, run_id: str) -> bool:
    return liveness.is_executed(home.run(run_id), RunState(home, run_id).record)


def _has_stopped(home: Home, run_id: str, grace: float) -> bool:
    """Waits for the end of the process that executes a run, which was asked to stop. Returns whether it has stopped."""
    deadline = time.monotonic() + patience(grace)
    while _is_executed(home, run_id):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def patience(grace: float) -> float:
    """Returns the seconds that a run may take to stop: enough to notice that a failed host's heartbeat is missing."""
    return max(grace + CLOSING_SECONDS, liveness.LEASE_SECONDS + 1)


def _clocks_differ(home: Home, run_id: str) -> NotStoppedError:
    """Returns the error for a run whose executing process does not answer but still sends heartbeats, on a host whose
    clock differs from this host's.
    """
    lease = liveness.newest_lease(home.run(run_id))
    return NotStoppedError(
        f"{run_id} did not answer: the node {lease.host if lease else 'unknown'} executes it, but that node's clock"
        " differs from this node's. The request to stop remains pending"
    )


def _give_up(home: Home, run_id: str) -> str:
    """Returns the outcome for a run whose executing process is alive but does not answer. Ends its processes if they
    run on this host.
    """
    lease = liveness.newest_lease(home.run(run_id))
    if lease is None or lease.is_of_this_host:
        end_work(home, run_id)
        return f"{run_id} did not answer; the processes it had started were ended"
    ends = datetime.fromisoformat(lease.at) + timedelta(seconds=liveness.LEASE_SECONDS)
    raise NotStoppedError(
        f"{run_id} did not answer: the node {lease.host} executes it, and may be unreachable. The request to stop"
        f" remains pending. The lease ends at {ends:%H:%M:%S} UTC unless that node renews it"
    )
