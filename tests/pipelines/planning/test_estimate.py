"""Estimates against what the parts really hold."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.planning import device
from pipelines.planning.gpu_hours import SAMPLING_SHARE, gpu_hours
from pipelines.planning.memory import (
    GIB,
    LIVE_PARAMETERS,
    LOGITS,
    PREFETCHED_PARAMETERS,
    RECORDED_TOKEN,
    REDUCED_PARAMETERS,
    TOKENS_ON_GPU,
    batch_algebra,
    memory_estimate,
)
from pipelines.planning.memory_warnings import disk_warnings, memory_errors, memory_warnings
from pipelines.planning.model_shape import model_shape
from rpg.learner.logprobs import CHUNK_ELEMENTS, CHUNK_ON_GPU
from rpg.learner.packing import Packing
from rpg.learner.policy import Policy, load_model
from rpg.recording.segments import SegmentWriter
from specs.document import expand
from specs.loader import load_document, load_experiment
from specs.machine.cards import H100
from specs.records import TokenRow
from specs.schema.experiment import Experiment
from specs.schema.rollout import RollouterSection, TurnBounds
from tests.memory import PeakMemory
from tests.rpg.tiny_run import finish, group_of, start

SPEC = """\
name: tiny
model: {{source: scratch, model_type: {model_type}, config: {config}}}
data:
  train: [{{source: reasoning_gym, task: chain_sum, size: 50, seed: 1}}]
  max_prompt_length: 16
