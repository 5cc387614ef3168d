"""The verbs that look after the home: db rebuild, db check, export, gc."""

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.home.garbage import VERDICT_DAYS
from pipelines.home.home import Home
from pipelines.home.removal import removal_of, remove
from pipelines.home.unrecorded import why_incomplete
from pipelines.home.versions import versions_in, with_runs
from rpg.rewards.judges.verdicts import KeptReplies, Reply
from specs.machine.liveness import start_of
from tests.storage.recording import SPEC, RecordedRun, write_json

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "home"
    monkeypatch.setenv("RPG_HOME", str(root))
    run = RecordedRun(root, "sums-s0-aaaa1111")
    run.start(1)
    run.steps(1, 3)
    run.start(2, resumed_from_step=2)
    run.steps(3, 3)
    run.evaluate()
    weights = run.path / "weights" / "step-000003"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    for stage, fingerprint in (("data", "d" * 64), ("data", "9" * 64), ("base", "8" * 64)):
        directory = root / "artifacts" / stage / fingerprint[:16]
        write_json(directory / "manifest.json", {"stage": stage, "fingerprint": fingerprint, "files": {}})
        (directory / "content").write_bytes(b"x" * 2**20)
    return root


def test_rebuild_says_what_it_loaded_and_check_finds_nothing(call: Call, home: Path) -> None:
    assert call("db", "rebuild") == (0, "18 segments\n", "")
    assert (home / "experiments.duckdb").is_file()
    assert call("db", "check") == (0, "all is well\n", "")


def test_compact_leaves_one_file_a_table_and_run(call: Call, home: Path) -> None:
    rows = call("sql", "from metrics order by all", "--format", "csv")
    assert call("db", "compact") == (0, "16 segments were merged\n", "")
    assert call("sql", "from metrics order by all", "--format", "csv") == rows
    assert len(list((home / "runs/sums-s0-aaaa1111/segments/metrics").iterdir())) == 1


def test_check_names_every_problem_and_exits_with_1(call: Call, home: Path) -> None:
    call("db", "rebuild")
    broken = next((home / "runs/sums-s0-aaaa1111/segments/metrics").glob("a0001-s000001-000001-*.parquet"))
    name = broken.relative_to(home).as_posix()
    broken.write_bytes(b"PAR1")
    code, out, _ = call("db", "check")
    assert code == 1
    assert [line.split(": ")[0] for line in out.splitlines()] == [name]
    assert out.endswith("; learning curves, compare and report lack these steps\n")
    assert json.loads(call("db", "check", "--full", "--json")[1]) == out.splitlines()
    code, out, err = call("db", "rebuild")
    assert (code, out) == (0, "17 segments, 1 skipped\n")
    assert f"skipped {name}: not a whole Parquet file" in err


