"""Sinks: what TensorBoard, W&B, MLflow and Trackio hold of a run, written by their own libraries, against SQL."""

import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from live import kill
from recorded_home import FINGERPRINT, SPEC, START, record_experiment, write
from waiting import wait_for

from pipelines.home.home import Home
from rpg.recording.segments import SegmentWriter
from specs.document import experiment_of
from specs.machine.liveness import start_of
from specs.records import CheckpointRow, EvaluationRow, MetricRow
from specs.schema.execution import Sink
from specs.schema.fields import literal_of, members
from storage import Store

RUN = "sums-s0-1234abcd"
Figures = list[tuple[int, str, float]]
"""Step, name, value."""
SINKS: dict[str, dict[str, Any]] = {
    "tensorboard": {"type": "tensorboard"},
    "wandb": {"type": "wandb", "project": "rpg-math", "mode": "offline", "tags": ["night"]},
    "mlflow": {"type": "mlflow"},
    "trackio": {"type": "trackio"},
}
MISSING = {name: find_spec(name) is None for name in SINKS}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(MISSING[name], reason=f"{name} is not installed")


each = pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensorboard", marks=needs("tensorboard")),
        pytest.param("wandb", marks=needs("wandb")),
        pytest.param("mlflow", marks=[needs("mlflow"), pytest.mark.long]),  # its import alone takes seconds
        pytest.param("trackio", marks=needs("trackio")),
    ],
)


def test_every_sink_that_a_spec_may_name_is_tried_here() -> None:
    names = [name for sink in members(Sink) for name in literal_of(sink.model_fields["type"])]
    assert names == list(SINKS) == list(HELD) == [tried.values[0] for tried in each.args[1]]


@pytest.mark.more
@each
def test_a_killed_run_that_went_on_is_there_once_and_as_sql_has_it(tmp_path, name):
    home = Home(tmp_path / "a%2Fb" / "what now? #1")
    begin(home)
    record_steps(home, attempt=1, steps=range(1, 7), checkpoint=4)
    send(home, name)
    live = HELD[name](home)
    assert {step for step, _, _ in live} == ({1, 2, 3, 4} if name == "mlflow" else {1, 2, 3, 4, 5, 6})
    go_on(home)
    record_steps(home, attempt=2, steps=range(5, 9), checkpoint=8)
    end(home)
    for _ in range(2):  # the second time it has everything
        send(home, name)
        assert HELD[name](home) == in_sql(home, name)
    note = json.loads((home.run(RUN) / "sinks" / f"{name}.json").read_text())
    assert (note["steps"], note["evaluated"], note["error"]) == (8, 2, "")
    known = {home.run(RUN), *home.sent_copies(RUN)}  # all that `rpg rm` removes
    assert {path for path in tmp_path.rglob(f"*{RUN}*") if known.isdisjoint([path, *path.parents])} == set()


@needs("mlflow")
@pytest.mark.long
def test_an_experiment_that_was_deleted_in_mlflow_is_named_with_what_brings_it_back(tmp_path, monkeypatch):
    home, sink = Home(tmp_path), {"type": "mlflow", "experiment": "clipping"}
    monkeypatch.setitem(SINKS, "mlflow", sink)
    begin(home)
    record_steps(home, attempt=1, steps=range(1, 3), checkpoint=2)
    send(home, "mlflow")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:  # as MLflow's page deletes it
        database.execute("update experiments set lifecycle_stage = 'deleted' where name = 'clipping'")
    environment = os.environ | {"RPG_HOME": str(tmp_path)}
    done = subprocess.run(command("mlflow"), env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("mlflow: the experiment `clipping` is deleted in MLflow: `mlflow experiments restore")


@pytest.mark.more
@needs("tensorboard")
def test_a_tensorboard_that_is_open_drops_what_was_trained_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = Home(tmp_path)
    begin(home)
    record_steps(home, attempt=1, steps=range(1, 7), checkpoint=4)
    send(home, "tensorboard")
    shown = EventAccumulator(str(home.tensorboard(RUN)))
    shown.Reload()
    assert [event.step for event in shown.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]
    go_on(home)
    record_steps(home, attempt=2, steps=range(5, 9), checkpoint=8)
    end(home)
    send(home, "tensorboard")
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("reward/mean")] == [
        (step, np.float32(figure(2 if step > 4 else 1, step))) for step in range(1, 9)
    ]


@pytest.mark.more
@needs("tensorboard")
def test_what_a_run_trains_again_while_it_is_followed_is_there_once(tmp_path):
    home = Home(tmp_path)
    begin(home, pid=os.getpid(), pid_started=start_of(os.getpid()), host=socket.gethostname())
    record_steps(home, attempt=1, steps=range(1, 7), checkpoint=4)
    following = subprocess.Popen(command("tensorboard"), env=os.environ | {"RPG_HOME": str(home.root)})
    try:
        wait_for(lambda: home.tensorboard(RUN).is_dir() and len(tensorboard_figures(home)) == 12)
        go_on(home)
        record_steps(home, attempt=2, steps=range(5, 9), checkpoint=8)
        end(home)
        assert following.wait(60) == 0
    finally:
        following.kill()
        following.wait()
    assert tensorboard_figures(home) == in_sql(home, "tensorboard")


