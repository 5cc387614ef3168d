"""Studies as the engine records them, with made-up figures, for what only reads: study.json, and runs where needed."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from recorded_home import record_run, write

from pipelines.home.home import Home

LOW, HIGH, PACE, SCALE, SOURCE = (
    "objective.clip.low",
    "objective.clip.high",
    "reference.update.every_steps",
    "advantage.scale",
    "reference",
)
PARAMETERS: dict[str, Any] = {
    LOW: {"float": [0.05, 0.5], "step": 0.0, "log": False, "when": {}},
    HIGH: {"float": [0.05, 1.0], "step": 0.0, "log": True, "when": {}},
    PACE: {"int": [1, 2], "step": 1, "log": False, "when": {}},
    SCALE: {"choice": ["none", "group_std"], "when": {}},
}
"""Search space of `tiny_study.STUDY`."""
GOAL = {"dataset": "two-terms", "metric": "mean@8", "direction": "maximize", "over_seeds": "mean"}
KL_GOAL = {"dataset": "", "metric": "kl/reverse", "direction": "minimize", "over_seeds": "mean"}
AT = "2026-11-20T09:30:00+00:00"


def study(trials: Sequence[Mapping[str, Any]], name: str = "clips", **changes: Any) -> dict[str, Any]:
    """A study's record with these trials, today's keys all there."""
    goals = changes.get("goals", [GOAL])
    words = [
        f"{goal['direction']} {goal['metric']}" + f" on {goal['dataset']}" * bool(goal["dataset"]) for goal in goals
    ]
    return {
        "name": name,
        "question": "Which clip?",
        "experiment": "tiny.yaml",
        "goal": "; ".join(words),
        "direction": goals[0]["direction"],
        "goals": goals,
        "constraints": [],
        "sampler": "tpe",
        "pruner": {"type": "none"},
        "trials_wanted": len(trials),
        "seeds": [0, 1],
        "confidence": 0.95,
        "status": "finished",
        "parameters": PARAMETERS,
        "overrides": {},
        "budget": {"tokens": 0, "gpu_hours": 0, "hours": 0},
        "spent": {key: sum(trial[key] for trial in trials) for key in ("tokens", "gpu_hours", "seconds")},
        "created_at": AT,
        "updated_at": AT,
        "trials": deepcopy(list(trials)),
        "confirmation": None,
        "warm_start": {"studies": [], "runs": []},
        **changes,
    }


def params_of(number: int) -> dict[str, Any]:
    """Params of a trial: drawn at random from PARAMETERS; trial 0 has the experiment's own."""
    if number == 0:
        return {LOW: 0.2, HIGH: 0.28, PACE: 2, SCALE: "none"}
    rng = np.random.default_rng([7, number])
    return {
        LOW: round(float(rng.uniform(0.05, 0.5)), 4),
        HIGH: round(float(0.05 * 20 ** rng.uniform()), 4),
        PACE: int(rng.integers(1, 3)),
        SCALE: str(rng.choice(["none", "group_std"])),
    }


def trial(number: int, value: float | None, **changes: Any) -> dict[str, Any]:
    """A finished trial, or with `state` another. Its interval is 0.04 to each side."""
    finished = value is not None
    return {
        "number": number,
        "state": "finished" if finished else "pending",
        "run_id": f"trial-{number}-s0",
        "run_ids": [f"trial-{number}-s{seed}" for seed in range(2)],
        "value": value,
        "values": [value] if finished else None,
        "value_low": value - 0.04 if value is not None else None,
        "value_high": value + 0.04 if value is not None else None,
        "baseline": number == 0,
        "params": params_of(number),
        "rung": None,
        "rungs": {},
        "constraints": {},
        "feasible": True,
        "reason": "",
        "tokens": 1000,
        "gpu_hours": 0.5,
        "seconds": 120.0,
        "attempts": 0,
        "started_at": AT,
        "ended_at": AT,
        **changes,
    }


def pruned(number: int, *rungs: float, at: Sequence[int] = (15, 30)) -> dict[str, Any]:
    """A trial that was stopped at the last of these rungs."""
    by_step = {str(step): {"value": v, "low": v - 0.05, "high": v + 0.05} for step, v in zip(at, rungs, strict=False)}
    reason = f"below the best half at step {at[len(rungs) - 1]}"
    return trial(number, None, state="pruned", rungs=by_step, rung=at[len(rungs) - 1], reason=reason, tokens=250)


def arm(number: int, values: Sequence[float | None], seeds: Sequence[int] = range(100, 105)) -> dict[str, Any]:
    """An arm of the confirmation: one run a seed; those without a value are to come."""
    label = "baseline" if number == 0 else f"trial {number}"
    units = [
        {
            "seed": seed,
            "run_id": f"confirm-{number}-s{seed}" if value is not None else None,
            "state": "finished" if value is not None else "pending",
            "value": value,
            "reason": "",
        }
        for seed, value in zip(seeds, values, strict=True)
    ]
    return {"label": label, "trial": number, "baseline": number == 0, "params": params_of(number), "units": units}


def confirmation(*arms: Mapping[str, Any], dataset: str = "two-terms") -> dict[str, Any]:
    """Confirmation of these arms."""
    seeds = [unit["seed"] for unit in arms[0]["units"]]
    look = {"looks": [], "most": len(seeds), "share": 0, "decided": True}
    return {"dataset": dataset, "seeds": seeds, "arms": list(arms), **look}


def record(home: Home, data: Mapping[str, Any]) -> str:
    """Writes study.json. Returns the study's name."""
    write(home.study(data["name"]) / "study.json", data)
    return str(data["name"])


def confirmed_arm(home: Home, number: int, after: float, seeds: Sequence[int] = range(100, 105)) -> dict[str, Any]:
    """An arm whose runs are recorded too, right in about the share `after`, with the values that they measured."""
    values = []
    for seed in seeds:
        run_id = record_run(home, f"confirm-{number}-s{seed}", seed=seed, after=after, steps=4, experiment="clips")
        values.append(measured(home.run(run_id)))
    return arm(number, values, seeds)


def measured(directory: Path) -> float:
    """The accuracy that a recorded run's last evaluation has."""
    import pyarrow.parquet as pq

    (path,) = directory.glob("evaluate/*/segments/evaluations/*.parquet")
    rows = pq.read_table(path).to_pylist()
    return float(max(rows, key=lambda row: row["step"])["value"])
