"""The schema of an evaluation of models, the root of its file, and of each model's run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from specs.bounds import MAX_RANKS
from specs.records import EVALUATION
from specs.schema.base import Spec, by_other_keys, execution
from specs.schema.data import Data, Prompt, Source
from specs.schema.evaluation import Evaluation
from specs.schema.execution import Notice, Resources, Stages
from specs.schema.experiment import Experiment
from specs.schema.launchers import Launcher, LocalLauncher
from specs.schema.model import PretrainedModel, ScratchModel
from specs.schema.objective import Objective, Rloo
from specs.schema.reward import Reward
from specs.schema.rollout import Rollout, StopText, TransformersRollout
from specs.schema.training import Training


class _Evaluated(Spec):
    """Fields of every model of an evaluation, in addition to its source."""

    name: str = ""
    """Name in tables and charts. Empty means the last part of its path or id, or the run and its checkpoint."""
    prompt: Prompt | None = None
    """Prompt of this model, if it differs from data.prompt: a template for a base model, its own chat template for a
    chat model."""


class EvaluatedPretrained(PretrainedModel, _Evaluated):
    """A model from a Hub id or a directory."""


class EvaluatedScratch(ScratchModel, _Evaluated):
    """A model with random weights, for the score of chance alone."""


class EvaluatedRun(_Evaluated):
    """A model from the exported weights of a run of this home."""

    source: Literal["run"] = "run"
    run: str = Field(min_length=1)
    """Id of the run, a unique prefix of it, or the name of an experiment with one run."""
    checkpoint: Literal["last", "best"] | Annotated[int, Field(ge=0)] = "last"
    """Checkpoint of the run. last: that of its last step. best: that of the exported step with the highest accuracy, on
    the set that the run's training.checkpoint.keep_best.accuracy_on names, else in the mean over its sets. A number:
    that of the step, which the run must have exported (training.export_every_steps). 0 means its base model."""


def _with_source(value: Any) -> Any:
    """Adds the source of a model: run for a model that names a run, else pretrained."""
    if not isinstance(value, dict) or "source" in value:
        return value
    return {"source": "run" if "run" in value else "pretrained", **value}


EvaluatedModel = Annotated[
    EvaluatedPretrained | EvaluatedScratch | EvaluatedRun, Field(discriminator="source"), by_other_keys(_with_source)
]


class SamplingSetting(Spec):
    """One sampling setting. Keys that are left out take the values of `evaluation`."""

    name: str = Field(min_length=1)
    """Name in tables and charts, such as greedy or published."""
    samples_per_problem: int | None = Field(None, ge=1)
    """Responses per problem, like evaluation.samples_per_problem."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature, like evaluation.temperature: 0 is greedy decoding."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus of sampling, like evaluation.top_p."""
    top_k: int | None = Field(None, ge=0)
    """Most likely tokens to sample from, like evaluation.top_k."""
    stop: tuple[StopText, ...] | None = None
    """Texts that end a response, like evaluation.stop."""
    max_response_length: int | None = Field(None, ge=1)
    """Largest number of tokens of a response, like evaluation.max_response_length."""
    seed: int | None = Field(None, ge=0)
    """Seed of sampling, like evaluation.seed."""


class EvaluationData(Data):
    """The sets to evaluate on. An evaluation has no training sets."""

    train: tuple[Source, ...] = Field((), max_length=0)
    """Unused."""
    evaluation: tuple[Source, ...] = Field(min_length=1)
    """Named sets, from which `evaluation.datasets` chooses."""
    overlap: Literal["error", "drop"] = "error"
    """Unused."""


class ModelEvaluation(Spec):
    """An evaluation of models without training. Each model with each sampling setting is a recorded run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens."""
    question: str = ""
    """The evaluation's question, in a sentence."""
    models: tuple[EvaluatedModel, ...] = Field(min_length=1)
    """Models to evaluate: {path: a Hub id or a directory}, {run: a run's id, checkpoint: last}, or {source: scratch}.
    The first is the baseline of comparisons."""
    sampling: tuple[SamplingSetting, ...] = ()
    """Sampling settings, each used for every model. Empty means one setting, that of `evaluation`."""
    data: EvaluationData
    """Evaluation problems, and the form of prompts."""
    rollout: Rollout = TransformersRollout()
    """Sampling engine; `evaluation` and `sampling` have the sampling settings."""
    reward: Reward
    """How responses are scored."""
    evaluation: Evaluation = Evaluation()
    """How models are evaluated."""
    ranks: int = execution(1, ge=1, le=MAX_RANKS)
    """Number of processes that share the problems; each has its own GPU if there are GPUs."""
    launcher: Launcher = LocalLauncher()
    """Program that starts the ranks."""
    resources: Resources = Resources()
    """Resources of a rank."""
    stages: Stages = Stages()
    """Retries and time limits."""
    notify: tuple[Notice, ...] = execution(())
    """Notices of failures and completions, sent if the evaluation is submitted."""


class Ranks(Training):
    """The section `training` of an evaluation, of which only the ranks have an effect."""

    steps: int = 0
    """Unused."""
    prompts_per_step: int = 1
    """Unused."""
    group_size: int = 1
    """Unused."""


_OF_TRAINING: Mapping[str, tuple[str, ...]] = {
    "data": ("train", "overlap"),
    "evaluation": ("checkpoints", "every_steps"),
    "": ("seeds", "warm_up", "objective", "advantage", "reference", "record", "sinks"),
}
"""Section -> its fields that only training uses."""


class MeasuredModel(Experiment):
    """The spec of a run that evaluates one model with one sampling setting. Its plain data has no fields of
    training."""

    kind: Literal["evaluation"] = "evaluation"
    """Kind that distinguishes it from an experiment's run."""
    data: EvaluationData
    """Sets to evaluate on."""
    objective: Objective = Rloo()
    """Unused."""
    training: Ranks = Ranks()
    """The ranks."""

    @property
    def trains(self) -> bool:
        """Returns False, because an evaluation does not train."""
        return False

    @model_serializer(mode="wrap")
    def _without_training(self, plainly: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = plainly(self)
        for section, fields in _OF_TRAINING.items():
            holder = plain.get(section, {}) if section else plain
            for field in fields:
                holder.pop(field, None)
        if "training" in plain:
            plain["training"] = {"ranks": self.training.ranks}
        return plain


def schema_of(data: Mapping[str, Any]) -> type[Experiment]:
    """Returns the schema of a run's or an experiment's plain data."""
    return MeasuredModel if data.get("kind") == EVALUATION else Experiment
