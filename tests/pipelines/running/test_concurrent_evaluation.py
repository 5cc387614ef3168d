"""Checkpoints are evaluated while the run trains, with the results of evaluation after training. Real processes."""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import SPEC, Lab, finished, kill
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.home.results import filling, publish
from pipelines.launchers import concurrent_directory, job_file
from pipelines.planning.plan import make_plan
from pipelines.running import concurrent_evaluation
from pipelines.running.concurrent_evaluation import evaluating
from pipelines.running.gpu_slots import concurrency_warnings
from pipelines.running.run import RunExecution
from pipelines.running.stages import perform_stage
from rpg.evaluation.results import ConcurrentResults
from rpg.recording.run_directory import RunDirectory
from specs.loader import load_document
from specs.machine.files import files_under, read_json, write_json
from specs.machine.gpu_slots import leased

CHECKPOINTS = ("training.steps=60", "training.export_every_steps=20", "evaluation.checkpoints=all")
CONCURRENTLY = (*CHECKPOINTS, "evaluation.concurrent_ranks=1")
MEASURED = "select step, count(*) from evaluation_samples group by step order by step"
LOG = "evaluate-concurrent.log"


def stopped_at_20(lab: Lab) -> list[psutil.Process]:
    """Stops the trainer once it has exported its first weights. Returns its processes."""
    (run_id,) = wait_for(lab.run_ids, what="the run")
    run = lab.home.run(run_id)
    wait_for(lambda: "20" in read_json(run / "exported.json"), what="the first export")
    launcher = psutil.Process(lab.training_pid())
    trainer = [launcher, *launcher.children(recursive=True)]
    for process in reversed(trainer):
        process.send_signal(signal.SIGSTOP)
    assert lab.progress(run_id) < 60
    return trainer


def results(lab: Lab) -> tuple[list[Any], list[Any], dict[str, bytes]]:
    """All rows of evaluations, and the evaluate stage's files but the manifest, which has the time of its making."""
    (stage,) = lab.root.glob("runs/*/evaluate/*")
    files = {str(file.relative_to(stage)): file.read_bytes() for file in files_under(stage) if file.name[0] != "."}
    files.pop("manifest.json")
    tables = ("evaluations", "evaluation_samples")
    return *(lab.query(f"select * from {table} order by all") for table in tables), files


@pytest.mark.long
def test_the_first_checkpoint_is_on_record_before_training_ends_with_the_rows_of_evaluation_after_it(
    lab: Lab,
) -> None:
    after = lab.rpg("run", str(lab.spec), overrides=CHECKPOINTS)
    assert after.code == 0, after.err
    expected = results(lab)
    (run_id,) = lab.run_ids()
    lab.home.run(run_id).rename(lab.root / "aside")
    running = lab.start("run", str(lab.spec), overrides=CONCURRENTLY)
    trainer = stopped_at_20(lab)
    assert lab.run_ids() == [run_id], "the key is no part of what a run is"
    wait_for(lambda: lab.query(MEASURED) == [(0, 20), (20, 20)], what="the rows of the base model and of step 20")
    assert not (lab.home.run(run_id) / "train.json").exists()
    assert [row[0] for row in lab.query("select step from accuracy_curves order by step")] == [0, 20]
    assert {row["step"] for row in json.loads(lab.rpg("show", run_id, "--json").out)["evaluations"]} == {0, 20}
    for process in trainer:
        process.send_signal(signal.SIGCONT)
    done = finished(running)
    assert done.code == 0, done.err
    assert results(lab) == expected
    assert lab.query(MEASURED) == [(0, 20), (20, 20), (40, 20), (60, 20)]
    log = (lab.home.run(run_id) / "logs" / "evaluate.log").read_text()
    assert "step 0: was measured during training" in log
    assert "step 20: was measured during training" in log
    assert not (lab.home.run(run_id) / "concurrent").exists()
    assert lab.processes() == []


