"""Execution of stages. A stage uses an existing result, or its process makes a result, which is then published.

Several runs share the results of data and base; train, evaluate and report write into the run's own directory. The code
does not depend on Prefect.
"""

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pipelines.home.results import damage_of, filling, is_older, is_report_current, manifest_of, publish
from pipelines.launchers import LaunchedStage, is_rank, job_file, launcher_of, problems_file
from pipelines.planning.code import Code
from pipelines.planning.plan import StagePlan
from pipelines.processes.forking import forks_stages
from pipelines.processes.gpu_faults import gpu_faults
from pipelines.processes.stop import StopRequest
from pipelines.processes.supervisor import (
    Child,
    StageError,
    StagePausedError,
    StageStoppedError,
    failure,
    log_size,
    log_tail,
    supervise,
)
from pipelines.running.concurrent_evaluation import evaluating, forget_results
from pipelines.running.earlier_training import take_evaluation, take_training
from pipelines.running.failures import count_oom_kills, early_exit, failure_record, retry_inputs
from pipelines.running.gpu_slots import evaluates_in_ranks, slot_environment, stage_slots
from pipelines.running.progress import logged_line
from pipelines.running.run import RunExecution
from rpg.recording.run_directory import accuracies_in
from specs.errors import Issue, SpecError
from specs.machine.exit_cause import absent_ranks, forget_exits, ranks_that_waited, read_issues
from specs.machine.files import is_within, now, read_json, write_json
from specs.machine.manifests import find_damage
from specs.machine.timed_output import TIMED

_SHOWN_SECONDS = 0.5
_WATCHDOG_LINES = 10_000
"""Number of lines at the end of a log that are searched for NCCL's timeouts. Long traces follow these."""
StageOutcome = Literal["cached", "done"]
Tick = Callable[[], None]


def perform_stage(execution: RunExecution, stage: StagePlan, tick: Tick = lambda: None) -> StageOutcome:
    """Executes a stage, unless a complete result with its fingerprint exists.

    Args:
        tick: called many times a second while the stage's process runs.
    Raises:
        SpecError: the spec, or a file or model that it names, is wrong; with the line of the spec.
        StageError: the stage failed without a user's mistake.
        StageStoppedError: the run was asked to stop.
        StagePausedError: training has reached the step at which the run pauses.
        SupersededError: another process has taken the run over.
    """
    _stop_if_asked(execution)
    started = time.monotonic()
    execution.progress.stage_started(stage.stage, stage.reason)
    outcome = "failed"
    try:
        outcome = _perform(execution, stage, tick)
        if stage.stage == "evaluate":
            forget_results(execution.directory)
        return outcome
    except StageStoppedError:
        outcome = "stopped"
        raise
    except StagePausedError:
        outcome = "paused"
        raise
    finally:
        execution.progress.stage_ended(stage.stage, outcome, time.monotonic() - started)


def _perform(execution: RunExecution, stage: StagePlan, tick: Tick) -> StageOutcome:
    if _is_done(execution, stage):
        return _record_cached(execution, stage)
    _refuse_other_code(execution, stage)
    # Training may have been reused before a retry.
    if stage.taken_from and (stage.stage == "evaluate" or not (execution.directory / "attempts").exists()):
        stage = _take(execution, stage)
        if _is_done(execution, stage):
            return _record_cached(execution, stage)
    if stage.stage in ("data", "base"):
        lock = execution.home.locked(
            f"{stage.stage}-{stage.fingerprint[:16]}", waiting=_while_another_makes(execution, stage)
        )
        with lock:
            if execution.shared and not _is_done(execution, stage) and not _since(execution, stage):
                execution.shared.fetch_artifact(stage.output)
            # Another run may have published the result during the wait, or a worker of another machine before.
            if _is_done(execution, stage):
                return _record_cached(execution, stage)
            return _recorded(execution, stage, lambda: _make_aside(execution, stage, tick))
    work: dict[str, Callable[[], None]] = {
        "train": lambda: _train(execution, stage, tick),
        "evaluate": lambda: _make_aside(execution, stage, tick),
        "report": lambda: _report(execution, stage, tick),
    }
    return _recorded(execution, stage, work[stage.stage])


