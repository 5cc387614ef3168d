"""The check of data, model and this machine before anything runs, for the verbs that start runs or report on them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pipelines.planning.certificates import certificate_lines, certified_runs, refused_candidates
from pipelines.planning.memory_warnings import memory_errors
from specs.errors import Issue, SpecError, in_file_order, render
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from pipelines.home.home import Home
    from pipelines.planning.plan import RunPlan
    from pipelines.running.gpu_slots import AskRoom
    from specs.document import Document
    from specs.schema.experiment import Experiment


_READERS = ("data", "base", "train")
"""Stages that read the data and models of a spec."""


def refuse_what_a_stage_would(
    document: Document | StudyDocument,
    runs: Sequence[RunPlan],
    home: Home | None,
    *,
    quiet: bool = False,
    ask: AskRoom | None = None,
) -> None:
    """Raises SpecError for errors in the data and the models of runs that are still to train, or if a package that a
    sink needs is missing; warnings about data and models go to stderr. The check takes seconds.

    Args:
        home: home of the runs, if this machine is to execute them: it must then meet their requirements. None: another
            machine executes them.
        quiet: hides the notice that the check takes a while.
        ask: as for `missing_for`.
    """
    to_do, own = unfinished(runs), _with_runs(document)
    missing: list[Issue] = []
    if home is not None:
        missing = [*missing_for_sinks(own, runs), *missing_for(own, to_do, ask), *unscorable(own, to_do)]
    if to_do and home is not None:
        home.check_space()
    if to_do and not quiet:
        print("checking the data and the model", file=sys.stderr)
    errors, absent, warnings = examined(document, to_do, forked=home is not None)
    if errors := in_file_order([*missing, *errors, *(absent if home is not None else [])]):
        raise SpecError(*errors)
    if warnings:
        print(render(warnings, noun="warning"), file=sys.stderr)
    for line in [] if quiet else certificate_lines(to_do):
        print(f"objective: {line}", file=sys.stderr)


def _with_runs(document: Document | StudyDocument) -> Document:
    """Returns the document whose runs are planned: a study's experiment, or the document itself."""
    return document.experiment if isinstance(document, StudyDocument) else document


def unfinished(runs: Sequence[RunPlan]) -> list[RunPlan]:
    """Returns the runs whose data, base model or training is unfinished."""
    return [run for run in runs if any(stage.stage in _READERS and stage.action == "RUN" for stage in run.stages)]


def missing_for_sinks(document: Document, runs: Sequence[RunPlan]) -> list[Issue]:
    """Returns the sinks' requirements that this machine does not meet, at their place; empty if no work is left."""
    from specs.schema.execution import missing_packages

    if all(stage.action == "CACHED" for run in runs for stage in run.stages):
        return []
    return [document.locate(issue) for issue in missing_packages(document.experiment.sinks)]


def missing_for(document: Document, runs: Sequence[RunPlan], ask: AskRoom | None = None) -> list[Issue]:
    """Returns the requirements of a document's runs that this machine, which executes them, does not meet, each at its
    place.

    Args:
        ask: function that queries the launcher. By default this call makes a new query.
    """
    from pipelines.running.gpu_slots import ask_room, asked_of_machines, missing_here

    # Most cells of a matrix have the same machine requirements.
    distinct = {asked_of_machines(run.experiment): run for run in runs}.values()
    return in_file_order(
        document.locate(issue, run.values)
        for run in distinct
        for issue in missing_here(run.experiment, ask or ask_room)
    )


def unscorable(document: Document, runs: Sequence[RunPlan]) -> list[Issue]:
    """Returns why this machine may not score the runs that it is to execute, each at its place."""
    from pipelines.launchers import launcher_of
    from rpg.rewards import refusals

    here = [run for run in runs if launcher_of(run.experiment).ranks_run_here]
    # Most cells of a matrix score alike, and a check may start a sandboxed process.
    distinct = {repr(([*run.experiment.rewards()], run.experiment.rollout.rollouter)): run for run in here}.values()
    refused = ((issue, run.values) for run in distinct for issue in refusals(run.experiment))
    return in_file_order(document.locate(issue, values) for issue, values in refused)


def examined(
    document: Document | StudyDocument, runs: Sequence[RunPlan], *, forked: bool = False, thorough: bool = False
) -> tuple[list[Issue], list[Issue], list[Issue]]:
    """Checks the data, models and formulas of a document's runs, and the formulas of a study's candidates. Returns the
    findings, each once, at its place.

    Args:
        forked: check in a fork if one is possible: it shares its imports with the count before it or the stages after
        it.
        thorough: check the model even if the base stage has made it and training has no further requirements.
    Returns:
        errors; items that are not on this machine and cannot be fetched, which are errors if it executes the runs;
        warnings.
    """
    refused = refused_candidates(document) if isinstance(document, StudyDocument) else []
    if not runs:
        return refused, [], []
    document = _with_runs(document)
    # Most cells of a matrix have the same data and model.
    distinct = {(*_looked_at(run.experiment), _is_made(run)): run for run in runs}
    findings = [(run.values, _known_or_examined(run, forked, thorough)) for run in distinct.values()]
    errors = [document.locate(issue, values) for values, (found, _, _) in findings for issue in found]
    errors += [document.locate(issue, run.values) for run, found in certified_runs(runs) for issue in found.issues]
    errors += [document.locate(issue, run.values) for run in runs for issue in memory_errors(run.experiment)]
    absent = [document.locate(issue, values) for values, (_, found, _) in findings for issue in found]
    warnings = [document.locate(issue, values) for values, (_, _, found) in findings for issue in found]
    return in_file_order([*refused, *errors]), in_file_order(absent), in_file_order(warnings)


