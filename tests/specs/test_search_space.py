"""A study's search space: conditions, candidates tried before anything runs, the experiment's own values."""

import json
import time

import pytest
from spec_text import GOOD, message, warnings, write

from specs import load_study_document
from specs.errors import SpecError
from specs.study_space import bounds, candidates, combinations, is_active, num_combinations

HEAD = "name: clip\nexperiment: base.yaml\nparameters:\n"
TAIL = "goal: {dataset: held_out, metric: mean@8}\nsampler: {startup_trials: 2}\ntrials: 8\n"
REFERENCES = """\
  reference:
    cases:
      behaviour: {source: behaviour}
      snapshot: {source: snapshot, update: {every_steps: 2}}
      initial: {source: initial}
"""


@pytest.fixture(autouse=True)
def _base():
    write(GOOD, "base.yaml")


def study(parameters: str, tail: str = TAIL) -> str:
    return HEAD + parameters + tail


def space_of(parameters: str):
    return load_study_document(write(study(parameters))).study.parameters


def test_a_condition_on_what_is_not_searched_is_told():
    text = study(
        "  training.epochs: {int: [1, 2], when: {objective.clip.lo: 0.1}}\n  objective.clip.low: {choice: [0.1, 0.2]}\n"
    )
    assert message(text) == (
        "spec.yaml:4: parameters[training.epochs].when[objective.clip.lo]: is not searched\n"
        "    4 |   training.epochs: {int: [1, 2], when: {objective.clip.lo: 0.1}}\n"
        "  allowed: objective.clip.low\n"
        "  hint: did you mean `objective.clip.low`?\n"
        "1 error; nothing was run"
    )


def test_a_condition_of_a_parameter_on_itself_is_told():
    text = study(
        "  training.epochs: {int: [1, 2], when: {training.epochs: 1}}\n  training.group_size: {choice: [2, 4]}\n"
    )
    assert message(text).startswith(
        "spec.yaml:4: parameters[training.epochs].when[training.epochs]: depends on itself\n"
    )
    assert "allowed: training.group_size\n" in message(text)


def test_conditions_in_a_circle_are_told_from_the_first_of_them():
    text = study(
        "  training.epochs: {int: [1, 3], when: {training.group_size: 2}}\n"
        "  objective.clip.low: {choice: [0.1, 0.2], when: {training.epochs: 2}}\n"
        "  training.group_size: {choice: [2, 4], when: {objective.clip.low: 0.1}}\n"
    )
    assert message(text) == (
        "spec.yaml:4: parameters[training.epochs].when[training.group_size]: conditions in a circle\n"
        "    4 |   training.epochs: {int: [1, 3], when: {training.group_size: 2}}\n"
        "  given: training.epochs on training.group_size on objective.clip.low on training.epochs\n"
        "  hint: leave one of these conditions out\n"
        "1 error; nothing was run"
    )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (
            "reference: snapshots",
            ".when.reference: reference cannot be this\n    9 |   training.epochs: {int: [1, 2], "
            "when: {reference: snapshots}}\n"
            '  given: "snapshots"    allowed: behaviour, snapshot, initial\n  hint: did you mean `snapshot`?\n',
        ),
        ("reference: [initial, none]", ".when.reference.1: reference cannot be this\n"),
        ("reference: {source: initial}", "hint: a condition on `cases` lists names of cases\n"),
        ("reference: []", ".when.reference: can never hold\n"),
        ("training.group_size: 5", "given: 5    allowed: 2 to 6 in steps of 2\n"),
        ("training.group_size: 8", "training.group_size cannot be this\n"),
        ("training.group_size: true", "training.group_size cannot be this\n"),
        (
            "objective.clip.low: 0.2",
            "objective.clip.low can be any number, so it is almost never this one\n"
            "    9 |   training.epochs: {int: [1, 2], "
            "when: {objective.clip.low: 0.2}}\n"
            "  given: 0.2    allowed: 0.1 to 0.3\n  hint: give objective.clip.low a step, or make it a choice\n",
        ),
    ],
)
def test_a_condition_that_can_never_hold_is_told(condition, expected):
    text = study(
        f"{REFERENCES}  training.epochs: {{int: [1, 2], when: {{{condition}}}}}\n"
        "  training.group_size: {int: [2, 6], step: 2}\n  objective.clip.low: {float: [0.1, 0.3]}\n"
    )
    assert expected in message(text)
    assert message(text).startswith("spec.yaml:9: parameters[training.epochs].when")


