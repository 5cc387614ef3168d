"""Study: which fields of an experiment to search, over which ranges, for the best value of which measure."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from specs.schema.base import Spec, names_path

Bounds = tuple[float, float]
WholeBounds = tuple[int, int]
Positive = Annotated[int, Field(ge=1)]


class FloatRange(Spec):
    """Numbers between two ends."""

    float: Bounds
    """Lowest and highest value, both included."""
    log: bool = False
    """Search the logarithm: for values that span orders of magnitude."""

    @model_validator(mode="after")
    def _ordered(self) -> "FloatRange":
        low, high = self.float
        if low >= high:
            raise ValueError("the lower end must come first")
        if self.log and low <= 0:
            raise ValueError("a logarithmic range must be above 0")
        return self


class IntRange(Spec):
    """Whole numbers between two ends."""

    int: WholeBounds
    """Lowest and highest value, both included."""
    step: Positive = 1
    """Distance between two candidates."""
    log: bool = False
    """Search the logarithm; needs step 1."""

    @model_validator(mode="after")
    def _ordered(self) -> "IntRange":
        low, high = self.int
        if low >= high:
            raise ValueError("the lower end must come first")
        if self.log and (low <= 0 or self.step != 1):
            raise ValueError("a logarithmic range must be above 0 and have step 1")
        return self


class Choice(Spec):
    """One of several values, of any kind."""

    choice: tuple[Any, ...] = Field(min_length=2)
    """The candidates."""


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((kind for kind in ("float", "int", "choice") if kind in value), None)
    kinds = {FloatRange: "float", IntRange: "int", Choice: "choice"}
    return next((kind for model, kind in kinds.items() if isinstance(value, model)), None)


Range = Annotated[
    Annotated[FloatRange, Tag("float")] | Annotated[IntRange, Tag("int")] | Annotated[Choice, Tag("choice")],
    Discriminator(_kind),
]


class Goal(Spec):
    """What a trial is judged by: one measure of its last checkpoint, its seeds averaged."""

    dataset: str = Field(min_length=1)
    """An evaluation set of the experiment."""
    metric: str = Field("mean@1", pattern=r"^(mean|pass|maj)@[1-9][0-9]{0,3}$")
    """mean@k, pass@k or maj@k; k at most evaluation.samples_per_problem."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more or less of it is better."""


class SearchSampler(Spec):
    """Proposes the values of the next trial."""

    type: Literal["tpe", "random"] = "tpe"
    """tpe: tree-structured Parzen estimator; random: independent draws."""
    seed: int = Field(0, ge=0, lt=2**32)
    """The same seed proposes the same values after the same results."""
    startup_trials: int = Field(8, ge=1)
    """Random trials before tpe starts to model."""


class Study(Spec):
    """A search for the values of an experiment's fields that are best at a goal."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens."""
    question: str = ""
    """What the study answers, in a sentence."""
    experiment: str = names_path("file", min_length=1)
    """The experiment's file, relative to this one."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the experiment that every trial has otherwise; keys are paths such as training.steps."""
    parameters: dict[str, Range] = Field(min_length=1)
    """What varies: path of a field -> {float: [low, high], log}, {int: [low, high], step, log} or {choice: [...]}."""
    goal: Goal
    """What a trial is judged by."""
    sampler: SearchSampler = SearchSampler()
    """What proposes a trial's values."""
    trials: int = Field(ge=1)
    """Trials in all, those of earlier calls included."""
    on_failure: Literal["record", "stop"] = "record"
    """A trial that fails: recorded as failed, and the study goes on; or the study ends there."""
