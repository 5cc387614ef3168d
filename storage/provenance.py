"""Provenance: the origin of a run's settings, and its code, packages, data and machine, as rows from documents.

The trainer records its code and environment with each attempt (`attempts/`); the command that froze the run recorded
the origin of each value of its spec (`provenance.json`). The values themselves are in `spec.json`, the data's digests
in the manifest of their artifact.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specs.documents.reading import numbered, read_document
from specs.errors import dotted
from specs.secrets import HIDDEN, looks_secret
from storage.catalogue import Row

PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "flash-attn",
    "math-verify",
    "numpy",
    "peft",
    "pyarrow",
    "reasoning-gym",
    "safetensors",
    "schedulefree",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
)
"""Packages that a result may depend on. The attempt's document lists all installed packages."""


_as_json = json.JSONEncoder(ensure_ascii=False).encode
COLUMNS = ("run_id", "kind", "name", "value", "origin", "file", "line", "attempt")


def provenance_rows(root: Path, directory: Path) -> list[Row]:
    """Returns a run's rows of the table `provenance`.

    Args:
        root: the home.
        directory: the run's directory.
    """
    found = [*_spec(directory), *_data(root, directory), *_certificate(directory)]
    for path in numbered(directory / "attempts"):
        found += _marked(_attempt(read_document(path)), attempt=int(path.stem))
    return _marked(found, run_id=directory.name)


def unit_provenance(root: Path, unit: str) -> list[Row]:
    """Returns the rows of a unit, by its directory's path in the home; empty if the unit is not a run."""
    if not unit.startswith("runs/"):
        return []
    return _marked(provenance_rows(root, root / unit), unit=unit)


def input_manifest(root: Path, directory: Path, stage: str) -> Row:
    """Returns the manifest of the data or base model that a run used; {} if neither the home nor the run has it.

    Args:
        root: the home.
        directory: the run's directory. An imported run contains the manifests, since its home need not have the
            artifacts.
        stage: data or base.
    """
    fingerprint = read_document(directory / "run.json").get("fingerprints", {}).get(stage, "")
    manifest = read_document(root / "artifacts" / stage / fingerprint[:16] / "manifest.json") if fingerprint else {}
    return manifest or read_document(directory / f"{stage}.json")


def _marked(rows: Iterable[Row], **columns: str | int) -> list[Row]:
    """Adds further columns to the rows in place, and returns them."""
    listed = list(rows)
    for row in listed:
        row.update(columns)
    return listed


def _spec(directory: Path) -> Iterator[Row]:
    spec = read_document(directory / "spec.json")
    for path, origin, file, line in read_document(directory / "provenance.json").get("origins", ()):
        value = _text(_at(spec, path))
        if "environment" in path[:-1] and looks_secret(str(path[-1]), value or ""):
            value = HIDDEN
        row = _row("spec", dotted(path), value)
        row["origin"] = origin
        if line:
            row["file"], row["line"] = file, line
        yield row


def _data(root: Path, directory: Path) -> Iterator[Row]:
    for name, entry in sorted(input_manifest(root, directory, "data").get("files", {}).items()):
        yield _row("data", name, entry.get("sha256") if isinstance(entry, dict) else entry)


def _certificate(directory: Path) -> Iterator[Row]:
    path = directory / "certificate.json"
    if path.is_file():
        yield _row("certificate", "sha256", hashlib.sha256(path.read_bytes()).hexdigest())
        recorded = read_document(path)
        certificates = recorded.get("steps", {"": recorded}).values()
        for claim in dict.fromkeys(each["claim"] for each in certificates if "claim" in each):
            yield _row("certificate", "claim", "none" if claim == "never" else claim)


def _attempt(document: Mapping[str, Any]) -> Iterator[Row]:
    for kind in ("code", "machine", "environment"):
        for name, value in (document.get(kind) or {}).items():
            yield _row(kind, name, value)
    versions = dict(line.partition("==")[::2] for line in document.get("packages") or ())
    for name in PACKAGES:
        if name in versions:
            yield _row("package", name, versions[name])
    if "lock" in document:
        yield _row("lock", "sha256", document["lock"])


def _row(kind: str, name: str, value: Any) -> Row:
    return {"kind": kind, "name": name, "value": _text(value)}


def _at(tree: Any, path: list[str | int]) -> Any:
    """Returns the value at a path of a spec; None if the spec lacks it."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _text(value: Any) -> str | None:
    """Returns a text unchanged, anything else as JSON; None for None."""
    return value if value is None or isinstance(value, str) else _as_json(value)
