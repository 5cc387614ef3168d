"""Messages for each kind of mistake, word for word."""

import re
from pathlib import Path

import pytest
from spec_text import GOOD, changed, message, write

import specs
from specs.errors import SpecError
from specs.loader import load_experiment, load_study
from specs.schema import fields
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest, split, unknown
from specs.schema.training import Training

WORD_FOR_WORD = {
    "an unknown key, with its nearest name": (
        changed("    low: 0.2", "    hi: 0.2"),
        "spec.yaml:18: objective.clip.hi: unknown field\n"
        "    18 |     hi: 0.2\n"
        "  allowed: branch, dual, high, keep_divergence, low, type\n"
        "  hint: did you mean `high`?\n",
    ),
    "a wrong type, with the allowed values": (
        changed("steps: 4", "steps: soon"),
        "spec.yaml:20: training.steps: must be a whole number\n"
        "    20 |   steps: soon\n"
        '  given: "soon"    allowed: a whole number, at least 1\n'
        "  hint: Number of steps; each trains on one batch of rollouts.\n",
    ),
    "out of range, with the range": (
        changed("low: 0.2", "low: 1.2"),
        "spec.yaml:18: objective.clip.low: must be less than 1\n"
        "    18 |     low: 1.2\n"
        "  given: 1.2    allowed: a number in (0, 1)\n"
        "  hint: Margin below ratio 1: with a negative advantage a token is clipped below 1 - low.\n",
    ),
    "a missing field, at its section": (
        changed("  steps: 4\n", ""),
        "spec.yaml:19: training.steps: missing\n"
        "    19 | training:\n"
        "  allowed: a whole number, at least 1\n"
        "  hint: Number of steps; each trains on one batch of rollouts.\n",
    ),
    "an unknown type lists the types": (
        changed("type: dual", "type: duel"),
        "spec.yaml:17: objective.clip.type: unknown type\n"
        "    17 |     type: duel\n"
        '  given: "duel"    allowed: none, dual, truncate, value\n'
        "  hint: did you mean `dual`?\n",
    ),
    "a section that must say its type and does not": (
        changed("  source: scratch\n", ""),
        "spec.yaml:2: model.source: missing\n"
        "    2 | model:\n"
        "  allowed: pretrained, scratch\n"
        "  hint: say which source it is\n",
    ),
    "a duplicate key names both places": (
        changed("  steps: 4\n", "  steps: 4\n  epochs: 1\n  steps: 5\n"),
        "spec.yaml:22: the key `steps` is given twice\n    22 |   steps: 5\n  hint: first given on line 20\n",
    ),
    "a file that is not utf8": (
        "name: caf\xe9\n".encode("latin-1"),
        "spec.yaml:1: not UTF-8 text\n  given: byte 0xe9\n  hint: save the file as UTF-8\n",
    ),
    "an alias of itself": (
        "a: &a\n  b: *a\n",
        "spec.yaml:2: the alias *a refers to itself\n    2 |   b: *a\n",
    ),
    "a file too large": (
        b"#" * 300_000,
        "spec.yaml: the file is too large\n  allowed: at most 262144 bytes\n",
    ),
    "a tag": (
        "name: !!python/object/apply:os.system [ls]\n",
        "spec.yaml:1: tags are not allowed\n"
        "    1 | name: !!python/object/apply:os.system [ls]\n"
        "  given: tag:yaml.org,2002:python/object/apply:os.system\n"
        "  hint: write the value plainly\n",
    ),
    "text that is no yaml": (
        "name: [a\nb: c\n",
        "spec.yaml:1: the `[` is never closed\n    1 | name: [a\n  hint: a `]` is missing\n",
    ),
    "a context too short": (
        changed("max_response_length: 32", "max_response_length: 40"),
        "spec.yaml:11: rollout.max_response_length: prompt and response do not fit the model's context\n"
        "    11 | rollout: {max_response_length: 40}\n"
        "  given: 32 + 40 = 72 tokens    allowed: at most 64 tokens together\n"
        "  hint: lower data.max_prompt_length or rollout.max_response_length, or take a model with a longer context\n",
    ),
    "a batch that does not divide": (
        changed("minibatches: 2", "minibatches: 3"),
        "spec.yaml:23: training.minibatches: the batch does not divide evenly\n"
        "    23 |   minibatches: 3\n"
        "  given: 4 x 4 responses in 3 parts    allowed: 1, 2, 4, 8, 16\n"
        "  hint: minibatches must divide prompts_per_step x group_size\n",
    ),
}
"""Mistake -> the spec that has it, and its message."""


