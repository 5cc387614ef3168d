"""Reasons why a stage runs: the differences from an earlier plan, down to the spec's line."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pipelines.planning.code import OURS, release

_SHOWN_CHANGES = 3
_SEED = "seeds.0"
"""Path of a run's only seed. If it differs, no run of the cell had this seed, and the old value is not shown."""


def changes(
    stage: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    varied: Collection[str],
    place_of: Callable[[str], str],
) -> str:
    """Returns the differences between a stage's record in an earlier plan and its record now; empty if they are equal.

    Args:
        varied: paths of the matrix: differences in them are named first.
        place_of: returns a field's place in the spec, as text to append to it.
    """
    old, new = before["identity"], now["identity"]
    differing = [path for path in new.keys() | old.keys() if new.get(path, ...) != old.get(path, ...)]
    differing.sort(key=lambda path: (not _is_within(path, varied), path))
    found = [
        f"seed {new[path]} is new{place_of(path)}"
        if path == _SEED and path in new
        else f"{path} {short(old.get(path, 'unset'))} -> {short(new.get(path, 'unset'))}{place_of(path)}"
        for path in differing
    ]
    found += code_changes(stage, before, now)
    found += [f"{read} changed" for read, digest in now["inputs"].items() if before["inputs"].get(read) != digest]
    more = f"; and {len(found) - _SHOWN_CHANGES} more" if len(found) > _SHOWN_CHANGES else ""
    return "; ".join(found[:_SHOWN_CHANGES]) + more


def code_changes(stage: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences in the code of a stage's two records, in words."""
    return list(_code_changes(stage, before, now))


def _code_changes(stage: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new, known = before.get("code", {}), now.get("code", {}), release()
    if before["results"] != now["results"]:
        yield f"{stage} gives other results since {known.version}"
    for name in sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name)):
        if name in known.libraries:
            yield f"{name} {old.get(name, known.libraries[name])} -> {new.get(name, known.libraries[name])}"
        elif name != OURS:
            yield f"{name} changed"
        elif before["results"] == now["results"]:
            again = "is that of {} again" if name not in new else "differs from {}, otherwise than before"
            yield f"the code of {stage} " + (again if name in old else "differs from {}").format(known.version)


def short(value: Any) -> str:
    """Returns a spec's value in a few characters.

    Example: a section that names no type has the names of its fields.
        >>> short({"type": "dual", "low": 0.2}), short({"plateau": 2, "ema_decay": 0.5})
        ('dual/0.2', 'plateau 2/ema_decay 0.5')
    """
    if isinstance(value, dict):
        named = not value.keys() & {"type", "source", "schedule"}
        return "/".join(f"{key} {short(item)}" if named else short(item) for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _is_within(path: str, sections: Collection[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
