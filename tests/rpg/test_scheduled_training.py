"""Training with values that change over the steps: the record, the weights, the reference, the certificate."""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rpg.certificate.certificate import certify
from rpg.metrics import SCHEDULED as SCHEDULED_METRICS
from rpg.objectives import token_losses
from rpg.recording.run_directory import RunDirectory
from specs import parse_objective
from specs.schema.objective import Objective
from specs.schema.schedule import at_step, loops_in, schedules_in
from tests.rpg.tiny_run import STEADY, finish, make_inputs, make_run, rows, start, train

pytestmark = pytest.mark.more

STEPS = 4
PLAIN: dict[str, Any] = {
    "objective": {"type": "rpg", "kl_coef": 0.1, "clip": {"type": "dual", "low": 0.01, "high": 0.02}},
    "reference": {"source": "snapshot", "update": {"every_steps": 2}},
}
POINTS: dict[str, Any] = {
    "objective": {
        "kl_coef": {"schedule": [[1, 0.1]], "between": "cosine"},
        "clip": {"type": "dual", "low": {"schedule": [[3, 0.01]]}, "high": {"schedule": [[0, 0.02], [9, 0.02]]}},
    },
    "reference": {"source": "snapshot", "update": {"every_steps": {"schedule": [[1, 2]]}}},
    "training": {"optimizer": {"learning_rate": {"schedule": [[1, 0.03]]}}},
}
RAMPS: dict[str, Any] = {
    "objective": {
        "kl_coef": {"schedule": [[2, 0], [4, 0.4]], "between": "linear"},
        "clip": {"type": "dual", "low": 0.01, "high": {"schedule": [[1, 0.02], [3, 1e-3]], "between": "step"}},
    },
    "reference": {"source": "snapshot", "update": {"every_updates": 3}},
    "training": {"optimizer": {"learning_rate": {"schedule": [[1, 0.03], [3, 0.01]]}}},
}
IN_THE_REWARD: dict[str, Any] = {"objective": {"type": "rloo", "kl_coef": {"schedule": [[1, 0], [3, 2]]}}}
BLOWN_UP: dict[str, Any] = {
    # On policy the divergence has no gradient, so that step 2 has a finite first update; 1e308 is no number in float32.
    "objective": {"kl_coef": {"schedule": [[1, 0.1], [2, 1e30], [3, 1e308], [4, 0.1]], "between": "step"}},
    "reference": {"source": "behaviour", "update": None},
    "training": {"on_not_finite": "skip", "guards": [{"metric": "kl/reverse", "above": 1e6}]},
}
LOOPS: dict[str, Any] = {
    "rollout": {"temperature": {"schedule": [[1, 1.0], [3, 0.5]]}},
    "objective": {
        "kl_coef": {"target": 1e-3, "of": "kl/reverse", "start": 0.1},
        "clip": {
            "type": "dual",
            "low": {"target": 0.1, "of": "clip_fraction/low", "start": 0.01, "gain": 1.0},
            "high": {"target": 0.1, "of": "clip_fraction/high", "start": 0.02, "gain": 1.0},
            "dual": {"schedule": [[1, 3.0], [4, 6.0]], "between": "linear"},
        },
    },
    "reference": {
        "source": "snapshot",
        "update": {"every_steps": 2, "ema_decay": {"schedule": [[1, 0.5], [4, 0.9]]}, "reset_optimizer": True},
    },
    "training": {"entropy_coef": {"target": 0.5, "of": "entropy", "start": 0.01, "gain": 0.5}},
}
RUNS = {
    "blown-up": BLOWN_UP,
    "loops": LOOPS,
    "plain": PLAIN,
    "points": POINTS,
    "ramps": RAMPS,
    "reward": IN_THE_REWARD,
}
STAGES: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every_steps": STEPS}, "optimizer": STEADY}
FOLLOWED = {
    "kl_coef": "kl/reverse",
    "clip/low": "clip_fraction/low",
    "clip/high": "clip_fraction/high",
    "entropy_coef": "entropy",
}
SCHEDULED = ("kl_coef", "clip/low", "clip/high", "reference/every_steps")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each run, and two of them gone on from step 2, called `NAME-again`."""
    inputs, place = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("runs")
    make_inputs(inputs)
    training = {"steps": STEPS, "checkpoint": {"every_steps": 2}, "optimizer": {"learning_rate": 0.03}}
    made = [
        str(make_run(inputs, place / name, **{**changes, "training": training | changes.get("training", {})}))
        for name, changes in RUNS.items()
    ]
    again = [f"{place / name}:{place / name}-again" for name in ("ramps", "blown-up", "loops")]
    finish(start([sys.executable, "-m", "tests.rpg.train_worker", *made, *again]), seconds=400)
    return place


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / f"weights/step-{STEPS:06}/model.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one | two)


def metrics(run: Path) -> dict[str, list[float]]:
    """Name -> the values of the steps, from 1."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in sorted(rows(run, "metrics"), key=lambda row: row["step"]):
        by_name[row["name"]].append(row["value"])
    return by_name


