"""Labels of a matrix's rows, by which figures from the literature name their row."""

from collections.abc import Iterable

_SAME = " = "
"""Separator between the names of identical checkpoints of an evaluation."""


def of_same(names: Iterable[str]) -> str:
    """Returns the label of a row with several names: `ours last = ours best`."""
    return _SAME.join(names)


def is_called(label: str, name: str) -> bool:
    """Returns whether a cell's label contains the name: alone, with other varied values, or as one of several names.

    Example:
        >>> is_called("ours last = ours best, greedy", "ours best"), is_called("RPG-REINFORCE", "RPG")
        (True, False)
    """
    return any(f"{part}, ".startswith(f"{name}, ") for part in label.split(_SAME))
