import typer


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
