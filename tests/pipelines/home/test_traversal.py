"""No name, manifest or link leads out of the home: nothing outside is read, written or removed through one."""

import hashlib
import json
from pathlib import Path

import pytest
from live import SPEC
from recorded_home import record_run
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from pipelines.running.run import RunExecution
from pipelines.running.stages import _withdraw
from specs.errors import RpgError
from specs.loader import load_document
from specs.machine.manifests import find_damage

NAMES = ["../outside", "..", ".", "", "/etc", "a/../../b", "a/b", "a\0b"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["run", "experiment", "study"])
def test_a_name_with_a_path_in_it_is_no_name(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(RpgError, match="is not a valid name"):
        getattr(Home(tmp_path), kind)(name)


def test_a_stage_a_fingerprint_and_a_lock_are_names_too(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for path in (lambda: home.artifact("base", "../../outside"), lambda: home.artifact("..", "0123")):
        with pytest.raises(RpgError, match="is not a valid name"):
            path()
    with pytest.raises(RpgError, match="is not a valid name"), home.locked("../../outside", waiting=lambda: None):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "home"]


@pytest.mark.parametrize(
    "command", [("report", "../x"), ("show", "../x"), ("study", "report", "../x"), ("study", "best", "../x")]
)
def test_the_command_line_reads_nothing_by_a_path(tmp_path: Path, command: tuple[str, ...]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for kind in ("experiments", "studies", "runs"):
        (home / kind).mkdir()
    (home / "x").mkdir()
    for name in ("experiment.json", "study.json", "run.json"):
        (home / "x" / name).write_text(json.dumps({"name": "outside", "runs": ["outside"]}))
    result = CliRunner().invoke(app, command, env={"RPG_HOME": str(home)})
    assert isinstance(result.exception, RpgError)
    assert "outside" not in result.output + str(result.exception)
    assert sorted(path.name for path in (home / "x").iterdir()) == ["experiment.json", "run.json", "study.json"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_manifest_that_names_a_file_elsewhere_is_damaged(tmp_path: Path, absolute: bool) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "artifact"
    directory.mkdir()
    outside.write_text("x")
    name = str(outside) if absolute else "../outside"
    entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
    assert find_damage(directory, {name: entry}) == f"{name} is not one of its files"


def test_weights_that_a_damaged_manifest_places_elsewhere_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml"), Home(tmp_path / "home")
    execution = RunExecution(document, make_plan(document, home).runs[0].run_id, home)
    run, outside = execution.directory, home.root / "outside"
    run.mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_text("x")
    (run / "weights").mkdir()
    files = {"../../outside/kept": {"sha256": "0", "bytes": 1}, "weights/gone": {"sha256": "0", "bytes": 1}}
    recorded = {"weights": {"1": "../../outside", "2": str(outside), "3": "weights"}, "files": files}
    (run / "train.json").write_text(json.dumps(recorded))
    _withdraw(execution, run / "train.json")
    assert (outside / "kept").exists()
    assert not (run / "weights").exists()


def test_export_follows_no_link_out_of_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    run = "sums-low-s0-0123abcd"
    record_run(home, run)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("outside")
    (home.run(run) / "weights").mkdir(exist_ok=True)
    (home.run(run) / "weights" / "step-000001").symlink_to(tmp_path / "private")
    target = tmp_path / "exported"
    result = CliRunner().invoke(app, ["export", run, str(target)], env={"RPG_HOME": str(home.root)})
    assert isinstance(result.exception, RpgError)
    assert "is a link to a place outside" in str(result.exception)
    assert not target.exists()
