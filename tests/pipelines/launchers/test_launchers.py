"""Every launcher that a spec can name keeps to the protocol, is found by its name, and leaves alone what is not its."""

from importlib import metadata
from pathlib import Path

import pytest

from pipelines.home.home import Home
from pipelines.launchers import Launcher, Room, launcher_of, launchers, rank_program
from pipelines.launchers.ranks import Share
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC

SECTIONS = {
    "local": {"type": "local"},
    "slurm": {"type": "slurm"},
    "ray": {"type": "ray"},
}


def experiment(kind: str) -> Experiment:
    return Experiment.model_validate(SPEC | {"launcher": SECTIONS[kind]})


def test_a_spec_names_every_launcher_that_there_is() -> None:
    assert launchers() == [launcher_of(experiment(kind)) for kind in SECTIONS]


@pytest.mark.parametrize("kind", sorted(SECTIONS.keys() - {"ray"}))
def test_a_launcher_that_asks_nobody_finds_no_obstacle(kind: str) -> None:
    assert launcher_of(experiment(kind)).room(experiment(kind)) == Room()


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_launchers_command_names_the_runs_directory(kind: str, tmp_path: Path) -> None:
    assert str(tmp_path) in launcher_of(experiment(kind)).command(tmp_path, experiment(kind), [])


def test_each_rank_of_a_stage_runs_that_stages_program(tmp_path: Path) -> None:
    assert rank_program(tmp_path, "train") == ["rpg.train", str(tmp_path)]
    assert rank_program(tmp_path, "evaluate") == ["rpg.stage", str(tmp_path / "evaluate-job.json")]
    local = experiment("local")
    command = launcher_of(local).command(tmp_path, local, [], stage="evaluate")
    assert command[-2:] == rank_program(tmp_path, "evaluate")
    assert not (tmp_path / "launch.json").exists(), "that is training's"
    assert (tmp_path / "launch-evaluate.json").exists()


def test_the_interface_on_which_ranks_meet_is_gloos_and_nccl_chooses_its_own(tmp_path: Path) -> None:
    share = Share(
        run_dir=str(tmp_path),
        first_rank=2,
        ranks=2,
        world_size=4,
        node=1,
        nodes=2,
        master_address="10.0.0.1",
        master_port=1,
        log="",
        interface="eth7",
        environment={"NCCL_IB_HCA": "mlx5"},
    )
    names = {name: value for name, value in share.rank_environment(1).items() if name.startswith(("GLOO", "NCCL"))}
    assert names == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_IB_HCA": "mlx5"}


@pytest.mark.parametrize(
    ("device", "environment", "of_engines"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"}, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("cuda", {}, ["0,1", "2,3"]),
        ("auto", {"RPG_SLOTS": ""}, [None, None]),
        ("auto", {"RPG_SLOTS": "GPU-a,GPU-b,GPU-c,GPU-d"}, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "GPU-a"}, ["GPU-a", "GPU-a"]),
    ],
)
def test_each_engine_of_a_machine_has_its_gpus_and_is_no_rank(
    tmp_path: Path, device: str, environment: dict[str, str], of_engines: list[str | None]
) -> None:
    share = Share(
        run_dir=str(tmp_path),
        world_size=8,
        node=1,
        nodes=1,
        master_address="10.0.0.1",
        master_port=7,
        log="",
        first_engine=2,
        engines=2,
        address="10.0.0.2",
        device=device,
        gpus=4,
        threads=3,
        environment={"OMP_NUM_THREADS": "5"},
    )
    commands = share.commands(environment)
    assert [program for program, _ in commands] == [["rpg.engine", "2", "10.0.0.2"], ["rpg.engine", "3", "10.0.0.2"]]
    started = [environment | variables for _, variables in commands]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in started] == of_engines
    for variables in started:
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "7")
        assert variables["OMP_NUM_THREADS"] == "3"
        assert variables["RPG_SIGN_OF_WORK"] == str(tmp_path / "working"), "as the ranks watch it"
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & variables.keys()


def test_only_ranks_that_run_here_take_this_machines_gpus() -> None:
    assert {kind: launcher_of(experiment(kind)).ranks_run_here for kind in SECTIONS} == {
        "local": True,
        "slurm": False,
        "ray": False,
    }


@pytest.mark.parametrize("launcher", launchers(), ids=lambda launcher: type(launcher).__name__)
def test_ending_what_was_never_started_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    launcher.end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_launchers_need_here_and_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = [finding for launcher in launchers() for finding in launcher.examine(Home(tmp_path), None)]
    assert [(finding.name, finding.status, finding.message) for finding in findings] == [
        ("launcher slurm", "note", "no sbatch here"),
        ("launcher ray", "ok", f"ray {metadata.version('ray')}"),
    ]
    (finding,) = launcher_of(experiment("slurm")).examine(Home(tmp_path), experiment("slurm"))
    assert (finding.status, finding.message) == ("broken", "no sbatch here")
    (tmp_path / "sbatch").touch(mode=0o755)
    (finding,) = launcher_of(experiment("slurm")).examine(Home(tmp_path), None)
    assert (finding.status, finding.message) == ("ok", str(tmp_path / "sbatch"))
