"""The experiment, the root of a spec file. The fields are in the order of a file."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from specs.errors import Issue, IssueError, Path
from specs.extensions import find_variant, is_offered
from specs.schema.base import Spec, execution
from specs.schema.data import Data, Source
from specs.schema.evaluation import Evaluation
from specs.schema.execution import Notice, Record, Resources, Sink, Stages
from specs.schema.fields import choose
from specs.schema.launchers import Launcher, LocalLauncher
from specs.schema.model import Model, WarmUp
from specs.schema.objective import Advantage, Objective, PackagedObjective
from specs.schema.reference import Reference
from specs.schema.reward import Reward
from specs.schema.rollout import Rollout, TransformersRollout
from specs.schema.schedule import Place, at_step, largest
from specs.schema.training import Offload, Training


def _listed(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    few = f"{value} runs are [{', '.join(map(str, range(value)))}], the seed {value} alone is [{value}]"
    hint = few if 1 < value <= 10 else f"one run with this seed is [{value}], three runs are [0, 1, 2]"
    raise IssueError(Issue("must be a list", (), str(value), "a list of whole numbers", hint))


class Matrix(Spec):
    """The fields that vary. Each combination of `product`, paired with each row of `zip`, except those in `exclude`, is
    one run per seed.

    Keys are paths such as objective.kl_coef.
    """

    product: dict[str, list[Any]] = Field(default_factory=dict)
    """Path -> values. Every combination is used."""
    zip: dict[str, list[Any]] = Field(default_factory=dict)
    """Path -> values. The lists have equal length and are used row by row."""
    labels: tuple[str, ...] = ()
    """Name of each row of `zip` in tables and charts. Empty means the row's values."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Combinations to leave out: each entry excludes the cells that have all of its values."""


