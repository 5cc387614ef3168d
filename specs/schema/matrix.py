"""The fields that vary between an experiment's runs."""

from typing import Any

from pydantic import Field

from specs.schema.base import Spec


class Matrix(Spec):
    """Each combination of `product`, paired with each row of `zip`, less `exclude`, is one run per seed.

    Keys are paths such as objective.kl_coef.
    """

    product: dict[str, list[Any]] = Field(default_factory=dict)
    """Every combination of these values."""
    zip: dict[str, list[Any]] = Field(default_factory=dict)
    """Lists of equal length, taken row by row."""
    labels: tuple[str, ...] = ()
    """A name for each row of `zip`, which tables and charts call it by; none: its values."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Combinations to leave out: a cell that agrees with all of one entry's values."""
