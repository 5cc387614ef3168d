"""ModelEvaluation: the root of an evaluation's file; and the run that each of its models becomes."""

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
    """Fields of every model of an evaluation beside where it comes from."""

    name: str = ""
    """What tables and charts call it; empty: the last part of its path or id, or the run and its checkpoint."""
    prompt: Prompt | None = None
    """How this model is asked, where that differs from data.prompt: a base model by a template, a chat model by its own
    chat template."""


class EvaluatedPretrained(PretrainedModel, _Evaluated):
    """A Hub id or a directory."""


class EvaluatedScratch(ScratchModel, _Evaluated):
    """A model with random weights: what chance alone gets right."""


class EvaluatedRun(_Evaluated):
    """The weights that a run of this home has exported."""

    source: Literal["run"] = "run"
    run: str = Field(min_length=1)
    """The run's id, a beginning of it that no other run shares, or an experiment that has one run."""
    checkpoint: Literal["last", "best"] | Annotated[int, Field(ge=0)] = "last"
    """last: of its last step; best: of the exported step with the highest accuracy, on the set that the run's
    training.checkpoint.keep_best.accuracy_on names, else in the mean over its sets; a number: of that step, which it
    must have exported (training.export_every_steps); 0: its base model."""


def _with_source(value: Any) -> Any:
    """A model that names a run is a run's, any other that says nothing else exists already."""
    if not isinstance(value, dict) or "source" in value:
        return value
    return {"source": "run" if "run" in value else "pretrained", **value}


EvaluatedModel = Annotated[
    EvaluatedPretrained | EvaluatedScratch | EvaluatedRun, Field(discriminator="source"), by_other_keys(_with_source)
]


class SamplingSetting(Spec):
    """One way to sample. What it leaves out is as `evaluation` has it."""

    name: str = Field(min_length=1)
    """What tables and charts call it: greedy, published."""
    samples_per_problem: int | None = Field(None, ge=1)
    """Answers to each problem, like evaluation.samples_per_problem."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature, like evaluation.temperature: 0 is greedy decoding."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus of sampling, like evaluation.top_p."""
    top_k: int | None = Field(None, ge=0)
    """Most likely tokens to sample from, like evaluation.top_k."""
    stop: tuple[StopText, ...] | None = None
    """Texts that end a response, like evaluation.stop."""
    max_response_length: int | None = Field(None, ge=1)
    """Most tokens of a response, like evaluation.max_response_length."""
    seed: int | None = Field(None, ge=0)
    """Seed of sampling, like evaluation.seed."""


class EvaluationData(Data):
    """The sets to evaluate on. Nothing is trained, so that there are no training sets."""

    train: tuple[Source, ...] = Field((), max_length=0)
    """None."""
    evaluation: tuple[Source, ...] = Field(min_length=1)
    """Named sets, of which `evaluation.datasets` chooses."""
    overlap: Literal["error", "drop"] = "error"
    """Without effect."""


class ModelEvaluation(Spec):
    """Models as they are, measured on evaluation sets. Each model with each sampling setting is a run on record."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens."""
    question: str = ""
    """What the evaluation answers, in a sentence."""
    models: tuple[EvaluatedModel, ...] = Field(min_length=1)
    """The models that are measured: {path: a Hub id or a directory}, {run: a run's id, checkpoint: last}, or {source:
    scratch}. The first is the one that the others are held against."""
    sampling: tuple[SamplingSetting, ...] = ()
    """Ways to sample, each for every model; none: the one that `evaluation` says."""
    data: EvaluationData
    """Evaluation problems, and how they become prompts."""
    rollout: Rollout = TransformersRollout()
    """The engine that samples; how, `evaluation` and `sampling` say."""
    reward: Reward
    """How responses are scored."""
    evaluation: Evaluation = Evaluation()
    """How models are measured."""
    ranks: int = execution(1, ge=1, le=MAX_RANKS)
    """Processes that share the problems; with GPUs, one each."""
    launcher: Launcher = LocalLauncher()
    """What starts the ranks."""
    resources: Resources = Resources()
    """What a rank may use."""
    stages: Stages = Stages()
    """Retries and time limits."""
    notify: tuple[Notice, ...] = execution(())
    """Who is told of failures and completions, when it is submitted."""


class Ranks(Training):
    """The part of the section `training` that measuring a model takes: the ranks."""

    steps: int = 0
    """None."""
    prompts_per_step: int = 1
    """Without effect."""
    group_size: int = 1
    """Without effect."""


_OF_TRAINING: Mapping[str, tuple[str, ...]] = {
    "data": ("train", "overlap"),
    "evaluation": ("checkpoints", "every_steps"),
    "": ("seeds", "warm_up", "objective", "advantage", "reference", "record", "sinks"),
}
"""Section -> its fields that say how a policy is trained."""


class MeasuredModel(Experiment):
    """One model with one sampling setting, as a run's spec. As plain data it says nothing of any training."""

    kind: Literal["evaluation"] = "evaluation"
    """Tells it from an experiment's run."""
    data: EvaluationData
    """The sets it is measured on."""
    objective: Objective = Rloo()
    """Without effect."""
    training: Ranks = Ranks()
    """The ranks."""

    @property
    def trains(self) -> bool:
        """A model as it is."""
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
    """The schema of a run's or an experiment's plain data."""
    return MeasuredModel if data.get("kind") == EVALUATION else Experiment
