"""Execution of one checked statement, within its limits and with its rows in batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from storage.errors import QueryError, explain, is_about_files
from storage.snapshot import Snapshot
from storage.statements.limits import Limits, Stopwatch, memory_limit, memory_text, out_of_memory
from storage.statements.reading import require_reading
from storage.statements.texts import Form, changed_by, with_texts, written_by_duckdb

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 16_384
_Answer = TypeVar("_Answer")
Params = Sequence[object] | Mapping[str, object]


class Statement:
    """A statement on a snapshot's connection. The connection runs nothing else until the statement is closed.

    Its rows are read once, as Python values or as Arrow batches: the first without loading Arrow.
    """

    def __init__(self, snapshot: Snapshot, limits: Limits) -> None:
        self._snapshot = snapshot
        self._connection = snapshot.connection
        self._watch = Stopwatch(self._connection, limits.seconds)
        self._memory_limit = memory_limit(self._connection)
        self.columns: tuple[str, ...] = ()
        """The names of the answer's columns, in order. Names may repeat."""
        self.is_text = False
        """Whether the rows have a single column with the text of each row."""
        self._open = False

    def start(self, sql: str, params: Params, form: Form | None = None) -> None:
        """Runs the statement up to its first rows.

        Args:
            form: the output format of the rows. DuckDB writes each row as text, if it can; see `is_text`. Values that
                the format would change are DuckDB's text.
        Raises:
            QueryError: the statement is wrong, is not read-only, or exceeds its limits.
            duckdb.Error: a file is damaged or missing.
        """
        self._within_limits(lambda: self._prepare(sql))
        # Rolled back at the end, so that a type that a PIVOT creates does not stay for the next statement.
        self._connection.begin()
        self._open = True
        text = self._within_limits(lambda: self._as_text(sql, params, form)) if form else None
        self._within_limits(lambda: self._connection.execute(text or sql, params or None))
        if text is None:
            columns = [(name, str(kind)) for name, kind, *_ in self._connection.description or ()]
            if form and changed_by(form, columns):
                self._read_as_texts(sql, params, columns, form)
            self.columns = tuple(name for name, _ in columns)
        self.is_text = text is not None

    def _read_as_texts(self, sql: str, params: Params, columns: Sequence[tuple[str, str]], form: Form) -> None:
        """Runs the query again, with columns of some types as text. Raises QueryError if it cannot be a subquery."""
        outer = with_texts(sql.rstrip("; \n\t"), columns, form)
        try:
            self._connection.extract_statements(outer)
            self._watch.run(lambda: self._connection.execute(outer, params or None))
        except duckdb.Error as error:
            self.close()
            name, kind = changed_by(form, columns)[0]
            hint = f"write `{name}::VARCHAR` in the query"
            raise QueryError(
                f"the column {name} is of type {kind}, which {form} cannot hold\n  hint: {hint}"
            ) from error

    def _as_text(self, sql: str, params: Params, form: Form) -> str | None:
        """Returns the query that writes this query's rows as text; None if the columns are not known before it runs."""
        inner = sql.rstrip("; \n\t")
        try:
            columns = self._connection.execute(f"DESCRIBE {inner}", params or None).fetchall()
            text = written_by_duckdb(inner, [(name, kind) for name, kind, *_ in columns], form)
            self._connection.extract_statements(text or "")  # a comment after the semicolon breaks the outer query
        except duckdb.Error:
            return None  # not usable as a subquery, or a mistake, which is reported when it runs by itself
        self.columns = tuple(name for name, *_ in columns)
        return text

    @property
    def stuck(self) -> bool:
        """Whether the statement did not stop on request. Its connection must not be closed then."""
        return self._watch.stuck

    def rows(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows as plain Python values, in batches. Times are UTC. Raises like `start`."""
        while rows := self._within_limits(lambda: self._connection.fetchmany(_BATCH_ROWS)):
            yield rows

    def batches(self) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
        """Returns the columns and their types, and the rows. Raises like `start`, also while the batches are read."""
        reader = self._within_limits(lambda: self._connection.to_arrow_reader(_BATCH_ROWS))
        return reader.schema, iter(lambda: self._within_limits(lambda: next(reader, None)), None)

    def table(self) -> "pa.Table":
        """Returns all rows. Raises like `start`, and QueryError if the answer is larger than the memory limit."""
        import pyarrow as pa

        schema, read = self.batches()
        batches, num_bytes = [], 0
        for batch in read:
            batches.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > self._memory_limit:
                raise QueryError(
                    f"the answer needs more than {memory_text(self._memory_limit)}, the memory limit\n"
                    "  hint: `--memory SIZE` allows more;"
                    " `-o FILE` and `--format csv` do not keep the whole answer in memory"
                )
        return pa.Table.from_batches(batches, schema)

    def close(self) -> None:
        """Ends the statement."""
        if self._open and not self.stuck:
            self._open = False
            self._connection.rollback()

    def _prepare(self, sql: str) -> None:
        require_reading(self._connection, sql)
        self._snapshot.provide(sql)

    def _within_limits(self, part: Callable[[], _Answer]) -> _Answer:
        """Returns the answer of a part of the work. Closes the statement after an error."""
        try:
            return self._watch.run(part)
        except (duckdb.Error, OSError) as error:
            self.close()
            cause = error if isinstance(error, duckdb.Error) else _from_arrow(error)
            if isinstance(cause, duckdb.OutOfMemoryException):
                raise QueryError(_needs_too_much(cause, self._memory_limit)) from error
            if is_about_files(cause, self._snapshot.root):
                raise cause from error
            self._snapshot.provide_all()
            raise QueryError(explain(self._connection, cause)) from error
        except BaseException:
            self.close()
            raise


def _from_arrow(error: OSError) -> duckdb.Error:
    """Returns the DuckDB error behind an Arrow error that occurs while batches are read. The text begins with the
    error's kind."""
    kind = str(error).partition(":")[0].replace(" ", "").lower().removesuffix("error") + "exception"
    classes = {name.lower(): value for name, value in vars(duckdb).items() if name.endswith("Exception")}
    made: duckdb.Error = classes.get(kind, duckdb.Error)(str(error))
    return made


def _needs_too_much(error: duckdb.Error, limit: int) -> str:
    if "max_temp_directory_size" in str(error):
        return "the query needs more disk than is free below the home\n  hint: `rpg gc` frees what nothing needs"
    return out_of_memory(limit)
