"""Problems from a Parquet file."""

from collections.abc import Iterator
from pathlib import Path

from rpg.data.columns import TableSource, existing_file, rows_of
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, require_parquet, require_size
from specs.schema.base import names_path

_MAGIC = b"PAR1"
_BATCH_ROWS = 4096


class ParquetSource(TableSource):
    """A Parquet file."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source. Reads batch by batch, because DAPO's file has 1.8 million rows, most of them copies."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = existing_file(self.path)
        _check(file)
        name, where, size = self.name or file.stem, file.name, file.stat().st_size
        try:
            with pq.ParquetFile(file) as table:
                require_parquet(size, table.metadata)
                columns = self.columns_to_read(table.schema_arrow, where)
                row_number = unfolded = 0
                for batch in table.iter_batches(_BATCH_ROWS, columns=columns):
                    unfolded += batch.nbytes
                    require_size(size, values=row_number, unfolded=unfolded)
                    for row in rows_of(batch):
                        row_number += 1
                        yield self.problem(row, name, f"{where}, row {row_number}")
        except MemoryError:
            raise
        except OversizedError as error:
            raise SpecError(
                Issue(
                    f"the Parquet file decompresses to more than is allowed for its size: {error}",
                    path=("path",),
                    given=str(file),
                )
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(f"the Parquet file cannot be read: {str(error).splitlines()[0]}", file) from error


def _check(file: Path) -> None:
    with file.open("rb") as raw:
        head = raw.read(4)
        raw.seek(max(0, file.stat().st_size - 4))
        tail = raw.read(4)
    if head != _MAGIC:
        raise _unreadable("not a Parquet file", file)
    if tail != _MAGIC:
        raise _unreadable("the Parquet file is cut short", file)


def _unreadable(message: str, file: Path) -> SpecError:
    hint = "copy or download it again" if "Parquet file " in message else "use the source that fits the file: jsonl"
    size = f"{file} ({file.stat().st_size} bytes)"
    return SpecError(Issue(message, path=("path",), given=size, hint=hint))
