"""The schema documents itself."""

import importlib
from typing import get_args

import pytest
from pydantic import Field, create_model

from specs import parse_objective
from specs.json_schema import json_schema
from specs.schema.base import Spec, documentation, set_fields
from specs.schema.experiment import Experiment
from specs.schema.fields import is_model, literal_of, members
from specs.schema.study import Study


def sections(annotation, found):
    for part in members(annotation):
        if is_model(part) and part not in found:
            found.append(part)
            for field in part.model_fields.values():
                sections(field.annotation, found)
        elif not is_model(part):
            for inner in get_args(part):
                sections(inner, found)
    return found


def test_every_field_is_documented():
    bare = [
        f"{section.__name__}.{name}"
        for section in sections(Experiment, sections(Study, []))
        for name, field in section.model_fields.items()
        if not documentation(section, name) and len(literal_of(field)) != 1
        if not any(is_model(part) and part.__doc__ for part in members(field.annotation))
    ]
    assert not bare


class Base(Spec):
    """A section."""

    steps: int = 1
    """How many
    steps."""
    rate: float = Field(1.0, description="How fast.")
    bare: int = 0

    class Inner(Spec):
        """A section of a section."""

        width: int = 1
        """How wide."""


class Derived(Base):
    """A section that declares a field again."""

    steps: int = 2
    """Twice as many."""

    class Inner(Spec):
        """Another section of the same name."""

        width: int = 1
        """Another's."""


def test_a_key_is_documented_by_the_text_under_it_or_its_description():
    assert [documentation(Base, name) for name in Base.model_fields] == ["How many\nsteps.", "How fast.", ""]
    assert [documentation(Derived, name) for name in Derived.model_fields] == ["Twice as many.", "How fast.", ""]
    told = {name: key.get("description") for name, key in Derived.model_json_schema()["properties"].items()}
    assert told == {"steps": "Twice as many.", "rate": "How fast.", "bare": None}
    assert documentation(Base.Inner, "width") == "How wide."
    assert documentation(Derived.Inner, "width") == "Another's."
    assert documentation(create_model("Made", __base__=Base), "steps") == "How many\nsteps.", "it has no source"


def test_a_key_of_a_file_that_is_half_edited_has_no_documentation(tmp_path, monkeypatch):
    file = tmp_path / "half_edited.py"
    file.write_text("from specs.schema.base import Spec\nclass Mine(Spec):\n    steps: int = 1\n    'How many.'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("half_edited").Mine
    file.write_text("class Mine(:\n")
    assert documentation(mine, "steps") == ""


def test_every_section_is_strict_frozen_and_described():
    for section in sections(Experiment, sections(Study, [])):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
        assert section.__doc__


def test_the_json_schema_carries_the_documentation_and_knows_extends():
    schema = json_schema("experiment")["$defs"]
    assert schema["File"]["properties"]["seeds"]["description"].startswith("Seeds of the prompt order")
    assert schema["File"]["properties"]["extends"]["type"] == "string"
    assert "required" not in schema["TrainingPart"]
    assert "steps" in schema["Training"]["required"]
    assert json_schema("study")["$defs"]["File"]["properties"]["trials"]["minimum"] == 1


@pytest.mark.parametrize(
    ("clip", "shown"),
    [
        ({"type": "none"}, {"type": "none"}),
        ({"type": "value", "low": 0.1}, {"type": "value", "low": 0.1}),
        ({"type": "dual", "low": 0.1}, {"low": 0.1}),
    ],
)
def test_the_set_fields_of_a_section_name_its_type_if_it_is_not_the_default(
    clip: dict[str, object], shown: dict[str, object]
) -> None:
    assert set_fields(parse_objective({"type": "rpg", "clip": clip})) == {"clip": shown}