class Experiment(Spec):
    """An experiment: one question, a base configuration, the fields that vary and the seeds. Each combination is a
    run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens."""
    question: str = ""
    """The experiment's question, in a sentence."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], BeforeValidator(_listed)] = Field(
        (0,), min_length=1
    )
    """Seeds of the prompt order and the sampling. Each seed is one run."""
    matrix: Matrix | None = None
    """The fields that vary between runs."""
    model: Model
    """Model to train: {source: pretrained} or {source: scratch}."""
    data: Data
    """Training and evaluation problems."""
    warm_up: WarmUp | None = None
    """A supervised stage before reinforcement learning."""
    rollout: Rollout = TransformersRollout()
    """How responses are sampled."""
    reward: Reward
    """How responses are scored, except for sets with their own `reward`."""
    objective: Objective
    """Objective to optimise."""
    advantage: Advantage = Advantage()
    """Keys that are left out take the objective's published values."""
    reference: Reference = Reference()
    """Keys that are left out take the objective's published values."""
    training: Training
    """Batch sizes, optimizer, and distribution over ranks."""
    evaluation: Evaluation = Evaluation()
    """How checkpoints are evaluated."""
    record: Record = execution(Record())
    """Rows to record, and how long they are kept."""
    launcher: Launcher = LocalLauncher()
    """Program that starts the training ranks."""
    resources: Resources = Resources()
    """Resources of a rank."""
    stages: Stages = Stages()
    """Retries and time limits."""
    notify: tuple[Notice, ...] = execution(())
    """Notices of failures, completions and guards, sent if the experiment is submitted."""
    sinks: tuple[Sink, ...] = execution(())
    """Trackers that receive the runs' records: TensorBoard, Weights & Biases, MLflow, Trackio."""

    @property
    def trains(self) -> bool:
        """Whether a policy is trained. False for the evaluation of a model without training."""
        return True

    @property
    def measures_drift(self) -> bool:
        """Whether evaluations measure the divergence from the policy before training."""
        return self.trains and self.evaluation.drift

    @property
    def answers_sets(self) -> bool:
        """Whether an evaluation samples responses to the problems of a set."""
        chosen = self.evaluation.datasets
        return any(each.answered and (not chosen or each.name in chosen) for each in self.data.evaluation)

    def reward_at(self, place: str) -> Reward:
        """Returns the reward of the set at a path such as `data.train.0`: the set's own, else the experiment's."""
        return self.own_rewards.get(place, self.reward)

    def worst_at(self, place: str) -> float | None:
        """Returns the least value of a set's reward, None if it has none; see `reward_at`."""
        return self.reward_at(place).worst_value()

    def reward_on(self, dataset: str) -> Reward:
        """Returns the reward of the evaluation set with this name."""
        own = (source.reward for source in self.data.evaluation if source.name == dataset)
        return next(own, None) or self.reward

    @property
    def own_rewards(self) -> dict[str, Reward]:
        """Returns the rewards of the sets that have their own, by the set's path, such as `data.train.0`."""
        return {".".join(map(str, at)): source.reward for at, source in self.sets() if source.reward}

    def sets(self) -> Iterator[tuple[Path, Source]]:
        """Yields the place of each training and evaluation set whose problems the policy answers, and the set."""
        for split in ("train", "evaluation"):
            for index, source in enumerate(getattr(self.data, split)):
                if source.answered:
                    yield ("data", split, index), source

    def rewards(self) -> Iterator[tuple[Path, Reward]]:
        """Yields the path of each reward that is used, and the reward."""
        sets = list(self.sets())
        if any(source.reward is None for _, source in sets):
            yield ("reward",), self.reward
        yield from (((*at, "reward"), source.reward) for at, source in sets if source.reward)

    @property
    def gpus(self) -> int:
        """Returns the number of GPUs of the ranks and dedicated engines on all machines, if they compute on GPUs."""
        engines = self.samplers * self.rollout.gpus_per_sampler if self.launcher.engines_key else 0
        return engines + sum(map(self.gpus_beside, self.launcher.ranks_of_machines(self.training.ranks)))

    def gpus_beside(self, ranks: int) -> int:
        """Returns the GPUs that a machine needs for this many ranks and their engines."""
        return ranks if self.launcher.engines_key else self.sampling.gpus(ranks)

    @property
    def samplers(self) -> int:
        """Returns the number of samplers on all machines. Ranks that share a sampler are on one machine if the sampler
        is there too."""
        if self.launcher.engines_key:
            return self.rollout.samplers(self.training.ranks)
        return sum(map(self.sampling.samplers, self.launcher.ranks_of_machines(self.training.ranks)))

    @property
    def sampling(self) -> Rollout:
        """Returns the section `rollout` of a machine with ranks: with the machine's part of the engines, or with all of
        them if they have separate machines."""
        return self.rollout.on_machines(self.launcher.engine_machines)

    @property
    def in_flight(self) -> int:
        """Returns the number of responses that run at once with `rollout.partial`, in whole groups: those of a step, or
        fewer if the samplers hold fewer. The responses of each step depend on this number."""
        size = self.training.group_size
        held = self.rollout.max_concurrent * self.samplers // size
        return size * max(1, min(self.training.prompts_per_step, held))

    @property
    def concurrent_evaluation(self) -> Self:
        """Returns the spec of the `evaluation.concurrent_ranks`, which evaluate checkpoints during training."""
        ranks = self.evaluation.concurrent_ranks
        changes = {
            "training": self.training.model_copy(update={"ranks": ranks, "sequence_parallel_size": 1}),
            "rollout": self.rollout.without_training(),
            "launcher": self.launcher.beside(self.training, ranks),
        }
        return self.model_copy(update=changes)

    @property
    def on_all_machines(self) -> Self:
        """Returns a spec whose ranks check every machine, including machines with engines only; itself if there are no
        such machines."""
        if not self.launcher.engines_key:
            return self
        launcher, ranks = self.launcher.checking(self.training.ranks)
        training = self.training.model_copy(update={"ranks": ranks, "sequence_parallel_size": 1})
        return self.model_copy(update={"launcher": launcher, "training": training, "rollout": TransformersRollout()})

    @property
    def first_pass_gives_old_logprobs(self) -> bool:
        """Whether the first training pass can supply the first minibatch's old_logprobs.

        False if an earlier policy sampled, if that pass does not use the policy's weights (schedule_free_adamw), if the
        advantages need the logprobs before it, or if the sampling policy's distributions are the reference's: the
        passes that keep them give the old_logprobs.
        """
        return not (
            self.rollout.max_staleness
            or (self.reference.source == "behaviour" and self.objective.summed_over != "sampled")
            or self.training.optimizer.type == "schedule_free_adamw"
            or self.objective.penalizes_reward
        )

    def at_step(self, step: int, loops: Mapping[Place, float] | None = None) -> Self:
        """Returns the spec with its values at a step of training, or itself if no value changes. `loops`: values of the
        closed loops, see `specs.schema.schedule.at_step`."""
        return at_step(self, step, loops)

    def sharing_memory(self, chosen: Mapping[str, Any]) -> Self:
        """Returns the spec with the values that the plan chose for keys of `rollout`, `training.offload` and
        `training`, by their names."""
        offload = {key: value for key, value in chosen.items() if key in Offload.model_fields}
        of_training = {key: value for key, value in chosen.items() if key == "gradient_checkpointing"}
        rollout = {key: value for key, value in chosen.items() if key not in offload | of_training}
        changed = {"offload": self.training.offload.model_copy(update=offload), **of_training}
        training = self.training.model_copy(update=changed)
        return self.model_copy(update={"training": training, "rollout": self.rollout.model_copy(update=rollout)})

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether responses without advantage are skipped: the spec asks for it, and it does not change the
        gradient."""
        training = self.training
        elsewhere = self.objective.without_advantage or largest(training.entropy_coef) or training.router_aux_loss_coef
        return training.skip_zero_advantage and not elsewhere

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fills left-out keys of advantage and reference from the objective's published values, and the precision if
        the spec asks for a GPU."""
        return _with_precision(with_published(data)) if isinstance(data, dict) else data


