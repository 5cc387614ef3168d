"""Values that Pydantic would quietly turn into another type: true as 1, "5" as 5. In a spec they are mistakes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from specs.fields import choose, is_model, members, tag_of
from specs.positions import Path


@dataclass(frozen=True)
class Disguised:
    """One such value, and what the schema says of its place."""

    path: Path
    value: Any
    annotation: Any
    field: FieldInfo | None


def disguised(annotation: Any, value: Any, path: Path = (), field: FieldInfo | None = None) -> Iterator[Disguised]:
    """Such values in `value`, which is to become an `annotation`."""
    alternatives = members(annotation)
    if len(alternatives) > 1:
        models = [part for part in alternatives if is_model(part)]
        tag = tag_of(models)
        chosen = choose(annotation, value.get(tag)) if tag and isinstance(value, dict) else None
        if chosen is None:
            return
        alternatives = (chosen,)
    here: Any = alternatives[0] if alternatives else None
    if is_model(here) and isinstance(value, dict):
        for name, field in here.model_fields.items():
            if name in value:
                yield from disguised(field.annotation, value[name], (*path, name), field)
    elif get_origin(here) in (tuple, list) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from disguised(get_args(here)[0], item, (*path, index), field)
    elif get_origin(here) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from disguised(get_args(here)[1], item, (*path, key), field)
    elif _differs(here, value):
        yield Disguised(path, value, here, field)


def _differs(annotation: Any, value: Any) -> bool:
    if get_origin(annotation) is Literal:
        return isinstance(value, bool) and not any(isinstance(choice, bool) for choice in get_args(annotation))
    if annotation is bool:
        return isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return annotation in (int, float) and isinstance(value, (bool, str))
