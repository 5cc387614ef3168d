"""What a trainer records of its steps and of itself, as the spec's `record` says."""

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.home.home import Home
from pipelines.home.unrecorded import why_incomplete
from pipelines.jobs.proof import _compare, _scratch
from pipelines.replay.objectives import own_objective
from pipelines.replay.rows import NothingToReplayError
from pipelines.replay.run import replay_run
from rpg.recording.provenance import _process, steering_variables
from specs.machine.files import digest
from specs.reading.recorded import recorded_spec
from specs.schema.execution import Record
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import assert_trained, make_inputs, make_run, rows, train

TRAINING = {"steps": 2, "optimizer": {"learning_rate": 0.01}}
RECORDS: dict[str, dict[str, Any]] = {
    "all": {},
    "sampled": {"tokens": "sampled", "sampled_share": 0.1},
    "none": {"tokens": "none", "rollouts": "none"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, trained with each of the settings."""
    place = tmp_path_factory.mktemp("recorded")
    make_inputs(place)
    runs = {}
    for name, record in RECORDS.items():
        runs[name] = make_run(place, place / name / "runs" / "tiny", training=TRAINING, record=record)
        (runs[name] / "run.json").write_text(json.dumps({"run_id": "tiny", "experiment": "tiny"}))
        train(runs[name])
    return runs


def tokens_of(run_dir: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The token rows by step and response."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows(run_dir, "tokens"):
        found.setdefault((row["step"], row["rollout_id"]), []).append(row)
    return found


@pytest.mark.more
def test_what_is_recorded_changes_nothing_of_training(trained: dict[str, Path]) -> None:
    assert_trained(trained["all"])
    digests = {name: digest(next(run.glob("weights/step-*/model.safetensors"))) for name, run in trained.items()}
    assert len(set(digests.values())) == 1
    losses = {
        name: [row["value"] for row in rows(run, "metrics") if row["name"] == "loss"] for name, run in trained.items()
    }
    assert losses["all"] == losses["sampled"] == losses["none"] != []


def test_the_sampled_tokens_are_those_of_some_responses_whole(trained: dict[str, Path]) -> None:
    everything, few = tokens_of(trained["all"]), tokens_of(trained["sampled"])
    assert len(everything) == 2 * 32
    assert [sum(step == number for step, _ in few) for number in (1, 2)] == [4, 4], "a tenth of 32, rounded up"
    for response, of_response in few.items():
        assert of_response == everything[response]
    assert len(rows(trained["sampled"], "rollouts")) == 2 * 32


def test_none_are_recorded_where_none_are_wanted(trained: dict[str, Path]) -> None:
    tables = {path.name for path in (trained["none"] / "segments").iterdir()}
    assert tables == {"metrics", "events", "checkpoints"}


def replay(home: Home) -> None:
    own = own_objective(recorded_spec(home.run("tiny")))
    replay_run(home, "tiny", [own])


def test_a_replay_says_which_rows_it_lacks_and_why(trained: dict[str, Path], tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(NothingToReplayError) as refusal:
            replay(Home(trained[name].parents[1]))
        return str(refusal.value)

    recorded = len(rows(trained["sampled"], "tokens")) - sum(
        row["step"] == 2 for row in rows(trained["sampled"], "tokens")
    )
    of_step = sum(row["num_tokens"] for row in rows(trained["sampled"], "rollouts") if row["step"] == 1)
    assert refused("sampled") == (
        f"a replay needs every token of a step. tiny has {recorded} of {of_step} of step 1 on record:"
        " the run was trained with record.tokens: sampled, record.sampled_share: 0.1"
    )
    assert refused("none") == (
        "tiny has no recorded rollouts of these steps; the run was trained with record.rollouts: none"
    )
    shutil.copytree(trained["all"].parents[1], tmp_path / "home")
    directory = tmp_path / "home" / "runs" / "tiny"
    assert why_incomplete(directory, "tokens") == why_incomplete(directory, "metrics") == ""
    for segment in sorted((directory / "segments" / "tokens").iterdir())[1:]:
        segment.unlink()
    with pytest.raises(NothingToReplayError, match=r"tiny has 0 of .* of step 2 on record: `rpg db check` reports"):
        replay(Home(tmp_path / "home"))


def test_a_proof_holds_the_rows_that_were_recorded_against_those_of_all(trained: dict[str, Path]) -> None:
    def proven(name: str) -> tuple[str, list[str]]:
        homes = [Home(trained[each].parents[1]) for each in (name, "all")]
        compared, differences = _compare(*homes, "tiny", 0, 2)
        return ", ".join(compared), differences

    few, everything = (len(rows(trained[name], "tokens")) for name in ("sampled", "all"))
    compared, differences = proven("sampled")
    reason = "the run was trained with record.tokens: sampled, record.sampled_share: 0.1"
    assert f"64 rollouts, {few} of {everything:,} tokens ({reason})" in compared
    assert differences == []
    compared, differences = proven("none")
    assert "0 of 64 rollouts (the run was trained with record.rollouts: none)" in compared
    assert differences == []
    with _scratch(Home(trained["none"].parents[1]), "tiny", 0, 2) as scratch:
        spec = json.loads((scratch.run("tiny") / "spec.json").read_bytes())
    assert Experiment.model_validate(spec).record == Record(), "the steps are trained again with all rows"


def test_an_attempt_notes_what_it_works_with(trained: dict[str, Path]) -> None:
    (attempt,) = (json.loads(path.read_text()) for path in (trained["sampled"] / "attempts").iterdir())
    assert attempt["record"] == {"rollouts": "all", "tokens": "sampled", "sampled_share": 0.1, "keep_days": 0.0}
    assert attempt["code"]["version"]
    assert any(line.startswith("torch==") for line in attempt["packages"])
    assert len(attempt["lock"]) == 64
    assert {"python", "platform", "cpu", "cpus"} <= attempt["machine"].keys()
    assert attempt["environment"]["OMP_NUM_THREADS"] == "1"


def test_no_secret_is_among_the_noted_variables() -> None:
    noted = steering_variables(
        {
            "RPG_HOME": "/home",
            "RPG_SECRETS": "RPG_WORD",
            "RPG_WORD": "abracadabra",
            "RPG_API_TOKEN": "0123456789abcdef",
            "RPG_PROFILE": "https://me:sesame-open@server/api",
            "NCCL_DEBUG": "abracadabra and more",
            "AWS_REGION": "elsewhere",
        }
    )
    assert noted == {
        "NCCL_DEBUG": "(hidden) and more",
        "RPG_API_TOKEN": "(hidden)",
        "RPG_HOME": "/home",
        "RPG_PROFILE": "(hidden)",
        "RPG_SECRETS": "RPG_WORD",
        "RPG_WORD": "(hidden)",
    }


def test_the_recorded_packages_are_those_that_the_interpreter_lists() -> None:
    listed = {f"{package.name}=={package.version}" for package in importlib.metadata.distributions()}
    assert _process()["packages"] == sorted(listed, key=str.lower)
