"""Estimated GPU hours of a run, from a roofline of training and the memory traffic of sampling."""

from dataclasses import dataclass

from pipelines.planning.evaluations import evaluated_checkpoints, evaluation_problems
from pipelines.planning.gpu_sharing import with_recomputation
from pipelines.planning.memory import engine_memory, turn_bounds
from pipelines.planning.roofline import PRODUCTS, step_seconds
from rpg.base.shape import ModelShape
from specs.errors import Issue
from specs.machine.cards import H100
from specs.machine.gpu_slots import slots_here
from specs.schema.experiment import Experiment
from specs.schema.rollout import TurnBounds

FLOAT32_FLOPS = 67e12
"""Peak rate in float32 without TF32, FLOP/s."""
SAMPLING_SHARE = 0.6
"""Share of the bandwidth that sampling is assumed to reach."""


@dataclass(frozen=True, slots=True)
class GpuHours:
    """GPU hours of one run if every response has its full length. GPUs that wait for other GPUs of the run count
    too."""

    sampling: float
    """Includes every group that dynamic sampling may discard and sample again."""
    training: float
    share_of_peak: float
    """Expected share of the GPU's bfloat16 peak that the updates reach; see the metric `mfu`."""
    evaluation: float | None
    """Hours of all checkpoints. None if the size of an evaluation set is unknown before it is read."""

    @property
    def total(self) -> float:
        """Returns the sum of sampling, training and evaluation, which take turns. An evaluation of unknown size is left
        out."""
        return self.sampling + self.training + (self.evaluation or 0)


def gpu_hours(experiment: Experiment, shape: ModelShape) -> GpuHours:
    """Returns the hours on H100s. Loading is not counted."""
    experiment = with_recomputation(experiment, shape)
    training, rollout = experiment.training, experiment.rollout
    responses = training.prompts_per_step * training.group_size
    rounds = rollout.dynamic_sampling.max_batches if rollout.dynamic_sampling else 1
    sampling = sampling_seconds(experiment, shape, responses, turn_bounds(experiment))
    each, step = evaluation_hours(experiment, shape), step_seconds(experiment, shape)
    return GpuHours(
        sampling=training.steps * rounds * sampling * experiment.gpus / 3600,
        training=training.steps * (step.logprobs + step.updates) / training.ranks * experiment.gpus / 3600,
        share_of_peak=step.share_of_peak,
        evaluation=None if each is None else each * evaluated_checkpoints(experiment),
    )


def evaluation_hours(experiment: Experiment, shape: ModelShape) -> float | None:
    """Returns the GPU hours to evaluate one checkpoint, on the GPUs that train. None if the size of a
    set is unknown."""
    problems, evaluation = evaluation_problems(experiment), experiment.evaluation
    if problems is None:
        return None
    bounds = turn_bounds(experiment, evaluation.max_response_length or 0)
    responses = problems * evaluation.samples_per_problem
    return sampling_seconds(experiment, shape, responses, bounds) * experiment.gpus / 3600 if responses else 0.0


def precision_warnings(experiment: Experiment) -> list[Issue]:
    """Warns if a GPU will train in float32: the GPU that the spec asks for, or with `auto` a GPU of this machine."""
    device, here = experiment.resources.device, experiment.launcher.type == "local"
    on_gpu = device == "cuda" or (device == "auto" and here and bool(slots_here()))
    if not on_gpu or experiment.training.precision != "float32":
        return []
    return [
        Issue(
            "a GPU will train in float32",
            path=("training", "precision"),
            given="float32",
            hint=f"bfloat16 multiplies matrices {H100.flops / FLOAT32_FLOPS:.0f} times as fast on an H100, halves"
            " the activations, and has the attention kernel for packed rows",
        )
    ]


def sampling_seconds(experiment: Experiment, shape: ModelShape, responses: int, bounds: TurnBounds) -> float:
    """Returns the seconds that all samplers together take for this many responses, each at its full length.

    For every sampled token the weights are read once for all responses in flight, and the cache of each response.
    Tokens from the environment are read once, as arithmetic; an engine keeps the cache of earlier turns. A sampler of
    several GPUs has the bandwidth of all of them. Waiting for tools is not counted: other responses are sampled
    meanwhile.
    """
    training, rollout = experiment.training, experiment.rollout
    size = 2 if training.precision == "bfloat16" else 4
    responses = -(-responses // experiment.samplers)
    context = experiment.data.max_prompt_length + bounds.length / 2
    cache = context * shape.layers * 2 * shape.key_value_size * (rollout.cache_bytes or size)
    in_flight = min(responses, rollout.max_concurrent)
    gpus = rollout.gpus_per_sampler
    if engine := engine_memory(experiment):
        in_flight = max(1, min(in_flight, int((engine * gpus - shape.parameters * size) / cache)))
    traffic = (shape.read_parameters * size + in_flight * cache) / (H100.bandwidth * SAMPLING_SHARE)
    forward = 2 * shape.matrix_parameters / (H100.flops * PRODUCTS)
    sampling = bounds.sampled * max(traffic / in_flight, forward)
    # A sampled token takes longer than a given one: this counts as many sampled tokens as possible.
    return responses * (sampling + (bounds.length - bounds.sampled) * forward) / gpus
