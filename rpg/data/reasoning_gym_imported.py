"""reasoning-gym, without Matplotlib until a task needs it: `from rpg.data.reasoning_gym_imported import reasoning_gym`.

Two of its tasks take CellPyLib, which imports Matplotlib: two fifths of the seconds in which all tasks are imported.
They get it when they first use it.
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
        if sys.modules.get(self.__name__) is self:  # used while it is imported: then it comes at once
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if _WAITS:
    sys.modules[_CELLPYLIB] = _ImportedWhenUsed(_CELLPYLIB)
try:
    import reasoning_gym as reasoning_gym
finally:
    if isinstance(sys.modules.get(_CELLPYLIB), _ImportedWhenUsed):
        del sys.modules[_CELLPYLIB]