@pytest.mark.long
def test_killed_in_the_middle_it_leaves_no_process_and_resumes_with_what_is_not_on_record(lab: Lab) -> None:
    running = lab.start("run", str(lab.spec), overrides=CONCURRENTLY)
    stopped_at_20(lab)
    (run_id,) = lab.run_ids()
    run = lab.home.run(run_id)
    wait_for(lambda: lab.query(MEASURED) == [(0, 20), (20, 20)], what="the rows of the base model and of step 20")
    kill(running.pid)
    running.communicate()
    wait_for(lambda: lab.processes() == [], timeout=10, what="the end of every process")
    resumed = lab.rpg("resume", run_id)
    assert resumed.code == 0, resumed.err
    logs = "".join((run / "logs" / name).read_text() for name in (LOG, "evaluate.log"))
    assert [logs.count(f"step {step}: done") for step in (0, 20, 40, 60)] == [1, 1, 1, 1]
    assert lab.query(MEASURED) == [(0, 20), (20, 20), (40, 20), (60, 20)]
    assert lab.query("select count(*), count(distinct (step, dataset, metric)) from evaluations") == [(20, 20)]


@pytest.mark.long
def test_a_failing_evaluation_stops_no_training_and_cancel_ends_both(lab: Lab) -> None:
    running = lab.start("run", str(lab.spec), overrides=(*CONCURRENTLY, "stages.evaluate.retry_delay_seconds=0"))
    trainer = stopped_at_20(lab)
    (run_id,) = lab.run_ids()
    run = lab.home.run(run_id)

    def evaluating_process() -> int:
        return int(read_json(run / "concurrent" / run_id / "process.json").get("pid", 0))

    first = wait_for(evaluating_process, what="the evaluation")
    kill(first)
    again = wait_for(lambda: evaluating_process() not in (0, first) and evaluating_process(), what="another one")
    assert trainer[0].is_running()
    assert again != first
    for process in trainer:
        process.send_signal(signal.SIGCONT)
    cancelled = lab.rpg("cancel", run_id)
    assert cancelled.code == 0, cancelled.err
    result = finished(running)
    assert result.code == 1
    assert "evaluation during training: evaluate was killed by SIGKILL" in result.err
    wait_for(lambda: lab.processes() == [], timeout=10, what="the end of every process")
    assert lab.state(run_id)["status"] == "cancelled"


