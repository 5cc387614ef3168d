"""Imports reasoning-gym without Matplotlib: `from rpg.data.reasoning_gym_imported import reasoning_gym`.

Two of its tasks use CellPyLib, which imports Matplotlib: two fifths of the import time of all tasks. It is imported
when they first use it.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_CELLPYLIB = "cellpylib"
_WAITS = _CELLPYLIB not in sys.modules


class _ImportedWhenUsed(ModuleType):
    """A placeholder that imports a module when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read from every module by code that searches for the module of a class
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:  # used during the import: then it is imported at once
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if _WAITS:
    sys.modules[_CELLPYLIB] = _ImportedWhenUsed(_CELLPYLIB)
try:
    import reasoning_gym as reasoning_gym
finally:
    if isinstance(sys.modules.get(_CELLPYLIB), _ImportedWhenUsed):
        del sys.modules[_CELLPYLIB]
