"""Studies: read with their experiment, each range tried at its ends."""

import json

import pytest
from spec_text import GOOD, message, write

from specs import SpecError, StudyDocument, load_study, load_study_document

STUDY = """\
name: clip
experiment: base.yaml
overrides: {training.steps: 3}
parameters:
  objective.clip.low: {float: [0.05, 0.4]}
  objective.clip.high: {float: [0.01, 1.0], log: true}
  training.minibatches: {int: [2, 8], step: 2}
  objective.divergence: {choice: [reverse, unnormalized_reverse]}
goal: {dataset: held_out, metric: mean@8}
trials: 8
"""


@pytest.fixture(autouse=True)
def _base():
    write(GOOD, "base.yaml")


def changed(old: str, new: str) -> str:
    assert STUDY.count(old) == 1, old
    return STUDY.replace(old, new)


SMALL = changed("  training.minibatches: {int: [2, 8], step: 2}\n", "")


def test_a_study_is_read_with_its_experiment():
    document = load_study_document(write(SMALL), ("trials=2",))
    assert document.study.trials == 2
    assert document.experiment.experiment.training.steps == 3
    low = document.study.parameters["objective.clip.low"]
    assert (low.float, low.log) == ((0.05, 0.4), False)


def test_a_trial_is_the_experiment_with_its_values():
    trial = load_study_document(write(SMALL)).trial({"objective.clip.low": 0.3, "objective.divergence": "reverse"})
    objective = trial.experiment.objective
    assert (objective.clip.low, objective.divergence, objective.kl_coef) == (0.3, "reverse", 0.01)
    assert trial.experiment.training.steps == 3


def test_a_trial_that_cannot_be_is_refused():
    with pytest.raises(SpecError, match=r"objective\.clip\.low: must be less than 1"):
        load_study_document(write(SMALL)).trial({"objective.clip.low": 3.0})


def test_a_frozen_study_comes_back_the_same():
    document = load_study_document(write(SMALL))
    assert StudyDocument.from_json(json.loads(json.dumps(document.to_json()))) == document
    assert load_study("spec.yaml") == document.study


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("[0.1, 0.3]", "write {float: [0.1, 0.3]} for all values in between, {choice: [0.1, 0.3]} for these"),
        ("{min: 1, max: 3}", "write {int: [1, 3]} for all values in between, {choice: [1, 3]} for these values only"),
        ("{float: {low: 0.1, high: 0.3}}", "write {float: [0.1, 0.3]} for all values in between, "),
        ("{distribution: log_uniform_values, min: 0.01, max: 0.3}", "write {float: [0.01, 0.3], log: true} for "),
        ("{loguniform: [0.01, 0.3]}", "write {float: [0.01, 0.3], log: true} for all values in between, "),
        ("{values: [0.1, 0.2, 0.3]}", "write {choice: [0.1, 0.2, 0.3]}\n"),
        ("[a, b]", 'write {choice: ["a", "b"]}\n'),
        ("0.2", "a parameter with one value belongs under overrides\n"),
        ("{flaot: [0.1, 0.3]}", "did you mean `float`?\n"),
        ("{float: [0.1, 0.2, 0.3]}", "write {choice: [0.1, 0.2, 0.3]}\n"),
        ("{float: [0.1, 0.3, log]}", "write {float: [0.1, 0.3], log: true} for all values in between, "),
        ("{float: 0.2}", "a parameter with one value belongs under overrides\n"),
        ("{choice: {a: 0.1, b: 0.2}}", 'write {cases: {"a": 0.1, "b": 0.2}}\n'),
        ("0.1..0.3", "write {float: [0.1, 0.3]} for all values in between, "),
        ("0.1 to 0.3", "write {float: [0.1, 0.3]} for all values in between, "),
    ],
)
def test_a_range_in_the_wrong_form_gets_the_right_one(written, hint):
    said = message(changed("{float: [0.05, 0.4]}", written))
    assert said.startswith("spec.yaml:5: parameters[objective.clip.low]: of no known form\n")
    assert f"  hint: {hint}" in said


