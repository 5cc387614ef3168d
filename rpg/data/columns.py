"""Converts a row of a table into a problem: in the schema of DAPO and verl, or with plain columns."""

import math
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from rpg.data import test_cases
from rpg.data.problems import Message, SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.base import Spec, addition
from specs.schema.data import Source
from specs.schema.fields import nearest


class Columns(Spec):
    """Names of the columns that hold each part of a problem; dots reach into structs. The defaults are the DAPO and
    verl schema."""

    prompt: str = "prompt"
    """Column of the prompt: a list of chat messages ({role, content}) or plain text."""
    answer: str = "reward_model.ground_truth"
    """Column of the gold answer."""
    answer_list: bool = addition(False)
    """Whether the answer's column has a list of texts, which commas join into one answer."""
    data_source: str = ""
    """Column that names the problem's origin. Empty uses the set's own name."""
    user: str = addition("")
    """Column of a list of texts: the user's reply after each turn of the policy, for `rollouter: {type: conversation}`.
    Empty if there is none."""
    keep: tuple[str, ...] = addition(())
    """Further columns that are passed to a reward of type python, and to a template as {metadata.NAME}."""
    shown: tuple[str, ...] = addition(())
    """Further columns that are passed to an agent's program as `metadata`, and to a reward of type python. The policy
    may see them: do not name a column that reveals the answer."""


class TableSource(Source):
    """Base class of the sources whose problems are rows of a table."""

    columns: Columns = Columns()
    """Columns that hold each part of a problem."""
    cluster: str = addition("")
    """Column of an evaluation set that names the passage, theme or template that a problem shares with others.
    Intervals then account for new clusters, not only for new problems. Empty treats every problem as independent."""
    tests: test_cases.Format = addition("none")
    """Format of the tests with which `reward: {type: code}` scores programs, named after sets that use it
    ([which](own-data.md#programs-and-their-tests)). The answer's column may then be missing."""

    def problem(self, row: dict[str, Any], dataset: str, where: str) -> SourceProblem:
        """Returns the problem in a row.

        Args:
            row: column -> value; a struct is a dictionary.
            dataset: name of the set, for rows that do not name their origin.
            where: place of the row, for errors: `train.jsonl, line 3`.
        """
        values: dict[str, Any] = {}
        lacking: list[Issue] = []
        for role, column in self._chosen().items():
            try:
                values[role] = cell(row, column)
            except MissingColumnError:
                if self.tests != "none" and role == "answer":
                    continue
                lacking.append(missing(column, role, names(row), where))
        if lacking:
            raise SpecError(*lacking)
        kept = {column: values[f"{role} {column}"] for role, columns in self._further() for column in columns}
        remarks = {"user": _remarks(values["user"], self.columns.user, where)} if "user" in values else {}
        origin, answer = values.get("data_source"), self.columns.answer
        return SourceProblem(
            _prompt(values["prompt"], self.columns.prompt, where),
            _answer(_joined(values["answer"]) if self.columns.answer_list else values["answer"], answer, where)
            if "answer" in values
            else "",
            dataset if origin is None else str(origin),
            fields=kept,
            metadata=kept | remarks | self._tests(row, where),
            cluster="" if values.get("cluster") is None else str(values["cluster"]),
            shown=self.columns.shown,
            where=where,
        )

    def _tests(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns the parts of the row that the scorer for programs needs; empty without `tests`."""
        if self.tests == "none":
            return {}
        try:
            return {"tests": test_cases.cases_of(self.tests, row).as_data()}
        except test_cases.BadTestsError as error:
            raise SpecError(
                Issue(
                    f"{where}: {error}",
                    path=("tests",),
                    given=self.tests,
                    allowed=", ".join(test_cases.FORMATS),
                    hint="docs/own-data.md says which columns each form has",
                )
            ) from None

    def columns_to_read(self, schema: Any, where: str) -> list[str]:
        """Returns the top-level columns to read from a table with this Arrow schema. Raises SpecError if any is
        missing."""
        known = _leaves(schema)
        chosen = self._chosen()
        there = {
            role: column
            for role, column in chosen.items()
            if column in known or any(name.startswith(column + ".") for name in known)
        }
        lacking = [
            missing(column, role, known, where)
            for role, column in chosen.items()
            if role not in there and not (self.tests != "none" and role == "answer")
        ]
        if lacking:
            raise SpecError(*lacking)
        more = [name for group in test_cases.columns_of(self.tests) for name in group] if self.tests != "none" else []
        columns = [*there.values(), *(name for name in more if name in schema.names)]
        return list(dict.fromkeys(name if name in schema.names else name.split(".")[0] for name in columns))

    def _further(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns the additional columns to keep, by the spec key that names them."""
        return ("keep", self.columns.keep), ("shown", self.columns.shown)

    def _chosen(self) -> dict[str, str]:
        """Returns role -> column for the columns in use."""
        columns = self.columns.model_dump(include={"prompt", "answer", "data_source", "user"})
        kept = {f"{role} {column}": column for role, columns in self._further() for column in columns}
        return {role: column for role, column in {**columns, "cluster": self.cluster, **kept}.items() if column}


def _remarks(value: Any, column: str, where: str) -> list[str]:
    """Returns the user's replies. Raises SpecError if the value is not a list of texts."""
    if isinstance(value, list) and all(isinstance(text, str) and text for text in value):
        return value
    raise SpecError(
        Issue(
            f"{where}: the user's replies must be a list of texts that are not empty",
            path=("columns", "user"),
            given=f"{column}: {value!r}"[:200],
        )
    )


class MissingColumnError(LookupError):
    """Error raised if a row lacks a column."""


def cell(row: dict[str, Any], column: str) -> Any:
    """Returns the value of a column, whose name may reach into structs with dots. Raises MissingColumnError if it is
    missing."""
    if column in row:
        return row[column]
    root, _, rest = column.partition(".")
    if rest and isinstance(row.get(root), dict):
        return cell(row[root], rest)
    raise MissingColumnError(column)


def missing(column: str, role: str, known: Sequence[str], where: str) -> Issue:
    """Returns the error of a missing column, with the existing columns and the nearest name."""
    inside = next((name for name in known if name.split(".")[-1] == column.split(".")[-1]), "")
    hint = f"did you mean `{inside}`?" if inside else nearest(column, known)
    path = ("cluster",) if role == "cluster" else ("columns", role.partition(" ")[0])
    setting = "cluster: ..." if role == "cluster" else f"columns: {{{role}: ...}}"
    return Issue(
        f"{where} has no column `{column}`",
        path=path,
        given=column,
        allowed=", ".join(known),
        hint=hint or f"say which column holds the {role}: `{setting}`",
    )


def names(row: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of all columns of a row. Columns inside structs have dotted names."""
    columns: list[str] = []
    for key, value in row.items():
        columns += names(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return columns


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of an Arrow table or batch. A float of 32 bits keeps its decimal digits: 0.1, not
    0.10000000149011612."""
    columns = [_shortest(column) for column in table.columns]
    return type(table).from_arrays(columns, names=table.schema.names).to_pylist()  # type: ignore[no-any-return]


def _shortest(column: Any) -> Any:
    """Returns an Arrow column with its floats of 32 bits as floats of 64 bits that have the same digits, also inside
    structs."""
    import pyarrow as pa

    if pa.types.is_float32(column.type):
        return column.cast(pa.string()).cast(pa.float64())
    if pa.types.is_struct(column.type) and any(map(has_short_floats, column.type)):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        fields = [_shortest(column.field(index)) for index in range(column.type.num_fields)]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in column.type], mask=column.is_null())
    return column


