"""`rpg init`: writes a commented spec to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STARTER = "experiment.yaml"
SCHEMA = "experiment.schema.json"


IGNORED = "# What rpg records, and can make again.\n.rpg/\n"


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write.")] = Path(),
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Problems: a file (.jsonl, .json, .csv, .tsv or .parquet), or a dataset's directory or Hub id.",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="With --data: the column with the prompts, if its name is not a usual one."
        ),
    ] = "",
    answer: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="With --data: the column with the answers, if its name is not a usual one."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="With --data: the model's directory or Hub id. By default a small model that the run creates.",
        ),
    ] = "",
    reward: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --data: the reward, by name or as FILE.py or FILE.py:FUNCTION; else exact_match."
        ),
    ] = "",
    split: Annotated[
        str, typer.Option(metavar="NAME", help="With a dataset of the Hub: the part to train on, if it is not train.")
    ] = "",
) -> None:
    """Writes a commented spec to start from, its schema for completion in editors, and a .gitignore.

    Overwrites nothing. With --data the spec uses your own problems.
    """
    import json
    import shlex

    import specs
    from specs.errors import Issue, SpecError
    from specs.json_schema import json_schema

    if (model or reward or prompt or answer or split) and not data:
        options = "--prompt, --answer, --model, --reward and --split"
        raise typer.BadParameter(f"{options} apply only to a spec for your own data; name the data with --data")
    if data:
        from pipelines.cli.own_spec import own_spec

        text = own_spec(data, model, reward or "exact_match", directory, prompt=prompt, answer=answer, split=split)
    else:
        starter = Path(specs.__file__).parent / "experiments" / "starter.yaml"
        _, _, text = starter.read_text(encoding="utf-8").partition("\n")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = [
            _write_new(directory / STARTER, f"# yaml-language-server: $schema={SCHEMA}\n{text}"),
            _write_new(directory / SCHEMA, json.dumps(json_schema("experiment")) + "\n"),
            _write_new(directory / ".gitignore", IGNORED),
        ]
    except OSError as error:
        raise SpecError(Issue(f"cannot be written: {error.strerror}", file=str(error.filename or directory))) from None
    if written[0]:
        there = "" if directory.resolve() == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
        print(f"next: {there}rpg run {STARTER}")


def _write_new(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"kept  {path}, which exists")
        return False
    print(f"wrote {path}")
    return True
