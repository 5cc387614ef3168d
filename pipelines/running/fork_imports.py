"""Modules that a stage's process begins with where it is a fork: see `pipelines.processes.forking`."""

from collections.abc import Sequence

from specs.schema.experiment import Experiment

_PROBLEMS = "pyarrow.dataset"
"""What reading a file of problems imports, and pandas with it."""
TRAINING = (
    _PROBLEMS,
    "rpg.learner.deepspeed_imported",
    "rpg.components",
    "rpg.run_recorder.recorder",
    "rpg.rollouts.source",
    "rpg.trainer",
)
_OF_BASE = ("specs.document", "rpg.base.stage")
_OF_LOOK = ("specs.document", "rpg.preflight", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_OF_STAGE = {
    "data": ("specs.document", "rpg.data.staging"),
    # With training's, where it follows: what an optimizer imports as it is made is imported once for both.
    "base": (*_OF_BASE, *TRAINING),
    "train": TRAINING,
    "evaluate": (_PROBLEMS, "specs.document", "rpg.evaluation.stage"),
}
"""None is itself a program that a process runs, and none of them computes anything as it is imported."""


def imports_of(experiment: Experiment, stage: str, slots: Sequence[str]) -> Sequence[str] | None:
    """The stage's modules; None where its process has to begin anew: for GPUs, or for an engine that starts processes
    of its own."""
    if slots or experiment.rollout.engine == "vllm":
        return None
    if stage == "data":
        return (*_OF_STAGE[stage], *_of_data(experiment))
    return _OF_BASE if stage == "base" and not experiment.trains else _OF_STAGE[stage]


def look_imports(experiment: Experiment) -> Sequence[str] | None:
    """Modules of a look at data and model; None where nothing that follows is a fork as well."""
    if experiment.rollout.engine == "vllm":
        return None
    return (*_OF_LOOK, *_of_data(experiment))


def _of_data(experiment: Experiment) -> Sequence[str]:
    """What the look, the data stage and a scorer would each import: a second, for two hundred tasks."""
    sources = [*experiment.data.train, *experiment.data.evaluation]
    return ("rpg.data.reasoning_gym_imported",) if any(source.source == "reasoning_gym" for source in sources) else ()
