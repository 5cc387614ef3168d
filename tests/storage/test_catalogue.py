"""The tables that come from documents: runs and their state, experiments, studies, artifacts."""

import os
from pathlib import Path

import pytest

from specs.machine.liveness import start_of
from storage import Store
from tests.storage.recording import RecordedRun, write_json


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path, "sums-s0-abc", status="running")


def answer(root: Path, query: str) -> list[tuple[object, ...]]:
    return Store.open(root).query(query).rows


@pytest.mark.parametrize(
    ("pid", "started", "host", "status"),
    [
        (os.getpid(), start_of(os.getpid()), None, "running"),
        (os.getpid(), start_of(os.getpid()) + "0", None, "crashed"),  # the number is another process's now
        (2**22 + 1, start_of(os.getpid()), None, "crashed"),
        (None, start_of(os.getpid()), None, "crashed"),
        (os.getpid(), start_of(os.getpid()), "another-host", "crashed"),  # it has no heartbeat
    ],
    ids=["alive", "pid reused", "no such pid", "no pid", "another host"],
)
def test_a_run_whose_process_is_gone_has_crashed(
    tmp_path: Path, run: RecordedRun, pid: int | None, started: str, host: str | None, status: str
) -> None:
    run.state |= {"pid": pid, "pid_started": started, "host": host}
    run.save()
    assert answer(tmp_path, "select status from runs") == [(status,)]
    assert answer(tmp_path, "select status from stages where stage = 'train'") == [(status,)]


def test_only_a_running_run_can_crash(tmp_path: Path, run: RecordedRun) -> None:
    for status in ("pending", "finished", "failed", "cancelled"):
        run.state |= {"status": status, "pid": None}
        run.save()
        assert answer(tmp_path, "select status from runs") == [(status,)]


def test_a_run_carries_its_cell_and_progress(tmp_path: Path, run: RecordedRun) -> None:
    write_json(run.path / "progress.json", {"step": 3, "steps": 10})
    query = "select seed, step, steps, cell->>'$.\"objective.kl_coef\"', objective, path from runs"
    assert answer(tmp_path, query) == [(0, 3, 10, "0.01", "rpg", "runs/sums-s0-abc")]


def test_stages_keep_their_fingerprints(tmp_path: Path, run: RecordedRun) -> None:
    query = "select run_id, stage, cached, left(fingerprint, 2) from stages order by stage"
    assert answer(tmp_path, query) == [(run.run_id, "data", True, "dd"), (run.run_id, "train", False, "aa")]


def test_experiments_know_how_many_runs_they_have(tmp_path: Path) -> None:
    document = {"name": "sums", "question": "Why?", "runs": ["a", "b"], "created_at": "2026-11-20T12:00:00+00:00"}
    write_json(tmp_path / "experiments" / "sums" / "experiment.json", document)
    assert answer(tmp_path, "select name, question, num_runs from experiments") == [("sums", "Why?", 2)]


def test_a_study_and_its_trials(tmp_path: Path) -> None:
    trial = {
        "number": 0,
        "state": "COMPLETE",
        "run_ids": ["a-1", "a-2"],
        "run_id": "a-1",
        "value": 0.5,
        "params": {"objective.clip.low": 0.1},
        "started_at": "2026-11-20T12:00:00+00:00",
        "ended_at": None,
    }
    study = {"question": "Which?", "goal": "maximize", "trials_wanted": 8, "parameters": {"objective.clip.low": {}}}
    write_json(
        tmp_path / "studies" / "clip" / "study.json", study | {"trials": [trial, {"number": 1, "state": "RUNNING"}]}
    )
    assert answer(tmp_path, "select name, trials_wanted, num_trials from studies") == [("clip", 8, 2)]
    query = "select study, number, run_id, run_ids, value, cast(params->>'$.*' as varchar) from trials order by number"
    first, second = answer(tmp_path, query)
    assert first == ("clip", 0, "a-1", ["a-1", "a-2"], 0.5, "[0.1]")
    assert second[:5] == ("clip", 1, None, None, None)


def test_artifacts_are_the_shared_stages_and_what_runs_published(tmp_path: Path, run: RecordedRun) -> None:
    files = {"train.parquet": {"sha256": "0", "bytes": 10}, "summary.json": {"sha256": "1", "bytes": 5}}
    shared = tmp_path / "artifacts" / "data" / ("d" * 16)
    write_json(
        shared / "manifest.json", {"stage": "data", "fingerprint": "d" * 64, "files": files, "identity": {"x": 1}}
    )
    write_json(run.path / "train.json", {"stage": "train", "fingerprint": "a" * 64, "files": {"weights": "2"}})
    run.evaluate()
    query = "select stage, run_id, num_files, num_bytes from artifacts order by stage"
    assert answer(tmp_path, query) == [
        ("data", None, 2, 15),
        ("evaluate", run.run_id, 0, 0),
        ("train", run.run_id, 1, None),
    ]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"text"', "null", '{"stages": null, "seed": "x", "started_at": "soon"}']
)
def test_documents_of_any_content_give_rows(tmp_path: Path, run: RecordedRun, content: str) -> None:
    for name in ("run.json", "state.json", "progress.json", "train.json"):
        (run.path / name).write_text(content)
    write_json(run.path / "attempts" / "0001.json", None)
    assert answer(tmp_path, "select run_id, started_at, seed from runs") == [(run.run_id, None, None)]
    for table in ("stages", "artifacts", "attempts", "run_summary"):
        answer(tmp_path, f"from {table}")
