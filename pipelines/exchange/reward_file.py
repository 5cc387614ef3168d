"""Writes a function of a program or a notebook to a file, with its dependencies: imports, functions, constants."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from pipelines.home.home import Home
from specs.errors import Issue, SpecError
from specs.machine.files import replacing


def write_rewards(rewards: Mapping[str, Callable[..., Any]], home: Home) -> dict[str, dict[str, Any]]:
    """Writes a file for each function and returns, by name, the spec's entry for it. Raises SpecError."""
    return {name: _write(name, function, home) for name, function in rewards.items()}


def _write(name: str, function: Callable[..., Any], home: Home) -> dict[str, Any]:
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise SpecError(Issue("is not a name", ("rewards", name), allowed="letters, digits and _"))
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        kind = "lambda" if isinstance(function, FunctionType) else type(function).__name__
        raise _unwritable(name, f"it is a {kind}, not a function that `def` defines")
    text = source_of(name, function)
    home.create()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = home.root / "rewards" / f"{name}-{digest}.py"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with replacing(path, durable=False) as aside:
            aside.write_text(text, encoding="utf-8")
    return {"type": "python", "path": str(path), "function": function.__name__}


def source_of(name: str, function: FunctionType) -> str:
    """Returns the text of a file with the function and its dependencies. Raises SpecError if that cannot be written.

    Args:
        name: the reward's name, for errors.
    """
    imports: dict[str, str] = {}
    constants: dict[str, str] = {}
    functions: dict[str, str] = {}
    waiting = [function]
    while waiting:
        here = waiting.pop()
        if here.__name__ in functions:
            continue
        functions[here.__name__] = text = _text_of(name, here)
        for used, value in _used(here, text).items():
            if isinstance(value, ModuleType):
                imports[used] = f"import {value.__name__} as {used}"
            elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
                if value.__name__ != used:
                    constants[used] = f"def {used}(*given, **named):\n    return {value.__name__}(*given, **named)"
                waiting.append(value)
            elif isinstance(value, re.Pattern):
                imports["re"] = "import re"
                constants[used] = f"{used} = re.compile({value.pattern!r}, {value.flags})"
            elif _is_literal(value):
                constants[used] = f"{used} = {value!r}"
            elif getattr(value, "__module__", None) not in (None, "__main__", function.__module__):
                imports[used] = f"from {value.__module__} import {value.__qualname__} as {used}"
            else:
                raise _unwritable(name, f"it uses {used}, a {type(value).__name__}")
    return "\n\n\n".join(
        part for part in ("\n".join(imports.values()), *constants.values(), *functions.values()) if part
    )


def _text_of(name: str, function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
    except (OSError, TypeError):
        raise _unwritable(name, f"the source of {function.__name__} is not available here") from None


def _used(function: FunctionType, text: str) -> dict[str, Any]:
    """Returns the names that a function uses from its surroundings, with their values."""
    around = dict(function.__globals__)
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        around[free] = cell.cell_contents
    named = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    own = set(function.__code__.co_varnames)
    return {used: around[used] for used in sorted(named - own) if used in around and used != "__builtins__"}


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


def _unwritable(name: str, reason: str) -> SpecError:
    hint = "write it to a file with all that it uses: reward: {type: python, path: FILE, function: NAME}"
    return SpecError(Issue(f"cannot be written to a file: {reason}", ("rewards", name), hint=hint))
