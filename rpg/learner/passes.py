"""Forward passes of a policy over microbatches: padded or packed, their rows perhaps shared by several ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rpg.batches.batch import Microbatch
from rpg.learner.own_logits import prove_policy
from rpg.learner.packing import Packing, use_newer_flash
from rpg.learner.packing_trial import PackingTrial, try_packing
from rpg.learner.sequence_parallel import SequenceGroup
from specs.errors import Issue, SpecError
from specs.machine.standstill import show_work
from specs.schema.training import Training


class Passes:
    """Gives the logprobs of a policy. All ranks make the same calls in the same order."""

    def __init__(
        self, policy: Callable[..., Any], config: PretrainedConfig, training: Training, device: torch.device
    ) -> None:
        """Proves that the policy is the model, and tries out whether it can be given packed rows, where the spec wants
        them.

        Args:
            policy: takes what `rpg.learner.policy.Policy.forward` takes.
            config: of its model.
        Raises:
            SpecError: the policy is not the model, or ranks cannot share this model's sequences.
        """
        prove_policy(policy, config, device)
        self._policy = policy
        self._device = device
        self._sequence_group: SequenceGroup | None = None
        if training.sequence_parallel_size > 1:
            self._sequence_group = SequenceGroup(training.sequence_parallel_size, config)
        self._replays = True
        self.packing_trial: PackingTrial | None = None
        """Whether the model can be given packed rows; None where the spec wants none."""
        if training.packing and training.precision == "bfloat16" and training.attention == "auto":
            use_newer_flash(device)
        if training.packing:
            self.packing_trial = try_packing(self._packed, config, device, precision=training.precision)
        if self._sequence_group and not self.packs:
            raise SpecError(
                Issue(
                    "ranks cannot share the sequences of this model",
                    path=("training", "sequence_parallel_size"),
                    given=f"{training.sequence_parallel_size}; {self.packing_trial}",
                    allowed="1",
                )
            )

    @property
    def packs(self) -> bool:
        """Whether a pass may hold several sequences in a row."""
        return self.packing_trial is not None and self.packing_trial.keeps_apart

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the batch's response tokens, nats. [n] each; with gradients on, the logprobs are
        differentiable, and the entropies where there is an entropy bonus."""
        show_work()
        packing = Packing(batch.packed, self._device) if batch.packed else None
        experts = batch.experts.to(self._device) if self._replays and batch.experts is not None else None
        logprobs, entropies = self._packed(
            batch.input_ids,
            batch.sources,
            batch.targets,
            packing=packing,
            host_sources=batch.host_sources,
            experts=experts,
        )
        if self._sequence_group and not self._sequence_group.leads:
            # What was computed here is another rank's; its gradient comes this way, so the loss must hang on it.
            logprobs, entropies = (
                values[:0].sum() + values.new_zeros(len(batch.targets)) for values in (logprobs, entropies)
            )
        return logprobs, entropies

    def _packed(
        self,
        input_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        packing: Packing | None = None,
        host_sources: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.forward`; a packed row is the group's where ranks share their rows. Without `host_sources`, which
        are the sources on the host, such a row waits for the device."""
        if self._sequence_group and packing:
            on_host = sources.cpu() if host_sources is None else host_sources
            return self._sequence_group.logprobs(
                self._policy, input_ids, sources, targets, packing=packing, host_sources=on_host
            )
        replayed = {} if experts is None else {"experts": experts}
        logprobs, entropies = self._policy(input_ids, sources, targets, packing=packing, **replayed)
        return logprobs, entropies

    @contextmanager
    def choosing_experts(self) -> Iterator[None]:
        """Within the block routers choose by themselves, as those of another policy than the one that sampled do."""
        self._replays = False
        try:
            yield
        finally:
            self._replays = True
