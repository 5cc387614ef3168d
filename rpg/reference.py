"""Reference policies, and the schedule of their updates. A reference is a separate model, or weights that the learner's
module holds for a pass."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn

from rpg.checkpoints.pieces import Piece, PieceFiles, StateCopy
from rpg.control.plateau import Plateau, SetScores
from rpg.learner.adapters import has_adapters, without_adapters
from rpg.learner.passes import Passes
from rpg.learner.shards import shard_of
from rpg.processes import ranks
from specs.schema.reference import Reference, Update
from specs.schema.schedule import largest, value_at

_STEM = "reference"


class ReferencePolicy(Protocol):
    """A policy that is separate from the one in training."""

    def move(self, *, ema_decay: float = 0.0) -> None:
        """Sets the reference to the current policy or, with a decay, to `decay * reference + (1 - decay) * policy`."""
        ...

    def passes(self, learner: Passes) -> AbstractContextManager[Passes]:
        """Yields passes that compute the reference's logprobs, for use within the block. Training is not allowed in the
        block.

        Args:
            learner: passes of the policy in training; its module may hold the reference within the block.
        """
        ...

    @property
    def packs(self) -> bool:
        """Whether the reference allows several sequences in a row of a pass."""
        ...

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature for the reference's logprobs, if the reference computes them itself."""
        ...

    def save(self, copy: StateCopy) -> None:
        """Adds the state that `load` restores to a copy."""
        ...

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote."""
        ...


def reference_policy(
    reference: Reference, module: nn.Module, open_teacher: Callable[[], Passes]
) -> "Snapshot | BaseModel | Teacher | None":
    """Returns the spec's reference policy; None if it is the policy that samples. Call it before the first update.

    Args:
        module: the learner's module.
        open_teacher: loads the model that the spec names.
    """
    match reference.source:
        case "behaviour":
            return None
        case "model":
            return Teacher(open_teacher())
        case "initial" if has_adapters(module):
            return BaseModel(module)
        case "initial" | "snapshot":
            return Snapshot(module, averages=reference.update is not None and largest(reference.update.ema_decay) > 0)
        case never:
            assert_never(never)


class Teacher:
    """A separate frozen model as reference. Its weights never change, so checkpoints leave them out."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @property
    def packs(self) -> bool:
        """Whether the teacher's passes may have several sequences in a row."""
        return self._passes.packs

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature by which logits are divided."""
        self._passes.set_temperature(temperature)

    def move(self, *, ema_decay: float = 0.0) -> None:  # noqa: ARG002  # the Protocol's signature
        """Raises ValueError, because a teacher is never updated."""
        raise ValueError("a reference with source: model is never updated")

    @contextmanager
    def passes(self, learner: Passes) -> Iterator[Passes]:  # noqa: ARG002  # the Protocol's signature
        """Yields the teacher's own passes."""
        with torch.no_grad():
            yield self._passes

    def save(self, copy: StateCopy) -> None:
        """Adds nothing."""

    def load(self, directory: Path) -> None:
        """Reads nothing."""


class _Lent:
    """Base of references whose weights the learner's module holds for a pass."""

    packs = True
    """True: the learner's passes compute it."""

    def set_temperature(self, temperature: float) -> None:
        """Does nothing, because the learner's passes have their own temperature."""

    def in_place(self) -> AbstractContextManager[None]:
        """Puts the reference's weights into the learner's module within the block."""
        raise NotImplementedError

    @contextmanager
    def passes(self, learner: Passes) -> Iterator[Passes]:
        """Yields the learner's passes, with the reference's weights in its module within the block."""
        with self.in_place(), learner.choosing_experts():
            yield learner


class BaseModel(_Lent):
    """The initial policy when training adapters: the module with its adapters off, so no copy is kept."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def move(self, *, ema_decay: float = 0.0) -> None:  # noqa: ARG002  # the Protocol's signature
        """Raises ValueError, because an initial policy is never updated."""
        raise ValueError("the initial policy is never updated")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Switches the adapters off within the block."""
        with without_adapters(self._module), torch.no_grad():
            yield

    def save(self, copy: StateCopy) -> None:
        """Adds nothing, because the base model's weights never change."""

    def load(self, directory: Path) -> None:
        """Reads nothing."""


class Snapshot(_Lent):
    """A copy of a module's trained parameters: all of them, or its adapters. At ZeRO 3 each rank keeps its own
    shards."""

    def __init__(self, module: nn.Module, *, averages: bool = False) -> None:
        """Copies the module's parameters as they are now.

        Args:
            averages: whether moves have a decay. If so, the snapshot is kept in float32: bfloat16 rounds away changes
                of less than 2^-9 of a weight, and an average would not move.
        """
        self._module = module
        self._weights = {
            name: tensor.to(torch.float32 if averages else tensor.dtype, copy=True)
            for name, tensor in self._parameters()
        }

    def move(self, *, ema_decay: float = 0.0) -> None:
        """Sets the snapshot to the current policy or, with a decay, to `decay * snapshot + (1 - decay) * policy`."""
        for name, tensor in self._parameters():
            weight = self._weights[name]
            weight.lerp_(tensor.to(weight.dtype), 1 - ema_decay) if ema_decay else weight.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the snapshot's weights, rounded to the module's type, into the module within the block. Training is not
        allowed in the block."""
        policy_weights = {name: tensor.data for name, tensor in self._parameters()}
        try:
            for name, tensor in self._parameters():
                tensor.data = self._weights[name].to(tensor.dtype)
            with torch.no_grad():
                yield
        finally:
            for name, tensor in self._parameters():
                tensor.data = policy_weights[name]

    def save(self, copy: StateCopy) -> None:
        """Adds the weights to a copy: rank 0 adds all of them, or each rank adds its shards."""
        if self._sharded or ranks.rank() == 0:
            copy.pieces(_STEM, self._pieces())

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote, on any number of ranks."""
        files = PieceFiles(directory, _STEM)
        for piece in self._pieces():
            files.fill(piece)

    def _pieces(self) -> Iterator[Piece]:
        parameters = dict(self._module.named_parameters())
        for name, weight in self._weights.items():
            start, count = shard_of(parameters[name]) if self._sharded else (0, weight.numel())
            yield Piece(name, start, weight.view(-1)[:count])

    @property
    def _sharded(self) -> bool:
        return any(hasattr(parameter, "ds_tensor") for parameter in self._module.parameters())

    @torch.no_grad()
    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and values of each trained parameter on this rank: the whole parameter or, at ZeRO 3, its
        shard."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                yield name, getattr(parameter, "ds_tensor", parameter)


