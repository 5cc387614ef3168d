"""Loads the policy and the reference of a step from kept weights, and computes the values that no record holds."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rpg.base.teacher import teacher_directory
from rpg.batches.ledger import ReferenceTable
from rpg.batches.minibatches import Minibatch, cut, plan_step
from rpg.learner.passes import Passes, frozen_passes
from rpg.learner.policy import Policy, load_model
from rpg.learner.shards import load_weights
from rpg.objectives.distribution import StateDivergence
from rpg.pretrained import config_of, tokenizer_of
from rpg.reference import ReferencePolicy, reference_policy
from rpg.replay.step import RecordedStep, Sum
from specs.schema.experiment import Experiment
from specs.schema.schedule import constant

References = dict[int, ReferenceTable]
"""The reference's distributions at a step's tokens, by the number of likely tokens kept, 0 for all of them."""


@dataclass(frozen=True, slots=True)
class KeptPolicy:
    """The policy of a checkpoint, whole on one device, without an optimizer."""

    model: nn.Module
    passes: Passes
    device: torch.device
    reference: ReferencePolicy | None
    """The reference of the step after the checkpoint; None if it is the policy, or was not requested."""

    @classmethod
    def load(
        cls,
        base: Path,
        checkpoint: Path | None,
        experiment: Experiment,
        device: torch.device,
        *,
        with_reference: bool = False,
    ) -> "KeptPolicy":
        """Loads the base model and replaces its weights by a checkpoint's trained ones.

        Args:
            base: a transformers model directory.
            experiment: the experiment at the step, see `Experiment.at_step`.
            checkpoint: directory of the checkpoint; None uses the base model itself, with which the first step started.
            with_reference: whether to load the reference too.
        Raises:
            SpecError: the teacher is no longer there.
        """
        changes = {"zero_stage": 0, "kernels": "torch", "sequence_parallel_size": 1}
        training = experiment.training.model_copy(update=changes)
        torch.manual_seed(experiment.seeds[0])  # as training does before it draws new adapters
        model = load_model(base, training)
        temperature = constant(experiment.rollout.temperature)

        def teacher() -> Passes:
            named = experiment.reference.teacher
            assert named is not None, "the rules let no reference of source model be without a path"
            directory = teacher_directory(named, tokenizer_of(base), config_of(base))
            return frozen_passes(directory, training, temperature=temperature, device=device)

        policy = Policy(model, temperature=temperature, entropy_gradient=constant(training.entropy_coef) > 0).to(device)
        reference = reference_policy(experiment.reference, model, teacher) if with_reference else None
        if checkpoint:
            load_weights(model, checkpoint)
            if reference:
                reference.load(checkpoint)
        return cls(model, Passes(policy, model.config, training, device), device, reference)

    def minibatches(self, recorded: RecordedStep, experiment: Experiment) -> list[Minibatch]:
        """Returns the step's minibatches in passes of `training.microbatch_tokens`."""
        packs = self.passes.packs and (self.reference is None or self.reference.packs)
        plan = plan_step(recorded.rollouts, experiment.training, packed=packs)
        return cut(recorded.rollouts, plan, self.device)

    @torch.no_grad()
    def describe(self, recorded: RecordedStep, experiment: Experiment, sums: Iterable[Sum]) -> References:
        """Returns the reference's distributions at the step's tokens, as far as these sums need them."""
        found: References = {}
        lent = self.reference.passes(self.passes) if self.reference else nullcontext(self.passes)
        with lent as passes:
            for top_k in {top_k for _, top_k in sums}:
                found[top_k] = ReferenceTable(len(recorded.trained), copies_head=True)
                for minibatch in self.minibatches(recorded, experiment):
                    for batch in minibatch.passes:
                        found[top_k].write(batch, passes.described(batch, top_k, self.passes.vocabulary)[1])
        return found


@torch.no_grad()
def summed_states(
    kept: KeptPolicy, recorded: RecordedStep, experiment: Experiment, sums: Sequence[Sum]
) -> tuple[dict[Sum, StateDivergence], float]:
    """Returns the divergences at the states of a step's tokens, summed over tokens, [M] each; and the largest
    difference between the policy's logprob of a token and the recorded one, nats.

    Args:
        kept: the policy of the step's only update, with its reference.
        recorded: the step, with its prompts and given tokens.
        experiment: the experiment at this step.
    """
    references, size = kept.describe(recorded, experiment, sums), len(recorded.trained)
    found: dict[Sum, StateDivergence] = {}
    change = 0.0
    for divergence, top_k in sums:
        none = torch.zeros(size)
        states = StateDivergence(none, none.clone(), none.clone(), none.bool())
        found[divergence, top_k] = states
        for minibatch in kept.minibatches(recorded, experiment):
            for batch in filter(lambda each: each.counts, minibatch.passes):
                logprobs, _, state, _ = kept.passes.compared(batch, divergence, references[top_k].read(batch))
                places = batch.tokens.cpu()
                for column in ("value", "reverse", "forward", "outside"):
                    getattr(states, column)[places] = getattr(state, column).cpu()
                change = max(change, _largest(logprobs.cpu() - recorded.ledger["logprobs"][places]))
    return found, change


def _largest(differences: Tensor) -> float:
    """Returns the largest absolute difference, at least 0. NaN marks tokens that were not trained on."""
    known = differences[differences.isfinite()]
    return float(known.abs().max()) if len(known) else 0.0