def test_a_field_of_the_experiment_in_a_study_gets_its_path():
    assert message(changed("trials: 8", "trials: 8\nlr: 1e-5")).splitlines()[-2] == (
        "  hint: a field of the study's experiment: write it under `overrides`, as "
        "overrides.training.optimizer.learning_rate"
    )


def test_a_range_whose_end_cannot_be_is_told_at_the_parameter():
    assert message(changed("[0.05, 0.4]", "[0.05, 1.4]")).startswith(
        "spec.yaml:5: parameters[objective.clip.low]: must be less than 1\n"
        "    5 |   objective.clip.low: {float: [0.05, 1.4]}\n"
        "  given: 1.4    allowed: a number in (0, 1)\n"
    )
    assert message(changed("[2, 8], step: 2", "[2, 3]")).startswith(
        "spec.yaml:7: parameters[training.minibatches]: the batch does not divide evenly\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  objective.clip.low:", "  objective.clip.lo:", "parameters[objective.clip.lo]: unknown field"),
        ("training.steps: 3", "training.stps: 3", "overrides[training.stps]: unknown field"),
        (
            "  objective.clip.low: {float: [0.05, 0.4]}",
            "  seeds: {choice: [[0], [1]]}",
            "parameters.seeds: cannot be searched",
        ),
        (
            "  objective.clip.low: {float: [0.05, 0.4]}",
            "  evaluation.temperature: {float: [0.5, 1.0]}",
            "hint: trials would be judged by different measures",
        ),
        (
            "  objective.clip.low: {float: [0.05, 0.4]}",
            "  resources.threads: {int: [1, 4]}",
            "hint: it sets where and how work runs, and cannot change a result",
        ),
        ("float: [0.05, 0.4]", "flaot: [0.05, 0.4]", "parameters[objective.clip.low]: of no known form"),
        ("[0.05, 0.4]", "[0.5, 0.4]", "parameters[objective.clip.low]: the lower end must come first"),
        ("[0.01, 1.0]", "[0, 1.0]", "parameters[objective.clip.high]: a logarithmic range must be above 0"),
        ("[0.05, 0.4]", "[0.05]", "hint: a parameter with one value belongs under overrides"),
        ("[2, 8], step: 2", "[2, 8.5]", "parameters[training.minibatches].int.1: must be a whole number"),
        ("held_out", "heldout", "goal.dataset: no such evaluation set"),
        ("mean@8", "mean@9", "goal.metric: more samples than an evaluation has"),
        ("mean@8", "pass@3", "goal.metric: is not a measure of an evaluation"),
        ("mean@8", "best@8", "goal.metric: no such measure"),
        ("base.yaml", "bse.yaml", "no such file"),
        ("trials: 8", "trials: 0", "trials: must be at least 1"),
    ],
)
def test_what_a_study_may_not_say(old, new, said):
    assert said in message(changed(old, new))


def test_a_field_of_the_experiment_is_sent_to_the_overrides():
    hint = "hint: a field of the study's experiment: write it under `overrides`, as overrides.training"
    assert hint in message(SMALL, "training.steps=3")
    assert hint in message(SMALL + "training: {steps: 3}\n")
    assert "hint" not in message(SMALL, "tranig=3")


def test_an_experiment_with_a_matrix_is_refused_until_it_is_taken_away():
    write(GOOD + "matrix: {product: {training.epochs: [1, 2]}}\n", "base.yaml")
    assert "experiment: the experiment has a matrix" in message(SMALL)
    load_study(write(SMALL.replace("training.steps: 3", "matrix: null")))


def test_the_experiment_is_found_beside_the_study(tmp_path):
    (tmp_path / "studies").mkdir()
    path = write(SMALL.replace("base.yaml", "../base.yaml"), "studies/clip.yaml")
    assert load_study(path).experiment == str(tmp_path / "base.yaml")


def test_a_parameter_beyond_the_end_of_a_list_is_refused():
    said = message(changed("objective.clip.low:", "data.train.5.size:").replace("[0.05, 0.4]", "[1, 2]"))
    assert "parameters[data.train.5.size]: no such item" in said