def test_conditions_that_contradict_those_of_a_parent_are_told():
    text = study(
        f"{REFERENCES}  reference.update.every_steps: {{choice: [1, 2], when: {{reference: snapshot}}}}\n"
        "  training.epochs: {int: [1, 2], when: {reference: [initial, behaviour], reference.update.every_steps: 2}}\n"
        "  objective.clip.low: {choice: [0.1, 0.2], when: {training.epochs: 2}}\n"
    )
    assert message(text) == (
        "spec.yaml:10: parameters[training.epochs].when: no value of reference fits all conditions\n"
        "    10 |   training.epochs: {int: [1, 2], when: {reference: [initial, behaviour], "
        "reference.update.every_steps: 2}}\n"
        "  given: initial or behaviour here, snapshot for reference.update.every_steps"
        "    allowed: behaviour, snapshot, initial\n"
        "  hint: a parameter is searched only while those that it depends on are\n"
        "1 error; nothing was run"
    )


@pytest.mark.parametrize(
    ("searched", "expected"),
    [
        ("{float: [0.5, 0.1]}", ": the lower end must come first\n"),
        ("{float: [0.1, 0.1]}", "hint: a parameter with one value belongs under overrides\n"),
        ("{float: [0.1, 0.3], step: 2}", ".step: the step leaves one candidate\n"),
        ("{float: [0.1, 0.3], step: 2}", "given: step 2 over [0.1, 0.3]    allowed: at most 0.2\n"),
        ("{float: [0.1, 0.3], step: 1e-300}", ".step: the step is too small for its range\n"),
        ("{float: [0, 0.3], log: true}", ": a logarithmic range must be above 0\n"),
        ("{float: [0.1, 0.3], step: 0.1, log: true}", ": a logarithmic range takes no step\n"),
        ("{int: [1, 3], step: 4}", ".step: the step leaves one candidate\n"),
        ("{int: [0, 3], log: true}", ": a logarithmic range must be above 0\n"),
        ("{int: [1, 3], step: 2, log: true}", ": a logarithmic range takes no step\n"),
        ("{int: [1, 100000000000000000000]}", ".int.1: must be at most 9007199254740992\n"),
        ("{choice: [0.1, 0.2, 0.1]}", ".choice.2: the candidate is given twice\n"),
        ("{choice: [0.1, 1, 1.0]}", ".choice.2: the candidate is given twice\n"),
        ("{cases: {a: 0.1, b: 0.2, c: 0.2}}", ".cases.c: the candidate is given twice\n"),
        ("{choice: [0.1]}", ".choice: must have at least 2 items\n"),
        ("{float: [0.1, 0.3], choice: [0.1, 0.2]}", ".choice: unknown field\n"),
    ],
)
def test_a_range_that_is_none_is_told(searched, expected):
    text = message(study(f"  objective.clip.low: {searched}\n"))
    assert text.startswith("spec.yaml:4: parameters[objective.clip.low]")
    assert expected in text


def test_a_step_that_misses_the_upper_end_is_warned_of_and_ends_below_it():
    text = "  training.group_size: {int: [2, 7], step: 2}\n  objective.clip.low: {float: [0.1, 0.45], step: 0.1}\n"
    assert warnings(study(text)) == (
        "spec.yaml:4: parameters[training.group_size]: the upper end is never tried\n"
        "    4 |   training.group_size: {int: [2, 7], step: 2}\n"
        "  given: 7, in steps of 2 from 2\n"
        "  hint: the highest candidate is 6\n"
        "spec.yaml:5: parameters[objective.clip.low]: the upper end is never tried\n"
        "    5 |   objective.clip.low: {float: [0.1, 0.45], step: 0.1}\n"
        "  given: 0.45, in steps of 0.1 from 0.1\n"
        "  hint: the highest candidate is 0.4\n"
        "2 warnings"
    )
    space = space_of(text)
    assert bounds(space["training.group_size"]) == (2, 6)
    assert list(candidates(space["objective.clip.low"])) == [0.1, 0.2, 0.3, 0.4]


def test_a_step_as_wide_as_its_range_leaves_both_ends():
    space = space_of("  objective.clip.low: {float: [0.8, 0.9], step: 0.1}\n")  # 0.9 - 0.8 is below 0.1
    assert list(candidates(space["objective.clip.low"])) == [0.8, 0.9]


