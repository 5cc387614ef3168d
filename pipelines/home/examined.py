"""Nodes whose GPUs `rpg doctor --gpu` has checked."""

from collections.abc import Collection
from pathlib import Path

from pipelines.home.home import Home
from specs.machine.files import now, read_json, write_json


def note_examined(home: Home, hosts: Collection[str], launcher: str) -> None:
    """Records that the GPUs of hosts were checked, whatever the result, as the launcher of that type reaches them."""
    for host in filter(None, hosts):
        path = _nodes(home) / f"{host}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"host": host, "launcher": launcher, "at": now()})


def is_examined(home: Home, launcher: str, host: str = "") -> bool:
    """Returns whether GPUs were checked: those of a host, or without one those of any node of the launcher's type."""
    if host:
        return (_nodes(home) / f"{host}.json").is_file()
    return any(read_json(path).get("launcher") == launcher for path in _nodes(home).glob("*.json"))


def _nodes(home: Home) -> Path:
    return home.root / "gpu-checks" / "nodes"
