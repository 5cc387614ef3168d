"""Rules across fields, and knobs that cannot act."""

import re

import pytest
from spec_text import GOOD, changed, message, warnings, write

from specs.loader import load_experiment

EVALUATION = "    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 50, seed: 1000}\n"


def test_the_good_spec_warns_of_nothing():
    assert warnings(GOOD) == "0 warnings"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "group_size: 4\n  minibatches: 2",
            "group_size: 1\nadvantage: {baseline: leave_one_out}",
            "training.group_size: advantage.baseline leave_one_out needs more than one",
        ),
        (
            "group_size: 4\n  minibatches: 2",
            "group_size: 1\nadvantage: {baseline: batch_mean, scale: group_std}",
            "training.group_size: advantage.scale group_std needs more",
        ),
        ("training:", "reference: {source: snapshot}\ntraining:", "reference.update: missing"),
        (
            "training:",
            "reference: {source: behaviour, update: {every_steps: 2}}\ntraining:",
            "reference.update: a reference with",
        ),
        ("training:", "evaluation: {datasets: [heldout]}\ntraining:", "evaluation.datasets.0: no such evaluation set"),
        (
            "training:",
            "evaluation: {datasets: [held_out, held_out]}\ntraining:",
            "evaluation.datasets.1: the set is named twice",
        ),
        (
            "training:",
            "evaluation: {max_response_length: 40}\ntraining:",
            "evaluation.max_response_length: prompt and response",
        ),
        ("name: held_out, ", "", "data.evaluation.0.name: missing"),
        (EVALUATION, EVALUATION + EVALUATION, "data.evaluation.1.name: the name is taken"),
        ("seed: 1000", "seed: 99", "data.evaluation.0.seed: shares problems with a training set"),
        ("group_size: 4", "group_size: 4\n  ranks: 1000", "training.ranks: more ranks than prompts in a step"),
        ("group_size: 4", "group_size: 4\n  offload: {optimizer: true}", "training.offload.optimizer: needs ZeRO"),
        (
            "group_size: 4",
            "group_size: 4\n  zero_stage: 2\n  offload: {parameters: true}",
            "training.offload.parameters: needs",
        ),
        (
            "group_size: 4",
            "group_size: 4\n  zero_stage: 2\n  offload: {optimizer: true, while_sampling: true}",
            "training.offload.while_sampling: state that is always in host memory cannot leave the GPU",
        ),
        (
            "minibatches: 2",
            "minibatches: 2\n  kernels: liger\nresources: {device: cpu}",
            "training.kernels: Liger's kernels run on GPUs",
        ),
        ("hidden_size: 32", "hidden_size: 32, vocab_size: 99", "model.config.vocab_size: the tokenizer determines it"),
        (
            "exact_match}",
            "exact_match, overlong: {buffer: 33}}",
            "reward.overlong.buffer: the buffer is longer than a response",
        ),
        (
            "  max_prompt_length",
            "  prompt: {template: Solve it.}\n  max_prompt_length",
            "data.prompt.template: the template does not",
        ),
    ],
)
def test_what_cannot_be_is_refused(old, new, said):
    assert f": {said}" in message(changed(old, new))


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("max_staleness: 1", "rollouts are sampled during updates"),
        ("engine: vllm", "the engine keeps its memory during updates"),
        ("engine: vllm, placement: dedicated", "the engine keeps its memory during updates"),
    ],
)
def test_nothing_leaves_the_gpu_for_a_sampler_that_gains_nothing_by_it(rollout, said):
    text = changed("group_size: 4", "group_size: 4\n  offload: {while_sampling: true}")
    assert warnings(text.replace("rollout: {", "rollout: {engine: vllm, sleep: true, ")) == "0 warnings"
    assert f"training.offload.while_sampling: {said}" in message(text.replace("rollout: {", f"rollout: {{{rollout}, "))


def test_there_is_nothing_to_evaluate_during_training_without_an_evaluation_set():
    text = changed("  evaluation:\n" + EVALUATION, "") + "evaluation: {every_steps: 1}\n"
    assert "spec.yaml:22: evaluation.every_steps: there is no evaluation set\n" in message(text)