@pytest.mark.parametrize(("spec", "said"), WORD_FOR_WORD.values(), ids=WORD_FOR_WORD)
def test_each_mistake_has_its_message_word_for_word(spec: str | bytes, said: str):
    assert message(spec) == said + "1 error; nothing was run"


def test_text_and_true_are_no_numbers_and_text_is_not_true():
    text = changed("steps: 4", 'steps: "4"\n  epochs: true\n  gradient_checkpointing: no\n  zero_stage: true')
    text = text.replace("kl_coef: 1e-2", "kl_coef: '1e-2'")
    assert message(text).count("\n  given: ") == 5
    assert "objective.kl_coef: must be a number" in message(text)
    assert "training.zero_stage: must be one of the values allowed" in message(text)
    assert "training.gradient_checkpointing: must be true or false" in message(text)
    assert 'given: "no"    allowed: true, false, selective' in message(text)


def test_a_missing_file_is_told_where_it_is_named():
    write("{}\n", "train.jsonl")
    folder = write("", "x").absolute().parent
    text = changed("{source: reasoning_gym, task: chain_sum, size: 100}", "{source: jsonl, path: trian.jsonl}")
    assert message(text) == (
        "spec.yaml:7: data.train.0.path: no such file\n"
        "    7 |     - {source: jsonl, path: trian.jsonl}\n"
        f"  given: {folder}/trian.jsonl\n"
        "  hint: did you mean `train.jsonl`?\n"
        "1 error; nothing was run"
    )


def test_a_missing_model_directory():
    folder = write("", "x").absolute().parent
    text = changed(
        "  source: scratch\n  config: {hidden_size: 32, max_position_embeddings: 64}\n",
        "  source: pretrained\n  path: ./models/mine\n",
    )
    assert message(text) == (
        "spec.yaml:4: model.path: no such model directory\n"
        "    4 |   path: ./models/mine\n"
        f"  given: {folder / 'models' / 'mine'}\n"
        f"  hint: there is no directory {folder / 'models'}\n"
        "1 error; nothing was run"
    )


def test_a_missing_spec_file_and_a_directory():
    write(GOOD, "small.yaml")
    with pytest.raises(SpecError) as missing:
        load_experiment("smal.yaml")
    assert str(missing.value) == "smal.yaml: no such file\n  hint: did you mean `small.yaml`?"
    with pytest.raises(SpecError) as directory:
        load_experiment(".")
    assert str(directory.value) == ".: cannot be read: Is a directory\n  hint: did you mean `./small.yaml`?"


def test_an_empty_file():
    said = "spec.yaml: the file is empty\n  hint: `rpg init` writes a spec to start from\n1 error; nothing was run"
    assert message("") == message("# nothing yet\n") == message("---\n") == said


def test_an_alias_bomb():
    rows = "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert message("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + rows) == (
        "spec.yaml:4: too many values\n"
        "    4 | d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
        "  allowed: at most 10000\n"
        "  hint: aliases count as often as they are used\n"
        "1 error; nothing was run"
    )


def test_deep_nesting():
    assert message("a:\n  " + "[" * 40 + "]" * 40 + "\n") == (
        "spec.yaml:2: nested too deeply\n"
        f"    2 |   {'[' * 40}{']' * 40}\n"
        "  allowed: at most 32 levels\n"
        "1 error; nothing was run"
    )
    assert "nested too deeply" in message("[" * 100_000)


def test_a_setting_of_an_unknown_path():
    assert message(GOOD, "training.step=5") == (
        "--set training.step=5: training.step: unknown field\n"
        f"  allowed: {', '.join(sorted(Training.model_fields))}\n"
        "  hint: did you mean `steps`?\n"
        "1 error; nothing was run"
    )


