"""The GPU slots that a stage gets on this machine, and the message if it gets none. The slots are declared."""

import base64
import json
from pathlib import Path

import pytest
from live import SPEC

from pipelines.cli.follow import print_logs
from pipelines.cli.reading import Reading
from pipelines.home.home import Home
from pipelines.jobs.preflight import missing_for
from pipelines.launchers import Room, passed_on
from pipelines.launchers.local import LocalRanks
from pipelines.launchers.ray import RayRanks
from pipelines.planning.plan import make_plan
from pipelines.processes.stop import request_cancel
from pipelines.processes.supervisor import StageError, StageStoppedError
from pipelines.running.gpu_slots import asking_once, missing_here, runs_at_once, slot_environment, stage_slots
from pipelines.running.run import RunExecution
from specs.errors import SpecError
from specs.loader import load_document
from specs.machine.gpu_slots import leased
from specs.schema.rollout import not_installed

NODE = "launcher={type: ray}"


@pytest.fixture(autouse=True)
def two_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_SLOTS", "4,7")
    monkeypatch.setenv("RPG_SLOT_DIR", str(tmp_path / "slots"))


def execution(tmp_path: Path, *overrides: str) -> RunExecution:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml", overrides), Home(tmp_path / "home")
    return RunExecution(document, make_plan(document, home).runs[0].run_id, home)


def test_ranks_and_stages_get_a_slot_each_and_see_no_other(tmp_path):
    both = execution(tmp_path, "training.ranks=2")
    with stage_slots(both, "train") as slots:
        assert slots == ["4", "7"]
        assert slot_environment(slots) == {"CUDA_VISIBLE_DEVICES": "4,7", "RPG_GPUS": "4,7"}
    with stage_slots(both, "evaluate") as slots:
        assert slots == ["4", "7"], "all ranks evaluate"
    with stage_slots(both, "base") as first, stage_slots(execution(tmp_path, "seeds=[1]"), "train") as second:
        assert (first, second) == (["4"], ["7"])


APART = ("rollout.engine=vllm", "rollout.placement=dedicated")


def test_engines_apart_get_slots_behind_those_of_the_ranks_which_see_their_own(tmp_path):
    apart = execution(tmp_path, *APART)
    for stage in ("train", "evaluate"):
        with stage_slots(apart, stage) as slots:
            assert slots == ["4", "7"]
    command = LocalRanks().command(tmp_path, apart.plan.experiment, slots)
    assert pinned(command) == ["4"]
    shared = execution(tmp_path, *APART, "rollout.engine_gpus=[0]")
    with stage_slots(shared, "train") as first, stage_slots(apart, "base") as second:
        assert (first, second) == (["4"], ["7"])
    large = execution(tmp_path, *APART, "rollout.tensor_parallel_size=2")
    with pytest.raises(SpecError) as refused, stage_slots(large, "train"):
        pass
    assert refused.value.issues[0].given == "1 ranks and 2 engine GPUs on 2 GPU slots: 4, 7"
    one_for_two = execution(tmp_path, *APART, "training.ranks=2", "rollout.engine_gpus=[0]").plan.experiment
    missing = [issue for issue in missing_here(one_for_two) if issue != not_installed(one_for_two.rollout)]
    assert [issue.message for issue in missing] == ["too few GPUs for the engines"]


def test_nothing_is_leased_for_the_cpu_for_other_machines_or_for_data(tmp_path):
    for overrides, stage in (
        (("resources.device=cpu",), "train"),
        ((NODE, "training.ranks=4"), "train"),
        ((NODE, "training.ranks=4"), "evaluate"),
        (("warm_up=null",), "base"),
        ((), "data"),
    ):
        with stage_slots(execution(tmp_path, *overrides), stage) as slots:
            assert slots == []
            assert slot_environment(slots) == {}


def test_more_ranks_than_slots_are_the_users_to_put_right(tmp_path):
    with pytest.raises(SpecError) as refused, stage_slots(execution(tmp_path, "training.ranks=3"), "train"):
        pass
    (problem,) = refused.value.issues
    assert problem.path == ("training", "ranks")
    assert "3 ranks on 2 GPU slots: 4, 7" in problem.given