def test_a_float_range_of_a_whole_number_is_told():
    assert message(study("  training.epochs: {float: [1, 3]}\n")) == (
        "spec.yaml:4: parameters[training.epochs]: must be a whole number\n"
        "    4 |   training.epochs: {float: [1, 3]}\n"
        "  given: 1.763932    allowed: a whole number, at least 1\n"
        "  hint: search it as {int: [low, high]}\n"
        "1 error; nothing was run"
    )
    load_study_document(write(study("  training.epochs: {float: [1, 3], step: 1}\n")))


def test_numbers_for_a_field_of_words_are_told_at_that_parameter_alone():
    text = message(study("  training.epochs: {int: [1, 3]}\n  objective.divergence: {float: [0, 1]}\n"))
    assert text.startswith("spec.yaml:5: parameters[objective.divergence]: not one of the values allowed\n")
    assert text.endswith("1 error; nothing was run")


def test_what_is_wrong_inside_a_case_is_told_at_its_line():
    text = study(REFERENCES.replace("every_steps: 2", "every_stps: 2").replace("source: initial", "source: initials"))
    assert message(text) == (
        "spec.yaml:7: parameters.reference.cases.snapshot.update.every_stps: unknown field\n"
        "    7 |       snapshot: {source: snapshot, update: {every_stps: 2}}\n"
        "  allowed: after_steps, ema_decay, every_steps, every_updates, kl_above, kl_window, plateau, reset_optimizer\n"
        "  hint: did you mean `every_steps`?\n"
        "spec.yaml:8: parameters.reference.cases.initial.source: not one of the values allowed\n"
        "    8 |       initial: {source: initials}\n"
        '  given: "initials"    allowed: behaviour, snapshot, initial, model\n'
        "  hint: did you mean `initial`?\n"
        "2 errors; nothing was run"
    )


def test_each_choice_that_cannot_be_is_told_at_its_line():
    text = study("  objective.divergence:\n    choice:\n      - reverse\n      - revers\n      - none\n      - back\n")
    assert "spec.yaml:7: parameters[objective.divergence].choice.3" not in message(text)
    assert "spec.yaml:7: parameters[objective.divergence].choice.1: not one of the values allowed" in message(text)
    assert "spec.yaml:9: parameters[objective.divergence].choice.3: not one of the values allowed" in message(text)


def test_a_parameter_is_tried_only_where_it_is_searched():
    conditional = "  reference.update.every_steps: {int: [1, 3], when: {reference: snapshot}}\n"
    load_study_document(write(study(REFERENCES + conditional)))
    text = message(study(REFERENCES + "  reference.update.every_steps: {int: [1, 3]}\n"))
    assert text.startswith(
        "spec.yaml:9: parameters[reference.update.every_steps]: reference.update: a reference with `source:"
        " behaviour` is never updated (with reference=behaviour)\n"
        "    9 |   reference.update.every_steps: {int: [1, 3]}\n"
        "  hint: search it only while it has an effect: when: {reference: [...]}\n"
    )


def test_a_parameter_that_the_experiment_itself_leaves_out_is_tried_too():
    text = study(REFERENCES + "  reference.update.every_steps: {int: [-1, 3], when: {reference: snapshot}}\n")
    assert message(text).startswith(
        "spec.yaml:9: parameters[reference.update.every_steps]: must be at least 0\n"
        "    9 |   reference.update.every_steps: {int: [-1, 3], when: {reference: snapshot}}\n"
        "  given: -1"
    )


def test_a_point_of_a_schedule_that_a_case_gives_is_searched():
    ramp = "  objective.clip.low: {cases: {flat: 0.2, ramp: {schedule: [[1, 0.2], [4, 0.4]], between: linear}}}\n"
    point = "  objective.clip.low.schedule.1.1: {float: [0.2, 0.5], when: {objective.clip.low: ramp}}\n"
    document = load_study_document(write(study(ramp + point)))
    assert document.warnings == ()
    assert document.own_params() == ({"objective.clip.low": "flat"}, [])
    assert message(study(ramp + point.replace(", when: {objective.clip.low: ramp}", ""))).startswith(
        "spec.yaml:5: parameters[objective.clip.low.schedule.1.1]: objective.clip.low.schedule.1: no such item "
        "(with objective.clip.low=flat)\n"
        "    5 |   objective.clip.low.schedule.1.1: {float: [0.2, 0.5]}\n"
        "  allowed: none: there is no list\n"
        "  hint: search it only while it has an effect: when: {objective.clip.low: [...]}\n"
    )
    assert "schedule.2: no such item" in message(study(ramp + point.replace("schedule.1.1", "schedule.2.1")))


