"""How many GPU hours a run will take at most: arithmetic of training, memory traffic of sampling."""

from dataclasses import dataclass

from pipelines.planning.memory import engine_memory
from pipelines.planning.model_shape import ModelShape
from specs.schema.experiment import Experiment

PEAK_FLOPS = 989e12
"""bfloat16 products of an H100 SXM, FLOP/s."""
BANDWIDTH = 3.35e12
"""Its memory's, bytes/s."""
TRAINING_SHARE = 0.4
"""Of the peak that training is taken to reach."""
SAMPLING_SHARE = 0.6
"""Of the bandwidth that sampling is taken to reach."""


@dataclass(frozen=True, slots=True)
class GpuHours:
    """Of one run, every response at its full length. A GPU that waits, for its engine or for its rank, counts."""

    sampling: float
    training: float

    @property
    def total(self) -> float:
        """Sampling and training take turns."""
        return self.sampling + self.training


def gpu_hours(experiment: Experiment, shape: ModelShape) -> GpuHours:
    """On H100s. Evaluation, loading and what dynamic sampling throws away come on top."""
    training = experiment.training
    gpus = experiment.rollout.gpus(training.ranks)
    return GpuHours(
        sampling=training.steps * _sampling_seconds(experiment, shape) * gpus / 3600,
        training=training.steps * _training_seconds(experiment, shape) / training.ranks * gpus / 3600,
    )


def _training_seconds(experiment: Experiment, shape: ModelShape) -> float:
    """GPU seconds of a step: a forward is 2 operations a parameter and token, a backward 4, recomputation 2 more."""
    training = experiment.training
    length = experiment.data.max_prompt_length + experiment.rollout.max_response_length
    tokens = training.prompts_per_step * training.group_size * length
    passes = float(training.epochs * (4 if training.gradient_checkpointing else 3))
    if not experiment.rollout.gives_old_logprobs:
        passes += 1 - experiment.first_pass_gives_old_logprobs / training.minibatches
    if experiment.reference.source != "behaviour":
        passes += 1
    forward = 2 * shape.matrix_parameters + 2 * shape.layers * shape.attention_size * length
    return tokens * passes * forward / (PEAK_FLOPS * TRAINING_SHARE)


def _sampling_seconds(experiment: Experiment, shape: ModelShape) -> float:
    """Seconds of a step with each rank's engine: every token reads the weights once for all in flight, and each its own
    cache; an engine of several GPUs has their bandwidth together."""
    training, rollout = experiment.training, experiment.rollout
    size = 2 if training.precision == "bfloat16" else 4
    responses = -(-training.prompts_per_step * training.group_size // training.ranks)
    context = experiment.data.max_prompt_length + rollout.max_response_length / 2
    cache = context * shape.layers * 2 * shape.key_value_size * size
    in_flight = min(responses, rollout.max_concurrent)
    spread = rollout.gpus_per_sampler
    if engine := engine_memory(experiment):
        in_flight = max(1, min(in_flight, int((engine * spread - shape.parameters * size) / cache)))
    traffic = (shape.matrix_parameters * size + in_flight * cache) / (BANDWIDTH * SAMPLING_SHARE)
    arithmetic = in_flight * 2 * shape.matrix_parameters / (PEAK_FLOPS * TRAINING_SHARE)
    return responses / in_flight * rollout.max_response_length * max(traffic, arithmetic) / spread