@pytest.mark.usefixtures("home")
def test_export_writes_the_rows_that_count_spec_and_weights(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out" / "run"
    code, said, _ = call("export", "aaaa", str(out))
    assert code == 0
    assert said.startswith(f"{out}: 9 metrics, 6 rollouts, 18 tokens, 2 evaluations, 1 evaluation_samples, 3 events")
    assert pq.read_table(out / "metrics.parquet").num_rows == 9
    assert pq.read_table(out / "runs.parquet").column("run_id").to_pylist() == ["sums-s0-aaaa1111"]
    assert (out / "weights/step-000003/model.safetensors").read_bytes() == b"weights"
    assert json.loads((out / "spec.json").read_text()) == SPEC | {"seeds": [0]}
    assert not (out / "checkpoints.parquet").exists()


@pytest.mark.usefixtures("home")
def test_export_overwrites_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for target in (tmp_path / "full", tmp_path / "full" / "file"):
        code, _, err = call("export", "aaaa", str(target))
        assert (code, err) == (2, f"{target} exists and is not an empty directory\n")


def test_gc_frees_token_rows_whose_days_are_over_and_the_record_says_so(call: Call, home: Path) -> None:
    run = home / "runs" / "sums-s0-aaaa1111"
    num_tokens = "select count(*) as n from tokens"
    for keep_days, status, expired in ((0, "finished", 0), (1e5, "finished", 0), (1, "running", 0), (1, "failed", 1)):
        write_json(run / "spec.json", SPEC | {"record": {"keep_days": keep_days}})
        state = json.loads((run / "state.json").read_text()) | {"status": status}
        write_json(run / "state.json", state)
        listed = json.loads(call("gc", "--json")[1])
        assert [row["path"].endswith("segments/tokens") for row in listed] == [False] * 2 + [True] * expired
    assert json.loads(call("sql", num_tokens, "--format", "json")[1]) == [{"n": 18}]
    code, _, err = call("gc", "--yes")
    assert (code, err.partition(",")[0]) == (0, "removed 2 artifacts and the token rows of 1 run")
    assert json.loads(call("sql", num_tokens, "--format", "json")[1]) == [{"n": 0}]
    assert call("db", "check") == (0, "all is well\n", "")
    assert why_incomplete(run, "tokens").startswith("`rpg gc` freed them on 20")
    assert call("gc", "--yes") == (0, "", "every artifact is in use\n")


def test_gc_frees_the_checkpoints_of_finished_runs_whose_days_are_over_and_leaves_their_weights(
    call: Call, home: Path
) -> None:
    run = home / "runs" / "sums-s0-aaaa1111"
    write_json(run / "checkpoints/step-000003/manifest.json", {"files": {}})
    for keep_days, status, expired in ((0, "finished", 0), (1e5, "finished", 0), (1, "failed", 0), (1, "finished", 1)):
        write_json(run / "spec.json", SPEC | {"training": SPEC["training"] | {"checkpoint": {"keep_days": keep_days}}})
        state = json.loads((run / "state.json").read_text()) | {"status": status}
        write_json(run / "state.json", state)
        listed = json.loads(call("gc", "--json")[1])
        assert [row["path"].endswith("/checkpoints") for row in listed] == [False] * 2 + [True] * expired
    code, _, err = call("gc", "--yes")
    assert (code, err.partition(",")[0]) == (0, "removed 2 artifacts and the checkpoints of 1 run")
    assert sorted(path.name for path in run.glob("*checkpoints*")) == []
    assert (run / "weights/step-000003/model.safetensors").read_bytes() == b"weights"
    assert call("gc", "--yes") == (0, "", "every artifact is in use\n")


def test_gc_frees_verdicts_that_were_not_said_for_ninety_days(call: Call, home: Path) -> None:
    kept, files = KeptReplies(home / "verdicts"), list[Path]()
    for days in (VERDICT_DAYS + 1, VERDICT_DAYS + 1, VERDICT_DAYS - 1):
        kept.write({"vote": len(files)}, Reply("VERDICT: 5"))
        files += set((home / "verdicts").rglob("*.json")) - set(files)
        said = time.time() - days * 24 * 3600
        os.utime(files[-1], (said, said))
    assert kept.read({"vote": 1}) == Reply("VERDICT: 5")  # said again: its days begin anew
    assert [row["path"] for row in json.loads(call("gc", "--json")[1])][-1] == str(home / "verdicts")
    code, _, err = call("gc", "--yes")
    assert (code, err.partition(",")[0]) == (0, "removed 2 artifacts and 1 verdict")
    assert set((home / "verdicts").rglob("*.json")) == set(files[1:])
    assert call("gc", "--yes") == (0, "", "every artifact is in use\n")


def test_gc_lists_what_no_run_refers_to_and_removes_it_when_told(call: Call, home: Path) -> None:
    code, out, err = call("gc")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["base", "data"]
    assert err == "nothing was removed; --yes removes without asking\n"
    assert len(list(home.glob("artifacts/*/*"))) == 3
    assert len(json.loads(call("gc", "--json")[1])) == 2
    code, _, err = call("gc", "--yes")
    assert (code, err) == (0, "removed 2 artifacts, 2.0 MiB\n")
    assert [path.name for path in home.glob("artifacts/*/*")] == ["d" * 16]
    assert call("gc", "--yes") == (0, "", "every artifact is in use\n")


def test_gc_keeps_the_base_model_that_a_used_one_links_to(call: Call, home: Path) -> None:
    linking = home / "artifacts" / "base" / ("7" * 16)
    linking.mkdir()
    (linking / "config.json").symlink_to(home / "artifacts" / "base" / ("8" * 16) / "content")
    write_json(home / "runs" / "measured" / "run.json", {"fingerprints": {"base": "7" * 64}})
    write_json(home / "runs" / "measured" / "spec.json", SPEC)
    assert call("gc", "--yes")[2] == "removed 1 artifact, 1.0 MiB\n"
    assert (linking / "config.json").resolve().is_file()


def test_gc_keeps_what_a_run_has_whose_spec_cannot_be_read_and_says_so(call: Call, home: Path) -> None:
    run = home / "runs" / "sums-s0-aaaa1111"
    write_json(run / "spec.json", SPEC | {"record": {"keep_dayz": 1}})
    code, _, err = call("gc", "--yes")
    assert code == 0
    assert "sums-s0-aaaa1111: its spec cannot be read, so its rows and checkpoints are kept: record.keep_dayz: " in err
    assert list((run / "segments" / "tokens").glob("*.parquet"))


def test_rm_frees_the_disk_though_it_takes_no_new_index(call: Call, home: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # as little as a full disk takes
    try:
        code, _, err = call("rm", "aaaa", "--yes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, "deleted 1 run, " in err) == (0, True)
    assert "the index could not be written" in err
    assert not list(home.glob("runs/*aaaa*"))
    assert not (home / ".removed").exists()
    assert json.loads(call("sql", "select count(*) as n from metrics", "--format", "json")[1]) == [{"n": 0}]


@pytest.mark.more
def test_rm_deletes_a_run_with_its_rows_when_told_and_gc_then_frees_what_it_alone_used(call: Call, home: Path) -> None:
    run = "sums-s0-aaaa1111"
    other = RecordedRun(home, "sums-s1-bbbb2222", seed=1)
    other.start(1)
    other.steps(1, 2)
    record = home / "experiments" / "sums" / "experiment.json"
    pages = [record.with_name(name) for name in ("report@1.html", "report@2.html", "report.html")]
    both = [run, other.run_id]
    versions = [{"version": 1, "recipes": ["a"], "runs": both[:1]}, {"version": 2, "recipes": ["b"], "runs": both[1:]}]
    write_json(record, {"name": "sums", "runs": both, "current": both[1:], "versions": versions})
    code, out, err = call("rm", "aaaa")
    assert (code, out) == (0, f"{run}\n")
    assert "nothing was deleted; --yes deletes without asking" in err
    assert (home / "runs" / run).is_dir()
    for page in pages:
        page.touch()
    code, _, err = call("rm", "aaaa", "--yes")
    assert (code, "deleted 1 run, " in err) == (0, True)
    assert "`rpg gc` frees 2 artifacts" in err
    assert not (home / "runs" / run).exists()
    left_rows = json.loads(call("sql", "select distinct run_id from metrics", "--format", "json")[1])
    assert left_rows == [{"run_id": other.run_id}]
    left = json.loads(record.read_text())
    assert (left["runs"], left["current"]) == ([other.run_id], [other.run_id])
    assert [version["version"] for version in left["versions"]] == [2]
    assert [page.exists() for page in pages] == [False, True, True], "those that show the run are gone"
    assert call("db", "check") == (0, "all is well\n", "")
    assert call("rm", "sums", "--yes")[0] == 0
    assert not record.parent.exists()
    assert list((home / "runs").iterdir()) == []
    assert not (home / ".removed").exists()


@pytest.mark.more
def test_rm_names_the_evaluations_that_measured_the_weights_and_they_stay(call: Call, home: Path) -> None:
    weights = home / "runs" / "sums-s0-aaaa1111" / "weights" / "step-000003"
    measured = RecordedRun(home, "models-cccc3333", experiment="models")
    data = {"evaluation": [{"source": "expressions", "name": "sums", "size": 8}]}
    spec = {"kind": "evaluation", "name": "models", "data": data, "reward": SPEC["reward"]}
    write_json(measured.path / "spec.json", spec | {"model": {"source": "pretrained", "path": str(weights)}})
    for answer in ((), ("--yes",)):
        code, out, err = call("rm", "aaaa", *answer)
        assert (code, out) == (0, "sums-s0-aaaa1111\n")
        assert err.startswith("1 run evaluated these weights or started from them; their records are kept")
        assert "\n  models-cccc3333\n" in err
    assert measured.path.is_dir()
    assert "measured" not in call("rm", "models-cccc3333")[2]


@pytest.mark.more
def test_rm_of_a_version_leaves_the_others(call: Call, home: Path) -> None:
    runs = ["sums-s0-aaaa1111", RecordedRun(home, "sums-s1-bbbb2222", seed=1).run_id]
    versions = [{"version": number, "recipes": [str(number)], "runs": [run]} for number, run in enumerate(runs, 1)]
    record = home / "experiments" / "sums" / "experiment.json"
    write_json(record, {"name": "sums", "runs": runs, "current": runs[1:], "versions": versions})
    pages = [record.with_name(name) for name in ("report@2.html", "report.html")]
    for page in pages:
        page.touch()
    assert call("rm", "sums@2", "--yes")[1] == f"{runs[1]}\n"
    left = json.loads(record.read_text())
    assert left["current"] == runs[:1]
    assert not any(page.exists() for page in pages)
    again = with_runs(versions_in(left), ["2"], runs[1:], last_number=left["last_version"])
    assert [version.number for version in again] == [1, 3], "the number of the deleted version names no other"


def test_a_version_has_its_runs_in_the_order_of_the_file_that_was_run_last() -> None:
    (version,) = with_runs([], ["1", "2"], ["one", "two"])
    assert with_runs([version], ["1", "2"], ["two", "one"])[0].runs == ("two", "one")
    assert with_runs([version], ["1", "2"], ["two", "of another seed"])[0].runs == ("one", "two", "of another seed")


@pytest.mark.more
def test_two_removals_of_the_same_and_one_that_was_killed_do_no_harm(home: Path) -> None:
    run = "sums-s0-aaaa1111"
    write_json(home / "experiments" / "sums" / "experiment.json", {"name": "sums", "runs": [run], "current": [run]})
    for left in (run, "experiment sums"):
        write_json(home / ".removed" / left / "left.json", {})
    removal = removal_of(Home(home), "sums")
    for _ in range(2):
        remove(Home(home), removal)
    assert not (home / "experiments" / "sums").exists()
    assert list((home / "runs").iterdir()) == []
    assert not (home / ".removed").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sums@0", "there is no run `sums@0`"),
        ("sums@1", "every run of sums@1 also belongs to another version; `rpg rm RUN` deletes one"),
    ],
)
def test_rm_of_a_version_that_has_no_run_of_its_own_deletes_nothing(
    call: Call, home: Path, name: str, why: str
) -> None:
    run = "sums-s0-aaaa1111"
    versions = [{"version": number, "recipes": ["a", "b"][:number], "runs": [run]} for number in (1, 2)]
    record = home / "experiments" / "sums" / "experiment.json"
    write_json(record, {"name": "sums", "runs": [run], "current": [run], "versions": versions})
    before = record.read_bytes()
    code, _, err = call("rm", name, "--yes")
    assert (code, why in err) == (2, True), err
    assert record.read_bytes() == before
    assert (home / "runs" / run).is_dir()


def test_what_is_in_use_is_not_deleted(call: Call, home: Path) -> None:
    run = RecordedRun(home, "busy-s0-cccc3333", status="running")
    run.state |= {"pid": os.getpid(), "pid_started": start_of(os.getpid()), "host": socket.gethostname()}
    run.save()
    trial = "sums-s0-aaaa1111"
    write_json(home / "studies" / "clips" / "study.json", {"trials": [{"number": 0, "run_ids": [trial]}]})
    for name, why in (
        ("busy", "busy-s0-cccc3333 is running; `rpg cancel busy-s0-cccc3333` stops it"),
        (trial, f"{trial} is a trial of the study clips"),
        ("clips", "clips is a study"),
    ):
        code, _, err = call("rm", name, "--yes")
        assert (code, why in err) == (2, True), err
    assert {path.name for path in (home / "runs").iterdir()} == {trial, run.run_id}


@pytest.mark.more
def test_runs_show_what_they_take_on_the_disk(call: Call, home: Path) -> None:
    small = RecordedRun(home, "small-s0-dddd4444")
    (small.path / "weights").mkdir()
    trained = home / "runs" / "sums-s0-aaaa1111" / "weights" / "step-000003" / "model.safetensors"
    trained.write_bytes(bytes(2**20))
    os.link(trained, small.path / "weights" / "taken")
    code, out, err = call("runs", "--disk")
    names = [line.split()[0] for line in out.splitlines() if "-s" in line]
    assert (code, names) == (0, [small.run_id, "sums-s0-aaaa1111"])
    assert "results that runs share: 3.0 MiB" in err
    sizes = json.loads(call("runs", "--disk", "--json")[1])
    assert [row["weights"] for row in sizes] == [2**19, 2**19], "what two runs share counts once"
    largest = sizes[-1]
    assert largest["bytes"] > largest["rows"] > 0
    assert call("runs", "--disk", "--profile", "http://nowhere")[0] == 2
