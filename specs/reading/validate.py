"""Validation of plain data by the schema. Pydantic's errors become plain issues with the file's paths."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args, get_origin

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from specs.bounds import MAX_ISSUES
from specs.errors import Issue, IssueError, Path, dotted
from specs.extensions import find_variant, is_offered, our_names
from specs.schema.base import RECORDED, OpenSection, documentation, is_open, item_of
from specs.schema.fields import (
    SIGNS,
    below,
    choose,
    describe,
    elsewhere,
    is_anothers,
    is_model,
    kind_of,
    literal_of,
    members,
    names,
    nearest,
    number,
    split,
    tag_of,
)


def parse(schema: Any, data: Any, *, recorded: bool = False) -> tuple[Any, list[Issue]]:
    """Returns the validated value and no issue, or None and all issues, with paths relative to the data.

    Args:
        recorded: whether the data are recorded; then a section of a package that is not installed is not an issue.
    """
    try:
        return TypeAdapter(schema).validate_python(data, context=RECORDED if recorded else None), []
    except ValidationError as error:
        return None, translate(error.errors(include_url=False), schema, data)


def translate(errors: Sequence[ErrorDetails], schema: Any, data: Any) -> list[Issue]:
    """Returns one issue per place. A value that fits no alternative of a union is a single issue."""
    issues: dict[tuple[Path, str], Issue] = {}
    for error in errors:
        if _follows_from_another(error):
            continue
        if len(issues) > MAX_ISSUES:  # `refuse` reports no more, and a search in many names is slow
            break
        place = Place(schema, error["loc"], data)
        issue = place.issue(error)
        issues.setdefault((issue.path, "" if place.in_plain_union else issue.message), issue)
    found = list(issues.values())
    # A key with a typo is one mistake, not also a missing key.
    meant = {(*each.path[:-1], hinted[1]) for each in found if (hinted := _MEANT.fullmatch(each.hint))}
    meant |= {split(place) for each in found for place in _ELSEWHERE.findall(each.hint)}
    return [each for each in found if each.message != "missing" or each.path not in meant]


_MEANT = re.compile("did you mean `(.+)`[?]")
_ELSEWHERE = re.compile("(?:here it is|or) `([^`]+)`")


def _follows_from_another(error: ErrorDetails) -> bool:
    """Returns whether a list is "too short" only because its items were refused."""
    if error["type"] != "too_short" or not isinstance(error["input"], (list, tuple, dict)):
        return False
    return len(error["input"]) >= int(error["ctx"]["min_length"])


class Place:
    """The place of an error: its path without pydantic's union tags, and the schema's annotation there."""

    def __init__(self, schema: Any, loc: Sequence[str | int], data: Any) -> None:
        self._root = schema
        self._data = data
        self.path: Path = ()
        self.in_plain_union = False
        self.annotation: Any = schema
        self.field: FieldInfo | None = None
        self.owner: Any = None
        parts = list(loc)
        while parts:
            if self._chosen(parts):
                continue
            if self.in_plain_union:
                break
            self._descend(parts.pop(0))

    def _chosen(self, parts: list[str | int]) -> bool:
        """Removes a union's tag from the beginning of the remaining location. Returns False if there is no tag."""
        alternatives = members(self.annotation)
        self.in_plain_union = self.annotation is JsonValue
        if len(alternatives) < 2:
            return False
        if kind := next((part for part in alternatives if is_open(part)), None):
            named = self._data.get(kind.tag) if isinstance(self._data, dict) else None
            if isinstance(named, str) and choose(self.annotation, named) is None and is_offered(kind, named):
                self.annotation = kind  # from a package: the loc does not name it
                return False
        model = choose(self.annotation, parts[0])
        if model is None:
            self.in_plain_union = True
            plain = [part for part in alternatives if not is_model(part)]
            self.annotation = plain[0] if len(plain) == 1 else self.annotation
            return False
        self.annotation = model
        parts.pop(0)
        return True

    def _descend(self, part: str | int) -> None:
        here: Any = next(iter(members(self.annotation)), None)
        if is_open(here):
            here = find_variant(here, self._data[here.tag])  # the loc does not name it
        self.path = (*self.path, part)
        self.owner = here
        self._data = _item_of(self._data, part)
        if is_model(here) and part in here.model_fields:
            self.field = here.model_fields[part]
            self.annotation = self.field.annotation
        elif get_origin(here) is dict:
            self._item(get_args(here)[1])
        elif get_origin(here) in (list, tuple):
            self._item(item_of(here, int(part)))
        else:
            self.field, self.annotation = None, None

    def _item(self, annotation: Any) -> None:
        self.field, self.annotation = FieldInfo.from_annotation(annotation), annotation

    def _in_other_variants(self) -> str:
        """Returns a hint that names the variants of this section that have the key, or its own if they are too many;
        empty if none has it."""
        here: tuple[Any, ...] = (self._root,)
        key = str(self.path[-1])
        for part in self.path[:-1]:
            here = below(here, part)
        having = [one for one in here if is_model(one) and key in one.model_fields]
        tag = tag_of([self.owner, *having]) if having and is_model(self.owner) else None
        values = [str(value) for one in having for value in literal_of(one.model_fields[tag])] if tag else []
        if len(values) > 3:
            return f"not with `{tag}: {literal_of(self.owner.model_fields[tag])[0]}`"
        return f"only with {' or '.join(f'`{tag}: {value}`' for value in values)}" if values else ""

    def issue(self, error: ErrorDetails) -> Issue:
        """Returns the error as a plain issue."""
        kind = error["type"]
        if kind == "extra_forbidden":
            allowed = names([self.owner])
            hint = (
                _known_inside(error["input"], self._root, is_anothers)
                or self._in_other_variants()
                or nearest(str(self.path[-1]), allowed, root=self._root, here=dotted(self.path))
                or _known_inside(error["input"], self._root, lambda key: bool(elsewhere(key, self._root)))
            )
            return Issue("unknown field", self.path, allowed=", ".join(allowed), hint=hint)
        if kind == "missing":
            return Issue("missing", self.path, allowed=describe(self.annotation, self.field), hint=self._meaning())
        if kind in ("union_tag_not_found", "union_tag_invalid"):
            return self._tag(error)
        given = show(error["input"])
        if kind == "literal_error":
            allowed = [str(value) for value in literal_of(self.field)] if self.field else []
            hint = nearest(str(error["input"]), allowed) or self._meaning()
            allowed_text = describe(self.field.annotation, self.field) if self.field else ""
            return Issue("not one of the values allowed", self.path, given, allowed_text, hint)
        if kind == "value_error" and isinstance(issue_error := error["ctx"]["error"], IssueError):
            return replace(issue_error.issue, path=(*self.path, *issue_error.issue.path))
        if kind in ("value_error", "assertion_error"):
            return Issue(str(error["ctx"]["error"]), self.path, "" if isinstance(error["input"], dict) else given)
        message = self._message(kind, error.get("ctx", {}))
        hint = self._hint_of_text(error["input"]) or self._meaning()
        return Issue(message, self.path, given, describe(self.annotation, self.field), hint)

    def _meaning(self) -> str:
        """Returns the field's documentation, on one line; empty for an item of a list or a mapping."""
        is_field = is_model(self.owner) and self.path[-1] in self.owner.model_fields
        return " ".join(documentation(self.owner, str(self.path[-1])).split()) if is_field else ""

    def _hint_of_text(self, given: Any) -> str:
        """Returns a hint for a text that was meant as something else; empty for any other text."""
        if not isinstance(given, str):
            return ""
        if "${" in given:
            return "a spec has no variables: give the value by `--set`, or several in a `matrix`"
        if slug := _allowed_name(given, self.field):
            return f"write `{slug}`"
        if "," in given and any(get_origin(kind) in (list, tuple) for kind in members(self.annotation)):
            return f"write a list in brackets: [{', '.join(part.strip() for part in given.split(','))}]"
        return ""

    def _message(self, kind: str, context: dict[str, Any]) -> str:
        bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
        if kind in bounds:
            return f"must be {SIGNS[bounds[kind]]} {number(context[bounds[kind]])}"
        if kind == "too_short":
            return f"must have at least {context['min_length']} item{'' if context['min_length'] == 1 else 's'}"
        if kind == "too_long":
            return f"must have at most {context['max_length']} items"
        if kind == "string_too_short":
            return "must not be empty"
        if kind == "string_pattern_mismatch":
            return "has the wrong form"
        if kind == "finite_number":
            return "must be a finite number"
        return f"must be {kind_of(self.annotation)}"

    def _tag(self, error: ErrorDetails) -> Issue:
        models = [part for part in members(self.annotation) if is_model(part)]
        if models and is_open(models[0]):
            kind: type[OpenSection] = models[0]
            return Issue(
                "missing",
                (*self.path, kind.tag),
                allowed=", ".join(our_names(kind.package)),
                hint=f"say which {kind.tag} it is",
            )
        name = tag_of(models)
        if name is None:
            forms = ", ".join("{" + ", ".join(model.model_fields) + "}" for model in models)
            return Issue("of no known form", self.path, show(error["input"]), allowed=f"one of {forms}")
        allowed = [str(value) for model in models for value in literal_of(model.model_fields[name])]
        path = (*self.path, name)
        if error["type"] == "union_tag_not_found":
            return Issue("missing", path, allowed=", ".join(allowed), hint=f"say which {name} it is")
        tag = str(error["ctx"]["tag"])
        return Issue(f"unknown {name}", path, show(tag), ", ".join(allowed), nearest(tag, allowed))


def _allowed_name(given: str, field: FieldInfo | None) -> str:
    """Returns the text in lower case with hyphens if the field's pattern allows that; else empty."""
    pattern = next((rule.pattern for rule in field.metadata if getattr(rule, "pattern", None)), "") if field else ""
    slug = re.sub("[^a-z0-9]+", "-", given.lower()).strip("-")[:63].rstrip("-")
    return slug if pattern and re.fullmatch(pattern, slug) else ""


def _known_inside(section: Any, root: Any, is_known: Callable[[str], bool]) -> str:
    """Returns our names for those keys of an unknown section that are known; empty if no key is."""
    hints: dict[str, str] = {}
    sections = [section]
    for inside in sections:
        for key, value in inside.items() if isinstance(inside, dict) else ():
            sections.append(value)
            if is_known(key) and (hint := nearest(key, (), root=root)):
                hints[key] = f"{key}: {hint}"
    return "; ".join(list(hints.values())[:4])


def _item_of(data: Any, part: str | int) -> Any:
    try:
        return data[part]
    except (TypeError, LookupError):
        return None


def show(value: Any) -> str:
    """Returns a value as a user would write it, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, float) else number(value)
    return text if len(text) <= 80 else text[:77] + "..."