@pytest.mark.more
@needs("wandb")
def test_a_wandb_run_says_which_one_it_is_and_how_it_ended(tmp_path):
    home = Home(tmp_path)
    begin(home)
    record_steps(home, attempt=1, steps=range(1, 3), checkpoint=2)
    end(home, steps=2)
    send(home, "wandb")
    records = list(wandb_records(home))
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.project, run.run_group) == (RUN, "rpg-math", "sums")
    assert (run.display_name, list(run.tags)) == ("sums: seed 0", ["night", "rpg", "seed:0"])
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["objective"] == experiment_of(SPEC, {}).objective.model_dump(mode="json")
    summary = {
        update.key: json.loads(update.value_json)
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for update in record.summary.update
        if update.key
    }
    assert summary["status"] == "finished"
    assert summary["accuracy_after"] == 0.75
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]


@pytest.mark.more
@needs("trackio")
def test_a_trackio_run_says_which_one_it_is_when_it_ran_and_how_it_ended(tmp_path):
    home = Home(tmp_path)
    begin(home)
    record_steps(home, attempt=1, steps=range(1, 3), checkpoint=2)
    end(home, steps=2)
    for _ in range(2):
        send(home, "trackio")
    [(name, text)] = trackio_rows(home, RUN, "run_name, config", "configs")
    config = json.loads(text)
    assert (name, config["_Group"], config["seed"]) == ("sums: seed 0", "sums", 0)
    assert config["objective"] == experiment_of(SPEC, {}).objective.model_dump(mode="json")
    [(status, level, told)] = trackio_rows(home, RUN, "title, level, text", "alerts")
    assert (status, level) == ("finished", "info")
    assert "accuracy_after: 0.75" in told
    times = [at for (at,) in trackio_rows(home, RUN, "distinct timestamp", "metrics")]
    assert (START + timedelta(minutes=1, seconds=2)).isoformat() in times


@pytest.mark.long
@pytest.mark.skipif(all(MISSING.values()), reason="no tracker's package is installed")
def test_a_run_killed_as_it_trains_goes_on_in_every_sink(lab):
    there = [name for name in SINKS if not MISSING[name]]
    lab.spec.write_text(lab.spec.read_text() + f"sinks: {json.dumps([SINKS[name] for name in there])}\n")
    overrides = ("training.steps=30", "training.checkpoint.every_steps=4")
    run = lab.start("run", str(lab.spec), overrides=overrides)
    wait_for(lambda: run.poll() is not None or any(lab.progress(run_id) > 9 for run_id in lab.run_ids()))
    kill(run.pid)
    run.communicate()
    result = lab.rpg("run", str(lab.spec), overrides=overrides)
    assert result.code == 0, result.err
    (run_id,) = lab.run_ids()
    for name in there:
        assert HELD[name](lab.home, run_id) == in_sql(lab.home, name, run_id), (name, result.err)
    synced = lab.rpg("sync", "tiny")
    assert (synced.code, synced.out.count("has everything")) == (0, len(there)), synced
    assert len(lab.home.sent_copies(run_id)) == len({"tensorboard", "wandb"} & {*there})
    assert lab.rpg("rm", "tiny", "--yes").code == 0
    assert not lab.home.sent_copies(run_id)


@pytest.mark.long
@pytest.mark.skipif(MISSING["tensorboard"] or MISSING["wandb"], reason="a tracker's package is not installed")
def test_a_sink_that_fails_costs_a_warning_and_an_event_and_no_more(lab, monkeypatch, tmp_path):
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key might be kept
    sinks = [{"type": "wandb", "project": "rpg-math"}, SINKS["tensorboard"]]
    lab.spec.write_text(lab.spec.read_text() + f"sinks: {json.dumps(sinks)}\n")
    result = lab.rpg("run", str(lab.spec))
    assert result.code == 0, result.err
    assert "  wandb: " in result.err
    assert "the run continues; `rpg sync tiny-s0-" in result.err
    assert "TRACEBACK" not in result.err.upper()
    [(message,)] = lab.query("select message from events where kind = 'sink_failed'")
    assert message.startswith("wandb: ")
    assert lab.rpg("db", "check").code == 0
    (run_id,) = lab.run_ids()
    assert tensorboard_figures(lab.home, run_id) == in_sql(lab.home, "tensorboard", run_id)
    assert lab.rpg("sync", run_id).code == 1


def figure(attempt: int, step: int) -> float:
    """What a start of the trainer records of a step; another one records something else."""
    return attempt + step / 7


def begin(home: Home, **executed_by: Any) -> None:
    """Writes the documents of a run that trains; without `executed_by` no process executes it any more."""
    directory = home.run(RUN)
    known = {"run_id": RUN, "experiment": "sums", "name": "seed 0", "seed": 0, "values": {}, "objective": "rpg"}
    write(directory / "run.json", known | {"question": SPEC["question"], "created_at": START.isoformat()})
    write(directory / "spec.json", SPEC)
    write(directory / "state.json", {"status": "running", "started_at": START.isoformat(), "stages": {}, **executed_by})
    write(directory / "attempts/0001.json", {"attempt": 1, "resumed_from_step": 0, "started_at": START.isoformat()})
    record_experiment(home, [RUN])