def test_every_value_of_a_short_range_is_tried():
    text = message(study("  training.minibatches: {int: [1, 4]}\n"))
    assert text.startswith("spec.yaml:4: parameters[training.minibatches]: the batch does not divide evenly\n")
    assert "4 x 4 responses in 3 parts" in text


def test_a_value_that_spoils_another_field_is_told_at_the_value():
    five = "overrides: {training.prompts_per_step: 5}\n"
    assert message(study("  training.group_size: {choice: [4, 3]}\n") + five) == (
        "spec.yaml:4: parameters[training.group_size].choice.1: training.minibatches: the batch does not divide evenly "
        "(with 3)\n"
        "    4 |   training.group_size: {choice: [4, 3]}\n"
        "  given: 5 x 3 responses in 2 parts    allowed: 1, 3, 5, 15\n"
        "  hint: minibatches must divide prompts_per_step x group_size\n"
        "1 error; nothing was run"
    )


def test_values_that_spoil_a_field_only_together_are_told_with_their_parameters():
    text = study("  training.group_size: {choice: [4, 3]}\n  training.prompts_per_step: {choice: [4, 5]}\n")
    assert message(text) == (
        "spec.yaml:3: parameters: training.minibatches: the batch does not divide evenly "
        "(with training.group_size=3, training.prompts_per_step=5)\n"
        "    3 | parameters:\n"
        "  given: 5 x 3 responses in 2 parts    allowed: 1, 3, 5, 15\n"
        "  hint: minibatches must divide prompts_per_step x group_size\n"
        "1 error; nothing was run"
    )


def test_an_override_that_cannot_be_is_told_at_its_line():
    text = study("  objective.clip.low: {float: [0.1, 0.3]}\n") + (
        "overrides:\n  training.steps: 3\n  training.minibatches: 3\n  objective.clip: {type: dual, lo: 0.2}\n"
    )
    assert "spec.yaml:11: overrides[objective.clip].lo: unknown field\n    11 |   objective.clip: " in message(text)
    divided = message(text.replace("lo: 0.2", "low: 0.2"))
    assert divided.startswith("spec.yaml:10: overrides[training.minibatches]: the batch does not divide evenly\n")


def test_an_own_value_outside_its_range_is_warned_of():
    text = study(
        "  objective.clip.low: {float: [0.3, 0.5]}\n  objective.kl_coef: {float: [1e-3, 1e-1], log: true}\n"
        "  reference: {cases: {moves: {source: snapshot, update: {every_steps: 2}}, stays: {source: initial}}}\n"
    )
    assert warnings(text) == (
        "spec.yaml:4: parameters[objective.clip.low]: the experiment's own value is not in the range\n"
        "    4 |   objective.clip.low: {float: [0.3, 0.5]}\n"
        "  given: 0.2    allowed: 0.3 to 0.5\n"
        "  hint: the baseline still uses it; widen the range, or set another value under overrides\n"
        "spec.yaml:6: parameters.reference: the experiment's own value is not in the range\n"
        "    6 |   reference: {cases: {moves: {source: snapshot, update: {every_steps: 2}}, "
        "stays: {source: initial}}}\n"
        '  given: {"source": "behaviour", "path": "", "revision": "main", "update": null}    allowed: moves, stays\n'
        "  hint: the baseline still uses it; widen the range, or set another value under overrides\n"
        "2 warnings"
    )


def test_the_own_values_follow_the_conditions():
    conditional = "  reference.update.every_steps: {int: [1, 3], when: {reference: snapshot}}\n"
    document = load_study_document(write(study(REFERENCES + conditional)))
    assert document.own_params() == ({"reference": "behaviour"}, [])
    # The case has 2; the parameter inside it is searched as well.
    moved = "overrides: {reference: {source: snapshot, update: {every_steps: 3}}}\n"
    document = load_study_document(write(study(REFERENCES + conditional) + moved))
    assert document.own_params() == ({"reference": "snapshot", "reference.update.every_steps": 3}, [])
    assert document.warnings == ()


