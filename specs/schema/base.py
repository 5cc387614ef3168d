"""What every section of a spec shares, and how a field says that it is no part of a result's identity."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Spec(BaseModel):
    """A section of a spec file: unknown keys are errors, values never change, the text under a field documents it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def execution(default: Any = ..., **constraints: Any) -> Any:
    """A field that says where or how work runs and never what comes out: left out of every fingerprint."""
    return Field(default, json_schema_extra={"identity": False}, **constraints)


def addition(default: Any, **constraints: Any) -> Any:
    """A field that came after results did and whose default means what was done before: it is left out of a fingerprint
    while it has the default, so that those results stay valid."""
    return Field(default, json_schema_extra={"identity": "unless default"}, **constraints)


def unless_said(tag: str, variant: str) -> BeforeValidator:
    """For a union of sections: a mapping that leaves its `tag` out means `variant`."""

    def fill(value: Any) -> Any:
        return {tag: variant, **value} if isinstance(value, dict) else value

    return BeforeValidator(fill)


def identity_of(model: BaseModel) -> dict[str, Any]:
    """The fields of a section that change a result, as plain data; those declared with `execution` are left out."""
    plain: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        extra, value = field.json_schema_extra, getattr(model, name)
        kind = extra.get("identity") if isinstance(extra, dict) else True
        if kind is False or (kind == "unless default" and value == field.default):
            continue
        plain[name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return identity_of(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