def _with_precision(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the data with precision bfloat16 if it has `device: cuda` and no precision. The result does not depend on
    the machine that reads the spec: with `device: auto` the precision stays float32 everywhere."""
    resources, training = data.get("resources"), data.get("training")
    if not isinstance(resources, dict) or not isinstance(training, dict) or "precision" in training:
        return data
    return {**data, "training": {**training, "precision": "bfloat16"}} if resources.get("device") == "cuda" else data


def with_published(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the experiment's data, with left-out keys filled from the objective's `published` sections.

    A section with another `source` than the published one is left as it is, since a schedule belongs to its source.
    Without a divergence no reference policy is kept.
    """
    result = dict(data)
    for section, setting in published_setting(data.get("objective")).items():
        if section == "reference" and _without_divergence(data["objective"]):
            continue
        given = result.get(section)
        if given is None and section in result:
            continue  # `reference: null` is an error that the schema reports
        if isinstance(given, BaseModel):
            continue
        if given is None or (isinstance(given, dict) and _same_source(setting, given)):
            result[section] = {**setting, **(given or {})}
    return result


def _without_divergence(objective: Any) -> bool:
    if isinstance(objective, BaseModel):
        return not getattr(objective, "needs_reference", True)
    kl_coef = objective.get("kl_coef")
    if isinstance(kl_coef, Mapping):
        points = kl_coef.get("schedule")
        return isinstance(points, list) and all(isinstance(point, list) and point[1:] == [0] for point in points)
    return isinstance(kl_coef, (int, float)) and kl_coef == 0


def _same_source(setting: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return "source" not in given or given["source"] == setting.get("source")


def published_setting(objective: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns the published advantage and reference of an objective, given as written in a spec."""
    if isinstance(objective, BaseModel):
        return getattr(type(objective), "published", {})
    if not isinstance(objective, dict):
        return {}
    tag = objective.get("type", "rpg")
    model = choose(Objective, tag) if isinstance(tag, str) else None
    if model is None and is_offered(PackagedObjective, tag):
        with suppress(IssueError):  # reported when the objective is read
            model = find_variant(PackagedObjective, tag)
    return getattr(model, "published", {})
