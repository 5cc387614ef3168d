"""The workers of a study on this machine, how one is run, and how all of them are asked to stop."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pipelines.home.home import Home
from pipelines.prefect_flows.experiment import RunOutcome, execute_experiment
from pipelines.prefect_server.api import client_settings
from pipelines.prefect_server.outbox import Outbox
from pipelines.processes.stop import GIVEN_BACK, GRACE_SECONDS, Stop, StopRequest, give_back_grace
from pipelines.running.progress import RunsReporter
from pipelines.studies.answers.dashboard import publish_study
from pipelines.studies.answers.results import StudyRecord
from pipelines.studies.study import run_study
from pipelines.studies.trials import StudyInterruptedError
from specs.document import Document
from specs.errors import RpgError, SpecError, render
from specs.machine.files import now, read_json, write_json
from specs.machine.lease import Lease
from specs.machine.parent import die_with_parent
from specs.study_document import StudyDocument

_NUMBER = "RPG_STUDY_WORKER"
_END_SECONDS = 60.0
_TAKEN_OVER = "another process has taken the study's flow run over"


class StudyStop(Stop):
    """Asked to stop by a signal, a request for the run, or a request for the whole study that came after it began; in a
    flow also by what the server says of the flow run, and when another process has taken it over.

    Args:
        began: when the worker was asked for, UTC, ISO-8601; empty: now.
        outbox: of the study's flow run; None: the study is no flow.
        lease: on the study's flow run.
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
        """The first request from the server. It holds where the flow run is resumed before the study has stopped."""

    @property
    def goes_on(self) -> str:
        """Why the study's flow run goes on later without being submitted again; empty: it does not."""
        if self._lease is not None and self._lease.superseded:
            return _TAKEN_OVER
        if self._on_server is not None:
            return self._on_server.reason if self._on_server.status == "pending" else ""
        return GIVEN_BACK if self.signalled is signal.SIGTERM else ""

    def requested(self, run_directory: Any = None) -> StopRequest | None:
        """See Stop. A trial under way is cancelled on record, whatever becomes of the study: the study takes it up."""
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
    """Asks every worker of a study that runs now to stop, on whatever machine it shares the home from.

    Args:
        grace: seconds after which what still runs is killed.
    """
    write_json(home.study(study) / "cancel.json", {"grace": grace, "requested_at": now()})


def work(
    document: StudyDocument,
    home: Home,
    stop: Stop,
    *,
    say: Callable[[str], None],
    progress: RunsReporter | None = None,
) -> dict[str, Any]:
    """Does what is left of a study in this process, with real runs. See `run_study`.

    Call it in the main thread, where Prefect reports to an API.
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
        )


@contextlib.contextmanager
def more_workers(document: StudyDocument, home: Home, api_url: str, count: int) -> Iterator[None]:
    """Within the block so many more processes work on the study; at its end they are waited for.

    An error in the block, or a signal to this process, stops them as a cancel does. They end with this process whatever
    happens to it.
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
    """One more worker: `python -m pipelines.studies.workers API_URL`, the frozen study on its standard input."""
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
