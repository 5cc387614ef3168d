"""Runs as rows of a list, and a full description of one run."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipelines.cli.output import as_objects, cell_text, print_table
from pipelines.home.home import Home
from pipelines.home.runs import log_files, status_of
from pipelines.launchers import read_launch
from pipelines.report.answer import answers_of
from pipelines.report.answer.whole import whole_answer
from pipelines.report.diagnosis import DIAGNOSED, findings_of, not_scored
from pipelines.report.evidence import Group, Run, load_run, metric_curves, show, told_apart, trouble_of
from specs.machine.files import read_json
from specs.secrets import HIDDEN, looks_secret

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment
    from storage import Store

_LIST = """
    SELECT s.run_id, s.experiment, s.name, s.seed, s.status, s.step, s.steps, s.reward_last,
           s.accuracy_before, s.accuracy_after, s.score_before, s.score_after, s.evaluated_step,
           r.started_at, r.ended_at, s.seconds, r.reason, r.cause, r.cell
    FROM run_summary AS s JOIN runs AS r USING (run_id)
    WHERE {condition}
    ORDER BY r.created_at, s.run_id
"""
_WHERE = {
    "experiment": """(s.experiment = $experiment
           OR s.run_id IN (SELECT unnest(run_ids) FROM trials WHERE study = $experiment)
           OR s.run_id IN (SELECT run_id FROM confirmations WHERE study = $experiment))""",
    "status": "s.status = $status",
}
"""SQL conditions of the list's options. Without conditions no parameter is bound, and DuckDB does not import pandas."""
_LAST_METRICS = """
    SELECT name, arg_max(value, step) AS value, max(step) AS step
    FROM metrics WHERE run_id = ? GROUP BY name ORDER BY name
"""
_EVALUATIONS = """
    SELECT step, dataset, metric, value, e.ci_low, e.ci_high, e.num_problems, samples_per_problem, is_last, is_best
    FROM evaluations AS e LEFT JOIN accuracy_curves USING (run_id, dataset, metric, step)
    WHERE run_id = ? ORDER BY dataset, metric, step
"""
_STAGES = "SELECT stage, status, cached, started_at, ended_at, reason, output, fingerprint FROM stages WHERE run_id = ?"
_LEARNING = ("objective.", "advantage.", "reference.", "training.")
"""Sections of a spec that define how a policy learns."""
_SEVERAL = 8
"""Number of values on one screen. The first ones are shown."""
_FEW = 3
"""Number of problems on one screen. The last ones are shown."""
_EVENTS = "SELECT step, kind, message, recorded_at FROM events WHERE run_id = ? ORDER BY recorded_at DESC LIMIT 10"


def list_runs(
    home: Home, *, experiment: str | None, status: str | None, plain: bool
) -> tuple[list[str], list[list[Any]]]:
    """Returns the runs, oldest first, with every column (`plain`) or those that a terminal shows."""
    from storage import Store

    options = {"experiment": experiment, "status": status}
    given = {name: value for name, value in options.items() if value is not None}
    with Store.open(home.root) as store:
        condition = " AND ".join(_WHERE[name] for name in given) or "true"
        result = store.query(_LIST.format(condition=condition), given)
        apart = told_apart(home, store)
    runs = as_objects(result.columns, result.rows)
    for run in runs:
        run["cell"] = json.loads(run["cell"] or "null")
        run["differs"] = apart.get(run["run_id"], "")
    if plain:
        return [*result.columns, "differs"], [list(run.values()) for run in runs]
    return ["run", "what", "status", "step", "reward", "accuracy", "started", "took"], [_short(run) for run in runs]


