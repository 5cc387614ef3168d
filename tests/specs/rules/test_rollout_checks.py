"""Allowed settings of sampling, of sampling ahead, and of trusting the sampler's logprobs."""

import pytest
from places import PACKAGES
from spec_text import GOOD, changed, message, warnings, write

from specs import load_experiment
from specs.extensions import our_names
from specs.schema.rollout import DynamicSampling, RollouterSection

ROLLOUT = "rollout: {max_response_length: 32}"


def with_rollout(fields: str) -> str:
    return changed(ROLLOUT, f"rollout: {{max_response_length: 32, {fields}}}")


@pytest.mark.parametrize("name", ["max_staleness: 1", "trust_logprobs: true"])
def test_the_logprobs_of_a_cut_distribution_cannot_stand_for_the_policys(name: str) -> None:
    field = name.partition(":")[0]
    text = message(with_rollout(f"{name}, top_p: 0.9, top_k: 20"))
    assert (
        f"rollout.{field}: old_logprobs would be the sampler's, which are those of a truncated distribution\n" in text
    )
    assert "given: top_p 0.9 and top_k 20\n" in text
    assert f"hint: leave {field} out, or leave out top_p and top_k\n" in text


@pytest.mark.parametrize(
    ("fields", "further", "expected"),
    [
        ("rollouter: {type: tools, tools: [{type: calculator}]}, ", "", "true with rollouter tools\n"),
        ("", "  sequence_parallel_size: 2\n  ranks: 2\n", "true with training.sequence_parallel_size 2\n"),
    ],
)
def test_a_choice_of_experts_is_replayed_for_single_turns_and_whole_rows_alone(
    fields: str, further: str, expected: str
) -> None:
    text = message(with_rollout(f"{fields}replay_routing: true").replace("training:\n", f"training:\n{further}", 1))
    assert "rollout.replay_routing: " in text
    assert f"given: {expected}" in text
    assert "hint: leave replay_routing out\n" in text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            "partial: true",
            "a response that continues is older than its step\n"
            "    11 | rollout: {max_response_length: 32, partial: true}\n"
            "  given: true with max_staleness 0\n"
            "  hint: write rollout.max_staleness: 1, or leave partial out\n",
        ),
        (
            "partial: true, max_staleness: 1, rollouter: {type: tools, tools: [{type: calculator}]}",
            "given: true with rollouter tools\n",
        ),
        ("partial: true, max_staleness: 1, dynamic_sampling: {}", "given: true with dynamic_sampling\n"),
        ("partial: true, max_staleness: 1, stop: [END]", "given: true with stop 'END'\n"),
        (
            "partial: true, max_staleness: 1, temperature: {schedule: [[1, 1.0], [3, 0.8]], between: linear}",
            "given: true with a schedule of temperature\n",
        ),
        ("partial: true, max_staleness: 1, replay_routing: true", "given: true with replay_routing\n"),
        ("partial: true, max_staleness: 1, top_p: 0.9", "given: top_p 0.9\n"),
    ],
)
def test_what_responses_that_continue_exclude_is_named(fields: str, expected: str) -> None:
    assert expected in message(with_rollout(fields))


def test_responses_continue_with_sampling_ahead() -> None:
    spec = load_experiment(write(with_rollout("partial: true, max_staleness: 1")))
    assert spec.rollout.partial
    assert spec.in_flight == spec.training.prompts_per_step * spec.training.group_size
    held = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"max_concurrent": 1})})
    assert held.in_flight == spec.training.group_size, "at least a group's"


def test_sampling_ahead_of_the_whole_training_is_named() -> None:
    assert warnings(with_rollout("max_staleness: 3")) == (
        "spec.yaml:11: rollout.max_staleness: the initial policy samples every batch\n"
        "    11 | rollout: {max_response_length: 32, max_staleness: 3}\n"
        "  given: 3, in 4 steps\n"
        "  hint: 1 is enough to sample while training\n"
        "1 warning"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("max_staleness: 1, trust_logprobs: true", "rollout.trust_logprobs: trust_logprobs has no effect"),
        ("max_staleness: 1, correction: {type: mask}", "rollout.correction: correction has no effect"),
        ("trust_logprobs: true, correction: {type: mask}", "rollout.correction: correction has no effect"),
    ],
)
def test_what_cannot_act_beside_sampling_ahead_or_trust_is_named(fields: str, expected: str) -> None:
    named = warnings(with_rollout(fields))
    assert f": {expected}" in named
    assert named.endswith("\n1 warning")


def test_rounds_have_no_use_for_oversampling() -> None:
    named = warnings(with_rollout("dynamic_sampling: {oversampling: 3}"))
    assert "rollout.dynamic_sampling.oversampling: oversampling has no effect\n" in named
    assert warnings(with_rollout("dynamic_sampling: {refill: stream, oversampling: 3}")) == "0 warnings"


