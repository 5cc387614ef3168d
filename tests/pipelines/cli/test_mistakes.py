"""The mistakes of a new user: each named before any stage starts, with exit code 2 and nothing left behind."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import specs
from pipelines.cli import main
from pipelines.home.home import Home
from specs.extensions import our_names
from specs.schema.reward import Reward

STARTER = (Path(specs.__file__).parent / "experiments" / "starter.yaml").read_text("utf-8").partition("\n")[2]
MODEL = STARTER[STARTER.index("  source: scratch") : STARTER.index("data:\n")]
TRAIN = STARTER[STARTER.index("    - source: reasoning_gym") : STARTER.index("  evaluation:   ")]
STUDY = """\
name: margins
experiment: spec.yaml
parameters: {objective.clip.low: {float: [0.1, 0.3]}}
goal: {dataset: held_out, metric: mean@8}
trials: 16
"""
ROW = '{"question": "1 + 1", "answer": "2"}\n'
Files = dict[str, str]


def spec(old: str = "", new: str = "", **files: str) -> Files:
    """The starter's spec with one part replaced, and other files beside it."""
    assert not old or STARTER.count(old) >= 1, old
    return {"spec.yaml": STARTER.replace(old, new, 1) if old else STARTER, **files}


MISTAKES: dict[str, tuple[Files, str, str]] = {
    "a key with a typo": (
        spec("  steps: 40 ", "  step: 40 "),
        "run spec.yaml",
        """\
spec.yaml:70: training.step: unknown field
    70 |   step: 40                  # batches of prompts_per_step x group_size responses
  allowed: attention, checkpoint, entropy_coef, epochs, export_every_steps, gradient_checkpointing, \
gradient_reduction, group_size, guards, kernels, lora, mask_truncated, microbatch_tokens, minibatches, offload, \
on_not_finite, optimizer, packing, precision, prompts_per_step, ranks, router_aux_loss_coef, schedule, \
sequence_parallel_size, skip_zero_advantage, steps, zero_stage
  hint: did you mean `steps`?
1 error; nothing was run
""",
    ),
    "a tab": (
        spec("  divergence: unn", "\tdivergence: unn"),
        "run spec.yaml",
        """\
spec.yaml:60: a tab: YAML allows only spaces
    60 |  divergence: unnormalized_reverse
  hint: write spaces in its place
1 error; nothing was run
""",
    ),
    "a brace that is missing": (
        spec("high: 0.28}", "high: 0.28"),
        "run spec.yaml",
        """\
spec.yaml:63: the `{` is never closed
    63 |   clip: {type: dual, low: 0.2, high: 0.28
  hint: a `}` is missing
1 error; nothing was run
""",
    ),
    "a colon that is missing": (
        spec("  group_size: 8", "  group_size 8"),
        "run spec.yaml",
        """\
spec.yaml:72: a colon is missing after `group_size`
    72 |   group_size 8
  hint: write `group_size: 8`
1 error; nothing was run
""",
    ),
    "a line that is indented too far": (
        spec("  group_size: 8", "   group_size: 8"),
        "run spec.yaml",
        """\
spec.yaml:72: indented under line 71, which has a value already
    72 |    group_size: 8
  hint: entries of one section begin at the same column
1 error; nothing was run
""",
    ),
    "a quote that is missing": (
        spec('expression} ="}', "expression} =}"),
        "run spec.yaml",
        """\
spec.yaml:42: the `"` is never closed
    42 |   prompt: {type: template, template: "{metadata.expression} =}    # type chat takes the tokenizer's \
own template
  hint: a `"` is missing
1 error; nothing was run
""",
    ),
    "a unit": (
        spec("  steps: 40 ", "  steps: 40k "),
        "run spec.yaml",
        """\
spec.yaml:70: training.steps: must be a whole number
    70 |   steps: 40k                  # batches of prompts_per_step x group_size responses
  given: "40k"    allowed: a whole number, at least 1
  hint: Number of steps; each trains on one batch of rollouts.
1 error; nothing was run
""",
    ),
    "a number in quotes": (
        spec("learning_rate: 1e-4", 'learning_rate: "1e-4"'),
        "run spec.yaml",
        """\
spec.yaml:74: training.optimizer.learning_rate: must be a number
    74 |   optimizer: {learning_rate: "1e-4"}
  given: "1e-4"    allowed: a number, greater than 0
  hint: Peak learning rate; `schedule.type` and the warm-up scale it.
1 error; nothing was run
""",
    ),
    "a margin beyond its range": (
        spec("low: 0.2", "low: 1.2"),
        "run spec.yaml",
        """\
spec.yaml:63: objective.clip.low: must be less than 1
    63 |   clip: {type: dual, low: 1.2, high: 0.28}
  given: 1.2    allowed: a number in (0, 1)
  hint: Margin below ratio 1: with a negative advantage a token is clipped below 1 - low.
1 error; nothing was run
""",
    ),
    "a batch that does not divide": (
        spec("minibatches: 2 ", "minibatches: 3 "),
        "run spec.yaml",
        """\
spec.yaml:73: training.minibatches: the batch does not divide evenly
    73 |   minibatches: 3             # optimizer updates in a step; with 1 the clip can never fire
  given: 32 x 8 responses in 3 parts    allowed: 1, 2, 4, 8, 16, 32, 64, 128, 256
  hint: minibatches must divide prompts_per_step x group_size
1 error; nothing was run
""",
    ),
    "responses longer than the context": (
        spec("max_response_length: 8", "max_response_length: 80"),
        "run spec.yaml",
        """\
spec.yaml:54: rollout.max_response_length: prompt and response do not fit the model's context
    54 |   max_response_length: 80
  given: 16 + 80 = 96 tokens    allowed: at most 64 tokens together
  hint: lower data.max_prompt_length or rollout.max_response_length, or take a model with a longer context
1 error; nothing was run
""",
    ),
    "a reward that there is not": (
        spec("exact_match", "exactmatch"),
        "run spec.yaml",
        """\
spec.yaml:56: reward.type: unknown type
    56 | reward: {type: exactmatch}  # or math_verify, math_dapo, reasoning_gym
  given: "exactmatch"    allowed: """
        + ", ".join(our_names(Reward.package))
        + """
  hint: did you mean `exact_match`? a package with an entry point in `rpg.rewards` adds another
1 error; nothing was run
""",
    ),
    "an evaluation set that there is not": (
        spec("  samples_per_problem: 8 ", "  datasets: [heldout]\n  samples_per_problem: 8 "),
        "run spec.yaml",
        """\
spec.yaml:78: evaluation.datasets.0: no such evaluation set
    78 |   datasets: [heldout]
  given: heldout    allowed: held_out
1 error; nothing was run
""",
    ),
    "a path of the matrix with a typo": (
        spec("model:  ", "matrix: {product: {objective.kl_coeff: [1e-2, 1e-1]}}\nmodel:  "),
        "run spec.yaml",
        """\
spec.yaml:13: matrix.product[objective.kl_coeff]: unknown field
    13 | matrix: {product: {objective.kl_coeff: [1e-2, 1e-1]}}
  allowed: aggregation, claim, clip, clipped, divergence, estimator, kl, kl_coef, \
kl_estimator, kl_in, kl_top_k, kl_weighted, level, loss, max_ratio, parameters, type, weight
  hint: did you mean `kl_coef`?
1 error; nothing was run
""",
    ),
    "a model directory that there is not": (
        spec(MODEL, "  source: pretrained\n  path: ./my-model\n"),
        "run spec.yaml",
        """\
spec.yaml:15: model.path: no such model directory
    15 |   path: ./my-model
  given: DIR/my-model
  hint: a Hub id is written without a leading dot or slash: Qwen/Qwen3-4B-Base
1 error; nothing was run
""",
    ),
    "a model without weights": (
        spec(MODEL, "  source: pretrained\n  path: ./mine\n", **{"mine/config.json": '{"model_type": "qwen3"}'}),
        "run spec.yaml",
        """\
spec.yaml:15: model.path: the model has no weights as safetensors
    15 |   path: ./mine
  given: DIR/mine
  hint: pickled weights (*.bin) can run code and are not read; if you trust them, convert them: \
AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)
1 error; nothing was run
""",
    ),
    "an architecture that there is not": (
        spec("model_type: qwen3", "model_type: qwen33"),
        "run spec.yaml",
        """\
spec.yaml:15: model.model_type: transformers knows no such decoder architecture
    15 |   model_type: qwen33
  given: qwen33
  hint: did you mean `qwen3`?
1 error; nothing was run
""",
    ),
    "a setting of the architecture with a typo": (
        spec("hidden_size: 128", "hiden_size: 128"),
        "run spec.yaml",
        """\
spec.yaml:17: model.config.hiden_size: qwen3 has no such setting
    17 |     hiden_size: 128
  given: 128
  hint: did you mean `hidden_size`?
1 error; nothing was run
""",
    ),
    "a word for true that YAML no longer has": (
        spec("tie_word_embeddings: true", "tie_word_embeddings: yes"),
        "run spec.yaml",
        """\
spec.yaml:24: model.config.tie_word_embeddings: transformers cannot build qwen3 with these settings: Validation \
error for field 'tie_word_embeddings': TypeError: Field 'tie_word_embeddings' expected bool, got str (value: 'yes')
    24 |     tie_word_embeddings: yes
  given: tie_word_embeddings: yes
1 error; nothing was run
""",
    ),
    "a size with a unit": (
        spec("max_position_embeddings: 64", "max_position_embeddings: 64k"),
        "plan spec.yaml",
        """\
spec.yaml:23: model.config.max_position_embeddings: must be a whole number
    23 |     max_position_embeddings: 64k
  given: 64k    allowed: a whole number, at least 1
1 error; nothing was run
""",
    ),
    "no heads": (
        spec("num_attention_heads: 4", "num_attention_heads: 0"),
        "plan spec.yaml",
        """\
spec.yaml:20: model.config.num_attention_heads: must be a whole number
    20 |     num_attention_heads: 0
  given: 0    allowed: a whole number, at least 1
1 error; nothing was run
""",
    ),
    "a merge key": (
        spec("reward: {type", "reward: {<<: {timeout_seconds: 5}, type"),
        "plan spec.yaml",
        """\
spec.yaml:56: YAML 1.2 has no merge key `<<`
    56 | reward: {<<: {timeout_seconds: 5}, type: exact_match}  # or math_verify, math_dapo, reasoning_gym
  hint: `extends: FILE` lays a file over another; `*name` repeats a whole section
1 error; nothing was run
""",
    ),
    "an item of a list as Python writes it": (
        spec(),
        "validate spec.yaml --set data.train[0].size=3",
        """\
--set data.train[0].size=3: data.train[0]: unknown field
  allowed: deduplicate, evaluation, max_prompt_length, order, overlap, prompt, train
  hint: did you mean `data.train.0.size`?
1 error; nothing was run
""",
    ),
    "an item of a list without its number": (
        spec(),
        "validate spec.yaml --set data.train.size=3",
        """\
--set data.train.size=3: data.train: has no fields
  hint: items have numbers: `data.train.0.size`
1 error; nothing was run
""",
    ),
    "the directory of a spec": (
        {"mine/experiment.yaml": STARTER},
        "run mine",
        """\
mine: cannot be read: Is a directory
  hint: did you mean `mine/experiment.yaml`?
1 error; nothing was run
""",
    ),
    "settings of the architecture that contradict each other": (
        spec("num_attention_heads: 4", "num_attention_heads: 5"),
        "run spec.yaml",
        """\
spec.yaml:16: model.config: transformers cannot build qwen3 with these settings: Number of heads in key and \
value must divide the number of heads in
    16 |   config:                    # fields of that architecture's transformers config
  given: hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 5, \
num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 64, tie_word_embeddings: True
1 error; nothing was run
""",
    ),
    "a task of reasoning_gym that there is not": (
        spec("task: chain_sum", "task: chainsum"),
        "run spec.yaml",
        """\
spec.yaml:31: data.train.0.task: unknown task
    31 |       task: chainsum
  given: chainsum    allowed: one of reasoning_gym's 106 tasks
  hint: did you mean `chain_sum`?
1 error; nothing was run
""",
    ),
    "a setting of the task with a typo": (
        spec("min_terms: 2", "min_term: 2"),
        "run spec.yaml",
        """\
spec.yaml:32: data.train.0.config.min_term: unknown setting of chain_sum
    32 |       config: {min_term: 2, max_terms: 2, min_digits: 1, max_digits: 2}
  given: min_term    allowed: allow_negation, max_digits, max_terms, min_digits, min_terms
  hint: did you mean `min_terms`?
1 error; nothing was run
""",
    ),
    "bounds of the task the wrong way round": (
        spec("min_terms: 2, max", "min_terms: 5, max"),
        "run spec.yaml",
        """\
spec.yaml:32: data.train.0.config: reasoning_gym rejects the settings of chain_sum: max_terms must be >= min_terms
    32 |       config: {min_terms: 5, max_terms: 2, min_digits: 1, max_digits: 2}
  given: min_terms: 5, max_terms: 2, min_digits: 1, max_digits: 2
1 error; nothing was run
""",
    ),
    "a data file that there is not": (
        spec(TRAIN, "    - {source: jsonl, path: trian.jsonl}\n", **{"train.jsonl": ROW}),
        "run spec.yaml",
        """\
spec.yaml:30: data.train.0.path: no such file
    30 |     - {source: jsonl, path: trian.jsonl}
  given: DIR/trian.jsonl
  hint: did you mean `train.jsonl`?
1 error; nothing was run
""",
    ),
    "a column that there is not": (
        spec(TRAIN, "    - {source: jsonl, path: train.jsonl}\n", **{"train.jsonl": ROW}),
        "run spec.yaml",
        """\
spec.yaml:30: data.train.0.columns.prompt: train.jsonl, line 1 has no column `prompt`
    30 |     - {source: jsonl, path: train.jsonl}
  given: prompt    allowed: question, answer
  hint: say which column holds the prompt: `columns: {prompt: ...}`
spec.yaml:30: data.train.0.columns.answer: train.jsonl, line 1 has no column `reward_model.ground_truth`
    30 |     - {source: jsonl, path: train.jsonl}
  given: reward_model.ground_truth    allowed: question, answer
  hint: say which column holds the answer: `columns: {answer: ...}`
2 errors; nothing was run
""",
    ),
    "a line that is no JSON": (
        spec(
            TRAIN,
            "    - {source: jsonl, path: train.jsonl, columns: {prompt: question, answer: answer}}\n",
            **{"train.jsonl": ROW[:-1]},
        ),
        "run spec.yaml",
        """\
spec.yaml:38: data.prompt.template: set `train` has no field {metadata.expression}
    38 |   prompt: {type: template, template: "{metadata.expression} ="}    # type chat takes the tokenizer's \
own template
  given: {metadata.expression} =    allowed: {prompt}
1 error; nothing was run
""",
    ),
    "a field of the template with a typo": (
        spec("{metadata.expression}", "{metadata.expresion}"),
        "run spec.yaml",
        """\
spec.yaml:42: data.prompt.template: set `chain_sum` has no field {metadata.expresion}
    42 |   prompt: {type: template, template: "{metadata.expresion} ="}    # type chat takes the tokenizer's \
own template
  given: {metadata.expresion} =    allowed: {prompt}, {metadata.difficulty}, {metadata.expression}, \
{metadata.num_digits}, {metadata.num_terms}, {metadata.source_dataset}, {metadata.source_index}
  hint: did you mean `metadata.expression`?
spec.yaml:42: data.prompt.template: set `held_out` has no field {metadata.expresion}
    42 |   prompt: {type: template, template: "{metadata.expresion} ="}    # type chat takes the tokenizer's \
own template
  given: {metadata.expresion} =    allowed: {prompt}, {metadata.difficulty}, {metadata.expression}, \
{metadata.num_digits}, {metadata.num_terms}, {metadata.source_dataset}, {metadata.source_index}
  hint: did you mean `metadata.expression`?
2 errors; nothing was run
""",
    ),
    "a chat prompt for a model without a template": (
        spec('{type: template, template: "{metadata.expression} ="}', "{type: chat}"),
        "run spec.yaml",
        """\
spec.yaml:42: data.prompt.type: the model's tokenizer has no chat template
    42 |   prompt: {type: chat}    # type chat takes the tokenizer's own template
  given: chat
  hint: write `type: template`, a `chat_template`, or take a model that was tuned for chat
1 error; nothing was run
""",
    ),
    "prompts longer than their limit": (
        spec("max_prompt_length: 16", "max_prompt_length: 6"),
        "run spec.yaml",
        """\
spec.yaml:44: data.max_prompt_length: 64 of the first 64 prompts of `held_out` are longer than \
max_prompt_length; the longest has 9 tokens
    44 |   max_prompt_length: 6      # tokens; with the response it must fit the model's context
  given: 6    allowed: at least 9
1 error; nothing was run
""",
    ),
    "a GPU that there is not": (
        spec("rollout:\n", "resources: {device: cuda}\nrollout:\n"),
        "run spec.yaml",
        """\
spec.yaml:51: resources.device: there is no GPU here
    51 | resources: {device: cuda}
  given: cuda    allowed: auto, cpu
1 error; nothing was run
""",
    ),
    "a study that is run as an experiment": (
        spec(**{"study.yaml": STUDY}),
        "run study.yaml",
        """\
study.yaml: this is a study, not an experiment
  hint: `rpg study run study.yaml`
1 error; nothing was run
""",
    ),
    "a study's bounds the wrong way round": (
        spec(**{"study.yaml": STUDY.replace("[0.1, 0.3]", "[0.3, 0.1]")}),
        "study run study.yaml",
        """\
study.yaml:3: parameters[objective.clip.low]: the lower end must come first
    3 | parameters: {objective.clip.low: {float: [0.3, 0.1]}}
  given: [0.3, 0.1]    allowed: [low, high]
  hint: write [0.1, 0.3]
1 error; nothing was run
""",
    ),
    "a setting of a field that there is not": (
        spec(),
        "run spec.yaml --set training.stepz=3",
        """\
--set training.stepz=3: training.stepz: unknown field
  allowed: attention, checkpoint, entropy_coef, epochs, export_every_steps, gradient_checkpointing, \
gradient_reduction, group_size, guards, kernels, lora, mask_truncated, microbatch_tokens, minibatches, offload, \
on_not_finite, optimizer, packing, precision, prompts_per_step, ranks, router_aux_loss_coef, schedule, \
sequence_parallel_size, skip_zero_advantage, steps, zero_stage
  hint: did you mean `steps`?
1 error; nothing was run
""",
    ),
    "a setting without a value": (
        spec(),
        "run spec.yaml --set training.steps",
        """\
--set training.steps: a setting needs a value
  allowed: path.to.field=value
1 error; nothing was run
""",
    ),
    "a setting of the wrong type": (
        spec(),
        "run spec.yaml --set training.steps=many",
        """\
--set training.steps=many: training.steps: must be a whole number
  given: "many"    allowed: a whole number, at least 1
  hint: Number of steps; each trains on one batch of rollouts.
1 error; nothing was run
""",
    ),
    "a study's setting that is its experiment's": (
        spec(**{"study.yaml": STUDY}),
        "study run study.yaml --set training.steps=3",
        """\
--set training.steps=3: training: unknown field
  allowed: budget, confirm, constraints, experiment, goal, goals, name, on_failure, overrides, parallel, \
parameters, pruner, question, sampler, seeds_per_trial, trials, warm_start
  hint: a field of the study's experiment: write it under `overrides`, as overrides.training
1 error; nothing was run
""",
    ),
    "a study's setting of the wrong type": (
        spec(**{"study.yaml": STUDY}),
        "study run study.yaml --set overrides.training.steps=x",
        """\
--set overrides.training.steps=x: overrides[training.steps]: must be a whole number
  given: "x"    allowed: a whole number, at least 1
  hint: Number of steps; each trains on one batch of rollouts.
1 error; nothing was run
""",
    ),
    "a study's data that there is not": (
        spec("task: chain_sum", "task: chainsum", **{"study.yaml": STUDY}),
        "study run study.yaml",
        """\
DIR/spec.yaml:31: data.train.0.task: unknown task
    31 |       task: chainsum
  given: chainsum    allowed: one of reasoning_gym's 106 tasks
  hint: did you mean `chain_sum`?
1 error; nothing was run
""",
    ),
    "a spec file with a typo": (
        spec(),
        "run spek.yaml",
        """\
spek.yaml: no such file
  hint: did you mean `spec.yaml`?
1 error; nothing was run
""",
    ),
    "a status that there is not": (
        {},
        "runs --status finshed",
        """\
--status finshed: no run has this status
  allowed: pending, running, finished, failed, cancelled, crashed
  hint: did you mean `finished`?
""",
    ),
    "a run that there is not": (
        {},
        "show spec-s0",
        """\
there is no run `spec-s0`: DIR/home has no runs yet; `rpg run FILE` creates one
""",
    ),
    "a table that there is not": (
        {},
        'sql "select * from metric"',
        """\
there is no table or view `metric`
  there are: accuracy_curves, artifacts, attempts, checkpoints, confirmations, drift_samples, evaluation_samples, \
evaluation_scores, evaluations, events, experiments, last_and_best, leaderboard, learning_curves, metric_names, \
metrics, provenance, rollouts, run_summary, runs, stages, studies, tokens, trials, turns, verdicts
  hint: did you mean `metrics`?
""",
    ),
}

