"""Computes an objective's gradient with respect to the parameters, on a recorded step, at the weights of a
checkpoint."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rpg.batches.step_loss import pass_loss
from rpg.replay.kept import KeptPolicy, References
from rpg.replay.step import RecordedStep, recorded_tokens, replayed_advantages, sum_of
from specs.schema.experiment import Experiment


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


def parameter_gradient(
    kept: KeptPolicy, recorded: RecordedStep, experiment: Experiment, references: References
) -> ParameterGradient:
    """Differentiates the mean of the losses of a step's updates, in microbatches, without clipping any update's
    gradient.

    The policy's logprobs and a divergence that is summed over tokens are computed; the logprobs of the old and the
    reference policy, rewards and rollouts come from the records. The result includes the gradient of an entropy bonus.

    Args:
        recorded: the step, with its prompts and given tokens.
        experiment: the experiment at this step, see `Experiment.at_step`.
        references: the reference's distributions at the step, if the objective sums its divergence over tokens.
    """
    parameters = [parameter for parameter in kept.model.parameters() if parameter.requires_grad]
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    advantages = replayed_advantages(recorded, experiment)
    loss, change = 0.0, 0.0
    minibatches = kept.minibatches(recorded, experiment)
    for minibatch in minibatches:
        for batch in minibatch.passes:
            tokens, _ = recorded_tokens(recorded, batch, advantages, None)
            if not batch.counts or not tokens.response_mask.any():
                continue
            state = None
            if over := sum_of(experiment.objective):
                rows = references[over[1]].read(batch)
                logprobs, entropies, state, _ = kept.passes.compared(batch, over[0], rows)
            else:
                logprobs, entropies = kept.passes.logprobs(batch)
            live = replace(tokens, logprobs=batch.spread(logprobs), state=state and state.each(batch.spread))
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
