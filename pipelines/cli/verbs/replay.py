"""rpg replay: recorded rollouts under another objective."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, RunId

if TYPE_CHECKING:
    from pipelines.replay import RunReplay

_STEP_METRICS = ("loss", "weight/variance", "weight/ess")
_FURTHEST = ("step", "rollout_id", "position", "token_id", "advantage", "ratio", "weight")


def replay(
    run: RunId,
    objective: Annotated[
        str,
        typer.Option(
            help="A mapping (`{type: grpo}`), a file that holds one, or an experiment's spec file;"
            " without it, the run's own objective."
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="objective.FIELD or advantage.FIELD.")
    ] = None,
    step: Annotated[list[int] | None, typer.Option(help="Only this step; may be given several times.")] = None,
    steps: Annotated[str, typer.Option(metavar="FIRST-LAST", help="Only these steps, both included.")] = "",
    as_json: AsJson = False,
) -> None:
    """Recompute the loss and its gradient weights on recorded rollouts under another objective.

    No model is run. Logprobs, rewards and the reference are those on record; advantages are computed anew from the
    rewards: as a spec file says, else as the run's own where the objective is of the run's type, else as the objective
    was published. Each token counts at the policy of the update that last trained on it.
    """
    import sys

    import torch

    from pipelines.cli.output import print_json
    from pipelines.home import Home
    from pipelines.replay import replay_run
    from pipelines.runs import find_run

    torch.set_num_threads(1)
    first, last = _range(steps)
    home = Home.from_environment()
    replayed = replay_run(
        home, find_run(home, run), objective, overrides=overrides or (), first=first, last=last, only=step or ()
    )
    if not replayed.reproduction.holds:
        print(f"warning: the run's own objective does not give back what was recorded: {replayed.reproduction}; other"
              " code wrote it, or its spec was changed", file=sys.stderr)  # fmt: skip
    if as_json:
        print_json(replayed.as_json())
    else:
        _print(replayed)


def _range(steps: str) -> tuple[int, int]:
    if not steps:
        return 0, 2**31 - 1
    if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", steps)):
        raise typer.BadParameter("FIRST-LAST, for example 10-20", param_hint="--steps")
    return int(match[1]), int(match[2] or match[1])


def _print(replayed: "RunReplay") -> None:
    from pipelines.cli.output import table_text
    from pipelines.replay import setting

    tokens = sum(entry["tokens"] for entry in replayed.steps)
    untrained = sum(entry["untrained_tokens"] for entry in replayed.steps)
    print(f"{replayed.run_id}: {len(replayed.steps)} steps, {tokens} tokens", end="")
    print(f" ({untrained} more were not trained on and are left out)" if untrained else "")
    print(f"recorded  {setting(replayed.recorded)}\nreplayed  {setting(replayed.replayed)}")
    print("".join(f"left out  {sentence}\n" for sentence in replayed.left_out))
    recorded, other = replayed.overall["recorded"], replayed.overall["replayed"]
    print(table_text(("overall", "recorded", "replayed"), [[name, recorded[name], other[name]] for name in recorded]))
    print(_gradient_sentence(replayed))
    columns = ["step", "tokens", *(f"{name} {side}" for name in _STEP_METRICS for side in ("rec.", "rep.")), "cosine"]
    rows = [
        [entry["step"], entry["tokens"]]
        + [entry[side].get(name, "") for name in _STEP_METRICS for side in ("recorded", "replayed")]
        + ["" if entry["cosine"] is None else entry["cosine"]]
        for entry in replayed.steps
    ]
    print(f"\n{table_text(columns, rows)}", end="")
    if replayed.furthest:
        columns = [*_FURTHEST, *(f"replayed_{name}" for name in ("advantage", "ratio", "weight")), "apart"]
        print("\nFurthest apart, by a token's share of its step's gradient")
        print(table_text(columns, [[token[name] for name in columns] for token in replayed.furthest]), end="")


def _gradient_sentence(replayed: "RunReplay") -> str:
    overall = replayed.overall
    if overall["cosine"] is None:
        return "gradient weights: one of the two objectives has none"
    return (
        f"gradient weights, one entry a token, aggregation included: cosine {overall['cosine']:.4f},"
        f" length x{overall['length']:.3g}; {overall['flipped']:.1%} of the tokens change sign,"
        f" {overall['zeroed']:.1%} fall silent, {overall['activated']:.1%} wake"
    )
