"""Base classes of a spec's sections, of sections with variants from installed packages, and the properties of
fields."""

import ast
import inspect
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from specs.errors import IssueError
from specs.extensions import find_variant

PathKind = Literal["file", "directory", "path or id"]


class Spec(BaseModel):
    """A section of a spec file. Unknown keys are errors, instances are frozen, and the text under a field documents
    it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        strict=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _as_a_file_writes_it(cls, data: Any) -> Any:
        """Accepts a list for a tuple, 1e4 for a whole number, and null for a text, list or mapping whose default is
        empty. Any other wrong type is an error."""
        if not isinstance(data, dict):
            return data
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        said = {key: value for key, value in data.items() if value is not None or not cls._is_empty_unless_said(key)}
        return {key: _as_written(value, kinds.get(key)) for key, value in said.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the section's JSON Schema, with the documentation of each key."""
        made = handler(schema)
        for name, key in handler.resolve_ref_schema(made).get("properties", {}).items():
            if name in cls.model_fields and (text := documentation(cls, name)):
                key["description"] = text
        return made

    @classmethod
    def _is_empty_unless_said(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and is_empty(field.get_default(call_default_factory=True))

    def identity(self) -> dict[str, Any]:
        """Returns the fields that change a result, as plain data; fields declared with `execution` are left out."""
        plain: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra, value = field.json_schema_extra, getattr(self, name)
            kind = extra.get("identity") if isinstance(extra, dict) else True
            if kind is False or (kind == "unless default" and _plain(value) == _plain(field.default)):
                continue
            plain[name] = _plain(value)
        return plain

    def paths(self) -> Iterator[tuple[tuple[str | int, ...], PathKind, str]]:
        """Yields each path that the section's own fields name, with its place in the section and its required kind."""
        for name, field in type(self).model_fields.items():
            if kind := path_kind(field):
                value = getattr(self, name)
                texts = [((name,), value)] if isinstance(value, str) else [((name, i), v) for i, v in enumerate(value)]
                yield from ((where, kind, text) for where, text in texts if text)


def documentation(section: type[BaseModel], name: str) -> str:
    """Returns the documentation of a field: its `description`, or the text under it in the source, or an empty text.

    The text is read on demand, because pydantic's `use_attribute_docstrings` would read the source of every section in
    each process that imports the schema.
    """
    if told := section.model_fields[name].description:
        return told
    owner = next((kind for kind in section.__mro__ if name in inspect.get_annotations(kind)), section)
    return _texts_under_fields(owner.__module__).get(f"{owner.__qualname__}.{name}", "")


@cache
def _texts_under_fields(module: str) -> dict[str, str]:
    """Returns the text under each field of a module's classes, by `Class.field`; empty if the module has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, ValueError, SyntaxError):  # for example, edited after the import
        return {}
    return dict(_texts_in(tree.body, ""))


def _texts_in(body: list[ast.stmt], within: str) -> Iterator[tuple[str, str]]:
    """Yields (`Class.field`, text) for the classes of a body, including nested classes and those under conditions."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            name = f"{within}{statement.name}"
            for field, text in pairwise(statement.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(words))):
                        yield f"{name}.{key}", inspect.cleandoc(words)
            yield from _texts_in(statement.body, f"{name}.")
        elif isinstance(statement, ast.If | ast.Try):
            yield from _texts_in([*statement.body, *statement.orelse], within)


def is_empty(default: Any) -> bool:
    """Returns whether a field's default is an empty text, list or mapping."""
    return isinstance(default, str | tuple | list | dict) and not default


def _as_written(value: Any, annotation: Any) -> Any:
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if isinstance(value, list) and get_origin(kind) is tuple:
        return tuple(_as_written(item, item_of(kind, index)) for index, item in enumerate(value))
    alternatives = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    return int(value) if int in alternatives and isinstance(value, float) and value.is_integer() else value


