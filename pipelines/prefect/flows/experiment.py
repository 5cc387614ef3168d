"""Executes an experiment on this machine by calling the flow of each of its runs, one after another unless the caller
supplies another way."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.planning.plan import Plan, RunPlan, make_plan
from pipelines.processes.stop import CANCELLED, Stop, clear_request, is_cancelled
from pipelines.processes.supervisor import StagePausedError, StageStoppedError
from pipelines.running.progress import ProgressReporter, RunsReporter, Silent
from pipelines.running.run import RunExecution, register_experiment
from pipelines.sinks.sending import is_behind
from specs.errors import Issue, RpgError, SpecError
from specs.machine.fence import SupersededError
from specs.machine.files import read_json
from specs.machine.lease import RunBusyError
from specs.machine.liveness import is_executed

if TYPE_CHECKING:
    from specs.loader import Document

_LOOK_SECONDS = 0.5
Status = Literal["finished", "paused", "failed", "cancelled", "busy"]
Outcomes = Generator["RunOutcome", None, None]
"""Outcomes of runs, in the order in which they end. Closing the generator early stops the runs under way."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of one run."""

    run: RunPlan
    status: Status
    error: Exception | None = None
    interrupted: bool = False
    """Whether a signal to the whole command ended the run. No further run is begun then."""
    paused_at: int = 0
    """The training step at which a run has paused and its policy was evaluated: `until`, or a later step at which it
    had paused before. 0 for a run that has not paused."""


def execute_experiment(
    document: "Document",
    home: Home,
    *,
    until: int = 0,
    in_study: bool = False,
    progress: RunsReporter | None = None,
    stop: Stop | None = None,
) -> tuple[RunOutcome, ...]:
    """Executes all runs of an experiment and writes the experiment's report.

    Call it in the main thread, within `pipelines.prefect.server.api.Api.connected`. A failed run does not stop the
    others, unless the user's mistake caused it: all runs share that mistake.

    Args:
        until: the training step at which every run pauses. Its policy is evaluated and its state saved, and a call with
            a later `until`, or none, resumes it as if it had not paused. Its recorded status is `cancelled`. With 0, or
            a step not before the last one, no run pauses.
        in_study: the experiment is a study's trial: its runs join those of the earlier trials, and the study writes the
            page.
    Raises:
        SpecError: the spec, or data or a model that it names, is wrong. The run that failed has the error on record.
    """
    return execute_plan(
        make_plan(document, home),
        home,
        lambda runs: execute_in_turn(
            document, runs, home, until=until, in_study=in_study, progress=progress, stop=stop
        ),
        in_study=in_study,
    )


def execute_plan(
    plan: Plan,
    home: Home,
    execute: Callable[[Sequence[RunPlan]], Outcomes],
    *,
    only: str = "",
    in_study: bool = False,
) -> tuple[RunOutcome, ...]:
    """Executes a given plan. `execute_experiment` makes its own.

    Args:
        execute: executes the plan's runs: `execute_in_turn`, or several at a time.
        only: id of the only run to execute, for example to resume it; the experiment's record then stays as it is.
        in_study: as for `execute_experiment`.
    Returns:
        The outcomes of the runs that were begun, in the order of the plan.
    Raises:
        SpecError: as `execute_experiment`; or the plan no longer has the one run.
    """
    runs = [run for run in plan.in_turn if only in ("", run.run_id)]
    if only and not runs:
        raise SpecError(_replaced(plan, home, only))
    if not only:
        register_experiment(home, plan.document, plan.runs, in_addition=in_study)
        if is_cancelled(home.experiment(plan.document.experiment.name), [run.run_id for run in runs]):
            clear_request(home.experiment(plan.document.experiment.name))
    outcomes: list[RunOutcome] = []
    with contextlib.closing(execute(runs)) as ending:
        for outcome in ending:
            outcomes.append(outcome)
            if isinstance(outcome.error, RpgError):
                raise outcome.error
    order = [run.run_id for run in plan.runs]
    outcomes.sort(key=lambda outcome: order.index(outcome.run.run_id))
    if not in_study and any(outcome.status == "finished" for outcome in outcomes):
        from pipelines.report import write_experiment_report
        from pipelines.report.answer import note_looks

        name = plan.document.experiment.name
        write_experiment_report(home, name)
        note_looks(home, [name])
    return tuple(outcomes)


def is_all_done(plan: Plan, home: Home) -> bool:
    """Returns whether every run has finished and was sent to the sinks, so that no flow has to be called."""
    cached = all(stage.action == "CACHED" for run in plan.runs for stage in run.stages)
    sent = not any(is_behind(home, run.run_id, sink) for run in plan.runs for sink in run.experiment.sinks)
    return cached and sent and all(RunState(home, run.run_id).status == "finished" for run in plan.runs)