def test_dynamic_sampling_in_rounds_is_what_it_was_before_there_were_streams() -> None:
    assert DynamicSampling().identity() == DynamicSampling(refill="rounds").identity() == {"max_batches": 10}
    assert DynamicSampling(refill="stream").identity() == {"max_batches": 10, "refill": "stream"}


def test_trust_has_nothing_to_act_on_in_a_single_minibatch() -> None:
    text = with_rollout("trust_logprobs: true").replace("minibatches: 2", "minibatches: 1\n  epochs: 2")
    assert "rollout.trust_logprobs: trust_logprobs has no effect\n" in warnings(text)
    assert warnings(with_rollout("trust_logprobs: true")) == "0 warnings"


@pytest.mark.parametrize(
    ("text", "gives"),
    [
        (GOOD, True),
        (with_rollout("trust_logprobs: true"), True),
        (with_rollout("max_staleness: 1"), False),
        (GOOD + "  optimizer: {type: schedule_free_adamw}\n", False),
        (changed("type: rpg\n  kl_coef: 1e-2", "type: rloo").replace("    type: dual\n", ""), False),
        (changed("type: rpg\n  kl_coef: 1e-2", "type: rloo\n  kl_coef: 0").replace("    type: dual\n", ""), True),
    ],
)
def test_the_first_pass_gives_old_logprobs_unless_they_are_needed_before_it_or_are_of_another_policy(
    text: str, gives: bool
) -> None:
    assert load_experiment(write(text)).first_pass_gives_old_logprobs is gives


def test_a_clip_can_fire_in_one_minibatch_of_an_earlier_policys_responses() -> None:
    text = with_rollout("max_staleness: 1").replace("minibatches: 2", "minibatches: 1")
    assert warnings(text) == "0 warnings"


def test_nothing_is_skipped_under_a_divergence_or_an_entropy_bonus() -> None:
    skipping = changed("minibatches: 2", "minibatches: 2\n  skip_zero_advantage: true")
    assert "training.skip_zero_advantage: skip_zero_advantage has no effect\n" in warnings(skipping)
    assert "given: kl_coef 0.01, whose loss has a gradient even if the advantage is 0\n" in warnings(skipping)
    without = skipping.replace("  kl_coef: 1e-2", "  divergence: none")
    assert warnings(without) == "0 warnings"
    assert "given: entropy_coef 0.1, whose loss" in warnings(without + "  entropy_coef: 0.1\n")


def spec_with(section: str) -> str:
    """The good spec with another rollout section, or an evaluation section."""
    return changed(ROLLOUT, section if section.startswith("rollout") else f"{ROLLOUT}\n{section}")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "rollout: {max_response_length: 32, top_p: 0.9}",
            "rollout.top_p: the importance ratio is biased",
        ),
        (
            "rollout: {max_response_length: 32, top_k: 20}",
            "given: 20: tokens are drawn from a part of the distribution",
        ),
        ("evaluation: {temperature: 0, samples_per_problem: 1, top_k: 5}", "evaluation.top_k: top_k has no effect"),
        ("evaluation: {temperature: 0, samples_per_problem: 1, top_p: 0.5}", "evaluation.top_p: top_p has no effect"),
        (
            "rollout: {max_response_length: 32, stop: ['.']}",
            "rollout.stop: evaluation does not stop where training does",
        ),
    ],
)
def test_sampling_that_misleads_is_warned_of(section: str, expected: str) -> None:
    text = warnings(spec_with(section))
    assert expected in text
    assert text.endswith("1 warning")


def test_sampling_that_fits_is_not_warned_of() -> None:
    section = "rollout: {max_response_length: 32, stop: ['.']}\nevaluation: {stop: ['.'], top_p: 0.95, top_k: 20}"
    assert warnings(changed(ROLLOUT, section)) == "0 warnings"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("rollout: {max_response_length: 32, top_p: 0}", "rollout.top_p: must be greater than 0"),
        ("rollout: {max_response_length: 32, top_k: -1}", "rollout.top_k: must be at least 0"),
        ("rollout: {max_response_length: 32, stop: ['']}", "rollout.stop.0: must not be empty"),
        ("evaluation: {stop: ['a', '']}", "evaluation.stop.1: must not be empty"),
    ],
)
def test_sampling_out_of_range_is_an_error(section: str, expected: str) -> None:
    assert expected in message(spec_with(section))


TWO_TURNS = "rollouter: {type: check_again, question: sure?}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with an environment of two turns is installed."""
    monkeypatch.syspath_prepend(str(PACKAGES))


