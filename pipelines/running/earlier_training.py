"""Copies another run's training into a run, or its first steps, from which the run continues. Also copies another run's
evaluation.

The rows become the run's own, so that it can be queried, shown and deleted like any other. Weights and checkpoints are
linked, since nothing writes to them.
"""

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.home.results import filling, publish
from pipelines.planning.plan import StagePlan
from pipelines.running.sinks import SINK_FAILED
from rpg.recording.run_directory import INITIAL_RESPONSES, accuracies_in, best_step
from specs.machine.files import files_under, read_json, sync, write_json
from specs.segment_names import DigestedFile
from storage.catalogue import FREED

if TYPE_CHECKING:
    import pyarrow as pa

    from pipelines.running.run import RunExecution
    from storage.segments import Segment

_ORDER = (
    "attempts",
    "segments",
    FREED,
    "evaluated.json",
    INITIAL_RESPONSES,
    "guards.json",
    "certificate.json",
    "progress.json",
    "weights",
)
"""Order in which the copied parts are moved into place. Checkpoint and manifest come last. Without them, training
starts from step 0, with a new attempt that supersedes all earlier rows."""


def take_training(execution: "RunExecution", stage: StagePlan) -> None:
    """Fills the directory of a run that never began from the run that the stage's plan names.

    Raises:
        DiskError: the disk is full or not writable.
        BadSegmentError, FileNotFoundError: the other run is damaged, or deleted; nothing of it is copied.
    """
    directory, source = execution.directory, execution.home.run(stage.taken_from)
    aside = directory / ".taken"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _fill(execution, stage, source, aside)
        for name in (*_ORDER, "checkpoints", "train.json"):
            if (aside / name).exists():
                (aside / name).rename(directory / name)
        sync(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def take_evaluation(execution: "RunExecution", stage: StagePlan) -> None:
    """Publishes the evaluation of the run that the stage's plan names as this run's evaluation.

    Raises:
        DiskError: the disk is full or not writable.
        BadSegmentError, FileNotFoundError: the other run is damaged, or deleted; nothing of it is copied.
    """
    from storage.segments import run_segments

    source = execution.home.run(stage.taken_from) / "evaluate" / stage.output.name
    manifest = read_json(source / "manifest.json")
    if manifest.get("fingerprint") != stage.fingerprint:
        raise FileNotFoundError(f"{stage.taken_from} no longer has such an evaluation")
    changes = _Changes(execution.run_id, {}, ended=True, left=())
    with filling(stage.output) as aside:
        for segment in run_segments(execution.home.root, stage.taken_from):
            if f"/evaluate/{source.name}/" in segment.key:
                _take_segment(execution.home.root, segment, aside / "segments" / segment.table, changes)
        write_json(aside / "summary.json", read_json(source / "summary.json"), allow_nan=True)
        publish(aside, stage.output, manifest)


def _fill(execution: "RunExecution", stage: StagePlan, source: Path, aside: Path) -> None:
    """Copies the reused parts into a temporary directory."""
    step = stage.taken_step
    needed = source / (f"checkpoints/step-{step:06}/manifest.json" if step else "train.json")
    if not needed.is_file():
        raise FileNotFoundError(f"{source.name} no longer exists")
    whole, evaluate = stage.action == "CACHED", execution.plan.stage("evaluate")
    before = read_json(source / "plan.json").get("stages", {}).get("evaluate", {})
    is_same = before.get("identity") == evaluate.identity and before["inputs"]["data"] == evaluate.inputs["data"]
    measured = {before["fingerprint"]: evaluate.fingerprint} if is_same else {}
    noted = read_json(source / "evaluated.json")
    noted = noted if noted.get("evaluation") in measured else {}
    if noted and step:
        noted = noted | {"accuracies": {at: each for at, each in noted["accuracies"].items() if int(at) <= step}}
    training, left = execution.plan.experiment.training, set()
    every, keep_best = training.export_every_steps, training.checkpoint.keep_best
    best = best_step(accuracies_in(noted), keep_best.accuracy_on) if keep_best else 0
    for exported in sorted((source / "weights").glob("step-*")):
        at = _step_of(exported)
        if (whole or at == best or (every and at % every == 0)) and not 0 < step < at:
            _link_all(exported, aside / "weights" / exported.name)
        else:
            left.add(f"weights/{exported.name}")
    _take_rows(execution, source.name, aside / "segments", _Changes(execution.run_id, measured, whole, left, step))
    for path in sorted((source / "attempts").glob("[0-9]*.json")):
        # A lease's number is valid only in its own run.
        write_json(aside / "attempts" / path.name, read_json(path) | {"lease": 0})
    if noted:
        write_json(aside / "evaluated.json", noted | {"evaluation": evaluate.fingerprint})
    if (sampled := read_json(source / INITIAL_RESPONSES)) and sampled["evaluation"] in measured:
        write_json(aside / INITIAL_RESPONSES, sampled | {"evaluation": evaluate.fingerprint})
    for name in ("guards.json", FREED, *(("certificate.json", "progress.json", "train.json") if whole else ())):
        if (source / name).is_file():
            write_json(aside / name, read_json(source / name), allow_nan=True)
    saved = [path for path in sorted((source / "checkpoints").glob("step-*")) if not 0 < step < _step_of(path)]
    for checkpoint in saved:
        if checkpoint == saved[-1] or _step_of(checkpoint) == best:
            _link_all(checkpoint, aside / "checkpoints" / checkpoint.name)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Differences between another run's rows and the rows that this run copies from it."""

    run_id: str
    """This run's id."""
    measured: Mapping[str, str]
    """Fingerprint of an evaluate stage of the other run -> fingerprint of the stage of this run that measures the
    same."""
    ended: bool
    """Whether this run ends at the same step as the other one. If not, the row that says `finished` is left out."""
    left: Collection[str]
    """Directories of weights that are not copied, relative to the run's directory. Rows about them are left out."""
    until: int = 0
    """The last step whose rows are copied; 0 copies all of them."""


def _take_rows(execution: "RunExecution", run_id: str, target: Path, changes: _Changes) -> None:
    """Copies the rows of training as rows of this run."""
    from storage.contents import half_written, merged_away
    from storage.segments import run_segments

    root = execution.home.root
    listed = [segment for segment in run_segments(root, run_id) if not segment.is_of_evaluate_stage]
    left_out = merged_away(root, listed) | half_written(root, listed)
    for segment in listed:
        if segment.key not in left_out:
            _take_segment(root, segment, target / segment.table, changes)


def _take_segment(root: Path, segment: "Segment", target: Path, changes: _Changes) -> None:
    import pyarrow.parquet as pq

    from storage.columns import arrow_schema
    from storage.contents import read_groups

    target.mkdir(parents=True, exist_ok=True)
    aside = target / ".partial"
    try:
        with DigestedFile(aside) as file:
            schema = arrow_schema(segment.table)
            statistics = {"write_statistics": ["run_id", "step"], "use_dictionary": ["run_id"]}
            with pq.ParquetWriter(file, schema, compression="zstd", **statistics) as writer:
                for group in read_groups(root, segment):
                    writer.write_table(_of_run(_kept(group, segment.table, changes), changes))
            os.fsync(file.fileno())
            # For any rank: all shares that count are here, or in a merged segment.
            name = replace(segment.parsed, digest=file.digest, rank=0, ranks=1)
        aside.replace(target / str(name))
    finally:
        aside.unlink(missing_ok=True)
    sync(target)


def _kept(rows: "pa.Table", table: str, changes: _Changes) -> "pa.Table":
    """Returns the rows that are also valid for this run."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if changes.until:
        rows = rows.filter(pc.less_equal(rows.column("step"), changes.until))
    if table == "events":
        others = [SINK_FAILED] if changes.ended else [SINK_FAILED, "finished"]
        rows = rows.filter(pc.invert(pc.is_in(rows.column("kind"), pa.array(others, pa.string()))))
    if path := {"events": "message", "checkpoints": "path"}.get(table):
        rows = rows.filter(pc.invert(pc.is_in(rows.column(path), pa.array(changes.left, pa.string()))))
    return rows


def _of_run(rows: "pa.Table", changes: _Changes) -> "pa.Table":
    """Returns the rows with this run's id. Rows that measure the same as its evaluate stage also get that stage's
    fingerprint."""
    import pyarrow as pa

    def replaced(table: "pa.Table", name: str, column: "pa.Array") -> "pa.Table":
        return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)

    rows = replaced(rows, "run_id", pa.array([changes.run_id] * len(rows), pa.string()))
    if "fingerprint" not in rows.column_names:
        return rows
    fingerprints = [changes.measured.get(value, value) for value in rows.column("fingerprint").to_pylist()]
    return replaced(rows, "fingerprint", pa.array(fingerprints, pa.string()))


def _link_all(source: Path, target: Path) -> None:
    """Links the files of a directory. Raises FileNotFoundError if it is deleted meanwhile."""
    for path in files_under(source):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        _link(path, there)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links, or another one
        shutil.copyfile(source, target)


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))
