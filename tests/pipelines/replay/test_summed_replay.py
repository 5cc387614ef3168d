"""`rpg replay` of divergences that are summed over tokens, which it computes from kept weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.replay.gradients import Moment
from pipelines.replay.weights import NoWeightsError
from tests.pipelines.replay.test_replay import EACH_STEP, metrics_of, recorded, replays_of, with_two_minibatches

SUMMED = {"type": "rpg", "kl_coef": 0.5, "divergence": "reverse", "kl": "full", "level": "to_go"}
MOVES = {"source": "snapshot", "update": {"ema_decay": 0.5}}
ALL = ["loss", "kl/reverse", "kl/forward", "weight/variance"]
FULL = json.dumps({"type": "rpg", "kl_coef": 0.3, "divergence": "unnormalized_forward", "kl": "full"})


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A run with a sum over the vocabulary. Its reference is an average that only checkpoints have."""
    changes = {"training": EACH_STEP, "objective": SUMMED, "reference": MOVES}
    return recorded(tmp_path_factory.mktemp("summed"), changes)


def assert_reproduced(home: Home, tolerance: float = 1e-5) -> None:
    (replay,) = replays_of(home, gradients=Moment.start, first=1)
    found, metrics = replay.as_json(), metrics_of(home)
    assert found["reproduced"]["holds"]
    assert [entry["step"] for entry in found["steps"]] == [1, 2, 3]
    computed = found["sums"]["computed"]
    assert [(each["step"], each["checkpoint"]) for each in computed] == [(1, 0), (2, 1), (3, 2)]
    assert max(each["logprob_change"] for each in computed) < tolerance
    for entry in found["steps"]:
        for name in ALL:
            assert entry["recorded"][name] == pytest.approx(metrics[entry["step"], name], rel=tolerance, abs=1e-6), name
    assert found["steps"][-1]["recorded"]["kl/reverse"] > 1e-4, "a divergence of 0 would prove little"
    for entry in found["gradients"]:
        assert entry["recorded_norm"] == pytest.approx(entry["grad_norm"], rel=tolerance)
        assert entry["cosine"] == pytest.approx(1, abs=1e-12)


def test_a_run_with_a_sum_is_reproduced_from_its_record_and_checkpoints(summed: Home) -> None:
    assert_reproduced(summed)
    (replay,) = replays_of(summed)
    assert replay.sums.sentence.startswith(
        "computed at the kept weights, step (checkpoint): 1 (base model), 2 (1), 3 (2); logprobs differ"
    )
    assert any(words.startswith("the gradient of a divergence that is summed") for words in replay.left_out)


@pytest.fixture
def without_first(summed: Home, tmp_path: Path) -> Home:
    """That run without the checkpoint of step 1."""
    shutil.copytree(summed.root.parent, tmp_path, dirs_exist_ok=True)
    home = Home(tmp_path / "home")
    shutil.rmtree(home.run("tiny") / "checkpoints/step-000001")
    return home


def test_an_objective_without_a_sum_is_replayed_where_the_runs_own_cannot_be(without_first: Home) -> None:
    (replay,) = replays_of(without_first, ["{type: grpo}"])
    assert [bool(entry["recorded"]) for entry in replay.steps] == [True, False, True]
    assert [entry["replayed"]["loss"] for entry in replay.steps]
    assert replay.steps[1]["cosine"] is None
    missing = "the run's own objective at step 2: tiny: the checkpoint of step 1 is needed; checkpoints are kept at"
    assert any(words.startswith(f"{missing} steps 2, 3") for words in replay.left_out)
    (alone,) = replays_of(without_first, ["{type: grpo}"], only=(2,))
    assert alone.overall["recorded"] == {}
    assert alone.reproduction.holds


def test_an_objective_with_a_sum_is_replayed_at_the_steps_whose_weights_are_kept(without_first: Home) -> None:
    (replay,) = replays_of(without_first, [FULL])
    assert [entry["step"] for entry in replay.steps] == [1, 3]
    assert any(words.startswith("step 2: tiny: the checkpoint of step 1") for words in replay.left_out)
    with pytest.raises(NoWeightsError, match="the checkpoint of step 1 is needed; checkpoints are kept at steps 2, 3"):
        replays_of(without_first, [FULL], only=(2,))
    with pytest.raises(NoWeightsError, match=r"of that step and of the one before; .*; use --step 3"):
        replays_of(without_first, [FULL], gradients=Moment.end, only=(2,))
    (without_first.run("tiny").parents[2] / "base").rename(without_first.root / "elsewhere")
    with pytest.raises(NoWeightsError, match="the base model is no longer at"):
        replays_of(without_first, [FULL])


