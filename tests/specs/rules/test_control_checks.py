"""Closed loops and plateaus in a spec: refused settings, and a study that searches a target."""

import pytest
from spec_text import GOOD, changed, message, warnings, write

from specs import load_experiment, load_study_document
from specs.schema.schedule import ClosedLoop, loops_in

LOOP = "{target: 0.02, of: kl/reverse}"
FOLLOWING = changed("kl_coef: 1e-2", f"kl_coef: {LOOP}")
REFERENCE = "reference: {source: snapshot, update: {every_steps: 2}}\n"


def test_each_key_that_takes_a_loop_is_accepted_and_settled() -> None:
    text = FOLLOWING.replace(
        "low: 0.2", "low: {target: 0.05, of: clip_fraction/low}\n    high: {target: 0.1, of: clip_fraction/high}"
    ).replace("minibatches: 2", "minibatches: 2\n  entropy_coef: {target: 0.5, of: entropy, gain: 0.5, start: 1e-2}")
    found = {".".join(path): (loop.start, loop.of) for path, loop in loops_in(load_experiment(write(text)))}
    assert found == {
        "objective.kl_coef": (1e-4, "kl/reverse"),
        "objective.clip.low": (0.2, "clip_fraction/low"),
        "objective.clip.high": (0.28, "clip_fraction/high"),
        "training.entropy_coef": (1e-2, "entropy"),
    }
    assert warnings(text) == "0 warnings"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (LOOP, "{target: 0.02, of: entropy}", "objective.kl_coef.of: the key does not change this metric\n"),
        (LOOP, "{target: 0.02, of: kl/revers}", "hint: did you mean `kl/reverse`?"),
        (LOOP, "{target: 1, of: kl/revers}", "    allowed: kl/reverse, kl/forward, drift/reverse, drift/forward\n"),
        (LOOP, "{target: 0.02}", "objective.kl_coef.of: missing\n"),
        (LOOP, "{target: 0.02}", "  allowed: kl/reverse, kl/forward, drift/reverse, drift/forward\n"),
        ("low: 0.2", "low: {target: 0.1}", "  allowed: clip_fraction/low\n"),
        (LOOP, "{target: 0.02, off: kl/reverse}", "objective.kl_coef.off: unknown field\n"),
        (LOOP, "{target: 0, of: kl/reverse}", "objective.kl_coef.target: must be greater than 0\n"),
        (LOOP, "{target: 1, of: kl/reverse, start: 2, most: 1}", "objective.kl_coef.start: start is above most\n"),
        (LOOP, "{target: 1, of: drift/reverse}", "objective.kl_coef.of: drift/reverse is measured at evaluations"),
        ("type: rpg", "type: rpg\n  divergence: none", "cannot change kl/reverse: the objective has no divergence\n"),
        ("minibatches: 2", "minibatches: 1", "cannot change kl/reverse: the policy is its own reference"),
        ("low: 0.2", "low: {target: 0.1, of: clip_fraction/high}", "objective.clip.low.of: the key does not change"),
        ("low: 0.2", "low: {target: 1, of: clip_fraction/low}", "clip_fraction/low is at most 1\n"),
        ("low: 0.2", "low: {target: 0.1, of: clip_fraction/low, start: 2}", "objective.clip.low.start: must be less"),
        (
            "low: 0.2",
            "dual: {target: 0.1, of: clip_fraction/dual}",
            "objective.clip.dual: the key cannot follow a target\n",
        ),
    ],
)
def test_a_loop_that_cannot_close_is_refused(old: str, new: str, said: str) -> None:
    assert FOLLOWING.count(old) == 1
    assert said in message(FOLLOWING.replace(old, new))


@pytest.mark.parametrize(
    ("objective", "reference", "said"),
    [
        ("kl_coef: {target: 1, of: drift/reverse}", "{source: initial}", "drift/reverse is measured on the responses"),
        (
            "kl_coef: 1e-2",
            "{source: snapshot, update: {plateau: 1}}",
            "reference.update.plateau: no evaluation set gets",
        ),
    ],
)
def test_control_by_responses_needs_a_set_that_gets_some(objective: str, reference: str, said: str) -> None:
    write("prose\n", "prose.txt")
    text = f"{changed('kl_coef: 1e-2', objective)}reference: {reference}\nevaluation: {{every_steps: 1}}\n"
    prose = "    - {name: prose, source: text, path: prose.txt}\n"
    assert warnings(text.replace("  max_prompt", f"{prose}  max_prompt")) == "0 warnings"
    alone = [prose if "held_out" in line else line for line in text.splitlines(keepends=True)]
    assert said in message("".join(alone))