def test_a_setting_out_of_range_is_told_as_a_setting():
    assert message(GOOD, "objective.clip.low=2", "training.steps", "data.train.1.size=3") == (
        "--set training.steps: a setting needs a value\n"
        "  allowed: path.to.field=value\n"
        "--set data.train.1.size=3: data.train.1: no such item\n"
        "  allowed: 0 to 0\n"
        "2 errors; nothing was run"
    )
    assert message(GOOD, "objective.clip.low=2").startswith(
        "--set objective.clip.low=2: objective.clip.low: must be less than 1\n"
        "  given: 2    allowed: a number in (0, 1)\n"
    )


@pytest.mark.parametrize(
    ("where", "line", "hint"),
    [
        ("training:\n  steps: 4\n", "steps: 4\ntraining:\n", "here it is `training.steps`"),
        ("  minibatches: 2\n", "  temperature: 1.0\n", "here it is `rollout.temperature` or `evaluation.temperature`"),
        ("  minibatches: 2\n", "  learning_rate: 1e-5\n", "here it is `training.optimizer.learning_rate`"),
        ("reward:", "clip: {low: 0.1}\nreward:", "here it is `objective.clip`"),
        ("reward:", "matrix: {product: {kl_coef: [0, 1]}}\nreward:", "here it is `objective.kl_coef`"),
        ("reward:", "train: {seed: 1}\nreward:", "seed: here it is `seeds`"),
        ("reward:", "trainer: {save_freq: 5}\nreward:", "save_freq: here it is `training.checkpoint.every_steps`"),
        ("reward:", "orchestrator: {group_size: 8}\nreward:", "group_size: here it is `training.group_size`"),
        ("reward:", "trainig: {steps: 4}\nreward:", "did you mean `training`?"),
        (
            "reward:",
            "batch_size: 128\nreward:",
            "a step has `training.prompts_per_step` x `training.group_size` responses",
        ),
        ("reward:", "rollouts_per_example: 8\nreward:", "here it is `training.group_size`"),
        ("reward:", "eval_dataset: [a]\nreward:", "here it is `data.evaluation`"),
        ("reward:", "dataset_name: a\nreward:", "here it is `data.train`"),
        ("  minibatches: 2\n", "  lora_alpha: 9\n", "here it is `training.lora.alpha`"),
        ("data:\n", "data:\n  train_batch_size: 9\n", "here it is `training.prompts_per_step`"),
        ("reward:", "evaluation: {save_freq: 9}\nreward:", "here it is `training.checkpoint.every_steps`"),
        ("reward:", "logging_steps: 9\nreward:", "leave it out: every step and every response is recorded"),
        ("  minibatches: 2\n", "  seq_len: 9\n", "two limits, in tokens: `data.max_prompt_length` and "),
        ("rollout: {", "rollout: {placement: dedicated, ", "only with `engine: vllm`"),
        ("rollout: {", "rollout: {engine_gpus: [0], ", "only with `engine: vllm`"),
        (
            "  type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual\n    low: 0.2\n",
            "  type: formula\n  weight: w*A\n  claim: none\n  kl_coef: 1e-2\n",
            "not with `type: formula`",
        ),
        ("reward:", "rollouts: {temperature: 2}\nreward:", "did you mean `rollout`?"),
    ],
)
def test_a_known_field_at_the_wrong_level_gets_its_path(where, line, hint):
    said = message(changed(where, line))
    assert f"  hint: {hint}" in said
    assert said.endswith("1 error; nothing was run")


def test_settings_have_the_hints_of_keys():
    said = message(GOOD, "steps=3", "trainer.total_training_steps=3", "trainig.steps=3")
    hints = [line.partition("hint: ")[2] for line in said.splitlines() if "hint: " in line]
    assert hints == ["here it is `training.steps`"] * 2 + ["did you mean `training`?"]


def test_what_others_call_a_field_leads_to_a_field():
    paths = [path for path in fields._OURS if path in Experiment.model_fields or "." in path]
    assert len(paths) > 50
    assert [path for path in paths if unknown(Experiment, split(path))] == []


