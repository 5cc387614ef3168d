"""Seconds of each part of a training step on H100s.

Sampling and passes come from `gpu_hours` and `roofline`. The rest is data that moves: weights to engines, gradients
between ranks, a checkpoint to the host. Waiting for rewards and tools is not counted.
"""

import math
from dataclasses import dataclass

from pipelines.planning.gpu_hours import SAMPLING_SHARE, sampling_seconds
from pipelines.planning.memory import longest_sequence, memory_estimate, turn_bounds
from pipelines.planning.roofline import BANDWIDTH, step_seconds
from rpg.base.shape import ModelShape
from specs.machine.cards import H100
from specs.schema.experiment import Experiment

NVLINK = 200e9
"""Bytes/s between GPUs of a machine in a collective, about half of an H100's 450 GB/s in each direction."""
NETWORK = 25e9
"""Bytes/s of a GPU between machines: half of a 400 Gb/s port."""
HOST = 25e9
"""Bytes/s of a GPU's link to page-locked host memory: half of PCIe 5."""
CHECKPOINT = 1.3e9
"""Bytes/s at which a rank copies its state for a checkpoint, measured on an H200. The copy is written in the
background."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step, by part."""

    sampling: float
    """Seconds during which all slots of the engines are in use; those of one round if groups are replaced."""
    tail: float
    """Seconds from then until the longest response has ended. 0 if every response has its full length."""
    logprobs: float
    """Old and reference logprobs."""
    update: float
    """Passes, the sum of gradients over the ranks, and the optimizer."""
    weights: float
    """Transfer of new weights to the engines, and memory that goes to the host and back."""
    checkpoint: float
    """Seconds for checkpoints, as the mean over all steps."""
    overlaps: bool
    """Whether sampling and training happen at the same time, on separate GPUs."""
    sampled_tokens: float
    """Tokens that are sampled in a step, over all engines."""
    trained_tokens: float
    """Tokens of prompts and responses in a step."""
    passes: int
    """Passes over the trained tokens, one per epoch."""
    sampling_gpus: int
    training_gpus: int
    gpus: int
    """GPUs of the run."""

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part by its name."""
        names = ("sampling", "tail", "logprobs", "update", "weights", "checkpoint")
        return {name: getattr(self, name) for name in names}

    @property
    def step(self) -> float:
        """Returns the seconds of a step."""
        sampling, training = self.sampling + self.tail, self.logprobs + self.update
        both = max(sampling, training) if self.overlaps else sampling + training
        return both + self.weights + self.checkpoint

    @property
    def rates(self) -> dict[str, float]:
        """Returns tokens per second and GPU: of sampling, logprobs and update on the GPUs that do the work, and of a
        step on all GPUs."""
        of_training = self.trained_tokens / self.training_gpus
        done = {
            "sampling": (self.sampled_tokens / self.sampling_gpus, self.sampling),
            "logprobs": (of_training, self.logprobs),
            "update": (of_training * self.passes, self.update),
            "step": (self.trained_tokens / self.gpus, self.step),
        }
        return {name: tokens / seconds for name, (tokens, seconds) in done.items() if seconds}


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean tokens of prompts and responses that the time of a step assumes. 0 stands for the longest that the spec
    allows."""

    response: int = 0
    prompt: int = 0

    def of(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with prompts and responses of these lengths."""
        sections = {"data": ("max_prompt_length", self.prompt), "rollout": ("max_response_length", self.response)}
        changed = {}
        for name, (key, mean) in sections.items():
            section = getattr(experiment, name)
            longest = getattr(section, key)
            changed[name] = section.model_copy(update={key: min(mean or longest, longest)})
        return experiment.model_copy(update=changed)


def step_parts(experiment: Experiment, shape: ModelShape, means: MeanLengths = MeanLengths()) -> StepParts:
    """Returns the parts of a step on H100s.

    Args:
        experiment: with the memory and the choices of the plan, see `planned_on`.
        means: mean tokens of prompts and responses.
    """
    training, rollout = experiment.training, experiment.rollout
    typical = means.of(experiment)
    responses, size = training.prompts_per_step * training.group_size, 2 if training.precision == "bfloat16" else 4
    engines_apart = experiment.gpus > training.ranks
    mean, longest = turn_bounds(typical).sampled, turn_bounds(experiment).sampled
    token = shape.read_parameters * size / (H100.bandwidth * SAMPLING_SHARE * rollout.gpus_per_sampler)
    passes = step_seconds(typical, shape)
    trained = responses * longest_sequence(typical)
    return StepParts(
        sampling=sampling_seconds(typical, shape, responses, turn_bounds(typical)),
        tail=(longest - mean) * token,
        logprobs=passes.logprobs / training.ranks,
        update=passes.updates / training.ranks + _reduction(typical, shape, size, trained),
        weights=_weights(experiment, shape, size, apart=engines_apart),
        checkpoint=_checkpoint(experiment, shape),
        overlaps=rollout.max_staleness > 0 and engines_apart,
        sampled_tokens=responses * mean,
        trained_tokens=trained,
        passes=training.epochs,
        sampling_gpus=experiment.samplers * rollout.gpus_per_sampler if rollout.has_processes else training.ranks,
        training_gpus=training.ranks,
        gpus=experiment.gpus,
    )


def _link(experiment: Experiment) -> float:
    """Returns the bytes/s between the run's GPUs."""
    return NVLINK if len(experiment.launcher.ranks_of_machines(experiment.training.ranks)) == 1 else NETWORK


def _reduction(experiment: Experiment, shape: ModelShape, size: int, tokens: float) -> float:
    """Returns the seconds in which ranks add up gradients. ZeRO 2 and 3 do this in every pass, ZeRO 2 with an
    all-reduce of each bucket; ZeRO 0 and 1 do it once per update."""
    training = experiment.training
    if training.ranks == 1 or training.lora:
        return 0.0
    stage = training.deepspeed_stage
    passes = max(training.minibatches, math.ceil(tokens / training.microbatch_tokens / training.ranks))
    times = training.epochs * (passes if stage >= 2 else training.minibatches)
    number = 4 if training.gradient_reduction == "float32" else size
    share = (training.ranks - 1) / training.ranks
    return times * (1 if stage == 3 else 2) * share * shape.parameters * number / _link(experiment)


def _weights(experiment: Experiment, shape: ModelShape, size: int, *, apart: bool) -> float:
    """Returns the seconds to send new weights to the engines. 0 for a sampler that uses the learner's own module."""
    training, rollout = experiment.training, experiment.rollout
    moved = 0.0
    if training.offload.leaves_while_sampling:
        moved = 2 * memory_estimate(experiment, shape).only_for_updates / HOST
    if rollout.reads_learner(training.zero_stage):
        return moved
    whole = shape.parameters * size
    gathered = whole / _link(experiment) if training.zero_stage == 3 and training.ranks > 1 else 0.0
    elsewhere = NETWORK if experiment.launcher.engines_key else NVLINK
    sent = whole / elsewhere if apart else 2 * whole / (H100.bandwidth * BANDWIDTH)
    return moved + gathered + sent


def _checkpoint(experiment: Experiment, shape: ModelShape) -> float:
    estimate, training = memory_estimate(experiment, shape), experiment.training
    state = estimate.optimizer + estimate.reference + estimate.weights // training.ranks
    return state / CHECKPOINT / training.checkpoint.every_steps
