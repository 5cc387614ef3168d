"""The reference policy of the divergence, and the schedule that moves it."""

from typing import Literal

from pydantic import Field

from specs.schema.base import Spec


class Update(Spec):
    """When a snapshot reference becomes the current policy."""

    every_steps: int = Field(ge=1)
    """Steps between two moves."""


class Reference(Spec):
    """behaviour: the policy that sampled the step's rollouts, so no second model; snapshot: a copy that `update` moves."""

    source: Literal["behaviour", "snapshot"] = "behaviour"
    update: Update | None = None