LOOKING = "checking the data and the model\n"
"""Returns the message of a verb that checks more than the spec."""
ELSEWHERE = "  hint: set RPG_HOME to the directory for all records; by default it is .rpg here\n"
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def rpg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line in an empty directory without a GPU: exit code, stderr with DIR for the directory.

    Nothing may go to stdout, and nothing may lie in the directory afterwards that did not before.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(arguments: str, files: Files | None = None, *, home: str = "home") -> tuple[int, str]:
        monkeypatch.setenv("RPG_HOME", home.replace("DIR", str(tmp_path)))
        for name, text in (files or {}).items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["rpg", *shlex.split(arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before
        assert shown.out == ""
        return int(end.value.code or 0), shown.err.replace(str(tmp_path), "DIR").removeprefix(LOOKING)

    return call


@pytest.mark.more
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(rpg: Call, mistake: str) -> None:
    files, arguments, said = MISTAKES[mistake]
    assert rpg(arguments, files) == (2, said)


def test_a_spec_that_is_no_file_is_named(rpg: Call) -> None:
    os.mkfifo("pipe.yaml")
    Path("link.yaml").symlink_to("gone.yaml")
    assert rpg("validate pipe.yaml") == (
        2,
        "pipe.yaml: cannot be read: a pipe\n  hint: a spec is a file: write it to one\n1 error; nothing was run\n",
    )
    assert rpg("validate link.yaml") == (
        2,
        "link.yaml: a link to a file that is not there\n  given: gone.yaml\n1 error; nothing was run\n",
    )


@pytest.mark.parametrize("config", ['{"model_type": "qwen3"', "[1]", '{"hidden_size": "x", "num_hidden_layers": 0}'])
def test_a_model_whose_config_is_none_is_named(rpg: Call, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"mine/config.json": config, "mine/model.safetensors": ""}
    files = spec(MODEL, "  source: pretrained\n  path: ./mine\n", **model)
    monkeypatch.setattr(sys, "stdout", sys.stderr)  # what `rpg plan` can tell all the same
    code, said = rpg("plan spec.yaml", files)
    assert code == 2
    assert "spec.yaml:15: model.path: the model cannot be loaded: " in said
    assert said.endswith("1 error; nothing was run\n")


HOMES = {
    "DIR/file": "RPG_HOME=DIR/file: a file, not a directory\n",
    "s3://bucket/runs": "RPG_HOME=s3://bucket/runs: an address, not a directory of this machine\n",
    "DIR/file/home": "DIR/file/home cannot be created: DIR/file is a file\n",
}


@pytest.mark.parametrize("arguments", ["run spec.yaml", "up"])
@pytest.mark.parametrize("home", HOMES)
def test_a_home_that_can_be_none_is_named(rpg: Call, home: str, arguments: str) -> None:
    assert rpg(arguments, spec(file=""), home=home) == (2, HOMES[home] + ELSEWHERE)


DISKS = {
    "size=4m": (
        "no space: 4 MiB are free for DIR/disk/home, and a run needs 64 at least\n"
        "  hint: `rpg gc` frees what nothing needs; or set RPG_HOME to another disk\n"
    ),
    "size=128m,ro": "DIR/disk/home cannot be created: Read-only file system\n" + ELSEWHERE,
}


@pytest.mark.parametrize("options", DISKS)
def test_a_disk_that_takes_nothing_is_named(rpg: Call, tmp_path: Path, options: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        assert rpg("run spec.yaml", spec(), home="DIR/disk/home") == (2, DISKS[options])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_port_that_is_taken_is_named(rpg: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for verb in ("up", "report --serve", "watch --web"):
            assert rpg(f"{verb} --port {port}") == (
                2,
                f"port {port} is in use\n  hint: name another port, or omit --port to use a free one\n",
            )


def test_watch_takes_a_name_or_opens_a_browser(rpg: Call) -> None:
    code, said = rpg("watch")
    assert (code, "name a run or an experiment" in said) == (2, True)
    assert rpg("watch --web other", home="DIR/home") == (
        2,
        "there is no run `other`: DIR/home has no runs yet; `rpg run FILE` creates one\n",
    )


def test_a_directory_without_runs_says_where_it_looked(rpg: Call) -> None:
    assert rpg("runs --status failed", home="DIR/.rpg") == (
        0,
        "no failed runs in DIR/.rpg\n  hint: there is no such directory; RPG_HOME names the one that holds the \
runs\n",
    )


def test_a_tilde_in_the_name_of_the_home_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RPG_HOME", "~/runs")
    assert Home.from_environment().root == tmp_path / "runs"


DOUBTS = {
    "bounds for margins": (
        spec("low: 0.2, high: 0.28", "low: 0.8, high: 1.28"),
        """\
spec.yaml:63: objective.clip: these look like bounds, but they are margins around ratio 1
    63 |   clip: {type: dual, low: 0.8, high: 1.28}
  given: low 0.8, high 1.28: the clip acts outside [0.2, 2.28]; for the bounds [0.8, 1.28] write low: 0.2, high: 0.28
  hint: write margins: low 0.2 holds the ratio at or above 0.8
1 warning
""",
    ),
    "a rate without its exponent": (
        spec("learning_rate: 1e-4", "learning_rate: 1"),
        """\
spec.yaml:74: training.optimizer.learning_rate: an update would change the weights by more than their size
    74 |   optimizer: {learning_rate: 1}
  given: 1
  hint: post-training takes 1e-7 to 1e-4, a small model from scratch 1e-3
1 warning
""",
    ),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_can_hardly_be_meant_is_asked_about(
    doubt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, said = DOUBTS[doubt]
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(files["spec.yaml"])
    monkeypatch.setattr(sys, "argv", ["rpg", "validate", "spec.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code or 0, capsys.readouterr().err) == (0, said)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("resources.device=gpu", "did you mean `cuda`?"),
        ("objective.type=GRPO", "did you mean `grpo`?"),
        ("objective.divergence=urkl", "did you mean `unnormalized_reverse`?"),
        ("training.num_generations=4", "did you mean `group_size`?"),
        ("rollout.max_completion_length=64", "did you mean `max_response_length`?"),
        ("training.max_completion_length=64", "here it is `rollout.max_response_length`"),
        ("objective.beta=0.1", "did you mean `kl_coef`?"),
        ("objective.epsilon_high=0.28", "here it is `objective.clip.high`"),
        ("objective.clip.epsilon_high=0.28", "did you mean `high`?"),
        ("training.optimizer.learning_rate=${LR}", "a spec has no variables: give the value by `--set`"),
        ("seeds=0,1,2", "write a list in brackets: [0, 1, 2]"),
        ("model={source: pretrained, path: $HOME/model}", "write the path itself; `~` stands for your home directory"),
    ],
)
def test_what_others_call_it_is_known(
    setting: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(STARTER)
    code, _, err = call("validate", "spec.yaml", "--set", setting)
    assert code == 2
    assert f"  hint: {hint}" in err
    assert err.endswith("1 error; nothing was run\n")


def test_a_group_of_one_points_at_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(STARTER.replace("group_size: 8", "group_size: 1\n  epochs: 1"))
    _, _, err = call("validate", "spec.yaml", "--set", "advantage.scale=group_std")
    assert err.splitlines()[1].strip().endswith("|   group_size: 1")
