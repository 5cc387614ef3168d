"""`rpg plan`: shows the stages to run, the finished ones, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, Overrides, SpecFile
from pipelines.jobs.plan import MOST_RUNS

_RESOLVED = "Each cell's full spec with the origin of each value instead: file and line, --set, published, default."

_MEAN = "Mean number of tokens of a {} for the estimate of a step's time. 0: the largest that the spec allows."
_PLACEMENT = "Each split of the GPUs between training and vLLM's engines, with the seconds of a step."


def plan(
    file: SpecFile,
    overrides: Overrides = None,
    all_runs: Annotated[
        bool,
        typer.Option("--all", help=f"Show each run, even if there are more than {MOST_RUNS}; by default a summary."),
    ] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help=_RESOLVED)] = False,
    mean_response: Annotated[int, typer.Option("--mean-response", min=0, help=_MEAN.format("response"))] = 0,
    mean_prompt: Annotated[int, typer.Option("--mean-prompt", min=0, help=_MEAN.format("prompt"))] = 0,
    placement: Annotated[bool, typer.Option("--placement", help=_PLACEMENT)] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the resolved runs and stages, the batch arithmetic, and estimates of memory and tokens. Changes nothing.

    It checks the data and the model of unfinished runs, as `rpg validate --deep` does: exit code 2 if anything is wrong
    with them, if HF_HUB_OFFLINE forbids a necessary download, or if this machine would score responses but
    cannot: the reward needs bubblewrap. Other missing requirements are warnings. Many runs are summarized.

    For a study: the search space, the lowest and highest cost of the search and its confirmation, and the progress.
    """
    import json
    import sys

    from pipelines.cli.resolved import print_resolved
    from pipelines.home.home import Home
    from pipelines.jobs.load import load
    from pipelines.jobs.plan import findings, plan_data, print_plan, runs_document
    from pipelines.planning.plan import make_plan
    from pipelines.planning.steps.parts import MeanLengths
    from pipelines.terminal.console import SafeConsole
    from specs.errors import SpecError, render

    means = MeanLengths(mean_response, mean_prompt)
    home = Home.from_environment()
    document = load(file, overrides or (), home)
    if resolved:
        print_resolved(runs_document(document), as_json=as_json)
        return
    made = make_plan(runs_document(document), home)
    if as_json:
        print(json.dumps(plan_data(document, made, home, means=means), indent=2))
    else:
        # A pipe has no width to fit into.
        console = SafeConsole(soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
        print_plan(document, made, home, console, all_runs=all_runs, means=means, placement=placement)
    errors, warnings = findings(document, made, home)
    if warnings:
        print(render(warnings, noun="warning"), file=sys.stderr)
    if errors:
        raise SpecError(*errors)
