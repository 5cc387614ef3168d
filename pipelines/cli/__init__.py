"""The command line `rpg`. Every module registers its verbs; what is heavy is imported inside the verb."""

import importlib
import sys

import typer

MODULES = ("specs", "run", "plan", "query", "maintain", "compare", "study", "certify", "replay", "services")

app = typer.Typer(
    name="rpg",
    help="Declarative experiments for Regularized Policy Gradient post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in MODULES:
    importlib.import_module(f"{__name__}.{_module}").register(app)


def main() -> None:
    """Runs the command line: exit 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    from specs.errors import RpgError, SpecError

    try:
        app()
    except SpecError as error:
        from specs.errors import render

        print(render(error.issues, done=error.done), file=sys.stderr)
        sys.exit(2)
    except RpgError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
