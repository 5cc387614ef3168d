"""The schema as JSON Schema, for editors that complete and check YAML."""

import copy
from collections.abc import Iterator
from typing import Any

from specs.extensions import variants
from specs.loader import SCHEMAS, Kind
from specs.schema.base import DEFAULT_VARIANT, OpenSection, is_empty
from specs.schema.base_objective import PackagedObjective

EXTENDS = {
    "type": "string",
    "title": "Extends",
    "description": "Spec file that this file extends, relative to this file. Mappings merge, other values replace.",
}
_REFERENCE = "#/$defs/"
_PART = "Part"
"""Suffix of the sections of a file that extends another, in which no key is required."""


def json_schema(kind: Kind, *, installed: bool = True) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of a file of this kind, with the documentation of each field.

    Args:
        installed: whether to include variants of the packages installed here.
    """
    root = SCHEMAS[kind].model_json_schema()
    sections: dict[str, Any] = root.pop("$defs", {})
    _list_variants(sections, installed=installed)
    objectives = _forms(PackagedObjective, sections, installed=installed)
    for section in _objects([root, *sections.values()]):
        if objectives and "formula" in section.get("discriminator", {}).get("mapping", {}):
            section["oneOf"] = [*section["oneOf"], *objectives]
        _name_variants(section, sections)
        _take_null(section)
    root["properties"] = {"extends": EXTENDS, **root["properties"]}
    if kind == "experiment":  # the matrix may supply fields that the base configuration lacks
        root["anyOf"] = [{"required": ["matrix"]}, {"required": root.pop("required")}]
    parts = {f"{name}{_PART}": _part(section) for name, section in sections.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "if": {"required": ["extends"]},
        "then": {"$ref": f"{_REFERENCE}File{_PART}"},
        "else": {"$ref": f"{_REFERENCE}File"},
        "$defs": {"File": root, f"File{_PART}": _part(root), **sections, **parts},
    }


def _list_variants(sections: dict[str, Any], *, installed: bool) -> None:
    """Replaces each open section by a choice among its variants, built-in and from installed packages."""
    listed: set[str] = set()
    while open_ones := [
        each for each in OpenSection.__subclasses__() if each.__name__ in sections and each.__name__ not in listed
    ]:
        for section in open_ones:
            listed.add(section.__name__)
            sections[section.__name__] = {"oneOf": _forms(section, sections, installed=installed)}


def _forms(section: type[OpenSection], sections: dict[str, Any], *, installed: bool) -> list[dict[str, Any]]:
    """Returns the variants of an open section, and adds their own sections to `sections`."""
    forms = []
    for name, variant in variants(section, installed=installed).items():
        form = variant.model_json_schema()
        form["properties"][section.tag]["const"] = name
        form["required"] = sorted({*form.get("required", ()), section.tag})
        for other, definition in form.pop("$defs", {}).items():
            sections.setdefault(other, definition)
        forms.append(form)
    return forms


def _name_variants(section: dict[str, Any], sections: dict[str, Any]) -> None:
    """Makes the tag required in each variant of a union, except in the default variant."""
    told = section.get("discriminator", {})
    default = section.pop(DEFAULT_VARIANT, None)
    if default == "":
        section["anyOf"] = section.pop("oneOf")
        return
    for name, reference in told.get("mapping", {}).items():
        variant = sections[reference.removeprefix(_REFERENCE)]
        if name != default:
            variant["required"] = sorted({*variant.get("required", ()), told["propertyName"]})


def _take_null(section: dict[str, Any]) -> None:
    """Allows null, which means empty, for a text, list or mapping that is empty by default."""
    if is_empty(section.get("default")) and isinstance(section.get("type"), str):
        section["type"] = [section["type"], "null"]


def _part(section: Any) -> Any:
    """Returns the section's form in a file that extends another. Lists replace, so their items are complete."""
    if isinstance(section, list):
        return [_part(item) for item in section]
    if not isinstance(section, dict):
        return section
    part: dict[str, Any] = {}
    for key, value in section.items():
        if key in ("required", "discriminator"):
            continue
        if key in ("properties", "$defs"):
            part[key] = {name: _part(child) for name, child in value.items()}
        elif key == "$ref":
            part[key] = f"{value}{_PART}"
        elif key == "oneOf":
            part["anyOf"] = _part(value)
        elif key in ("items", "prefixItems", "default", "const", "enum", "examples"):
            part[key] = copy.deepcopy(value)
        else:
            part[key] = _part(value)
    return part


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields each mapping in nested data."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(child)
