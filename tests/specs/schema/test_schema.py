"""The schema documents itself."""

from typing import get_args

from pydantic import Field, create_model

from specs.json_schema import json_schema
from specs.schema.base import Spec, documentation
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


class Derived(Base):
    """One with a field declared anew."""

    steps: int = 2
    """Twice as many."""


def test_a_key_is_documented_by_the_text_under_it_or_its_description():
    assert [documentation(Base, name) for name in Base.model_fields] == ["How many\nsteps.", "How fast.", ""]
    assert [documentation(Derived, name) for name in Derived.model_fields] == ["Twice as many.", "How fast.", ""]
    told = {name: key.get("description") for name, key in Derived.model_json_schema()["properties"].items()}
    assert told == {"steps": "Twice as many.", "rate": "How fast.", "bare": None}
    assert documentation(create_model("Made", __base__=Base), "steps") == "How many\nsteps.", "it has no source"


def test_every_section_is_strict_frozen_and_described():
    for section in sections(Experiment, sections(Study, [])):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
        assert section.__doc__


def test_the_json_schema_carries_the_documentation_and_knows_extends():
    schema = json_schema("experiment")["$defs"]
    assert schema["File"]["properties"]["seeds"]["description"].startswith("One run each")
    assert schema["File"]["properties"]["extends"]["type"] == "string"
    assert "required" not in schema["TrainingPart"]
    assert "steps" in schema["Training"]["required"]
    assert json_schema("study")["$defs"]["File"]["properties"]["trials"]["minimum"] == 1
