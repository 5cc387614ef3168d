"""A frozen model as the reference: exact gradients, the tokens' own logprobs, resumption, and errors."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rpg.objectives import token_losses
from rpg.preflight import examine
from specs import Experiment, SpecError, load_experiment, parse_objective
from tests.rpg.test_pause import assert_trained_alike, set_inputs
from tests.rpg.tiny_run import SPEC, TOKENS, make_inputs, make_run, rows, train

TRAINING = {"steps": 8, "checkpoint": {"every_steps": 3}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and teacher."""
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    make_teacher(directory)
    return directory


def make_teacher(directory: Path) -> None:
    """Makes a teacher of another architecture than the base model there, with the same tokenizer, its logits padded."""
    torch.manual_seed(1)
    config = GPT2Config(
        **{"vocab_size": 8, "n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2},
        **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1},
    )
    teacher = GPT2LMHeadModel(config)
    for parameter in teacher.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)  # far from uniform
    teacher.save_pretrained(directory / "teacher")
    AutoTokenizer.from_pretrained(directory / "base").save_pretrained(directory / "teacher")


def taught(inputs: Path) -> dict[str, dict[str, Any]]:
    """A run whose reference is the teacher, beside no reward."""
    return {
        "reference": {"source": "model", "path": str(inputs / "teacher"), "update": None},
        "reward": {"type": "none"},
        "objective": {"type": "rpg", "kl_coef": 1.0, "divergence": "reverse"},
        "training": TRAINING,
    }


@pytest.fixture(scope="module")
def distilled(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "run", **taught(inputs))
    train(run_dir)
    return run_dir


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "unnormalized_reverse", "unnormalized_forward"])
def test_with_a_model_of_another_kind_as_reference_the_expected_gradient_is_exact(
    divergence: str, estimator: str, level: str
) -> None:
    """Every response of up to three tokens over four; student, sampler and teacher are models of their own."""
    world = Enumerated(vocabulary=4, length=3)
    student, sampler = (world.model(GPT2LMHeadModel, gpt2(), seed) for seed in (0, 1))
    teacher = world.model(Qwen3ForCausalLM, qwen3(), 2)
    parameters = list(student.parameters())
    forward, kl_coef = divergence.endswith("forward"), 0.7
    with torch.no_grad():
        old, reference = world.logprobs(sampler), world.logprobs(teacher)
    now = world.logprobs(student)
    if level == "sequence":
        of_student, of_teacher = now.sum(-1), reference.sum(-1)
        distance = (
            of_teacher.exp() * (of_teacher - of_student) if forward else of_student.exp() * (of_student - of_teacher)
        )
        truth = kl_coef * distance.sum()
    else:
        truth = kl_coef * world.divergence_of_tokens(student, sampler, teacher, forward=forward)
    exact = torch.autograd.grad(truth, parameters, retain_graph=True)
    objective = parse_objective(
        {
            **{"type": "rpg", "divergence": divergence, "estimator": estimator, "level": level},
            **{"kl_coef": kl_coef, "clip": {"type": "none"}},
        }
    )
    losses = token_losses(
        objective,
        logprobs=now,
        old_logprobs=old,
        ref_logprobs=reference,
        advantages=torch.zeros_like(old),
        response_mask=world.mask,
    )
    expected = (old.sum(-1).exp() * torch.where(world.mask, losses, 0.0).sum(-1)).sum()
    given = torch.autograd.grad(expected, parameters)
    size = max(float(gradient.abs().max()) for gradient in exact)
    assert size > 1e-3
    for one, other in zip(given, exact, strict=True):
        assert float((one - other).abs().max()) < 1e-10 * size


