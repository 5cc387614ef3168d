"""`rpg export` and `rpg import`: a run that an earlier version trained, taken whole into another home."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from releases import as_released, let_release_be
from typer.testing import CliRunner
from unpacked_home import unpack

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from specs.loader import load_document
from storage.record import open_record

RUN, OTHER_CELL = "finished-s0-5c295933", "finished-s0-791d367e"
TABLES = ("runs", "stages", "metrics", "rollouts", "tokens", "evaluations", "evaluation_samples", "checkpoints")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home that the runs are exported from."""
    place = tmp_path_factory.mktemp("origin")
    unpack(place)
    record = place / "home" / "experiments" / "finished" / "experiment.json"
    # The order of the cells, whose first is the baseline of comparisons, does not come from their names.
    about, order = json.loads(record.read_text()), [OTHER_CELL, RUN]
    versions = [version | {"runs": order} for version in about["versions"]]
    record.write_text(json.dumps(about | {"current": order, "versions": versions}))
    return place / "home"


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls `rpg` with a home."""

    def run(home: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("RPG_HOME", str(home))
        return call(*arguments)

    return run


@pytest.fixture(scope="module")
def experiment(origin: Path) -> Path:
    """The export of an experiment of two runs."""
    directory = origin.parent / "finished"
    result = CliRunner().invoke(app, ["export", "finished", str(directory)], env={"RPG_HOME": str(origin)})
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture
def exported(experiment: Path, tmp_path: Path) -> Path:
    """That of one of them, to be changed."""
    return Path(shutil.copytree(experiment / RUN, tmp_path / "exported"))


def rows(home: Path, table: str) -> list[tuple[Any, ...]]:
    with open_record(home) as record:
        columns = "* EXCLUDE (flow_run_id)" if table == "runs" else "*"
        return record.sql(f"SELECT {columns} FROM {table} WHERE run_id = ? ORDER BY ALL", [RUN]).rows


@pytest.mark.more
def test_a_run_is_in_another_home_what_it_was_in_its_own(
    origin: Path, exported: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".import" / "left").mkdir(parents=True)  # by an import that was killed
    assert call(home, "import", str(exported)) == (0, f"{RUN}\n", "imported\n")
    assert not (home / ".import").exists()
    for table in TABLES:
        assert rows(home, table) == rows(origin, table) != [], table
    for question in (("compare", RUN, RUN, "--json"), ("show", RUN, "--origin", "--json")):
        assert call(home, *question)[:2] == call(origin, *question)[:2]
    shown, before = (json.loads(call(place, "show", RUN, "--json")[1]) for place in (home, origin))
    assert {**shown, "files": 0, "flow_run_id": 0} == {**before, "files": 0, "flow_run_id": 0}
    assert (home / "runs" / RUN / "report.html").is_file()
    assert call(home, "db", "check", "--full") == (0, "all is well\n", "")
    let_release_be(monkeypatch, as_released(data=1, base=1, train=2, evaluate=1))  # that of the run
    (planned,) = make_plan(load_document(exported / "spec.yaml"), Home(home)).runs
    actions = {stage.stage: stage.action for stage in planned.stages}
    assert (planned.run_id, actions["train"], actions["evaluate"]) == (RUN, "CACHED", "CACHED")


def test_an_export_says_in_words_what_it_is(exported: Path) -> None:
    read = (exported / "README.md").read_text()
    for told in (
        "87.5 % to 87.5 %",
        "| `metrics.parquet` | 156 rows",
        "exact on policy, holds",
        "| data train.parquet",
    ):
        assert told in read
    assert (exported / "spec.yaml").read_text() in read


@pytest.mark.more
def test_what_is_here_already_stays_as_it_is(origin: Path, exported: Path, tmp_path: Path, call: Call) -> None:
    said = f"{RUN} is already in this home, unchanged\n"
    assert call(origin, "import", str(exported)) == (0, f"{RUN}\n", said)
    home = tmp_path / "home"
    assert call(home, "import", str(exported))[0] == 0
    state = home / "runs" / RUN / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"ended_at": "2026-11-23T00:00:00+00:00"}))
    before = state.read_bytes()
    code, out, err = call(home, "import", str(exported))
    assert (code, out) == (1, "")
    assert err.startswith(
        f"{RUN} exists here already as a different run: ended_at is 2026-11-23T00:00:00+00:00 here and "
    )
    assert state.read_bytes() == before


@pytest.mark.parametrize("name", ["segments/metrics/*.parquet", "weights/*/model.safetensors", "metrics.parquet"])
def test_a_damaged_export_leaves_the_home_as_it_was(exported: Path, tmp_path: Path, call: Call, name: str) -> None:
    damaged = next(exported.glob(name))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, out, err = call(tmp_path / "home", "import", str(exported))
    assert (code, out) == (1, "")
    wrong = f"{damaged.relative_to(exported)} does not match its digest"
    assert err == f"{exported} is damaged: {wrong}; nothing was imported\n"
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.more
def test_an_experiment_comes_with_its_runs_and_is_one_version(
    origin: Path, experiment: Path, tmp_path: Path, call: Call
) -> None:
    home = tmp_path / "home"
    assert {path.name for path in experiment.iterdir()} == {RUN, OTHER_CELL}
    code, said, err = call(home, "import", str(experiment))
    assert (code, set(said.split())) == (0, {RUN, OTHER_CELL}), err
    answers = [json.loads(call(place, "compare", "finished", "--json")[1]) for place in (home, origin)]
    assert answers[0] == answers[1]
    assert call(home, "import", str(experiment / RUN))[0] == 0


def test_a_run_joins_an_experiment_whose_present_version_stays(exported: Path, tmp_path: Path, call: Call) -> None:
    record = tmp_path / "home" / "experiments" / "finished" / "experiment.json"
    record.parent.mkdir(parents=True)
    runs = ["finished-s0-own"]
    own = {"version": 1, "recipes": ["a"], "runs": runs}
    record.write_text(json.dumps({"name": "finished", "runs": runs, "current": runs, "versions": [own]}))
    assert call(tmp_path / "home", "import", str(exported))[0] == 0
    joined = json.loads(record.read_text())
    assert (joined["runs"], joined["current"]) == ([*runs, RUN], runs)
    assert [(version["version"], version["runs"]) for version in joined["versions"]] == [(2, [RUN]), (1, runs)]


def test_what_is_no_export_of_an_ended_run_is_refused(exported: Path, tmp_path: Path, call: Call) -> None:
    home = tmp_path / "home"
    code, _, err = call(home, "import", str(tmp_path / "nothing"))
    assert (code, "contains no export: `rpg export RUN DIR` writes one" in err) == (2, True)
    state = exported / "state.json"
    state.write_text(state.read_text().replace('"status": "finished"', '"status": "running"', 1))
    code, _, err = call(home, "import", str(exported))
    assert (code, err) == (2, f"{RUN} was running when it was exported; export it again when it has ended\n")
    assert not home.exists()


def test_an_export_brings_no_lease_and_no_file_from_elsewhere(exported: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "outside.json").write_text("{}")
    (exported / "leases").mkdir()
    (exported / "leases" / "0009.json").write_text("{}")
    manifest = json.loads((exported / "export.json").read_text())
    empty = {"sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "bytes": 2}
    manifest["files"]["leases/0009.json"] = empty
    (exported / "export.json").write_text(json.dumps(manifest))
    assert call(tmp_path / "home", "import", str(exported))[0] == 0
    assert not (tmp_path / "home" / "runs" / RUN / "leases").exists()
    manifest["files"]["../outside.json"] = empty
    (exported / "export.json").write_text(json.dumps(manifest))
    code, _, err = call(tmp_path / "home2", "import", str(exported))
    assert (code, "../outside.json is not a file of an export" in err) == (1, True)


def seal(exported: Path, name: str, content: str) -> None:
    """Puts a file into an export as its maker would, digest and all."""
    (exported / name).parent.mkdir(parents=True, exist_ok=True)
    (exported / name).write_text(content)
    manifest = json.loads((exported / "export.json").read_text())
    listed = {"sha256": hashlib.sha256(content.encode()).hexdigest(), "bytes": len(content.encode())}
    manifest["files"][name] = listed
    (exported / "export.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("state.json", {"stages": [1, 2]}, "state.json: stages: a list; expected an object"),
        ("run.json", {"values": "x", "seed": "0"}, "run.json: seed: '0'; expected a whole number"),
        ("certificate.json", {"findings": {}}, "certificate.json: findings: an object; expected a list"),
        ("train.json", {"files": {"model.safetensors": 5}}, "train.json: files.model.safetensors: a whole number"),
        ("plan.json", {"stages": {"train": []}}, "plan.json: stages.train: a list; expected an object"),
        ("attempts/0001.json", {"resumed_from_step": 0.5}, "attempts/0001.json: resumed_from_step: a number"),
    ],
)
def test_a_document_of_another_shape_does_not_arrive(
    exported: Path, tmp_path: Path, call: Call, name: str, change: dict[str, Any], said: str
) -> None:
    seal(exported, name, json.dumps(json.loads((exported / name).read_text()) | change))
    code, out, err = call(tmp_path / "home", "import", str(exported))
    assert (code, out, said in err, "nothing was imported" in err) == (1, "", True, True)
    assert not [*(tmp_path / "home").glob("runs/*"), *(tmp_path / "home").glob("experiments/*")]
    assert not (tmp_path / "home" / ".import").exists()


def test_documents_are_looked_into_also_where_the_home_lies_below_a_directory_called_weights(
    exported: Path, tmp_path: Path, call: Call
) -> None:
    seal(exported, "state.json", json.dumps(json.loads((exported / "state.json").read_text()) | {"stages": [1, 2]}))
    code, _, err = call(tmp_path / "weights" / "home", "import", str(exported))
    assert (code, "state.json: stages: a list; expected an object" in err) == (1, True)


@pytest.mark.parametrize("run_id", ["../outside", "a/b", ".hidden", "a*", "a[1]", "a\nb", "\x1b]0;x", "", 5])
def test_an_export_whose_run_has_no_name_for_a_run_is_refused(
    exported: Path, tmp_path: Path, call: Call, run_id: object
) -> None:
    seal(exported, "run.json", json.dumps(json.loads((exported / "run.json").read_text()) | {"run_id": run_id}))
    manifest = json.loads((exported / "export.json").read_text())
    for changed in ({"run_id": run_id}, {"experiment": manifest["experiment"] | {"name": run_id}}):
        (exported / "export.json").write_text(json.dumps(manifest | changed))
        code, _, err = call(tmp_path / "home", "import", str(exported))
        assert (code, "export.json is not what `rpg export` writes" in err) == (2, True)
    assert not (tmp_path / "home").exists()


def test_no_link_and_no_pipe_arrives(exported: Path, tmp_path: Path, call: Call) -> None:
    segment = next(exported.glob("segments/metrics/*.parquet"))
    kept = segment.rename(tmp_path / "elsewhere.parquet")

    def refusal() -> str:
        code, _, err = call(tmp_path / "home", "import", str(exported))
        assert (code, (tmp_path / "home" / "runs").exists()) == (1, False)
        return err

    segment.symlink_to(kept)
    assert f"{segment.name} is a link" in refusal()
    segment.unlink()
    segment.hardlink_to(kept)
    assert f"{segment.name} is a hard link" in refusal()
    segment.unlink()
    os.mkfifo(segment)
    assert f"{segment.name} is not a regular file" in refusal()
    segment.unlink()
    shutil.copy(kept, segment)
    directory = segment.parent.rename(tmp_path / "metrics")
    segment.parent.symlink_to(directory)
    assert "is a link, or lies behind one" in refusal()
