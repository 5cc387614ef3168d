"""Lookup of the weights that a run has exported, for their evaluation: by step, the last or the best."""

from collections.abc import Collection
from pathlib import Path

from pipelines.home.home import Home
from pipelines.home.results import damage_of
from pipelines.home.runs import find_runs
from specs.errors import Issue, RpgError, SpecError
from specs.evaluation_document import WeightsOf
from specs.machine.files import read_json
from specs.model_evaluation import EvaluatedRun
from specs.reading.recorded import recorded_spec

_MOST_ACCURATE = """
    SELECT step FROM accuracy_curves
    WHERE run_id = $run AND list_contains($steps, step) AND dataset = coalesce(nullif($dataset, ''), dataset)
    GROUP BY step ORDER BY avg(accuracy) DESC, step DESC LIMIT 1
"""


def weights_in(home: Home) -> WeightsOf:
    """Finds weights in a home. Errors name the model's field `run` or `checkpoint`."""

    def weights_of(model: EvaluatedRun) -> str:
        return str(_directory(home, model).absolute())

    return weights_of


def most_accurate(home: Home, run_id: str, steps: Collection[int]) -> int | None:
    """Returns the one of these steps of a run that has the highest accuracy; of equal ones, the latest. None if no step
    was evaluated.

    The accuracy is that on the set in `training.checkpoint.keep_best.accuracy_on` of its spec, else the mean over its
    sets.
    """
    from storage import Store

    kept = recorded_spec(home.run(run_id)).training.checkpoint.keep_best
    chosen_on = kept.accuracy_on if kept else ""
    with Store.open(home.root) as store:
        rows = store.query(_MOST_ACCURATE, {"run": run_id, "steps": list(steps), "dataset": chosen_on}).rows
    return int(rows[0][0]) if rows else None


def _directory(home: Home, model: EvaluatedRun) -> Path:
    run_id = _run(home, model.run)
    exported = {int(path.name.removeprefix("step-")): path for path in home.run(run_id).glob("weights/step-*")}
    plan = read_json(home.run(run_id) / "plan.json").get("stages", {})
    if "train" not in plan:
        hint = "name the model that it used in the same way: by path or run"
        raise SpecError(Issue(f"{run_id} has trained nothing", ("run",), model.run, hint=hint))
    if model.checkpoint == 0:
        return home.artifact("base", plan["base"]["fingerprint"])
    if isinstance(model.checkpoint, int):
        step = model.checkpoint
    elif model.checkpoint == "best":
        step = _best(home, run_id, sorted(exported))
    else:
        step = _last(home, run_id, plan["train"]["fingerprint"])
    if step not in exported:
        allowed = ", ".join(["last", "best", *map(str, [0, *sorted(exported)])])
        hint = "`training.export_every_steps` decides which steps a run exports"
        raise SpecError(Issue(f"{run_id} has no weights of that step", ("checkpoint",), str(step), allowed, hint))
    return exported[step]


def _run(home: Home, text: str) -> str:
    """Returns the one run that a text names: by its id, or as the only run of an experiment."""
    try:
        run_ids = find_runs(home, text)
    except RpgError as error:
        message, _, hint = str(error).partition("; ")
        raise SpecError(Issue(message, ("run",), text, hint=hint)) from None
    if len(run_ids) > 1:
        allowed = ", ".join(run_ids[:8]) + (f" and {len(run_ids) - 8} more" if len(run_ids) > 8 else "")
        raise SpecError(Issue(f"is an experiment of {len(run_ids)} runs", ("run",), text, allowed))
    return run_ids[0]


def _last(home: Home, run_id: str, fingerprint: str) -> int:
    manifest = home.run(run_id) / "train.json"
    if damage := damage_of(manifest, fingerprint):
        hint = f"`rpg resume {run_id}`, or name a step that it has exported"
        raise SpecError(Issue(f"{run_id} has not finished training: {damage}", ("checkpoint",), "last", hint=hint))
    return int(read_json(manifest)["steps"])


def _best(home: Home, run_id: str, exported: list[int]) -> int:
    if (step := most_accurate(home, run_id, exported)) is None:
        message = f"none of the steps that {run_id} has exported was evaluated"
        raise SpecError(Issue(message, ("checkpoint",), "best", ", ".join(map(str, exported))))
    return step