def go_on(home: Home) -> None:
    started = (START + timedelta(minutes=5)).isoformat()
    attempt = {"attempt": 2, "resumed_from_step": 4, "started_at": started}
    write(home.run(RUN) / "attempts/0002.json", attempt)


def record_steps(home: Home, *, attempt: int, steps: range, checkpoint: int) -> None:
    writer = SegmentWriter(home.run(RUN), RUN, attempt)
    for step in steps:
        moment = START + timedelta(minutes=attempt, seconds=step)
        names = ("reward/mean", "kl/reverse")
        writer.rows([MetricRow(RUN, attempt, step, name, figure(attempt, step), moment) for name in names])
    writer.rows([CheckpointRow(RUN, attempt, checkpoint, f"checkpoints/{checkpoint}", "full", 1, moment)])
    writer.flush()


def end(home: Home, steps: int = 8) -> None:
    """The run has trained and is evaluated."""
    writer = SegmentWriter(home.run(RUN) / "evaluate" / FINGERPRINT[:16], RUN, 1)
    for step, share in ((0, 0.5), (steps, 0.75)):
        writer.rows([EvaluationRow(RUN, FINGERPRINT, step, "two-terms", "mean@8", share, 0.4, 0.8, 60, 8)])
    writer.flush()
    ended = {"status": "finished", "ended_at": (START + timedelta(hours=1)).isoformat(), "evaluation": FINGERPRINT}
    stages = {"train": {"status": "finished", "fingerprint": "t" * 64, "cached": False}}
    write(home.run(RUN) / "state.json", {**ended, "started_at": START.isoformat(), "stages": stages})


def command(name: str) -> list[str]:
    return [sys.executable, "-m", "pipelines.sinks", RUN, json.dumps(SINKS[name])]


def send(home: Home, name: str) -> None:
    """Sends in a process of its own, as the flow does."""
    environment = os.environ | {"RPG_HOME": str(home.root)}
    done = subprocess.run(command(name), env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def in_sql(home: Home, name: str, run_id: str = RUN) -> Figures:
    """Returns the expected content of a sink, each figure once."""
    sql = (
        "select step, name, value from metrics where run_id = $run_id union all"
        " select step, concat('evaluation/', dataset, '/', metric, part.name), part.value from evaluations,"
        " unnest([{'name': '', 'value': value}, {'name': '/low', 'value': ci_low},"
        " {'name': '/high', 'value': ci_high}]) as parts(part) where run_id = $run_id"
    )
    with Store.open(home.root) as store:
        rows = store.query(sql, {"run_id": run_id}).rows
    spelled = (lambda text: text.replace("@", "_at_")) if name == "mlflow" else str
    rounded = (lambda value: float(np.float32(value))) if name == "tensorboard" else float
    return sorted((step, spelled(figure), rounded(value)) for step, figure, value in rows)


def tensorboard_figures(home: Home, run_id: str = RUN) -> Figures:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(home.tensorboard(run_id)), size_guidance={SCALARS: 0})
    events.Reload()
    return sorted((event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag))


def wandb_figures(home: Home, run_id: str = RUN) -> Figures:
    figures = []
    for record in wandb_records(home, run_id):
        if record.WhichOneof("record_type") == "history":
            row = {"".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            figures += [(row["step"], name, row[name]) for name in row if name != "step" and name[0] != "_"]
    return sorted(figures)


def wandb_records(home: Home, run_id: str = RUN) -> Iterator[Any]:
    """The records of an offline run's file: a log in blocks of 32 KiB, of parts with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    (directory,) = home.offline_wandb(run_id)
    content = (directory / f"run-{run_id}.wandb").read_bytes()
    position, record = 7, b""
    while position + 7 <= len(content):
        left = -position % 32768
        if left and left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def mlflow_figures(home: Home, run_id: str = RUN) -> Figures:
    with sqlite3.connect(home.root / "mlflow.db") as database:
        assert database.execute("select value from tags where key = 'rpg.run_id'").fetchall() == [(run_id,)]
        return sorted(database.execute("select step, key, value from metrics").fetchall())


def trackio_rows(home: Home, run_id: str, columns: str, table: str) -> list[Any]:
    (file,) = (home.root / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        return database.execute(f"select {columns} from {table} where run_id = ?", [run_id]).fetchall()


def trackio_figures(home: Home, run_id: str = RUN) -> Figures:
    rows = trackio_rows(home, run_id, "step, metrics", "metrics")
    return sorted((step, name, value) for step, text in rows for name, value in json.loads(text).items())


HELD: dict[str, Callable[..., Figures]] = {
    "tensorboard": tensorboard_figures,
    "wandb": wandb_figures,
    "mlflow": mlflow_figures,
    "trackio": trackio_figures,
}
