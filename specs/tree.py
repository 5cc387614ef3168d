"""Trees of nodes: merging one file over another, setting a value by its path, and taking data and positions out."""

from typing import Any

from specs.positions import Path, Position, Positions
from specs.yaml_text import Node

TAGS = ("type", "source", "engine")
"""Keys whose value decides which other keys a mapping may have."""


def merge(below: Node, above: Node) -> Node:
    """`above` laid over `below`: mappings merge key by key; all else replaces, a mapping of another type included."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict) or _differ(below.value, above.value):
        return above
    entries = dict(below.value)
    for key, node in above.value.items():
        entries[key] = merge(entries[key], node) if key in entries else node
    return Node(entries, above.at)


def _differ(below: dict[str, Node], above: dict[str, Node]) -> bool:
    return any(tag in below and tag in above and below[tag].value != above[tag].value for tag in TAGS)


def assign(root: Node, path: Path, node: Node) -> Node:
    """The tree with the value at `path` replaced; mappings on the way are made where there are none."""
    if not path:
        return node
    head, rest = path[0], path[1:]
    if isinstance(root.value, list) and isinstance(head, int) and 0 <= head < len(root.value):
        items = list(root.value)
        items[head] = assign(items[head], rest, node)
        return Node(items, root.at)
    entries = dict(root.value) if isinstance(root.value, dict) else {}
    entries[str(head)] = assign(entries.get(str(head), Node({}, node.at)), rest, node)
    return Node(entries, root.at)


def positions_of(root: Node) -> Positions:
    """The place of every key and list item, the root included."""
    found: Positions = {}

    def visit(node: Node, path: Path) -> None:
        found[path] = node.at
        if isinstance(node.value, dict):
            for key, child in node.value.items():
                visit(child, (*path, key))
        elif isinstance(node.value, list):
            for index, child in enumerate(node.value):
                visit(child, (*path, index))

    visit(root, ())
    return found


def at_one_place(value: Any, at: Position) -> Node:
    """Plain data as a tree that stands on one line."""
    if isinstance(value, dict):
        return Node({str(key): at_one_place(item, at) for key, item in value.items()}, at)
    if isinstance(value, (list, tuple)):
        return Node([at_one_place(item, at) for item in value], at)
    return Node(value, at)