def item_of(annotation: Any, index: int) -> Any:
    """Returns the type of a list's item. It is the same for all items, or differs by place, as in [step, value]."""
    kinds = get_args(annotation)
    return kinds[min(index, len(kinds) - 1)] if ... not in kinds else kinds[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.identity()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def is_open(section: Any) -> bool:
    """Returns whether the class is a kind of open section (not one of its variants)."""
    return isinstance(section, type) and "group" in vars(section)


class OpenSection(Spec, ABC):
    """A section whose variants are defined beside the code that implements them: `reward: {type: math_verify}`.

    A direct subclass is a kind of section: it has the fields that its variants share, and the methods that do the work.
    A variant is a subclass of the kind, and its own fields are its options; `specs.extensions` finds variants. Checking
    a spec imports the variant's module, so slow imports belong inside the methods.

    Validating the kind returns an instance of the variant that the data names.
    """

    tag: ClassVar[str] = "type"
    """Name of the field that names the variant."""
    group: ClassVar[str]
    """Group of the entry points, set by the kind."""
    package: ClassVar[str]
    """Package whose modules are the built-in variants, set by the kind."""
    of_function: ClassVar[tuple[str, str]] = ("", "")
    """Module and name of the class that wraps a plain function, for kinds that a package may offer as a function."""
    distribution: ClassVar[str] = ""
    """Name and version of the installed package that a variant comes from; empty for built-in variants."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Names of the installed packages whose versions determine a variant's results; `python` is the interpreter."""

    def identity(self) -> dict[str, Any]:
        """Returns the result of `Spec.identity`, with the package's version in the tag, because a new version is
        another variant."""
        plain = super().identity()
        return plain | {self.tag: f"{plain[self.tag]} ({self.distribution})"} if self.distribution else plain

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if not is_open(cls):
            return schema
        by_own_fields = core_schema.simple_ser_schema("any")
        return core_schema.with_info_before_validator_function(
            cls._as_variant, schema, serialization=by_own_fields, ref=f"{cls.__module__}.{cls.__qualname__}:{id(cls)}"
        )

    @classmethod
    def _as_variant(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value  # already a variant, or an error that the schema reports
        if cls.tag not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": repr(cls.tag)})
        try:
            variant = find_variant(cls, value[cls.tag])
        except IssueError:
            if info.context is not RECORDED:
                raise
            variant = _absent(cls)
        return variant.model_validate(value, context=info.context)


RECORDED = {"recorded": True}
"""Validation context for recorded specs."""


@cache
def _absent(kind: type[OpenSection]) -> type[OpenSection]:
    """Returns a substitute for a variant whose package is not installed. It accepts any keys and does no work."""
    settings = ConfigDict(extra="allow", strict=False)
    annotations = {kind.tag: str, "model_config": ClassVar[ConfigDict]}
    body = {"__module__": __name__, "__annotations__": annotations, "model_config": settings}
    absent: Any = cast(Any, type(kind))("Absent", (kind,), body)
    absent.__abstractmethods__ = frozenset()
    return cast("type[OpenSection]", absent)


def execution(default: Any = ..., **constraints: Any) -> Any:
    """Declares a field that affects where or how work runs, but never its results. Fingerprints leave it out."""
    return Field(default, json_schema_extra={"identity": False}, **constraints)


def addition(default: Any, **constraints: Any) -> Any:
    """Declares a field that is newer than recorded results and whose default keeps the earlier behaviour. Fingerprints
    leave it out while it has the default, so that those results stay valid."""
    return Field(default, json_schema_extra={"identity": "unless default"}, **constraints)


def names_path(kind: PathKind, default: Any = ..., *, added: bool = False, **constraints: Any) -> Any:
    """Declares a text, or list of texts, that names a file or directory of this machine, relative to the spec file. It
    must exist. With `added` the field is also an `addition`.

    The kind "path or id" also accepts an id from elsewhere, such as a Hub id. The text is a path if it begins with `.`,
    `/` or `~`, or if that path exists.
    """
    identity: dict[str, Any] = {"identity": "unless default"} if added else {}
    return Field(default, json_schema_extra={"path": kind, **identity}, **constraints)


def path_kind(field: FieldInfo) -> PathKind | None:
    """Returns the kind of path of a field declared with `names_path`; None for other fields."""
    extra = field.json_schema_extra
    return cast("PathKind | None", extra.get("path")) if isinstance(extra, dict) else None


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


no_flag = BeforeValidator(_not_a_flag)
"""Validator for a choice among numbers, which would otherwise accept `true` as 1."""


DEFAULT_VARIANT = "x-default-variant"
"""Key of a union's JSON Schema: the variant that applies if the tag is left out. Empty if other keys determine it."""
Told = Callable[[JsonSchemaValue], JsonSchemaValue]


@dataclass(frozen=True)
class _Completed(BeforeValidator):
    """A validator that fills in left-out keys, and marks them as optional in the JSON Schema."""

    told: Told = lambda schema: schema

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return self.told(handler(schema))


def unless_said(tag: str, variant: str) -> BeforeValidator:
    """Returns a validator for a union of sections: a mapping without `tag` means `variant`."""

    def fill(value: Any) -> Any:
        return {tag: variant, **value} if isinstance(value, dict) else value

    return _Completed(fill, told=lambda schema: {**schema, DEFAULT_VARIANT: variant})


def by_other_keys(fill: Callable[[Any], Any]) -> BeforeValidator:
    """Returns a validator for a union of sections: `fill` adds the tag that a mapping's other keys imply."""
    return _Completed(fill, told=lambda schema: {**schema, DEFAULT_VARIANT: ""})


def _of_name(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


or_name = _Completed(_of_name, told=lambda schema: {"anyOf": [schema, {"type": "string"}]})
"""Validator for a section that may be written as its name alone: `calculator` means `{type: calculator}`."""


def set_fields(section: BaseModel) -> dict[str, Any]:
    """Returns a section's fields that are not at their defaults, as plain data. A section of another type than the
    default has its type."""
    kept = section.model_dump(mode="json", exclude_defaults=True)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in kept or not isinstance(value, BaseModel):
            continue
        plain = value.model_dump(mode="json")
        if plain == field.default:  # a default may be given as plain data too
            del kept[name]
        elif not isinstance(field.default, Mapping):
            other = isinstance(field.default, BaseModel) and type(value) is not type(field.default) and "type" in plain
            kept[name] = ({"type": plain["type"]} if other else {}) | set_fields(value)
    return kept
