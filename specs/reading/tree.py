"""Operations on trees of nodes: merging two files, setting a value by its path, and collecting positions."""

from collections.abc import Iterable
from typing import Any

from specs.errors import Path, Positions
from specs.reading.yaml import YamlNode
from specs.schema.fields import below, carried_over


def merge(under: YamlNode, over: YamlNode, schema: Iterable[Any]) -> YamlNode:
    """Returns `over` merged over `under`. Mappings merge key by key. Everything else is replaced, including a section
    that changes its type.

    Args:
        schema: the alternatives that the schema allows here, see `fields.below`.
    """
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    entries = dict(under.value)
    for key, node in over.value.items():
        entries = carried_over(schema, entries, key, node.value, _value)
    for key, node in over.value.items():
        entries[key] = merge(entries[key], node, below(schema, key)) if key in entries else node
    return YamlNode(entries, over.at)


def assign(root: YamlNode, path: Path, node: YamlNode, schema: Iterable[Any]) -> YamlNode:
    """Returns the tree with the value at `path` replaced. Creates missing mappings on the way."""
    if not path:
        return node
    head, rest = path[0], path[1:]
    under = below(schema, head)
    if isinstance(root.value, list) and isinstance(head, int):
        items = list(root.value)
        items[head] = assign(items[head], rest, node, under)
        return YamlNode(items, root.at)
    entries = dict(root.value) if isinstance(root.value, dict) else {}
    if not rest:
        entries = carried_over(schema, entries, str(head), node.value, _value)
    entries[str(head)] = assign(entries.get(str(head), YamlNode({}, node.at)), rest, node, under)
    return YamlNode(entries, root.at)


def _value(node: YamlNode) -> Any:
    return node.value


def positions_of(root: YamlNode) -> Positions:
    """Returns the positions of the root, of each section, and of every key and list item that is on a different line
    from its parent.

    For any other key or item, `specs.errors.locate` uses the position of its parent. So a line with a thousand seeds is
    stored once.
    """
    positions: Positions = {(): root.at}

    def visit(node: YamlNode, path: Path) -> None:
        children: Iterable[tuple[str | int, YamlNode]] = ()
        if isinstance(node.value, dict):
            children = node.value.items()
        elif isinstance(node.value, list):
            children = enumerate(node.value)
        for part, child in children:
            if not path or child.at != node.at:
                positions[(*path, part)] = child.at
            visit(child, (*path, part))

    visit(root, ())
    return positions