@pytest.mark.more
def test_each_token_has_the_teachers_own_logprob(inputs: Path, distilled: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(inputs / "teacher")
    teacher.eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    tokens = [row for row in rows(distilled, "tokens") if row["step"] == 3]
    for rollout in [row for row in rows(distilled, "rollouts") if row["step"] == 3][:5]:
        mine = sorted(
            (row for row in tokens if row["rollout_id"] == rollout["rollout_id"]), key=lambda row: row["position"]
        )
        prompt = tokenizer(rollout["prompt"])["input_ids"]
        ids = torch.tensor([prompt + [row["token_id"] for row in mine]])
        with torch.no_grad():
            logprobs = torch.log_softmax(teacher(ids).logits[0, :-1], -1)
        own = logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        assert np.allclose([row["ref_logprob"] for row in mine], own, atol=1e-5)


def test_the_student_nears_the_teacher_without_a_reward_and_both_divergences_are_on_record(distilled: Path) -> None:
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(distilled, "metrics")}
    assert metrics[8, "kl/reverse"] < 0.7 * metrics[1, "kl/reverse"]
    assert metrics[8, "kl/behaviour"] < 0.1 * metrics[8, "kl/reverse"], "the sampler is another policy than the teacher"
    assert {metrics[step, "reward/mean"] for step in range(1, 9)} == {0.0}
    assert {metrics[step, "reference/version"] for step in range(1, 9)} == {0.0}
    assert {row["advantage"] for row in rows(distilled, "rollouts")} == {0.0}


@pytest.mark.more
def test_a_distillation_that_pauses_goes_on_as_if_it_had_not_and_saves_no_teacher(
    inputs: Path, distilled: Path, tmp_path: Path
) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **taught(inputs))
    for step in (4, 0):
        set_inputs(run_dir, until=step)
        train(run_dir)
    assert_trained_alike(run_dir, distilled)
    assert not [path for path in run_dir.rglob("*reference*") if path.is_file()]


@pytest.mark.more
def test_ranks_that_hold_shards_of_the_teacher_find_the_logprobs_of_one_that_holds_it_whole(
    inputs: Path, distilled: Path, tmp_path: Path
) -> None:
    changes = taught(inputs) | {"training": {**TRAINING, "steps": 1, "ranks": 2, "zero_stage": 3}}
    run_dir = make_run(inputs, tmp_path / "two", **changes)
    train(run_dir, ranks=2)
    one, two = (
        {(row["rollout_id"], row["position"]): row["ref_logprob"] for row in rows(run, "tokens") if row["step"] == 1}
        for run in (distilled, run_dir)
    )
    assert one.keys() == two.keys()
    assert max(abs(one[key] - two[key]) for key in one) < 1e-5


def test_the_teachers_content_is_part_of_the_runs_identity(inputs: Path, tmp_path: Path) -> None:
    from shutil import copytree

    from pipelines.planning.fingerprint import train_identity

    def identity(teacher: Path) -> dict[str, Any]:
        spec: dict[str, Any] = {**SPEC, "reference": {"source": "model", "path": str(teacher)}}
        return train_identity(Experiment.model_validate(spec))

    copy = tmp_path / "copy"
    copytree(inputs / "teacher", copy)
    before = identity(copy)
    assert before == identity(inputs / "teacher"), "a file enters by its content, not by its name"
    (copy / "config.json").write_text(json.dumps({**json.loads((copy / "config.json").read_text()), "x": 1}))
    assert identity(copy) != before
    plain: dict[str, Any] = {**SPEC}
    assert {key for key in train_identity(Experiment.model_validate(plain)) if key.startswith("reference.")} >= {
        "reference.source"
    }
    assert not {"reference.path", "reference.revision"} & train_identity(Experiment.model_validate(plain)).keys()


REFUSED = {
    "{source: model}": "reference.path: missing",
    "{source: initial, path: Qwen/Qwen3-4B}": "reference.path: a reference with "
    "`source: initial` comes from the policy",
    "{source: model, path: ./nowhere}": "reference.path: no such model directory",
    "{source: model, path: Qwen/Qwen3-4B, update: {every_steps: 2}}": "reference.update: a reference with "
    "`source: model` is never updated",
}


@pytest.mark.parametrize("reference", REFUSED)
def test_a_teacher_that_cannot_be_meant_is_refused_at_its_line(reference: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"{FILE}reference: {reference}\n")
    with pytest.raises(SpecError) as refused:
        load_experiment(spec)
    assert f"spec.yaml:8: {REFUSED[reference]}" in str(refused.value)


