"""Messages about an objective's knobs that cannot act."""

import pytest
from spec_text import changed, message, warnings

RPG = "type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual"


def rival(fields: str) -> str:
    return changed(RPG, f"{fields}\n  clip:")


@pytest.mark.parametrize("reference", ["", "reference: {source: behaviour}\n"])
def test_a_divergence_in_the_reward_from_the_policy_that_sampled_is_always_0(reference: str) -> None:
    text = rival("type: ppo\n  kl_coef: 0.1\n  kl_in: reward") + reference
    assert warnings(text).startswith("spec.yaml:16: objective.kl_in: the divergence is always 0\n")


def test_a_divergence_in_the_reward_from_another_policy_is_fine() -> None:
    assert warnings(rival("type: rloo\n  kl_coef: 0.1")) == "0 warnings"


def test_a_rivals_small_divergence_from_the_policy_that_sampled_is_invisible() -> None:
    text = rival("type: ppo\n  kl_coef: 1e-3")
    assert "objective.kl_coef: the divergence is negligible compared with the reward\n" in warnings(text)
    assert warnings(text + "reference: {source: initial}\n") == "0 warnings"


@pytest.mark.parametrize("knob", ["kl_estimator: k1", "kl_in: reward", "kl_weighted: true"])
def test_how_a_divergence_is_estimated_has_no_effect_without_one(knob: str) -> None:
    said = warnings(rival(f"type: dapo\n  {knob}"))
    assert f"objective.{knob.split(':')[0]}: {knob.split(':')[0]} has no effect\n" in said
    assert said.endswith("\n1 warning")


@pytest.mark.parametrize("without", ["divergence: none", "kl_coef: 0"])
@pytest.mark.parametrize("knob", ["keep_divergence: true", "branch: regularized"])
def test_what_a_clip_says_of_a_divergence_has_no_effect_without_one(knob: str, without: str) -> None:
    text = changed("kl_coef: 1e-2", without).replace("type: dual", f"type: dual\n    {knob}")
    assert f"objective.clip.{knob.split(':')[0]}: {knob.split(':')[0]} has no effect\n" in warnings(text)


def test_cispos_bound_needs_ratios_that_leave_1() -> None:
    text = changed(RPG + "\n    low: 0.2", "type: cispo")
    assert warnings(text) == "0 warnings"
    assert "objective.max_ratio: max_ratio has no effect\n" in warnings(
        text.replace("minibatches: 2", "minibatches: 1")
    )


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ("{every_steps: 1, after_steps: 4}", "reference.update.after_steps: the reference is never updated"),
        ("{kl_above: 0.1, kl_window: 4}", "reference.update.kl_window: kl_above can never act"),
    ],
)
def test_a_reference_that_waits_longer_than_the_run_takes(update: str, said: str) -> None:
    text = changed("training:", f"reference: {{source: snapshot, update: {update}}}\ntraining:")
    assert said in warnings(text)
    assert warnings(text.replace("4}}", "3}}")) == "0 warnings"


@pytest.mark.parametrize("baseline", ["batch_mean", "none"])
def test_a_groups_deviation_under_another_baseline_than_its_own_blows_equal_groups_up(baseline: str) -> None:
    advantage = f"advantage: {{baseline: {baseline}, scale: group_std}}\n"
    assert "advantage.scale: a group whose rewards are all equal is divided by 1e-4\n" in warnings(
        changed("training:", f"{advantage}training:")
    )


def test_a_correction_acts_on_a_distribution_that_was_cut() -> None:
    text = changed("rollout: {", "rollout: {top_p: 0.9, correction: {type: truncate}, ")
    assert "the correction can never act" not in warnings(text)


def test_a_clip_guard_can_fire_on_an_earlier_policys_responses() -> None:
    text = changed("minibatches: 2", "minibatches: 1\n  guards: [{metric: clip_fraction/high, above: 0.2}]")
    assert "the guard can never fire" in warnings(text)
    ahead = text.replace("rollout: {", "rollout: {max_staleness: 1, ")
    assert warnings(ahead) == "0 warnings"


def test_whitening_leaves_nothing_to_skip() -> None:
    text = changed("kl_coef: 1e-2", "divergence: none").replace(
        "  minibatches", "  skip_zero_advantage: true\n  minibatches"
    )
    assert warnings(text) == "0 warnings"
    assert "training.skip_zero_advantage: skip_zero_advantage has no effect\n" in warnings(
        text + "advantage: {whiten: tokens}\n"
    )


def test_weights_of_tokens_are_inexact_under_ratios_of_whole_responses() -> None:
    text = changed("rollout: {", "rollout: {engine: vllm, correction: {type: truncate}, ")
    assert warnings(text) == "0 warnings"
    said = "rollout.correction.type: the correction is inexact: it weights tokens, and the objective weights whole"
    assert said in warnings(text.replace("  kl_coef", "  level: sequence\n  kl_coef"))
    assert said in warnings(text.replace(RPG, "type: rloo\n  clip:"))


