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


def best_by_accuracy(dataset, *, saved, evaluated):
    keep_best = f"  checkpoint: {{every_steps: {saved}, keep_best: {{accuracy_on: {dataset}}}}}\n"
    return changed("  minibatches: 2\n", f"  minibatches: 2\n{keep_best}evaluation: {{every_steps: {evaluated}}}\n")


def test_the_best_checkpoint_is_chosen_by_accuracies_that_training_measures():
    assert warnings(best_by_accuracy("held_out", saved=1, evaluated=2)) == "0 warnings"
    assert message(best_by_accuracy("holdout", saved=1, evaluated=2)) == (
        "spec.yaml:24: training.checkpoint.keep_best.accuracy_on: no set of that name is evaluated\n"
        "    24 |   checkpoint: {every_steps: 1, keep_best: {accuracy_on: holdout}}\n"
        "  given: holdout    allowed: held_out\n"
        "1 error; nothing was run"
    )
    assert message(best_by_accuracy("held_out", saved=2, evaluated=0)) == (
        "spec.yaml:24: training.checkpoint.keep_best.accuracy_on: nothing is evaluated during training\n"
        "    24 |   checkpoint: {every_steps: 2, keep_best: {accuracy_on: held_out}}\n"
        "  given: held_out\n"
        "  hint: write evaluation.every_steps, e.g. 2\n"
        "1 error; nothing was run"
    )
    assert message(best_by_accuracy("held_out", saved=2, evaluated=3)) == (
        "spec.yaml:25: evaluation.every_steps: not every evaluated step has a checkpoint\n"
        "    25 | evaluation: {every_steps: 3}\n"
        "  given: 3, with a checkpoint every 2 steps    allowed: a multiple of 2\n"
        "  hint: or change training.checkpoint.every_steps\n"
        "1 error; nothing was run"
    )


def test_the_best_checkpoint_is_chosen_by_one_thing():
    text = best_by_accuracy("held_out, metric: entropy", saved=1, evaluated=2)
    assert "keep_best: cannot use both accuracy_on and metric: set one of them" in message(text)


def test_a_field_with_a_default_that_changes_nothing_leaves_earlier_results_valid():
    plain = Training(steps=1, prompts_per_step=1, group_size=1)
    assert "lora" not in plain.identity()
    assert plain.model_copy(update={"lora": Lora(rank=2)}).identity()["lora"]["rank"] == 2


def test_a_learning_rate_without_its_exponent_is_asked_about():
    text = changed("steps: 4", "steps: 4\n  optimizer: {learning_rate: %s}")
    assert warnings(text % "1") == (
        "spec.yaml:21: training.optimizer.learning_rate: an update would change the weights by more than their size\n"
        "    21 |   optimizer: {learning_rate: 1}\n"
        "  given: 1\n"
        "  hint: post-training takes 1e-7 to 1e-4, a small model from scratch 1e-3\n"
        "1 warning"
    )
    assert warnings(text % "3e-2") == "0 warnings"


def test_schedule_free_takes_one_learning_rate():
    section = "steps: 4\n  optimizer: {type: schedule_free_adamw, learning_rate: {schedule: [[1, 1e-3], [3, 1e-4]]}}"
    assert message(changed("steps: 4", section)).startswith(
        "spec.yaml:21: training.optimizer.learning_rate: schedule_free_adamw weights each iterate by its"
        " rate, and supports one peak\n"
    )