def recall(runs: Sequence[RunPlan], progress: RunsReporter) -> Outcomes:
    """Yields the outcomes of the runs that are already done."""
    for position, run in enumerate(runs, start=1):
        reporter = progress.run_started(run.run_id, run.name, position, len(runs))
        for stage in run.stages:
            reporter.stage_ended(stage.stage, "cached", 0.0)
        progress.run_ended(run.run_id, "finished")
        yield RunOutcome(run, "finished")


def execute_in_turn(
    document: "Document",
    runs: Sequence[RunPlan],
    home: Home,
    *,
    until: int = 0,
    in_study: bool = False,
    shared: bool = False,
    progress: RunsReporter | None = None,
    stop: Stop | None = None,
) -> Outcomes:
    """Executes runs of an experiment one after another, in this process. Begins no further run once a signal has ended
    one or the experiment is cancelled.

    Args:
        until, in_study: as for `execute_experiment`.
        shared: other commands may execute the same runs. A run that another process executes comes last; if that
            process has not finished it by then, it is executed here.
    """
    stop, progress = stop or Stop(), progress or Silent()
    left, begun = list(enumerate(runs, start=1)), 0
    while left:
        if begun and is_cancelled(home.experiment(document.experiment.name), [run.run_id for run in runs]):
            return
        entry = next_run(left, home) if shared else left[0]
        left.remove(entry)
        position, run = entry
        reporter, begun = progress.run_started(run.run_id, run.name, position, len(runs)), begun + 1
        if shared and wait_for_another(home, run.run_id, reporter, stop):
            outcome = RunOutcome(run, "cancelled")
        else:
            execution = RunExecution(
                document, run.run_id, home, stop=stop, progress=reporter, until=until, in_study=in_study
            )
            outcome = outcome_of(execution)
        if shared and isinstance(outcome.error, RunBusyError):  # another command was quicker
            left.append(entry)
            continue
        progress.run_ended(run.run_id, outcome.status)
        yield outcome
        if outcome.interrupted:
            return


def next_run(left: Iterable[tuple[int, RunPlan]], home: Home) -> tuple[int, RunPlan]:
    """Returns the first of these numbered runs that no process executes now, or the first run if all are being
    executed."""
    numbered = list(left)
    return next((entry for entry in numbered if not _is_under_way(home, entry[1].run_id)), numbered[0])


def wait_for_another(home: Home, run_id: str, progress: ProgressReporter, stop: Stop) -> bool:
    """Waits until no process executes the run, or this process is asked to stop.

    Returns:
        Whether somebody has cancelled the run meanwhile, so that it must not begin again.
    """
    if not _is_under_way(home, run_id):
        return False
    progress.note(f"  another command executes it: waiting; `rpg watch {run_id}` shows its progress")
    while _is_under_way(home, run_id) and not stop.requested():
        time.sleep(_LOOK_SECONDS)
    state = RunState(home, run_id)
    return state.status == "cancelled" and str(state.record["reason"]).endswith(CANCELLED)


def _is_under_way(home: Home, run_id: str) -> bool:
    return is_executed(home.run(run_id), RunState(home, run_id).record)


def _replaced(plan: Plan, home: Home, run_id: str) -> Issue:
    """Returns why the plan no longer has a run: a file or an installed package that its spec names has changed."""
    record = read_json(home.run(run_id) / "plan.json")
    same_cell = [run for run in plan.runs if (run.values, run.seed) == (record.get("values"), record.get("seed"))]
    reasons = [stage.reason for run in same_cell for stage in run.stages if stage.action == "RUN"]
    hint = "undo the changes, or start a new run with `rpg run FILE`"
    return Issue(f"cannot continue as {run_id}: {'; '.join(reasons[:2])}", hint=hint)


def outcome_of(execution: RunExecution) -> RunOutcome:
    """Calls the flow for one run and returns how it ended."""
    from prefect import tags

    from pipelines.prefect.flows.flow import call_flow

    run = execution.plan
    with execution.stop.on_signals(), tags(*flow_tags(run)):
        call_flow(execution, flow_run_name(run))
    error = execution.error
    if isinstance(error, StagePausedError):
        return RunOutcome(run, "paused", paused_at=error.step)
    if isinstance(error, (RunBusyError, SupersededError)):
        return RunOutcome(run, "busy", error)
    if isinstance(error, StageStoppedError):
        return RunOutcome(run, "cancelled", error, interrupted=error.request.whole_command)
    if error is None and execution.state.status == "finished":
        return RunOutcome(run, "finished")
    return RunOutcome(run, "failed", error or RuntimeError(execution.state.record["reason"] or "the flow failed"))


def flow_run_name(run: RunPlan) -> str:
    """Returns a run's name on the dashboard."""
    return f"{run.experiment.name}: {run.name}"


def flow_tags(run: RunPlan) -> list[str]:
    """Returns the tags by which a user of the dashboard filters runs."""
    if not run.experiment.trains:
        return [f"experiment:{run.experiment.name}", "evaluation"]
    return [f"experiment:{run.experiment.name}", f"seed:{run.seed}", f"objective:{run.experiment.objective.type}"]
