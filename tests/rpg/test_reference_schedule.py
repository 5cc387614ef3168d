"""When the reference moves."""

import json
from typing import Any

import pytest

from rpg.reference import ReferenceSchedule
from specs.schema.reference import Reference, Update


def moves(divergences: list[float], **update: Any) -> list[int]:
    """The steps, from 1, of two updates each, after which it moves."""
    schedule = ReferenceSchedule.of(Reference(source="snapshot", update=Update.model_validate(update)))
    return [step for step, value in enumerate(divergences, 1) if schedule.after_step(value, updates=2)]


def test_by_count() -> None:
    assert moves([0.0] * 7, every_steps=3) == [3, 6]


def test_by_a_count_that_changes_it_moves_once_the_steps_since_the_last_move_reach_the_count_of_the_step() -> None:
    # up to step 5 every 2: after 2 and 4; then every 3, counted from 4: after 7 and 10
    assert moves([0.0] * 11, every_steps={"schedule": [[1, 2], [6, 3]]}) == [2, 4, 7, 10]
    # from 1 to 5 over eight steps: 1, 1.5, 2, 2.5, 3, ...: after 1, 3 (2 >= 2), 6 (3 < 3.5), 7 (4 >= 4), 12 (5 >= 5)
    ramp = {"schedule": [[1, 1], [9, 5]], "between": "linear"}
    assert moves([0.0] * 12, every_steps=ramp) == [1, 3, 7, 12]


def test_by_updates_it_moves_after_the_step_that_reaches_them_and_counts_from_there() -> None:
    # two updates a step: 5 are reached after step 3 (6 of them), again 5 after step 6
    assert moves([0.0] * 7, every_updates=5) == [3, 6]
    assert moves([0.0] * 4, every_updates=1, ema_decay=0.9) == [1, 2, 3, 4]
    assert moves([0.0] * 6, every_updates=8, every_steps=3) == [3, 6]


def test_by_divergence_once_its_window_is_full_since_the_last_move() -> None:
    # means over two steps: .15, .3 -> move after 3; then the window starts anew: (.9, .9) is full after 5
    assert moves([0.1, 0.2, 0.4, 0.9, 0.9, 0.0], kl_above=0.25, kl_window=2) == [3, 5]


def test_with_both_whichever_comes_first() -> None:
    assert moves([0.0, 0.5, 0.0, 0.0, 0.0, 0.0], every_steps=3, kl_above=0.25) == [2, 5]


def test_an_average_alone_moves_every_step_and_with_a_count_every_so_many() -> None:
    assert moves([0.0] * 3, ema_decay=0.9) == [1, 2, 3]
    assert moves([0.0] * 4, ema_decay=0.9, every_steps=2) == [2, 4]
    assert ReferenceSchedule.of(Reference(source="snapshot", update=Update(ema_decay=0.9))).ema_decay == 0.9


def test_a_warm_up_holds_the_first_move_back() -> None:
    assert moves([0.0] * 8, every_steps=2, after_steps=5) == [5, 7]
    assert moves([9.0] * 4, kl_above=0.1, after_steps=3) == [3, 4]


def test_version_age_and_reason_follow_the_moves() -> None:
    schedule = ReferenceSchedule.of(Reference(source="snapshot", update=Update(every_steps=2)))
    seen = []
    for _ in range(3):
        schedule.after_step(0.0, updates=2)
        seen.append((schedule.version, schedule.age_steps, schedule.reason))
    assert seen == [(0, 1, ""), (1, 0, "2 steps since the last move"), (1, 1, "2 steps since the last move")]


def test_the_behaviour_policy_is_a_new_reference_each_step_with_nothing_to_copy() -> None:
    schedule = ReferenceSchedule.of(Reference())
    assert [schedule.after_step(9.0, updates=2) for _ in range(3)] == [False] * 3
    assert (schedule.version, schedule.age_steps) == (3, 0)


def test_the_initial_policy_never_moves() -> None:
    schedule = ReferenceSchedule.of(Reference(source="initial"))
    assert [schedule.after_step(9.0, updates=2) for _ in range(3)] == [False] * 3
    assert (schedule.version, schedule.age_steps) == (0, 3)


@pytest.mark.parametrize("cut", range(9))
def test_a_schedule_saved_at_any_step_goes_on_as_if_it_had_not_been(cut: int) -> None:
    divergences = [0.1, 0.3, 0.2, 0.6, 0.1, 0.4, 0.2, 0.7, 0.1]
    reference = Reference(source="snapshot", update=Update(every_updates=7, kl_above=0.35, kl_window=2, after_steps=2))
    straight, before, after = (ReferenceSchedule.of(reference) for _ in range(3))
    expected = [straight.after_step(value, updates=2) for value in divergences]
    moves = [before.after_step(value, updates=2) for value in divergences[:cut]]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    moves += [after.after_step(value, updates=2) for value in divergences[cut:]]
    assert moves == expected
    assert after.state_dict() == straight.state_dict()


def test_a_schedule_that_says_never_is_refused() -> None:
    with pytest.raises(ValueError, match="is never updated"):
        Update()
    with pytest.raises(ValueError, match="kl_window cannot act"):
        Update(every_steps=2, kl_window=3)
