"""This machine's GPU slots for a stage's process, leased while it runs."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipelines.launchers import Room, launcher_of
from pipelines.processes.supervisor import StageError, StageStoppedError
from specs.errors import Issue, SpecError
from specs.machine.gpu_slots import OF_RUN, TooFewSlotsError, free_slots, leased, slots_here, slots_wanted
from specs.schema.experiment import Experiment
from specs.schema.launchers import package_missing
from specs.schema.rollout import not_installed

if TYPE_CHECKING:
    from pipelines.planning.plan import RunPlan
    from pipelines.running.run import RunExecution

AskRoom = Callable[[Experiment], Room]
ON_A_GPU = ("base", "train", "evaluate")
"""Stages that compute with the model."""


@contextmanager
def stage_slots(execution: "RunExecution", stage: str) -> Iterator[list[str]]:
    """Leases the slots that a stage's process or its ranks use on this machine.

    Yields:
        Names of the slots; empty if the stage computes on the CPU or on other machines.
    Raises:
        SpecError: this machine has fewer slots than the stage needs.
        StageError: the slots are in use, and the spec says not to wait for them.
        StageStoppedError: the run was asked to stop during the wait for slots.
    """
    experiment = execution.plan.experiment
    count = _slots_wanted(experiment, stage)
    slots = slots_here() if count else []
    if count and not slots:
        # No GPU here: the process itself reports that.
        yield []
        return
    if issue := _too_few(experiment, stage, slots):
        raise SpecError(execution.document.locate(issue, execution.plan.values))
    waiting = _waiting(execution) if experiment.resources.when_taken == "wait" else None
    try:
        with leased(count, f"{execution.run_id} ({stage})", waiting=waiting, available=slots) as taken:
            yield taken
    except TooFewSlotsError as error:
        raise StageError(str(error)) from None


def slots_of_evaluation(experiment: Experiment) -> int:
    """Returns the number of this machine's slots that the ranks of an evaluation lease."""
    return _slots_wanted(experiment, "evaluate")


def concurrency_warnings(experiment: Experiment) -> Iterator[Issue]:
    """Warns if this machine has GPUs for training but none for ranks that evaluate at the same time."""
    ranks = experiment.evaluation.concurrent_ranks
    if not ranks or not launcher_of(experiment).ranks_run_here:
        return
    wanted = slots_of_evaluation(experiment.concurrent_evaluation)
    training, slots = _slots_wanted(experiment, "train"), slots_here()
    if wanted and training <= len(slots) < training + wanted:
        yield Issue(
            "no GPU is left for evaluation during training: checkpoints are evaluated afterwards",
            ("evaluation", "concurrent_ranks"),
            given=f"{ranks}, and training takes {training} of {len(slots)} GPU slots: {', '.join(slots)}",
            hint="lower training.ranks, or leave concurrent_ranks out",
        )


def _too_few(experiment: Experiment, stage: str, slots: Sequence[str]) -> Issue | None:
    """Returns an issue if a stage needs more slots than these; None if they suffice."""
    ranks = _ranks(experiment, stage)
    count = _slots_wanted(experiment, stage)
    if count <= len(slots):
        return None
    engines = f" and {count - ranks} engine GPUs" if count > ranks else ""
    given = f"{ranks} ranks{engines} on {len(slots)} GPU slots: {', '.join(slots)}"
    hint = "a rank needs a GPU of its own: lower training.ranks, or set `resources: {device: cpu}`"
    if engines:
        hint = experiment.rollout.fewer_gpus
    return Issue("too many for this machine", ("training", "ranks"), given, hint=hint)


def ask_room(experiment: Experiment) -> Room:
    """Returns the launcher's answer about the capacity of its machines."""
    return launcher_of(experiment).room(experiment)


def asked_of_machines(experiment: Experiment) -> Hashable:
    """Returns the part of the spec on which `missing_here` depends."""
    ranks, rollout = experiment.training.ranks, experiment.rollout
    sections: list[object] = [experiment.launcher, experiment.resources, experiment.warm_up is None]
    if launcher_of(experiment).ranks_run_here:
        sections.append(rollout)
    else:  # a cluster is asked only for places
        sections += [rollout.samplers(ranks), rollout.gpus_per_sampler, experiment.gpus_beside(ranks)]
    return ranks, *map(repr, sections)


def asking_once() -> AskRoom:
    """Returns an `ask_room` that caches its answers by machines and request, because a query to a cluster takes
    seconds."""
    told: dict[Hashable, Room] = {}

    def ask(experiment: Experiment) -> Room:
        asked = asked_of_machines(experiment)
        if asked not in told:
            told[asked] = ask_room(experiment)
        return told[asked]

    return ask


def missing_here(experiment: Experiment, ask: AskRoom = ask_room) -> Iterator[Issue]:
    """Yields the spec's requirements that this machine, which executes it, does not meet: the launcher's package,
    machines that can hold the ranks and, if ranks compute here, GPUs and the sampler's package."""
    if issue := package_missing(experiment.launcher):
        yield issue
        return
    yield from ask(experiment).obstacles
    if not launcher_of(experiment).ranks_run_here:
        return
    if issue := not_installed(experiment.rollout):
        yield issue
    slots = slots_here()
    if slots:
        yield from (issue for stage in ON_A_GPU if (issue := _too_few(experiment, stage, slots)))
        if experiment.resources.device == "auto":
            yield from experiment.rollout.placement_issues([experiment.training.ranks])
    elif experiment.resources.device == "cuda":  # nvidia-smi may not know such a GPU
        from rpg.processes.device import no_gpu

        if issue := no_gpu(experiment.resources):
            yield issue


def runs_at_once(runs: "Sequence[RunPlan]", ask: AskRoom = ask_room) -> int:
    """Returns how many of the runs fit at this moment, at least 1: into this machine's free slots, or the launcher's
    capacity;"""
    first = runs[0].experiment
    if not launcher_of(first).ranks_run_here:
        return max(1, min(len(runs), ask(first).launches))
    wanted = max(_slots_wanted(run.experiment, stage) for run in runs for stage in ON_A_GPU)
    return max(1, min(len(runs), len(free_slots()) // wanted)) if wanted else 1


def _slots_wanted(experiment: Experiment, stage: str) -> int:
    """Returns the number of this machine's slots that a stage leases."""
    if stage not in ON_A_GPU or (stage != "base" and not launcher_of(experiment).ranks_run_here):
        return 0
    ranks = _ranks(experiment, stage)
    gpus = ranks if stage == "base" else experiment.gpus_beside(ranks)
    return slots_wanted(experiment.resources.device, gpus)


def _ranks(experiment: Experiment, stage: str) -> int:
    """Returns the number of processes that compute in a stage. In the base stage only a warm-up computes."""
    return int(experiment.warm_up is not None) if stage == "base" else experiment.training.ranks


def evaluates_in_ranks(experiment: Experiment) -> bool:
    """Returns whether the launcher starts the evaluation, like training. One rank on this machine needs no launcher."""
    return experiment.training.ranks > 1 or not launcher_of(experiment).ranks_run_here


def slot_environment(slots: list[str]) -> dict[str, str]:
    """Returns the environment variables that show a process only its slots' GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(slots), OF_RUN: ",".join(slots)} if slots else {}


def _waiting(execution: "RunExecution") -> Callable[[str], None]:
    def waiting(message: str) -> None:
        if request := execution.stop_requested():
            raise StageStoppedError(request)
        execution.progress.waiting(message)

    return waiting
