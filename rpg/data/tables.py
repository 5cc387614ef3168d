"""Problems from files: Parquet, JSONL, and what the `datasets` library loads."""

import json
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from rpg.data import columns
from rpg.data.columns import Path
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.data import HubSource, JsonlSource, ParquetSource
from specs.schema.fields import nearest

_MAGIC = b"PAR1"
_BATCH_ROWS = 4096


def read_parquet(source: ParquetSource, path: Path) -> Iterator[SourceProblem]:
    """The file's rows, batch by batch: DAPO's file has 1.8 million, most of them copies."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _existing(source.path, path)
    _check_parquet(file, path)
    name, where = source.name or file.stem, file.name
    try:
        with pq.ParquetFile(file) as table:
            roots = _check_columns(table.schema_arrow, source, path, where)
            row_number = 0
            for batch in table.iter_batches(_BATCH_ROWS, columns=roots):
                for row in batch.to_pylist():
                    row_number += 1
                    yield columns.problem(row, source.columns, name, path, f"{where}, row {row_number}")
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(f"the Parquet file cannot be read: {str(error).splitlines()[0]}", file, path) from error


def read_jsonl(source: JsonlSource, path: Path) -> Iterator[SourceProblem]:
    """The file's lines; empty ones are passed over."""
    file = _existing(source.path, path)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file.name}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip())
            except UnicodeDecodeError:
                raise _bad_line(f"{where}: not UTF-8", line, path) from None
            except json.JSONDecodeError as error:
                raise _bad_line(f"{where}: not JSON: {error.msg} at character {error.pos + 1}", line, path) from None
            except RecursionError:
                raise _bad_line(f"{where}: nested too deeply", line, path) from None
            if not isinstance(row, dict):
                raise _bad_line(f"{where}: not a JSON object", line, path)
            yield columns.problem(row, source.columns, source.name or file.stem, path, where)


def read_hub(source: HubSource, path: Path) -> Iterator[SourceProblem]:
    """What `datasets.load_dataset` gives for a Hub id or a local directory."""
    table = _load_hub(source, path)
    name = source.name or source.path.rstrip("/").split("/")[-1]
    roots = _check_columns(table.features.arrow_schema, source, path, name)
    for number, row in enumerate(table.select_columns(roots), 1):
        yield columns.problem(row, source.columns, name, path, f"{name}, row {number}")


def _load_hub(source: HubSource, path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    # A directory has no revisions; the argument would only change the cache's key.
    revision = {} if os.path.isdir(source.path) else {"revision": source.revision}
    try:
        return datasets.load_dataset(source.path, split=source.split, **revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        problem = Issue(
            f"no such dataset: {error}",
            path=(*path, "path"),
            given=source.path,
            hint="a directory with data files, or the id of a dataset on the Hub",
        )
    except ConnectionError as error:
        problem = Issue(
            f"the Hub cannot be reached: {error}",
            path=(*path, "path"),
            given=source.path,
            hint="download the dataset where there is a network and give its directory",
        )
    except Exception as error:
        # `datasets` wraps what its readers raise in classes of its own and reports an unknown split as a ValueError.
        split = "split" in str(error)
        problem = Issue(
            f"the dataset cannot be loaded: {str(error).splitlines()[0]}",
            path=(*path, "split" if split else "path"),
            given=source.split if split else source.path,
        )
    raise SpecError(problem)


def _check_columns(schema: Any, source: ParquetSource | HubSource, path: Path, where: str) -> list[str]:
    """The top-level columns to read. SpecError for one that the table lacks."""
    known = _leaves(schema)
    roots: list[str] = []
    for role, column in columns.chosen(source.columns).items():
        if column not in known and not any(name.startswith(column + ".") for name in known):
            raise columns.missing(column, role, known, path, where)
        roots.append(column if column in schema.names else column.split(".")[0])
    return list(dict.fromkeys(roots))


def _leaves(fields: Any, prefix: str = "") -> list[str]:
    import pyarrow as pa

    found: list[str] = []
    for field in fields:
        found += (
            _leaves(field.type, f"{prefix}{field.name}.") if pa.types.is_struct(field.type) else [prefix + field.name]
        )
    return found


def _existing(given: str, path: Path) -> FilePath:
    file = FilePath(given)
    if file.is_file():
        return file
    directory = file.parent.is_dir()
    hint = nearest(file.name, os.listdir(file.parent)) if directory else f"there is no directory {file.parent}"
    message = "is a directory, not a file" if file.is_dir() else "no such file"
    raise SpecError(Issue(message, path=(*path, "path"), given=given, hint=hint))


def _check_parquet(file: FilePath, path: Path) -> None:
    with file.open("rb") as raw:
        head = raw.read(4)
        raw.seek(max(0, file.stat().st_size - 4))
        tail = raw.read(4)
    if head != _MAGIC:
        raise _unreadable("not a Parquet file", file, path)
    if tail != _MAGIC:
        raise _unreadable("the Parquet file is cut short", file, path)


def _unreadable(message: str, file: FilePath, path: Path) -> SpecError:
    hint = "copy or download it again" if "Parquet file " in message else "use the source that fits the file: jsonl"
    size = f"{file} ({file.stat().st_size} bytes)"
    return SpecError(Issue(message, path=(*path, "path"), given=size, hint=hint))


def _bad_line(message: str, line: bytes, path: Path) -> SpecError:
    return SpecError(Issue(message, path=(*path, "path"), given=line.decode("utf-8", "replace").strip()[:80]))