class ReferenceSchedule:
    """The schedule of the reference's updates. It counts steps and optimizer updates since the last one. Its state is
    part of every checkpoint.

    The reference's logprobs are computed once per step, before its first update, so it moves only between steps: it is
    always the policy at the end of a step.
    """

    def __init__(self, *, follows: bool, update: Update | None, confidence: float = 0.95) -> None:
        """
        Args:
            follows: whether the reference is the policy that samples.
            confidence: level of the interval that a gain must exceed, for `update.plateau`.
        """
        self._follows = follows
        self._update = update
        self.version = 0
        """Number of times that the reference was updated. With source behaviour, once per step."""
        self.age_steps = 0
        """Steps finished since the reference was last updated, or since the start."""
        self.age_updates = 0
        """Optimizer updates since the reference was last updated, or since the start."""
        self.steps = 0
        """Steps finished."""
        self.reason = ""
        """Reason why the reference was last updated; empty if it never was."""
        self._recent: deque[float] = deque(maxlen=update.kl_window if update else 1)
        self._plateau = Plateau(update.plateau if update else 0, confidence)

    @classmethod
    def of(cls, reference: Reference, confidence: float = 0.95) -> "ReferenceSchedule":
        """Returns the schedule of a spec's reference. `confidence`: see the constructor."""
        return cls(follows=reference.source == "behaviour", update=reference.update, confidence=confidence)

    @property
    def ema_decay(self) -> float:
        """Returns the share of the reference's own weights that its update keeps: reference = decay * reference + (1 -
        decay) * policy. A schedule counts with its value at the last finished step."""
        return value_at(self._update.ema_decay, self.steps) if self._update else 0.0

    @property
    def resets_optimizer(self) -> bool:
        """Whether an update of the reference clears the optimizer's moments."""
        return self._update is not None and self._update.reset_optimizer

    @property
    def reads_evaluations(self) -> bool:
        """Whether evaluations may cause an update of the reference."""
        return self._update is not None and self._update.plateau > 0

    def after_step(self, kl_reverse: float | None, *, updates: int) -> bool:
        """Counts a finished step. Returns whether the reference must be updated now.

        Args:
            kl_reverse: the step's mean `kl/reverse`, nats; None if all updates of the step were skipped.
            updates: optimizer updates that the step made.

        With source behaviour the version goes up, but there are no weights to move, so the result is False.
        """
        self.steps += 1
        self.age_steps += 1
        self.age_updates += updates
        if kl_reverse is not None:
            self._recent.append(kl_reverse)
        reason = "another policy samples" if self._follows else self._due()
        if not reason:
            return False
        self._moved(reason)
        return not self._follows

    def after_evaluation(self, measured: Mapping[str, SetScores]) -> bool:
        """Counts an evaluation of the policy after a step. Returns whether the reference must be updated now: the
        evaluation completes a plateau, and the reference was not already updated after this step."""
        update = self._update
        if update is None or self.steps < update.after_steps or not self._plateau.reached(measured):
            return False
        if self.age_steps == 0 and self.version:
            return False
        self._moved(f"{update.plateau} evaluation{'s' if update.plateau > 1 else ''} without a gain")
        return True

    def _moved(self, reason: str) -> None:
        self.version += 1
        self.age_steps = self.age_updates = 0
        self.reason = reason
        self._recent.clear()
        self._plateau.count = 0

    def _due(self) -> str:
        """Returns why the reference must be updated now; empty if no update is due."""
        update = self._update
        if update is None or self.steps < update.after_steps:
            return ""
        if update.kl_above and len(self._recent) == update.kl_window:
            mean = sum(self._recent) / update.kl_window
            if mean > update.kl_above:
                return f"mean kl/reverse {mean:.4g} over {update.kl_window} steps exceeds {update.kl_above:.4g}"
        every_steps = value_at(update.every_steps, self.steps)
        if every_steps and self.age_steps >= every_steps:
            return f"{self.age_steps} steps since the last move"
        if update.every_updates and self.age_updates >= update.every_updates:
            return f"{self.age_updates} updates since the last move"
        if largest(update.ema_decay) and not update.conditions:
            return "every step"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Returns all that changes, as plain values for JSON."""
        return {
            "version": self.version,
            "age_steps": self.age_steps,
            "age_updates": self.age_updates,
            "steps": self.steps,
            "reason": self.reason,
            "recent": list(self._recent),
            "plateau": self._plateau.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict` of the same reference section."""
        self.version = int(state["version"])
        self.age_steps = int(state["age_steps"])
        self.age_updates = int(state["age_updates"])
        self.steps = int(state["steps"])
        self.reason = str(state["reason"])
        self._recent.clear()
        self._recent.extend(float(value) for value in state["recent"])
        if plateau := state.get("plateau"):  # a checkpoint of an earlier release has none
            self._plateau.load_state_dict(plateau)
