"""`rpg replay` on a real trainer's record, and on tokens counted by hand."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import charts_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.replay.gradients import Moment, NoWeightsError
from pipelines.replay.objectives import MOST_OBJECTIVES, alternatives
from pipelines.replay.rows import ChosenSteps
from pipelines.replay.run import RunReplay, replay_run
from rpg.batches.batch import StepRollouts
from rpg.replay.step import RecordedStep, replay_step
from rpg.replay.tally import Tally
from rpg.rewards.score import Score
from specs.document import experiment_of
from specs.errors import RpgError, SpecError
from specs.loader import with_objective
from specs.reading.recorded import recorded_spec
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import make_inputs, make_run, rows, train

OBJECTIVE = {"type": "rpg", "kl_coef": 0.1, "divergence": "reverse"}
TRAINING = {"steps": 3, "minibatches": 4, "optimizer": {"learning_rate": 0.03}, "schedule": {}}
PLAIN: dict[str, Any] = {"training": TRAINING, "objective": OBJECTIVE}
BESIDE: dict[str, Any] = PLAIN | {
    "training": TRAINING | {"mask_truncated": True, "entropy_coef": 0.05},
    "rollout": {"max_response_length": 4, "top_p": 0.6, "correction": {"type": "truncate"}},
}
"""With all that a loss may have beside the objective; the nucleus sets sampler and learner apart."""
NAMES = ["loss", "weight/variance", "ratio/mean", "ratio/max", "ratio/ess", "kl/reverse", "kl/forward"]
NAMES += ["kl/behaviour", "clip_fraction/low", "clip_fraction/high", "clip_fraction/dual"]
Replayed = Callable[..., dict[str, Any]]


def recorded(directory: Path, changes: dict[str, Any], *, teacher: bool = False) -> Home:
    """A home with one run, trained here. `teacher`: whether to make a model that differs from the base one."""
    make_inputs(directory)
    if teacher:
        model = AutoModelForCausalLM.from_pretrained(directory / "base")
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / "teacher")
        AutoTokenizer.from_pretrained(directory / "base").save_pretrained(directory / "teacher")
    run_dir = make_run(directory, directory / "home/runs/tiny", **changes)
    (run_dir / "run.json").write_text(json.dumps({"run_id": "tiny", "experiment": "tiny", "name": "tiny", "seed": 0}))
    train(run_dir)
    return Home(directory / "home")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return recorded(tmp_path_factory.mktemp("replay"), BESIDE)


def replays_of(
    home: Home,
    objectives: Sequence[str] = (),
    overrides: Sequence[str] = (),
    sweeps: Sequence[str] = (),
    *,
    gradients: Moment | None = None,
    **limits: Any,
) -> list[RunReplay]:
    others = alternatives(recorded_spec(home.run("tiny")), objectives, overrides=overrides, sweeps=sweeps)
    return replay_run(home, "tiny", others, chosen=ChosenSteps(**limits), gradients=gradients)


@pytest.fixture
def replayed(home: Home) -> Replayed:
    def run(objective: str = "", *overrides: str, **limits: Any) -> dict[str, Any]:
        return replays_of(home, [objective], overrides, **limits)[0].as_json()

    return run


def assert_given_back(home: Home, found: dict[str, Any]) -> None:
    assert found["reproduced"]["holds"]
    assert found["reproduced"]["clipped"] == 0
    assert found["reproduced"]["ratio"] < 1e-6
    assert found["reproduced"]["advantage"] < 1e-6
    assert found["reproduced"]["loss"] < 1e-6
    assert found["overall"]["cosine"] == pytest.approx(1, abs=1e-12)
    assert found["furthest"] == []
    metrics = metrics_of(home)
    assert [entry["step"] for entry in found["steps"]] == [1, 2, 3]
    for entry in found["steps"]:
        for name in NAMES:
            assert entry["recorded"][name] == pytest.approx(metrics[entry["step"], name], rel=1e-4, abs=1e-6), name
    clips = [entry["recorded"]["clip_fraction/high"] for entry in found["steps"]]
    assert max(clips) > 0, "a clip that never fires would prove little"


def metrics_of(home: Home) -> dict[tuple[int, str], float]:
    return {(row["step"], row["name"]): row["value"] for row in rows(home.run("tiny"), "metrics")}


def test_the_recorded_objective_gives_back_the_recorded_columns(home: Home, replayed: Replayed) -> None:
    found, metrics = replayed(), metrics_of(home)
    assert_given_back(home, found)
    for entry in found["steps"]:
        assert entry["recorded"]["loss/entropy"] < -0.01
        assert metrics[entry["step"], "rollout_ratio/mean"] < 0.9, "a correction that corrects"
        assert 0 < metrics[entry["step"], "truncated_fraction"] < 1
        assert entry["untrained_tokens"] > 0
    assert [words.partition(":")[0] for words in found["left_out"]] == [
        "the gradient of the entropy bonus (training.entropy_coef 0.05)"
    ]


@pytest.mark.long
def test_so_does_one_with_nothing_beside_it(tmp_path: Path) -> None:
    home = recorded(tmp_path, PLAIN)
    found = replays_of(home)[0].as_json()
    assert_given_back(home, found)
    assert found["left_out"] == []


RAMPS = {
    "kl_coef": {"schedule": [[1, 0.02], [3, 0.5]], "between": "linear"},
    "clip": {"type": "dual", "high": {"schedule": [[1, 0.5], [3, 0.001]], "between": "cosine"}},
}
LOOPS = {
    "kl_coef": {"target": 1e-6, "of": "kl/reverse", "start": 0.1, "gain": 1.0},
    "clip": {"type": "dual", "high": {"target": 0.9, "of": "clip_fraction/high", "start": 0.01, "gain": 1.0}},
}
CORRECTED = {"top_p": 0.9, "correction": {"type": "mask", "over": "geometric_mean", "low": 0.8, "high": 1.2}}


@pytest.mark.more
@pytest.mark.parametrize(
    ("changes", "rollout"), [(RAMPS, {}), (LOOPS, CORRECTED)], ids=["schedules", "loops and a mask of responses"]
)
def test_each_step_is_replayed_with_the_values_that_it_had_in_training(
    changes: dict[str, Any], rollout: dict[str, Any], tmp_path: Path
) -> None:
    home = recorded(tmp_path, PLAIN | {"objective": OBJECTIVE | changes, "rollout": rollout})
    assert_given_back(home, replays_of(home)[0].as_json())
    spec = home.run("tiny") / "spec.json"
    first = Experiment.model_validate_json(spec.read_text()).at_step(1)
    spec.write_text(first.model_dump_json())
    assert not replays_of(home)[0].reproduction.holds, "with the values of the first step at every step"


def test_another_objective_is_weighed_on_the_same_tokens(replayed: Replayed) -> None:
    found = replayed("{type: grpo}")
    assert found["replayed"]["objective"]["type"] == "grpo"
    assert found["replayed"]["advantage"]["scale"] == "group_std", "grpo's published advantage"
    assert found["recorded"]["advantage"]["scale"] == "none"
    assert found["reproduced"]["holds"], "it is about the recorded objective"
    assert 0 < found["overall"]["cosine"] < 0.999
    one, other = found["overall"]["recorded"], found["overall"]["replayed"]
    assert other["kl/reverse"] == one["kl/reverse"], "of the policies, not of the objective"
    assert other["loss"] != one["loss"]
    assert len(found["left_out"]) == 1
    in_reward = replayed("{type: reinforce_plus_plus}")["left_out"]
    assert any("takes off the reward, for tokens that were not trained on" in words for words in in_reward)
    apart = [token["apart"] for token in found["furthest"]]
    assert len(apart) == 10
    assert apart == sorted(apart, reverse=True)


def test_the_reward_alone_has_no_divergence_and_a_clip_can_be_taken_off(replayed: Replayed) -> None:
    found = replayed("", "objective.divergence=none", "objective.clip={type: none}")
    assert found["overall"]["replayed"]["loss/divergence"] == 0
    assert found["overall"]["replayed"]["weight/divergence"] == 0
    assert found["overall"]["recorded"]["loss/divergence"] != 0
    assert found["overall"]["replayed"]["clip_fraction/high"] == 0
    assert found["overall"]["activated"] > 0, "tokens that the clip had zeroed"
    assert found["replayed"]["advantage"] == found["recorded"]["advantage"], "the type is the run's"


def test_steps_can_be_chosen(replayed: Replayed) -> None:
    assert [entry["step"] for entry in replayed(first=2)["steps"]] == [2, 3]
    assert [entry["step"] for entry in replayed(only=(1, 3))["steps"]] == [1, 3]
    with pytest.raises(Exception, match="there are steps 1 to 3"):
        replayed(first=9)


def test_a_sweep_takes_every_combination_and_each_is_what_it_would_be_alone(home: Home, replayed: Replayed) -> None:
    sweeps = ["objective.clip.low=0.1,0.3", "objective.kl_coef=[0, 0.2, 0.4]"]
    swept = replays_of(home, sweeps=sweeps)
    cells = [tuple(replay.replayed.swept.values()) for replay in swept]
    assert cells == [(low, kl_coef) for low in (0.1, 0.3) for kl_coef in (0, 0.2, 0.4)]
    assert swept[4].replayed.label == "objective.clip.low=0.3 objective.kl_coef=0.2"
    alone = replayed("", "objective.clip.low=0.3", "objective.kl_coef=0.2")
    again = swept[4].as_json()
    for name in ("overall", "steps", "furthest", "replayed", "reproduced"):
        assert again[name] == alone[name], name
    assert swept[0].overall["replayed"] != swept[3].overall["replayed"], "the bound acts"
    two = replays_of(home, ["{type: grpo}", "{type: cispo}"], sweeps=["advantage.scale=none,group_std"])
    assert [replay.replayed.label for replay in two] == [
        f'{{type: {name}}} advantage.scale="{scale}"' for name in ("grpo", "cispo") for scale in ("none", "group_std")
    ]


@pytest.mark.parametrize(
    ("objectives", "sweeps", "message"),
    [
        ([], ["objective.clip.low=0.1,2,3"], "--sweep objective.clip.low=2: objective.clip.low: must be less than 1"),
        ([], ["objective.clip.lo=0.1"], "--sweep objective.clip.lo=0.1: objective.clip.lo: unknown field"),
        ([], ["training.steps=3,4"], "--sweep training.steps=3: a replay changes these alone"),
        ([], ["objective.clip.low"], "--sweep objective.clip.low: a sweep needs values"),
        ([], ["objective.clip.low="], "--sweep objective.clip.low=: a sweep needs values"),
        ([], ["objective.kl_coef=1", "objective.kl_coef=2"], "--sweep objective.kl_coef=2: the field is swept twice"),
        (
            ["{type: grpo}", "{type: rloo}"],
            [f"objective.kl_coef={','.join(map(str, range(51)))}"],
            f"too many objectives\n  given: 2 objectives x 51 values = 102    allowed: at most {MOST_OBJECTIVES}",
        ),
    ],
)
def test_a_wrong_sweep_is_said_with_its_place(objectives: list[str], sweeps: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        alternatives(experiment_of(_spec(), {}), objectives, sweeps=sweeps)
    assert str(error.value).startswith(message)


def test_a_model_that_was_measured_as_it_is_has_no_training_to_replay() -> None:
    spec = _spec()
    measured = {key: spec[key] for key in ("name", "model", "reward")} | {"kind": "evaluation"}
    measured["data"] = {"evaluation": [{"source": "expressions", "name": "sums", "size": 8}]}
    with pytest.raises(SpecError, match="the run only evaluated a model: there is no training to replay"):
        alternatives(experiment_of(measured, {}), ["{type: grpo}"])


EACH_STEP = TRAINING | {"minibatches": 1, "checkpoint": {"every_steps": 1, "keep_last": 3}}
"""One update a step, at the weights of a checkpoint."""


def with_two_minibatches(home: Home, directory: Path) -> Home:
    """Returns a copy of a home whose run claims to have made two updates a step."""
    shutil.copytree(home.root.parent, directory, dirs_exist_ok=True)
    copy = Home(directory / "home")
    spec = copy.run("tiny") / "spec.json"
    settings = json.loads(spec.read_text())
    settings["training"]["minibatches"] = 2
    spec.write_text(json.dumps(settings))
    return copy


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return recorded(tmp_path_factory.mktemp("kept"), PLAIN | {"training": EACH_STEP | {"entropy_coef": 0.05}})


def test_the_own_gradient_has_the_recorded_norm_and_the_recorded_loss(kept: Home) -> None:
    (replay,) = replays_of(kept, gradients=Moment.start, first=1)
    assert replay.reproduction.loss is not None
    assert replay.reproduction.loss < 1e-6
    assert [entry["step"] for entry in replay.gradients] == [1, 2, 3]
    assert [entry["checkpoint"] for entry in replay.gradients] == [0, 1, 2]
    for entry in replay.gradients:
        assert entry["logprob_change"] < 1e-5
        assert entry["recorded_norm"] == pytest.approx(entry["grad_norm"], rel=1e-6)
        assert entry["replayed_norm"] == entry["recorded_norm"]
        assert entry["cosine"] == pytest.approx(1, abs=1e-12)
    (latest,) = replays_of(kept, gradients=Moment.start)
    assert latest.gradients == replay.gradients[-1:], "of all steps the last"


def test_another_objectives_loss_and_gradient_are_those_that_training_under_it_records(
    kept: Home, tmp_path: Path
) -> None:
    """The first step of two runs samples the same responses with the same policy, the base model."""
    rival = {"type": "grpo", "kl_coef": 0.3}
    other = recorded(tmp_path, {"training": EACH_STEP | {"steps": 1, "entropy_coef": 0.05}, "objective": rival})
    (replay,) = replays_of(kept, [json.dumps(rival)], gradients=Moment.start, only=(1,))
    assert replay.gradients is not None
    (entry,) = replay.gradients
    assert entry["replayed_norm"] == pytest.approx(metrics_of(other)[1, "grad_norm"], rel=1e-6)
    assert replay.steps[0]["replayed"]["loss"] == pytest.approx(metrics_of(other)[1, "loss"], abs=1e-6)
    assert entry["cosine"] < 0.999
    assert entry["recorded_norm"] != pytest.approx(entry["replayed_norm"], rel=0.01)


def test_gradients_are_linear_in_the_coefficient_of_the_divergence(kept: Home) -> None:
    """Own g is at 0.1, so g = (g(0) + g(0.2)) / 2, and g's length follows from the others' lengths and cosines."""
    without, double = replays_of(kept, sweeps=["objective.kl_coef=0,0.2"], gradients=Moment.start, only=(3,))
    parts = [entry["cosine"] * entry["replayed_norm"] for entry in (without.gradients[0], double.gradients[0])]
    assert without.gradients[0]["recorded_norm"] == pytest.approx(sum(parts) / 2, rel=1e-6)
    assert without.gradients[0]["cosine"] < 0.9999, "a divergence that has a gradient"


def test_the_gradient_of_a_step_is_the_mean_of_its_updates_gradients(kept: Home, tmp_path: Path) -> None:
    """Two halves of a step have equally many responses: the mean of their means over responses is that of the step."""
    halved = with_two_minibatches(kept, tmp_path)
    by_response = ["objective.aggregation=sequence_mean"]
    (one,), (two,) = (replays_of(home, (), by_response, gradients=Moment.start) for home in (kept, halved))
    assert one.gradients
    assert two.gradients
    assert two.gradients[0]["replayed_norm"] == pytest.approx(one.gradients[0]["replayed_norm"], rel=1e-6)
    assert two.gradients[0]["grad_norm"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("training", "tolerance"),
    [({"lora": {"rank": 2}}, 1e-6), ({"zero_stage": 3}, 1e-6), ({"precision": "bfloat16"}, 1e-3)],
    ids=["adapters", "shards", "bfloat16"],
)
def test_gradients_are_those_of_training_with(training: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    (replay,) = replays_of(
        recorded(tmp_path, PLAIN | {"training": EACH_STEP | training}), gradients=Moment.start, first=1
    )
    assert replay.gradients
    assert len(replay.gradients) == 3
    for entry in replay.gradients:
        assert entry["recorded_norm"] == pytest.approx(entry["grad_norm"], rel=tolerance)


def test_at_the_end_of_a_step_bounds_of_the_clip_change_the_gradient(home: Home) -> None:
    sweep = ["objective.clip.high=0.001,10"]
    narrow, wide = (replay.gradients for replay in replays_of(home, sweeps=sweep, gradients=Moment.end))
    assert narrow
    assert wide
    for entry in (*narrow, *wide):
        assert (entry["step"], entry["checkpoint"], entry["grad_norm"]) == (3, 3, None)
        assert entry["logprob_change"] > 0.01
    assert wide[0]["cosine"] < 0.9 < narrow[0]["cosine"] < 0.99999
    start = [replay.gradients for replay in replays_of(home, sweeps=sweep, gradients=Moment.start)]
    assert start[0] == start[1], "where ratios are 1 no bound acts"
    with pytest.raises(NoWeightsError, match="need the checkpoint of that step; checkpoints are kept at steps 2, 3"):
        replays_of(home, gradients=Moment.end, only=(1,))


def test_gradients_name_the_steps_that_they_can_be_taken_at(home: Home) -> None:
    (replay,) = replays_of(home, gradients=Moment.start, first=1)
    assert replay.gradients is not None
    assert [entry["step"] for entry in replay.gradients] == [1, 3]
    assert [entry["grad_norm"] for entry in replay.gradients] == [None, None], "a mean over four updates"
    assert any(sentence.startswith("the grad_norm on record") for sentence in replay.left_out)
    message = "checkpoints are kept at steps 2, 3; use --step 1 or 3"
    with pytest.raises(NoWeightsError, match=message):
        replays_of(home, gradients=Moment.start, only=(2,))


def test_a_damaged_checkpoint_or_a_lost_base_model_gives_no_gradient(kept: Home, tmp_path: Path) -> None:
    shutil.copytree(kept.root.parent, tmp_path, dirs_exist_ok=True)
    home = Home(tmp_path / "home")
    weights = home.run("tiny") / "checkpoints/step-000002/learner-rank00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(NoWeightsError, match="the checkpoint of step 2 is damaged: learner-rank00000"):
        replays_of(home, gradients=Moment.start)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(NoWeightsError, match="the base model is no longer at"):
        replays_of(home, gradients=Moment.start)


def test_text_of_any_language_in_the_spec_changes_nothing(home: Home) -> None:
    spec = json.loads((home.run("tiny") / "spec.json").read_text())
    question = "Does it 🚀 [bold]help[/]?\n\x07 \u2028: {a: b}"
    assert with_objective(spec | {"question": question}, "").question == question


def one_and_three_tokens(logprobs: list[float], rollout_logprobs: list[float], finish: str) -> RecordedStep:
    """A step of two responses to one prompt, of 1 token with reward 1 and of 3 tokens with reward 0, on policy."""
    column = torch.tensor(logprobs)
    return RecordedStep(
        step=1,
        rollouts=StepRollouts(
            prompts=(np.empty(0, dtype=np.int64),),
            problems=(0,),
            group_ids=np.array([0, 0]),
            token_ids=np.arange(4),
            sampled=np.ones(4, dtype=np.bool_),
            rollout_logprobs=np.array(rollout_logprobs, dtype=np.float32),
            lengths=np.array([1, 3]),
            num_sampled=np.array([1, 3]),
            held=np.array([0, 1]),
            finish_reasons=("stop", finish),
            responses=("", ""),
            scores=(Score.of(1.0, None), Score.of(0.0, None)),
            policy_version=0,
        ),
        positions=np.array([0, 0, 1, 2]),
        ledger={
            "logprobs": column,
            "old_logprobs": column,
            "ref_logprobs": column,
            "entropies": torch.tensor([1.0, 2, 3, 4]),
        },
        advantages=np.array([0.5, -0.5]),
    )


def test_weights_and_metrics_of_four_tokens_are_those_worked_out_by_hand() -> None:
    """Two responses of one group, rewards 1 and 0, on policy, no divergence: m is the advantage, +-1/2."""
    spec = _spec()
    step = one_and_three_tokens([-1] * 4, (np.log([1, 0.25, 4, 1]) - 1).tolist(), "length")
    plain = replay_step(step, with_objective(spec, ""))
    assert plain.weight.tolist() == [0.5, -0.5, -0.5, -0.5]
    assert plain.gradient.tolist() == [0.125, -0.125, -0.125, -0.125], "token_mean: over 4 tokens"
    by_response = replay_step(step, with_objective(spec, "", ["objective.aggregation=sequence_mean"]))
    assert by_response.gradient.tolist() == pytest.approx([1 / 4, -1 / 12, -1 / 12, -1 / 12])
    tally = Tally()
    tally.add(plain, updates=1)
    metrics = tally.metrics()
    # Losses -m log pi are 0.5 and three times -0.5; weights have mean -1/4 and variance 1/4 - 1/16.
    assert metrics["loss"] == pytest.approx((0.5 - 1.5) / 4)
    assert metrics["weight/mean"] == -0.25
    assert metrics["weight/variance"] == pytest.approx(3 / 16)
    assert metrics["weight/ess"] == 1
    # Learner over engine is 1, 4, 1/4, 1: at most 2 counts. The weights m stay what the objective gives.
    corrected = replay_step(
        step, with_objective(spec | {"rollout": {"correction": {"type": "truncate", "bound": 2}}}, "")
    )
    assert corrected.weight.tolist() == plain.weight.tolist()
    assert corrected.gradient.tolist() == pytest.approx([0.125, -0.25, -0.125 / 4, -0.125])
    training = spec["training"]
    bonus = replay_step(step, with_objective(spec | {"training": training | {"entropy_coef": 0.5}}, ""))
    assert (bonus.losses - plain.losses).tolist() == [-0.5, -1, -1.5, -2]
    assert bonus.gradient.tolist() == plain.gradient.tolist()
    masked = replay_step(step, with_objective(spec | {"training": training | {"mask_truncated": True}}, ""))
    assert masked.gradient.tolist() == [0.5, 0, 0, 0], "one token is left to be the mean of"


def test_a_token_that_was_not_trained_on_weighs_nothing_and_still_counts_in_the_length() -> None:
    logprobs = [-1, np.nan, np.nan, np.nan]
    replayed = replay_step(one_and_three_tokens(logprobs, [-1] * 4, "stop"), with_objective(_spec(), ""))
    assert replayed.trained.tolist() == [True, False, False, False]
    assert replayed.gradient.tolist() == [0.125, 0, 0, 0]
    assert replayed.losses.tolist() == [0.5, 0, 0, 0]


def test_the_command_prints_tables_and_json(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["replay", "tiny", "--objective", "{type: dr_grpo}", "--steps", "1-2"])
    assert shown.exit_code == 0, shown.output
    assert "tiny: 2 steps" in shown.output
    assert "left out  the gradient of the entropy bonus (training.entropy_coef 0.05)" in shown.output
    assert "gradient weights, one entry per token, aggregation included: cosine" in shown.output
    assert "Furthest apart" in shown.output
    plain = CliRunner().invoke(app, ["replay", "tiny", "--objective", "{type: dr_grpo}", "--step", "3", "--json"])
    assert [entry["step"] for entry in json.loads(plain.stdout)["steps"]] == [3]
    wrong = CliRunner().invoke(app, ["replay", "tiny", "--steps", "a-b"])
    assert wrong.exit_code == 2


@pytest.mark.more
def test_the_command_prints_a_table_of_many_and_writes_a_page(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    command = ["replay", "tiny", "--sweep", "objective.clip.high=0.1,0.2,0.4", "--sweep", "objective.kl_coef=0,1"]
    page = tmp_path / "sweep.html"
    shown = CliRunner().invoke(app, [*command, "--plot", str(page), "--gradients"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("objective.clip.high=0.4 objective.kl_coef=1") == 2, "in the table and with its gradient"
    assert "\nrecorded " in shown.stdout
    assert "at the weights of the checkpoint" in shown.stdout
    text = page.read_text()
    assert len(charts_of(text)) == 22, "nine figures and two of the gradients over each of two swept numbers"
    assert "Over objective.clip.high" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    documents = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [document["swept"]["objective.kl_coef"] for document in documents] == [0, 1] * 3
    commented = "{type: grpo} # <img src=x>"
    by_type = ["replay", "tiny", "--objective", commented, "--objective", "{type: rloo}", "--plot", str(page)]
    assert CliRunner().invoke(app, by_type).exit_code == 0
    assert "Over step" in page.read_text()
    assert "{type: rloo}" in page.read_text()
    assert "<img" not in page.read_text()
    for wrong in (["--gradients", "--at", "middle"], ["--at", "end"]):
        assert CliRunner().invoke(app, ["replay", "tiny", *wrong]).exit_code == 2
    refused = CliRunner().invoke(app, [*by_type[:-1], str(page / "below.html")])
    assert isinstance(refused.exception, RpgError), "told without a traceback"


@pytest.mark.parametrize(
    ("objective", "overrides", "message"),
    [
        ("{type: grpo, clip: {lo: 0.1}}", [], "--objective {type: grpo, clip: {lo: 0.1}}: objective.clip.lo: unknown"),
        ("", ["training.steps=3"], "--set training.steps=3: a replay changes these alone"),
        ("nowhere.yaml", [], "nowhere.yaml: no such file"),
    ],
)
def test_a_wrong_objective_is_said_with_its_place(objective: str, overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        with_objective(_spec(), objective, overrides)
    assert str(error.value).startswith(message)


def test_an_objective_comes_from_a_file_of_its_own_or_from_a_spec(tmp_path: Path) -> None:
    alone = tmp_path / "cispo.yaml"
    alone.write_text("type: cispo\nmax_ratio: 3.0\n")
    assert with_objective(_spec(), str(alone)).objective.type == "cispo"
    whole = tmp_path / "whole.yaml"
    whole.write_text("extends: other.yaml\nadvantage: {scale: batch_std}\n")
    (tmp_path / "other.yaml").write_text("name: other\nobjective: {type: rloo}\n")
    found = with_objective(_spec(), str(whole))
    assert (found.objective.type, found.advantage.scale) == ("rloo", "batch_std")
    alone.write_text("type: cispo\nmax_ratio: -3.0\n")
    with pytest.raises(SpecError, match=r"cispo\.yaml:2: objective\.max_ratio"):
        with_objective(_spec(), str(alone))


def _spec() -> dict[str, Any]:
    from specs.schema.experiment import Experiment
    from tests.rpg.tiny_run import SPEC

    changes = {"objective": {"type": "rpg", "divergence": "none"}, "reference": {"source": "behaviour"}}
    plain = SPEC | changes | {"training": SPEC["training"] | {"minibatches": 1}}
    return json.loads(Experiment.model_validate(plain).model_dump_json())
