"""`rpg init`: a commented spec to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STARTER = "experiment.yaml"


IGNORED = "# What rpg records, and can make again.\n.rpg/\n"


def init(directory: Annotated[Path, typer.Argument(help="Where to write.")] = Path()) -> None:
    """Writes a commented spec to start from, and a .gitignore. Overwrites nothing."""
    import shlex

    import specs
    from specs.errors import Issue, SpecError

    starter = Path(specs.__file__).parent / "experiments" / "starter.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = [
            _write_new(directory / STARTER, starter.read_text("utf-8")),
            _write_new(directory / ".gitignore", IGNORED),
        ]
    except OSError as error:
        raise SpecError(Issue(f"cannot be written: {error.strerror}", file=str(error.filename or directory))) from None
    if written[0]:
        print(f"next: rpg run {shlex.quote(str(directory / STARTER))}")


def _write_new(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"kept  {path}, which exists")
        return False
    print(f"wrote {path}")
    return True