def has_short_floats(field: Any) -> bool:
    """Returns whether an Arrow field is a float of 32 bits, or a struct with one."""
    import pyarrow as pa

    if pa.types.is_struct(field.type):
        return any(map(has_short_floats, field.type))
    return bool(pa.types.is_float32(field.type))


def _leaves(fields: Any, prefix: str = "") -> list[str]:
    """Returns the leaves of an Arrow schema or struct."""
    import pyarrow as pa

    columns: list[str] = []
    for field in fields:
        name = prefix + field.name
        columns += _leaves(field.type, f"{name}.") if pa.types.is_struct(field.type) else [name]
    return columns


def _prompt(value: Any, column: str, where: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [_plain(_ordered(message)) for message in value]
    raise SpecError(
        Issue(
            f"{where}: `{column}` holds no prompt",
            path=("columns", "prompt"),
            given=repr(value)[:120],
            allowed="text, or a list of messages {role, content}",
        )
    )


def _is_message(value: Any) -> bool:
    """Returns whether a value is a message. A message with tool calls may have no content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str) or (value.get("content") is None and bool(value.get("tool_calls")))


def _ordered(message: Message) -> Message:
    """Returns a message with role and content first, so that its JSON does not depend on the order of its keys."""
    return {"role": message["role"], "content": message.get("content") or ""} | {
        key: message[key] for key in sorted(message.keys() - {"role", "content"})
    }


def _plain(value: Any) -> Any:
    """Returns a message, or a part of one, as plain JSON without null fields, because rows of a Parquet file have all
    fields of all messages."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _joined(value: Any) -> Any:
    texts = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return ", ".join(value) if texts else value


def _answer(value: Any, column: str, where: str) -> str:
    if isinstance(value, float) and math.isfinite(value):  # a column of integers with gaps becomes a column of floats
        return str(int(value) if value.is_integer() else value)
    if isinstance(value, Decimal) and value.is_finite():
        whole = value.to_integral_value()
        return str(int(whole)) if value == whole else f"{value.normalize():f}"
    if isinstance(value, (str, int)) and str(value).strip():
        return str(value)
    raise SpecError(
        Issue(
            f"{where}: `{column}` holds no answer",
            path=("columns", "answer"),
            given=repr(value)[:120],
            allowed="text or a finite number",
        )
    )


def existing_file(path: str) -> Path:
    """Returns the file at a source's `path`. Raises SpecError if it no longer exists."""
    file = Path(path)
    if file.is_file():
        return file
    hint = (
        nearest(file.name, os.listdir(file.parent)) if file.parent.is_dir() else f"there is no directory {file.parent}"
    )
    if file.is_dir():
        hint = "write `source: hub`, whose `path` may be a directory, or name a file in it"
    message = "is a directory, not a file" if file.is_dir() else "no such file"
    raise SpecError(Issue(message, path=("path",), given=path, hint=hint))
