"""Settings of a study's trials: goals, constraints, sampler, pruner, confirmation, and settings without effect."""

import importlib.util

import pytest
from spec_text import GOOD, message, warnings, write

from pipelines.studies.conditions import conditions
from specs import load_study_document

STUDY = """\
name: clip
experiment: base.yaml
overrides: {training.steps: 20, seeds: [0, 1, 2]}
parameters:
  objective.clip.low: {float: [0.1, 0.4]}
  training.epochs: {int: [1, 2]}
"""
GOAL = "goal: {dataset: held_out, metric: mean@8}\n"
GOALS = "goals: [{dataset: held_out, metric: mean@8}, {metric: kl/reverse, direction: minimize}]\n"
TRIALS = "trials: 20\n"
ASHA = "pruner: {type: asha, rungs: [5, 10]}\n"


@pytest.fixture(autouse=True)
def _base():
    write(GOOD, "base.yaml")


def without_warning(text: str) -> bool:
    return load_study_document(write(text)).warnings == ()


def test_a_study_with_everything_is_read_without_a_word():
    assert without_warning(
        STUDY
        + GOAL
        + TRIALS
        + ASHA
        + "constraints: [{metric: kl/reverse, max: 0.1}, {metric: truncated_fraction, max: 0.5}]\n"
        "sampler: {type: tpe, seed: 3, startup_trials: 6}\nseeds_per_trial: 1\nparallel: 2\n"
        "budget: {tokens: 1e7, gpu_hours: 2, hours: 8}\nconfirm: {candidates: 2, seeds: 5, dataset: held_out}\n"
        "warm_start: {studies: [earlier], runs: [clip-s0-1a2b3c4d]}\non_failure: stop\n"
    )
    assert without_warning(STUDY + GOALS + TRIALS + "sampler: {type: nsga2}\n")


def test_the_points_of_a_schedule_are_searched_as_its_steps_and_values():
    schedule = "objective.kl_coef: {schedule: [[1, 0.03], [20, 0.03]], between: linear}"
    points = (
        "  objective.kl_coef.schedule.0.1: {float: [0.01, 0.1]}\n  objective.kl_coef.schedule.1.0: {int: [10, 20]}\n"
    )
    text = STUDY.replace("overrides: {", f"overrides: {{{schedule}, ").replace(
        "  training.epochs: {int: [1, 2]}\n", points
    )
    document = load_study_document(write(text + GOAL + TRIALS))
    assert document.warnings == ()
    trial = document.trial({"objective.kl_coef.schedule.0.1": 0.05, "objective.kl_coef.schedule.1.0": 12})
    assert trial.experiment.objective.kl_coef.schedule == ((1, 0.05), (12, 0.03))


