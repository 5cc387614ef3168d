"""rpg replay: recorded rollouts under other objectives."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, RunId

if TYPE_CHECKING:
    from pipelines.replay.run import RunReplay

_STEP_METRICS = ("loss", "weight/variance", "weight/ess")
_FURTHEST = ("step", "rollout_id", "position", "token_id", "advantage", "ratio", "weight")


def replay(
    run: RunId,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help="A mapping (`{type: grpo}`), a file with one, or an experiment's spec file; may be repeated."
            " Without it, the run's own objective."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="objective.FIELD or advantage.FIELD.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="Replay with each value: objective.clip.low=0.1,0.2,0.3; with several sweeps, every combination.",
        ),
    ] = None,
    step: Annotated[list[int] | None, typer.Option(help="Only this step; may be repeated.")] = None,
    steps: Annotated[str, typer.Option(metavar="FIRST-LAST", help="Only these steps, both included.")] = "",
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients",
            help="Also compute the gradients by the model's parameters, at the weights of kept checkpoints. The steps"
            " are the last one with a checkpoint, or the chosen ones. Runs the model.",
        ),
    ] = False,
    at: Annotated[
        str,
        typer.Option(
            metavar="start|end",
            help="With --gradients: at the step's initial weights (the default), or at its final weights, where"
            " ratios differ from 1 and clips act.",
        ),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with the figures over the swept values.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recomputes the loss and its gradient weights on recorded rollouts under other objectives.

    No model is run except for `--gradients`, and for a divergence that is summed over tokens (`objective.kl`), at the
    steps whose checkpoint is kept. Logprobs, rewards and the reference come from the record; advantages are recomputed
    from the rewards: as the given spec file says; without one, as in the run if the objective has the run's type; else
    as the objective was published. Each token is evaluated at the policy of the update that last trained on it.
    """
    import sys

    from specs.machine.parent import before_torch

    before_torch()
    import torch

    from pipelines.cli.output import print_json, write_bytes
    from pipelines.home.home import Home
    from pipelines.home.runs import find_run
    from pipelines.replay.gradients import Moment
    from pipelines.replay.objectives import alternatives, own_objective
    from pipelines.replay.page import page
    from pipelines.replay.rows import ChosenSteps
    from pipelines.replay.run import replay_run
    from specs.reading.recorded import recorded_spec

    if at and (not gradients or at not in tuple(Moment)):
        raise typer.BadParameter("start or end, and with --gradients", param_hint="--at")
    chosen = ChosenSteps(*_range(steps), tuple(step or ()))
    home = Home.from_environment()
    run_id = find_run(home, run)
    spec = recorded_spec(home.run(run_id))
    others = alternatives(spec, objective or (), overrides=overrides or (), sweeps=sweep or ())
    if not gradients and not any(each.sum for each in (own_objective(spec), *others)):
        torch.set_num_threads(1)  # no model is run
    replays = replay_run(
        home, run_id, others, chosen=chosen, gradients=Moment(at or Moment.start) if gradients else None
    )
    if not replays[0].reproduction.holds:
        print(f"warning: the run's own objective does not reproduce the record: {replays[0].reproduction}; the record"
        " was written by other code, or the spec was changed", file=sys.stderr)  # fmt: skip
    if plot:
        write_bytes(page(replays).encode(), plot)
    several = bool(sweep) or len(objective or ()) > 1
    if as_json:
        documents = [replayed.as_json() for replayed in replays]
        print_json(documents if several else documents[0])
    elif several:
        _print_table(replays)
    else:
        _print(replays[0])


def _range(steps: str) -> tuple[int, int]:
    if not steps:
        return 0, 2**31 - 1
    if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", steps)):
        raise typer.BadParameter("FIRST-LAST, for example 10-20", param_hint="--steps")
    return int(match[1]), int(match[2] or match[1])


def _print_heading(replayed: "RunReplay") -> None:
    tokens = sum(entry["tokens"] for entry in replayed.steps)
    untrained = sum(entry["untrained_tokens"] for entry in replayed.steps)
    print(f"{replayed.run_id}: {len(replayed.steps)} steps, {tokens} tokens", end="")
    print(f" ({untrained} more were not trained on and are left out)" if untrained else "")
    print(f"recorded  {replayed.recorded.setting}")
    print(f"sums      {replayed.sums.sentence}\n" if replayed.sums.sentence else "", end="")


def _print_table(replays: Sequence["RunReplay"]) -> None:
    """Prints one row per objective."""
    from pipelines.cli.output import print_table
    from pipelines.replay.page import FIGURES, table

    _print_heading(replays[0])
    sentences = dict.fromkeys(sentence for replayed in replays for sentence in replayed.left_out)
    print("".join(f"left out  {sentence}\n" for sentence in sentences))
    rows = [[label, *("" if value is None else value for value in figures)] for label, figures in table(replays)]
    print_table(["objective", *FIGURES], rows)
    _print_gradients(replays)


def _print(replayed: "RunReplay") -> None:
    """Prints two objectives side by side."""
    from pipelines.cli.output import print_table

    _print_heading(replayed)
    print(f"replayed  {replayed.replayed.setting}")
    print("".join(f"left out  {sentence}\n" for sentence in replayed.left_out))
    recorded, other = replayed.overall["recorded"], replayed.overall["replayed"]
    print_table(("overall", "recorded", "replayed"), [[name, recorded.get(name, ""), other[name]] for name in other])
    print()
    print(_gradient_sentence(replayed))
    columns = ["step", "tokens", *(f"{name} {side}" for name in _STEP_METRICS for side in ("rec.", "rep.")), "cosine"]
    rows = [
        [entry["step"], entry["tokens"]]
        + [entry[side].get(name, "") for name in _STEP_METRICS for side in ("recorded", "replayed")]
        + ["" if entry["cosine"] is None else entry["cosine"]]
        for entry in replayed.steps
    ]
    print()
    print_table(columns, rows)
    if replayed.furthest:
        columns = [*_FURTHEST, *(f"replayed_{name}" for name in ("advantage", "ratio", "weight")), "apart"]
        print("\nFurthest apart, by a token's share of its step's gradient")
        print_table(columns, [[token[name] for name in columns] for token in replayed.furthest])
    _print_gradients([replayed])


def _print_gradients(replays: Sequence["RunReplay"]) -> None:
    from pipelines.cli.output import print_table

    entries = [(replayed.replayed.label, entry) for replayed in replays for entry in replayed.gradients or ()]
    if entries:
        columns = list(entries[0][1])
        rows = [[label, *("" if entry[name] is None else entry[name] for name in columns)] for label, entry in entries]
        print("\nGradients by the parameters, at the weights of the checkpoint")
        print_table(["objective", *columns], rows)


def _gradient_sentence(replayed: "RunReplay") -> str:
    overall = replayed.overall
    if not overall["recorded"]:
        return "gradient weights: not compared, since the run's own objective could not be replayed"
    if overall["cosine"] is None:
        return "gradient weights: one of the two objectives has no gradient weights"
    return (
        f"gradient weights, one entry per token, aggregation included: cosine {overall['cosine']:.4f},"
        f" length x{overall['length']:.3g}; {overall['flipped']:.1%} of the tokens change sign,"
        f" {overall['zeroed']:.1%} become zero, {overall['activated']:.1%} become nonzero"
    )
