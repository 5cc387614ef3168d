"""Seconds of a training pass on a GPU, and the limit of each of its parts: products, attention, or memory bandwidth.

The work is counted by `rpg.base.traffic`; the rates are those that kernels sustain, not the data sheets'.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from pipelines.planning.memory import longest_sequence, turn_bounds
from pipelines.planning.model_shape import settings_of, teacher_shape
from rpg.base.shape import ModelShape
from rpg.base.traffic import Work
from rpg.fused import lacks_kernels
from specs.machine.cards import H100, Card
from specs.schema.experiment import Experiment

PRODUCTS = 0.77
"""Share of a card's peak that products of large bfloat16 matrices reach: 760 of 989 TFLOP/s in passes on an H200."""
ATTENTION = (0.226, 0.203)
"""Share of the peak in torch's attention for packed rows, forward and backward: 224 and 201 TFLOP/s on an H200."""
BANDWIDTH = 0.58
"""Share of the memory's bandwidth that all other operations of a pass reach, measured in the same passes. A sum of two
large tensors reaches 0.88; these operations work on smaller tensors and accumulate gradients."""
BACKWARD_PAIRS = 2.5
"""Ratio of attention's arithmetic in a backward pass to that in a forward pass."""
PASS_BYTES = 16
"""Bytes moved for each trained weight in a pass: its gradient goes to a bucket, and is accumulated in float32."""
UPDATE_BYTES = 30
"""Bytes moved for each trained weight in an update: master weight, two moments, gradient, and the
weight in bfloat16."""
_COMPARED_BYTES = 48
"""Bytes moved for each logit when whole distributions are compared, in one of the two passes: a dozen times a
float32."""
UNCOUNTED_SHARE = 0.25
"""Share of the peak that is assumed for models that do not run on meta tensors."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The fused operations of a pass."""

    fused: bool = False
    """Whether norms, rotations and gates are one kernel each."""
    head: bool = False
    """Whether logprob and entropy of a token's logits are one kernel."""


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds for each token of a pass."""

    forward: float
    backward: float
    recompute_all: float
    """Added if layers keep only their input for the backward pass."""
    recompute_some: float
    """Added if layers also keep the results of products and attention."""


def fuses(experiment: Experiment) -> bool:
    """Returns whether a run will use Liger's kernels on a GPU, by the spec, the model's settings and the packages on
    this machine."""
    match experiment.training.kernels:
        case "torch":
            return False
        case "liger":
            return True
        case "auto":
            settings = settings_of(experiment.model) or {}
            return lacks_kernels(settings.get("model_type", ""), settings.get("hidden_act", "silu")) is None
        case never:
            assert_never(never)


def kernels_of(experiment: Experiment) -> Kernels:
    """Returns the kernels of a run's passes on a GPU, if torch includes Triton."""
    return Kernels(fused=fuses(experiment), head=True)


def token_seconds(
    shape: ModelShape, *, length: float, responses: float, kernels: Kernels = Kernels(), card: Card = H100
) -> TokenSeconds:
    """Returns the seconds of a pass in bfloat16 for each of its tokens.

    Args:
        length: tokens of a sequence.
        responses: share of the tokens that go through the output head.
    """
    pairs = 2 * shape.layers * shape.attention_size * length
    traffic = shape.traffic
    if traffic is None:
        forward = (2 * shape.matrix_parameters + pairs) / (card.flops * UNCOUNTED_SHARE)
        return TokenSeconds(forward, 2 * forward, forward, 0.0)
    layers = (traffic.fused_forward, traffic.fused_backward) if kernels.fused else (traffic.forward, traffic.backward)
    head = (
        (traffic.kernel_head_forward, traffic.kernel_head_backward)
        if kernels.head
        else (traffic.head_forward, traffic.head_backward)
    )
    seen = pairs / (card.flops * ATTENTION[0]), BACKWARD_PAIRS * pairs / (card.flops * ATTENTION[1])
    forward, backward = (_seconds(work, card) + each for work, each in zip(layers, seen, strict=True))
    of_head = [responses * _seconds(work, card) for work in head]
    moved = layers[0].bytes_moved / (card.bandwidth * BANDWIDTH)
    return TokenSeconds(forward + of_head[0], backward + of_head[1], forward, moved)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """GPU seconds of a training step over all ranks, if every response has its full length."""

    logprobs: float
    """Old and reference logprobs."""
    updates: float
    share_of_peak: float
    """Expected value of the metric `mfu`: share of the card's peak that the updates reach, without recomputation."""


def step_seconds(experiment: Experiment, shape: ModelShape) -> StepSeconds:
    """Returns the seconds of a run's training step."""
    training = experiment.training
    length, response = longest_sequence(experiment), turn_bounds(experiment).sampled
    sequences = training.prompts_per_step * training.group_size
    tokens = sequences * length
    seconds_of = partial(token_seconds, length=length, responses=response / length, kernels=kernels_of(experiment))
    each = seconds_of(shape)
    recomputed = {False: 0.0, "selective": each.recompute_some}
    logprobs = 0.0
    if not experiment.rollout.gives_old_logprobs:
        waits = experiment.first_pass_gives_old_logprobs and not training.router_aux_loss_coef
        logprobs += (1 - waits / training.minibatches) * each.forward
    summed = experiment.objective.summed_over
    # If the policy that sampled is the reference, its distributions give the old logprobs too.
    if experiment.reference.source != "behaviour" or (summed != "sampled" and experiment.rollout.gives_old_logprobs):
        head = 0 if summed == "full" else response / length  # compared in the update, which computes its logits
        logprobs += seconds_of(teacher_shape(experiment) or shape, responses=head).forward
    compared = _compared(teacher_shape(experiment) or shape) * response / length if summed == "full" else 0.0
    weights = 0 if training.lora else shape.parameters  # adapters are few
    passes = max(training.minibatches, math.ceil(tokens / training.microbatch_tokens))
    moved = weights * (PASS_BYTES * passes + UPDATE_BYTES * training.minibatches) / (H100.bandwidth * BANDWIDTH)
    recomputing = recomputed.get(training.gradient_checkpointing, each.recompute_all)
    once = tokens * (each.forward + each.backward + compared + recomputing) + moved
    flops = shape.training_flops(
        tokens, sequences * response, pairs=sequences * length**2 / 2, frozen=training.lora is not None
    )
    return StepSeconds(tokens * logprobs, training.epochs * once, flops / (once * H100.flops))


def _compared(reference: ModelShape) -> float:
    """Returns the seconds for each response token that an update takes to compare whole distributions: to compute the
    reference's logits in the forward pass and again in the backward pass, and to traverse the logits of both
    policies."""
    logits = reference.vocab_size
    product = Work(2 * logits * reference.hidden_size, _COMPARED_BYTES * logits)
    return 2 * _seconds(product, H100)


def _seconds(work: Work, card: Card) -> float:
    return work.flops / (card.flops * PRODUCTS) + work.bytes_moved / (card.bandwidth * BANDWIDTH)
