"""The workers of a study on this machine: their execution, and requests to stop all of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.home.home import Home
from pipelines.home.runs import is_study, status_of
from pipelines.home.versions import runs_of
from pipelines.prefect.flows.cancel import patience
from pipelines.prefect.flows.ending import GONE, Ending, end_flow_run
from pipelines.prefect.flows.experiment import RunOutcome, execute_experiment
from pipelines.prefect.flows.stop import EndedError, NotStoppedError, ask_to_stop, stop_flow_runs
from pipelines.prefect.server.api import client_settings, is_healthy, running_services
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.flow_runs import OPEN, flow_runs, has_begun
from pipelines.prefect.server.outbox import Outbox
from pipelines.processes.stop import GIVEN_BACK, GRACE_SECONDS, Stop, StopRequest, give_back_grace
from pipelines.running.progress import RunsReporter
from pipelines.studies.answers.dashboard import publish_study
from pipelines.studies.answers.results import StudyRecord, read_study
from pipelines.studies.confirmation import CONFIRMATION, experiment_of_confirmation
from pipelines.studies.study import run_study
from pipelines.studies.trials import StudyInterruptedError
from specs.document import Document
from specs.errors import Issue, RpgError, SpecError, render
from specs.machine.files import now, read_json, write_json
from specs.machine.lease import Lease, RunBusyError, acquire
from specs.machine.liveness import is_executed, newest_lease
from specs.machine.parent import die_with_parent
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_NUMBER = "RPG_STUDY_WORKER"
_END_SECONDS = 60.0
_TAKEN_OVER = "another process has taken the study's flow run over"
_LOOK_SECONDS = 0.2


class StudyStop(Stop):
    """Requests to stop a study's worker: a signal, a request for the run, or a request for the whole study that came
    after the worker began. In a flow, also the flow run's state on the server, or its takeover by another process.

    Args:
        began: time at which the worker was requested, UTC, ISO-8601; empty means now.
        outbox: messages of the study's flow run; None without a flow.
        lease: lease on the study's flow run.
    """

    def __init__(
        self, home: Home, study: str, began: str = "", *, outbox: Outbox | None = None, lease: Lease | None = None
    ) -> None:
        super().__init__(grace=GRACE_SECONDS if outbox is None else give_back_grace())
        self._request = home.study(study) / "cancel.json"
        self._began = began or now()
        self._outbox = outbox
        self._lease = lease
        self._on_server: StopRequest | None = None
        """The first request from the server. It holds even if the flow run is resumed before the study has stopped."""

    @property
    def began(self) -> str:
        """Returns the time at which the worker was requested."""
        return self._began

    @property
    def goes_on(self) -> str:
        """Returns why the study's flow run continues later without a new submission; empty if it does not."""
        if self._lease is not None and self._lease.superseded:
            return _TAKEN_OVER
        if self._on_server is not None:
            return self._on_server.reason if self._on_server.status == "pending" else ""
        return GIVEN_BACK if self.signalled is signal.SIGTERM else ""

    def requested(self, run_directory: Any = None) -> StopRequest | None:
        """Returns the request; see Stop. The record of the current trial says cancelled in any case, because the study
        resumes it."""
        if self._outbox is not None:
            self._on_server = self._on_server or self._outbox.request
        if request := super().requested(run_directory):
            return request
        if self._lease is not None and self._lease.superseded:
            return StopRequest(_TAKEN_OVER, GRACE_SECONDS, whole_command=True)
        if self._on_server is not None:
            return replace(self._on_server, whole_command=True, status="cancelled")
        cancelled = read_json(self._request)
        if cancelled.get("requested_at", "") > self._began:
            return StopRequest("cancelled with its study", cancelled["grace"], whole_command=True)
        return None


def request_study_cancel(home: Home, study: str, grace: float = GRACE_SECONDS) -> None:
    """Asks all running workers of a study to stop, on all machines that share the home.

    Args:
        grace: seconds after which processes that still run are killed.
    """
    write_json(home.study(study) / "cancel.json", {"grace": grace, "requested_at": now()})


def note_submission(home: Home, study: str, url: str) -> None:
    """Records the server that a study was submitted to, for the command that cancels it."""
    urls = [*_submitted_to(home, study), url]
    write_json(home.study(study) / "submitted.json", {"api_urls": list(dict.fromkeys(urls))})


def _submitted_to(home: Home, study: str) -> list[str]:
    return list(read_json(home.study(study) / "submitted.json").get("api_urls") or ())


def study_named(home: Home, name: str, profile: str = "") -> str:
    """Returns the study that a user wants to cancel; empty if there is no such study.

    Args:
        name: the study's name, which its trials' experiment has too; or the name of the experiment that confirms it.
        profile: the server that knows it, a URL or the name of a Prefect profile; empty means this home's record.
    """
    names = dict.fromkeys([name, name.removesuffix(CONFIRMATION)])
    if not profile:
        return next((each for each in names if is_study(home, each) or _submitted_to(home, each)), "")
    with prefect_client(home, api_url(home, profile)) as client:
        return next((each for each in names if any(flow_runs(client, OPEN, study=each))), "")