def test_a_population_is_answered_with_what_to_search_instead():
    text = message(STUDY + GOAL + TRIALS + "sampler: {type: population}\n")
    assert 'given: "population"    allowed: auto, noisy_gp, tpe, gp, cma, nsga2, qmc, random, grid\n' in text
    assert "hint: search the points of a schedule, objective.kl_coef.schedule.1.1: {float: [...]}" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "spec.yaml:1: goal: missing\n"
            "  allowed: the fields dataset, metric, direction, over_seeds\n"
            "  hint: give the measure that ranks trials as goal, or several as goals\n",
        ),
        (
            GOAL + GOALS,
            "spec.yaml:8: goals: conflicts with goal\n"
            "    8 | goals: [{dataset: held_out, metric: mean@8}, {metric: kl/reverse, direction: minimize}]\n"
            "  hint: move the goal into goals, or leave goals out\n",
        ),
        (
            "goal: {metric: mean@8}\n",
            "spec.yaml:7: goal.dataset: missing\n    7 | goal: {metric: mean@8}\n"
            "  allowed: held_out\n  hint: say on which evaluation set\n",
        ),
        (
            "goals:\n  - {dataset: held_out, metric: mean@8}\n"
            "  - {dataset: held_out, metric: mean@8, direction: minimize}\n",
            "spec.yaml:9: goals.1.metric: is a goal already\n"
            "    9 |   - {dataset: held_out, metric: mean@8, direction: minimize}\n"
            "  given: mean@8 on held_out\n  hint: keep one of the two\n",
        ),
        (
            "goals:\n  - {dataset: held_out, metric: mean@8}\n  - {metric: kl/revers}\n",
            "spec.yaml:9: goals.1.metric: no such measure\n    9 |   - {metric: kl/revers}\n"
            '  given: "kl/revers"    allowed: mean@k, pass@k, maj@k, score@k, accuracy,'
            " bits_per_byte or a metric of training"
            " (docs/metrics.md)\n"
            "  hint: did you mean `kl/reverse`?\n",
        ),
        (
            "goal: {metric: trained_fraction}\n",
            "spec.yaml:7: goal.metric: is recorded only with training.skip_zero_advantage\n"
            "    7 | goal: {metric: trained_fraction}\n"
            "  given: trained_fraction\n  hint: set it under overrides: training.skip_zero_advantage\n",
        ),
        (
            "goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\nseeds_per_trial: 1\n",
            "spec.yaml:7: goal.over_seeds: one seed has no interval over seeds\n"
            "    7 | goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\n"
            "  given: lower_bound with 1 seed per trial    allowed: mean\n"
            "  hint: give the trials 5 seeds: overrides: {seeds: [0, 1, 2, 3, 4]}, seeds_per_trial: 5\n",
        ),
        (
            "goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\nseeds_per_trial: 2\n",
            "spec.yaml:7: goal.over_seeds: the interval of two seeds is mostly noise: a search by it"
            " finds worse values than one by the mean\n"
            "    7 | goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\n"
            "  given: lower_bound with 2 seeds per trial    allowed: mean\n"
            "  hint: give the trials 5 seeds: overrides: {seeds: [0, 1, 2, 3, 4]}, seeds_per_trial: 5\n",
        ),
        (
            GOAL + "seeds_per_trial: 4\n",
            "spec.yaml:8: seeds_per_trial: more seeds than the experiment has\n    8 | seeds_per_trial: 4\n"
            "  given: 4    allowed: at most 3\n"
            "  hint: give the experiment more of them: overrides: {seeds: [0, 1, 2]}\n",
        ),
        (
            GOAL + "constraints:\n  - {metric: kl/reverse}\n",
            "spec.yaml:9: constraints.0: sets no bound: give max or min\n",
        ),
        (
            GOAL + "constraints:\n  - {metric: kl/reverse, max: 0.1, min: 0.2}\n",
            "spec.yaml:9: constraints.0.max: no trial can satisfy both bounds\n"
            "    9 |   - {metric: kl/reverse, max: 0.1, min: 0.2}\n"
            "  given: max 0.1, min 0.2    allowed: at least 0.2\n  hint: max is the upper bound\n",
        ),
        (
            GOAL + "constraints:\n  - {metric: kl/sideways, max: 0.1}\n",
            "spec.yaml:9: constraints.0.metric: no such measure\n",
        ),
        (
            GOAL + "constraints:\n  - {metric: kl/reverse, max: 0.1}\n  - {metric: kl/reverse, min: 0}\n",
            "spec.yaml:10: constraints.1.metric: is bounded already\n    10 |   - {metric: kl/reverse, min: 0}\n"
            "  given: kl/reverse\n  hint: one constraint takes both max and min\n",
        ),
        (
            GOAL + "constraints:\n  - {metric: truncated_fraction, max: -0.1}\n",
            "spec.yaml:9: constraints.0.max: no trial can satisfy it\n"
            "    9 |   - {metric: truncated_fraction, max: -0.1}\n"
            "  given: -0.1    allowed: 0 or more\n  hint: truncated_fraction is never below that\n",
        ),
        (
            GOALS + "sampler: {type: cma}\n",
            "spec.yaml:8: sampler.type: searches for one goal only\n    8 | sampler: {type: cma}\n"
            "  given: cma with 2 goals    allowed: tpe, gp, nsga2, qmc, random, grid\n",
        ),
        (
            GOAL + "sampler: {type: grid}\n",
            "spec.yaml:5: parameters[objective.clip.low]: a grid needs a finite range\n"
            "    5 |   objective.clip.low: {float: [0.1, 0.4]}\n"
            "  given: any number in 0.1 to 0.4    allowed: a step\n"
            "  hint: give it a step, list the values as a choice, or take qmc\n",
        ),
        (
            GOALS + ASHA,
            "spec.yaml:8: pruner.type: trials are pruned by one goal only\n"
            "    8 | pruner: {type: asha, rungs: [5, 10]}\n"
            "  given: asha with 2 goals    allowed: none\n"
            "  hint: keep one goal, and bound the others as constraints\n",
        ),
        (
            GOAL + "pruner:\n  type: median\n  rungs:\n    - 5\n    - 20\n    - 25\n",
            "spec.yaml:12: pruner.rungs.1: the rung is not below training.steps\n    12 |     - 20\n"
            "  given: 20    allowed: at most 19\n"
            "  hint: a trial is evaluated at its last step anyway\n"
            "spec.yaml:13: pruner.rungs.2: the rung is not below training.steps\n",
        ),
        (
            GOAL + "pruner: {type: asha, rungs: [10, 5]}\n",
            "spec.yaml:8: pruner.rungs.1: the rungs must increase\n    8 | pruner: {type: asha, rungs: [10, 5]}\n"
            "  given: 5 after 10    allowed: above 10\n  hint: write the rungs from the first to the last\n",
        ),
        (GOAL + "pruner: {type: asha, rungs: []}\n", "pruner.rungs: must have at least 1 item\n"),
        (GOAL + "pruner: {type: none, rungs: [5]}\n", "pruner.rungs: unknown field\n"),
        (
            GOAL + "confirm: {dataset: hold_out}\n",
            "spec.yaml:8: confirm.dataset: no such evaluation set\n    8 | confirm: {dataset: hold_out}\n"
            '  given: "hold_out"    allowed: held_out\n  hint: did you mean `held_out`?\n',
        ),
        (
            "goal: {metric: kl/reverse}\nconfirm: {dataset: held_out}\n",
            "spec.yaml:8: confirm.dataset: a training metric has no evaluation set\n",
        ),
        (
            GOAL + "warm_start: {studies: [clip]}\n",
            "spec.yaml:8: warm_start.studies.0: is this study itself\n    8 | warm_start: {studies: [clip]}\n"
            "  given: clip\n  hint: its own trials count anyway\n",
        ),
        (GOAL + "warm_start: {runs: [a-s0-1, a-s0-1]}\n", "spec.yaml:8: warm_start.runs.1: is given twice\n"),
        (GOAL + "warm_start: {studies: [Some Study]}\n", "warm_start.studies.0: has the wrong form\n"),
    ],
)
def test_what_is_wrong_is_told_at_its_line(text, expected):
    assert expected in message(STUDY + text + TRIALS)