def _take(execution: RunExecution, stage: StagePlan) -> StagePlan:
    """Reuses another run's training or evaluation. If that is damaged, returns the stage marked as one to execute, with
    the reason.

    A run in an object store reuses nothing, and a run that is to pause reuses only the first steps of a training.
    """
    from storage.segments import BadSegmentError

    if execution.shared or (execution.until and not 0 < stage.taken_step < execution.until):
        return replace(stage, action="RUN", reason="not finished before", taken_from="")
    take = take_evaluation if stage.stage == "evaluate" else take_training
    if stage.stage == "train":
        _write_inputs(execution, stage)
    try:
        take(execution, stage)
    except (BadSegmentError, FileNotFoundError) as error:
        execution.progress.note(f"  {stage.stage} from the start: {stage.taken_from} cannot be reused: {error}")
        return replace(stage, action="RUN", reason=f"{stage.taken_from} is damaged: {error}", taken_from="")
    execution.progress.note(f"  {stage.reason}")
    return stage


def _is_done(execution: RunExecution, stage: StagePlan) -> bool:
    """Returns whether the stage's result exists and is complete."""
    since = _since(execution, stage)
    if stage.stage == "report":
        current = is_report_current(execution.state.record, stage.fingerprint, stage.inputs, stage.output)
        return current and not is_older(stage.output, since)
    manifest = manifest_of(stage.stage, stage.output)
    return not damage_of(manifest, stage.fingerprint) and not is_older(manifest, since)


def _since(execution: RunExecution, stage: StagePlan) -> int:
    """See `Reuse.since_of`."""
    return execution.document.reuse.since_of(stage.stage)


def _refuse_other_code(execution: RunExecution, stage: StagePlan) -> None:
    """Raises SpecError if the code does not match the stage's fingerprint: either it was edited since the run was
    planned, or the user had accepted a result of other code, which is now damaged. The report stage is exempt."""
    if stage.accepted:
        message, changed = "the accepted result is no longer complete", ""
    elif stage.stage != "report" and (now := Code().of_stage(stage.stage, execution.plan.experiment)) != stage.code:
        names = sorted(name for name in {*now, *stage.code} if now.get(name) != stage.code.get(name))
        message, changed = f"code was changed after {execution.run_id} was planned", ", ".join(names)
    else:
        return
    hint = "run it again: the plan lists the work for the current code"
    raise SpecError(Issue(message, given=changed, hint=hint))


def _record_cached(execution: RunExecution, stage: StagePlan) -> StageOutcome:
    """Records that the result existed already. If this run made the result, its record stays unchanged."""
    before = execution.state.stage(stage.stage)
    if before.get("fingerprint") != stage.fingerprint or before.get("status") != "finished":
        _record(execution, stage, status="finished", cached=True, started_at=None, ended_at=now())
    elif stage.accepted:
        execution.state.update_stage(stage.stage, reason=stage.reason)
    _name_evaluation(execution, stage)
    return "cached"


def _recorded(execution: RunExecution, stage: StagePlan, work: Callable[[], None]) -> StageOutcome:
    """Executes a stage's work, and records its start and how it ended."""
    execution.state.work()
    _record(execution, stage, status="running", cached=False, started_at=now(), ended_at=None)
    try:
        work()
    except (StageStoppedError, StagePausedError) as ending:
        execution.state.update_stage(stage.stage, status="cancelled", ended_at=now(), reason=str(ending))
        raise
    except BaseException as error:
        kept = failure_record(execution, stage.stage, error)
        execution.state.update_stage(stage.stage, status="failed", ended_at=now(), reason=str(error), **kept)
        raise
    execution.state.update_stage(stage.stage, status="finished", ended_at=now(), cause=None, failure=None)
    _name_evaluation(execution, stage)
    return "done"


