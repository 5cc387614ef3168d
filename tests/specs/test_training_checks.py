"""Combinations of training's fields that cannot work, or that say nothing to earlier results."""

from spec_text import changed, message, warnings

from specs.schema.training import Lora, Training


def test_schedule_free_takes_no_decay_and_needs_an_average():
    section = (
        "steps: 4\n  optimizer: {type: schedule_free_adamw, betas: [0.0, 0.9]}\n"
        "  schedule: {type: cosine, warmup_updates: 1}"
    )
    assert message(changed("steps: 4", section)) == (
        "spec.yaml:21: training.optimizer.betas.0: schedule_free_adamw divides by it\n"
        "    21 |   optimizer: {type: schedule_free_adamw, betas: [0.0, 0.9]}\n"
        "  given: 0    allowed: a number in (0, 1)\n"
        "spec.yaml:22: training.schedule.type: schedule_free_adamw averages the updates instead of lowering the rate\n"
        "    22 |   schedule: {type: cosine, warmup_updates: 1}\n"
        "  given: cosine    allowed: constant\n"
        "  hint: leave schedule.type out; warmup_updates acts as before\n"
        "2 errors; nothing was run"
    )


def test_a_field_with_a_default_that_changes_nothing_leaves_earlier_results_valid():
    plain = Training(steps=1, prompts_per_step=1, group_size=1)
    assert "lora" not in plain.identity()
    assert plain.model_copy(update={"lora": Lora(rank=2)}).identity()["lora"]["rank"] == 2


def test_a_learning_rate_without_its_exponent_is_asked_about():
    text = changed("steps: 4", "steps: 4\n  optimizer: {learning_rate: %s}")
    assert warnings(text % "1") == (
        "spec.yaml:21: training.optimizer.learning_rate: an update would move the weights by more than they are\n"
        "    21 |   optimizer: {learning_rate: 1}\n"
        "  given: 1\n"
        "  hint: post-training takes 1e-7 to 1e-4, a small model from scratch 1e-3\n"
        "1 warning"
    )
    assert warnings(text % "3e-2") == "0 warnings"