def test_margins_that_read_like_bounds_are_asked_about() -> None:
    assert (
        "spec.yaml:16: objective.clip: these look like bounds, but they are margins around ratio 1\n"
        "    16 |   clip:\n"
        "  given: low 0.8, high 1.28: the clip acts outside [0.2, 2.28];"
        " for the bounds [0.8, 1.28] write low: 0.2, high: 0.28\n"
    ) in warnings(changed("low: 0.2", "low: 0.8\n    high: 1.28"))
    assert "for the bounds [0.8, 1.3] write low: 0.2, high: 0.3\n" in warnings(changed("low: 0.2", "high: 1.3"))
    led = "high: {target: 0.1, of: clip_fraction/high, start: 0.28, most: 2}"
    assert warnings(changed("low: 0.2", led)) == "0 warnings"
    assert "look like bounds" in warnings(changed("low: 0.2", led.replace("0.28", "1.28")))


def test_a_ratio_may_be_truncated_far_from_1() -> None:
    truncated = changed("type: dual\n    low: 0.2", "type: truncate\n    low: 0.2\n    high: 4")
    assert "look like bounds" not in warnings(truncated)
    assert "look like bounds" in warnings(truncated.replace("low: 0.2", "low: 0.8"))


def summed(fields: str = "kl: full", further: str = "") -> str:
    return changed("kl_coef: 1e-2", f"kl_coef: 1e-2\n  {fields}") + further


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (summed("kl_top_k: 8"), "objective.kl_top_k: kl_top_k has no effect\n"),
        (summed("kl: full\n  kl_top_k: 8"), "objective.kl_top_k: kl_top_k has no effect\n"),
        (summed().replace("type: dual", "type: dual\n    keep_divergence: true"), "keep_divergence has no effect\n"),
        (summed().replace("kl_coef: 1e-2", "kl_coef: 0"), "objective.kl: kl has no effect\n"),
        (summed().replace("minibatches: 2", "minibatches: 1"), "objective.kl: the divergence is always 0\n"),
    ],
)
def test_what_cannot_act_beside_or_without_a_sum_over_tokens_is_named(text: str, said: str) -> None:
    assert said in warnings(text)


def test_sums_over_tokens_are_accepted_where_they_act() -> None:
    for fields in ("kl: full", "kl: top_k\n  kl_top_k: 8", "kl: full\n  divergence: jensen_shannon\n  level: to_go"):
        assert warnings(summed(fields)) == "0 warnings"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            summed("kl: full\n  level: sequence"),
            [
                "spec.yaml:16: objective.kl: `kl: full` is summed at each state, but a whole response has one ratio\n",
                "    16 |   kl: full\n",
                "hint: write `level: to_go`, which also has the gradient of the whole response's divergence, or `kl:",
            ],
        ),
        (
            summed("divergence: jensen_shannon"),
            [
                "spec.yaml:16: objective.divergence: jensen_shannon is a sum over the vocabulary: it needs `kl: full` "
                "or `kl: top_k`\n",
                "hint: write `kl: full` or `kl: top_k`, or take another divergence\n",
            ],
        ),
        (
            summed().replace("training:\n", "training:\n  sequence_parallel_size: 2\n  ranks: 2\n"),
            ["spec.yaml:16: objective.kl: ranks that share a sequence do not share the reference's distributions"],
        ),
        (
            summed().replace("rollout: {", "rollout: {max_staleness: 1, "),
            [
                "spec.yaml:16: objective.kl: the policy that sampled is gone when its distributions are needed\n",
                "given: full with reference.source behaviour and rollout.max_staleness 1\n",
            ],
        ),
    ],
)
def test_what_a_sum_over_tokens_cannot_go_with_is_refused_with_the_reason(text: str, lines: list[str]) -> None:
    refused = message(text)
    for line in lines:
        assert line in refused
    assert refused.endswith("\n1 error; nothing was run")


def test_dividing_by_the_mean_of_a_group_needs_rewards_of_one_sign() -> None:
    text = changed("training:", "advantage: {scale: group_mean}\ntraining:")
    assert warnings(text) == "0 warnings"
    refused = message(text.replace("exact_match", "math_dapo"))
    assert (
        "advantage.scale: the mean of a group would be 0 or negative while some of its responses are right" in refused
    )
    assert "given: group_mean with reward.type math_dapo, which may be negative\n" in refused
    each = text.replace("{scale: group_mean}", "{scale: group_mean, rewards: normalized_each}")
    assert "advantage.scale: normalized rewards have a mean of 0, which cannot be a divisor\n" in message(each)


@pytest.mark.parametrize(
    ("old", "new", "given"),
    [
        ("type: exact_match", "type: exact_match, overlong: {buffer: 2, penalty: 1}", "reward.overlong"),
        ("type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual", "type: rloo\n  clip:", "objective.kl_in reward"),
    ],
)
def test_dividing_by_the_mean_of_a_group_allows_no_penalty_in_the_reward(old: str, new: str, given: str) -> None:
    refused = message(changed(old, new) + "advantage: {scale: group_mean}\n")
    assert "advantage.scale: a penalty makes the mean of a group 0 or negative" in refused
    assert f"given: group_mean with {given}\n" in refused
