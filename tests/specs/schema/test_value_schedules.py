"""Values that change over training: their form in a spec, and their values at a step."""

import json
import math

import pytest
from spec_text import GOOD, changed, message, warnings, write

from specs import SpecError, load_experiment, load_study_document, parse_objective
from specs.document import Document, expand
from specs.json_schema import json_schema
from specs.loader import load_document
from specs.schema.experiment import Experiment
from specs.schema.fields import members
from specs.schema.objective import Objective
from specs.schema.schedule import ValueSchedule, at_step, constant, largest, schedules_in

LOW = "{schedule: [[1, 0.1], [5, 0.3]], between: linear}"
SCHEDULED = changed("low: 0.2", f"low: {LOW}").replace("steps: 4", "steps: 8")
PLACE = "    18 |     low: "


def schedule(*points: tuple[int, float], between: str = "step") -> ValueSchedule:
    return ValueSchedule.model_validate({"schedule": points, "between": between})


def test_each_kind_goes_from_point_to_point_in_its_own_way():
    # 0.1 -> 0.3 over four steps; half a cosine wave is at (1 - cos 45°) / 2 = 0.1464466 after one of them
    points = ((2, 0.1), (6, 0.3), (8, 0.2))
    steps = (0, 1, 2, 3, 4, 6, 7, 8, 99)
    held = [schedule(*points).at(step) for step in steps]
    straight = [schedule(*points, between="linear").at(step) for step in steps]
    waved = [schedule(*points, between="cosine").at(step) for step in steps]
    assert held == [0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.2, 0.2]
    assert straight == pytest.approx([0.1, 0.1, 0.1, 0.15, 0.2, 0.3, 0.25, 0.2, 0.2], abs=1e-15)
    assert waved == pytest.approx([0.1, 0.1, 0.1, 0.1 + 0.2 * 0.1464466, 0.2, 0.3, 0.25, 0.2, 0.2], abs=1e-8)


@pytest.mark.parametrize("between", ["step", "linear", "cosine"])
def test_a_schedule_meets_its_points_exactly_and_stays_between_their_values(between: str):
    points = [(1, 0.1), (4, 0.7), (11, 1 / 3), (12, 1e-9), (400, 0.999999)]
    ramp = schedule(*points, between=between)
    assert [ramp.at(step) for step, _ in points] == [value for _, value in points]
    assert all(1e-9 <= ramp.at(step) <= 0.999999 for step in range(500))
    assert largest(ramp) == 0.999999


def test_a_schedule_of_one_point_is_that_number_at_every_step():
    assert {schedule((7, 0.2), between=kind).at(step) for kind in ("step", "linear") for step in (1, 7, 70)} == {0.2}


def test_an_objective_at_a_step_has_numbers_alone_and_stays_itself_where_nothing_changes():
    objective = load_experiment(write(SCHEDULED)).objective
    assert at_step(objective, 3).clip.low == pytest.approx(0.2)
    assert not list(schedules_in(at_step(objective, 3)))
    assert at_step(objective, 3).clip.high == objective.clip.high
    plain = load_experiment(write(GOOD))
    assert plain.at_step(3) is plain
    with pytest.raises(ValueError, match=r"changes over training \(0.1 -> 0.3 \(linear, steps 1, 5\)\): take at_step"):
        constant(objective.clip.low)


WEIGHING = [kind for kind in members(Objective) if "kl_coef" in kind.model_fields]


@pytest.mark.parametrize("kind", WEIGHING, ids=lambda kind: kind.__name__)
def test_every_objective_takes_schedules_where_it_has_the_numbers(kind: type):
    fields: dict[str, object] = {"type": kind.model_fields["type"].default, "kl_coef": {"schedule": [[1, 0], [9, 0.5]]}}
    if "clip" in kind.model_fields:
        type_of_clip = {"type": "dual"} if fields["type"] == "rpg" else {}
        fields["clip"] = {**type_of_clip, "low": {"schedule": [[1, 0.1]]}, "high": {"schedule": [[1, 0.4], [5, 0.1]]}}
    objective = parse_objective(fields)
    assert objective.needs_reference, "its weight is above 0 later"
    first, last = at_step(objective, 1), at_step(objective, 9)
    assert (first.kl_coef, last.kl_coef) == (0, 0.5)
    assert not first.needs_reference
    assert "clip" not in fields or (last.clip.low, last.clip.high) == (0.1, 0.1)