def test_so_many_runs_go_at_once_as_there_are_free_slots_for_the_largest(tmp_path):
    (tmp_path / "tiny.yaml").write_text(SPEC)

    def at_once(*overrides: str) -> int:
        document = load_document(tmp_path / "tiny.yaml", ("seeds=[0,1,2]", *overrides))
        return runs_at_once(make_plan(document, Home(tmp_path / "home")).runs)

    assert at_once() == 2
    assert at_once("seeds=[5]") == 1, "there is but one run"
    assert at_once("training.ranks=2") == 1
    assert at_once("training.ranks=4") == 1, "more than there are: the run itself says so"
    assert at_once("resources.device=cpu") == 1
    with leased(1, "another-run", waiting=None):
        assert at_once() == 1
    with leased(2, "another-run", waiting=None):
        assert at_once() == 1, "it waits for its slots"


def test_taken_slots_fail_the_stage_or_are_waited_for_until_one_is_asked_to_stop(tmp_path):
    with leased(2, "another-run", waiting=None):
        hasty = execution(tmp_path, "resources.when_taken=fail")
        with pytest.raises(StageError, match="4 is held by another-run"), stage_slots(hasty, "train"):
            pass
        patient = execution(tmp_path)
        request_cancel(patient.directory, 5.0)
        with pytest.raises(StageStoppedError), stage_slots(patient, "train"):
            pass


def test_the_local_launcher_pins_each_rank_to_its_slot_and_writes_down_what_it_chose(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run = execution(tmp_path, "training.ranks=2")
    command = LocalRanks().command(tmp_path, run.plan.experiment, ["4", "7"])
    assert pinned(command) == ["4", "7"]
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert (launch["launcher"], launch["gpus"]) == ("local", "4, 7")
    assert launch["environment"]["NCCL_DEBUG"] == "INFO"
    assert f"--master_port={launch['rendezvous'].partition(':')[2]}" in command


def pinned(command: list[str]) -> list[str]:
    """The GPUs of DeepSpeed's ranks."""
    (world,) = [word.removeprefix("--world_info=") for word in command if word.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(world))["localhost"]


def test_what_is_said_of_this_machines_gpus_or_opens_a_server_or_a_database_is_not_passed_on():
    given = {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "RPG_SLOTS": "0",
        "RPG_STUDIES_URL": "postgresql://rpg:password@db/studies",
        "RPG_READER_AUTH_STRING": "reader:password",
        "HF_HOME": "/hf",
        "SECRET": "x",
    }
    assert passed_on(given) == {"CUDA_LAUNCH_BLOCKING": "1", "HF_HOME": "/hf"}


def test_the_logs_of_all_machines_belong_to_the_stage(tmp_path, capsys):
    logs = tmp_path / "runs" / "run-1" / "logs"
    logs.mkdir(parents=True)
    for name in ("evaluate", "train", "train-0-gpu_1", "train-1-gpu_2"):
        (logs / f"{name}.log").write_text(f"written in {name}\n")
    print_logs(Reading(Home(tmp_path)), ["run-1"], stage="train", follow=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["==> train <==", "==> train-0-gpu_1 <==", "==> train-1-gpu_2 <=="]
    assert lines[1::2] == ["written in train", "written in train-0-gpu_1", "written in train-1-gpu_2"]


def test_a_cluster_is_asked_once_by_the_look_and_the_count_of_a_command(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document = load_document(tmp_path / "tiny.yaml", ("seeds=[0,1,2]", "launcher.type=ray", "launcher.nodes=1"))
    runs = make_plan(document, Home(tmp_path / "home")).runs
    asked = []
    monkeypatch.setattr(RayRanks, "room", lambda _ranks, experiment: asked.append(experiment) or Room(launches=2))
    ask = asking_once()
    assert missing_for(document, runs, ask) == []
    assert runs_at_once(runs, ask) == 2
    assert len(asked) == 1
    assert asking_once()(runs[0].experiment).launches == 2
    assert len(asked) == 2, "another command asks again"
