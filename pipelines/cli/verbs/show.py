"""`rpg show`: describes one run, on one screen or in full."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, RunId, ServerRecord

_ALL = "Show everything: spec, launch, stages, metrics, evaluations, certificate, events and files."
_ORIGIN = "Show the origin of each value of its spec, and its code, packages and machine."
_SAMPLE = "Responses of training instead: those with the highest and the lowest reward of its last recorded step."
_DATASET = "With --sample: responses of the evaluation on this set, of the last step that it measured."


def show(
    run: RunId,
    everything: Annotated[bool, typer.Option("--all", help=_ALL)] = False,
    origin: Annotated[bool, typer.Option("--origin", help=_ORIGIN)] = False,
    sample: Annotated[bool, typer.Option("--sample", help=_SAMPLE)] = False,
    dataset: Annotated[str, typer.Option(metavar="NAME", help=_DATASET)] = "",
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="With --sample: the step.")] = None,
    response: Annotated[int | None, typer.Option(min=0, metavar="N", help="With --sample: only this response.")] = None,
    profile: ServerRecord = "",
    as_json: AsJson = False,
) -> None:
    """Shows one run on one screen: its state, its answer, a diagnosis, its last step, next commands.

    With --all also its spec, stages, metrics, evaluations, certificate and files. With --sample the policy's prompts
    and responses, turn by turn.
    """

    from pipelines.cli.output import print_json, print_rows
    from pipelines.cli.reading import print_waiting_elsewhere, reading
    from pipelines.cli.show import describe_run, print_run
    from pipelines.home.runs import find_run
    from storage.provenance import COLUMNS, provenance_rows

    if not sample and (step, response, dataset) != (None, None, ""):
        raise typer.BadParameter("these options need --sample", param_hint="--dataset, --step, --response")
    with reading(profile) as record:
        record.refresh(logs=not sample)
        run_id = find_run(record.home, run)
        if sample:
            from pipelines.cli.samples import evaluated_responses, print_responses, sampled_responses

            record.refresh(["rollouts", "turns"], only=[f"runs/{run_id}"])
            if dataset:
                responses = evaluated_responses(record.home, run_id, dataset, step, response)
            else:
                responses = sampled_responses(record.home, run_id, step, response)
            print_json(responses) if as_json else print_responses(responses)
            return
        if origin:
            rows = provenance_rows(record.home.root, record.home.run(run_id))
            columns = COLUMNS if as_json else COLUMNS[1:]
            cells = [[row.get(name, None if as_json else "") for name in columns] for row in rows]
            print_rows(columns, cells, as_json=as_json)
            return
        described = describe_run(record.home, run_id)
        print_waiting_elsewhere(record, [run_id])
    if as_json:
        print_json(described)
    else:
        print_run(described, whole=everything, profile=profile)