def describe_run(home: Home, run_id: str) -> dict[str, Any]:
    """Returns the output of `rpg show` as plain data."""
    from storage import Store

    directory = home.run(run_id)
    identity, state = read_json(directory / "run.json"), read_json(directory / "state.json")
    run = load_run(home, run_id)
    trains = run.trains
    launch = read_launch(directory, "train" if trains else "evaluate")
    with Store.open(home.root) as store:
        evaluations = _objects(store, _EVALUATIONS, run_id)
        answer, diagnosis = _answer_and_diagnosis(home, store, run)
        return {
            "run_id": run_id,
            **{key: identity.get(key) for key in ("experiment", "name", "question")},
            "seed": identity.get("seed") if trains else None,
            **{key: identity.get(key) for key in ("values", "created_at")},
            "status": status_of(home, run_id),
            **{key: state.get(key) for key in ("started_at", "ended_at", "reason", "cause", "flow_run_id")},
            "progress": {key: read_json(directory / "progress.json").get(key) for key in ("step", "steps", "phase")},
            "trained": trains,
            "answer": answer,
            "diagnosis": diagnosis,
            "differs": told_apart(home, store).get(run_id, ""),
            "spec": _without_secrets(spec_differences(run.spec)),
            "launch": _without_secrets(dict(_leaves(launch, ""))),
            "stages": _objects(store, _STAGES, run_id),
            "metrics": _objects(store, _LAST_METRICS, run_id),
            "evaluations": evaluations,
            "trouble": trouble_of(store, [run_id]),
            "events": _objects(store, _EVENTS, run_id)[::-1],
            "off_policy": run.off_policy,
            "certificate": read_json(directory / "certificate.json"),
            "exported_steps": sorted(int(path.name.removeprefix("step-")) for path in directory.glob("weights/step-*")),
            "files": _files(home, run, evaluations),
        }


def _answer_and_diagnosis(home: Home, store: "Store", run: Run) -> tuple[str, list[dict[str, Any]]]:
    """Returns the run's answer, empty if nothing was evaluated, and the diagnosis of its problems."""
    groups = [Group(run.name, (run,))]
    curves, failed = metric_curves(store, [run.run_id], DIAGNOSED), not_scored(store, groups)
    found = answers_of(home, store, groups, [])
    answer = whole_answer(home, run.run_id, groups, found, curves, failed) if found else ""
    return answer, [asdict(finding) for finding in findings_of(run, curves, failed)]


def print_run(run: dict[str, Any], *, whole: bool = False, profile: str = "") -> None:
    """Prints a run's data for people, on one screen or as a `whole`."""
    print(
        f"{run['run_id']}  {run['status']}"
        + (f" ({run['cause']})" if run["cause"] and run["status"] == "failed" else "")
        + (f": {run['reason']}" if run["reason"] else "")
    )
    name = ", ".join(filter(None, [run["name"], run["differs"]]))
    print(f"{run['experiment']}: {name}\n{run['question'] or ''}".rstrip())
    print("   ".join(_standing(run)))
    if run["answer"]:
        print(f"\n{run['answer']}")
    for finding in run["diagnosis"]:
        if unsaid := [finding[part] for part in ("sentence", "remedy") if finding[part] not in run["answer"]]:
            print(f"\nDiagnosis: {' '.join(unsaid)}")
    if whole:
        _print_whole(run)
    else:
        _print_short(run, profile)


def _print_short(run: dict[str, Any], profile: str) -> None:
    """Prints the learning settings, the metrics of the last step, the last problems, and next commands."""
    from specs.metrics import progress_text

    learning = [f"{path} {show(value)}" for path, value in run["spec"].items() if path.startswith(_LEARNING)]
    if learning:
        more = f" and {len(learning) - _SEVERAL} more" if len(learning) > _SEVERAL else ""
        print(f"\nset: {', '.join(learning[:_SEVERAL])}{more}")
    if told := progress_text({row["name"]: row["value"] for row in run["metrics"]}):
        print(f"\nstep {max(row['step'] for row in run['metrics'])}: {told}")
    _table("Trouble", run["trouble"][-_FEW:], ("step", "kind", "message"))
    print("\nnext")
    commands = _next(run, profile)
    width = max(map(len, commands))
    for command, why in commands.items():
        print(f"  {command:<{width}}  {why}")