def test_a_rung_is_held_against_the_shortest_trial_where_the_steps_are_searched():
    text = (
        STUDY.replace("training.epochs: {int: [1, 2]}", "training.steps: {int: [8, 20], step: 4}")
        + GOAL
        + ASHA
        + TRIALS
    )
    assert "pruner.rungs.1: the rung is not below training.steps" in message(text)
    assert "allowed: at most 7\n" in message(text)


def test_cma_searches_numbers_only_and_needs_its_package(monkeypatch):
    text = STUDY + "  objective.divergence: {choice: [reverse, forward]}\n" + GOAL + "sampler: {type: cma}\n" + TRIALS
    assert message(text) == (
        "spec.yaml:7: parameters[objective.divergence]: cma searches numbers only\n"
        "    7 |   objective.divergence: {choice: [reverse, forward]}\n"
        "  given: reverse, forward    allowed: float or int\n"
        "  hint: take tpe or gp, or write one study for each candidate\n"
        "1 error; nothing was run"
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("specs.rules.study.find_spec", lambda name: None if name == "cmaes" else find_spec(name))
    assert message(STUDY + GOAL + "sampler: {type: cma}\n" + TRIALS) == (
        "spec.yaml:8: sampler.type: needs the package cmaes, which is not installed\n"
        "    8 | sampler: {type: cma}\n"
        "  given: cma\n"
        '  hint: pip install "rpg-experiments[cma]"\n'
        "1 error; nothing was run"
    )


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2", "qmc", "random"])
def test_samplers_that_take_several_goals(sampler):
    load_study_document(write(STUDY + GOALS + f"sampler: {{type: {sampler}}}\n" + TRIALS))


@pytest.mark.more
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GOAL + "pruner: {type: patient, rungs: [5, 10], patience: 2}\n" + TRIALS,
            "spec.yaml:8: pruner.patience: no trial is ever stopped\n"
            "    8 | pruner: {type: patient, rungs: [5, 10], patience: 2}\n"
            "  given: 2 rungs without an improvement after the first, of 2 rungs    allowed: at most 1\n"
            "  hint: lower patience or add rungs\n",
        ),
        (
            GOAL + "pruner: {type: median, rungs: [5], startup_trials: 20}\n" + TRIALS,
            "spec.yaml:8: pruner.startup_trials: no trial is ever stopped\n",
        ),
        (
            GOAL + "pruner: {type: asha, rungs: [5], eta: 21}\n" + TRIALS,
            "spec.yaml:8: pruner.eta: no trial continues\n"
            "    8 | pruner: {type: asha, rungs: [5], eta: 21}\n"
            "  given: 1 of 21 continues from a rung, of 20 trials\n  hint: lower eta or raise trials\n",
        ),
        (
            GOAL + ASHA + "sampler: {type: gp}\n" + TRIALS,
            "spec.yaml:9: sampler.type: the sampler learns from finished trials only\n    9 | sampler: {type: gp}\n"
            "  given: gp with asha\n  hint: take tpe, which learns from pruned trials too\n",
        ),
        (
            GOAL + "constraints: [{metric: kl/reverse, max: 1}]\nsampler: {type: cma}\n" + TRIALS,
            "spec.yaml:9: sampler.type: the sampler does not learn from constraints\n",
        ),
        (
            GOAL + "trials: 8\n",
            "sampler.startup_trials: the sampler will not fit its model: `startup_trials` is not below `trials`\n"
            "  given: 8 evenly spread trials, of 8\n  hint: lower startup_trials or raise trials\n",
        ),
        (
            GOAL + "sampler: {type: qmc, startup_trials: 4}\n" + TRIALS,
            "spec.yaml:8: sampler.startup_trials: startup_trials has no effect\n",
        ),
        (
            GOAL + "sampler: {type: random}\nwarm_start: {studies: [earlier]}\n" + TRIALS,
            "spec.yaml:9: warm_start: the sampler does not learn from results\n",
        ),
        (GOAL + "parallel: 21\n" + TRIALS, "spec.yaml:8: parallel: more concurrent trials than trials\n"),
        (
            GOAL + "confirm: {candidates: 20}\n" + TRIALS,
            "spec.yaml:8: confirm.candidates: every trial is confirmed\n    8 | confirm: {candidates: 20}\n"
            "  given: 20 of 20 trials\n  hint: the baseline is confirmed anyway: lower candidates\n",
        ),
        (
            "goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\n" + TRIALS,
            "spec.yaml:7: goal.over_seeds: is dominated by noise with few seeds\n"
            "    7 | goal: {dataset: held_out, metric: mean@8, over_seeds: lower_bound}\n"
            "  given: lower_bound with 3 seeds per trial\n  hint: take the mean, or 5 seeds\n",
        ),
        (
            GOAL + "constraints: [{metric: truncated_fraction, max: 1}]\n" + TRIALS,
            "spec.yaml:8: constraints.0.max: every trial satisfies it\n"
            "    8 | constraints: [{metric: truncated_fraction, max: 1}]\n"
            "  given: 1: truncated_fraction is always at most 1\n",
        ),
        (
            GOAL + "constraints: [{dataset: held_out, metric: mean@8, min: 0.5}]\n" + TRIALS,
            "spec.yaml:8: constraints.0.min: does not change which trial is best\n"
            "    8 | constraints: [{dataset: held_out, metric: mean@8, min: 0.5}]\n"
            "  given: mean@8 on held_out is the goal\n  hint: bound another measure\n",
        ),
    ],
)
def test_what_cannot_act_is_warned_of(text, expected):
    assert expected in warnings(STUDY + text)