rollout: {{max_response_length: 8}}
reward: {{type: exact_match}}
objective: {{type: rpg, kl_coef: 1.0e-2}}
training: {{steps: 3, prompts_per_step: 4, group_size: 2, minibatches: 2, epochs: 3, ranks: 2}}
"""
CONFIGS = {
    "qwen3": "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
    "intermediate_size: 96, tie_word_embeddings: true}",
    "llama": "{hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 4, intermediate_size: 64}",
    "gpt2": "{n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64}",
}


def experiment(tmp_path: Path, model_type: str = "qwen3", *overrides: str) -> Experiment:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(model_type=model_type, config=CONFIGS[model_type]))
    return load_experiment(path, overrides)


def test_the_batch_algebra_counts_updates_and_tokens(tmp_path: Path) -> None:
    batch = batch_algebra(experiment(tmp_path))
    assert (batch.rollouts_per_step, batch.rollouts_per_update) == (8, 4)
    assert (batch.updates_per_step, batch.updates) == (6, 18)
    assert batch.tokens_to_sample == 3 * 8 * 8
    assert batch.tokens_to_train == 3 * 8 * 3 * 24


def test_tokens_to_sample_are_a_bound_where_groups_are_sampled_again(tmp_path: Path) -> None:
    refilled = experiment(tmp_path, "qwen3", "rollout={max_response_length: 8, dynamic_sampling: {max_batches: 20}}")
    assert batch_algebra(refilled).tokens_to_sample == 20 * 3 * 8 * 8


def test_a_recorded_token_takes_the_bytes_that_the_plan_counts(tmp_path: Path) -> None:
    count, random = 100_000, np.random.default_rng(0)
    old = -random.exponential(0.4, count)
    logprob = old + random.normal(0, 0.02, count)
    columns = {
        "rollout_id": np.arange(count) // 1000,
        "position": np.arange(count) % 1000,
        "token_id": random.zipf(1.2, count) % 150_000,
        "logprob": logprob,
        "old_logprob": old,
        "rollout_logprob": old + random.normal(0, 0.01, count),
        "ref_logprob": old + random.normal(0, 0.05, count),
        "ratio": np.exp(logprob - old),
        "entropy": random.exponential(0.4, count),
    }
    kinds = {np.dtype("int64"): np.int32, np.dtype("float64"): np.float32}
    rows = {name: values.astype(kinds[values.dtype]) for name, values in columns.items()}
    flags = {"clipped": np.abs(rows["ratio"] - 1) > 0.03, "sampled": np.ones(count, dtype=bool), "policy_version": 0}
    writer = SegmentWriter(tmp_path, "tiny-s0-0a1b2c3d", 1)
    writer.columns(TokenRow, {"step": 1, **rows, **flags})
    writer.flush()
    (segment,) = (tmp_path / "segments" / "tokens").iterdir()
    assert segment.stat().st_size / count == pytest.approx(RECORDED_TOKEN, rel=0.1)


def test_token_rows_that_take_more_than_a_fifth_of_the_free_disk_are_warned_of(tmp_path: Path) -> None:
    whole = experiment(tmp_path)
    assert batch_algebra(whole).recorded_bytes == 3 * 8 * 8 * RECORDED_TOKEN
    assert batch_algebra(experiment(tmp_path, "qwen3", "record.tokens=none")).recorded_bytes == 0
    tenth = experiment(tmp_path, "qwen3", "record={tokens: sampled, sampled_share: 0.25}")
    assert batch_algebra(tenth).recorded_bytes == 3 * 2 * 8 * RECORDED_TOKEN
    size = batch_algebra(whole).recorded_bytes
    assert disk_warnings([whole], 5 * size) == []
    (warning,) = disk_warnings([whole, whole], 5 * size)
    assert (warning.path, warning.given) == (("record", "tokens"), "all")
    assert "record.tokens: sampled keeps a tenth of them" in warning.hint
    assert disk_warnings([], 0) == []
    at_paper_scale = "training={steps: 400, prompts_per_step: 512, group_size: 16}"
    large = experiment(tmp_path, "qwen3", at_paper_scale, "rollout.max_response_length=4096")
    (warning,) = disk_warnings([large], 1000 * GIB)
    assert warning.message.startswith("token rows take 300.0 GiB, if every response has its full length; 1000.0 are")


CALLS = "rollout={max_response_length: %d, rollouter: {type: tools, tools: [calculator], %s}}"


@pytest.mark.parametrize(
    ("length", "options", "sampled", "given", "whole"),
    [
        (40, "max_turns: 3, turn_tokens: 4, answer_tokens: 5", 12, 10, 22),
        (20, "max_turns: 3, turn_tokens: 4, answer_tokens: 5", 12, 10, 20),
        (20, "max_turns: 2, answer_tokens: 5", 20, 5, 20),  # turns share the response's tokens
        (20, "max_turns: 9, turn_tokens: 1, answer_tokens: 18", 9, 18, 20),  # a token before and after what is given
        (20, "max_turns: 3, turn_tokens: 4, answer_tokens: 5, format: hermes", 12, 18, 20),  # any number of calls
    ],
)
def test_given_tokens_are_counted_beside_sampled_ones(
    tmp_path: Path, length: int, options: str, sampled: int, given: int, whole: int
) -> None:
    on_gpus = "resources.device=cuda"
    one_turn = experiment(tmp_path, "qwen3", f"rollout={{max_response_length: {whole}}}", on_gpus)
    several = experiment(tmp_path, "qwen3", CALLS % (length, options), on_gpus)
    batch, plain = batch_algebra(several), batch_algebra(one_turn)
    assert (batch.tokens_to_sample, batch.tokens_given) == (3 * 8 * sampled, 3 * 8 * given)
    assert plain.tokens_given == 0
    assert batch.tokens_to_train == plain.tokens_to_train
    shape = model_shape(several)
    assert memory_estimate(several, shape) == memory_estimate(one_turn, shape)
    hours = [gpu_hours(each, shape) for each in (several, one_turn)]
    # A token that is given does not go through the output head.
    assert (hours[0].training < hours[1].training) is (sampled < whole)
    # A token that is given is read with others of its response; one that is sampled waits for the one before.
    assert (hours[0].sampling < hours[1].sampling) is (sampled < whole)


def test_an_environment_that_states_no_bound_may_give_all_but_a_token(tmp_path: Path) -> None:
    silent = experiment(tmp_path).rollout.rollouter
    assert RollouterSection.bounds(silent, 8) is None
    assert silent.bounds(8) == TurnBounds(turns=1, sampled=8, given=0, length=8)


ON_TWO_RANKS = [
    (0, "float32", 4, 4, 0, 8),
    (1, "float32", 4, 4, 4, 6),
    (2, "float32", 4, 2, 8, 6),
    (3, "float32", 2, 2, 4, 6),
    (0, "bfloat16", 2, 2, 4, 6),
    (1, "bfloat16", 2, 2, 4, 6),
    (2, "bfloat16", 2, 2, 4, 6),
    (3, "bfloat16", 1, 2, 2, 6),
]
"""ZeRO stage, precision; bytes a weight: of the weights, the gradients, an element of the buckets, the optimizer."""


@pytest.mark.parametrize(("stage", "precision", "weights", "gradients", "bucket", "optimizer"), ON_TWO_RANKS)
def test_zero_divides_what_its_stage_says(
    tmp_path: Path, stage: int, precision: str, weights: int, gradients: int, bucket: int, optimizer: int
) -> None:
    spec = experiment(tmp_path, "qwen3", f"training.zero_stage={stage}", f"training.precision={precision}")
    shape = model_shape(spec)
    estimate = memory_estimate(spec, shape)
    assert estimate.weights == weights * shape.parameters
    assert estimate.gradients == gradients * shape.parameters
    assert estimate.optimizer == optimizer * shape.parameters
    assert estimate.buckets == bucket * REDUCED_PARAMETERS


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision", "weights", "gradients", "bucket", "optimizer"), ON_TWO_RANKS)
def test_so_does_deepspeed(
    inputs: Path, stage: int, precision: str, weights: int, gradients: int, bucket: int, optimizer: int
) -> None:
    command = [sys.executable, "-m", "tests.pipelines.held_memory", str(inputs / "base"), str(stage), precision]
    output = finish(*(start(command, environment) for environment in group_of(2)))
    measured = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert measured["bytes_a_weight"] == pytest.approx(weights + gradients + optimizer, rel=0.02)
    assert measured["buckets"] == bucket * REDUCED_PARAMETERS


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ((), 0),
        (("training.zero_stage=3",), 1),
        (("training.zero_stage=3", "rollout={engine: vllm, max_response_length: 8}"), 0),
        (("rollout.max_staleness=1",), 1),
        (("training.zero_stage=3", "training.lora={rank: 2}", "training.precision=bfloat16"), 0.5),
    ],
)
def test_a_sampler_that_cannot_read_the_learners_weights_has_a_whole_model(
    tmp_path: Path, overrides: tuple[str, ...], held: float
) -> None:
    spec = experiment(tmp_path, "qwen3", *overrides)
    shape = model_shape(spec)
    estimate = memory_estimate(spec, shape)
    assert estimate.sampler == held * 4 * shape.parameters
    assert estimate.total >= estimate.weights + estimate.sampler
    assert estimate.cache_stays == bool(spec.rollout.max_staleness), "sampling ahead goes on beside training"


def test_what_zero_3_makes_whole_is_bounded_by_deepspeeds_settings(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from rpg.learner.deepspeed import deepspeed_config

    sharded = experiment(tmp_path, "qwen3", "training.zero_stage=3", "training.precision=bfloat16")
    settings = DeepSpeedZeroConfig(
        **deepspeed_config(sharded.training, lends_weights=True, on_gpu=True)["zero_optimization"]
    )
    assert (settings.max_live_parameters, settings.prefetch_bucket_size) == (LIVE_PARAMETERS, PREFETCHED_PARAMETERS)
    assert settings.reduce_bucket_size == REDUCED_PARAMETERS
    small = model_shape(sharded)
    assert memory_estimate(sharded, small).gathered == 2 * 2 * small.parameters, "a small model can be whole"
    large = replace(small, parameters=8 * 10**9)
    estimate = memory_estimate(sharded, large)
    assert estimate.gathered == 2 * (10**9 + 5 * 10**7)
    assert memory_estimate(experiment(tmp_path, "qwen3", "training.zero_stage=2"), large).gathered == 0
    alone = ("training.zero_stage=3", "training.ranks=1")
    assert memory_estimate(experiment(tmp_path, "qwen3", *alone), large).gathered == 0
    from_host = experiment(tmp_path, "qwen3", *alone, "training.offload={parameters: true}")
    assert memory_estimate(from_host, large).gathered == 4 * (10**9 + 5 * 10**7)


SHAPES = {
    "qwen3": "{hidden_size: 128, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, "
    "intermediate_size: 384, tie_word_embeddings: true, max_position_embeddings: 512}",
    "llama": "{hidden_size: 128, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 384, tie_word_embeddings: true, max_position_embeddings: 512}",
    "gpt2": "{n_embd: 128, n_layer: 4, n_head: 4, n_positions: 512}",
    "qwen3_moe": "{hidden_size: 128, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 64, intermediate_size: 384, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 192, "
    "tie_word_embeddings: true, max_position_embeddings: 512}",
}


@pytest.mark.more
@pytest.mark.parametrize("recomputes", ["false", "true", "selective"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_activations_and_logits_are_those_of_a_pass_to_a_tenth(
    tmp_path: Path, model_type: str, precision: str, recomputes: str
) -> None:
    spec = experiment(
        tmp_path,
        "qwen3",
        f"model.model_type={model_type}",
        f"model.config={SHAPES[model_type]}",
        "data.max_prompt_length=256",
        "rollout.max_response_length=256",
        f"training={{steps: 1, prompts_per_step: 1, group_size: 2, microbatch_tokens: 512, precision: {precision},"
        f" gradient_checkpointing: {recomputes}}}",
    )
    shape = model_shape(spec)
    config = AutoConfig.for_model(model_type, **spec.model.config, vocab_size=shape.vocab_size)  # type: ignore[union-attr]
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    policy = Policy(load_model(tmp_path / "base", spec.training), temperature=1.0)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.arange(512)[None] % shape.vocab_size
    with PeakMemory([held for weight in policy.parameters() for held in (weight, weight.grad)]) as memory:
        logprobs, _ = policy(ids, torch.arange(511), ids[0, 1:], packing=Packing(((512,),), ids.device))
        logprobs.sum().backward()
    estimate = memory_estimate(spec, shape)
    least = (
        1.0 if (model_type, recomputes) != ("qwen3_moe", "selective") else 0.7
    )  # the products of experts are not kept
    assert estimate.activations + estimate.logits <= 1.1 * memory.peak / least
    assert estimate.activations + estimate.logits >= 0.9 * memory.peak


def test_the_plan_knows_how_many_logits_the_learner_holds() -> None:
    assert (LOGITS, TOKENS_ON_GPU) == (CHUNK_ELEMENTS, CHUNK_ON_GPU)


def test_on_a_gpu_more_tokens_of_a_large_vocabulary_have_their_logits_at_once(tmp_path: Path) -> None:
    long = ("training.microbatch_tokens=8192", "training.group_size=4000")
    on_gpu, on_cpu = (experiment(tmp_path, "qwen3", *long, f"resources.device={device}") for device in ("auto", "cpu"))
    small = model_shape(on_gpu)
    shape = replace(small, vocab_size=151_936)
    more = memory_estimate(on_gpu, shape).logits - memory_estimate(on_cpu, shape).logits
    assert more == (2048 - 441) * 151_936 * 4 * 2


def test_on_a_cpu_a_bucket_takes_the_room_that_is_written_to(tmp_path: Path) -> None:
    spec = experiment(tmp_path, "qwen3", "training.zero_stage=2", "resources.device=cpu")
    shape = model_shape(spec)
    assert memory_estimate(spec, shape).buckets == 4 * shape.parameters


@pytest.mark.parametrize(
    ("changes", "buckets"),
    [
        (("zero_stage=2",), 2),
        (("zero_stage=0", "precision=bfloat16"), 2),
        (("zero_stage=2", "precision=bfloat16", "gradient_reduction=float32"), 2),
        (("zero_stage=2", "ranks=1"), 1),
        (("zero_stage=1",), 1),
        (("zero_stage=3",), 1),
        (("zero_stage=2", "lora={rank: 2}"), 1),
    ],
)
def test_a_second_bucket_is_there_where_gpus_add_gradients_up_during_the_backward_pass(
    tmp_path: Path, changes: tuple[str, ...], buckets: int
) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from rpg.learner.deepspeed import deepspeed_config

    spec = experiment(tmp_path, "qwen3", *(f"training.{change}" for change in changes))
    shape = model_shape(spec)
    size = 2 if (spec.training.precision, spec.training.gradient_reduction) == ("bfloat16", "auto") else 4
    assert memory_estimate(spec, shape).buckets == buckets * size * REDUCED_PARAMETERS
    on_gpu, on_cpu = (
        DeepSpeedZeroConfig(**deepspeed_config(spec.training, lends_weights=False, on_gpu=on_gpu)["zero_optimization"])
        for on_gpu in (True, False)
    )
    by_default = spec.training.zero_stage == 3  # where DeepSpeed has one bucket all the same
    assert (on_gpu.overlap_comm, on_cpu.overlap_comm) == (by_default or buckets == 2, by_default)


def test_with_the_optimizer_on_the_host_the_largest_gradient_is_staged_on_the_way_there(tmp_path: Path) -> None:
    def buckets(*changes: str) -> int:
        spec = experiment(tmp_path, "qwen3", "training.precision=bfloat16", *changes)
        shape = model_shape(spec)
        return memory_estimate(spec, replace(shape, largest_weight=151_936 * 2560, hidden_size=2560)).buckets

    away = "training.offload.optimizer=true"
    of_4b = 2 * 151_936 * 2560  # 0.8 GB of bfloat16
    assert buckets("training.zero_stage=2", away) == buckets("training.zero_stage=2") + of_4b
    assert buckets("training.zero_stage=3", away) == buckets("training.zero_stage=3")
    adapters = ("training.zero_stage=2", "training.lora={rank: 2}")
    assert buckets(*adapters, away) == buckets(*adapters) + 2 * 2 * 2560


def test_a_behaviour_reference_costs_no_memory_and_a_snapshot_a_second_model(tmp_path: Path) -> None:
    behaviour = experiment(tmp_path)
    shape = model_shape(behaviour)
    assert memory_estimate(behaviour, shape).reference == 0
    snapshot = experiment(tmp_path, "qwen3", "reference={source: snapshot, update: {every_steps: 2}}")
    assert memory_estimate(snapshot, shape).reference == 4 * shape.parameters


def test_a_sum_over_the_vocabulary_keeps_hidden_states_and_one_over_likely_tokens_their_logprobs(
    tmp_path: Path,
) -> None:
    def memory(*overrides: str) -> tuple[int, int]:
        spec = experiment(tmp_path, "qwen3", *overrides)
        shape = model_shape(spec)
        estimate = memory_estimate(spec, shape)
        return estimate.distributions, estimate.logits

    none, logits = memory()
    assert none == 0
    tokens = 4 * 2 // 2 * 8  # responses of a rank, each of 8 tokens
    head, chunk = 258 * 32, (16 + 8) * 2  # an update has 4 responses on 2 ranks
    assert memory("objective.kl=full") == ((tokens * 32 + head) * 4, logits + chunk * 258 * 4)
    assert memory("objective.kl=top_k") == (tokens * 64 * 12, logits)
    initial = "reference={source: initial}"  # its head does not change
    assert memory("objective.kl=full", initial)[0] == tokens * 32 * 4
    assert memory("objective.kl=full", initial, "training.zero_stage=3")[0] == (tokens * 32 + head) * 4
    shannon = memory("objective.kl=full", "objective.divergence=jensen_shannon")
    assert shannon[1] == logits + 3 * chunk * 258 * 4


def test_distributions_that_do_not_fit_are_refused_where_the_rest_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "smallest_gpu", lambda: None)
    large = (
        "model={source: pretrained, path: Qwen/Qwen3-4B-Base}",
        "rollout={engine: vllm, max_response_length: 8192}",
        *("training.prompts_per_step=512", "training.group_size=16", "training.precision=bfloat16"),
        *("training.gradient_checkpointing=true", "training.zero_stage=2", "training.ranks=8"),
    )
    full = experiment(tmp_path, "qwen3", *large, "objective.kl=full")
    (refused,) = memory_errors(full)
    assert refused.path == ("objective", "kl")
    assert refused.message == "the reference's distributions do not fit: 40.7 GiB"
    assert refused.given.startswith("full: ")
    assert refused.hint.startswith("kl: top_k keeps fewer numbers a token, more ranks keep fewer tokens each, ")
    assert memory_warnings(full) == []
    assert memory_errors(experiment(tmp_path, "qwen3", *large, "objective.kl=top_k")) == []
    assert memory_errors(experiment(tmp_path, "qwen3", *large)) == []


def test_an_estimate_that_does_not_fit_is_a_warning_that_says_what_to_do(tmp_path: Path) -> None:
    assert memory_warnings(experiment(tmp_path, "qwen3", "resources.memory_gib=1")) == []
    (warning,) = memory_warnings(experiment(tmp_path, "qwen3", "resources.memory_gib=0.0001"))
    assert warning.path == ("resources", "memory_gib")
    assert "do not fit" in warning.message
    assert warning.hint.startswith("largest part: ")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen3-0.6B", 0.596e9), ("Qwen/Qwen3-4B-Base", 4.02e9), ("Qwen/Qwen2.5-7B-Instruct", 7.62e9)],
)
def test_what_is_known_of_a_model_gives_its_published_size(tmp_path: Path, name: str, parameters: float) -> None:
    shape = model_shape(experiment(tmp_path, "qwen3", f"model={{source: pretrained, path: {name}}}"))
    assert shape.parameters == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(
    ("more", "held", "stays"),
    [
        ("", 2 * GIB, True),
        (", sleep: true", 2 * GIB, False),
        (", placement: dedicated", 0, False),
        (", placement: dedicated, engine_gpus: [0, 1]", 2 * GIB, True),
    ],
)
def test_an_engine_keeps_its_share_of_a_ranks_gpu_unless_it_sleeps_or_has_its_own(
    tmp_path: Path, more: str, held: int, stays: bool
) -> None:
    rollout = f"rollout={{engine: vllm, memory_fraction: 0.25, max_response_length: 8{more}}}"
    spec = experiment(tmp_path, "qwen3", rollout, "resources.memory_gib=8")
    shape = model_shape(spec)
    estimate = memory_estimate(spec, shape)
    assert estimate.kv_cache == held
    fixed = estimate.weights + estimate.gradients + estimate.optimizer + estimate.reference
    training = estimate.activations + estimate.logits
    assert estimate.total == fixed + (training + held if stays else max(training, held))


def test_what_only_updates_need_leaves_its_memory_to_a_sampler_that_takes_turns_with_them(tmp_path: Path) -> None:
    """Worked out by hand: in bfloat16 at ZeRO 2 on two ranks 12 bytes a weight of optimizer state and master weights,
    4 of gradients, and two buckets of 500 million."""
    spec = ("training.precision=bfloat16", "training.zero_stage=2", "resources.memory_gib=8")
    engine = "rollout={engine: vllm, memory_fraction: 0.9, max_response_length: 8, sleep: true}"
    stays, leaves = (
        experiment(tmp_path, "qwen3", *spec, engine, f"training.offload.while_sampling={moves}")
        for moves in ("false", "true")
    )
    shape = model_shape(stays)
    held, moved = memory_estimate(stays, shape), memory_estimate(leaves, shape)
    assert (held.away, moved.away) == (0, 16 * shape.parameters // 2 + 2 * 2 * 500_000_000)
    assert held.total - moved.total == moved.away
    assert moved.total == moved.weights + moved.reference + moved.kv_cache
    (warning,) = memory_warnings(stays)
    assert warning.hint.endswith(f"; training.offload.while_sampling: true takes {moved.away / GIB:.1f} GiB off")
    assert not memory_warnings(leaves)
    small_cache = leaves.model_copy(update={"rollout": leaves.rollout.model_copy(update={"memory_fraction": 0.001})})
    assert memory_estimate(small_cache, shape).total > moved.away, "updates need what they need"


@pytest.mark.parametrize(
    ("rollout", "remedy"),
    [
        ("{engine: transformers, max_staleness: 1", "a smaller rollout.max_concurrent"),
        ("{engine: vllm, memory_fraction: 0.9", "a smaller rollout.memory_fraction, or rollout.sleep: true"),
        ("{engine: vllm, memory_fraction: 0.9, sleep: true", "a smaller rollout.memory_fraction"),
        ("{engine: vllm, memory_fraction: 0.9, max_staleness: 1", "a smaller rollout.memory_fraction"),
        (
            "{engine: vllm, memory_fraction: 0.9, placement: dedicated, engine_gpus: [0, 1]",
            "a smaller rollout.memory_fraction",
        ),
    ],
)
def test_a_cache_that_does_not_fit_names_the_keys_of_its_sampler(tmp_path: Path, rollout: str, remedy: str) -> None:
    many = ("training.group_size=2000", "training.microbatch_tokens=1", "resources.memory_gib=0.001")
    (warning,) = memory_warnings(experiment(tmp_path, "qwen3", f"rollout={rollout}, max_response_length: 8}}", *many))
    assert warning.hint.startswith("largest part: kv_cache with ")
    assert warning.hint.endswith(f" GiB; {remedy}")


def test_gpu_hours_of_sampling_are_the_traffic_of_weights_and_cache(tmp_path: Path) -> None:
    """Worked out by hand for 3 steps of 8 responses of 16 + 8 tokens, on 2 ranks."""
    spec = experiment(tmp_path)
    shape = model_shape(spec)
    weights = shape.matrix_parameters
    cache = (16 + 4) * 2 * 2 * 32 * 4
    traffic = (weights * 4 + 4 * cache) / (H100.bandwidth * SAMPLING_SHARE)
    sampling = 3 * 8 * traffic * 2 / 3600
    hours = gpu_hours(spec, shape)
    assert hours.sampling == pytest.approx(sampling)


EVALUATED = (
    "data.evaluation=[{source: reasoning_gym, task: chain_sum, size: 20, seed: 900, name: sums}]",
    "evaluation={samples_per_problem: 4, max_response_length: 32}",
)


def test_evaluation_counts_every_sample_of_every_checkpoint_at_its_longest(tmp_path: Path) -> None:
    """20 problems x 4 samples of 16 + 32 tokens, 40 on each of 2 ranks, on the base model and the last checkpoint."""
    spec = experiment(tmp_path, "qwen3", *EVALUATED)
    shape = model_shape(spec)
    traffic = (shape.matrix_parameters * 4 + 40 * (16 + 16) * 2 * 2 * 32 * 4) / (H100.bandwidth * SAMPLING_SHARE)
    hours = gpu_hours(spec, shape)
    assert hours.evaluation == pytest.approx(2 * 32 * traffic * 2 / 3600)
    assert hours.total == pytest.approx(hours.sampling + hours.training + hours.evaluation)
    final = gpu_hours(experiment(tmp_path, "qwen3", *EVALUATED, "evaluation.checkpoints=final"), shape)
    on_the_way = gpu_hours(experiment(tmp_path, "qwen3", *EVALUATED, "evaluation.every_steps=1"), shape)
    assert (final.evaluation, on_the_way.evaluation) == pytest.approx((hours.evaluation / 2, hours.evaluation * 2))


def test_an_evaluation_of_unknown_size_is_not_counted_and_none_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"problem": "1 + 1 =", "answer": "2"}\n')
    own = f"{{source: jsonl, path: {tmp_path}/own.jsonl, name: own}}"
    unknown = experiment(tmp_path, "qwen3", f"data.evaluation=[{own}]")
    shape = model_shape(unknown)
    hours = gpu_hours(unknown, shape)
    assert (hours.evaluation, hours.total) == (None, hours.sampling + hours.training)
    assert gpu_hours(experiment(tmp_path), shape).evaluation == 0


def test_groups_that_may_be_sampled_again_take_their_hours(tmp_path: Path) -> None:
    refilled = experiment(tmp_path, "qwen3", "rollout={max_response_length: 8, dynamic_sampling: {max_batches: 20}}")
    shape = model_shape(refilled)
    once, again = gpu_hours(experiment(tmp_path), shape), gpu_hours(refilled, shape)
    assert (again.sampling, again.training) == pytest.approx((20 * once.sampling, once.training))


def test_logprobs_that_the_sampler_gives_cost_no_pass_and_those_that_advantages_need_cost_all(tmp_path: Path) -> None:
    """The old logprobs take no forward, a half or 1; RLOO's reference takes one more."""
    plain = experiment(tmp_path)
    shape = model_shape(plain)
    trusting = experiment(tmp_path, "qwen3", "rollout={max_response_length: 8, trust_logprobs: true}")
    in_reward = experiment(tmp_path, "qwen3", "objective={type: rloo}")
    none, half, two = (gpu_hours(spec, shape).training for spec in (trusting, plain, in_reward))
    assert none < half
    assert two - none == pytest.approx(4 * (half - none))


