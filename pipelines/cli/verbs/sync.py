"""`rpg sync`: sends missing records to the spec's sinks."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import RunsName


def sync(
    name: RunsName,
    again: Annotated[bool, typer.Option("--all", help="Send records again that the sinks already have.")] = False,
) -> None:
    """Sends missing records to TensorBoard, Weights & Biases, MLflow and Trackio, as the experiment's `sinks` say.

    Skips a running run, because the command that executes it sends its records. Exits 1 if a sink fails.
    """
    import sys

    from pipelines.home.home import Home
    from pipelines.home.runs import find_runs, status_of
    from pipelines.sinks.sending import SinkError, is_behind, send, sinks_of
    from specs.machine.files import read_json
    from specs.records import EVALUATION

    home = Home.from_environment()
    failed = False
    for run_id in find_runs(home, name):
        if status_of(home, run_id) == "running":
            print(f"{run_id} is running", file=sys.stderr)
            continue
        if read_json(home.run(run_id) / "run.json").get("kind") == EVALUATION:
            print(f"{run_id} only evaluates a model; sinks receive records of training", file=sys.stderr)
            continue
        if not (sinks := sinks_of(home, run_id)):
            print(f"{run_id} has no `sinks` in its spec", file=sys.stderr)
        for sink in sinks:
            if not again and not is_behind(home, run_id, sink):
                print(f"{run_id}  {sink.type}  has everything")
                continue
            try:
                sent = send(home, run_id, sink)
                print(f"{run_id}  {sink.type}  {sent.steps} steps, evaluated at {sent.evaluated}")
            except SinkError as error:
                failed = True
                print(f"{run_id}  {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