def _record(execution: RunExecution, stage: StagePlan, **fields: Any) -> None:
    output = os.path.relpath(stage.output, execution.home.root)
    execution.state.update_stage(
        stage.stage, fingerprint=stage.fingerprint, reason=stage.reason, output=output, **fields
    )


def _name_evaluation(execution: RunExecution, stage: StagePlan) -> None:
    if stage.stage == "evaluate" and execution.state.record["evaluation"] != stage.fingerprint:
        execution.state.update(evaluation=stage.fingerprint)


def _pause_if_there(execution: RunExecution) -> None:
    """Raises StagePausedError if training has reached the step at which it is to pause, or a later one, and has
    evaluated the policy of that step."""
    noted = read_json(execution.directory / "evaluated.json")
    newest = max((execution.directory / "checkpoints").glob("step-*"), default=None)
    if execution.until and newest and noted.get("evaluation") == execution.plan.stage("evaluate").fingerprint:
        saved = int(newest.name.removeprefix("step-"))
        if standing := [step for step in accuracies_in(noted) if execution.until <= step <= saved]:
            raise StagePausedError(min(standing))


def _make_aside(execution: RunExecution, stage: StagePlan, tick: Tick) -> None:
    """Fills a temporary directory with `rpg.stage`, and publishes that directory."""
    directory = execution.directory.absolute()  # another machine may read the job, from another directory
    inputs = {name: str(execution.plan.stage(name).output.absolute()) for name in stage.inputs if name != "train"}
    if stage.stage == "evaluate":
        inputs["base"] = str(execution.plan.stage("base").output.absolute())
        if execution.plan.experiment.trains:
            inputs["run"] = str(directory)
        _forget_older_answers(directory / "answers", _since(execution, stage))
    with filling(stage.output) as aside:
        job = job_file(directory, stage.stage)
        description = {
            "stage": stage.stage,
            "spec": execution.plan.experiment.model_dump(mode="json"),
            "inputs": inputs,
            "out": str(aside.absolute()),
            "problems": str(problems_file(directory, stage.stage)),
            "run_id": execution.run_id,
            "fingerprint": stage.fingerprint,
            "kept": str(directory / "answers"),
        }
        write_json(job, description)
        if stage.stage == "evaluate" and evaluates_in_ranks(execution.plan.experiment):
            _launch(execution, stage, tick)
        else:
            with stage_slots(execution, stage.stage) as slots:
                command = [sys.executable, "-P", "-m", "rpg.stage", str(job)]
                forks = forks_stages(execution.plan.experiment, slots)
                _run_process(execution, stage, command, tick, environment=slot_environment(slots), forks=forks)
        execution.check_lease()
        job.unlink()
        manifest = {"stage": stage.stage, "fingerprint": stage.fingerprint, "identity": stage.identity}
        code = {"code": stage.code} if stage.code else {}
        publish(aside, stage.output, manifest | {"inputs": stage.inputs} | code)


def _train(execution: RunExecution, stage: StagePlan, tick: Tick) -> None:
    _pause_if_there(execution)
    directory = execution.directory
    _write_inputs(execution, stage)
    _forget_older(directory, _since(execution, stage))
    _withdraw(execution, manifest_of("train", directory))
    (directory / "cancel").unlink(missing_ok=True)
    with evaluating(execution) as look:

        def tick_and_look() -> None:
            tick()
            look()

        _launch(execution, stage, tick_and_look)
    _pause_if_there(execution)
    if damage := damage_of(manifest_of("train", directory), stage.fingerprint):
        raise StageError(f"train ended without a complete result: {damage}", _log(execution, stage))


