"""The time of a step by arithmetic: its parts, what would save most, and the splits of the GPUs."""

import json
from pathlib import Path

import pytest
from places import ROOT

from pipelines.planning.device import Device
from pipelines.planning.gpu_hours import gpu_hours
from pipelines.planning.gpu_sharing import planned_on, sharing_inputs
from pipelines.planning.memory import GIB, memory_estimate
from pipelines.planning.model_shape import model_shape
from pipelines.planning.steps.changes import changes, placement_keys, placements
from pipelines.planning.steps.parts import NETWORK, NVLINK, MeanLengths, step_parts
from pipelines.planning.steps.words import placement_lines, step_data, step_lines
from rpg.base.shape import ModelShape
from specs.loader import load_experiment
from specs.schema.experiment import Experiment
from tests.pipelines.planning.test_gpu_sharing import shape_named

SPEC = """
name: timed
model: {{source: pretrained, path: Qwen/Qwen3-4B}}
data:
  train: [{{source: reasoning_gym, task: chain_sum, size: 1024}}]
  max_prompt_length: 256
reward: {{type: reasoning_gym}}
rollout: {{engine: vllm, max_response_length: 4096{rollout}}}
objective: {{type: rpg}}
reference: {{source: behaviour}}
training:
  {{steps: 2, prompts_per_step: 512, group_size: 16, minibatches: 16, zero_stage: 2,
   microbatch_tokens: 16384{training}}}
resources: {{device: cuda, memory_gib: 80}}
"""
MEANS = MeanLengths(response=1170, prompt=150)
DEVICE = Device("a GPU", 80)


def spec(
    tmp_path: Path, *, rollout: str = "", training: str = ", ranks: 8, gradient_checkpointing: true"
) -> Experiment:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(rollout=rollout, training=training))
    return load_experiment(path)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_named("Qwen/Qwen3-4B")


def test_the_parts_of_a_step_at_full_length_are_the_gpu_hours(tmp_path: Path, shape: ModelShape) -> None:
    one = planned_on(spec(tmp_path), shape, DEVICE)
    parts, hours = step_parts(one, shape), gpu_hours(one, shape)
    assert parts.tail == 0
    assert parts.sampling * 2 * 8 / 3600 == pytest.approx(hours.sampling)
    without_sums = parts.logprobs + parts.update - 2 * 7 / 8 * shape.parameters * 2 / NVLINK * sums(one)
    assert without_sums * 2 * 8 / 3600 == pytest.approx(hours.training)
    assert parts.step == pytest.approx(sum(parts.seconds.values()))
    assert parts.rates["sampling"] == pytest.approx(8192 * 4096 / 8 / parts.sampling)
    assert parts.rates["step"] == pytest.approx(8192 * (4096 + 256) / 8 / parts.step)


