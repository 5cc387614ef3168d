"""Reasons why training rows are missing: the spec excludes them, or they were freed since."""

from pathlib import Path

from specs.machine.files import read_json
from storage.catalogue import FREED


def why_incomplete(directory: Path, table: str) -> str:
    """Explains why rows of `rollouts` or `tokens` are missing; empty if all of them were to be recorded.

    Args:
        directory: the run's.
    """
    if freed := read_json(directory / FREED).get(table):
        return f"`rpg gc` freed them on {freed['freed_at'][:10]}, because of record.keep_days {freed['keep_days']:g}"
    for path in sorted((directory / "attempts").glob("*.json")):
        record = read_json(path).get("record", {})
        if record.get(table) == "none":
            return f"the run was trained with record.{table}: none"
        if record.get(table) == "sampled":
            share = f"record.sampled_share: {record['sampled_share']:g}"
            return f"the run was trained with record.{table}: sampled, {share}"
    return ""