def test_a_misspelt_metric_of_a_loop_is_one_mistake() -> None:
    said = message(FOLLOWING.replace("of: kl/reverse", "off: kl/reverse"))
    assert "hint: did you mean `of`?" in said
    assert "missing" not in said


def test_a_clip_that_never_acts_cannot_be_led() -> None:
    text = changed("low: 0.2", "low: {target: 0.1, of: clip_fraction/low}").replace("minibatches: 2", "minibatches: 1")
    assert "cannot change clip_fraction/low: with 1 minibatch x 1 epoch every ratio is 1" in message(text)


def test_a_penalty_without_a_gradient_cannot_be_led() -> None:
    plain = FOLLOWING.replace("type: rpg", "type: ppo\n  kl_estimator: k1").replace("    type: dual\n", "")
    assert "k1 in the loss has an expected gradient of 0" in message(plain + REFERENCE)
    in_reward = plain.replace("kl_estimator: k1", "kl_in: reward")
    assert "the penalty in the reward is always 0" in message(in_reward)
    assert warnings(in_reward + REFERENCE) == "0 warnings"


def test_a_reference_apart_lets_one_update_a_step_be_led() -> None:
    text = FOLLOWING.replace("minibatches: 2", "minibatches: 1") + REFERENCE
    assert "cannot change" not in warnings(text)
    assert "cannot change kl/reverse" in message(text.replace("every_steps: 2", "every_steps: 1"))


def test_a_plateau_needs_evaluations_and_a_cleared_optimizer_a_condition() -> None:
    text = changed("training:", "reference: {source: snapshot, update: {plateau: 2, reset_optimizer: true}}\ntraining:")
    assert "reference.update.plateau: nothing is evaluated during training\n" in message(text)
    assert warnings(text + "evaluation: {every_steps: 1}\n") == "0 warnings"
    rare = text + "evaluation: {every_steps: 2}\n"
    assert "reference.update.plateau: plateau can never act\n" in warnings(rare)
    assert "given: 2 after the first of 1 evaluations before the last step\n" in warnings(rare)
    always = changed(
        "training:", "reference: {source: snapshot, update: {ema_decay: 0.9, reset_optimizer: true}}\ntraining:"
    )
    assert "the optimizer would be reset each time" in message(always)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("low: 0.2", "dual: {schedule: [[1, 3], [4, 10]], between: linear}"),
        ("rollout: {", "rollout: {temperature: {schedule: [[1, 1.0], [4, 0.6]]}, "),
        ("  minibatches: 2", "  minibatches: 2\n  entropy_coef: {schedule: [[1, 0.01], [4, 0]], between: cosine}"),
        ("training:", "reference: {source: snapshot, update: {ema_decay: {schedule: [[1, 0], [4, 0.9]]}}}\ntraining:"),
    ],
)
def test_each_key_that_takes_a_schedule_is_accepted(old: str, new: str) -> None:
    assert warnings(changed(old, new)) == "0 warnings"


def test_a_dual_bound_is_off_or_above_1_at_each_step() -> None:
    rival = GOOD.replace("type: rpg", "type: ppo").replace("    type: dual\n", "")

    def said(dual: str) -> str:
        return message(rival.replace("low: 0.2", f"dual: {dual}"))

    assert "dual must be 0 (none) or greater than 1" in said("{schedule: [[1, 0], [3, 0.5]]}")
    assert "dual cannot change gradually from 0 (none) to a bound" in said(
        "{schedule: [[1, 0], [3, 5]], between: linear}"
    )
    assert "must be greater than 1" in message(changed("low: 0.2", "dual: {schedule: [[1, 0.5]]}"))


def test_a_study_searches_the_target() -> None:
    write(FOLLOWING, "base.yaml")
    study = """\
name: aim
experiment: base.yaml
parameters:
  objective.kl_coef.target: {float: [1e-3, 1e-1], log: true}
goal: {dataset: held_out, metric: mean@8}
trials: 8
"""
    trial = load_study_document(write(study)).trial({"objective.kl_coef.target": 0.05})
    assert trial.experiment.objective.kl_coef == ClosedLoop(target=0.05, of="kl/reverse")
