"""Proof of a run: some of its steps are trained again, in a home of their own, and compared with the record."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.unrecorded import why_incomplete
from pipelines.launchers import is_rank, launcher_of
from pipelines.prefect.flows.cancel import frozen_document
from pipelines.processes.supervisor import Child, failure, log_size, supervise
from pipelines.running.gpu_slots import slot_environment, stage_slots
from pipelines.running.run import RunExecution
from rpg.checkpoints.checkpoint import MANIFEST, defect
from specs.errors import Issue, SpecError
from specs.machine.exit_cause import STOPPED
from specs.machine.files import digest, files_under, read_json, write_json
from specs.metrics import METRICS
from specs.reading.recorded import recorded_spec
from specs.schema.execution import Record
from storage import Store

_ROWS = {
    "metrics": "step, name",
    "rollouts": "step, rollout_id",
    "tokens": "step, rollout_id, position",
    "turns": "step, rollout_id, turn",
}
"""The tables that are compared, and the order in which their rows correspond."""
_NOT_REPEATABLE = [metric.name for metric in METRICS if not metric.repeatable]
_NOT_COMPARED = ("attempt", "recorded_at")


@dataclass(frozen=True, slots=True)
class Proof:
    """The steps that were trained again, and the differences."""

    run_id: str
    start: int
    """Step of the checkpoint from which training restarted. 0: the base model."""
    end: int
    """The last step that was trained again."""
    compared: tuple[str, ...]
    """The compared tables and states, and their sizes, in words."""
    differences: tuple[str, ...]
    """Differences in words; empty if everything was the same, bit for bit."""

    def lines(self) -> list[str]:
        """Returns the proof in words: a verdict, and a line for each difference."""
        origin = f"the checkpoint of step {self.start}" if self.start else "the base model"
        count = len(self.differences)
        verdict = f"{count} difference{'s' if count > 1 else ''}" if count else "the same in every bit"
        head = f"{self.run_id}: steps {self.start + 1} to {self.end} again from {origin}; {', '.join(self.compared)}"
        return [f"{head}: {verdict}", *(f"  {difference}" for difference in self.differences)]


def prove(home: Home, run_id: str, steps: int = 0) -> Proof:
    """Trains steps of a finished or stopped run again, and compares them with its record.

    Args:
        steps: number of steps; 0: those between the last two checkpoints.
    Raises:
        SpecError: the run is running, or has fewer steps.
        StageError: training failed.
    """
    if status_of(home, run_id) == "running":
        raise SpecError(Issue("a run that is running cannot be proven", given=run_id, hint="wait until it has ended"))
    start, end = _span(home, run_id, steps)
    execution = RunExecution(frozen_document(home, run_id), run_id, home)
    with _scratch(home, run_id, start, end) as scratch:
        _replay(execution, scratch)
        compared, differences = _compare(home, scratch, run_id, start, end)
    return Proof(run_id, start, end, tuple(compared), tuple(differences))


def _span(home: Home, run_id: str, steps: int) -> tuple[int, int]:
    """Returns the step of the checkpoint to start from (0: the base model), and the last step to train again."""
    last = _last_recorded_step(home, run_id)
    saved = [step for step, path in sorted(_checkpoints(home.run(run_id)).items()) if step <= last and not defect(path)]
    if steps:
        start = max((step for step in [0, *saved] if step + steps <= last), default=-1)
        if start < 0:
            raise SpecError(Issue("the run has fewer steps", given=str(steps), allowed=f"at most {last}"))
        return start, start + steps
    known = [0, *saved]
    start, end = (known[-2], known[-1]) if saved else (0, last)
    if start == end:
        raise SpecError(Issue("no recorded step can be replayed", given=run_id))
    return start, end


def _last_recorded_step(home: Home, run_id: str) -> int:
    with Store.open(home.root) as store:
        ((last,),) = store.query("select coalesce(max(step), 0) from metrics where run_id = ?", [run_id]).rows
    return int(last)


def _checkpoints(directory: Path) -> dict[int, Path]:
    """Returns a run's published checkpoints by step."""
    return {int(path.name.removeprefix("step-")): path for path in (directory / "checkpoints").glob("step-*")}


@contextmanager
def _scratch(home: Home, run_id: str, start: int, end: int) -> Iterator[Home]:
    """Yields a home that holds only this run, as it was after step `start`; deletes it at the end."""
    scratch = Home(home.root / "proofs" / run_id)
    shutil.rmtree(scratch.root, ignore_errors=True)
    source, copy = home.run(run_id), scratch.run(run_id)
    try:
        copy.mkdir(parents=True)
        shutil.copyfile(source / "run.json", copy / "run.json")
        # All rows: the comparison covers the rows that the run recorded, even if `rpg gc` freed some.
        spec = recorded_spec(source).model_copy(update={"record": Record()})
        write_json(copy / "spec.json", spec.model_dump(mode="json"))
        inputs = read_json(source / "inputs.json")
        places = {name: os.path.relpath(source / inputs[name], copy) for name in ("data", "base")}
        inputs.pop("evaluation", None)  # evaluations during training do not change it
        write_json(copy / "inputs.json", inputs | places | {"until": end})
        if start:
            # Checkpoints are never written to, so a link is as good as a copy.
            shutil.copytree(
                _checkpoints(source)[start], copy / "checkpoints" / f"step-{start:06}", copy_function=os.link
            )
        yield scratch
    finally:
        shutil.rmtree(scratch.root, ignore_errors=True)