def sums(one: Experiment) -> int:
    """How often each of eight ranks adds up gradients at ZeRO 2: in every pass."""
    return -(-8192 * (4096 + 256) // (one.training.microbatch_tokens * 8))


def test_a_tail_lasts_until_the_longest_response_has_its_last_token(tmp_path: Path, shape: ModelShape) -> None:
    parts = step_parts(planned_on(spec(tmp_path), shape, DEVICE), shape, MEANS)
    read = shape.parameters * 2 / (3.35e12 * 0.6)
    assert parts.tail == pytest.approx((4096 - 1170) * read, rel=0.02)
    assert parts.sampling == pytest.approx(78, rel=0.2)


def test_weights_go_over_the_slowest_link(tmp_path: Path, shape: ModelShape) -> None:
    beside = step_parts(spec(tmp_path, rollout=", engines: 8"), shape)
    assert beside.weights == pytest.approx(shape.parameters * 2 / NVLINK)
    nodes = ", ranks: 8, gradient_checkpointing: true}\nlauncher: {type: slurm, nodes: 1, engine_nodes: 1"
    apart = step_parts(spec(tmp_path, rollout=", placement: dedicated", training=nodes), shape)
    assert apart.weights == pytest.approx(shape.parameters * 2 / NETWORK)


def test_sampling_and_training_overlap_on_gpus_of_their_own_alone(tmp_path: Path, shape: ModelShape) -> None:
    apart = step_parts(spec(tmp_path, rollout=", engines: 4, max_staleness: 1", training=", ranks: 4"), shape, MEANS)
    assert apart.overlaps
    assert apart.step == pytest.approx(
        max(apart.sampling + apart.tail, apart.update) + apart.weights + apart.checkpoint
    )
    assert not step_parts(spec(tmp_path, rollout=", max_staleness: 1"), shape, MEANS).overlaps


def test_the_changes_that_save_most_come_first_and_exclude_each_other_by_their_words(
    tmp_path: Path, shape: ModelShape
) -> None:
    found = changes(spec(tmp_path), shape, DEVICE, MEANS)
    assert [each.saved for each in found] == sorted((each.saved for each in found), reverse=True)
    what = [each.what for each in found]
    assert "rollout.kv_cache: fp8 with rollout.correction" in what
    assert any(each.startswith("rollout.trust_logprobs: true (if kl/rollout of a run is small") for each in what)
    done = changes(spec(tmp_path, rollout=", kv_cache: fp8, correction: {type: truncate}"), shape, DEVICE, MEANS)
    assert not any("fp8 with" in each.what for each in done)
    now = step_parts(planned_on(spec(tmp_path), shape, DEVICE), shape, MEANS)
    trusting = next(each for each in found if "trust_logprobs" in each.what)
    assert trusting.saved == pytest.approx(now.logprobs)


def test_each_split_of_the_gpus_is_compared(tmp_path: Path, shape: ModelShape) -> None:
    splits = placements(spec(tmp_path), shape, DEVICE, MEANS)
    assert [(split.ranks, split.engines) for split in splits] == [(8, 0), *((n, 8 - n) for n in range(1, 8))]
    assert all(split.parts.gpus == 8 for split in splits)
    assert splits[1].fits
    on_less = placements(spec(tmp_path), shape, Device("a GPU", 60), MEANS)
    assert [split.fits for split in on_less[1:3]] == [False, True], "one rank holds the whole optimizer state"
    more = [split.parts.sampling for split in splits[1:]]
    assert more == sorted(more), "the fewer engines, the longer they sample"
    written = placement_keys(splits[3])
    assert written == ("training.ranks: 3, rollout.placement: dedicated, rollout.engines: 5, rollout.max_staleness: 1")
    pairs = placements(spec(tmp_path, rollout=", engines: 2, tensor_parallel_size: 2"), shape, DEVICE, MEANS)
    assert {(split.ranks, split.engines) for split in pairs} == {(n, (12 - n) // 2) for n in range(2, 12, 2)}
    assert placements(spec(tmp_path, training=""), shape, DEVICE, MEANS) == [], "one GPU"


def test_the_plan_shows_a_step_as_a_table(tmp_path: Path, shape: ModelShape) -> None:
    lines = step_lines(spec(tmp_path), shape, DEVICE, MEANS)
    assert lines[0].startswith("step    about ")
    assert "on 8 H100s, responses of 1,170 tokens in the mean" in lines[0]
    names = [line.split()[0] for line in lines[1:8]]
    assert names == ["sampling", "tail", "logprobs", "update", "weights", "checkpoint", "step"]
    assert lines[1].endswith(" tokens/s/GPU")
    assert lines[8].startswith("saves ")
    splits = placement_lines(spec(tmp_path), shape, DEVICE, MEANS)
    assert sum(line.endswith("<- best") for line in splits) == 1
    assert splits[-1].startswith("        best: training.ranks: ")
    data = json.loads(json.dumps(step_data(spec(tmp_path), shape, DEVICE, MEANS)))
    assert set(data["seconds"]) == {*names}
    assert len(data["placements"]) == 8


@pytest.mark.parametrize(("gib", "level"), [(30, True), (80, "selective"), (300, False)])
def test_recomputation_is_the_least_that_fits(tmp_path: Path, shape: ModelShape, gib: int, level: bool | str) -> None:
    one = spec(
        tmp_path, rollout=", sleep: true, memory_fraction: 0.3", training=", ranks: 8, gradient_checkpointing: auto"
    )
    planned = planned_on(one, shape, Device("a GPU", gib))
    assert planned.training.gradient_checkpointing == level
    for less in {True: ("selective", False), "selective": (False,), False: ()}[level]:
        too_much = planned.sharing_memory({"gradient_checkpointing": less})
        assert memory_estimate(too_much, shape).total > 0.92 * gib * GIB


def test_without_a_gpu_nothing_is_recomputed_and_on_an_unknown_one_everything(tmp_path: Path) -> None:
    auto = spec(tmp_path, training=", gradient_checkpointing: auto")
    on_cpu = auto.model_copy(update={"resources": auto.resources.model_copy(update={"device": "cpu", "memory_gib": 0})})
    assert sharing_inputs(on_cpu) == {"sharing": {"gradient_checkpointing": False}}
    unknown = auto.model_copy(update={"resources": auto.resources.model_copy(update={"memory_gib": 0})})
    assert sharing_inputs(unknown)["sharing"]["gradient_checkpointing"] is True
    assert on_cpu.sharing_memory({"gradient_checkpointing": False}).training.gradient_checkpointing is False


def test_a_shipped_spec_recomputes_only_what_the_memory_asks_for() -> None:
    """Whole GPU hours, as docs/performance.md has them."""
    path = ROOT / "specs" / "experiments" / "qwen3-4b-tools.yaml"
    shape = model_shape(load_experiment(path))
    training = [
        gpu_hours(load_experiment(path, [f"training.gradient_checkpointing={level}"]), shape).training
        for level in ("true", "auto")
    ]
    assert [round(hours) for hours in training] == [206, 179]