@pytest.mark.usefixtures("installed")
def test_an_installed_environment_is_checked_like_ours() -> None:
    rollout = load_experiment(write(with_rollout(TWO_TURNS))).rollout
    assert rollout.rollouter.model_dump() == {"type": "check_again", "question": "sure?"}
    assert load_experiment("spec.yaml", ("rollout.rollouter.question=why?",)).rollout.rollouter.question == "why?"
    assert message(with_rollout("rollouter: {type: check_again, questoin: sure?}")) == (
        "spec.yaml:11: rollout.rollouter.questoin: unknown field\n"
        "    11 | rollout: {max_response_length: 32, rollouter: {type: check_again, questoin: sure?}}\n"
        "  allowed: question, type\n"
        "  hint: did you mean `question`?\n"
        "1 error; nothing was run"
    )


def test_an_environment_that_is_not_installed_is_an_unknown_name() -> None:
    assert message(with_rollout(TWO_TURNS)) == (
        "spec.yaml:11: rollout.rollouter.type: unknown type\n"
        "    11 | rollout: {max_response_length: 32, rollouter: {type: check_again, question: sure?}}\n"
        f'  given: "check_again"    allowed: {", ".join(our_names(RollouterSection.package))}\n'
        "  hint: a package with an entry point in `rpg.rollouters` adds another\n"
        "1 error; nothing was run"
    )


@pytest.mark.usefixtures("installed")
def test_an_environment_is_part_of_a_results_identity_unless_it_is_the_one_of_a_single_turn() -> None:
    plain, spelled_out, two_turns = (
        load_experiment(write(text)).rollout.identity()
        for text in (GOOD, with_rollout("rollouter: {type: single_turn}"), with_rollout(TWO_TURNS))
    )
    assert plain == spelled_out
    assert "rollouter" not in plain
    assert two_turns == plain | {"rollouter": {"type": "check_again (rpg-check-again 1.0)", "question": "sure?"}}


BY_TURN = "rollouter: {type: tools, tools: [calculator], answer_tokens: 8, rewards: {call: 0.5}}"


def by_turn(rollout: str, more: str = "") -> str:
    """The spec with turns that answer for their returns."""
    return message(with_rollout(rollout) + "advantage: {credit: turn}\n" + more)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("temperature: 1.0", "no turn has a reward of its own, so every turn has the return of the response"),
        (BY_TURN.replace(", rewards: {call: 0.5}", ""), "no turn has a reward"),
        (f"{BY_TURN}, dynamic_sampling: {{}}", "groups with equal sums but different turns"),
    ],
)
def test_turns_answer_for_their_returns_where_they_have_rewards(rollout: str, said: str) -> None:
    found = by_turn(rollout)
    assert f"advantage.credit: {said}" in found
    assert "spec.yaml:" in found
    assert found.endswith("1 error; nothing was run")


def test_turns_that_are_rewarded_may_answer_for_their_returns() -> None:
    written = write(with_rollout(BY_TURN) + "advantage: {credit: turn}\n")
    assert load_experiment(written).advantage.credit == "turn"
    assert "a whole response has one weight" in message(
        with_rollout(BY_TURN).replace("type: rpg", "type: rpg\n  level: sequence") + "advantage: {credit: turn}\n"
    )


@pytest.mark.parametrize(
    ("correction", "said"),
    [
        ("{type: mask, low: 1.5}", "rollout.correction.low: low is a bound on the ratio\n"),
        ("{type: mask, high: 0.5}", "rollout.correction.high: high is a bound on the ratio\n"),
        ("{type: mask, measure: probability, low: 0.2, high: 0.3}", "low is a bound on the difference of two"),
        ("{type: mask, measure: probability}", "rollout.correction.measure: nothing is outside the bounds\n"),
        ("{type: truncate, measure: probability, high: 0.2}", "a difference of probabilities is not a weight\n"),
        ("{type: mask, over: sequence, measure: probability, high: 0.2}", "rollout.correction.over: the probabilities"),
        ("{type: mask, over: sequences}", "hint: did you mean `sequence`?"),
    ],
)
def test_bounds_that_say_nothing_clear_are_refused(correction: str, said: str) -> None:
    assert said in message(changed("rollout: {", f"rollout: {{engine: vllm, correction: {correction}, "))


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ("{type: mask}", (0.5, 2)),
        ("{type: truncate, bound: 4}", (0, 4)),
        ("{type: mask, low: 0.125, high: 8}", (0.125, 8)),
        ("{type: truncate, low: 0.5}", (0.5, 2)),
        ("{type: mask, over: geometric_mean, low: 0.999, high: 1.001}", (0.999, 1.001)),
        ("{type: mask, measure: probability, low: -0.2, high: 0.2}", (-0.2, 0.2)),
    ],
)
def test_one_bound_or_two_bound_a_correction(correction: str, bounds: tuple[float, float]) -> None:
    text = changed("rollout: {", f"rollout: {{correction: {correction}, ")
    assert load_experiment(write(text)).rollout.correction.bounds == bounds
