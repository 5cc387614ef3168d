"""reasoning-gym without the plots of a library of two of its tasks: `from rpg.data.reasoning_gym_imported import ...`.

Those two take CellPyLib, which imports Matplotlib: two fifths of the seconds in which all tasks are imported. They get
it when they first use it.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_CELLPYLIB = "cellpylib"
_WAITS = _CELLPYLIB not in sys.modules


class _ImportedWhenUsed(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by who looks for the one of a class
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


if _WAITS:
    sys.modules[_CELLPYLIB] = _ImportedWhenUsed(_CELLPYLIB)
try:
    import reasoning_gym as reasoning_gym
finally:
    if _WAITS:
        del sys.modules[_CELLPYLIB]
