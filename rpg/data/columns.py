"""From a row of a table to a problem: the DAPO and verl schema, or plain columns."""

from collections.abc import Sequence
from typing import Any

from rpg.data.problems import Message, SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.data import Columns
from specs.schema.fields import nearest

Path = tuple[str | int, ...]


class MissingColumnError(LookupError):
    """The row or table has no such column."""


def chosen(columns: Columns) -> dict[str, str]:
    """Role -> column, those that are in use."""
    return {role: column for role, column in columns.model_dump().items() if column}


def cell(row: dict[str, Any], column: str) -> Any:
    """The value of a column, whose name may reach into structs with dots. MissingColumnError where there is none."""
    if column in row:
        return row[column]
    root, _, rest = column.partition(".")
    if rest and isinstance(row.get(root), dict):
        return cell(row[root], rest)
    raise MissingColumnError(column)


def missing(column: str, role: str, known: Sequence[str], path: Path, where: str) -> SpecError:
    """No such column: which there are, and the nearest."""
    inside = next((name for name in known if name.split(".")[-1] == column.split(".")[-1]), "")
    hint = f"did you mean `{inside}`?" if inside else nearest(column, known)
    return SpecError(
        Issue(
            f"{where} has no column `{column}`",
            path=(*path, "columns", role),
            given=column,
            allowed=", ".join(known),
            hint=hint or f"say which column holds the {role}: `columns: {{{role}: ...}}`",
        )
    )


def names(row: dict[str, Any], prefix: str = "") -> list[str]:
    """Every column of a row, those inside structs with dots."""
    found: list[str] = []
    for key, value in row.items():
        found += names(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return found


def problem(row: dict[str, Any], columns: Columns, dataset: str, path: Path, where: str) -> SourceProblem:
    """The problem that a row holds; `where` names the row, for errors."""
    values: dict[str, Any] = {}
    for role, column in chosen(columns).items():
        try:
            values[role] = cell(row, column)
        except MissingColumnError:
            raise missing(column, role, names(row), path, where) from None
    origin = values.get("data_source")
    return SourceProblem(
        _prompt(values["prompt"], columns.prompt, path, where),
        _answer(values["answer"], columns.answer, path, where),
        dataset if origin is None else str(origin),
    )


def _prompt(value: Any, column: str, path: Path, where: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise SpecError(
        Issue(
            f"{where}: `{column}` holds no prompt",
            path=(*path, "columns", "prompt"),
            given=repr(value)[:120],
            allowed="text, or a list of messages {role, content}",
        )
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _answer(value: Any, column: str, path: Path, where: str) -> str:
    if isinstance(value, (str, int, float)) and str(value).strip():
        return str(value)
    raise SpecError(
        Issue(
            f"{where}: `{column}` holds no answer",
            path=(*path, "columns", "answer"),
            given=repr(value)[:120],
            allowed="text or a number",
        )
    )