def _next(run: dict[str, Any], profile: str) -> dict[str, str]:
    """Returns useful next commands, and their purposes. For a run of a server's record, only commands that read it."""
    if profile:
        commands = {command: why for command, why in _next(run, "").items() if not command.startswith("rpg resume ")}
        return {f"{command} --profile {shlex.quote(profile)}": why for command, why in commands.items()}
    run_id = run["run_id"]
    commands = {f"rpg show {run_id} --all": "spec, stages, metrics, evaluations, certificate, files"}
    match run["status"]:
        case "running" | "pending":
            return {f"rpg watch {run_id}": "its live progress"} | commands
        case "finished":
            sampled = {f"rpg show {run_id} --sample": "what the policy said"} if run["trained"] else {}
            return (
                commands
                | sampled
                | {
                    f"rpg report {run_id}": "the page with its curves",
                    f"rpg compare {run['experiment']}": "all runs of its experiment",
                }
            )
        case _:
            return {
                f"rpg logs {run_id}": "what its processes wrote",
                f"rpg resume {run_id}": "resume from the last checkpoint",
            } | commands


def _print_whole(run: dict[str, Any]) -> None:
    """Prints everything that is recorded of a run."""
    from rpg.certificate.reading import in_words
    from rpg.statistics import THESE_WEIGHTS

    _section("Differences of the spec from the defaults", run["spec"])
    # In JSON, a run that was never launched has {"": {}}: programs may have come to rely on it.
    _section("Launch", {path: value for path, value in run["launch"].items() if path})
    _table("Stages", run["stages"], ("stage", "status", "cached", "started_at", "ended_at", "reason"))
    _table("Metrics at the last step", run["metrics"], ("name", "value", "step"))
    checkpoint = ("step", "checkpoint") if run["trained"] else ()
    _table(
        f"Evaluations (intervals: {THESE_WEIGHTS})",
        [row | {"checkpoint": _last_or_best(row)} for row in run["evaluations"]],
        ("dataset", "metric", *checkpoint, "value", "ci_low", "ci_high", "num_problems"),
    )
    certificate = run["certificate"]
    for step, at_step in certificate.get("steps", {"": certificate} if certificate else {}).items():
        worded = in_words(at_step, **run["off_policy"])
        _certificate(worded, f" at step {step}" if step else "")
    _table("Trouble", run["trouble"], ("recorded_at", "step", "kind", "message"))
    _table("Last events", run["events"], ("recorded_at", "step", "kind", "message"))
    exported = ", ".join(map(str, run["exported_steps"]))
    _section("Files", run["files"] | ({"exported steps": exported} if exported else {}))


def _last_or_best(evaluation: Mapping[str, Any]) -> str:
    """Returns whether an evaluation measured the run's last checkpoint, the most accurate one, or both."""
    from rpg.statistics.wording import CHOSEN

    best = f"best ({CHOSEN})" if not evaluation["is_last"] else "best"
    return ", ".join(word for word, key in (("last", "is_last"), (best, "is_best")) if evaluation[key])


def _certificate(certificate: Mapping[str, Any], when: str) -> None:
    """Prints how the objective's gradient compares with the exact one. `when`: the step, if the objective changes over
    training."""
    findings = [
        {
            "policy": finding["policy"].replace("_", " "),
            "reference": finding["reference"],
            "error": "exact" if finding["error"] <= certificate["tolerance"] else f"{100 * finding['error']:.0f} %",
            "cosine": f"{finding['cosine']:.4f}",
            "variance": f"{finding['variance']:.3g}",
            "divergence's part": (finding["divergence_gradient_of"] or "none named")
            if finding["divergence_error"]
            else "",
        }
        for finding in certificate["findings"]
    ]
    claim = {"always": "exact always", "on_policy": "exact on policy", "never": "no claim"}[certificate["claim"]]
    verdict = "" if certificate["claim"] == "never" else ", holds" if certificate["holds"] else ", DOES NOT HOLD"
    title = f"Certificate{when}: {claim}{verdict}; compared with {certificate['claimed']}"
    print(f"\n{title}\n{certificate['meaning']}")
    print_table(tuple(findings[0]), [list(finding.values()) for finding in findings])


