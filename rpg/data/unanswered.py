"""The items of evaluation sets that are scored by likelihood, as the data stage publishes them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rpg.data.problems import SourceProblem, content_id

_FILE = "unanswered.parquet"


@dataclass(frozen=True, slots=True)
class Item:
    """A question with choices, or a text to predict."""

    item_id: str
    """The item's place in its set, and a hash of its text."""
    dataset: str
    kind: str
    """Kind of the item's source."""
    text: str
    """The question, or the text to predict."""
    answer: str
    """The right choice; empty for a text."""
    settings: dict[str, Any]
    """Metadata that the source passes to the measurement."""


def item_of(problem: SourceProblem, kind: str, number: int) -> Item:
    """Returns an item from its source's `number`-th problem, counted from 0."""
    text = str(problem.prompt)
    identity = f"{number:06}-{content_id(text)}"
    return Item(identity, problem.dataset, kind, text, problem.answer, problem.metadata)


def write_items(items: Iterable[Item], data_dir: Path) -> None:
    """Writes the items of all sets, if there are any."""
    rows = [
        {
            "item_id": each.item_id,
            "dataset": each.dataset,
            "kind": each.kind,
            "text": each.text,
            "answer": each.answer,
            "settings": json.dumps(each.settings, ensure_ascii=False),
        }
        for each in items
    ]
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), data_dir / _FILE)


def load_items(data_dir: Path) -> list[Item]:
    """Returns the items of all sets, in the order of the spec."""
    file = data_dir / _FILE
    rows = pq.read_table(file).to_pylist() if file.is_file() else []
    return [Item(**row | {"settings": json.loads(row["settings"])}) for row in rows]
