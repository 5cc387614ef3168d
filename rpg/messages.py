"""Encodes messages between the processes of a run as plain bytes. They are never pickles, which could run any code.

A message is a JSON document followed by the arrays and tensors that it names. The decoder builds only classes that this
program has marked as a `message`, by calling their constructors. torch and numpy are imported only for a message that
holds one of their objects.
"""

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from specs.errors import Issue

Class = TypeVar("Class", bound=type)
_HEAD = struct.Struct("<Q")
"""Header of a message: the document's length in bytes."""
_MANY = 32
"""Smallest number of consecutive numbers or messages of one class that are encoded as columns."""
_NUMBERS = {float: "d", int: "q"}


def message(kind: Class) -> Class:
    """Marks a dataclass whose objects may be sent. The receiver calls the class with the object's fields."""
    _KINDS[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return kind


_KINDS: dict[str, Any] = {}
message(Issue)


def encoded(value: Any) -> bytes:
    """Returns the value as bytes that `decoded` reads.

    Args:
        value: built from None, bool, int, float, str, bytes, Path, list, tuple, dict, numpy arrays and scalars,
            tensors, and dataclasses marked as a `message`.
    Raises:
        TypeError: the value holds an object of another type.
    """
    parts: list[bytes | memoryview] = []
    document = json.dumps([_plain(value, parts), [len(part) for part in parts]]).encode()
    return b"".join([_HEAD.pack(len(document)), document, *parts])


def decoded(content: bytes | memoryview) -> Any:
    """Returns the value that `encoded` turned into these bytes. Tensors are on the host.

    Raises:
        ValueError: `encoded` did not write these bytes.
    """
    content = memoryview(content)
    try:
        start = _HEAD.size + _HEAD.unpack_from(content)[0]
        document, lengths = json.loads(bytes(content[_HEAD.size : start]))
        parts = []
        for length in lengths:
            parts.append(content[start : start + length])
            start += length
        if start != len(content):
            raise ValueError(f"{len(content)} bytes are announced as {start}")
        return _value(document, parts)
    except (struct.error, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no message: {type(error).__name__}: {error}") from None


def _plain(value: Any, parts: list[bytes | memoryview]) -> Any:
    """Returns the value's part of the document. All values except numbers, texts and lists become an object whose only
    key is their kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return _plain_list(value, parts)
    if isinstance(value, tuple):
        return {"tuple": _plain_list(value, parts)}
    if isinstance(value, dict):
        return {"dict": [_plain(list(value), parts), _plain(list(value.values()), parts)]}
    if name := _name(type(value)):
        return {"message": [name, *(_plain(getattr(value, each.name), parts) for each in fields(value))]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes):
        return {"bytes": _put(value, parts)}
    return _plain_array(value, parts)


def _plain_list(values: Sequence[Any], parts: list[bytes | memoryview]) -> Any:
    kinds = set(map(type, values)) if len(values) >= _MANY else set()
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in _NUMBERS:
        try:
            return {"numbers": [_NUMBERS[kind], _put(array(_NUMBERS[kind], values).tobytes(), parts)]}
        except OverflowError:  # beyond 64 bits
            return list(values)
    if kind and (name := _name(kind)):
        columns = ([getattr(value, each.name) for value in values] for each in fields(kind))
        return {"messages": [name, *(_plain_list(column, parts) for column in columns)]}
    return [_plain(value, parts) for value in values]


def _plain_array(value: Any, parts: list[bytes | memoryview]) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        whole = np.ascontiguousarray(value)
        return {"array": [value.dtype.str, list(value.shape), _put(whole.tobytes(), parts)]}
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _put(whole.tobytes(), parts)]}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} cannot be sent between processes")


def _name(kind: type) -> str:
    """Returns the name under which a class is registered; empty if it is not."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if _KINDS.get(name) is kind else ""


def _put(part: bytes | memoryview, parts: list[bytes | memoryview]) -> int:
    parts.append(part)
    return len(parts) - 1


def _value(plain: Any, parts: Sequence[memoryview]) -> Any:
    if isinstance(plain, list):
        return [_value(each, parts) for each in plain]
    if isinstance(plain, dict):
        ((kind, content),) = plain.items()
        return _READERS[kind](content, parts)
    return plain


def _tuple(content: Any, parts: Sequence[memoryview]) -> Any:
    return tuple(_value(content, parts))


def _dict(content: Any, parts: Sequence[memoryview]) -> Any:
    keys, values = (_value(each, parts) for each in content)
    return dict(zip(keys, values, strict=True))


def _message(content: Any, parts: Sequence[memoryview]) -> Any:
    name, *values = content
    return _KINDS[name](*(_value(value, parts) for value in values))


def _messages(content: Any, parts: Sequence[memoryview]) -> Any:
    name, *columns = content
    return [_KINDS[name](*row) for row in zip(*(_value(column, parts) for column in columns), strict=True)]


def _numbers(content: Any, parts: Sequence[memoryview]) -> Any:
    code, place = content
    numbers = array({code: code for code in _NUMBERS.values()}[code])
    numbers.frombytes(parts[place])
    return numbers.tolist()


def _array(content: Any, parts: Sequence[memoryview]) -> Any:
    import numpy as np

    dtype, shape, place = content
    return np.frombuffer(bytearray(parts[place]), dtype=np.dtype(str(dtype))).reshape(shape)


def _tensor(content: Any, parts: Sequence[memoryview]) -> Any:
    import torch

    name, shape, place = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a type of tensor")
    if not parts[place]:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(parts[place]), dtype=torch.uint8).view(dtype).reshape(shape)


_READERS: dict[str, Callable[[Any, Sequence[memoryview]], Any]] = {
    "tuple": _tuple,
    "dict": _dict,
    "message": _message,
    "messages": _messages,
    "numbers": _numbers,
    "array": _array,
    "tensor": _tensor,
    "path": lambda content, _: Path(content),
    "bytes": lambda content, parts: bytes(parts[content]),
}
"""Kind of an object in the document -> function that reads it."""