def _write_inputs(execution: RunExecution, stage: StagePlan) -> None:
    """Writes inputs.json, which the trainer reads, and also commands that train steps of the run again."""
    directory = execution.directory
    inputs = {name: os.path.relpath(execution.plan.stage(name).output, directory) for name in ("data", "base")}
    evaluate = execution.plan.stage("evaluate")
    named = {"run_id": execution.run_id, "fingerprint": stage.fingerprint, "evaluation": evaluate.fingerprint}
    evaluation = execution.plan.experiment.evaluation
    if execution.until or evaluation.every_steps or evaluation.concurrent_ranks:
        _name_evaluation(execution, evaluate)
    pause = {"until": execution.until} if execution.until else {}
    launcher = launcher_of(execution.plan.experiment)
    lease = {"lease": execution.lease.number} if execution.lease and not launcher.outlives_command else {}
    from pipelines.planning.gpu_sharing import sharing_inputs  # slow import that the start of a run does not need

    sharing = sharing_inputs(execution.plan.experiment)
    write_json(directory / "inputs.json", named | pause | lease | inputs | sharing | retry_inputs(execution))


def _launch(execution: RunExecution, stage: StagePlan, tick: Tick) -> None:
    """Executes a stage in ranks that the spec's launcher starts."""
    launcher, experiment = launcher_of(execution.plan.experiment), execution.plan.experiment
    launched: LaunchedStage = "train" if stage.stage == "train" else "evaluate"
    with stage_slots(execution, stage.stage) as slots:
        command = launcher.command(execution.directory, experiment, slots, stage=launched)
        _run_process(
            execution,
            stage,
            command,
            tick,
            environment=slot_environment(slots),
            forks=is_rank(command) and forks_stages(experiment, slots),
            signal_children=launcher.signal_children and not is_rank(command),
            # A process that has taken the run over is responsible for jobs elsewhere.
            afterwards=lambda: None if execution.superseded else launcher.end(execution.directory),
        )


def _withdraw(execution: RunExecution, manifest: Path) -> None:
    """Withdraws a published training whose files are damaged. The trainer then exports the last step's weights
    again."""
    recorded = read_json(manifest)
    for weights in recorded.get("weights", {}).values():
        entries = {name: entry for name, entry in recorded["files"].items() if name.startswith(f"{weights}/")}
        if is_within(weights) and (damage := find_damage(manifest.parent, entries)):
            execution.progress.note(f"  removed {weights}: {damage}")
            shutil.rmtree(manifest.parent / weights, ignore_errors=True)
    manifest.unlink(missing_ok=True)


def _forget_older(directory: Path, since_ns: int) -> None:
    """Removes the files older than that time from which training would resume, so that it starts from step 0. The rows
    stay until the rows of the new attempt supersede them."""
    if since_ns:
        for path in (
            directory / "train.json",
            directory / "guards.json",  # roll-backs, which lower the learning rate
            *directory.glob("checkpoints/step-*"),
            *directory.glob("weights/step-*"),
        ):
            if path.exists() and is_older(path, since_ns):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _forget_older_answers(kept: Path, since_ns: int) -> None:
    """Removes answers of an interrupted evaluation that are older than that time, so that the evaluation does not
    continue with them."""
    for path in kept.rglob("*.json"):
        if is_older(path, since_ns):
            path.unlink()


