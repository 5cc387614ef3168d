"""The reference policy of the divergence, and the schedule that moves it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec, addition, names_path
from specs.schema.model import PretrainedModel
from specs.schema.schedule import Schedulable, ValueSchedule, largest


class Update(Spec):
    """When a snapshot reference becomes the current policy: after a step, if a condition holds then. With several
    conditions, whichever comes first. Of a schedule the value at the step just finished counts."""

    every_steps: Annotated[int | ValueSchedule, Schedulable(ge=0)] = 0
    """Steps between two moves; 0: not by count."""
    every_updates: int = addition(0, ge=0)
    """Optimizer updates: it moves after the step in which those since its last move reach this number; 0: not by
    updates."""
    kl_above: float = Field(0.0, ge=0)
    """Nats: it moves when the mean of kl/reverse over the last kl_window steps exceeds this; 0: not by divergence."""
    kl_window: int = Field(1, ge=1)
    """Steps, all since the last move, that the mean is taken over."""
    ema_decay: Annotated[float | ValueSchedule, Schedulable(ge=0, lt=1)] = 0.0
    """Share of the reference's own weights that a move keeps; 0: a move copies the policy. Alone, it moves every
    step."""
    after_steps: int = Field(0, ge=0)
    """No move before this many steps of training."""
    plateau: int = addition(0, ge=0)
    """Evaluations in a row without a gain, after which it moves: on no set is the score above the best one so far by
    more than the interval of the difference, paired by problem (evaluation.confidence). Evaluations are those of
    evaluation.every_steps; they are counted from the last move. 0: not by evaluations."""
    reset_optimizer: bool = addition(False)
    """Whether a move also clears the optimizer's moments, so that it starts afresh, as in ProRL, arXiv:2505.24864. The
    learning rate's schedule goes on."""

    @model_validator(mode="after")
    def _acts(self) -> "Update":
        if not (self.conditions or largest(self.ema_decay)):
            raise ValueError("says never: give every_steps, every_updates, kl_above, plateau or ema_decay")
        if self.kl_window > 1 and not self.kl_above:
            raise ValueError("kl_window cannot act without kl_above")
        return self

    @property
    def conditions(self) -> bool:
        """Whether it names a condition; without one, a decay moves the reference every step."""
        return bool(largest(self.every_steps) or self.every_updates or self.kl_above or self.plateau)


class Reference(Spec):
    """behaviour: the policy that sampled the step's rollouts, so no second model; initial: the policy that training
    began with; snapshot: a copy that `update` moves; model: a frozen model with the policy's tokenizer, a teacher."""

    source: Literal["behaviour", "snapshot", "initial", "model"] = "behaviour"
    """Which policy it is."""
    path: str = names_path("path or id", "", added=True)
    """The model's directory (relative to the spec file) or Hub id; source model needs one, the others take none."""
    revision: str = addition("main", min_length=1)
    """Branch, tag or commit of a Hub id; ignored for a directory."""
    update: Update | None = None
    """A snapshot needs one; the others take none."""

    @property
    def teacher(self) -> PretrainedModel | None:
        """The model that is the reference; None where it is made of the policy, or not named."""
        named = self.source == "model" and self.path
        return PretrainedModel(path=self.path, revision=self.revision) if named else None