def _looked_at(experiment: Experiment) -> tuple[Hashable, ...]:
    """Returns the parts of the experiment that the findings depend on."""
    training, teacher = experiment.training, experiment.reference.teacher
    data, model = experiment.data.model_dump_json(), experiment.model.model_dump_json()
    routing = training.router_aux_loss_coef, experiment.rollout.replay_routing
    asked = (training.lora, training.sequence_parallel_size, *routing, _entropy_target(experiment))
    return model, data, *asked, teacher and teacher.model_dump_json()


def _known_or_examined(run: RunPlan, forked: bool, thorough: bool) -> tuple[list[Issue], list[Issue], list[Issue]]:
    """Returns errors, absent items and warnings from a check of a run's data and model, or from the recorded check.

    The check imports transformers. A check of the same contents that found nothing but warnings would find the same
    again.
    """
    from specs.errors import read_issue
    from specs.machine.files import DiskError, read_json, write_json

    note_of_model = _note_of_model(run)
    is_known = note_of_model is not None and bool(read_json(note_of_model))
    model = not is_known and (thorough or _asks_of_model(run))
    note = _note_of_look(run, model or is_known)
    if note and (known := read_json(note)):
        return [], [], [read_issue(issue) for issue in known["warnings"]]
    from pipelines.running.look import look_in_fork
    from specs.machine.parent import before_torch

    before_torch()
    from rpg.preflight import examine

    findings = look_in_fork(run.experiment, model=model) if forked else None
    findings = findings or examine(run.experiment, model=model)
    if not findings.errors and not findings.absent:
        with suppress(OSError, DiskError):  # the next call checks again
            if note:
                write_json(note, {"warnings": [asdict(issue) for issue in findings.warnings]})
            if note_of_model and model:
                write_json(note_of_model, {"found": "nothing wrong"})
    return findings.errors, findings.absent, findings.warnings


def _note_of_look(run: RunPlan, model: bool) -> Path | None:
    """Returns the file with the findings of a check, with or without the model, named by all that it depends on. None
    if the contents of data or model are unknown."""
    experiment, stages = run.experiment, [run.stage(name) for name in ("data", "base")]
    read = _are_read_here(experiment), _is_read_here(experiment)
    if not all(here or stage.action == "CACHED" for stage, here in zip(stages, read, strict=True)):
        return None
    rollouter = experiment.rollout.rollouter
    if any(tool.type == "mcp" for tool in getattr(rollouter, "tools", ())):  # its server decides the content of prompts
        return None
    asked = [experiment.rollout.model_dump_json(), experiment.reward.model_dump_json(), str(_looked_at(experiment))]
    return _note(run, [stage.fingerprint for stage in stages], asked, bool(rollouter.lacks()), model)


def _note_of_model(run: RunPlan) -> Path | None:
    """Returns the file that exists if a check of the model, and of training's requirements on it, found no errors. None
    if the model's contents are unknown."""
    if not _is_read_here(run.experiment):
        return None
    identity = {path: value for path, value in run.stage("base").identity.items() if path.startswith("model.")}
    model, _, *asked = _looked_at(run.experiment)
    return _note(run, identity, [str(model), *map(str, asked)])


def _note(run: RunPlan, *looked_at: Any) -> Path | None:
    """Returns a file named by the checked inputs and by the checking code, whose messages it keeps. None if there is a
    teacher, which may lie anywhere and is never made by a stage."""
    if not run.experiment.trains or run.experiment.reference.teacher:
        return None
    from pipelines.planning.code import ROOT
    from specs.machine.own_cache import place_to_save_time

    files = sorted(file for package in ("rpg", "specs") for file in (ROOT / package).rglob("*.py"))
    code = [[str(file), status.st_size, status.st_mtime_ns] for file in files if (status := file.stat())]
    others = [run.stage(name).code for name in ("train", "evaluate")], *map(version, ("torch", "transformers"))
    digest = hashlib.sha256(json.dumps([*looked_at, code, others], sort_keys=True).encode()).hexdigest()
    return place_to_save_time("planning", "looks", f"{digest[:32]}.json")


def _are_read_here(experiment: Experiment) -> bool:
    """Returns whether the data's fingerprint covers all their contents: generated data, or files on this machine. The
    content under a Hub name may change."""
    sources = [*experiment.data.train, *experiment.data.evaluation]
    files = [[path for _, _, path in source.paths()] for source in sources]
    return all(
        source.generated or (named and all(map(os.path.exists, named)))
        for source, named in zip(sources, files, strict=True)
    )


def _is_read_here(experiment: Experiment) -> bool:
    """Returns whether the base model's fingerprint covers all its contents, as `_are_read_here` does for the data."""
    model = experiment.model
    return model.source == "scratch" or os.path.isdir(model.path)


def _asks_of_model(run: RunPlan) -> bool:
    """Returns whether the model must be checked: it is not made yet, or training has requirements that an existing base
    model need not meet."""
    training = run.experiment.training
    routing = training.router_aux_loss_coef is not None or run.experiment.rollout.replay_routing
    asked = training.lora or routing or run.experiment.reference.teacher or _entropy_target(run.experiment)
    return not _is_made(run) or bool(asked) or training.sequence_parallel_size > 1


def _entropy_target(experiment: Experiment) -> float:
    """Returns the target of a closed loop on the entropy, which the model's vocabulary bounds; 0 without one."""
    from specs.schema.schedule import ClosedLoop

    loop = experiment.training.entropy_coef
    return loop.target if isinstance(loop, ClosedLoop) else 0.0


def _is_made(run: RunPlan) -> bool:
    """Returns whether the base model exists, which proves that it could be made."""
    return run.stage("base").action == "CACHED"
