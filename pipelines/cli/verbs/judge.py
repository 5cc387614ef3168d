"""`rpg judge`: compares judges with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pipelines.cli.options import AsJson, Overrides, SpecFile
from pipelines.cli.words import Verbs

if TYPE_CHECKING:
    from rpg.rewards.functions.judge import Judge
    from specs.document import Document

group = typer.Typer(cls=Verbs, help="Check how well judges agree with labels.", no_args_is_help=True)


@group.callback()
def _of_all() -> None:
    pass


@group.command()
def calibrate(file: SpecFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Compares the spec's judges with labels: agreement, kappa, biases, with intervals over problems.

    Each judge names its labels: `labels: FILE` of JSON lines with prompt, response, label, and optionally answer and
    author. The measurement is kept in the home, and reports show it next to the judge's scores.
    """
    import json
    from dataclasses import asdict

    from pipelines.home.home import Home
    from pipelines.planning.calibration import keep
    from rpg.rewards.judges.calibration import judged, labelled_in
    from rpg.statistics.agreement import agreement_of
    from specs.errors import SpecError
    from specs.loader import load_any
    from specs.study_document import StudyDocument

    home = Home.from_environment()
    loaded = load_any(file, tuple(overrides or ()))
    document = loaded.experiment if isinstance(loaded, StudyDocument) else loaded
    records = []
    for judge in _judges(document):
        try:
            rows = labelled_in(judge)
            home.create()
            found = judged(judge, rows, home.verdicts)
            if not len(found.judgements.judged):
                raise SpecError(_no_verdict(judge))
            measured = asdict(agreement_of(found.judgements))
        except SpecError as error:
            raise SpecError(*map(document.locate, error.issues)) from None
        position = asdict(found.position) if found.position else None
        records.append({"judge": judge.model, **measured, "position": position, "unread": found.unread})
        keep(home, judge, records[-1])
    if as_json:
        print(json.dumps(records, indent=2))
    for record in [] if as_json else records:
        _print(record)


def _judges(document: Document) -> list[Judge]:
    """Returns the spec's judges that name labels. Raises SpecError if no judge does, or if a judge's
    requirements are not met."""
    from rpg.rewards.functions.judge import Judge
    from specs.errors import Issue, SpecError

    parts = [part for _, reward in document.experiment.rewards() for part in reward.parts()]
    judges = [part for part in parts if isinstance(part, Judge)]
    if not judges:
        raise SpecError(document.locate(Issue("no judge scores anything", ("reward",))))
    labelled = [judge for judge in judges if judge.labels]
    if not labelled:
        hint = "write labels: FILE.jsonl, rows with prompt, response and label"
        raise SpecError(document.locate(Issue("the judge names no labels", ("reward",), judges[0].model, hint=hint)))
    if issues := [issue for judge in labelled if (issue := judge.lacks())]:
        raise SpecError(*map(document.locate, issues))
    return list({repr(judge): judge for judge in labelled}.values())


def _no_verdict(judge: Judge) -> Any:
    from specs.errors import Issue

    hint = "the replies are in the home's directory `verdicts`"
    return Issue("the judge returned no verdict that could be parsed", ("reward",), judge.model, hint=hint)


_LINES = {
    "agreement": "agreement, share of answers",
    "kappa": "Cohen's kappa",
    "weighted_kappa": "kappa, squared differences as weights",
    "leniency": "the judge's number minus the label's",
    "length": "rise of that difference for an answer twice as long",
    "own": "that difference for the judge's own answers, minus that for other answers",
    "position": "preference for the answer shown first",
}


def _print(record: dict[str, Any]) -> None:
    import math

    from rich.table import Table

    from pipelines.terminal.console import SafeConsole

    console = SafeConsole(soft_wrap=True)
    unread = f"; {record['unread']} without a verdict" if record["unread"] else ""
    console.print(f"{record['judge']}: {record['count']} labels of {record['problems']} problems{unread}", markup=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, words in _LINES.items():
        figure = record[name]
        if figure is None or math.isnan(figure["value"]):
            continue
        known = not math.isnan(figure["low"])
        table.add_row(
            f"  {words}",
            f"{figure['value']:+z.3f}",
            f"{figure['low']:+z.3f} to {figure['high']:+z.3f}" if known else "",
        )
    console.print(table)
