"""Execution of runs and studies here, with progress on stderr."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipelines.home.home import Home
    from pipelines.planning.plan import Plan, RunPlan
    from pipelines.prefect.flows.experiment import Outcomes, RunOutcome
    from specs.loader import Document
    from specs.study_document import StudyDocument


def run_here(
    document: Document,
    home: Home,
    only: str = "",
    *,
    parallel: str = "1",
    quiet: bool = False,
    own_process: bool = False,
) -> tuple[RunOutcome, ...]:
    """Runs a document's runs, or one of them, with progress on stderr, and returns how they ended. Main thread only.

    Args:
        only: a run's id.
        parallel: runs at a time; auto: as many as this machine's free slots allow.
        quiet: hides progress.
        own_process: this process belongs to the command and holds no user objects, so that it may be forked.
    """
    import sys

    from pipelines.home.starting import announced
    from pipelines.jobs.preflight import refuse_what_a_stage_would
    from pipelines.prefect.flows.experiment import execute_plan, is_all_done, recall
    from pipelines.prefect.server.api import Api, running_services
    from pipelines.processes.reap import reap
    from pipelines.running.gpu_slots import asking_once, runs_at_once
    from pipelines.running.progress import ConsoleProgress, Silent

    for orphan in reap(home):
        print(f"ended {orphan.stage} {orphan.pid}, left by a command that was killed", file=sys.stderr)
    with announced(home, document.experiment.name) as recorded:
        plan, ask = _planned(document, home, quiet=quiet), asking_once()
        if not only:
            refuse_what_a_stage_would(document, plan.runs, home, quiet=quiet, ask=ask)
        home.create()
        if running_services(home) is None and is_all_done(plan, home):  # no dashboard shows the repeated request
            shown = Silent() if quiet else ConsoleProgress()
            return execute_plan(plan, home, lambda runs: recall(runs, shown), only=only)
        with Api(home, forks=own_process) as api, api.connected():
            at_once = min(len(plan.runs), runs_at_once(plan.runs, ask) if parallel == "auto" else int(parallel))
            return _run_plan(plan, home, only, at_once, api.url, recorded, quiet=quiet)


def run_study_here(
    document: StudyDocument, home: Home, parallel: int, *, quiet: bool = False, own_process: bool = False
) -> dict[str, Any]:
    """Runs a study with one Prefect server for all its trials, and returns its record. Main thread only.

    Args:
        parallel: concurrent trials; 0 means the study's `parallel`.
        quiet: hides progress.
        own_process: as for `run_here`.
    Raises:
        StudyInterruptedError: a signal ended it; the same call resumes from there.
    """
    import sys

    from pipelines.home.starting import announced
    from pipelines.jobs.preflight import refuse_what_a_stage_would
    from pipelines.planning.plan import make_plan
    from pipelines.prefect.server.api import Api
    from pipelines.processes.reap import reap
    from pipelines.running.progress import ConsoleProgress, Silent
    from specs.machine.files import now

    began = now()
    with announced(home, document.study.name) as recorded:
        refuse_what_a_stage_would(document, make_plan(document.experiment, home).runs, home, quiet=quiet)
        home.create()
        for orphan in reap(home):
            print(f"ended {orphan.stage} {orphan.pid}, left by a command that was killed", file=sys.stderr)
        progress, others = Silent() if quiet else ConsoleProgress(), (parallel or document.study.parallel) - 1
        with Api(home, forks=own_process) as api:
            # Imported after the fork, which would lack DuckDB's thread; the report needs it at the end, when files may
            # have changed.
            import pipelines.studies.answers.report  # noqa: F401
            from pipelines.studies.workers import StudyStop, more_workers, work

            stop = StudyStop(home, document.study.name, began)
            live = _shows_live_page(home, document.study.name, quiet=quiet)
            with live as show, api.connected(), more_workers(document, home, api.url, others):
                recorded()
                show()
                return work(document, home, stop, say=progress.note, progress=progress)


@contextmanager
def _shows_live_page(home: Home, name: str, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Yields a function that prints what leads to the live page, until the block ends; nothing if `quiet`."""
    import sys

    from pipelines.web.serve import live_link

    if quiet:
        yield lambda: None
        return
    with live_link(home, name) as link:
        yield lambda: print(f"live: {link}", file=sys.stderr)


def _planned(document: Document, home: Home, *, quiet: bool) -> Plan:
    """Returns the plan; its warnings go to stderr unless `quiet`."""
    import sys

    from pipelines.planning.plan import make_plan
    from specs.errors import render

    if document.warnings and not quiet:
        print(render(document.warnings, noun="warning"), file=sys.stderr)
    return make_plan(document, home)


def _run_plan(
    plan: Plan, home: Home, only: str, at_once: int, api_url: str, recorded: Callable[[], None], *, quiet: bool
) -> tuple[RunOutcome, ...]:
    """Executes a plan with progress. Calls `recorded` once its runs are recorded."""
    from contextlib import nullcontext

    from pipelines.prefect.flows.experiment import execute_in_turn, execute_plan
    from pipelines.prefect.flows.parallel import execute_in_parallel
    from pipelines.running.progress import ConsoleProgress, ParallelProgress, Silent
    from pipelines.running.time_left import TimeLeft

    document = plan.document

    def announce() -> None:
        # After the experiment is recorded: the command finds nothing before.
        recorded()
        show()

    def in_turn(runs: Sequence[RunPlan]) -> Outcomes:
        announce()
        return execute_in_turn(
            document,
            runs,
            home,
            shared=not only,
            progress=Silent() if quiet else ConsoleProgress(left=TimeLeft(runs)),
        )

    def in_parallel(runs: Sequence[RunPlan]) -> Outcomes:
        announce()
        return execute_in_parallel(document, runs, home, api_url, at_once, progress)

    with _shows_live_page(home, document.experiment.name, quiet=quiet) as show:
        if at_once == 1:
            return execute_plan(plan, home, in_turn, only=only)
        shown = nullcontext(Silent()) if quiet else ParallelProgress(TimeLeft(plan.runs, at_once))
        with shown as progress:
            return execute_plan(plan, home, in_parallel)