def test_seeds_just_far_enough_apart_share_no_problem():
    assert warnings(changed("seed: 1000", "seed: 100")) == "0 warnings"


def test_reasoning_gym_cannot_score_other_problems():
    text = changed("exact_match", "reasoning_gym").replace(
        "{source: reasoning_gym, task: chain_sum, size: 100}", "{source: hub, path: org/set}"
    )
    assert "data.train.0: reward.type reasoning_gym scores reasoning-gym's own problems only" in message(text)


def test_programs_are_scored_where_a_source_has_tests():
    said = message(changed("exact_match", "code"))
    assert "data.train.0: reward.type code needs tests, and the source has none" in said
    assert "data.evaluation.0: reward.type code needs tests, and the source has none" in said


def test_a_reward_of_a_sets_own_that_cannot_score_the_set_is_named_at_its_line():
    source = "{source: reasoning_gym, task: chain_sum, size: 100}"
    for own, why in (
        ("code", "reward.type code needs tests, and the source has none"),
        ("reasoning_gym", "reward.type reasoning_gym scores reasoning-gym's own problems only"),
    ):
        said = message(changed(source, f"{{source: hub, path: a/b, reward: {{type: {own}}}}}"))
        line = next(line for line in said.splitlines() if why in line)
        assert re.fullmatch(rf"spec\.yaml:\d+: data\.train\.0\.reward: {re.escape(why)}.*", line)


def test_a_form_of_tests_that_there_is_not_is_named_with_those_that_there_are():
    source = "source: reasoning_gym, task: chain_sum, size: 100"
    said = message(changed("exact_match", "code").replace(source, "source: hub, path: a/b, tests: tacos"))
    assert "data.train.0.tests: not one of the values allowed" in said
    assert (
        "allowed: none, taco, livecodebench, verification_info, deepcoder, codeforces, mbpp, humaneval, cases" in said
    )


def test_a_clip_that_can_never_fire_is_named():
    assert warnings(changed("minibatches: 2", "minibatches: 1")) == (
        "spec.yaml:16: objective.clip: the clip can never fire\n"
        "    16 |   clip:\n"
        "  given: 1 minibatch x 1 epoch: the trained policy is the sampling policy, so every ratio is 1\n"
        "  hint: raise training.minibatches or training.epochs, or write clip: {type: none}\n"
        "1 warning"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kl_coef: 1e-2", "kl_coef: 1e-3", "objective.kl_coef: the divergence is negligible compared with the reward"),
        ("kl_coef: 1e-2", "kl_coef: 0", "objective.kl_coef: the divergence has no effect"),
        ("kl_coef: 1e-2", "kl_coef: 1e-2\n  divergence: none", "objective.kl_coef: kl_coef has no effect"),
        ("group_size: 4", "group_size: 1", "training.group_size: every advantage is zero"),
        (
            "training:",
            "reference: {source: snapshot, update: {every_steps: 4}}\ntraining:",
            "the reference is never updated",
        ),
        ("training:", "evaluation: {temperature: 0}\ntraining:", "every sample of a problem is the same"),
        ("training:", "evaluation: {checkpoints: all}\ntraining:", "only the first and the last checkpoint"),
        ("training:", "evaluation: {every_steps: 4}\ntraining:", "nothing is evaluated during training"),
        ("group_size: 4", "group_size: 4\n  schedule: {warmup_updates: 8}", "the learning rate never reaches its peak"),
        (
            "minibatches: 2",
            "minibatches: 2\n  offload: {while_sampling: true}\nresources: {device: cpu}",
            "training.offload.while_sampling: while_sampling has no effect",
        ),
        ("rollout: {", "rollout: {correction: {bound: 3}, ", "rollout.correction.bound: bound has no effect"),
        (
            "rollout: {",
            "rollout: {engine: vllm, correction: {type: mask, low: 0.5, high: 3, bound: 3}, ",
            "rollout.correction.bound: bound has no effect",
        ),
        (
            "rollout: {",
            "rollout: {engine: vllm, correction: {type: truncate, high: 3, bound: 3}, ",
            "rollout.correction.bound: bound has no effect",
        ),
        ("rollout: {", "rollout: {correction: {low: 0}, ", "rollout.correction.low: low has no effect"),
        ("rollout: {", "rollout: {correction: {type: mask}, ", "rollout.correction: correction has no effect"),
    ],
)
def test_what_has_no_effect_is_warned_of(old, new, said):
    assert said in warnings(changed(old, new))