def test_schedules_of_one_value_train_the_weights_of_the_plain_numbers_bit_for_bit(runs: Path) -> None:
    assert same(weights(runs / "plain"), weights(runs / "points"))
    assert not same(weights(runs / "plain"), weights(runs / "ramps"))
    plain, points = (
        {name: values for name, values in metrics(runs / run).items() if not name.startswith(("time", "tokens", "mem"))}
        for run in ("plain", "points")
    )
    assert plain == {name: values for name, values in points.items() if name not in SCHEDULED}


def test_what_is_scheduled_is_on_record_at_every_step_and_nothing_else_is(runs: Path) -> None:
    recorded = {run: {name: metrics(runs / run)[name] for name in SCHEDULED} for run in ("plain", "points", "ramps")}
    assert not any(recorded["plain"].values())
    assert recorded["points"] == {
        "kl_coef": [0.1] * STEPS,
        "clip/low": [0.01] * STEPS,
        "clip/high": [0.02] * STEPS,
        "reference/every_steps": [2.0] * STEPS,
    }
    assert recorded["ramps"] == {
        "kl_coef": pytest.approx([0, 0, 0.2, 0.4]),
        "clip/low": [],
        "clip/high": [0.02, 0.02, 0.001, 0.001],
        "reference/every_steps": [],
    }
    whole, reduced = metrics(runs / "plain")["learning_rate"], metrics(runs / "ramps")["learning_rate"]
    assert reduced == pytest.approx([*whole[:2], *(rate / 3 for rate in whole[2:])])


def test_a_run_that_goes_on_in_the_middle_of_a_ramp_is_the_run_that_did_not_stop(runs: Path) -> None:
    assert same(weights(runs / "ramps"), weights(runs / "ramps-again"))
    assert metrics(runs / "ramps")["kl_coef"] == metrics(runs / "ramps-again")["kl_coef"]


def test_each_closed_loop_moves_by_its_metric_of_the_step_before_and_goes_on_where_it_was(runs: Path) -> None:
    recorded, again = metrics(runs / "loops"), metrics(runs / "loops-again")
    loops = {SCHEDULED_METRICS[path]: loop for path, loop in loops_in(RunDirectory(runs / "loops").spec())}
    assert {name: loop.of for name, loop in loops.items()} == FOLLOWED
    for name, loop in loops.items():
        assert recorded[name][0] == loop.start
        for step in range(1, STEPS):
            error = min(max(recorded[loop.of][step - 1] / loop.target - 1, -0.2), 0.2)
            sign = -1 if name == "entropy_coef" else 1
            assert recorded[name][step] == pytest.approx(recorded[name][step - 1] * (1 + sign * loop.gain * error))
        assert len(set(recorded[name])) == STEPS, f"{name} did not move"
        assert recorded[name] == again[name]
    assert same(weights(runs / "loops"), weights(runs / "loops-again"))
    assert state(runs / "loops") == state(runs / "loops-again")


def state(run: Path) -> dict[str, Any]:
    """The counters of the last checkpoint, with the loops' values."""
    kept = json.loads((run / f"checkpoints/step-{STEPS:06}/trainer.json").read_text())
    assert len(kept["loops"]) == len(FOLLOWED)
    return dict(kept)


