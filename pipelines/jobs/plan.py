"""The plan of an experiment, a study or an evaluation: as data, as text, and the errors in its data and models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.home.home import Home
    from pipelines.planning.device import Device
    from pipelines.planning.memory import MemoryEstimate
    from pipelines.planning.plan import Plan, StagePlan
    from pipelines.planning.steps.parts import MeanLengths
    from rpg.base.shape import ModelShape
    from specs.document import Document
    from specs.errors import Issue
    from specs.schema.experiment import Experiment
    from specs.study_document import StudyDocument

MOST_RUNS = 8
"""Largest number of runs that are shown one by one."""
_MOST_REASONS = 5
"""Largest number of reasons that the summary of many runs names for a stage."""


def runs_document(document: Document | StudyDocument) -> Document:
    """Returns the document whose runs are planned: a study's experiment, or the document itself."""
    from specs.study_document import StudyDocument

    return document.experiment if isinstance(document, StudyDocument) else document


def plan_data(
    document: Document | StudyDocument, made: Plan, home: Home, *, means: MeanLengths | None = None
) -> dict[str, Any]:
    """Returns the plan as JSON data.

    Args:
        made: the plan of `runs_document`.
        means: mean lengths that the time of a step assumes. If left out, the longest.
    """
    from specs.study_document import StudyDocument

    if isinstance(document, StudyDocument):
        from pipelines.jobs.study_plan import study_plan_data

        return study_plan_data(document, made, home)
    return _as_data(made, means)


def print_plan(
    document: Document | StudyDocument,
    made: Plan,
    home: Home,
    console: Console,
    *,
    all_runs: bool = False,
    means: MeanLengths | None = None,
    placement: bool = False,
) -> None:
    """Prints the plan for a reader.

    Args:
        all_runs: shows every run, however many there are.
        means: see `plan_data`.
        placement: shows each split of the GPUs between training and sampling.
    """
    from specs.study_document import StudyDocument

    if isinstance(document, StudyDocument):
        from pipelines.jobs.study_plan import print_study_plan, study_plan_data

        print_study_plan(document, study_plan_data(document, made, home), console)
    else:
        _print_runs(made, each=all_runs or len(made.runs) <= MOST_RUNS, console=console)
        for line in _step(made, means, placement=placement):
            console.print(line, markup=False)


def findings(document: Document | StudyDocument, made: Plan, home: Home) -> tuple[list[Issue], list[Issue]]:
    """Returns errors and warnings of a plan, from a check of the data and the models of the work that is still to
    run.
    """
    from huggingface_hub import is_offline_mode

    from pipelines.jobs.preflight import examined, missing_for, unfinished, unscorable
    from pipelines.planning.gpu_hours import precision_warnings
    from pipelines.planning.memory_warnings import disk_warnings, memory_warnings
    from pipelines.processes.forking import has_forked
    from pipelines.processes.gpu_faults import gpu_faults
    from pipelines.running.gpu_slots import concurrency_warnings
    from specs.errors import Issue, in_file_order

    experiment = made.document
    of_runs = {
        warning
        for run in made.runs
        if run.experiment.trains
        for warning in (
            *memory_warnings(run.experiment),
            *precision_warnings(run.experiment),
            *concurrency_warnings(run.experiment),
        )
    }
    to_train = [run.experiment for run in made.runs if run.experiment.trains and run.stage("train").action != "CACHED"]
    of_runs.update(disk_warnings(to_train, home.free_bytes))
    if any(each.resources.device != "cpu" and each.launcher.type == "local" for each in to_train):
        of_runs.update(
            Issue(fault, ("resources", "device"), hint="see docs/clusters.md: faults of GPUs") for fault in gpu_faults()
        )
    of_runs.update(never_examined(to_train, home))
    warnings = [*document.warnings, *(experiment.locate(warning) for warning in of_runs)]
    to_do = unfinished(made.runs)
    errors, absent, odd = examined(document, to_do, forked=has_forked())
    if absent and is_offline_mode():
        errors, absent = [*errors, *absent], []
    warnings = [*warnings, *missing_for(experiment, to_do), *absent, *odd]
    return in_file_order([*errors, *unscorable(experiment, to_do)]), warnings


