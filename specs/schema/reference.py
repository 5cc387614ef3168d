"""The reference policy of the divergence, and the schedule of its updates."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec, addition, names_path
from specs.schema.model import PretrainedModel
from specs.schema.schedule import Schedulable, ValueSchedule, largest


class Update(Spec):
    """Conditions under which a snapshot reference is updated to the current policy. They are checked after each step;
    with several, the first to hold acts. A schedule counts with its value at the finished step."""

    every_steps: Annotated[int | ValueSchedule, Schedulable(ge=0)] = 0
    """Steps between two updates of the reference. 0 disables this condition."""
    every_updates: int = addition(0, ge=0)
    """Optimizer updates: the reference is updated after the step in which this many have been made since its last
    update. 0 disables this condition."""
    kl_above: float = Field(0.0, ge=0)
    """Nats: the reference is updated when the mean of kl/reverse over the last kl_window steps exceeds this. 0 disables
    this condition."""
    kl_window: int = Field(1, ge=1)
    """Steps of that mean, all since the reference's last update."""
    ema_decay: Annotated[float | ValueSchedule, Schedulable(ge=0, lt=1)] = 0.0
    """Share of the reference's own weights that an update keeps. 0 copies the policy. If it is the only condition, the
    reference is updated every step."""
    after_steps: int = Field(0, ge=0)
    """Steps of training before the reference's first update."""
    plateau: int = addition(0, ge=0)
    """Evaluations: the reference is updated after this many in a row without a gain. A gain is a score on an evaluation
    set that exceeds the best one so far by more than the interval of the difference (paired by problem, at
    evaluation.confidence). Counts the evaluations of evaluation.every_steps since the reference's last update. 0
    disables this condition."""
    reset_optimizer: bool = addition(False)
    """Whether an update of the reference also clears the optimizer's moments, as in ProRL, arXiv:2505.24864. The
    schedule of the learning rate continues."""

    @model_validator(mode="after")
    def _acts(self) -> "Update":
        if not (self.conditions or largest(self.ema_decay)):
            raise ValueError("is never updated: give every_steps, every_updates, kl_above, plateau or ema_decay")
        if self.kl_window > 1 and not self.kl_above:
            raise ValueError("kl_window cannot act without kl_above")
        return self

    @property
    def conditions(self) -> bool:
        """Whether the update has a condition. Without one, a decay updates the reference every step."""
        return bool(largest(self.every_steps) or self.every_updates or self.kl_above or self.plateau)


class Reference(Spec):
    """The reference policy. behaviour: the policy that sampled the step's rollouts, which needs no second model.
    initial: the policy that training began with. snapshot: a copy of the policy that `update` renews. model: a frozen
    model with the policy's tokenizer (a teacher)."""

    source: Literal["behaviour", "snapshot", "initial", "model"] = "behaviour"
    """Policy that serves as the reference."""
    path: str = names_path("path or id", "", added=True)
    """Directory (relative to the spec file) or Hub id of the model. Required with `source: model`, not allowed with any
    other source."""
    revision: str = addition("main", min_length=1)
    """Branch, tag or commit of a Hub id; ignored for a directory."""
    update: Update | None = None
    """When the reference is updated. Required with `source: snapshot`, not allowed with any other source."""

    @property
    def teacher(self) -> PretrainedModel | None:
        """Returns the model that is the reference; None if the reference comes from the policy, or has no path."""
        named = self.source == "model" and self.path
        return PretrainedModel(path=self.path, revision=self.revision) if named else None