def _report(execution: RunExecution, stage: StagePlan, tick: Tick) -> None:
    from storage.ingest import ingest

    # Without the page's time limit: the larger the run, the longer its files take to merge.
    ingest(execution.home.root, compact=execution.run_id, whole=True)
    if execution.plan.experiment.stages.report.timeout_seconds:  # only a process can be ended
        command = [sys.executable, "-P", "-m", "pipelines.report", execution.run_id]
        _run_process(execution, stage, command, tick, environment={"RPG_HOME": str(execution.home.root)})
        return
    from pipelines.report import write_run_report

    try:
        write_run_report(execution.home, execution.run_id)
    except Exception:
        log = _log(execution, stage)
        with suppress(OSError):
            log.parent.mkdir(exist_ok=True)
            with open(log, "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        raise


def _run_process(
    execution: RunExecution,
    stage: StagePlan,
    command: list[str],
    tick: Tick,
    *,
    environment: dict[str, str] | None = None,
    forks: bool = False,
    signal_children: bool = False,
    afterwards: Callable[[], None] = lambda: None,
) -> None:
    """Runs a stage's process to its end, and raises the error that its exit code stands for. See `perform_stage` for
    the errors.

    Args:
        tick: called many times a second.
        environment, forks, signal_children, afterwards: see `Child`.
    """
    problems = problems_file(execution.directory, stage.stage)
    problems.unlink(missing_ok=True)
    policy = getattr(execution.plan.experiment.stages, stage.stage)
    child = Child(
        stage=stage.stage,
        command=command,
        log=_log(execution, stage),
        record=execution.directory / "process.json",
        timeout_seconds=policy.timeout_seconds,
        environment={TIMED: "1", **(environment or {})},
        forks=forks,
        signal_children=signal_children,
        afterwards=afterwards,
    )

    log_start, shown_at = log_size(child.log), 0.0

    def show_progress() -> None:
        nonlocal shown_at
        tick()
        if time.monotonic() - shown_at < _SHOWN_SECONDS:
            return
        shown_at = time.monotonic()
        if stage.stage == "train":
            execution.progress.training(read_json(execution.directory / "progress.json"))
        elif line := logged_line(child.log, stage.stage, since=log_start):
            execution.progress.waiting(line)

    def stop() -> StopRequest | None:
        request = execution.stop_requested()
        if request and request.grace > 0:
            execution.progress.waiting("stopping: it saves its state")
        return request

    forget_exits(execution.directory)
    kills, begun = count_oom_kills(), time.time()
    code = supervise(child, stop=stop, tick=show_progress)
    if code != 0 and (issues := read_issues(problems)):
        located = (execution.document.locate(issue, execution.plan.values) for issue in issues)
        raise SpecError(*located, done=_standing(execution, stage))
    if code != 0:
        why = _absent_ranks(execution, log_tail(child.log, _WATCHDOG_LINES, since=log_start))
        output = log_tail(child.log, 60, since=log_start) + ("\nNCCL timed out" if why else "")
        faults = gpu_faults(since=begun) if launcher_of(execution.plan.experiment).ranks_run_here else []
        error = failure(stage.stage, code, child.log, since=log_start, why=why, faults=faults)
        early = early_exit(code, output, execution.directory, killed_for_memory=count_oom_kills() > kills)
        error.cause, error.microbatch_tokens = early.cause, early.microbatch_tokens
        raise error


def _absent_ranks(execution: RunExecution, output: str) -> str:
    """Returns a sentence that names the ranks that did not reach a collective of NCCL; empty if no collective timed
    out."""
    spec, waited = execution.plan.experiment, ranks_that_waited(output)
    return absent_ranks(waited, spec.training.ranks, spec.launcher.collective_timeout_seconds) if waited else ""


def _standing(execution: RunExecution, stage: StagePlan) -> str:
    """Returns the end of an error message: the stage with the user's mistake, and the stages that had finished
    before."""
    stages = execution.plan.experiment.stages
    names = [name for name in type(stages).model_fields if name != stage.stage]
    finished = [name for name in names if execution.state.stage(name).get("status") == "finished"]
    kept = f"; {', '.join(finished)} {'is' if len(finished) == 1 else 'are'} done and kept" if finished else ""
    return f"this error ended the {stage.stage} stage; no later stage was run{kept}"


def _log(execution: RunExecution, stage: StagePlan) -> Path:
    return execution.directory / "logs" / f"{stage.stage}.log"


def _stop_if_asked(execution: RunExecution) -> None:
    if request := execution.stop_requested():
        raise StageStoppedError(request)


def _while_another_makes(execution: RunExecution, stage: StagePlan) -> Callable[[], None]:
    def waiting() -> None:
        _stop_if_asked(execution)
        execution.progress.waiting(f"another run is making the same {stage.stage}")

    return waiting