def run_that_exported(tmp_path: Path, *overrides: str) -> RunExecution:
    """A run that has exported step 20."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml", (*CONCURRENTLY, *overrides)), Home(tmp_path / "home")
    execution = RunExecution(document, make_plan(document, home).runs[0].run_id, home)
    write_json(execution.directory / "attempts" / "0001.json", {"resumed_from_step": 0})
    write_json(execution.directory / "inputs.json", {})
    run = RunDirectory(execution.directory)
    run.note_exported(20, 1)
    (run.weights / "step-000020").mkdir(parents=True)
    return execution


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunExecution:
    """A run that has exported step 20, on a machine with two GPU slots."""
    monkeypatch.setenv("RPG_SLOTS", "4,7")
    monkeypatch.setenv("RPG_SLOT_DIR", str(tmp_path / "slots"))
    return run_that_exported(tmp_path)


def test_without_a_free_slot_nothing_is_begun_and_the_wait_is_told_once(exported: RunExecution) -> None:
    notes: list[str] = []
    exported.warn = notes.append  # type: ignore[method-assign]
    with leased(2, "the trainer", waiting=None), evaluating(exported) as look:
        look()
        look()
    (note,) = notes
    assert "evaluation waits for GPU slots or the end of training: 1 of 2 GPU slots are needed" in note
    assert "held by the trainer" in note
    assert not (exported.directory / "concurrent").exists()


def test_weights_that_are_exported_again_meanwhile_are_no_failure_and_are_begun_again(
    exported: RunExecution, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    exported.warn = notes.append  # type: ignore[method-assign]
    monkeypatch.setattr(concurrent_evaluation, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))  # a process that ends well and measures nothing
    job = job_file(concurrent_directory(exported.directory), "evaluate")

    def attempt_begun() -> int:
        return int(read_json(job)["exported"][0]["attempt"])

    with evaluating(exported) as look:
        look()
        assert attempt_begun() == 1
        write_json(exported.directory / "attempts" / "0002.json", {"resumed_from_step": 10})
        RunDirectory(exported.directory).note_exported(20, 2)
        wait_for(lambda: look() or attempt_begun() == 2, what="the second evaluation")
    assert notes == []


@pytest.mark.more
def test_one_failure_before_each_result_leaves_none_of_them_to_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = run_that_exported(tmp_path, "stages.evaluate.retry_delay_seconds=0", "stages.evaluate.retries=1")
    monkeypatch.setenv("RPG_SLOTS", "")
    monkeypatch.setenv("RPG_FORK_STAGES", "0")
    monkeypatch.setattr(concurrent_evaluation, "_LOOK_SECONDS", 0.0)
    results_of_run = ConcurrentResults(execution.directory, execution.plan.stage("evaluate").fingerprint)
    result = results_of_run.path(20)
    program = tmp_path / "fails-every-other-time"  # and else leaves a result of the attempt that it was begun for
    program.write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/failed 2>/dev/null && exit 1\nrmdir {tmp_path}/failed\n"
        f"mkdir -p {result}\ncp {execution.directory}/newest {result}/result.json\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with evaluating(execution) as look:
        for attempt in (1, 2):
            write_json(execution.directory / "newest", {"attempt": attempt})
            write_json(execution.directory / "attempts" / f"{attempt:04}.json", {"resumed_from_step": 0})
            RunDirectory(execution.directory).note_exported(20, attempt)
            wait_for(lambda newest=attempt: look() or results_of_run.attempt(20) == newest, what="the result")


@pytest.mark.more
@pytest.mark.parametrize(
    ("ends", "begun"), [("exit 2", 1), ("echo 'IndexError: index out of range in self'; exit 1", 1), ("exit 1", 3)]
)
def test_an_evaluation_that_would_fail_again_is_left_to_the_stage(
    ends: str, begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = run_that_exported(tmp_path, "stages.evaluate.retry_delay_seconds=0", "stages.evaluate.retries=2")
    notes: list[str] = []
    execution.warn = notes.append  # type: ignore[method-assign]
    monkeypatch.setenv("RPG_SLOTS", "")
    monkeypatch.setenv("RPG_FORK_STAGES", "0")
    monkeypatch.setattr(concurrent_evaluation, "_LOOK_SECONDS", 0.0)
    program = tmp_path / "fails"
    program.write_text(f"#!/bin/sh\n{ends}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with evaluating(execution) as look:
        wait_for(lambda: look() or "after training" in "".join(notes), what="the last failure")
        for _ in range(3):
            look()
    assert len(notes) == begun


def test_a_job_that_is_being_submitted_when_training_ends_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = tmp_path / "slurm"
    slurm.mkdir()
    commands = {
        "sbatch": f"touch {slurm}/has-the-job; sleep 0.5; echo 7",  # the answer comes later than the job
        "squeue": f"[ -e {slurm}/cancelled ] || echo PENDING",
        "scancel": f'echo "$@" >> {slurm}/cancelled',
    }
    for name, command in commands.items():
        (slurm / name).write_text(f"#!/bin/sh\n{command}\n")
        (slurm / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm}:/usr/bin:/bin")
    with evaluating(run_that_exported(tmp_path, "launcher.type=slurm")) as look:
        look()
        wait_for((slurm / "has-the-job").exists, what="the submission")
    assert (slurm / "cancelled").read_text() == "7\n"


def test_what_a_command_left_that_was_killed_after_its_evaluation_goes_with_the_next(exported: RunExecution) -> None:
    stage = exported.plan.stage("evaluate")
    with filling(stage.output) as aside:
        publish(aside, stage.output, {"stage": "evaluate", "fingerprint": stage.fingerprint, "inputs": stage.inputs})
    left = concurrent_directory(exported.directory)
    left.mkdir(parents=True)
    assert perform_stage(exported, stage) == "cached"
    assert not left.parent.exists()


def test_a_plan_warns_of_a_machine_without_a_gpu_to_spare(exported: RunExecution) -> None:
    spec = exported.plan.experiment
    assert list(concurrency_warnings(spec)) == []
    both = spec.model_copy(update={"training": spec.training.model_copy(update={"ranks": 2})})
    (warning,) = concurrency_warnings(both)
    assert warning.given == "1, and training takes 2 of 2 GPU slots: 4, 7"


def test_weights_count_until_a_later_attempt_goes_through_their_step_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.exported() == {}
    for number, resumed_from in ((1, 0), (2, 30)):
        write_json(tmp_path / "attempts" / f"{number:04}.json", {"resumed_from_step": resumed_from})
    for step in (20, 40):
        run.note_exported(step, 1)
    assert run.exported() == {20: 1}, "the second attempt has yet to come to step 40"
    run.note_exported(40, 2)
    assert run.exported() == {20: 1, 40: 2}
