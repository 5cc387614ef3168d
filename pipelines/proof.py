"""Proof of a run: steps of it are trained again from a checkpoint, aside, and compared with what was recorded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.home import Home
from pipelines.launchers import launcher_of
from pipelines.processes.supervisor import Child, failure, log_size, supervise
from pipelines.running.gpu_slots import slot_environment, stage_slots
from pipelines.running.run import RunExecution
from pipelines.runs import status_of
from pipelines.services.cancel import frozen_document
from rpg.checkpoints.checkpoint import MANIFEST, defect
from rpg.files import digest, files_under, read_json, write_json
from rpg.processes.exit_cause import STOPPED
from specs.errors import Issue, SpecError
from specs.metrics import METRICS
from storage import Store

_ROWS = {"metrics": "step, name", "rollouts": "step, rollout_id", "tokens": "step, rollout_id, position"}
"""What is compared, and the order that makes two recordings of it line up."""
_MEASURED = [metric.name for metric in METRICS if not metric.repeatable]
_OF_THE_RECORDING = ("attempt", "recorded_at")


@dataclass(frozen=True, slots=True)
class Proof:
    """What came out."""

    run_id: str
    start: int
    """The step of the checkpoint that the replay began with; 0: the base model."""
    end: int
    compared: tuple[str, ...]
    """What was held against the record, and how much of it."""
    differences: tuple[str, ...]
    """Empty: all of it was the same."""

    def lines(self) -> list[str]:
        """For a reader."""
        origin = f"the checkpoint of step {self.start}" if self.start else "the base model"
        count = len(self.differences)
        verdict = f"{count} difference{'s' if count > 1 else ''}" if count else "the same in every bit"
        head = f"{self.run_id}: steps {self.start + 1} to {self.end} again from {origin}; {', '.join(self.compared)}"
        return [f"{head}: {verdict}", *(f"  {difference}" for difference in self.differences)]


def prove(home: Home, run_id: str, steps: int = 0) -> Proof:
    """Replays steps of a run that is not running, and compares.

    Args:
        steps: how many; 0: from the last checkpoint but one to the last.
    Raises:
        SpecError: the run is running, or has not so many steps to replay.
        StageError: the replay failed.
    """
    if status_of(home, run_id) == "running":
        raise SpecError(Issue("a run that is running cannot be proven", given=run_id, hint="wait for its end"))
    start, end = _span(home, run_id, steps)
    execution = RunExecution(frozen_document(home, run_id), run_id, home)
    with _scratch(home, run_id, start, end) as scratch:
        _replay(execution, scratch)
        compared, differences = _compare(home, scratch, run_id, start, end)
    return Proof(run_id, start, end, tuple(compared), tuple(differences))


def _span(home: Home, run_id: str, steps: int) -> tuple[int, int]:
    """The checkpoint to begin with (0: none) and the last step to replay."""
    last = read_recorded_steps(home, run_id)
    saved = [step for step, path in sorted(checkpoints(home.run(run_id)).items()) if step <= last and not defect(path)]
    if steps:
        start, end = max((step for step in [0, *saved] if step + steps <= last), default=-1), 0
        if start < 0:
            raise SpecError(Issue("the run has not so many steps", given=str(steps), allowed=f"at most {last}"))
        return start, start + steps
    known = [0, *saved]
    start, end = (known[-2], known[-1]) if saved else (0, last)
    if start == end:
        raise SpecError(Issue("nothing is recorded that could be replayed", given=run_id))
    return start, end


def read_recorded_steps(home: Home, run_id: str) -> int:
    """The last step with metrics."""
    with Store.open(home.root) as store:
        ((last,),) = store.query("select coalesce(max(step), 0) from metrics where run_id = ?", [run_id]).rows
    return int(last)


def checkpoints(directory: Path) -> dict[int, Path]:
    """A run's published checkpoints by step."""
    return {int(path.name.removeprefix("step-")): path for path in (directory / "checkpoints").glob("step-*")}


@contextmanager
def _scratch(home: Home, run_id: str, start: int, end: int) -> Iterator[Home]:
    """A home of its own with the run as it was after `start`; gone in the end."""
    scratch = Home(home.root / "proofs" / run_id)
    shutil.rmtree(scratch.root, ignore_errors=True)
    source, copy = home.run(run_id), scratch.run(run_id)
    try:
        copy.mkdir(parents=True)
        for name in ("run.json", "spec.json"):
            shutil.copyfile(source / name, copy / name)
        inputs = read_json(source / "inputs.json")
        places = {name: os.path.relpath(source / inputs[name], copy) for name in ("data", "base")}
        write_json(copy / "inputs.json", inputs | places | {"until": end})
        if start:
            # Nothing writes into a checkpoint, so a link is as good as a copy.
            shutil.copytree(
                checkpoints(source)[start], copy / "checkpoints" / f"step-{start:06}", copy_function=os.link
            )
        yield scratch
    finally:
        shutil.rmtree(scratch.root, ignore_errors=True)


