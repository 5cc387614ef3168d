"""Spec -> plan: the runs, the stages of each, what is done already, what will run, and why. Reads; changes nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.home import Home
from pipelines.planning import fingerprint as fp
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from specs.document import Cell
    from specs.loader import Document

Action = Literal["RUN", "CACHED", "RESUME"]
_SHOWN_CHANGES = 3
STAGES = ("data", "base", "train", "evaluate", "report")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of one run."""

    stage: str
    fingerprint: str
    identity: fp.Identity
    """The fields that were hashed, by path."""
    inputs: dict[str, str]
    """Fingerprints of the stages that it reads."""
    action: Action
    reason: str
    """Why, down to the spec's line where a field changed."""
    output: Path


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run: a cell of the matrix with one seed."""

    run_id: str
    name: str
    """Readable: what varies, and the seed."""
    seed: int
    values: dict[str, Any]
    """The matrix fields' values in this run."""
    label: str
    """What the matrix calls the cell; empty where it gives no labels."""
    experiment: Experiment
    """The run's spec."""
    stages: tuple[StagePlan, ...]

    def stage(self, name: str) -> StagePlan:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.stage == name)

    def record(self) -> dict[str, Any]:
        """What a later plan compares itself with; kept as the run's plan.json."""
        stages = {
            s.stage: {"fingerprint": s.fingerprint, "identity": s.identity, "inputs": s.inputs} for s in self.stages
        }
        return {"run_id": self.run_id, "seed": self.seed, "values": self.values, "stages": stages}


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of an experiment, in the order of the matrix and the seeds."""

    document: "Document"
    runs: tuple[RunPlan, ...]


def make_plan(document: "Document", home: Home) -> Plan:
    """Resolves a document into runs and stages and decides, stage by stage, whether its result is there already."""
    from specs.document import expand

    return Plan(document, tuple(_plan_run(document, cell, home) for cell in expand(document)))


def _plan_run(document: "Document", cell: "Cell", home: Home) -> RunPlan:
    experiment = cell.experiment
    drafts = _fingerprints(experiment)
    run_id = _run_id(experiment, cell.values, drafts["train"][0])
    previous = _previous_record(home, experiment.name, run_id, cell.values, cell.seed)
    stages: list[StagePlan] = []
    for name, (digest, identity, inputs) in drafts.items():
        output = _output(home, run_id, name, digest)
        action, found = _decide(home, run_id, name, digest, output)
        upstream = [stage.stage for stage in stages if stage.stage in inputs and stage.action != "CACHED"]
        reason = found or _reason(document, name, identity, inputs, upstream, previous)
        stages.append(StagePlan(name, digest, identity, inputs, action, reason, output))
    return RunPlan(run_id, _run_name(cell), cell.seed, cell.values, cell.label, experiment, tuple(stages))


def _fingerprints(experiment: Experiment) -> dict[str, tuple[str, fp.Identity, dict[str, str]]]:
    """Each stage's fingerprint, identity and inputs, in the order they run."""
    drafts: dict[str, tuple[str, fp.Identity, dict[str, str]]] = {}

    def add(stage: str, identity: fp.Identity, inputs: dict[str, str]) -> None:
        drafts[stage] = (fp.fingerprint(stage, identity, inputs), identity, inputs)

    # What is trained depends on the training problems alone: another evaluation set must not train again.
    train_data = fp.fingerprint("data", fp.train_data_identity(experiment), {})
    add("data", fp.data_identity(experiment), {})
    add("base", fp.base_identity(experiment), {"data": train_data} if fp.base_reads_data(experiment) else {})
    add("train", fp.train_identity(experiment), {"data": train_data, "base": drafts["base"][0]})
    add("evaluate", fp.evaluate_identity(experiment), {"data": drafts["data"][0], "train": drafts["train"][0]})
    add("report", fp.report_identity(experiment), {"train": drafts["train"][0], "evaluate": drafts["evaluate"][0]})
    return drafts


