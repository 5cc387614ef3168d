"""Labels of a matrix's rows, and the other names of a row: figures of others name their row by it."""

from collections.abc import Iterable

_SAME = " = "
"""Between the names of checkpoints of an evaluation that are one."""


def of_same(names: Iterable[str]) -> str:
    """The label of one row with several names: `ours last = ours best`."""
    return _SAME.join(names)


def is_called(label: str, name: str) -> bool:
    """Whether a cell's label is the name's: alone, with what else varies, or as one of several.

    Example:
        >>> is_called("ours last = ours best, greedy", "ours best"), is_called("RPG-REINFORCE", "RPG")
        (True, False)
    """
    return any(f"{part}, ".startswith(f"{name}, ") for part in label.split(_SAME))
