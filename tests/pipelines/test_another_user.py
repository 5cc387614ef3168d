"""Another user of the machine comes first, and leaves files that the product looks for outside a home."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from as_users import Shared, acting_as, shared_machine
from live import COMMAND, SPEC
from tiny_study import write_study
from traced import Traced
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.jobs import preflight
from pipelines.planning import model_shape
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.prefect.server import template
from pipelines.prefect.server.api import is_healthy, running_services
from specs.loader import load_document
from specs.machine import own_cache
from specs.machine.files import read_json
from specs.machine.liveness import FINAL

TEMPLATE = """\
CREATE TABLE flow_run (id TEXT, parameters JSON); CREATE TABLE configuration (key TEXT);
CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('latest');
CREATE TRIGGER own AFTER INSERT ON flow_run BEGIN UPDATE flow_run SET parameters = 'the attacker''s'; END;
"""


@pytest.fixture
def machine() -> Iterator[Shared]:
    with shared_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """A run whose data and model a look would open."""
    directory = tmp_path_factory.mktemp("planned")
    (directory / "tiny.yaml").write_text(SPEC)
    return make_plan(load_document(directory / "tiny.yaml"), Home(directory / "home")).runs[0]


def looked_for(run: RunPlan) -> dict[str, Path | None]:
    """Returns the files that the product would read."""
    return {
        "template": template._template(),
        "look": preflight._note_of_look(run, True),
        "look at the model": preflight._note_of_model(run),
        "shape": model_shape._place(json.dumps(model_shape.settings_of(run.experiment.model), sort_keys=True)),
    }


def plant(top: Path, names: dict[str, Path]) -> None:
    """Leaves such files below a directory, if this user can write there."""
    for kind, name in names.items():
        with suppress(PermissionError):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            if kind == "template":
                with closing(sqlite3.connect(top / name)) as database:
                    database.executescript(TEMPLATE)
            else:
                (top / name).write_text(json.dumps({"warnings": [], "found": "nothing wrong", "parameters": 1}))


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_nothing_that_another_user_has_planted_is_read(
    machine: Shared,
    run: RunPlan,
    umask: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The two share the Hub's cache. The first user's umask decides whether the other can write ~/.cache too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {kind: Path("rpg", str(path).rpartition("/rpg/")[2]) for kind, path in looked_for(run).items() if path}
    assert len(names) == 4
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(machine.home))
    shared = machine.tmp / "huggingface"
    monkeypatch.setenv("HF_HOME", str(shared))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(shared / "assets"))
    own_cache._warn.cache_clear()
    with acting_as(machine.user, umask):
        (machine.home / ".cache").mkdir()  # as any other program makes it
        shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    tops = [shared / "assets", machine.home / ".cache"]
    with acting_as(machine.other, 0):
        for top in tops:
            plant(top, names)
    planted = {top for top in tops if (top / names["template"]).exists()}
    assert planted == {shared / "assets", *(tops[1:] if umask == 0 else [])}
    database = machine.home / "rpg" / "prefect.db"
    with acting_as(machine.user, umask):
        found = {kind: path and path.exists() and read_json(path) for kind, path in looked_for(run).items()}
        assert not any(found.values()), found
        assert template.begin_with_template(database), "the server is to make it"
        assert not database.exists()
        template.keep_template(database)
    assert len(capsys.readouterr().err.splitlines()) == (umask == 0)


SUBMISSION = """\
import asyncio, sys
from pathlib import Path
from pipelines.home.home import Home
from pipelines.prefect.server.api import EmbeddedServer, client_settings
from pipelines.prefect.server.deployments import renew_deployments
home = Home.from_environment()
server = EmbeddedServer(home)
server.start()
server.wait()
with client_settings(home, server.url):
    from pipelines.prefect.flows.submit import submit_document
    from pipelines.prefect.flows.workers.process_worker import OwnWorker
    from specs.loader import load_document
    renew_deployments(home, server.url, "rpg")
    submit_document(load_document(Path(sys.argv[1])), home, server.url)
    async def work():
        async with OwnWorker(work_pool_name="rpg", name="mine") as worker:
            print(worker._runner._tmp_dir)
    asyncio.run(work())
server.stop()
"""


@pytest.fixture
def traced(machine: Shared) -> Traced:
    """A user who finds the known names of directories for temporary files taken."""
    with acting_as(machine.other):
        for name in (f"torchinductor_{machine.user}", "runner_storage", f"rpg-{os.getuid()}", "torch_extensions"):
            (machine.tmp / name).mkdir(mode=0o755)
    return Traced(machine)


def spec(traced: Traced, text: str = SPEC) -> str:
    path = traced.machine.home / "tiny.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.more
def test_a_submission_and_a_worker_use_nothing_that_could_be_another_users(traced: Traced) -> None:
    said = traced.run(SUBMISSION, spec(traced))
    assert said.splitlines()[-1] == str(traced.machine.home / ".cache" / "rpg" / "prefect" / "mine")
    assert (traced.machine.home / ".cache" / "rpg" / "prefect" / "databases").is_dir()
    assert traced.anothers() == {}


def test_a_file_that_could_be_another_users_is_noticed(traced: Traced) -> None:
    guessed = f"{traced.machine.tmp}/guessed"
    traced.run(f"import os; os.makedirs('{guessed}', exist_ok=True); open('../tmp/guessed/code.py', 'w')")
    traced.run("open('../tmp/guessed-too', 'x')")
    with suppress(AssertionError):
        traced.run("open('../tmp/torchinductor_daemon/code.py')")
    traced.run("import tempfile; tempfile.mkdtemp(); tempfile.TemporaryFile().write(b'1')")
    taken = f"{traced.machine.tmp}/torchinductor_daemon/code.py"
    assert {*traced.anothers()} == {guessed, f"{guessed}/code.py", f"{guessed}-too", taken}


@pytest.mark.long
def test_a_submitted_run_uses_nothing_that_could_be_another_users(traced: Traced) -> None:
    home, services = Home(traced.home), traced.start(COMMAND, "up")
    try:
        wait_for(lambda: (up := running_services(home)) and is_healthy(up.url), timeout=200, what="the server")
        traced.rpg("submit", spec(traced))
        (state,) = (home.root / "runs").glob("*/state.json")
        wait_for(lambda: read_json(state)["status"] in FINAL, timeout=400, what="the run's end")
    finally:
        traced.rpg("down")
        services.wait(60)
    assert read_json(state)["status"] == "finished"
    assert traced.anothers() == {}


@pytest.mark.long
def test_a_study_uses_nothing_that_could_be_another_users(traced: Traced) -> None:
    traced.rpg("study", "run", str(write_study(traced.machine.home, ("trials: 8", "trials: 2"))), timeout=1000)
    assert any(path.endswith("/compiled/inductor") for path in traced.used())
    assert traced.anothers() == {}


@pytest.mark.long
@pytest.mark.vllm
def test_a_run_with_vllm_uses_nothing_that_could_be_another_users(traced: Traced) -> None:
    pytest.importorskip("vllm")
    traced.rpg(
        "run", spec(traced), *("--set", "rollout.engine=vllm", "--set", "model.config.head_dim=32"), timeout=1200
    )
    own = f"{traced.machine.home}/.cache/rpg/compiled/"
    assert {path.removeprefix(own).split("/")[0] for path in traced.used() if path.startswith(own)} >= {"vllm"}
    assert traced.anothers() == {}