def _replay(execution: RunExecution, scratch: Home) -> None:
    """Trains the copy to where it has to stop."""
    directory, experiment = scratch.run(execution.run_id), execution.plan.experiment
    launcher, log = launcher_of(experiment), execution.directory / "logs" / "proof.log"
    before = log_size(log)
    with stage_slots(execution, "train") as slots:
        child = Child(
            stage="proof",
            command=launcher.command(directory, experiment, slots),
            log=log,
            record=directory / "process.json",
            environment=slot_environment(slots),
            signal_children=launcher.signal_children,
            afterwards=lambda: launcher.end(directory),
        )
        code = supervise(child, stop=execution.stop.requested, tick=lambda: None)
    if code not in (0, STOPPED):
        raise failure("the replay", code, log, since=before)


def _compare(home: Home, scratch: Home, run_id: str, start: int, end: int) -> tuple[list[str], list[str]]:
    compared, differences = [], []
    for table in _ROWS:
        recorded, replayed = (_rows(one, table, run_id, start, end) for one in (home, scratch))
        compared.append(f"{len(recorded):,} {table}")
        differences += _unlike(table, recorded, replayed)
    for what, name in (("checkpoint", "checkpoints"), ("export", "weights")):
        for step in range(start + 1, end + 1):
            recorded_at, replayed_at = (one.run(run_id) / name / f"step-{step:06}" for one in (home, scratch))
            if recorded_at.is_dir() and replayed_at.is_dir():
                files = [_digests(path) for path in (recorded_at, replayed_at)]
                compared.append(f"{what} of step {step} ({len(files[0])} files)")
                differences += [
                    f"{what} of step {step}: {file} differs"
                    for file in sorted(files[0].keys() | files[1].keys())
                    if files[0].get(file) != files[1].get(file)
                ]
    return compared, differences


def _rows(home: Home, table: str, run_id: str, start: int, end: int) -> pa.Table:
    """The valid rows of the steps, in order, without what says when and by whom they were recorded."""
    repeatable, parameters = ("and not list_contains(?, name)", [_MEASURED]) if table == "metrics" else ("", [])
    query = f"select * from {table} where run_id = ? and step > ? and step <= ? {repeatable} order by {_ROWS[table]}"
    with Store.open(home.root) as store:
        found = store.query(query, [run_id, start, end, *parameters]).table
    return found.drop_columns([name for name in _OF_THE_RECORDING if name in found.column_names])


def _unlike(table: str, recorded: pa.Table, replayed: pa.Table) -> list[str]:
    """Where two recordings first differ, column by column."""
    if len(recorded) != len(replayed):
        return [f"{table}: {len(recorded):,} rows recorded, {len(replayed):,} replayed"]
    found = []
    for name in recorded.column_names:
        one, other = (_bits(whole.column(name)) for whole in (recorded, replayed))
        where = np.flatnonzero(one != other)
        if len(where):
            row = recorded.slice(int(where[0]), 1).to_pylist()[0]
            again = replayed.column(name)[int(where[0])].as_py()
            place = ", ".join(f"{key} {row[key]}" for key in _ROWS[table].split(", "))
            found.append(
                f"{table}: {name} differs in {len(where):,} rows, first at {place}: {row[name]!r} recorded,"
                f" {again!r} replayed"
            )
    return found


def _bits(column: pa.ChunkedArray) -> np.ndarray:
    """Values that are equal exactly where all bits are, NULL and NaN included."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        # NULL reads as NaN; the mask tells them apart.
        wide = values.view(np.int32 if values.dtype == np.float32 else np.int64).astype(np.int64)
        return np.where(column.is_null().to_numpy(), np.int64(-1), wide)
    return np.array(column.to_pylist(), dtype=object)


def _digests(directory: Path) -> dict[str, str]:
    """Of every file but the checkpoint's own list, which names the attempt's figures of time."""
    return {str(path.relative_to(directory)): digest(path) for path in files_under(directory) if path.name != MANIFEST}