def test_the_weights_within_a_step_of_several_updates_are_not_kept(summed: Home, tmp_path: Path) -> None:
    home = with_two_minibatches(summed, tmp_path)
    with pytest.raises(NoWeightsError, match="the run has 2 updates a step by adamw instead of one by adamw"):
        replays_of(home)
    assert len(replays_of(home, ["{type: grpo}"])[0].steps) == 3


def test_the_command_names_the_weights_of_each_step(without_first: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(without_first.root))
    shown = CliRunner().invoke(app, ["replay", "tiny", "--objective", "{type: dr_grpo}"])
    assert shown.exit_code == 0, shown.output
    assert "sums      computed at the kept weights, step (checkpoint): 1 (base model), 3 (2)" in shown.output
    assert "left out  the run's own objective at step 2" in shown.output
    alone = CliRunner().invoke(app, ["replay", "tiny", "--objective", "{type: dr_grpo}", "--step", "2"])
    assert "not compared, since the run's own objective could not be replayed" in alone.output


def test_gradients_after_a_step_compare_with_the_reference_before_it(summed: Home) -> None:
    """At the end of a step the policy has moved away from the reference, which only the checkpoint before has."""
    sweep = ["objective.kl_coef=0.5,5"]
    same, more = (replay.gradients for replay in replays_of(summed, sweeps=sweep, gradients=Moment.end, only=(2,)))
    assert same
    assert more
    assert same[0]["checkpoint"] == 2
    assert same[0]["logprob_change"] > 0.01
    assert same[0]["cosine"] == pytest.approx(1, abs=1e-12)
    assert more[0]["cosine"] < 0.999, "a divergence that has a gradient"


@pytest.mark.more
def test_the_loss_and_gradient_of_a_sum_are_those_that_training_under_it_records(tmp_path: Path) -> None:
    """A run is replayed with the objective of another of one step, whose reference, a teacher, differs at once."""
    both = {"reference": {"source": "model", "path": str(tmp_path / "teacher"), "update": None}}
    one, other = tmp_path, tmp_path / "other"
    sampled = {"training": EACH_STEP, "objective": {**SUMMED, "kl": "sampled"}, **both}
    (replay,) = replays_of(
        recorded(one, sampled, teacher=True), [json.dumps(SUMMED)], gradients=Moment.start, only=(1,)
    )
    once = {"training": EACH_STEP | {"steps": 1}, "objective": SUMMED, **both}
    metrics = metrics_of(recorded(other, once))
    assert metrics[1, "kl/reverse"] > 1e-2
    assert replay.gradients
    assert replay.steps[0]["replayed"]["loss"] == pytest.approx(metrics[1, "loss"], abs=1e-6)
    assert replay.steps[0]["replayed"]["kl/reverse"] == pytest.approx(metrics[1, "kl/reverse"], rel=1e-5)
    assert replay.gradients[0]["replayed_norm"] == pytest.approx(metrics[1, "grad_norm"], rel=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "top_k": {
        "objective": {**SUMMED, "kl": "top_k", "kl_top_k": 2, "divergence": "forward", "level": "token"},
        "reference": {"source": "initial", "update": None},
    },
    "adapters": {"training": EACH_STEP | {"lora": {"rank": 4, "alpha": 8.0}}},
    "shards": {"training": EACH_STEP | {"zero_stage": 3}},
    "bfloat16": {"training": EACH_STEP | {"precision": "bfloat16"}},
    "teacher": {"reference": {"source": "model", "path": "teacher", "update": None}},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_so_is_a_run_with(case: str, tmp_path: Path) -> None:
    changes = {"training": EACH_STEP, "objective": SUMMED, "reference": MOVES, **CASES[case]}
    if case == "teacher":
        changes["reference"] = {**changes["reference"], "path": str(tmp_path / "teacher")}
    assert_reproduced(recorded(tmp_path, changes, teacher=case == "teacher"), 1e-2 if case == "bfloat16" else 1e-5)