def never_examined(to_train: list[Experiment], home: Home) -> Iterator[Issue]:
    """Yields a warning for each kind of launcher whose GPUs `rpg doctor --gpu` has never checked."""
    import shutil
    import socket

    from pipelines.home.examined import is_examined
    from specs.errors import Issue

    on_gpus = {each.launcher.type for each in to_train if each.resources.device != "cpu"}
    if "local" in on_gpus and shutil.which("nvidia-smi") and not is_examined(home, "local", socket.gethostname()):
        hint = "`rpg doctor --gpu` tests them in a few minutes: arithmetic, links, memory, vLLM"
        yield Issue("the GPUs of this machine were never checked", ("resources", "device"), hint=hint)
    asked_for = {each.launcher.type for each in to_train if each.resources.device == "cuda"}
    for launcher in sorted((on_gpus & asked_for) - {"local"}):
        if not is_examined(home, launcher):
            hint = "`rpg doctor --gpu FILE` with this file tests them in a few minutes: arithmetic, links, memory, vLLM"
            yield Issue("GPUs of this launcher were never checked", ("launcher", "type"), hint=hint)


def _as_data(made: Plan, means: MeanLengths | None) -> dict[str, Any]:
    """Returns the plan as JSON data."""
    from pipelines.planning.steps.parts import MeanLengths
    from pipelines.planning.steps.words import step_data

    timed = _on_gpus(made)
    return {
        "experiment": made.document.experiment.name,
        "step": step_data(*timed, means or MeanLengths()) if timed else None,
        "runs": [
            {
                "run_id": run.run_id,
                "name": run.name,
                "seed": run.seed if run.experiment.trains else None,
                "values": run.values,
                **(_of_training(run.experiment) if run.experiment.trains else {}),
                "stages": [
                    {
                        "stage": stage.stage,
                        "action": stage.action,
                        "reason": stage.reason,
                        "fingerprint": stage.fingerprint,
                        "output": str(stage.output),
                    }
                    for stage in run.stages
                ],
            }
            for run in made.runs
        ],
    }


def _of_training(experiment: Experiment) -> dict[str, Any]:
    from dataclasses import asdict

    from pipelines.planning.certificates import certified
    from pipelines.planning.judging import judging
    from pipelines.planning.memory import batch_algebra

    return {
        "batch": asdict(batch_algebra(experiment)),
        "memory": _memory(experiment),
        "gpu_hours": _gpu_hours(experiment),
        "judges": [asdict(each) for each in judging(experiment)],
        "schedules": _schedules(experiment),
        "certificate": list(certified(experiment).lines),
    }


def _schedules(experiment: Experiment) -> dict[str, str]:
    """Returns path -> schedule or closed loop, in words, of each field that changes over training."""
    from specs.schema.schedule import loops_in, schedules_in

    return {".".join(path): str(each) for path, each in (*schedules_in(experiment), *loops_in(experiment))}


def _memory(experiment: Experiment) -> dict[str, Any] | None:
    from dataclasses import asdict

    from pipelines.planning.device import device_of
    from pipelines.planning.gpu_sharing import gpu_sharing, planned_on
    from pipelines.planning.memory import memory_estimate
    from pipelines.planning.model_shape import model_shape

    shape = model_shape(experiment)
    if shape is None:
        return None
    device = device_of(experiment, shape)
    estimate = memory_estimate(planned_on(experiment, shape, device), shape)
    sharing = gpu_sharing(experiment, shape, device)
    held_against = {"device": asdict(device) if device else None, "sharing": asdict(sharing) if sharing else None}
    counted = ("parameters", "active_parameters", "expert_parameters", "router_parameters")
    counts = {name: getattr(shape, name) for name in counted}
    return {**asdict(estimate), "total": estimate.total, **counts, **held_against}


def _gpu_hours(experiment: Experiment) -> dict[str, float] | None:
    from dataclasses import asdict

    from pipelines.planning.gpu_hours import gpu_hours
    from pipelines.planning.model_shape import model_shape

    shape = model_shape(experiment)
    return {**asdict(gpu_hours(experiment, shape)), "total": gpu_hours(experiment, shape).total} if shape else None