def test_what_is_wrong_with_a_schedule_is_told_at_its_point():
    text = changed("low: 0.2", "low: {schedule: [[1, 0.1], [5, 1.3], [9, 0]]}")
    line = f"{PLACE}{{schedule: [[1, 0.1], [5, 1.3], [9, 0]]}}\n"
    assert message(text) == (
        f"spec.yaml:18: objective.clip.low.schedule.1.1: must be less than 1\n{line}"
        "  given: 1.3    allowed: a number in (0, 1)\n"
        f"spec.yaml:18: objective.clip.low.schedule.2.1: must be greater than 0\n{line}"
        "  given: 0    allowed: a number in (0, 1)\n"
        "2 errors; nothing was run"
    )
    on_lines = "low:\n      schedule:\n      - [4, 0.1]\n      - [4, 0.2]"
    assert message(changed("low: 0.2", on_lines)) == (
        "spec.yaml:21: objective.clip.low.schedule.1.0: steps must increase\n"
        "    21 |       - [4, 0.2]\n"
        "  given: 4 after 4\n"
        "1 error; nothing was run"
    )


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{schedule: []}", "schedule: must have at least 1 item"),
        ("{schedule: [[1]]}", "schedule.0.1: missing"),
        ("{schedule: [[1, 0.2, 3]]}", "schedule.0: must have at most 2 items"),
        ("{schedule: [[1.5, 0.2]]}", "schedule.0.0: must be a whole number"),
        ("{schedule: [[-1, 0.2]]}", "schedule.0.0: must be at least 0"),
        ("{schedule: [[1, wide]]}", "schedule.0.1: must be a number"),
        ("{schedule: [[1, .nan]]}", "schedule.0.1: must be a finite number"),
        ("{schedule: [[1, 0.2]], between: lines}", "between: not one of the values allowed"),
        ("{points: [[1, 0.2]]}", "points: unknown field"),
        ("{between: linear}", "schedule: missing"),
    ],
)
def test_a_schedule_that_says_nothing_clear_is_refused(written: str, told: str):
    assert f"objective.clip.low.{told}" in message(changed("low: 0.2", f"low: {written}"))


def test_the_interval_of_the_reference_is_scheduled_in_whole_steps():
    reference = "reference: {source: snapshot, update: {every_steps: {schedule: [[1, 1], [3, 2.5]]}}}\ntraining:"
    assert (
        "reference.update.every_steps.schedule.1.1: must be a whole number\n"
        "    19 | reference: {source: snapshot, update: {every_steps: {schedule: [[1, 1], [3, 2.5]]}}}\n"
        "  given: 2.5    allowed: a whole number, at least 0\n"
    ) in message(changed("training:", reference))
    assert "is never updated" in message(changed("training:", reference.replace("[1, 1], [3, 2.5]", "[1, 0]")))


def test_a_setting_gives_a_schedule_or_one_value_of_it():
    whole = load_experiment(write(GOOD), ("objective.clip.high={schedule: [[1, 0.5], [3, 0.1]]}",))
    assert whole.objective.clip.high == schedule((1, 0.5), (3, 0.1))
    value = load_experiment(write(SCHEDULED), ("objective.clip.low.schedule.1.1=0.4",))
    assert value.objective.clip.low == schedule((1, 0.1), (5, 0.4), between="linear")
    assert load_experiment(write(SCHEDULED), ("objective.clip.low=0.3",)).objective.clip.low == 0.3


def test_a_path_into_a_schedule_that_is_not_there_is_refused():
    assert message(SCHEDULED, "objective.clip.low.schedule.2.1=0.4").startswith(
        "--set objective.clip.low.schedule.2.1=0.4: objective.clip.low.schedule.2: no such item\n  allowed: 0 to 1\n"
    )
    assert message(GOOD, "objective.clip.low.schedule.1.1=0.4").startswith(
        "--set objective.clip.low.schedule.1.1=0.4: objective.clip.low.schedule.1: no such item\n"
        "  allowed: none: there is no list\n"
        "  hint: give the list first\n"
    )


def test_a_matrix_varies_one_value_of_a_schedule():
    text = SCHEDULED + "matrix: {product: {objective.clip.low.schedule.1.1: [0.2, 0.4]}}\n"
    document = load_document(write(text))
    assert [cell.experiment.objective.clip.low.at(5) for cell in expand(document)] == [0.2, 0.4]


STUDY = """\
name: pace
experiment: base.yaml
parameters:
  objective.clip.low.schedule.1.1: {float: [0.05, 0.4]}
  objective.clip.low.schedule.1.0: {int: [2, 8]}
goal: {dataset: held_out, metric: mean@8}
trials: 8
"""


def test_a_study_searches_inside_a_schedule():
    write(SCHEDULED, "base.yaml")
    document = load_study_document(write(STUDY))
    trial = document.trial({"objective.clip.low.schedule.1.1": 0.2, "objective.clip.low.schedule.1.0": 4})
    assert trial.experiment.objective.clip.low == schedule((1, 0.1), (4, 0.2), between="linear")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[0.05, 0.4]", "[0.05, 1.4]", "spec.yaml:4: parameters[objective.clip.low.schedule.1.1]: must be less than 1"),
        ("[2, 8]", "[1, 8]", "spec.yaml:5: parameters[objective.clip.low.schedule.1.0]: steps must increase"),
        ("schedule.1.1", "schedule.3.1", "spec.yaml:4: parameters[objective.clip.low.schedule.3.1]: no such item"),
        ("low.schedule.1.1", "low.schedul.1.1", "unknown field"),
    ],
)
def test_a_study_of_values_that_a_schedule_cannot_take_is_refused(old: str, new: str, told: str):
    write(SCHEDULED, "base.yaml")
    with pytest.raises(SpecError) as refused:
        load_study_document(write(STUDY.replace(old, new)))
    assert told in str(refused.value)