def test_conditional_parameters_are_warned_of_where_the_sampler_draws_them_at_random():
    text = STUDY + "  training.minibatches: {choice: [1, 4], when: {training.epochs: 2}}\n" + GOAL + TRIALS
    assert without_warning(text)
    assert (
        "sampler.type: qmc draws parameters that have conditions at random\n    10 | sampler: {type: qmc}\n"
        "  given: training.minibatches\n  hint: take tpe, which searches them too\n"
    ) in warnings(text + "sampler: {type: qmc}\n")


def test_a_grid_says_how_many_trials_it_takes():
    text = STUDY.replace("[0.1, 0.4]", "[0.1, 0.4], step: 0.1") + GOAL + "sampler: {type: grid}\n"
    assert without_warning(text + "trials: 9\n")
    assert (
        "spec.yaml:9: trials: the grid is not finished\n    9 | trials: 8\n"
        "  given: 8, of 8 combinations and the baseline\n"
        "  hint: raise trials to 9, or take qmc, which spreads them evenly\n"
    ) in warnings(text + "trials: 8\n")
    assert "hint: lower trials to 9\n" in warnings(text + "trials: 10\n")


def test_how_many_trials_run_at_a_time_does_not_make_another_study():
    one = load_study_document(write(STUDY + GOAL + TRIALS))
    four = load_study_document(write(STUDY + GOAL + TRIALS), ("parallel=4",))
    assert one.study.identity() == four.study.identity()
    assert conditions(one) == conditions(four)