def _on_gpus(made: Plan) -> tuple[Experiment, ModelShape, Device | None] | None:
    """Returns the first run with its model's shape and its device, if a large model trains on GPUs."""
    from pipelines.planning.device import LARGE, device_of
    from pipelines.planning.model_shape import model_shape

    experiment = made.runs[0].experiment
    shape = model_shape(experiment) if experiment.trains else None
    if shape is None or experiment.resources.device == "cpu" or shape.parameters < LARGE:
        return None
    return experiment, shape, device_of(experiment, shape)


def _step(made: Plan, means: MeanLengths | None, *, placement: bool) -> list[str]:
    """Returns the time of a step of the first run, in lines."""
    from pipelines.planning.steps.parts import MeanLengths
    from pipelines.planning.steps.words import placement_lines, step_lines

    if timed := _on_gpus(made):
        lengths = means or MeanLengths()
        return [*step_lines(*timed, lengths), *(placement_lines(*timed, lengths) if placement else [])]
    return ["split   no run trains a model of 50 million parameters or more on GPUs"] if placement else []


def _print_runs(made: Plan, *, each: bool, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    experiment = made.document.experiment
    if changed := _changed(made):
        console.print(f"[bold]changed[/]  {escape(changed[0])}")
        for line in changed[1:]:
            console.print(f"         {line}", markup=False)
        console.print()
    console.print(f"[bold]{experiment.name}[/]  {escape(experiment.question)}", end="\n\n")
    colours = {"RUN": "yellow", "RESUME": "cyan", "CACHED": "green"}
    if not each:
        console.print(f"[bold]{len(made.runs)} runs[/]; `--all` shows each")
        table = Table(box=None, pad_edge=False, show_header=False)
        for stage, action, number, reason in _summary(made):
            colour = colours.get(action, "default")
            table.add_row(f"  {stage}", f"[{colour}]{action}[/]", f"{number}", escape(reason))
        console.print(table)
    for run in made.runs if each else ():
        table = Table(box=None, pad_edge=False, show_header=False)
        for planned in run.stages:
            colour = colours[planned.action]
            table.add_row(
                f"  {planned.stage}", f"[{colour}]{planned.action}[/]", escape(planned.reason), planned.fingerprint[:8]
            )
        console.print(f"[bold]{run.run_id}[/]  {escape(run.name)}")
        console.print(table)
    for line in _algebra(made):
        console.print(line, markup=False)


def _changed(made: Plan) -> list[str]:
    """Returns what changed in the spec since the earlier runs, for the first stage of each run that it affects."""
    found: dict[str, None] = {}
    for run in made.runs:
        of_stages = [planned.reason.split("; ") for planned in run.stages if planned.action == "RUN"]
        changes = [[each for each in reasons if " -> " in each] for reasons in of_stages]
        found.update(dict.fromkeys(next(filter(None, changes), ())))
    shown = list(found)[:_MOST_REASONS]
    return [*shown, *([f"and {len(found) - len(shown)} other changes"] if len(found) > len(shown) else [])]


def _summary(made: Plan) -> Iterator[tuple[str, str, int, str]]:
    """Yields a line for each action of a stage over all runs: stage, action, number of runs, reason;
    most frequent first."""
    stages = dict.fromkeys(planned.stage for run in made.runs for planned in run.stages)
    for stage in stages:
        counts = Counter(
            (planned.action, _of_any_run(planned))
            for run in made.runs
            for planned in run.stages
            if planned.stage == stage
        ).most_common()
        for row, ((action, reason), number) in enumerate(counts[:_MOST_REASONS]):
            yield stage if row == 0 else "", action, number, reason
        if rest := counts[_MOST_REASONS:]:
            yield "", "", sum(number for _, number in rest), f"for {len(rest)} other reasons"


def _of_any_run(planned: StagePlan) -> str:
    """Returns a stage's reason without the id of the run that it takes its results from."""
    return planned.reason.replace(planned.taken_from, "another run") if planned.taken_from else planned.reason


def _algebra(made: Plan) -> list[str]:
    """Returns the batch arithmetic of the first run, how the other runs differ, and the estimates of the run that needs
    the most memory."""
    from pipelines.planning.certificates import certificate_lines
    from pipelines.planning.device import LARGE, device_of
    from pipelines.planning.gpu_hours import SAMPLING_SHARE, gpu_hours
    from pipelines.planning.gpu_sharing import gpu_sharing
    from pipelines.planning.judging import judging, sentences
    from pipelines.planning.memory import GIB, batch_algebra
    from pipelines.planning.model_shape import model_shape, settings_of

    experiment = made.runs[0].experiment
    if not experiment.trains:
        return ["", *dict.fromkeys(_asked(run.experiment) for run in made.runs)]
    batch = batch_algebra(experiment)
    lines = [
        "",
        f"batch   {batch.prompts_per_step} prompts x {batch.group_size} responses = "
        f"{batch.rollouts_per_step} rollouts a step; "
        f"{batch.minibatches} minibatches of {batch.rollouts_per_update} x {experiment.training.epochs} epochs = "
        f"{batch.updates_per_step} updates a step, {batch.updates} in {experiment.training.steps} steps",
        f"tokens  at most {_count(batch.tokens_to_sample)} to sample"
        + (f", {_count(batch.tokens_given)} given" if batch.tokens_given else "")
        + f" and {_count(batch.tokens_to_train)} to train on, a run",
    ]
    if batch.recorded_bytes:
        lines.append(
            f"record  token rows of at most {_size(batch.recorded_bytes // experiment.training.steps)} a step, "
            f"{_size(batch.recorded_bytes)} a run (record.tokens: {experiment.record.tokens})"
        )
    lines += _turns(experiment)
    if dynamic := experiment.rollout.dynamic_sampling:
        at_once = math.ceil(dynamic.oversampling * batch.prompts_per_step)
        how = "in rounds" if dynamic.refill == "rounds" else f"as a stream that begins with {at_once} prompts"
        lines.append(
            f"refill  groups without signal are replaced {how} (rollout.dynamic_sampling.refill); "
            f"the tokens to sample are counted for {dynamic.max_batches} times the prompts"
        )
    lines += sentences(judging(experiment), _count)
    needs = sorted(_needs(made), key=lambda need: -need[0].total)  # stable: the first run's, if all need the same
    experiment = needs[0][1] if needs else experiment
    shape = model_shape(experiment)
    if shape is None:
        known = settings_of(experiment.model) is not None
        why = (
            "transformers cannot build it from its config" if known else "the model's config is not on this machine yet"
        )
        lines.append(f"memory  unknown, and so are GPU hours: {why}")
    else:
        device = device_of(experiment, shape)
        parts, least = needs[0][0], needs[-1][0].total
        named = ["weights", "gradients", "optimizer", "reference", "activations", "logits", "kv_cache"]
        named += [
            name for name in ("sampler", "gathered", "distributions", "buckets", "scoring") if getattr(parts, name)
        ]
        listed = ", ".join(f"{name.replace('_', ' ')} {_size(getattr(parts, name))}" for name in named)
        lines.append(
            f"memory  about {parts.total / GIB:.2f} GiB a rank{_of(device)} for "
            f"{_count(shape.parameters)} parameters{_experts(shape)}: {listed}"
            + (f"; {_size(parts.away)} of it in host memory while rollouts are sampled" if parts.away else "")
            + (f"; the most of any run, another needs {least / GIB:.2f} GiB" if least < parts.total else "")
            + (
                "; the teacher is not included, because its config is not on this machine yet"
                if _teacher_unknown(experiment)
                else ""
            )
        )
        if sharing := gpu_sharing(experiment, shape, device):
            lines.append(f"shared  {sharing}")
        if device:
            lines.append(f"kernels {_kernels(experiment)}")
        if experiment.resources.device != "cpu" and shape.parameters >= LARGE:
            hours = gpu_hours(experiment, shape)
            rounds = f" in {dynamic.max_batches} rounds a step" if dynamic else ""
            evaluation = "" if hours.evaluation is None else f"{hours.evaluation:,.0f} to evaluate, "
            lines.append(
                f"time    about {hours.total:,.0f} GPU hours a run, all responses at full length: "
                f"{hours.sampling:,.0f} to sample{rounds}, {hours.training:,.0f} to train, {evaluation}"
                f"on H100s at {SAMPLING_SHARE:.0%} of their bandwidth and "
                f"{hours.share_of_peak:.0%} of their bfloat16 peak (mfu); "
                f"{hours.total * len(made.runs):,.0f} for all runs"
                + (
                    "; evaluation is not included: the size of a set is not known yet"
                    if hours.evaluation is None
                    else ""
                )
            )
    lines += [f"claim   {line}" for line in certificate_lines(made.runs)[:MOST_RUNS]]
    changing = dict.fromkeys(entry for run in made.runs for entry in _schedules(run.experiment).items())
    lines += [f"changes {path} {schedule}" for path, schedule in changing]
    others = sum(batch_algebra(run.experiment) != batch for run in made.runs)
    if others:
        lines.append(
            f"        of the first run; {others} of {len(made.runs)} runs differ from it (--json has them all)"
        )
    return lines


def _needs(made: Plan) -> Iterator[tuple[MemoryEstimate, Experiment]]:
    """Yields the memory of a rank and the spec, for one run of each cell whose model has a known shape."""
    from pipelines.planning.device import device_of
    from pipelines.planning.gpu_sharing import planned_on
    from pipelines.planning.memory import memory_estimate
    from pipelines.planning.model_shape import model_shape

    for experiment in {str(run.values): run.experiment for run in made.runs}.values():
        if shape := model_shape(experiment):
            yield memory_estimate(planned_on(experiment, shape, device_of(experiment, shape)), shape), experiment


def _kernels(experiment: Experiment) -> str:
    """Returns which kernels compute norms, rotations and gates on a GPU."""
    from pipelines.planning.roofline import fuses

    whose = "Liger-Kernel" if fuses(experiment) else "PyTorch"
    return f"{whose}'s for norms, rotations and gates (training.kernels: {experiment.training.kernels})"


def _turns(experiment: Experiment) -> list[str]:
    """Returns the limits of a response with several turns; empty for a single turn."""
    from pipelines.planning.memory import turn_bounds

    rollouter, bounds = experiment.rollout.rollouter, turn_bounds(experiment)
    if rollouter.bounds(bounds.length) is None:
        return [
            f"turns   as many as rollout.rollouter {rollouter.type} takes; at most {bounds.length} tokens a response"
        ]
    if bounds.turns == 1:
        return []
    return [
        f"turns   at most {bounds.turns} of the policy a response: {_count(bounds.sampled)} tokens sampled, "
        f"{_count(bounds.given)} given, {_count(bounds.length)} in all; "
        f"a response waits at most {bounds.seconds:g} s for them, while others are sampled"
    ]


def _teacher_unknown(experiment: Experiment) -> bool:
    from pipelines.planning.model_shape import teacher_shape

    return experiment.reference.source == "model" and teacher_shape(experiment) is None


def _asked(experiment: Experiment) -> str:
    """Returns the samples that an evaluation takes of each model, in words."""
    evaluation = experiment.evaluation
    sets = ", ".join(evaluation.datasets or (source.name for source in experiment.data.evaluation))
    length = evaluation.max_response_length or experiment.rollout.max_response_length
    return (
        f"samples {evaluation.samples_per_problem} responses a problem of {sets}, at most {length} tokens each, "
        f"temperature {evaluation.temperature:g}, top_p {evaluation.top_p:g}"
    )


def _experts(shape: ModelShape) -> str:
    """Returns, for a mixture of experts, the number of experts per token and the router's size."""
    if not shape.expert_parameters:
        return ""
    parts = f"experts {_count(shape.expert_parameters)}, router {_count(shape.router_parameters)}"
    return f" ({_count(shape.active_parameters)} active; {parts})"


def _of(device: Device | None) -> str:
    """Returns the device's memory, with which the estimate is compared, in words; empty without a device."""
    return f", of {device.memory_gib:g} GiB ({device.name})," if device else ""


def _count(number: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
