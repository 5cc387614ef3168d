"""The table of settings that cannot act."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from specs.rules.idle import OF_A_MODEL, OF_TRAINING
from specs.schema.base import Spec
from specs.schema.experiment import Experiment

KEYS = sorted({key for row in (*OF_TRAINING, *OF_A_MODEL) for key in row.keys.split()})


def sections_in(annotation: Any) -> Iterator[type[Spec]]:
    """Yields the sections that a field's value may be."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


@pytest.mark.parametrize("key", KEYS)
def test_every_row_names_a_setting_of_the_schema(key: str) -> None:
    sections: list[type[Spec]] = [Experiment]
    for name in key.split("."):
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        assert fields, f"no section has {name}"
        sections = [section for field in fields for section in sections_in(field.annotation)]