def cancel_study(home: Home, name: str, grace: float, profile: str = "") -> str:
    """Stops a study on all machines, whether or not its workers have begun, and waits until it has stopped.

    Training is saved: the study resumes when it is run or submitted again.

    Args:
        grace: seconds after which processes that still run are killed.
        profile: the server that has it, a URL or the name of a Prefect profile; empty means the servers that it was
            submitted to from here, and that of `rpg up`.
    Returns:
        A sentence that says how it ended.
    Raises:
        SpecError: there is no such study, it is not running, or a server that may have it does not answer.
        NotStoppedError: it was asked to stop and has not stopped yet.
    """
    services = running_services(home)
    own = dict.fromkeys([*_submitted_to(home, name), *([services.url] if services else [])])
    urls = [api_url(home, profile)] if profile else list(own)
    if is_study(home, name) and (not profile or urls[0] in own):
        # First, so that no worker here begins the study's flow runs of a server.
        request_study_cancel(home, name, grace)
    silent = [url for url in urls if not is_healthy(url, timeout=10.0)]
    found = [_stop_on_server(home, name, grace, url) for url in urls if url not in silent]
    if silent and (profile or silent != [services.url if services else ""]):
        message = f"the Prefect server at {silent[0]}, which may have the study, does not answer"
        raise SpecError(Issue(message, given=name, hint="repeat the command when the server answers again"))
    begun = is_study(home, name) or any(began for of_server in found for began in of_server)
    if not begun and not any(found):
        raise SpecError(Issue("no such study", given=name, hint="`rpg study list` lists those of this home"))
    was_executed = bool(_executed(home, name))
    _wait_for_workers(home, name, grace)
    if not any(found) and not was_executed and (status := read_study(home, name).status) in ("finished", "stopped"):
        raise EndedError(Issue(f"the study is not running but {status}", given=name))
    if not begun:
        return f"{name} was waiting and is cancelled"
    return f"{name} is cancelled; if run or submitted again, it continues from here"


def _stop_on_server(home: Home, study: str, grace: float, url: str) -> list[bool]:
    """Ends all flow runs of a study on a server. Returns, for each flow run, whether a worker had begun it."""
    with prefect_client(home, url) as client:
        found = list(flow_runs(client, OPEN, study=study))
        executed = [flow_run for flow_run in found if not _end_dead(home, client, study, flow_run)]
        for flow_run in executed:
            ask_to_stop(client, flow_run, grace)
        for flow_run in executed:
            stop_flow_runs(home, client, [flow_run], grace)
    return [has_begun(flow_run) for flow_run in found]


def _end_dead(home: Home, client: "SyncPrefectClient", study: str, flow_run: "FlowRun") -> bool:
    """Ends a flow run that a worker of this home had, if it has no live process. Returns whether it did."""
    directory = home.study_flow(study, str(flow_run.id))
    if newest_lease(directory) is None or is_executed(directory, {}):
        return False
    with contextlib.suppress(RunBusyError), acquire(directory, settles=True):
        end_flow_run(client, flow_run, Ending("cancelled", GONE))
        return True
    return False


def _executed(home: Home, study: str) -> list[str]:
    """Returns the runs of a study's trials and confirmation that are being executed now."""
    run_ids = [*runs_of(home, study), *runs_of(home, experiment_of_confirmation(study))]
    return [run_id for run_id in run_ids if status_of(home, run_id) == "running"]


def _wait_for_workers(home: Home, study: str, grace: float) -> None:
    """Waits until no run of the study is executed. Raises NotStoppedError if that takes too long."""
    deadline = time.monotonic() + patience(grace)
    while executed := _executed(home, study):
        if time.monotonic() > deadline:
            raise NotStoppedError(f"{study} was asked to stop, but {', '.join(executed)} is still executed")
        time.sleep(_LOOK_SECONDS)


def work(
    document: StudyDocument,
    home: Home,
    stop: StudyStop,
    *,
    say: Callable[[str], None],
    progress: RunsReporter | None = None,
) -> dict[str, Any]:
    """Executes the unfinished part of a study in this process, with real runs. See `run_study`.

    Call it in the main thread, while Prefect reports to an API.
    """

    def execute(trial: Document, until: int) -> tuple[RunOutcome, ...]:
        return execute_experiment(trial, home, until=until, in_study=True, progress=progress, stop=stop)

    with stop.on_signals():
        return run_study(
            document,
            home,
            execute,
            say=say,
            stopping=lambda: stop.requested() is not None,
            ended=lambda record: publish_study(home, StudyRecord.of(record)),
            began=stop.began,
        )


@contextlib.contextmanager
def more_workers(document: StudyDocument, home: Home, api_url: str, count: int) -> Iterator[None]:
    """Runs more worker processes of the study within the block, and waits for them at its end.

    An error in the block, or a signal to this process, stops them like a cancel. They end with this process in any
    case.
    """
    text = json.dumps(document.to_json())
    processes = [_start(text, home, api_url, number) for number in range(2, 2 + count)]
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(document: str, home: Home, api_url: str, number: int) -> subprocess.Popen[str]:
    environment = os.environ | {"RPG_HOME": str(home.root), _NUMBER: str(number)}
    command = [sys.executable, "-P", "-m", "pipelines.studies.workers", api_url]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
        start_new_session=True,  # a terminal's Ctrl-C is for the first worker, which stops the others
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(document)
    return process


def main() -> None:
    """Runs an additional worker: `python -m pipelines.studies.workers API_URL`, with the frozen study on standard
    input."""
    home, number = Home.from_environment(), os.environ[_NUMBER]
    document = StudyDocument.from_json(json.load(sys.stdin))
    stop = StudyStop(home, document.study.name)

    def say(line: str) -> None:
        print(f"[{number}] {line}", file=sys.stderr, flush=True)

    try:
        with client_settings(home, sys.argv[1]):
            work(document, home, stop, say=say)
    except StudyInterruptedError:
        sys.exit(130)
    except SpecError as error:
        say(render(error.issues, done=error.done))
        sys.exit(2)
    except RpgError as error:
        say(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
