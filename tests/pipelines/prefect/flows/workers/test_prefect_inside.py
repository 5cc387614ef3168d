"""What Prefect does not promise and workers rely on is as they expect it."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect._internal.concurrency.threads import get_global_loop
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.runner import Runner
from prefect.workers.process import ProcessWorker

from pipelines.prefect.flows.workers.process_worker import HOOKS, OwnWorker


def test_a_runner_has_the_hooks_that_our_worker_takes_away() -> None:
    assert all(inspect.iscoroutinefunction(getattr(Runner, name)) for name in HOOKS)


WORKER = """
import tempfile
import prefect.cli
from pipelines.prefect.flows.workers import process_worker
prefect.cli.app = lambda: print(tempfile.mkdtemp(suffix="prefect"))  # what its worker does for each flow run
process_worker.main()
"""


@pytest.mark.more
def test_the_temporary_files_of_prefects_worker_lie_below_the_home(tmp_path: Path) -> None:
    environment = os.environ | {"RPG_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{tmp_path}/tmp/worker-"), done.stderr
    assert not list((tmp_path / "tmp").iterdir()), "they end with it"


def test_prefects_worker_submits_and_releases_by_the_names_that_ours_uses() -> None:
    for name in ("_submit_run_and_capture_errors", "_release_limit_slot"):
        assert callable(getattr(ProcessWorker, name))
    theirs, ours = (
        inspect.signature(worker._submit_run_and_capture_errors).parameters for worker in (ProcessWorker, OwnWorker)
    )
    assert [*theirs] == [*ours]


def test_what_is_drained_runs_in_a_loop_that_can_be_found_and_is_called_as_it_is_cancelled() -> None:
    assert get_global_loop()._loop is not None
    for worker in (EventsWorker, APILogWorker):
        assert inspect.iscoroutinefunction(worker._run)
        assert {"timeout", "at_exit"} <= inspect.signature(worker.drain_all).parameters.keys()