def test_a_file_that_extends_another_puts_a_schedule_for_its_number_and_the_other_way_round():
    write(GOOD, "plain.yaml")
    over = f"extends: plain.yaml\nobjective: {{clip: {{low: {LOW}}}}}\n"
    assert load_experiment(write(over, "over.yaml")).objective.clip.low.at(5) == 0.3
    back = "extends: over.yaml\nobjective: {clip: {low: 0.25}}\n"
    assert load_experiment(write(back, "back.yaml")).objective.clip.low == 0.25


def test_a_schedule_comes_back_from_what_a_run_keeps():
    document = load_document(write(SCHEDULED))
    assert Document.from_json(json.loads(json.dumps(document.to_json()))) == document
    experiment = document.experiment
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_a_number_is_written_and_identified_as_ever():
    objective = load_experiment(write(GOOD)).objective
    assert objective.identity()["clip"] == json.loads(objective.model_dump_json())["clip"]
    assert objective.identity()["clip"]["low"] == 0.2
    scheduled = load_experiment(write(SCHEDULED)).objective.identity()["clip"]["low"]
    assert scheduled == {"schedule": [[1, 0.1], [5, 0.3]], "between": "linear"}


def test_counting_updates_leaves_the_fingerprint_of_other_references_alone():
    text = changed("training:", "reference: {source: snapshot, update: {every_steps: 2}}\ntraining:")
    assert "every_updates" not in load_experiment(write(text)).reference.identity()["update"]
    by_updates = load_experiment(write(text.replace("every_steps", "every_updates")))
    assert by_updates.reference.identity()["update"]["every_updates"] == 2


def test_knobs_are_weighed_by_the_largest_value_that_a_schedule_has():
    none = changed("kl_coef: 1e-2", "kl_coef: {schedule: [[1, 0], [3, 0]]}")
    assert "objective.kl_coef: the divergence has no effect" in warnings(none)
    small = changed("kl_coef: 1e-2", "kl_coef: {schedule: [[1, 0], [3, 1e-3]]}")
    assert "given: 0.001 from the behaviour policy, which changes every step" in warnings(small)
    assert "divergence" not in warnings(changed("kl_coef: 1e-2", "kl_coef: {schedule: [[1, 0], [3, 1e-2]]}"))
    rival = GOOD.replace("type: rpg", "type: grpo").replace("    type: dual\n", "")
    held = load_experiment(write(rival.replace("kl_coef: 1e-2", "kl_coef: {schedule: [[1, 0], [3, 1]]}")))
    assert held.reference.source == "initial", "as grpo was published"
    assert load_experiment(write(rival.replace("1e-2", "{schedule: [[1, 0]]}"))).reference.source == "behaviour"


def test_a_schedule_that_outlasts_training_is_warned_of():
    assert warnings(changed("low: 0.2", f"low: {LOW}")) == (
        "spec.yaml:18: objective.clip.low.schedule.1.0: training ends before the schedule does\n"
        f"{PLACE}{LOW}\n"
        "  given: step 5, of 4\n"
        "  hint: raise training.steps, or let the schedule end earlier\n"
        "1 warning"
    )
    assert "training ends" not in warnings(SCHEDULED)


@pytest.mark.parametrize(
    ("update", "moves"),
    [
        ("every_steps: {schedule: [[1, 9], [3, 3]]}", True),
        ("every_steps: {schedule: [[1, 9], [3, 4]]}", False),
        ("every_updates: 6", True),
        ("every_updates: 7", False),
    ],
)
def test_a_reference_that_no_schedule_or_count_moves_in_time_is_warned_of(update: str, moves: bool):
    # 4 steps of 2 updates; a move after the last one would be for nothing.
    text = changed("training:", f"reference: {{source: snapshot, update: {{{update}}}}}\ntraining:")
    assert ("the reference is never updated" in warnings(text)) != moves


def test_the_json_schema_takes_a_number_or_a_schedule():
    definitions = json_schema("experiment")["$defs"]
    low = definitions["DualClip"]["properties"]["low"]["oneOf"]
    assert low[0] == {"exclusiveMaximum": 1, "exclusiveMinimum": 0, "type": "number"}
    assert low[1] == {"$ref": "#/$defs/ValueSchedule"}
    assert definitions["ValueSchedule"]["required"] == ["schedule"]
    assert math.isclose(definitions["DualClip"]["properties"]["low"]["default"], 0.2)
