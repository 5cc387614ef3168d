"""The plan of a spec: its runs, the finished and unfinished stages of each, and the reasons.

Planning reads. It writes only notes of digests that it had to compute (specs/machine/manifests.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.home.home import Home
from pipelines.home.results import damage_of, is_older, is_report_current, made_with_others, manifest_of
from pipelines.planning import fingerprint as fp
from pipelines.planning.beginnings import shared_steps
from pipelines.planning.code import Code, Differences, release
from pipelines.planning.reasons import changes, code_changes, short
from specs.cells import cell_source
from specs.errors import Issue, SpecError
from specs.machine.files import read_json
from specs.schema.experiment import Experiment
from specs.schema.fields import says, unknown

if TYPE_CHECKING:
    from specs.document import Cell
    from specs.loader import Document

Action = Literal["RUN", "CACHED", "RESUME"]
_STEPS = "training.steps"
STAGES = ("data", "base", "train", "evaluate", "report")
ANEW = "computed again, as requested"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of one run."""

    stage: str
    fingerprint: str
    identity: fp.Identity
    """The fields that were hashed, by path."""
    inputs: dict[str, str]
    """Fingerprints of the stages that this stage reads."""
    action: Action
    reason: str
    """Reason for the action, down to the spec's line if a field changed."""
    output: Path
    taken_from: str = ""
    """For a train or evaluate stage, the id of the run whose result this stage reuses or resumes from: a run with
    another name, or with fewer steps. Empty if there is no such run."""
    taken_step: int = 0
    """The step of that run from which this stage resumes, if the two runs differ after it. 0 if all steps are
    reused."""
    code: Differences = field(default_factory=dict)
    """Differences between the stage's code and the release."""
    results: int = 0
    """The results number of the stage's code."""
    accepted: str = ""
    """Differences in the code that made the result, which is reused at the user's request. Empty if the
    code is the same."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run: a cell of the matrix with one seed."""

    run_id: str
    name: str
    """Readable name: the varying values and the seed."""
    seed: int
    values: dict[str, Any]
    """The matrix fields' values in this run."""
    label: str
    """The matrix's label of the cell. Empty if it gives no labels."""
    experiment: Experiment
    """The run's spec."""
    stages: tuple[StagePlan, ...]

    def stage(self, name: str) -> StagePlan:
        """Returns the stage of that name."""
        return next(stage for stage in self.stages if stage.stage == name)

    @property
    def recipe(self) -> str:
        """Returns a digest of the inputs of the run's id, without the seed. All runs of a cell have the same recipe."""
        if not self.experiment.trains:
            return self.stage("evaluate").fingerprint[:16]
        train = self.stage("train")
        without_seed = fp.without_seed(train.identity) | {"measured": _measured(self.values)}
        return fp.fingerprint("train", without_seed, train.inputs, train.code, results=train.results)[:16]

    def record(self) -> dict[str, Any]:
        """Returns the record with which later plans compare theirs, kept as the run's plan.json."""
        stages = {
            stage.stage: stage_record(stage.fingerprint, stage.identity, stage.inputs, stage.code, stage.results)
            for stage in self.stages
        }
        return {"run_id": self.run_id, "seed": self.seed, "values": self.values, "stages": stages}


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of an experiment, in the order of the matrix and the seeds."""

    document: "Document"
    runs: tuple[RunPlan, ...]

    @property
    def in_turn(self) -> list[RunPlan]:
        """Returns the runs in execution order: all cells with the first seed, then with the next. If execution ends
        early, cells can still be compared."""
        seeds = list(dict.fromkeys(run.seed for run in self.runs))
        return sorted(self.runs, key=lambda run: seeds.index(run.seed))


def stage_record(
    fingerprint: str, identity: fp.Identity, inputs: dict[str, str], code: Differences, results: int
) -> dict[str, Any]:
    """Returns the record of a stage's identity."""
    record = {"fingerprint": fingerprint, "identity": identity, "inputs": inputs, "results": results}
    return record | ({"code": code} if code else {})


def make_plan(document: "Document", home: Home) -> Plan:
    """Resolves a document into runs and stages and decides, stage by stage, whether its result exists already."""
    planner = _Planner(document, home)
    return Plan(document, tuple(planner.plan(run) for run in planner.runs))


def plan_run(document: "Document", run_id: str, home: Home) -> RunPlan:
    """Returns the plan of one of a document's runs. Raises SpecError if the document has no such run."""
    planner = _Planner(document, home)
    runs = {run.run_id: run for run in planner.runs}
    if run_id not in runs:
        message = "the spec gives other runs here: a file that it names has other content, or the code another version"
        raise SpecError(Issue(message, given=run_id, allowed=", ".join(runs), hint="submit or run the spec again"))
    return planner.plan(runs[run_id])


