"""Parsing of YAML 1.2 text to a tree of nodes with their lines, and writing of plain data as text.

The parser refuses tags, deep nesting, huge files and alias bombs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from specs.bounds import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_ISSUES, MAX_VALUES
from specs.errors import Issue, Position, SpecError, shortened
from specs.reading.syntax import explain

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value with the line of its key or, in a list, of the value itself."""

    value: "Scalar | dict[str, YamlNode] | list[YamlNode]"
    at: Position

    @classmethod
    def of(cls, data: Any, at: Position) -> "YamlNode":
        """Returns plain data as a tree, with every value at one position."""
        if isinstance(data, Mapping):
            return cls({key: cls.of(item, at) for key, item in data.items()}, at)
        if isinstance(data, list):
            return cls([cls.of(item, at) for item in data], at)
        return cls(data, at)

    def plain(self) -> Any:
        """Returns the value as plain data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@lru_cache(maxsize=4)  # a command reads a file twice: for its kind, then as that kind
def parse_bytes(data: bytes, file: str) -> YamlNode:
    """Returns the root mapping of a file. Raises SpecError with the place of an error."""
    if len(data) > MAX_BYTES:
        raise SpecError(too_large(file))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        given = f"byte 0x{data[error.start]:02x}"
        raise SpecError(
            Issue("not UTF-8 text", file=file, line=line, given=given, hint="save the file as UTF-8")
        ) from None
    lines = text.split("\n")
    root = parse_text(text, lambda line: position_in(file, lines, line))
    if root is None or root.value is None:
        raise SpecError(Issue("the file is empty", file=file, hint="`rpg init` writes a spec to start from"))
    if not isinstance(root.value, dict):
        raise SpecError(_at(root.at, "must be a mapping of fields", allowed="lines such as `name: my-experiment`"))
    return YamlNode(root.value, Position(file, 1, ""))


def too_large(file: str) -> Issue:
    """Returns the issue with a file that is too large to be written by hand."""
    return Issue("the file is too large", file=file, allowed=f"at most {MAX_BYTES} bytes")


def position_in(file: str, lines: list[str], line: int) -> Position:
    """Returns the position of line `line` (from 1), with its text made safe to print."""
    text = lines[line - 1][:160] if 0 < line <= len(lines) else ""
    return Position(file, line, "".join(char if char.isprintable() else " " for char in text))


def parse_text(text: str, position: Callable[[int], Position]) -> YamlNode | None:
    """Returns the tree of one YAML document; None if the text has no document. `position` returns the place of a line
    (from 1)."""
    try:
        return _Composer(YAML(typ="safe", pure=True).parse(text), position).document()
    except MarkedYAMLError as error:
        mistake = explain(error, text)
        raise SpecError(_at(position(mistake.line), mistake.message, hint=mistake.hint)) from None
    except ReaderError as error:
        where = position(text.count("\n", 0, error.position) + 1)
        raise SpecError(_at(where, "not valid YAML: a character that no text file may hold")) from None
    except YAMLError as error:
        raise SpecError(_at(position(1), f"not valid YAML: {error}")) from None
    except RecursionError:
        raise SpecError(_too_deep(position(1))) from None


def _at(position: Position, message: str, *, given: str = "", allowed: str = "", hint: str = "") -> Issue:
    return Issue(message, (), given, allowed, hint, position.file, position.line, position.snippet)


def _too_deep(position: Position) -> Issue:
    return _at(position, "nested too deeply", allowed=f"at most {MAX_DEPTH} levels")


class _Composer:
    """A converter from events to nodes. It collects all duplicate keys, and stops at other errors."""

    def __init__(self, events: Iterator[Event], position: Callable[[int], Position]) -> None:
        self._events = events
        self._position = position
        self._anchors: dict[str, YamlNode | None] = {}
        self._sizes: dict[str, int] = {}
        self._num_nodes = 0
        self._issues: list[Issue] = []

    def document(self) -> YamlNode | None:
        root: YamlNode | None = None
        num_documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise SpecError(_at(self._where(event), "a second document", allowed="one document per file"))
                root = self._node(self._next(), None, 1)
        if self._issues:
            raise SpecError(*self._issues)
        return root

    def _next(self) -> Any:
        return next(self._events)

    def _where(self, event: Event) -> Position:
        return self._position(event.start_mark.line + 1)

    def _node(self, event: Any, key: Position | None, depth: int) -> YamlNode:
        at = key or self._where(event)
        if depth > MAX_DEPTH:
            raise SpecError(_too_deep(self._where(event)))
        self._count(1, event)
        if isinstance(event, AliasEvent):
            return self._alias(event, at)
        if event.tag is not None:
            raise SpecError(
                _at(self._where(event), "tags are not allowed", given=str(event.tag), hint="write the value plainly")
            )
        if event.anchor:
            self._anchors[event.anchor] = None
        before = self._num_nodes
        if isinstance(event, ScalarEvent):
            node = YamlNode(self._scalar(event), at)
        elif isinstance(event, SequenceStartEvent):
            node = YamlNode(self._sequence(depth), at)
        else:
            node = YamlNode(self._mapping(depth), at)
        if event.anchor:
            self._anchors[event.anchor] = node
            self._sizes[event.anchor] = self._num_nodes - before + 1
        return node

    def _count(self, number: int, event: Event) -> None:
        self._num_nodes += number
        if self._num_nodes > MAX_VALUES:
            hint = "aliases count as often as they are used"
            raise SpecError(_at(self._where(event), "too many values", allowed=f"at most {MAX_VALUES}", hint=hint))

    def _alias(self, event: AliasEvent, at: Position) -> YamlNode:
        node = self._anchors.get(event.anchor)
        if node is None:
            if event.anchor in self._anchors:
                raise SpecError(_at(self._where(event), f"the alias *{event.anchor} refers to itself"))
            hint = 'put a text that begins with `*` in quotes: "..."'
            raise SpecError(_at(self._where(event), f"the alias *{event.anchor} is not defined", hint=hint))
        self._count(self._sizes[event.anchor], event)
        return YamlNode(node.value, at)

    def _sequence(self, depth: int) -> list[YamlNode]:
        items: list[YamlNode] = []
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._node(event, None, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, YamlNode]:
        entries: dict[str, YamlNode] = {}
        while not isinstance(event := self._next(), MappingEndEvent):
            if not isinstance(event, ScalarEvent) or event.tag is not None:
                raise SpecError(_at(self._where(event), "a key must be plain text"))
            at, key = self._where(event), self._text(event)
            if key == "<<" and event.implicit[0]:
                hint = "`extends: FILE` lays a file over another; `*name` repeats a whole section"
                raise SpecError(_at(at, "YAML 1.2 has no merge key `<<`", hint=hint))
            node = self._node(self._next(), at, depth + 1)
            if earlier := entries.get(key):
                self._issues.append(
                    _at(at, f"the key `{key}` is given twice", hint=f"first given on line {earlier.at.line}")
                )
                if len(self._issues) > MAX_ISSUES:
                    raise SpecError(*shortened(self._issues))
            else:
                entries[key] = node
        return entries

    def _text(self, event: ScalarEvent) -> str:
        text = str(event.value)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise SpecError(
                _at(self._where(event), "half a character", hint="a \\u escape in D800 to DFFF is not a character")
            )
        return text

    def _scalar(self, event: ScalarEvent) -> Scalar:
        text = self._text(event)
        if not event.implicit[0]:
            return text
        if len(text) > MAX_DIGITS and (_INTEGER.fullmatch(text) or _BASED.fullmatch(text)):
            raise SpecError(_at(self._where(event), "a number of too many digits", allowed=f"at most {MAX_DIGITS}"))
        return resolve(text)


# The core schema of YAML 1.2.2, section 10.3.2.
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def resolve(text: str) -> Scalar:
    """Returns the value of a plain scalar by YAML 1.2's rules: 1e-4 is a number, `no` and 12:30 are text, 08 is eight.

    >>> resolve("1e-4"), resolve("no"), resolve("08"), resolve("0x10"), resolve("~")
    (0.0001, 'no', 8, 16, None)
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def dump(data: Mapping[str, Any], *, comment: str = "") -> str:
    """Returns plain data as text that `parse_text` reads back as the same data. Lists of scalars are on one line.

    Args:
        comment: lines for the top of the file, without `#`.
    Example:
        >>> print(dump({"clip": {"low": 1e-5, "note": "no", "size": "08"}, "seeds": [0, 1]}, comment="Two seeds."))
        # Two seeds.
        clip:
          low: 1e-05
          note: no
          size: "08"
        seeds: [0, 1]
        <BLANKLINE>
    """
    yaml = YAML()
    yaml.width = 10_000  # a long text stays on one line
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = StringIO()
    yaml.dump(_styled(data), text)
    heading = "".join(f"# {line}\n" if line else "#\n" for line in comment.splitlines())
    return heading + text.getvalue()


def _styled(value: Any) -> Any:
    """Returns the data for the YAML writer. Texts that would be read as numbers are quoted, and lists of scalars are on
    one line."""
    if isinstance(value, Mapping):
        return {_styled(key): _styled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = CommentedSeq(_styled(item) for item in value)
        if not any(isinstance(item, (Mapping, list, tuple)) for item in value):
            items.fa.set_flow_style()
        return items
    return DoubleQuotedScalarString(value) if isinstance(value, str) and resolve(value) != value else value