def test_sampler_and_learner_have_the_temperature_of_the_step(runs: Path) -> None:
    recorded = metrics(runs / "loops")
    assert recorded["temperature"] == [1.0, 1.0, 0.5, 0.5]
    assert recorded["clip/dual"] == [3.0, 4.0, 5.0, 6.0]
    assert recorded["reference/ema_decay"] == [0.5, 0.5, 0.5, 0.9]
    for row in rows(runs / "loops", "tokens"):
        assert row["old_logprob"] == pytest.approx(row["rollout_logprob"], abs=1e-4), row["step"]
    sharp = [value for step, value in enumerate(recorded["entropy"], 1) if step > 2]
    assert max(sharp) < min(recorded["entropy"][:2]), "half the temperature, less entropy"


def test_a_move_of_the_reference_clears_the_optimizer(runs: Path) -> None:
    cleared, kept = (
        {
            name: max(
                float(values.abs().max()) for key, values in pieces.items() if key.partition("|")[2].startswith(name)
            )
            for name in ("exp_avg", "exp_avg_sq", "weight")
        }
        for run in ("loops", "plain")
        for pieces in [load_file(runs / run / f"checkpoints/step-{STEPS:06}/learner-rank00000.safetensors")]
    )
    assert (cleared["exp_avg"], cleared["exp_avg_sq"]) == (0, 0)
    assert min(cleared["weight"], kept["exp_avg"], kept["exp_avg_sq"]) > 0


def test_every_zero_stage_clears_the_optimizer_alike(inputs: Path, tmp_path: Path) -> None:
    update = {"every_steps": 1, "reset_optimizer": True}
    moves = {"objective": {"type": "rpg", "kl_coef": 0.1}, "reference": {"source": "snapshot", "update": update}}
    made = [
        make_run(inputs, tmp_path / f"stage-{stage}", **moves, training=STAGES | {"zero_stage": stage})
        for stage in range(4)
    ]
    kept = make_run(
        inputs,
        tmp_path / "kept",
        **{**moves, "reference": {"source": "snapshot", "update": {"every_steps": 1}}},
        training=STAGES,
    )
    finish(start([sys.executable, "-m", "tests.rpg.train_worker", *map(str, [*made, kept])]), seconds=400)
    first, *others = (weights(run) for run in made)
    for other in others:
        assert all(torch.allclose(first[name], other[name], atol=1e-4) for name in first)
    assert not all(torch.allclose(first[name], values, atol=1e-3) for name, values in weights(kept).items())


def test_updates_without_a_finite_gradient_are_skipped_and_the_run_goes_on(runs: Path) -> None:
    seen = {step: {} for step in range(1, STEPS + 1)}  # type: dict[int, dict[str, float]]
    for row in rows(runs / "blown-up", "metrics"):
        seen[row["step"]][row["name"]] = row["value"]
    assert {step: figures["skipped_updates"] for step, figures in seen.items()} == {1: 0, 2: 1, 3: 2, 4: 0}
    for step, figures in seen.items():
        assert all(math.isfinite(value) for value in figures.values()), step
        assert ("grad_norm" in figures) == ("kl/reverse" in figures) == (step != 3), "step 3 made no update"
    kinds = ("updates_skipped", "guard_stopped", "failed")
    events = [(row["step"], row["message"]) for row in rows(runs / "blown-up", "events") if row["kind"] in kinds]
    assert events == [
        (2, "1 of 2 updates were skipped: their gradients were not finite"),
        (3, "2 of 2 updates were skipped: their gradients were not finite"),
    ]
    assert same(weights(runs / "blown-up"), weights(runs / "blown-up-again"))
    assert not same(weights(runs / "blown-up"), weights(runs / "plain"))
    assert "skipped_updates" not in metrics(runs / "plain")


@pytest.mark.long
@pytest.mark.parametrize(("epochs", "most"), [(1, 4), (20, 20)])
def test_a_run_that_can_make_no_update_says_so_instead_of_skipping_them_all(
    epochs: int, most: int, inputs: Path, tmp_path: Path
) -> None:
    training = {"steps": 2, "epochs": epochs, "on_not_finite": "skip"}
    run = make_run(inputs, tmp_path / "run", training=training, objective={"kl_coef": 1e308})
    printed = train(run, expect=1)
    assert f"; {most} updates in a row had to be skipped; nothing of this step is saved" in printed
    assert "Traceback" not in printed