def test_gpus_of_dedicated_engines_are_held_while_the_ranks_train_and_the_other_way_round(tmp_path: Path) -> None:
    """2 ranks with engines of 2 GPUs hold 6; a sampling step takes half as long. With one engine they hold 4."""
    rollout = "rollout={{engine: vllm, max_response_length: 8{}}}"
    colocated = experiment(tmp_path, "qwen3", rollout.format(""))
    dedicated = experiment(tmp_path, "qwen3", rollout.format(", placement: dedicated, tensor_parallel_size: 2"))
    shape = model_shape(colocated)
    before, after = gpu_hours(colocated, shape), gpu_hours(dedicated, shape)
    assert after.training == pytest.approx(3 * before.training)
    assert after.sampling == pytest.approx(3 / 2 * before.sampling)
    pair = ", placement: dedicated, tensor_parallel_size: 2, ranks_per_engine: 2, max_concurrent: 4"
    shared = gpu_hours(experiment(tmp_path, "qwen3", rollout.format(pair)), shape)
    assert shared.training == pytest.approx(2 * before.training)
    assert shared.sampling == pytest.approx(2 * before.sampling), "8 responses, 4 at a time, at twice the bandwidth"


NODES = "launcher={type: slurm, nodes: 2}"
APART = "launcher={type: slurm, nodes: 2, engine_nodes: 1}"
ENGINE = "rollout={{engine: vllm, placement: dedicated, max_response_length: 8{}}}"