def _replay(execution: RunExecution, scratch: Home) -> None:
    """Trains the run of the scratch home, which stops by itself after the step in its inputs.json."""
    directory, experiment = scratch.run(execution.run_id), execution.plan.experiment
    launcher, log = launcher_of(experiment), execution.directory / "logs" / "proof.log"
    log_start = log_size(log)
    with stage_slots(execution, "train") as slots:
        command = launcher.command(directory, experiment, slots)
        child = Child(
            stage="proof",
            command=command,
            log=log,
            record=directory / "process.json",
            environment=slot_environment(slots),
            signal_children=launcher.signal_children and not is_rank(command),
            afterwards=lambda: launcher.end(directory),
        )
        code = supervise(child, stop=execution.stop.requested, tick=lambda: None)
    if code not in (0, STOPPED):
        raise failure("the replay", code, log, since=log_start)


def _compare(home: Home, scratch: Home, run_id: str, start: int, end: int) -> tuple[list[str], list[str]]:
    """Compares the two records. Returns, in words, the compared items and the differences."""
    compared, differences = [], []
    with Store.open(home.root) as record, Store.open(scratch.root) as retrained:
        for table in _ROWS:
            before, again = (_rows(store, table, run_id, start, end) for store in (record, retrained))
            if cause := why_incomplete(home.run(run_id), table):
                compared.append(f"{len(before):,} of {len(again):,} {table} ({cause})")
                again = again.filter(pa.array(np.isin(_responses(again), _responses(before))))
            else:
                compared.append(f"{len(before):,} {table}")
            differences += _row_differences(table, before, again)
    for kind, folder in (("checkpoint", "checkpoints"), ("export", "weights")):
        for step in range(start + 1, end + 1):
            directories = [place.run(run_id) / folder / f"step-{step:06}" for place in (home, scratch)]
            if all(directory.is_dir() for directory in directories):
                before, again = (_digests(directory) for directory in directories)
                compared.append(f"{kind} of step {step} ({len(before)} files)")
                differences += [
                    f"{kind} of step {step}: {file} differs"
                    for file in sorted(before.keys() | again.keys())
                    if before.get(file) != again.get(file)
                ]
    return compared, differences


def _rows(store: Store, table: str, run_id: str, start: int, end: int) -> pa.Table:
    """Returns a table's valid rows of steps start + 1 to end, in order, without metrics and columns
    that always differ."""
    query = f"select * from {table} where run_id = ? and step > ? and step <= ?"
    parameters = [run_id, start, end]
    if table == "metrics":
        query, parameters = f"{query} and not list_contains(?, name)", [*parameters, _NOT_REPEATABLE]
    if table == "turns":
        query += " and rollout_id is not null"  # training's rows
    rows = store.query(f"{query} order by {_ROWS[table]}", parameters).table
    return rows.drop_columns([name for name in _NOT_COMPARED if name in rows.column_names])


def _responses(rows: pa.Table) -> np.ndarray:
    """Returns the index of the response that each row belongs to: one number for step and rollout_id. [N]"""
    steps, numbers = (rows.column(name).to_numpy().astype(np.int64) for name in ("step", "rollout_id"))
    return np.asarray((steps << 32) + numbers)


def _row_differences(table: str, before: pa.Table, again: pa.Table) -> list[str]:
    """Returns a line for each column that differs, with the first row in which it does."""
    if len(before) != len(again):
        return [f"{table}: {len(before):,} rows recorded, {len(again):,} replayed"]
    differences = []
    for name in before.column_names:
        differing = np.flatnonzero(_bits(before.column(name)) != _bits(again.column(name)))
        if len(differing):
            first = int(differing[0])
            row = before.slice(first, 1).to_pylist()[0]
            place = ", ".join(f"{key} {row[key]}" for key in _ROWS[table].split(", "))
            differences.append(
                f"{table}: {name} differs in {len(differing):,} rows, first at {place}: {row[name]!r} recorded,"
                f" {again.column(name)[first].as_py()!r} replayed"
            )
    return differences


def _bits(column: pa.ChunkedArray) -> np.ndarray:
    """Returns one value per row. Two are equal exactly if all bits of the column's values are; so are two
    NULLs, and two NaNs."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        # NULL reads as NaN; the mask distinguishes them.
        wide = values.view(np.int32 if values.dtype == np.float32 else np.int64).astype(np.int64)
        return np.where(column.is_null().to_numpy(), np.int64(-1), wide)
    return np.array(column.to_pylist(), dtype=object)


def _digests(directory: Path) -> dict[str, str]:
    """Returns each file's digest, by path. A checkpoint's manifest is left out: it has metrics of time."""
    return {str(path.relative_to(directory)): digest(path) for path in files_under(directory) if path.name != MANIFEST}