def test_a_divergence_in_the_reward_follows_its_weight(runs: Path) -> None:
    rollouts, tokens = rows(runs / "reward", "rollouts"), rows(runs / "reward", "tokens")
    for step, weight in ((2, 0.0), (3, 2.0)):
        # rloo: the reward less the weight times the response's log(old / reference), less the mean of the others
        penalized = {row["rollout_id"]: row["reward"] for row in rollouts if row["step"] == step}
        for row in tokens:
            if row["step"] == step:
                penalized[row["rollout_id"]] -= weight * (row["old_logprob"] - row["ref_logprob"])
        groups = defaultdict(list)
        for row in rollouts:
            if row["step"] == step:
                groups[row["group_id"]].append((penalized[row["rollout_id"]], row["advantage"]))
        for members in groups.values():
            mean = sum(value for value, _ in members) / len(members)
            for value, advantage in members:
                assert advantage == pytest.approx((value - mean) * len(members) / (len(members) - 1), abs=1e-4)


def test_the_reference_moves_after_the_step_whose_updates_reach_the_count(runs: Path) -> None:
    # two updates a step: the third is in step 2, so step 3 has a new reference, and step 5 would have
    versions = {row["step"]: row["reference_version"] for row in rows(runs / "ramps", "rollouts")}
    assert versions == {1: 0, 2: 0, 3: 1, 4: 1}
    moved = [row["message"] for row in rows(runs / "ramps", "events") if row["kind"] == "reference_moved"]
    assert moved == ["version 1 after step 2: 4 updates since the last move", "version 2 after step 4: 4 updates since"
                     " the last move"]  # fmt: skip


def test_a_run_keeps_the_certificate_of_each_phase(runs: Path) -> None:
    plain = json.loads((runs / "plain/certificate.json").read_text())
    assert plain["holds"]
    steps = json.loads((runs / "ramps/certificate.json").read_text())["steps"]
    assert list(steps) == ["1", "3", "4"], "at step 2 nothing has changed yet"
    assert all(certificate["holds"] for certificate in steps.values())
    weights = {step: certificate["objective"]["kl_coef"] for step, certificate in steps.items()}
    assert weights == {"1": 0, "3": pytest.approx(0.2), "4": 0.4}
    assert steps["1"]["claimed"] == "expected reward of each token, in states of the sampler"
    assert "less the reverse KL" in steps["4"]["claimed"]


SCHEDULED_OBJECTIVES: list[dict[str, Any]] = [
    {"type": kind, "kl_coef": {"schedule": [[1, 0], [40, 0.3], [90, 0.1]], "between": between}, "clip": {**clip, **low}}
    for kind, clip in (
        ("rpg", {"type": "dual"}),
        ("rpg", {"type": "truncate"}),
        ("rpg", {"type": "value"}),
        ("ppo", {}),
        ("rloo", {}),
    )
    for between in ("step", "linear", "cosine")
    for low in [{"low": {"schedule": [[1, 0.1], [50, 0.4]], "between": between}}]
]


@pytest.mark.parametrize("values", SCHEDULED_OBJECTIVES, ids=lambda values: f"{values['type']}-{values['clip']['low']}")
def test_the_certificate_holds_at_any_step(values: dict[str, Any]) -> None:
    objective = parse_objective(values)
    claims = {step: certify(at_step(objective, step)) for step in (1, 2, 20, 39, 40, 47, 90, 200)}
    assert all(certificate.holds for certificate in claims.values())
    assert {certificate.objective["clip"]["low"] for certificate in claims.values()} >= {0.1, 0.4}


def test_a_loss_asks_for_the_step_of_an_objective_that_changes() -> None:
    objective = parse_objective({"type": "dapo", "clip": {"high": {"schedule": [[1, 0.1], [9, 0.3]]}}})
    assert losses(at_step(objective, 1)) == [pytest.approx(-1.1)]
    assert losses(at_step(objective, 9)) == [pytest.approx(-1.3)]
    assert dict(schedules_in(objective)).keys() == {("clip", "high")}
    with pytest.raises(ValueError, match="take at_step"):
        losses(objective)


def losses(objective: Objective) -> list[float]:
    """Losses of one token with ratio 2 and advantage 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return token_losses(
        objective,
        logprobs=torch.log(2 * one),
        old_logprobs=0 * one,
        ref_logprobs=0 * one,
        advantages=one,
        response_mask=one,
    )[0].tolist()