def test_a_knob_that_acts_in_no_trial_is_warned_of_though_it_is_searched():
    on_policy = "overrides: {training.minibatches: 1}\n"
    text = study("  objective.clip.low: {float: [0.1, 0.3]}\n") + on_policy
    assert "objective.clip: the clip can never fire" in warnings(text)
    # Not where some trial is off policy.
    text = study("  objective.clip.low: {float: [0.1, 0.3]}\n  training.epochs: {int: [1, 2]}\n") + on_policy
    assert warnings(text) == "0 warnings"


def test_a_range_can_be_set_on_the_command_line_and_a_slip_there_names_the_field():
    text = study("  objective.clip.low: {float: [0.1, 0.3]}\n")
    document = load_study_document(write(text), ("parameters.objective.clip.low={float: [0.1, 0.4]}",))
    assert document.study.parameters["objective.clip.low"].float == (0.1, 0.4)
    assert message(text, "parameters.objective.clip.low={flaot: [0.1, 0.4]}").startswith(
        "--set parameters.objective.clip.low={flaot: [0.1, 0.4]}: parameters[objective.clip.low]: of no known form\n"
    )
    assert message(text, "parameters.objective.clip.lw={float: [0.1, 0.4]}").startswith(
        "--set parameters.objective.clip.lw={float: [0.1, 0.4]}: parameters[objective.clip.lw]: unknown field\n"
    )
    assert message(text, "sampler.tpye=gp").startswith("--set sampler.tpye=gp: sampler.tpye: unknown field\n")
    assert message(text, "trials=none").startswith("--set trials=none: trials: must be a whole number\n")


def test_conditions_compare_numbers_by_value():
    space = space_of(
        "  objective.clip.low: {float: [0.1, 0.5], step: 0.1}\n"
        "  training.epochs: {int: [1, 2], when: {objective.clip.low: [0.3]}}\n"
    )
    assert is_active(space["training.epochs"], {"objective.clip.low": 0.1 + 2 * 0.1})  # 0.30000000000000004
    assert not is_active(space["training.epochs"], {"objective.clip.low": 0.2})
    assert not is_active(space["training.epochs"], {})


def test_the_combinations_of_a_conditional_space_are_counted_as_they_are_listed():
    space = space_of(
        f"{REFERENCES}  reference.update.every_steps: {{int: [1, 3], when: {{reference: snapshot}}}}\n"
        "  training.group_size: {int: [2, 8], step: 2}\n"
        "  training.epochs: {int: [1, 2], when: {training.group_size: [2, 8]}}\n"
    )
    listed = list(combinations(space))
    # References 1 + 3 + 1; group sizes with 2 + 1 + 1 + 2 numbers of epochs.
    assert len(listed) == num_combinations(space) == 5 * 6
    assert len({json.dumps(params) for params in listed}) == len(listed)
    assert listed[0] == {"reference": "behaviour", "training.group_size": 2, "training.epochs": 1}
    assert all(("reference.update.every_steps" in params) == (params["reference"] == "snapshot") for params in listed)


def test_ten_parameters_are_tried_in_less_than_a_second():
    fields = [
        "objective.clip.low: {float: [0.1, 0.4]}",
        "objective.clip.high: {float: [0.1, 1.0], log: true}",
        "objective.kl_coef: {float: [1e-2, 1e-1], log: true}",
        "objective.divergence: {choice: [forward, reverse, unnormalized_forward, unnormalized_reverse]}",
        "training.epochs: {int: [1, 16]}",
        "training.group_size: {int: [2, 32], step: 2}",
        "training.prompts_per_step: {int: [4, 64], step: 4}",
        "training.optimizer.learning_rate: {float: [1e-7, 1e-4], log: true}",
        "training.optimizer.max_grad_norm: {float: [0.1, 2.0], step: 0.1}",
        "rollout.temperature: {float: [0.6, 1.2], step: 0.1}",
    ]
    path = write(study("".join(f"  {field}\n" for field in fields)))
    started = time.process_time()
    load_study_document(path)
    assert time.process_time() - started < 1


def test_a_trial_with_candidates_of_every_kind_is_the_experiment():
    document = load_study_document(
        write(study(REFERENCES + "  reference.update.every_steps: {int: [1, 3], when: {reference: snapshot}}\n"))
    )
    trial = document.trial(
        {"reference": {"source": "snapshot", "update": {"every_steps": 2}}, "reference.update.every_steps": 3}
    )
    assert trial.experiment.reference.update.every_steps == 3
    with pytest.raises(SpecError, match="is never updated"):
        document.trial({"reference": {"source": "initial"}, "reference.update.every_steps": 3})