def test_the_names_of_the_page_on_other_frameworks_are_known():
    page = (Path(specs.__file__).parent.parent / "docs" / "coming-from.md").read_text("utf-8")
    tables = [
        page.partition("From TRL")[2].partition("| TRL logs")[0],
        page.partition("From verl")[2].partition("A com")[0],
    ]
    rows = [line.split(" | ")[0] for line in "".join(tables).splitlines() if line.startswith("| `")]
    theirs = [name.rpartition(".")[2] for row in rows for name in re.findall("`([a-z_.]+)`", row)]
    here = {"grpo", "dr_grpo", "dapo"}
    assert len(theirs) > 40
    assert [name for name in theirs if name not in here and not nearest(name, (), root=Experiment)] == []


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("name: small", "name: small\nseeds: 2", "2 runs are [0, 1], the seed 2 alone is [2]"),
        ("name: small", "name: small\nseeds: 42", "one run with this seed is [42], three runs are [0, 1, 2]"),
        ("name: small", "name: My Small_Run", "write `my-small-run`"),
    ],
)
def test_a_value_in_the_wrong_form_gets_the_right_one(old, new, hint):
    assert f"  hint: {hint}\n1 error; nothing was run" in message(changed(old, new))


def test_files_that_extend_each_other():
    write("extends: spec.yaml\n", "other.yaml")
    assert message("name: a\nextends: other.yaml\n") == (
        "other.yaml:1: extends: extends itself\n"
        "    1 | extends: spec.yaml\n"
        "  given: spec.yaml -> other.yaml -> spec.yaml\n"
        "1 error; nothing was run"
    )


def test_everything_wrong_is_told_at_once_in_file_order():
    text = changed("steps: 4", "steps: 0").replace("low: 0.2", "low: 1.2").replace("size: 100", "siz: 100")
    start = text.index("training:")
    said = message(text[start:] + text[:start])
    assert [line.split(": ")[1] for line in said.splitlines() if line.startswith("spec.yaml:")] == [
        "training.steps",
        "data.train.0.siz",
        "objective.clip.low",
    ]
    assert said.endswith("\n3 errors; nothing was run")


def test_what_a_terminal_would_obey_is_shown_as_an_escape():
    said = message('"na\\e[31mme": 1\n')
    assert "\x1b" not in said
    assert "na\\x1b[31mme: unknown field" in said


def test_a_study_where_an_experiment_belongs_and_the_reverse():
    with pytest.raises(SpecError) as study:
        load_experiment(write("experiment: a.yaml\ntrials: 3\n", "study.yaml"))
    assert str(study.value) == "study.yaml: this is a study, not an experiment\n  hint: `rpg study run study.yaml`"
    with pytest.raises(SpecError) as experiment:
        load_study(write(GOOD))
    assert str(experiment.value) == "spec.yaml: this is an experiment, not a study\n  hint: `rpg run spec.yaml`"


@pytest.mark.parametrize("name", ["a\\0b", "x" * 5000, "/dev/null/x"])
def test_a_path_that_no_file_can_have_is_a_missing_file(name):
    model = "  source: scratch\n  config: {hidden_size: 32, max_position_embeddings: 64}\n"
    source = "{source: reasoning_gym, task: chain_sum, size: 100}"
    assert "spec.yaml:1: extends: " in message(f'extends: "{name}"\n')
    assert "data.train.0.path: no such file" in message(changed(source, f'{{source: parquet, path: "{name}"}}'))
    assert "model.path: no such model dir" in message(changed(model, f'  source: pretrained\n  path: "./{name}"\n'))


def test_a_device_without_end_is_not_read():
    with pytest.raises(SpecError, match="/dev/zero: cannot be read: a device, not a file"):
        load_experiment("/dev/zero")


def test_numbers_that_are_none_are_refused():
    assert "model.config.eps: " in message(changed("hidden_size: 32", "hidden_size: 32, eps: .nan"))
    assert "objective.kl_coef: must be a finite number" in message(changed("kl_coef: 1e-2", "kl_coef: .inf"))


def test_an_empty_key_is_shown_as_one():
    told = message(changed("hidden_size: 32", "hidden_size: 32, '': .nan"))
    assert 'model.config."": must be a finite number' in told
