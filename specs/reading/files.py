"""Reading of a spec file as a tree with absolute paths. It is merged over the file that it extends, and overrides are
applied to it."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, get_origin

from pydantic import BaseModel

from specs.bounds import NotPlainError, TooLargeError, read_within
from specs.errors import Issue, Path, Position, SpecError
from specs.model_evaluation import ModelEvaluation
from specs.reading.syntax import is_whole_value
from specs.reading.tree import assign, merge
from specs.reading.yaml import YamlNode, parse_bytes, parse_text, too_large
from specs.schema.base import PathKind, path_kind
from specs.schema.experiment import Experiment
from specs.schema.fields import below, elsewhere, is_model, no_such_item, sections_of, split, unknown, with_field
from specs.schema.study import Study

_YAML = (".yaml", ".yml")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
_AXES = ("product", "zip")
"""Parts of a matrix that name fields."""
_BRACKETS = re.compile(r"\[(\d+)\]")
"""Pattern of an index into a list, as Python writes it."""


def read_tree(path: str, schema: type[BaseModel]) -> YamlNode:
    """Returns the tree of the file and all that it extends, merged by the schema, with absolute paths. Raises
    SpecError."""
    return _absolute(_without_extends(path, (), None, schema), [schema])


def tree_of(spec: Mapping[str, Any], schema: type[BaseModel]) -> YamlNode:
    """Returns a mapping as the tree of a file in the working directory would be, except that values have no place in a
    file. Raises SpecError."""
    root = YamlNode(_node(spec, (), Position("", 0, "")).value, Position("", 0, ""))
    return _absolute(_over_extended(root, "", (), schema), [schema])


def override(root: YamlNode, setting: str, schema: type[BaseModel]) -> YamlNode:
    """Returns the tree with one `path.to.field=value` set. Raises SpecError if the schema has no such path."""
    name, equals, text = setting.partition("=")
    at = Position(f"--set {setting}", 0, "")
    if not equals:
        raise SpecError(Issue("a setting needs a value", file=at.file, allowed="path.to.field=value"))
    node = parse_text(text, lambda _line: at) if is_whole_value(text) else YamlNode(text, at)
    if node and node.value == text.strip():  # YAML drops the spaces around a text
        node = YamlNode(text, at)
    return _set(root, name, _on_one_line(node, at) if node else YamlNode(None, at), schema)


def override_value(root: YamlNode, name: str, value: Any, schema: type[BaseModel]) -> YamlNode:
    """Returns the tree with a value set at a dotted path. Raises SpecError if the schema has no such path."""
    return _set(root, name, _node(value, split(name), Position(f"--set {name}={value}", 0, "")), schema)


def _set(root: YamlNode, name: str, node: YamlNode, schema: type[BaseModel]) -> YamlNode:
    path = split(name.strip())
    if issue := unknown(schema, path) or no_such_item(root.plain(), path):
        if _BRACKETS.search(name):
            dotted = _BRACKETS.sub(r".\1", name.strip())
            issue = replace(issue, hint=f"did you mean `{dotted}`?")
        raise SpecError(misplaced(replace(issue, file=node.at.file), schema))
    return _absolute(assign(root, path, node, [schema]), [schema])


def _node(value: Any, path: Path, at: Position) -> YamlNode:
    """Returns a Python value as the node of a file. Raises SpecError for a value that a file cannot contain."""
    match value:
        case Mapping():
            return YamlNode({str(key): _node(item, (*path, str(key)), at) for key, item in value.items()}, at)
        case list() | tuple():
            return YamlNode([_node(item, (*path, index), at) for index, item in enumerate(value)], at)
        case None | bool() | str():
            return YamlNode(value, at)
        case os.PathLike():
            return YamlNode(os.fspath(value), at)
        case Integral():
            return YamlNode(int(value), at)
        case Real():
            return YamlNode(float(value), at)
        case _:
            allowed = "texts, numbers, true and false, None, lists and mappings"
            raise SpecError(Issue(f"a {type(value).__name__} cannot be a value of a spec", path, allowed=allowed))


def _on_one_line(node: YamlNode, at: Position) -> YamlNode:
    if isinstance(node.value, dict):
        return YamlNode({key: _on_one_line(child, at) for key, child in node.value.items()}, at)
    if isinstance(node.value, list):
        return YamlNode([_on_one_line(child, at) for child in node.value], at)
    return YamlNode(node.value, at)


def _without_extends(path: str, chain: tuple[str, ...], named_at: Position | None, schema: type[BaseModel]) -> YamlNode:
    """Returns the file's tree merged over that of the file it extends. `chain`: the real paths of the files that extend
    it."""
    real = os.path.realpath(path) if "\0" not in path else path
    if real in chain:
        names = [os.path.basename(file) for file in (*chain[chain.index(real) :], real)]
        raise SpecError(_at(named_at, "extends itself", given=" -> ".join(names)))
    return _over_extended(_read(path, named_at), path, (*chain, real), schema)


def _over_extended(root: YamlNode, path: str, chain: tuple[str, ...], schema: type[BaseModel]) -> YamlNode:
    """Returns the tree of the file at `path` merged over that of the file it extends. `chain`: the extending files,
    including this one."""
    assert isinstance(root.value, dict)
    if "extends" not in root.value:
        return root
    extends = root.value["extends"]
    if not isinstance(extends.value, str) or not extends.value:
        raise SpecError(_at(extends.at, "must be text", allowed="the path of a spec file", path=("extends",)))
    rest = YamlNode({key: node for key, node in root.value.items() if key != "extends"}, root.at)
    other = os.path.normpath(os.path.join(os.path.dirname(path), os.path.expanduser(extends.value)))
    under, over = _without_dropped_axes(_without_extends(other, chain, extends.at, schema), rest)
    return merge(under, over, [schema])


def _without_dropped_axes(under: YamlNode, over: YamlNode) -> tuple[YamlNode, YamlNode]:
    """Returns the trees without the matrix fields of `under` that `over` sets to null, so that these fields do not
    vary."""
    for part in _AXES:
        varied, said = (_section(tree, "matrix", part) for tree in (under, over))
        dropped = {path for path, node in said.items() if node.value is None and path in varied}
        if dropped:
            under, over = (_without(tree, ("matrix", part), dropped) for tree in (under, over))
    return under, over


def _section(tree: YamlNode, *path: str) -> dict[str, YamlNode]:
    """Returns the entries of a section; empty if the section is missing."""
    node: YamlNode | None = tree
    for key in path:
        node = node.value.get(key) if node and isinstance(node.value, dict) else None
    return node.value if node and isinstance(node.value, dict) else {}


def _without(tree: YamlNode, path: Path, keys: set[str]) -> YamlNode:
    """Returns the tree without these keys of the section at a path."""
    assert isinstance(tree.value, dict)
    if not path:
        return YamlNode({key: node for key, node in tree.value.items() if key not in keys}, tree.at)
    return YamlNode({**tree.value, str(path[0]): _without(tree.value[str(path[0])], path[1:], keys)}, tree.at)


def _read(path: str, named_at: Position | None) -> YamlNode:
    at = named_at or Position(path, 0, "")
    try:
        data = read_within(path)
    except TooLargeError:
        raise SpecError(too_large(path)) from None
    except NotPlainError as error:
        raise SpecError(
            _at(at, f"cannot be read: {error.strerror}", hint="a spec is a file: write it to one")
        ) from None
    except FileNotFoundError:
        raise SpecError(_not_found(path, named_at)) from None
    except IsADirectoryError as error:
        raise SpecError(_at(at, f"cannot be read: {error.strerror}", hint=_spec_in(path))) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(_at(at, f"cannot be read: {reason}")) from None
    return parse_bytes(data, path)


def _spec_in(folder: str) -> str:
    """Returns a hint that names the only YAML file of a directory; empty if it has none or several."""
    names = [name for name in os.listdir(folder) if name.endswith(_YAML)]
    return f"did you mean `{os.path.join(folder, names[0])}`?" if len(names) == 1 else ""


def _not_found(path: str, named_at: Position | None) -> Issue:
    at = named_at or Position(path, 0, "")
    folder = os.path.dirname(path) or "."
    if os.path.islink(path):
        return _at(at, "a link to a file that is not there", given=os.readlink(path))
    try:
        stems = {os.path.splitext(name)[0]: name for name in os.listdir(folder) if name.endswith(_YAML)}
    except OSError:
        return _at(at, "no such file", hint=f"there is no directory {folder}")
    close = difflib.get_close_matches(os.path.splitext(os.path.basename(path))[0], stems, n=1)
    hint = f"did you mean `{stems[close[0]]}`?" if close else ""
    return _at(at, "no such file", given=path if named_at else "", hint=hint)


def _at(
    position: Position | None, message: str, *, given: str = "", allowed: str = "", hint: str = "", path: Path = ()
) -> Issue:
    where = position or Position("", 0, "")
    path = path or (("extends",) if where.line else ())
    return Issue(message, path, given, allowed, hint, where.file, where.line, where.snippet)


def _absolute(node: YamlNode, schema: Iterable[Any]) -> YamlNode:
    """Returns the tree with every relative path resolved against the file that names it, or the working directory."""
    if isinstance(node.value, list):
        return YamlNode([_absolute(child, below(schema, index)) for index, child in enumerate(node.value)], node.at)
    if not isinstance(node.value, dict):
        return node
    plain = {key: child.value for key, child in node.value.items()}
    entries: dict[str, YamlNode] = {}
    for key, child in node.value.items():
        kind = _kind_of_path(sections_of(schema, plain), key) or _kind_at_dotted_path(schema, key)
        entries[key] = _absolute_texts(child, kind) if kind else _absolute(child, below(schema, key))
    return YamlNode(entries, node.at)


def _kind_of_path(sections: Iterable[type[BaseModel]], key: str) -> PathKind | None:
    """Returns the kind of path that the field names, if it names one."""
    fields = [model.model_fields[str(key)] for section in sections for model in with_field(section, key)]
    return next((kind for field in fields if (kind := path_kind(field))), None)


def _kind_at_dotted_path(schema: Iterable[Any], key: str) -> PathKind | None:
    """Returns the kind of path of a key such as `model.path` in a matrix, without its enclosing
    sections."""
    if "." not in key or not any(get_origin(annotation) is dict for annotation in schema):
        return None
    *sections, field = split(key)
    here: tuple[Any, ...] = (Experiment,)
    for part in sections:
        here = below(here, part)
    return "path or id" if _kind_of_path([model for model in here if is_model(model)], str(field)) else None


def _absolute_texts(node: YamlNode, kind: PathKind) -> YamlNode:
    if isinstance(node.value, list):
        return YamlNode([_absolute_texts(child, kind) for child in node.value], node.at)
    if not isinstance(node.value, str) or not node.value:
        return node
    folder = os.path.dirname(node.at.file) if node.at.line else ""
    full = os.path.abspath(os.path.join(folder, os.path.expanduser(node.value)))
    if (variable := _VARIABLE.search(node.value)) and not os.path.exists(full):
        hint = "write the path itself; `~` stands for your home directory"
        raise SpecError(_at(node.at, f"{variable[0]} is not filled in: a spec has no variables", hint=hint))
    is_path = kind != "path or id" or node.value.startswith((".", "/", "~")) or os.path.exists(full)
    return YamlNode(full, node.at) if is_path else node


_NOT_IN_EVALUATIONS = {
    "model": "an evaluation lists its models under `models`",
    "matrix": "an evaluation has a run for each pair of a model and an entry of `sampling`",
    "seeds": "an evaluation has one seed, for sampling: `evaluation.seed`",
}


def misplaced(issue: Issue, schema: type[BaseModel]) -> Issue:
    """Returns the issue. If a field is in the wrong place, the issue gets a hint at the right one."""
    name = str(issue.path[0]) if len(issue.path) == 1 else ""
    if issue.message != "unknown field" or not name:
        return issue
    if schema is ModelEvaluation and name in Experiment.model_fields:
        return replace(issue, hint=_NOT_IN_EVALUATIONS.get(name, "leave it out: an evaluation trains nothing"))
    is_experiments = name in Experiment.model_fields or not issue.hint
    if schema is not Study or not is_experiments or not (places := elsewhere(name, Experiment)):
        return issue
    return replace(
        issue, hint=f"a field of the study's experiment: write it under `overrides`, as overrides.{places[0]}"
    )
