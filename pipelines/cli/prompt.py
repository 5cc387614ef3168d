"""The interactive SQL prompt: lines up to a `;`, with a history that stays."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.cli.output import Format, write_result
from pipelines.home import Home
from specs.errors import RpgError

if TYPE_CHECKING:
    from storage import Store

_HELP = """A statement ends with `;` and may go over several lines. DESCRIBE metrics; lists a table's columns.
.tables    the tables and views
.quit      leave (so does Ctrl-D); Ctrl-C drops the statement under way"""


def run_prompt(home: Home, chosen: Format) -> None:
    """Reads statements from stdin and answers each. A wrong one is explained; from a pipe it ends the command."""
    from storage import Store

    interactive = sys.stdin.isatty()
    with Store.open(home.root) as store, _history(home, store, wanted=interactive):
        if interactive:
            print("SQL over everything recorded; .help says more", file=sys.stderr)
        for statement in _statements(interactive):
            try:
                _answer(store, statement, chosen)
            except RpgError as error:
                if not interactive:
                    raise
                print(error, file=sys.stderr)


def _answer(store: "Store", statement: str, chosen: Format) -> None:
    if statement == ".help":
        print(_HELP)
        return
    store.refresh()
    result = store.query("SHOW TABLES" if statement == ".tables" else statement)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    write_result(result, chosen, None)


def _statements(interactive: bool) -> Iterator[str]:
    """Whole statements and dot commands, until the end of input."""
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
def _history(home: Home, store: "Store", *, wanted: bool) -> Iterator[None]:
    """Line editing, completion of names, and the history file."""
    if not wanted:
        yield
        return
    try:
        import readline
    except ImportError:  # a Python built without it
        yield
        return
    path = home.root / "sql_history"
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