@pytest.mark.parametrize(
    ("launcher", "fields", "gpus", "samplers"),
    [
        (NODES, ", ranks_per_engine: 2", 5 + 5, 4),  # of 3 ranks on a node two share an engine, and one has its own
        (NODES, ", ranks_per_engine: 4, engine_gpus: [3]", 4 + 4, 2),
        (NODES, ", ranks_per_engine: 3, tensor_parallel_size: 2", 5 + 5, 2),
        (NODES, ", engine_gpus: [0, 1, 2]", 6, 6),
        (APART, ", ranks_per_engine: 2, tensor_parallel_size: 2", 6 + 6, 3),  # neighbours of the run share one
    ],
)
def test_each_machine_has_engines_of_its_own(
    tmp_path: Path, launcher: str, fields: str, gpus: int, samplers: int
) -> None:
    """6 ranks on two machines. Their GPUs are all held while they train, and no engine of another machine is counted
    on a rank's GPU."""
    ranks = (launcher, "training.ranks=6", "training.prompts_per_step=6")
    spec = experiment(tmp_path, "qwen3", *ranks, ENGINE.format(fields))
    assert (spec.gpus, spec.samplers) == (gpus, samplers)
    shape = model_shape(spec)
    colocated = experiment(tmp_path, "qwen3", *ranks[1:])
    assert gpu_hours(spec, shape).training == pytest.approx(gpus / 6 * gpu_hours(colocated, shape).training)
    assert bool(memory_estimate(spec, shape).kv_cache) == (gpus == 6)


