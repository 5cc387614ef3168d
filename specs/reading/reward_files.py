"""Files whose text is put into the tree, so that the spec contains it: rewards of type python, and chat templates."""

import os
import re
from collections.abc import Mapping
from typing import Any

from specs.bounds import NotPlainError, TooLargeError, read_within
from specs.errors import Issue, Path, SpecError
from specs.reading.yaml import YamlNode

OwnRewards = Mapping[str, Mapping[str, Any]]
"""Name -> reward that the name stands for."""
NONE_OWN: OwnRewards = {}
MOST_BYTES = 1 << 16
_FILE = re.compile(r"(^|\.)reward\.(path|code)$")
_TEMPLATE = re.compile(r"(^|\.)prompt\.chat_template$")
_JINJA = ("{%", "{{", "\n")
"""Texts of which a chat template contains at least one, and the path of a file none."""
_HOLDERS = (("matrix", "product"), ("matrix", "zip"), ("parameters",), ("overrides",))
"""Sections whose keys are paths of fields."""


def with_reward_files(root: YamlNode, own: OwnRewards = NONE_OWN) -> YamlNode:
    """Returns the tree with the files' texts as `code`, and with each name in `own` replaced by its reward. Raises
    SpecError."""
    issues: list[Issue] = []
    completed = _completed(root, (), False, own, issues)
    issues += _varied_apart(root)
    if issues:
        raise SpecError(*issues)
    return completed


def _completed(node: YamlNode, path: Path, in_reward: bool, own: OwnRewards, issues: list[Issue]) -> YamlNode:
    if isinstance(node.value, str) and _TEMPLATE.search(".".join(key for key in path if isinstance(key, str))):
        named = node.value and not any(sign in node.value for sign in _JINJA)
        return (_text_of(node, path, issues) or (node, node))[1] if named else node
    if isinstance(node.value, list):
        items = [_completed(child, (*path, i), in_reward, own, issues) for i, child in enumerate(node.value)]
        return YamlNode(items, node.at)
    if not isinstance(node.value, dict):
        return node
    entries = {
        key: _completed(child, (*path, key), in_reward or _names_reward(key), own, issues)
        for key, child in node.value.items()
    }
    kind = entries["type"].value if "type" in entries else None
    if in_reward and isinstance(kind, str) and kind in own:
        entries |= {key: YamlNode(value, node.at) for key, value in own[kind].items()}
        kind = entries["type"].value
    if in_reward and kind == "python" and "path" in entries:
        _put_text(entries, path, issues)
    return YamlNode(entries, node.at)


def _names_reward(key: str) -> bool:
    return key == "reward" or key.endswith(".reward")


def _put_text(entries: dict[str, YamlNode], path: Path, issues: list[Issue]) -> None:
    """Reads the file of a reward into its `code`. An error becomes an issue."""
    named = entries["path"]
    if not isinstance(named.value, str) or not named.value:
        return  # the schema reports it
    if found := _text_of(named, (*path, "path"), issues):
        entries["path"], entries["code"] = found


def _text_of(named: YamlNode, path: Path, issues: list[Issue]) -> tuple[YamlNode, YamlNode] | None:
    """Returns the full path of a file and its text. If the file cannot be read, adds an issue and returns None."""
    assert isinstance(named.value, str)
    folder = os.path.dirname(named.at.file) if named.at.line else ""
    full = os.path.abspath(os.path.join(folder, os.path.expanduser(named.value)))
    at, wrong = named.at, ""
    try:
        data = read_within(full)
        if len(data) > MOST_BYTES:
            raise TooLargeError
        text = data.decode()
    except (TooLargeError, NotPlainError):
        wrong = "is not a file of at most 64 KiB"
    except FileNotFoundError:
        wrong = "no such file"
    except (OSError, ValueError) as error:
        wrong = f"cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
    else:
        return YamlNode(full, at), YamlNode(text, at)
    issues.append(Issue(wrong, path, named.value, "", "", at.file, at.line, at.snippet))
    return None


def _varied_apart(root: YamlNode) -> list[Issue]:
    """Returns issues for keys that would change a reward's file without its text."""
    issues = []
    for section in _HOLDERS:
        holder: YamlNode | None = root
        for key in section:
            holder = holder.value.get(key) if holder and isinstance(holder.value, dict) else None
        for name, node in holder.value.items() if holder and isinstance(holder.value, dict) else ():
            if _FILE.search(name):
                hint = f"vary the whole reward: {name.rpartition('.')[0]}: [{{type: python, path: ...}}, ...]"
                at, where = node.at, (*section, name)
                issues.append(Issue("cannot vary by itself", where, "", "", hint, at.file, at.line, at.snippet))
    return issues
