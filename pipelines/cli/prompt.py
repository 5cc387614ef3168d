"""The interactive SQL prompt: lines up to a `;`, with a persistent history."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.cli.output import Format, form_of, print_rows, write_stream
from specs.errors import RpgError

if TYPE_CHECKING:
    from storage import Store

_HELP = """A statement ends with `;` and may go over several lines.
.tables          the tables and views
.schema [NAME]   the columns of a table or view, or of all
.quit            leave (so does Ctrl-D); Ctrl-C drops the statement under way"""


def run_prompt(store: "Store", kind: Format, *, safe: bool = False) -> None:
    """Reads statements from stdin and answers each. Explains an invalid statement; if stdin is a pipe, an invalid
    statement ends the command.

    Args:
        safe: as for `csv_text`.
    """
    interactive = sys.stdin.isatty()
    with _history(store, wanted=interactive):
        if interactive:
            print("SQL over everything recorded; .help lists the commands", file=sys.stderr)
        for statement in _statements(interactive):
            try:
                _answer(store, statement, kind, safe=safe)
            except RpgError as error:
                if not interactive:
                    raise
                print(error, file=sys.stderr)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("stopped", file=sys.stderr)


def _answer(store: "Store", statement: str, kind: Format, *, safe: bool) -> None:
    if statement == ".help":
        print(_HELP)
        return
    store.refresh()
    command, _, name = statement.rstrip("; ").partition(" ")
    if command == ".schema":
        _print_columns(store, name.strip(), kind)
        return
    asked = "SHOW TABLES" if command == ".tables" else statement
    with store.stream(asked, form=form_of(kind, safe=safe)) as answer:
        write_stream(answer, kind, None, safe=safe)


def _print_columns(store: "Store", name: str, kind: Format) -> None:
    """Prints the columns of a table or view, or of all of them if no name is given."""
    names = [name] if name else [str(table) for (table,) in store.query("SHOW TABLES").rows]
    rows = []
    for table in names:
        quoted = table.replace('"', '""')
        columns = store.query(f'SELECT column_name, column_type FROM (DESCRIBE "{quoted}")').rows
        rows += [(table, *column) for column in columns]
    print_rows(("table", "column", "type"), rows, as_json=kind is Format.json)


def _statements(interactive: bool) -> Iterator[str]:
    """Yields complete statements and dot commands, until the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = input(("rpg> " if not lines else "...> ") if interactive else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            lines.clear()
            print()
            continue
        if not lines and line.strip() in (".quit", ".exit", "exit", "quit"):
            return
        if not lines and line.strip().startswith("."):
            yield line.strip()
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines.clear()
    if "".join(lines).strip():
        yield "\n".join(lines)


@contextlib.contextmanager
def _history(store: "Store", *, wanted: bool) -> Iterator[None]:
    """Provides line editing, completion of names, and the history file."""
    if not wanted:
        yield
        return
    try:
        import readline
    except ImportError:  # a Python built without it
        yield
        return
    path = store.root / "sql_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    words = [str(name) for (name,) in store.query("SELECT DISTINCT column_name FROM information_schema.columns").rows]
    words += [str(name) for (name,) in store.query("SHOW TABLES").rows]

    def complete(text: str, index: int) -> str | None:
        return [*sorted(word for word in set(words) if word.startswith(text)), None][index]

    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(path)