@pytest.mark.parametrize("targets", [(), ("q_proj", "k_proj", "down_proj")])
def test_adapters_are_all_that_has_gradients_and_optimizer_state(tmp_path: Path, targets: tuple[str, ...]) -> None:
    from rpg.learner.adapters import add_adapters

    whole = experiment(tmp_path, "qwen3", "training.ranks=1", "reference.source=initial")
    lora = (
        "training.ranks=1",
        "reference.source=initial",
        f"training.lora={{rank: 3, target_modules: {list(targets)}}}",
    )
    adapted = experiment(tmp_path, "qwen3", *lora)
    shape = model_shape(adapted)
    assert adapted.training.lora is not None
    config = AutoConfig.for_model("qwen3", **adapted.model.config, vocab_size=shape.vocab_size)  # type: ignore[union-attr]
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, adapted.training.lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    estimate = memory_estimate(adapted, shape)
    assert (estimate.gradients, estimate.optimizer, estimate.reference) == (4 * trained, 8 * trained, 0)
    assert estimate.weights == memory_estimate(whole, shape).weights + 4 * trained
    assert memory_estimate(whole, shape).reference == 4 * shape.parameters


README = ROOT / "README.md"
SHIPPED = sorted((README.parent / "specs" / "experiments").rglob("*.yaml"))