def _run_id(experiment: Experiment, values: dict[str, Any], train_fingerprint: str) -> str:
    # A change of the evaluation section measures the same run again; cells that differ in it alone are still apart.
    measured = {path: value for path, value in values.items() if path.startswith(("evaluation", "data.evaluation"))}
    digest = fp.fingerprint("train", {"measured": measured}, {"train": train_fingerprint})
    return f"{experiment.name}-s{experiment.seeds[0]}-{digest[:8]}"


def _run_name(cell: "Cell") -> str:
    shown = [f"{path.removeprefix('objective.')}={_short(value)}" for path, value in cell.values.items()]
    return " ".join([*([f"{cell.label},"] if cell.label else shown), f"seed {cell.seed}"])


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(_short(item) for item in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _output(home: Home, run_id: str, stage: str, digest: str) -> Path:
    run = home.run(run_id)
    places = {"train": run, "evaluate": run / "evaluate" / digest[:16], "report": run / "report.html"}
    return places[stage] if stage in places else home.artifact(stage, digest)


def _decide(home: Home, run_id: str, stage: str, digest: str, output: Path) -> tuple[Action, str]:
    """The action, and the reason where it lies in what is on the disk."""
    run = home.run(run_id)
    if stage == "report":
        recorded = read_json(run / "state.json").get("stages", {}).get("report", {})
        done = recorded.get("fingerprint") == digest and recorded.get("status") == "finished" and output.is_file()
        return ("CACHED", "done") if done else ("RUN", "")
    manifest = output / ("train.json" if stage == "train" else "manifest.json")
    if manifest.is_file():
        broken = broken_file(output, manifest, digest)
        return ("RUN", f"its result is damaged: {broken}") if broken else ("CACHED", "done")
    if stage == "train" and (steps := sorted(run.glob("checkpoints/step-*"))):
        return "RESUME", f"goes on from {steps[-1].name}"
    return "RUN", ""


def broken_file(directory: Path, manifest: Path, digest: str) -> str:
    """The first thing wrong with a published stage; empty where its manifest verifies (fingerprint, files, sizes)."""
    recorded = read_json(manifest)
    if recorded.get("fingerprint") != digest:
        return f"{manifest.name} is of another fingerprint"
    for name, entry in recorded.get("files", {}).items():
        file = directory / name
        if not file.exists():
            return f"{name} is missing"
        if isinstance(entry, dict) and file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}"
    return ""


def _previous_record(
    home: Home, experiment: str, run_id: str, values: dict[str, Any], seed: int
) -> dict[str, Any] | None:
    """The last plan of the run that this one replaces: the same run, else the same cell and seed, else any."""
    listed = read_json(home.experiment(experiment) / "experiment.json").get("runs", [])
    records = [record for name in listed if (record := read_json(home.run(name) / "plan.json"))]
    for wanted in (
        lambda record: record["run_id"] == run_id,
        lambda record: record["values"] == values and record["seed"] == seed,
        lambda record: record["seed"] == seed,
        lambda _record: True,
    ):
        if found := [record for record in records if wanted(record)]:
            return found[-1]
    return None


def _reason(
    document: "Document",
    stage: str,
    identity: fp.Identity,
    inputs: dict[str, str],
    upstream: list[str],
    previous: dict[str, Any] | None,
) -> str:
    before = previous["stages"].get(stage) if previous else None
    if before is None:
        return "new"
    old = before["identity"]
    changes = [
        f"{path} {_short(old.get(path, 'unset'))} -> {_short(identity.get(path, 'unset'))}{_at(document, path)}"
        for path in sorted(identity.keys() | old.keys())
        if identity.get(path, ...) != old.get(path, ...)
    ]
    changes += [f"{name} changed" for name, digest in inputs.items() if before["inputs"].get(name) != digest]
    if changes:
        more = f"; and {len(changes) - _SHOWN_CHANGES} more" if len(changes) > _SHOWN_CHANGES else ""
        return "; ".join(changes[:_SHOWN_CHANGES]) + more
    return f"{' and '.join(upstream)} will run" if upstream else "not finished before"


def _at(document: "Document", path: str) -> str:
    from specs.errors import Issue

    parts = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    problem = document.locate(Issue("", path=parts))
    if problem.line:
        return f" ({Path(problem.file).name}:{problem.line})"
    return " (--set)" if problem.file.startswith("--set") else ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the file is not there or not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
