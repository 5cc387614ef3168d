"""Converts a generator's item to JSON and back exactly: some scorers distinguish tuples from lists or use numbers as
keys."""

import json
from typing import Any

_TUPLE = "__tuple__"
_PAIRS = "__pairs__"


def dump(value: Any) -> str:
    """Returns JSON text that `load` converts back to an equal value.

    Raises TypeError for values that JSON cannot hold, except tuples and keys.

    Example:
        >>> load(dump({"at": (1, 2), "edges": {3: [4]}}))
        {'at': (1, 2), 'edges': {3: [4]}}
    """
    return json.dumps(_pack(value), ensure_ascii=False, sort_keys=True)


def load(text: str) -> Any:
    """Returns the value that was passed to `dump`."""
    return _unpack(json.loads(text))


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(item) for key, item in value.items()}
        return {_PAIRS: [[_pack(key), _pack(item)] for key, item in value.items()]}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_unpack(item) for item in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {_unpack(key): _unpack(item) for key, item in value[_PAIRS]}
        return {key: _unpack(item) for key, item in value.items()}
    return value
