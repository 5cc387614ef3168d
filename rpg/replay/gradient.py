"""Computes an objective's gradient with respect to the parameters, on a recorded step, at the weights of a
checkpoint."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rpg.batches.batch import Microbatch
from rpg.batches.minibatches import Minibatch, cut, plan_step
from rpg.batches.step_loss import pass_loss
from rpg.learner.packing import Packing
from rpg.learner.packing_trial import try_packing
from rpg.learner.policy import Policy, load_model
from rpg.learner.shards import load_weights
from rpg.replay.step import RecordedStep, recorded_tokens, replayed_advantages
from specs.schema.experiment import Experiment
from specs.schema.schedule import constant


@dataclass(frozen=True, slots=True)
class KeptPolicy:
    """The policy of a checkpoint, whole on one device, without an optimizer."""

    policy: Policy
    device: torch.device
    packs: bool
    """Whether a pass may have several sequences in a row, as in `Learner.packs`."""

    @classmethod
    def load(cls, base: Path, checkpoint: Path | None, experiment: Experiment, device: torch.device) -> "KeptPolicy":
        """Loads the base model and replaces its weights by a checkpoint's trained ones.

        Args:
            base: a transformers model directory.
            experiment: the experiment at the step, see `Experiment.at_step`.
            checkpoint: directory of the checkpoint; None uses the base model itself, with which the first step started.
        """
        training = experiment.training.model_copy(update={"zero_stage": 0, "kernels": "torch"})
        torch.manual_seed(experiment.seeds[0])  # as training does before it draws new adapters
        model = load_model(base, training)
        if checkpoint:
            load_weights(model, checkpoint)
        policy = Policy(
            model,
            temperature=constant(experiment.rollout.temperature),
            entropy_gradient=constant(training.entropy_coef) > 0,
        ).to(device)
        packs = training.packing and try_packing(policy, model.config, device, precision=training.precision).keeps_apart
        return cls(policy, device, packs)

    def minibatches(self, recorded: RecordedStep, experiment: Experiment) -> list[Minibatch]:
        """Returns the step's minibatches in passes of `training.microbatch_tokens`."""
        plan = plan_step(recorded.rollouts, experiment.training, packed=self.packs)
        return cut(recorded.rollouts, plan, self.device)

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Returns logprobs and entropies of a pass's sampled tokens, nats, like `Learner.logprobs`. [n] each"""
        packing = Packing(batch.packed, self.device) if batch.packed else None
        logprobs, entropies = self.policy(batch.input_ids, batch.sources, batch.targets, packing=packing)
        return logprobs, entropies


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """The gradient of a step's loss with respect to the trained parameters."""

    parts: list[Tensor]
    """One tensor per parameter, in its shape, float32."""
    loss: float
    """Mean loss over the step's updates, all computed at these weights."""
    logprob_change: float
    """Largest difference between the policy's logprob of a token and the recorded `old_logprob`, nats."""

    def dot(self, other: "ParameterGradient") -> float:
        """Returns the scalar product, summed in float64."""
        pairs = zip(self.parts, other.parts, strict=True)
        return math.fsum(float((one.double() * two.double()).sum()) for one, two in pairs)

    @property
    def norm(self) -> float:
        """Returns the length of the gradient."""
        return math.sqrt(self.dot(self))


def parameter_gradient(kept: KeptPolicy, recorded: RecordedStep, experiment: Experiment) -> ParameterGradient:
    """Differentiates the mean of the losses of a step's updates, in microbatches, without clipping any update's
    gradient.

    The policy's logprobs are computed; those of the old and the reference policy, rewards and rollouts come from the
    records. The result includes the gradient of an entropy bonus.

    Args:
        recorded: the step, with its prompts and given tokens.
        experiment: the experiment at this step, see `Experiment.at_step`.
    """
    parameters = [parameter for parameter in kept.policy.parameters() if parameter.requires_grad]
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    advantages = replayed_advantages(recorded, experiment)
    loss, change = 0.0, 0.0
    minibatches = kept.minibatches(recorded, experiment)
    for minibatch in minibatches:
        for batch in minibatch.passes:
            tokens, _ = recorded_tokens(recorded, batch, advantages)
            if not batch.counts or not tokens.response_mask.any():
                continue
            logprobs, entropies = kept.logprobs(batch)
            live = replace(tokens, logprobs=batch.spread(logprobs))
            part = pass_loss(experiment, minibatch, batch, live, entropies).loss / len(minibatches)
            for total, gradient in zip(sums, _gradients(part, parameters), strict=True):
                total += gradient
            loss += float(part.detach())
            difference = (live.logprobs.detach() - tokens.old_logprobs).abs()
            change = max(change, float(difference[tokens.response_mask > 0].max()))
    return ParameterGradient(sums, loss, change)


def _gradients(loss: Tensor, parameters: list[torch.nn.Parameter]) -> tuple[Tensor, ...]:
    """Returns the gradients; 0 for parameters on which the loss does not depend."""
    return torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
