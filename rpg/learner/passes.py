"""Forward passes of a policy over microbatches: padded or packed, with rows that several ranks may share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rpg.batches.batch import Microbatch
from rpg.batches.ledger import ReferenceRows
from rpg.learner.own_logits import prove_policy
from rpg.learner.packing import Packing, use_newer_flash
from rpg.learner.packing_trial import PackingTrial, try_packing
from rpg.learner.policy import Policy, frozen_model
from rpg.learner.sequence_parallel import SequenceGroup
from rpg.objectives.distribution import StateDivergence
from specs.errors import Issue, SpecError
from specs.machine.standstill import show_work
from specs.schema.objective import Divergence
from specs.schema.training import Training


class Passes:
    """The forward passes of a policy, which compute its logprobs. All ranks make the same calls in the same order."""

    def __init__(
        self, policy: Callable[..., Any], config: PretrainedConfig, training: Training, device: torch.device
    ) -> None:
        """Proves that the policy equals the model, and tests packed rows if the spec asks for them.

        Args:
            policy: takes what `rpg.learner.policy.Policy.forward` takes.
            config: config of its model.
        Raises:
            SpecError: the policy differs from the model, or ranks cannot share this model's sequences.
        """
        prove_policy(policy, config, device)
        self._policy, self._config = policy, config
        self._device = device
        self._sequence_group: SequenceGroup | None = None
        if training.sequence_parallel_size > 1:
            self._sequence_group = SequenceGroup(training.sequence_parallel_size, config)
        self._replays = True
        self.packing_trial: PackingTrial | None = None
        """Result of the test whether the model computes packed rows correctly; None if the spec does not ask for packed
        rows."""
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
    def vocabulary(self) -> int:
        """Number of the model's logits."""
        return int(self._config.get_text_config().vocab_size)

    @property
    def packs(self) -> bool:
        """Whether a pass may hold several sequences in a row."""
        return self.packing_trial is not None and self.packing_trial.keeps_apart

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature by which later passes divide the logits."""
        policy: Any = getattr(self._policy, "module", self._policy)  # an engine has the policy inside
        policy.temperature = temperature

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Returns logprobs and entropies of the batch's response tokens, nats. [n] each

        With gradients on, the logprobs are differentiable, and with an entropy bonus the entropies too."""
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
            # This rank computed another rank's tokens. Their gradient returns through here, so the loss must depend on
            # them.
            logprobs, entropies = (
                values[:0].sum() + values.new_zeros(len(batch.targets)) for values in (logprobs, entropies)
            )
        return logprobs, entropies

    @torch.no_grad()
    def given(self, input_ids: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """Returns the logprobs of tokens in padded rows at temperature 1, nats. Routers choose experts themselves. [n]

        Args:
            input_ids: token ids, padded on the right. [b, L]
            sources: positions in the flattened input ids whose hidden states predict the targets. [n]
            targets: token ids. [n]
        """
        show_work()
        logprobs, _ = self._policy(input_ids, sources, targets, 1.0)
        return logprobs  # type: ignore[no-any-return]

    def described(self, batch: Microbatch, top_k: int, vocabulary: int) -> tuple[Tensor | None, ReferenceRows]:
        """Returns this model's distributions: its most likely tokens among the first `vocabulary` ones, preceded by the
        logprobs of the batch's tokens [n]; or None and the hidden states if `top_k` is 0."""
        logprobs, *rows = self._whole(batch, describes=(top_k, vocabulary))
        return logprobs, ReferenceRows(*rows)

    def compared(
        self, batch: Microbatch, divergence: Divergence, rows: ReferenceRows
    ) -> tuple[Tensor, Tensor, StateDivergence, Tensor | None]:
        """Returns the results of `logprobs`; the policy's divergence from these rows at each state, differentiable;
        and, if the rows are hidden states, the logprobs of the tokens under them. [n] each"""
        logprobs, entropies, *state, ref_logprobs = self._whole(batch, compares=(divergence, rows))
        return logprobs, entropies, StateDivergence(*state), ref_logprobs

    def _whole(self, batch: Microbatch, **wanted: Any) -> Any:
        """Returns the policy's values of a pass over rows that ranks do not share."""
        show_work()
        packing = Packing(batch.packed, self._device) if batch.packed else None
        if self._replays and batch.experts is not None:
            wanted["experts"] = batch.experts.to(self._device)
        return self._policy(batch.input_ids, batch.sources, batch.targets, packing=packing, **wanted)

    def _packed(
        self,
        input_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        packing: Packing | None = None,
        host_sources: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.forward`. If ranks share their rows, a packed row belongs to their group. Without `host_sources`,
        a copy of the sources on the host, the call waits for the device."""
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
        """Lets routers choose experts themselves within the block, as for a policy that did not sample."""
        self._replays = False
        try:
            yield
        finally:
            self._replays = True


def frozen_passes(weights_dir: Path, training: Training, *, temperature: float, device: torch.device) -> Passes:
    """Returns the passes of a model that is never trained and is whole on this rank. Arguments and errors are those of
    `open_teacher`."""
    model = frozen_model(weights_dir, training)
    policy: Any = Policy(model, temperature=temperature)
    return Passes(policy.to(device), model.config, training, device)