def test_the_estimate_of_a_large_model_is_held_against_an_h100_where_nothing_names_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "smallest_gpu", lambda: None)
    large = "model={source: pretrained, path: Qwen/Qwen3-4B-Base}"
    long = ("rollout={engine: vllm, max_response_length: 4096}", "training.microbatch_tokens=16384")
    wide = ("training.prompts_per_step=512", "training.precision=bfloat16")
    spec = experiment(tmp_path, "qwen3", large, *long, *wide)
    (warning,) = memory_warnings(spec)
    assert re.fullmatch(r"the estimated \d+\.\d GiB per rank do not fit an H100", warning.message)
    assert warning.given == "79.6"
    assert "largest part: " in warning.hint
    assert warning.hint.endswith("set resources.memory_gib to the memory of your GPUs")
    fits = ("training.gradient_checkpointing=true", "training.zero_stage=2", "training.ranks=8")
    assert memory_warnings(experiment(tmp_path, "qwen3", large, *long, *wide, *fits)) == []
    greedy = "rollout={engine: vllm, max_response_length: 4096, memory_fraction: 0.9}"
    (warning,) = memory_warnings(experiment(tmp_path, "qwen3", large, greedy, *long[1:], *wide, *fits))
    assert "kv_cache with 71.6 GiB; a smaller rollout.memory_fraction" in warning.hint
    assert memory_warnings(experiment(tmp_path, "qwen3", large, *long, *wide, "resources.device=cpu")) == []
    assert memory_warnings(experiment(tmp_path)) == []


def test_this_machines_smallest_gpu_is_what_a_local_run_is_held_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA L4, 23034'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    device.smallest_gpu.cache_clear()
    spec = experiment(tmp_path)
    shape = model_shape(spec)
    assert shape is not None
    assert device.device_of(spec, shape) == device.Device("NVIDIA L4", 22.5)
    named = experiment(tmp_path, "qwen3", "resources.memory_gib=8")
    assert device.device_of(named, shape) == device.Device("resources.memory_gib", 8)
    device.smallest_gpu.cache_clear()


@pytest.mark.more
@pytest.mark.parametrize("file", [*SHIPPED, README], ids=lambda file: file.stem)
def test_what_is_shipped_fits_by_the_estimate(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "smallest_gpu", lambda: None)
    if file is README:
        (text,) = re.findall(r"^```yaml\n# spec\n(.*?)^```", file.read_text(), re.M | re.S)
        file = tmp_path / "readme.yaml"
        file.write_text(text)
    for cell in expand(load_document(file)):
        assert memory_warnings(cell.experiment) == []