FILE = """name: teacher
model: {source: scratch}
data: {train: [{source: products, size: 10, seed: 1}]}
reward: {type: none}
objective: {type: rpg, kl_coef: 1.0}
rollout: {max_response_length: 4}
training: {steps: 2, prompts_per_step: 2, group_size: 2}
"""


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_runs(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"{FILE}reference: {{source: model, path: {inputs / 'teacher'}}}\n")
    experiment = load_experiment(tmp_path / "spec.yaml")
    (issue,) = examine(experiment).errors
    assert issue.path == ("reference", "path")
    assert issue.message == "the teacher has another tokenizer than the policy"
    assert issue.given == f"{inputs / 'teacher'}: {len(TOKENS)} tokens; they differ in 258, such as '!', '\"', '#'"


def test_a_teacher_with_too_few_logits_is_refused(inputs: Path, tmp_path: Path) -> None:
    narrow = GPT2Config(vocab_size=4, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1)
    GPT2LMHeadModel(narrow).save_pretrained(tmp_path / "narrow")
    AutoTokenizer.from_pretrained(inputs / "base").save_pretrained(tmp_path / "narrow")
    changes = taught(inputs)
    changes["reference"]["path"] = str(tmp_path / "narrow")
    run_dir = make_run(inputs, tmp_path / "run", **changes)
    assert "reference.path: the policy can sample tokens that the teacher has no logits for" in train(run_dir, expect=2)


def test_the_plan_counts_the_teachers_weights(inputs: Path) -> None:
    from pipelines.planning.memory import memory_estimate
    from pipelines.planning.model_shape import model_shape

    spec: dict[str, Any] = {**SPEC, **taught(inputs), "model": {"source": "pretrained", "path": str(inputs / "base")}}
    spec["training"] = {**SPEC["training"], "ranks": 2}
    whole = Experiment.model_validate(spec)
    sharded = Experiment.model_validate({**spec, "training": {**spec["training"], "zero_stage": 3}})
    shape = model_shape(whole)
    assert shape
    weights = sum(
        parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(inputs / "teacher").parameters()
    )
    assert memory_estimate(whole, shape).reference == 4 * weights
    assert memory_estimate(sharded, shape).reference == 4 * weights // 2


def test_no_reward_is_a_reward_of_nothing(distilled: Path) -> None:
    step = pq.read_table(next((distilled / "segments" / "rollouts").glob("*s000001*"))).to_pylist()
    assert {(row["reward"], row["correct"]) for row in step} == {(0.0, False)}


def qwen3() -> Qwen3Config:
    return Qwen3Config(
        **{"vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8},
    )


def gpt2() -> GPT2Config:
    sizes = {"vocab_size": 4, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    return GPT2Config(**sizes, bos_token_id=1, eos_token_id=0)


class Enumerated:
    """Every response to the prompt [1]: token 0 ends it, so does the limit."""

    def __init__(self, *, vocabulary: int, length: int) -> None:
        others = range(1, vocabulary)
        whole = [(*body, 0) for size in range(length) for body in product(others, repeat=size)]
        whole += list(product(others, repeat=length))
        self.responses = whole
        self.mask = torch.zeros(len(whole), length, dtype=torch.bool)
        for index, response in enumerate(whole):
            self.mask[index, : len(response)] = True
        self.ids = torch.tensor([[1, *response, *[0] * (length - len(response))] for response in whole])

    def model(self, kind: Any, config: Any, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config).double().eval()
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        return model

    def logprobs(self, model: PreTrainedModel) -> Tensor:
        """[responses, length], float64; 0 on padding."""
        logprobs = torch.log_softmax(model(self.ids).logits, -1)[:, :-1]
        return torch.where(self.mask, logprobs.gather(-1, self.ids[:, 1:, None])[..., 0], 0.0)

    def divergence_of_tokens(
        self, student: PreTrainedModel, sampler: PreTrainedModel, teacher: PreTrainedModel, *, forward: bool
    ) -> Tensor:
        """Sum over t of E_{s ~ sampler} D(.|s), over the tokens that can be sampled."""
        width = student.config.vocab_size
        now, old, ref = (torch.log_softmax(m(self.ids).logits, -1)[..., :width] for m in (student, sampler, teacher))
        of_tokens = (ref.exp() * (ref - now) if forward else now.exp() * (now - ref)).sum(-1)[:, :-1]
        chosen = old[:, :-1].gather(-1, self.ids[:, 1:, None])[..., 0]
        probability = torch.where(self.mask, chosen, 0.0).sum(-1).exp().detach()
        return (probability[:, None] * torch.where(self.mask, of_tokens, 0.0)).sum()