def test_a_reference_that_nothing_reads():
    text = changed("  kl_coef: 1e-2\n", "  divergence: none\n")
    text += "reference: {source: snapshot, update: {every_steps: 2}}\n"
    assert "reference.source: nothing reads the reference" in warnings(text)


def test_dynamic_sampling_needs_groups():
    text = changed("group_size: 4", "group_size: 1").replace("rollout: {", "rollout: {dynamic_sampling: {}, ")
    assert "rollout.dynamic_sampling: no group could vary" in message(text)


def test_dynamic_sampling_with_a_baseline_that_leaves_equal_groups_an_advantage():
    text = changed("rollout: {", "rollout: {dynamic_sampling: {}, ") + "advantage: {baseline: batch_mean}\n"
    assert "dynamic sampling throws away groups that have an advantage" in warnings(text)


def test_what_is_masked_has_no_divergence_to_take_off_its_reward():
    text = changed("type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual", "type: rloo\n  clip:")
    text += "  mask_truncated: true\n"
    assert "training.mask_truncated: a masked response has no divergence" in message(text)


def test_what_is_masked_is_not_whitened_with_the_others():
    text = GOOD + "  mask_truncated: true\nadvantage: {whiten: tokens}\n"
    assert "training.mask_truncated: the mean and deviation would include" in message(text)


def test_a_rival_without_divergence_holds_no_reference_and_is_told_of_one_it_is_given():
    text = changed("type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual", "type: grpo\n  kl_coef: 0\n  clip:")
    write(text)
    assert load_experiment("spec.yaml").reference.source == "behaviour"
    assert warnings(text) == "0 warnings"
    assert "nothing reads the reference" in warnings(text + "reference: {source: initial}\n")


def test_a_rivals_idle_clip_is_not_told_to_be_a_type_it_lacks():
    text = changed("type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual", "type: dapo\n  clip:")
    said = warnings(text.replace("minibatches: 2", "minibatches: 1"))
    assert "hint: raise training.minibatches or training.epochs\n" in said


def test_a_small_kl_coef_is_no_matter_where_the_reference_stays():
    text = changed("kl_coef: 1e-2", "kl_coef: 1e-3") + "reference: {source: snapshot, update: {every_steps: 2}}\n"
    assert warnings(text) == "0 warnings"


def test_a_warning_of_some_runs_says_which():
    said = warnings(GOOD + "matrix:\n  product:\n    training.minibatches: [1, 2]\n    training.steps: [4, 5]\n")
    assert said.startswith(
        "spec.yaml:26: objective.clip: the clip can never fire (in the run with training.minibatches=1)\n"
    )
    assert said.endswith("1 warning")


def test_a_warning_of_cells_is_placed_at_the_objective_that_varies():
    matrix = """matrix:
  product: {objective.clip.high: [0.1, 0.3]}
  zip:
    objective: [{type: rpg, kl_coef: 1e-2, clip: {type: dual}}, {type: dapo}]
    reward.overlong: [{buffer: 4}, null]
"""
    said = warnings(changed("objective:\n", "reference: {source: initial}\nobjective:\n") + matrix)
    assert "spec.yaml:28: reference.source: nothing reads the reference (in the run with objective=" in said
    assert "hint: leave reference out, or write source: behaviour: a second model costs memory\n" in said
    assert "spec.yaml:28: matrix.zip.objective: settings that the spec leaves out differ" in said