def _standing(run: dict[str, Any]) -> list[str]:
    """Returns when the run was executed and its progress."""
    times = [(name, run[f"{name}_at"]) for name in ("started", "ended")]
    parts = [f"{name} {str(at)[:19].replace('T', ' ')} UTC" for name, at in times if at]
    step, steps = run["progress"]["step"], run["progress"]["steps"]
    return [*parts, f"step {step}/{steps}"] if steps else parts


def spec_differences(spec: "Experiment") -> dict[str, Any]:
    """Returns the fields of a run's spec that are not at their defaults, by path."""
    from specs.schema.base import set_fields

    return dict(_leaves(set_fields(spec), ""))


def _without_secrets(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by path, without variables that look secret, which earlier versions recorded."""
    return {
        path: HIDDEN if "environment." in path and looks_secret(path.rpartition(".")[2], str(value)) else value
        for path, value in leaves.items()
    }


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def _objects(store: "Store", query: str, run_id: str) -> list[dict[str, Any]]:
    result = store.query(query, [run_id])
    return as_objects(result.columns, result.rows)


def _files(home: Home, run: Run, evaluations: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the paths of the run's files."""
    directory = run.path
    weights = sorted(directory.glob("weights/step-*"))
    checkpoints = sorted(directory.glob("checkpoints/step-*"))
    paths = {
        "directory": directory,
        "report": directory / "report.html",
        "weights": weights[-1] if weights else None,
        "checkpoint": checkpoints[-1] if checkpoints else None,
    }
    best_kept = run.spec.training.checkpoint.keep_best
    if chosen_on := best_kept.accuracy_on if best_kept else "":
        best = next((row["step"] for row in evaluations if row["dataset"] == chosen_on and row["is_best"]), 0)
        paths["best weights"] = directory / "weights" / f"step-{best:06}"
        paths["best checkpoint"] = directory / "checkpoints" / f"step-{best:06}"
    logs = {f"log of {path.stem}": path for path in log_files(home, run.run_id)}
    return {name: str(path) for name, path in (paths | logs).items() if path is not None and path.exists()}


def _short(run: dict[str, Any]) -> list[Any]:
    step = f"{run['step']}/{run['steps']}" if run["steps"] else (run["step"] if run["step"] is not None else "")
    return [
        run["run_id"],
        ", ".join(filter(None, [run["name"], run["differs"]])),
        f"{run['status']} ({run['cause']})" if run["cause"] and run["status"] == "failed" else run["status"],
        step,
        "" if run["reward_last"] is None else f"{run['reward_last']:.3f}",
        _measured(run),
        cell_text(run["started_at"]) if run["started_at"] else "",
        _duration(run["seconds"]),
    ]


def _measured(run: Mapping[str, Any]) -> str:
    """Returns the accuracy before and after training; for a graded reward the score, in the reward's own units."""
    kind = "accuracy" if run["accuracy_after"] is not None else "score"
    text = _change(run[f"{kind}_before"] if run["evaluated_step"] else None, run[f"{kind}_after"])
    return f"score {text}" if text and kind == "score" else text


def _change(before: float | None, after: float | None) -> str:
    if after is None:
        return ""
    return f"{after:.3f}" if before is None else f"{before:.3f} -> {after:.3f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _section(title: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    print(f"\n{title}")
    width = max(map(len, values))
    for name, value in values.items():
        print(f"  {name:<{width}}  {cell_text(value)}")


def _table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if rows:
        print(f"\n{title}")
        print_table(columns, [["" if row[name] is None else row[name] for name in columns] for row in rows])