@dataclass(frozen=True, slots=True)
class _StageIdentity:
    fingerprint: str
    identity: fp.Identity
    inputs: dict[str, str]
    code: Differences
    results: int
    accepted: str = ""
    """See StagePlan."""

    def record(self) -> dict[str, Any]:
        """Returns the stage's record; see `stage_record`."""
        return stage_record(self.fingerprint, self.identity, self.inputs, self.code, self.results)


@dataclass(frozen=True, slots=True)
class _RunIdentity:
    """A cell and the inputs of its stages' hashes, before anything is looked up on disk."""

    run_id: str
    cell: "Cell"
    stages: dict[str, _StageIdentity]
    """Stages by name, in execution order."""


class _Planner:
    """The planner for the runs of one document in one home."""

    def __init__(self, document: "Document", home: Home) -> None:
        from specs.document import expand

        self._document = document
        self._home = home
        self._code = Code()
        self.runs = [self._identify(cell) for cell in expand(document)]
        """The document's runs, in the order of the matrix and the seeds."""
        self._refuse_same_weights()

    def _identify(self, cell: "Cell") -> _RunIdentity:
        identified = _identify(cell, self._code)
        if not self._document.reuse.accept_code:
            return identified
        run_id, accepted = self._accepted(identified)
        return _identify(cell, self._code, run_id, accepted) if accepted else identified

    def _accepted(self, run: _RunIdentity) -> tuple[str, dict[str, Any]]:
        """Returns the recorded run that has the most undamaged stages of this run, whatever code made them, and these
        stages. The newest wins a tie.

        For training this is the run itself; for data or base model alone, any run of the experiment.
        """
        found = [(plan["run_id"], dict(self._same_but_for_code(run, plan))) for plan in reversed(self._earlier_plans)]
        run_id, accepted = max(found, key=lambda each: len(each[1]), default=("", {}))
        return run_id, accepted

    def _same_but_for_code(self, run: _RunIdentity, plan: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the stages in a run's record whose results are undamaged and come from the same spec."""
        experiment, found = run.cell.experiment, set[str]()
        trains_on = fp.train_data_identity(experiment) == fp.of_training_data(plan["stages"]["data"]["identity"])
        needs = {"base": set[str](), "train": {"base"}, "evaluate": {"data", "train" if experiment.trains else "base"}}
        is_same_run = plan["seed"] == run.cell.seed and _measured(plan["values"]) == _measured(run.cell.values)
        for name, stage in run.stages.items():
            if name == "report" or (name in ("train", "evaluate") and not is_same_run):
                continue
            if self._document.reuse.since_of(name):
                continue
            recorded = plan["stages"].get(name, {})
            reads_data = name == "train" or (name == "base" and bool(stage.inputs))
            same = recorded.get("identity") == stage.identity and needs.get(name, set()) <= found
            if not same or (reads_data and not trains_on):
                continue
            manifest = manifest_of(name, self._output(plan["run_id"], name, recorded["fingerprint"]))
            if not damage_of(manifest, recorded["fingerprint"]):
                found.add(name)
                yield name, recorded

    def _refuse_same_weights(self) -> None:
        """Raises SpecError if two models of an evaluation have different paths and the same weights."""
        labels: dict[str, str] = {}
        for run in self.runs:
            first = labels.setdefault(run.run_id, run.cell.label)
            if first != run.cell.label:
                issue = Issue(f"`{first}` and `{run.cell.label}` are the same weights", hint="leave one of the two out")
                raise SpecError(self._document.locate(replace(issue, path=("models",))))

    @cached_property
    def _earlier_plans(self) -> list[dict[str, Any]]:
        """Returns the last plan of every run that the experiment ever had, oldest run first."""
        listed = read_json(self._home.experiment(self._document.experiment.name) / "experiment.json").get("runs", [])
        return [record for run_id in listed if (record := read_json(self._home.run(run_id) / "plan.json"))]

    def plan(self, run: _RunIdentity) -> RunPlan:
        """Decides the action for each stage of a run."""
        stages: list[StagePlan] = []
        for name, stage in run.stages.items():
            output = self._output(run.run_id, name, stage.fingerprint)
            unfinished = [read.stage for read in stages if read.stage in stage.inputs and read.action != "CACHED"]
            action, reason = self._decide(run.run_id, name, stage, output, unfinished)
            taken_from, taken_step = "", 0
            if action == "RUN" and not reason and not self._document.reuse.since_of(name):
                if name == "train" and not (self._home.run(run.run_id) / "attempts").exists():
                    action, reason, taken_from = self._trained_by_another(run)
                    if not reason:
                        taken_step, taken_from = self._begun_by_another(run)
                    if taken_step:
                        action, reason = "RESUME", f"continues from step {taken_step} of {taken_from}"
                elif name == "evaluate" and (other := self._evaluated_by_another(run)):
                    action, reason, taken_from = "CACHED", f"evaluated as {other}", other
            reason = reason or self._changes(name, stage, unfinished, run)
            identity = (name, stage.fingerprint, stage.identity, stage.inputs)
            because = (action, reason, output, taken_from)
            planned = StagePlan(*identity, *because, taken_step, stage.code, stage.results, stage.accepted)
            stages.append(planned)
        cell = run.cell
        return RunPlan(run.run_id, _run_name(cell), cell.seed, cell.values, cell.label, cell.experiment, tuple(stages))

    def _output(self, run_id: str, stage: str, fingerprint: str) -> Path:
        run = self._home.run(run_id)
        places = {"train": run, "evaluate": run / "evaluate" / fingerprint[:16], "report": run / "report.html"}
        return places[stage] if stage in places else self._home.artifact(stage, fingerprint)

    def _decide(
        self, run_id: str, name: str, stage: _StageIdentity, output: Path, unfinished: list[str]
    ) -> tuple[Action, str]:
        """Returns the action, and its reason if the state of the disk is the reason. `results.damage_of` decides
        whether a result is damaged."""
        run, since = self._home.run(run_id), self._document.reuse.since_of(name)
        if name == "report":
            state = read_json(run / "state.json")
            current = not unfinished and is_report_current(state, stage.fingerprint, stage.inputs, output)
            if current and is_older(output, since):
                return "RUN", ANEW
            return ("CACHED", "done") if current else ("RUN", "")
        manifest = manifest_of(name, output)
        if manifest.is_file():
            if is_older(manifest, since):
                return "RUN", ANEW
            if damage := damage_of(manifest, stage.fingerprint):
                return "RUN", f"its result is damaged: {damage}"
            if stage.accepted:
                return "CACHED", f"done by other code, accepted: {stage.accepted}"
            others = made_with_others(manifest) if name != "data" else ""
            return "CACHED", f"done, with {others}" if others else "done"
        steps = [path for path in sorted(run.glob("checkpoints/step-*")) if not is_older(path, since)]
        if name == "train" and steps:
            return "RESUME", f"continues from {steps[-1].name}"
        return "RUN", ""

    def _trained_by_another(self, run: _RunIdentity) -> tuple[Action, str, str]:
        """Returns the action for training that this run has not started, its reason, and the run that has done the same
        training.

        The end of a run's id depends on the training alone, not on the experiment's name. From runs with fewer steps it
        takes one of the experiment whose every step is one of this run's too.
        """
        stage = run.stages["train"]
        for directory in sorted(self._home.root.glob(f"runs/*-{run.run_id.rpartition('-')[2]}")):
            if directory.name != run.run_id and not damage_of(directory / "train.json", stage.fingerprint):
                return "CACHED", f"trained as {directory.name}", directory.name
        shorter = [plan for plan in self._earlier_plans if self._is_beginning(plan, run)]
        longest = max(shorter, key=lambda plan: _steps(plan), default=None)
        if longest is None:
            return "RUN", "", ""
        if why := _why_anew(run.cell.experiment, longest["stages"]["evaluate"], run.stages["evaluate"]):
            change = f"training.steps {_steps(longest)} -> {run.cell.experiment.training.steps}"
            return "RUN", f"{change}{self._place('training.steps', run.cell.values)}; from the start: {why}", ""
        source = longest["run_id"]
        return "RESUME", f"continues from step {_steps(longest)} of {source}", source

    def _begun_by_another(self, run: _RunIdentity) -> tuple[int, str]:
        """Returns the latest step up to which a run of the experiment was trained with the same values and kept its
        state, and that run; (0, "") without such a run."""
        if run.cell.experiment.rollout.max_staleness:  # batches are sampled ahead, some under other values
            return 0, ""
        found = ((self._shared_step(plan, run), str(plan["run_id"])) for plan in self._earlier_plans)
        return max((each for each in found if each[0]), default=(0, ""))

    def _shared_step(self, plan: dict[str, Any], run: _RunIdentity) -> int:
        """Returns the last saved step up to which an earlier run is the same as this one; 0 without such a step."""
        before, now = plan["stages"].get("train"), run.stages["train"]
        if not before or before["inputs"] != now.inputs or plan["run_id"] == run.run_id:
            return 0
        shared = shared_steps(before["identity"], now.identity, int(now.identity[_STEPS]))
        evaluate, measured = run.stages["evaluate"], plan["stages"]["evaluate"]
        is_measured_alike = (measured["identity"], measured["inputs"]["data"]) == (
            evaluate.identity,
            evaluate.inputs["data"],
        )
        same_code = fp.fingerprint("train", before["identity"], before["inputs"], now.code)
        directory = self._home.run(plan["run_id"])
        if (
            not shared
            or before["fingerprint"] != same_code
            or (run.cell.experiment.evaluation.every_steps and not is_measured_alike)
            or (directory / "guards.json").exists()  # rolled back: its learning rate differs from there on
        ):
            return 0
        saved = [
            int(file.parent.name.removeprefix("step-")) for file in directory.glob("checkpoints/step-*/manifest.json")
        ]
        return max((step for step in saved if step <= shared), default=0)

    def _evaluated_by_another(self, run: _RunIdentity) -> str:
        """Returns the run, under another name, that has done the same evaluation; empty without such a run."""
        fingerprint = run.stages["evaluate"].fingerprint
        for directory in sorted(self._home.root.glob(f"runs/*-{run.run_id.rpartition('-')[2]}")):
            manifest = manifest_of("evaluate", self._output(directory.name, "evaluate", fingerprint))
            if directory.name != run.run_id and not damage_of(manifest, fingerprint):
                return directory.name
        return ""

    def _is_beginning(self, plan: dict[str, Any], run: _RunIdentity) -> bool:
        """Returns whether an earlier run with the same spec but fewer steps was trained to its end and has kept its
        last state."""
        before, now = plan["stages"].get("train"), run.stages["train"]
        if not before or before["inputs"] != now.inputs:
            return False
        old, new = before["identity"], now.identity
        changed = {path for path in old.keys() | new.keys() if old.get(path, ...) != new.get(path, ...)}
        if changed != {_STEPS} or old[_STEPS] >= new[_STEPS]:
            return False
        directory = self._home.run(plan["run_id"])
        same_code = fp.fingerprint("train", old, before["inputs"], now.code)
        saved = directory / "checkpoints" / f"step-{old[_STEPS]:06}" / "manifest.json"
        return saved.is_file() and not damage_of(directory / "train.json", same_code)

    def _predecessor(self, run: _RunIdentity) -> dict[str, Any] | None:
        """Returns the last plan of the run that this one replaces: the same run, else a run of the same cell (with the
        same seed if possible), else a run with the same seed, else any run. If there are several, the one with
        the fewest differences."""
        values, seed = run.cell.values, run.cell.seed
        likenesses: tuple[Callable[[dict[str, Any]], bool], ...] = (
            lambda record: record["run_id"] == run.run_id,
            lambda record: record["values"] == values and record["seed"] == seed,
            lambda record: record["values"] == values,
            lambda record: record["seed"] == seed,
            lambda _record: True,
        )
        for is_like in likenesses:
            if alike := [record for record in self._earlier_plans if is_like(record)]:
                nearest: dict[str, Any] = min(reversed(alike), key=lambda record: _num_differences(record, run))
                return nearest
        return None

    def _changes(self, name: str, stage: _StageIdentity, unfinished: list[str], run: _RunIdentity) -> str:
        """Returns why a stage with a missing result runs: the differences from the previous plan."""
        predecessor = self._predecessor(run)
        before = predecessor["stages"].get(name) if predecessor else None
        if before is None:
            return "new"
        values = run.cell.values
        found = changes(name, before, stage.record(), varied=values, place_of=lambda path: self._place(path, values))
        return found or (f"{' and '.join(unfinished)} will run" if unfinished else "not finished before")

    def _place(self, path: str, values: Mapping[str, Any]) -> str:
        """Returns a field's place in the spec: ` (FILE:LINE)`, ` (--set)`, or ` (default)` if the spec leaves it out.
        `values`: the cell's values."""
        parts = tuple(int(part) if part.isdigit() else part for part in path.split("."))
        if unknown(Experiment, parts) is None and not says(cell_source(self._document.source, values), parts):
            return " (default)"
        located = self._document.locate(Issue("", path=parts), values)
        if located.line:
            return f" ({Path(located.file).name}:{located.line})"
        return " (--set)" if located.file.startswith("--set") else ""


def _num_differences(plan: dict[str, Any], run: _RunIdentity) -> int:
    """Returns in how many fields a recorded plan differs from a run."""
    stages = [(plan["stages"].get(name, {}).get("identity", {}), stage.identity) for name, stage in run.stages.items()]
    return sum(old.get(path, ...) != new.get(path, ...) for old, new in stages for path in old.keys() | new.keys())


def _steps(plan: dict[str, Any]) -> int:
    """Returns the training steps of a run's recorded plan."""
    return int(plan["stages"]["train"]["identity"][_STEPS])


def why_from_the_start(experiment: Experiment) -> str:
    """Returns why training cannot continue from the end of a run with fewer steps; empty if it can."""
    schedule = experiment.training.schedule.type
    if schedule != "constant":
        return f"the rate of a {schedule} schedule at each step depends on the number of steps"
    if experiment.rollout.max_staleness:
        return "rollout.max_staleness samples steps ahead, but nothing was sampled ahead of the last steps"
    return ""


def _why_anew(experiment: Experiment, measured: dict[str, Any], evaluate: _StageIdentity) -> str:
    """Returns why training cannot resume from the end of a run with fewer steps; empty if it can.

    Args:
        measured: the evaluate stage in that run's recorded plan.
    """
    if why := why_from_the_start(experiment):
        return why
    same = (measured["identity"], measured["inputs"]["data"]) == (evaluate.identity, evaluate.inputs["data"])
    if experiment.evaluation.every_steps and not same:
        return "the evaluations during training had other settings"
    return ""


def _identify(cell: "Cell", code: Code, run_id: str = "", accepted: dict[str, Any] | None = None) -> _RunIdentity:
    """Identifies the stages of a cell's run.

    Args:
        run_id: id of the run whose stages are accepted.
        accepted: stage -> its record, for the stages whose results are reused whatever code made them.
    """
    experiment = cell.experiment
    stages: dict[str, _StageIdentity] = {}
    accepted = accepted or {}

    def add(name: str, identity: fp.Identity, inputs: dict[str, str]) -> None:
        differences = code.of_stage(name, experiment)
        digest = fp.fingerprint(name, identity, inputs, differences)
        now = _StageIdentity(digest, identity, inputs, differences, release().results[name])
        recorded = accepted.get(name, {})
        if recorded and recorded["fingerprint"] != digest:
            why = "; ".join(code_changes(name, recorded, now.record())) or "what it was made from is"
            found = (recorded.get("code", {}), recorded["results"])
            now = _StageIdentity(recorded["fingerprint"], identity, recorded["inputs"], *found, why)
        stages[name] = now

    if not experiment.trains:
        add("data", fp.data_identity(experiment), {})
        add("base", fp.base_identity(experiment), {})
        add("evaluate", fp.evaluate_identity(experiment), {name: stages[name].fingerprint for name in ("data", "base")})
        evaluate = stages["evaluate"].fingerprint
        add("report", fp.report_identity(experiment), {"evaluate": evaluate})
        is_recorded = bool(stages["evaluate"].accepted)
        return _RunIdentity(run_id if is_recorded else f"{experiment.name}-{evaluate[:8]}", cell, stages)
    add("data", fp.data_identity(experiment), {})
    # Training depends on the training problems alone: another evaluation set must not train again.
    data = stages["data"]
    train_code = data.code if data.accepted else code.of_training_data(experiment)
    train_data = fp.fingerprint("data", fp.train_data_identity(experiment), {}, train_code, results=data.results)
    add("base", fp.base_identity(experiment), {"data": train_data} if fp.base_reads_data(experiment) else {})
    add("train", fp.train_identity(experiment), {"data": train_data, "base": stages["base"].fingerprint})
    train = stages["train"].fingerprint
    add("evaluate", fp.evaluate_identity(experiment), {"data": data.fingerprint, "train": train})
    add("report", fp.report_identity(experiment), {"train": train, "evaluate": stages["evaluate"].fingerprint})
    return _RunIdentity(run_id if stages["train"].accepted else _run_id(cell, train), cell, stages)


def _run_id(cell: "Cell", train_fingerprint: str) -> str:
    digest = fp.fingerprint("train", {"measured": _measured(cell.values)}, {"train": train_fingerprint})
    return f"{cell.experiment.name}-s{cell.experiment.seeds[0]}-{digest[:8]}"


def _measured(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the evaluation section. If a value changes, the same run is evaluated again; but cells that
    differ only in this section are separate runs.
    """
    return {path: value for path, value in values.items() if path.startswith(("evaluation", "data.evaluation"))}


def _run_name(cell: "Cell") -> str:
    if not cell.experiment.trains:
        return cell.label
    shown = [f"{path.removeprefix('objective.')}={short(value)}" for path, value in cell.values.items()]
    return " ".join([*([f"{cell.label},"] if cell.label else shown), f"seed {cell.seed}"])
