"""The command line `rpg`. Each verb has a module in `verbs`; the other modules are shared by several verbs.

Slow imports are inside the verb that needs them, so that `rpg --help` and `rpg validate` answer at once.
"""

import errno
import importlib
import os
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli import verbs
from pipelines.cli.words import Verbs
from pipelines.terminal.streams import open_streams, shown_safely
from specs.machine.collecting import collect_rarely

app = typer.Typer(
    name="rpg",
    cls=Verbs,
    help="Declarative experiments for Regularized Policy Gradient post-training of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _verbs in verbs.PANELS.items():
    for _verb in _verbs:
        _module = importlib.import_module(f"{verbs.__name__}.{_verb}")
        if hasattr(_module, "group"):
            app.add_typer(_module.group, name=_verb, rich_help_panel=_panel)
        else:
            _name = _verb.rstrip("_")  # `import` is a Python keyword
            app.command(_name, rich_help_panel=_panel)(getattr(_module, _verb))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"rpg-experiments {version('rpg-experiments')}")
        raise typer.Exit


@app.callback()
def _of_all_verbs(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of a disk that is full, broken, or not writable for this user. They are not bugs, so no traceback is shown."""


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 failed, 2 a user error, 130 interrupted."""
    collect_rarely()
    open_streams()
    with shown_safely():
        try:
            _have_home()
            _run()
        except SystemExit as end:
            if limits := sys.modules.get("storage.statements.limits"):
                limits.exit_if_stuck(_exit_code(end))
            raise
        except Exception:  # a bug of rpg; texts that its message quotes are stripped too
            traceback.print_exc()
            sys.exit(1)


def _have_home() -> None:
    """Gives libraries RPG_HOME for their files, and a user name, if this user has neither HOME nor an account, as in
    many containers. Otherwise Python raises an error, and creates a directory called `~` in the working directory."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = os.path.abspath(os.environ.get("RPG_HOME") or ".rpg")
        os.environ.setdefault("LOGNAME", f"user-{os.getuid()}")


def _exit_code(end: SystemExit) -> int:
    """Returns the exit code that Python would end with. If the exit carries a message instead of a code, prints the
    message and removes it."""
    if not isinstance(end.code, int | None):
        print(end.code, file=sys.stderr)
        end.code = 1
    return end.code or 0


def _run() -> None:
    from specs.errors import RpgError, SpecError
    from specs.machine.files import DiskError

    try:
        try:
            app(prog_name="rpg")
        finally:
            sys.stdout.flush()  # errors of stdout are reported below, not by the interpreter at its end
    except SpecError as error:
        from specs.errors import render

        print(render(error.issues, done=error.done), file=sys.stderr)
        sys.exit(2)
    except RpgError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except DiskError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # typer turns this error into an exit
            raise
        _close_stdout()
        sys.exit(0)  # the reader has closed the pipe
    except BrokenPipeError:
        _close_stdout()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        print(f"{error.filename or 'the output cannot be written'}: {error.strerror}", file=sys.stderr)
        _close_stdout()
        sys.exit(1)
    except Exception as error:
        if not (trouble := _trouble_of_prefect(error)):
            raise
        print(trouble, file=sys.stderr)
        sys.exit(2)


def _trouble_of_prefect(error: Exception) -> str:
    """Returns the file or variable from which Prefect cannot read its settings; empty for any other error.

    Prefect reads them on import, also from files of the working directory that are not meant for it.
    """
    trace = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_globals.get("__name__", "").startswith("prefect.settings") for frame, _ in trace):
        return ""
    there = [path for path in map(Path, ("pyproject.toml", "prefect.toml", ".env")) if path.is_file()]
    broken = [path for path in there if not _is_read(path)]
    places = [*map(str, (path.absolute() for path in broken or there)), *([] if broken else ["PREFECT_* variables"])]
    why = " ".join(str(error).split())
    hint = "fix them, or run rpg in another directory"
    return f"{', '.join(places)}: Prefect cannot read its settings: {why}\n  hint: {hint}"


def _is_read(path: Path) -> bool:
    """Returns whether Prefect can parse a file as the format that its suffix names."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            tomllib.loads(text)
    except (OSError, ValueError):
        return False
    return True


def _close_stdout() -> None:
    """Discards the remaining content of stdout: the interpreter would try to write it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
