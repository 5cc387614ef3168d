"""Closed loops and plateaus, step by step."""

import math

import pytest

from rpg.control.loops import ClosedLoops, next_value
from rpg.control.plateau import Plateau, SetScores
from rpg.reference import ReferenceSchedule
from specs import parse_objective
from specs.schema.reference import Reference, Update
from specs.schema.schedule import ClosedLoop, at_step, loops_in, settled

LOOP = ClosedLoop(target=0.02, of="kl/reverse", start=0.1, least=0.05, most=0.2)
ENTROPY = ClosedLoop(target=0.5, of="entropy", start=0.01, least=1e-5, most=10.0)


@pytest.mark.parametrize(
    ("loop", "value", "measured", "expected"),
    [
        (LOOP, 0.1, 0.022, 0.101),  # an error of 0.1, a tenth of which counts
        (LOOP, 0.1, 0.5, 0.102),  # an error of 24 counts as 0.2
        (LOOP, 0.1, 0.0, 0.098),  # -1 as -0.2
        (LOOP, 0.1, math.inf, 0.102),
        (LOOP, 0.1, math.nan, 0.1),
        (LOOP, 0.1999, 0.5, 0.2),
        (LOOP, 0.0501, 0.0, 0.05),
        (ENTROPY, 0.01, 0.45, 0.0101),  # too little entropy: more bonus
        (ENTROPY, 0.01, 5.0, 0.0098),
    ],
)
def test_a_loop_moves_by_a_share_of_the_relative_error(
    loop: ClosedLoop, value: float, measured: float, expected: float
) -> None:
    assert next_value(value, measured, loop) == pytest.approx(expected, abs=1e-12)


def test_loops_start_at_their_keys_default_and_follow_only_metrics_that_were_measured() -> None:
    high = {"target": 0.1, "of": "clip_fraction/high", "gain": 1.0}
    kl_coef = {"target": 0.02, "of": "drift/reverse"}
    objective = parse_objective({"type": "grpo", "kl_coef": kl_coef, "clip": {"high": high}})
    loops = ClosedLoops(objective)
    assert loops.values == {("kl_coef",): 0.04, ("clip", "high"): 0.2}
    loops.follow({"clip_fraction/high": 0.3, "kl/reverse": 7.0})
    assert loops.values == {("kl_coef",): 0.04, ("clip", "high"): pytest.approx(0.24)}
    again = ClosedLoops(objective)
    again.load_state_dict(loops.state_dict())
    assert again.values == loops.values
    now = at_step(objective, 9, loops.values)
    assert (now.kl_coef, now.clip.high, now.clip.low) == (0.04, pytest.approx(0.24), 0.2)


def test_a_loop_in_a_key_that_is_0_by_default_has_a_start_and_no_margin_reaches_1() -> None:
    low = {"target": 0.1, "of": "clip_fraction/low"}
    objective = parse_objective({"type": "gspo", "kl_coef": {"target": 0.02, "of": "kl/reverse"}, "clip": {"low": low}})
    found = {path[-1]: (loop.start, loop.least, loop.most) for path, loop in loops_in(objective)}
    assert found == {
        "kl_coef": (1e-3, pytest.approx(1e-6), pytest.approx(1.0)),
        "low": (3e-4, pytest.approx(3e-7), pytest.approx(0.3)),
    }
    wide = parse_objective({"type": "ppo", "clip": {"low": low}})
    assert settled(wide.clip, "low").most == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("key", "given", "found"),
    [
        ("kl_coef", {"least": 1.0}, (1.0, 1.0, 1e3)),
        ("kl_coef", {"most": 1e-8}, (1e-8, 1e-11, 1e-8)),
        ("low", {"most": 1e-4}, (1e-4, 1e-7, 1e-4)),
        ("low", {"start": 0.995}, (0.995, 0.995e-3, 0.995)),
        ("low", {"least": 0.995}, (0.995, 0.995, 0.995)),
    ],
)
def test_a_loop_keeps_the_bounds_that_are_given(key: str, given: dict[str, float], found: tuple[float, ...]) -> None:
    loop = {"target": 0.1, "of": "kl/reverse" if key == "kl_coef" else "clip_fraction/low"} | given
    objective = parse_objective(
        {"type": "rpg"} | ({"kl_coef": loop} if key == "kl_coef" else {"clip": {"type": "dual", "low": loop}})
    )
    section = objective if key == "kl_coef" else objective.clip
    settled_loop = settled(section, key)
    assert (settled_loop.start, settled_loop.least, settled_loop.most) == pytest.approx(found)


def of(*scores: float) -> dict[str, SetScores]:
    return {"held_out": SetScores(list(scores))}


BAD, GOOD, PERFECT = of(*[0.0] * 20), of(*[0.0, 1.0] * 10), of(*[1.0] * 20)
"""From one to the next the interval of the gain is above 0."""


def test_a_plateau_is_so_many_evaluations_without_a_gain_over_the_best() -> None:
    plateau = Plateau(2)
    seen = [plateau.reached(each) for each in (BAD, BAD, GOOD, BAD, GOOD, GOOD, GOOD, PERFECT, GOOD)]
    #      first, 1, gain, 1, 2: plateau, 1, 2: plateau, gain, 1
    assert seen == [False, False, False, False, True, False, True, False, False]


def test_a_gain_on_one_set_leaves_the_best_of_the_others() -> None:
    def both(one: dict[str, SetScores], two: dict[str, SetScores]) -> dict[str, SetScores]:
        return {"one": one["held_out"], "two": two["held_out"]}

    plateau = Plateau(2)
    turns = (both(BAD, PERFECT), both(PERFECT, BAD), both(BAD, PERFECT), both(PERFECT, BAD))
    assert [plateau.reached(each) for each in turns] == [False, False, False, True]


def test_a_gain_within_its_interval_is_none() -> None:
    plateau, little = Plateau(1), of(*[0.0] * 18, 1.0, 1.0)
    assert [plateau.reached(each) for each in (BAD, little)] == [False, True]
    assert Plateau(0).reached(BAD) is False


def test_a_plateau_moves_the_reference_unless_it_has_just_moved() -> None:
    def moved(count: int, update: Update) -> list[str]:
        schedule = ReferenceSchedule.of(Reference(source="snapshot", update=update))
        reasons = []
        for step in range(1, count + 1):
            schedule.after_step(0.0, updates=1)
            kept = schedule.state_dict()
            schedule = ReferenceSchedule.of(Reference(source="snapshot", update=update))
            schedule.load_state_dict(kept)
            schedule.after_evaluation(GOOD)
            reasons += [f"{step}: {schedule.reason}"] if schedule.age_steps == 0 else []
        return reasons

    assert moved(6, Update(plateau=2)) == [f"{step}: 2 evaluations without a gain" for step in (3, 5)]
    assert moved(4, Update(plateau=1, every_steps=2)) == [
        "2: 2 steps since the last move",
        "3: 1 evaluation without a gain",
        "4: 1 evaluation without a gain",
    ]
