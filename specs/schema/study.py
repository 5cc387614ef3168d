"""The schema of studies: fields of an experiment to search, their ranges, and the measures to optimise."""

import json
import re
from contextlib import suppress
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from specs.bounds import repeats
from specs.errors import Issue, IssueError
from specs.schema.base import Spec, execution, names_path
from specs.schema.fields import nearest

Bounds = tuple[float, float]
NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
LARGEST = 2**53
"""Largest whole number that a float represents exactly. Optuna stores whole numbers as floats."""
Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
WholeBounds = tuple[Whole, Whole]
Positive = Annotated[int, Field(ge=1)]
Distance = Annotated[float, Field(ge=0)]


def num_steps(low: float, high: float, step: float) -> int:
    """Returns how often the step fits between the ends. Computes with decimals, because with floats 0.3 / 0.1 is below
    3."""
    return int((Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step)))


def _check_range(low: float, high: float, step: float, *, log: bool, no_step: float) -> None:
    """Raises IssueError if a range has no candidates. `no_step` is the only step allowed with log."""
    given = f"[{low:g}, {high:g}]"
    if low >= high:
        hint = "a parameter with one value belongs under overrides" if low == high else f"write [{high:g}, {low:g}]"
        raise IssueError(Issue("the lower end must come first", (), given, "[low, high]", hint))
    if log and low <= 0:
        hint = "raise the lower end, or leave log out"
        raise IssueError(Issue("a logarithmic range must be above 0", (), given, hint=hint))
    if log and step != no_step:
        hint = "leave one of the two out"
        raise IssueError(Issue("a logarithmic range takes no step", (), f"step {step:g}", f"{no_step:g}", hint))
    if step and (high - low) / step > LARGEST:
        hint = "leave `step` out: then any number between the ends is a candidate"
        raise IssueError(Issue("the step is too small for its range", ("step",), f"{step:g}", hint=hint))
    if step and num_steps(low, high, step) < 1:
        allowed = f"at most {high - low:g}"
        raise IssueError(Issue("the step leaves one candidate", ("step",), f"step {step:g} over {given}", allowed))


class FloatRange(Spec):
    """Numbers between two ends."""

    float: Bounds
    """Lowest and highest value, both included."""
    step: Distance = 0.0
    """Distance between two candidates, counted from the lowest. 0 allows any number in between. An upper end that is
    not a whole number of steps above the lower end is never tried."""
    log: bool = False
    """Search the logarithm, for values that span orders of magnitude; needs step 0."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Conditions for searching it: path of another parameter -> its required value, or a list of such values (names of
    cases). All must hold. While the other parameter is not searched, this one is not either."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_range(*self.float, self.step, log=self.log, no_step=0)
        return self


class IntRange(Spec):
    """Whole numbers between two ends."""

    int: WholeBounds
    """Lowest and highest value, both included."""
    step: Positive = 1
    """Distance between two candidates, as for float."""
    log: bool = False
    """Search the logarithm; needs step 1."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Search it only while other parameters have these values, as for float."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_range(*self.int, self.step, log=self.log, no_step=1)
        return self


class Choice(Spec):
    """A choice among values of any kind."""

    choice: tuple[Any, ...] = Field(min_length=2)
    """The candidates."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Search it only while other parameters have these values, as for float."""


class Cases(Spec):
    """A choice among named values, for values that are whole sections: a kind of reference, an objective."""

    cases: dict[str, Any] = Field(min_length=2)
    """Name -> value. Records, pages and `when` refer to a case by its name."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Search it only while other parameters have these values, as for float."""


_FORMS = ("float", "int", "choice", "cases")


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((kind for kind in _FORMS if kind in value), None)
    kinds = {FloatRange: "float", IntRange: "int", Choice: "choice", Cases: "cases"}
    return next((kind for model, kind in kinds.items() if isinstance(value, model)), None)


_ENDS = (("low", "high"), ("min", "max"), ("lower", "upper"), ("from", "to"))
_LISTS = ("choice", "choices", "values", "value", "categorical", "grid", "grid_search")
_FIXED = "a parameter with one value belongs under overrides"
_INTERVALS = ("uniform", "range", "bounds", "log", "loguniform", "log_uniform", "int_uniform", "randint")
_IN_WORDS = re.compile(r"[\[(\s]*([\d.eE+-]*\d)\s*(?:\.\.+|-|,|:|to)\s*([\d.eE+-]*\d)[\])\s]*")
"""An interval in a text: `0.1..0.3`, `0.1 to 0.3`."""


def _of_a_form(value: Any) -> Any:
    """Returns a value if it has the form of a range, even with errors inside. For other values, raises an issue that
    shows the right form."""
    kind = _kind(value)
    given = value[kind] if kind and isinstance(value, dict) else value
    match kind, given:
        case (("float" | "int"), [_, _]) | ("choice", list() | tuple()) | ("cases", dict()):
            return value
        case str(), FloatRange() | IntRange() | Choice() | Cases():
            return value
    forms = "{float: [low, high]}, {int: [low, high]}, {choice: [value, ...]}, {cases: {name: value}}"
    log = ", log: true" if "log" in str(value).lower() else ""
    raise IssueError(Issue("of no known form", (), _flow(value)[:80], forms, _in_right_form(given, kind or "", log)))


def _in_right_form(value: Any, kind: str, log: str) -> str:
    """Returns a hint that shows a list or another framework's range in a study's form; empty for other values."""
    if isinstance(value, str) and (words := _IN_WORDS.fullmatch(value)):
        with suppress(ValueError):
            value = [json.loads(end) for end in words.groups()]
    if kind == "choice" and isinstance(value, dict):
        return f"write {{cases: {_flow(value)}}}"
    if isinstance(value, dict):
        ends = next(([value[low], value[high]] for low, high in _ENDS if low in value and high in value), None)
        listed, within = (
            next((value[key] for key in keys if isinstance(value.get(key), list)), None)
            for keys in (_LISTS, _INTERVALS)
        )
        if listed is not None:
            return f"write {{choice: {_flow(listed)}}}"
        if not (ends or within):
            return next(filter(None, (nearest(str(key), _FORMS) for key in value)), "")
        value = ends or within
    if not isinstance(value, list):
        return "" if value is None else _FIXED
    value = [item for item in value if item != "log"]
    if len(value) < 2:
        return _FIXED
    choice = f"{{choice: {_flow(value)}}}"
    if len(value) > 2 or not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        return f"write {choice}"
    kind = "int" if all(isinstance(item, int) for item in value) else "float"
    return f"write {{{kind}: {_flow(value)}{log}}} for all values in between, {choice} for these values only"


def _flow(value: Any) -> str:
    """Returns a value as YAML on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


Range = Annotated[
    Annotated[FloatRange, Tag("float")]
    | Annotated[IntRange, Tag("int")]
    | Annotated[Choice, Tag("choice")]
    | Annotated[Cases, Tag("cases")],
    Discriminator(_kind),
    BeforeValidator(_of_a_form),
]


def measure_label(metric: str, dataset: str) -> str:
    """Returns the name of a measure in records and on pages: `kl/reverse`, `mean@4 on held_out`."""
    return f"{metric} on {dataset}" if dataset else metric


class Goal(Spec):
    """A measure, of the last checkpoint or of training, by which trials are ranked over their seeds."""

    dataset: str = ""
    """Evaluation set of the experiment, for mean@k, pass@k, maj@k, score@k and the metrics of sets that are not
    answered; for drift, the set whose prompts are answered; empty for a training metric."""
    metric: str = "mean@1"
    """mean@k, pass@k or maj@k, with k at most evaluation.samples_per_problem; score@k for a graded reward; accuracy or
    bits_per_byte; or a metric that training records, such as kl/reverse, as its mean over the last ten steps, drift as
    its last value."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether larger or smaller values are better."""
    over_seeds: Literal["mean", "lower_bound"] = "mean"
    """A trial's value: the mean over its seeds, or the pessimistic end of the mean's interval."""


class Constraint(Spec):
    """A bound that the best trial must satisfy, such as a divergence budget or a share of truncated responses."""

    metric: str
    """Bounded measure, named as in a goal."""
    dataset: str = ""
    """Evaluation set of the measure, as in a goal."""
    max: float | None = None
    """Upper bound on the mean over the trial's seeds."""
    min: float | None = None
    """Lower bound on that mean."""

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.max is None and self.min is None:
            raise ValueError("sets no bound: give max or min")
        if self.max is not None and self.min is not None and self.max < self.min:
            given, hint = f"max {self.max:g}, min {self.min:g}", "max is the upper bound"
            raise IssueError(Issue("no trial can satisfy both bounds", ("max",), given, f"at least {self.min:g}", hint))
        return self


class SearchSampler(Spec):
    """The sampler that proposes the values of the next trial."""

    type: Literal["auto", "noisy_gp", "tpe", "gp", "cma", "nsga2", "qmc", "random", "grid"] = "auto"
    """auto: noisy_gp for up to 20 parameters, else tpe; noisy_gp: a Gaussian process that models the noise of values
    and learns from all rungs; tpe: tree-structured Parzen estimator; gp: Gaussian process of finished trials; cma:
    CMA-ES, numbers only; nsga2: genetic, for several goals; qmc: a low-discrepancy sequence; random: independent draws;
    grid: every combination once."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sampler. The same seed proposes the same values after the same results."""
    startup_trials: int = Field(8, ge=1)
    """Trials before auto, noisy_gp, tpe, gp or cma begins to use its model: spread evenly with noisy_gp, else
    random."""


def _rising(rungs: tuple[int, ...]) -> tuple[int, ...]:
    for index, (before, rung) in enumerate(pairwise(rungs), start=1):
        if rung <= before:
            hint = "write the rungs from the first to the last"
            raise IssueError(
                Issue("the rungs must increase", (index,), f"{rung} after {before}", f"above {before}", hint)
            )
    return rungs


Rungs = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_rising)]


class NoPruner(Spec):
    """No pruning: every trial is trained to its end."""

    type: Literal["none"] = "none"


class Halving(Spec):
    """Successive halving: the best share of a rung's trials continues from its checkpoints to the next rung."""

    type: Literal["asha", "hyperband"]
    rungs: Rungs
    """Steps at which trials are evaluated and compared, increasing, below training.steps."""
    eta: int = Field(2, ge=2)
    """Reduction factor: one of eta trials continues from a rung."""


class SuccessiveHalving(Halving):
    """Asynchronous successive halving with promotion, Li 2020, arXiv:1810.05934: every trial is trained to the first
    rung, and the best share of a rung's trials continues from its checkpoints to the next."""

    type: Literal["asha"] = "asha"


class Hyperband(Halving):
    """Successive halving whose trials take turns in beginning at different rungs, Li 2018, arXiv:1603.06560: a trial of
    bracket b is compared at the rungs from number b on."""

    type: Literal["hyperband"] = "hyperband"


class MedianRule(Spec):
    """The median rule: a trial stops at a rung if it is worse than the median of the earlier trials there."""

    type: Literal["median"] = "median"
    rungs: Rungs
    """Steps at which trials are evaluated, increasing, below training.steps."""
    startup_trials: int = Field(4, ge=1)
    """Number of first trials that are never stopped."""


class Patience(Spec):
    """The patience rule: a trial stops if it has not improved for several rungs."""

    type: Literal["patient"] = "patient"
    rungs: Rungs
    """Steps at which trials are evaluated, increasing, below training.steps."""
    patience: int = Field(1, ge=1)
    """Rungs without an improvement after which a trial stops."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest improvement that counts, in the goal's unit."""


Pruner = Annotated[
    NoPruner | SuccessiveHalving | Hyperband | MedianRule | Patience,
    Field(discriminator="type"),
]


class Budget(Spec):
    """Limits of the search in addition to `trials`. 0 means no limit. The confirmation's largest cost, estimated from
    the baseline's, is reserved, but never more than half of a limit. The confirmation itself is not stopped and may
    exceed a limit."""

    tokens: float = Field(0, ge=0)
    """Response tokens sampled for training, over all trials and seeds."""
    gpu_hours: float = Field(0, ge=0)
    """Hours of training and evaluation, times the ranks."""
    hours: float = Field(0, ge=0)
    """Hours since the first trial began."""


class Confirmation(Spec):
    """Confirmation after the search: the best trials and the baseline run again on seeds that no trial had, and are
    reported with intervals."""

    candidates: int = Field(2, ge=1)
    """Number of best trials to confirm, ranked by the expectation of the sampler's model if it has one, else by their
    value."""
    seeds: int = Field(5, ge=2)
    """Largest number of new seeds for each candidate, the same for all. They run in rounds; a candidate that can no
    longer win, or has won, gets no further seed."""
    dataset: str = ""
    """Evaluation set of the confirmation, preferably one that did not rank the trials. Empty means the goal's."""


class WarmStart(Spec):
    """Earlier results that the sampler learns from. They are marked as foreign and are not trials of the study."""

    studies: tuple[Annotated[str, Field(pattern=NAME)], ...] = ()
    """Names of studies in the same home."""
    runs: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")], ...] = ()
    """Ids of finished runs in the same home."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for field, names in (("studies", self.studies), ("runs", self.runs)):
            for index in repeats(names):
                raise IssueError(Issue("is given twice", (field, index), names[index]))
        return self


class Study(Spec):
    """A search for the values of an experiment's fields that are best for a goal."""

    name: str = Field(pattern=NAME)
    """Lower-case letters, digits and hyphens."""
    question: str = ""
    """The study's question, in a sentence."""
    experiment: str = names_path("file", min_length=1)
    """Path of the experiment's file, relative to this one."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the experiment that all trials change; keys are paths such as training.steps."""
    parameters: dict[str, Range] = Field(min_length=1)
    """Fields to search: path of a field -> {float: [low, high], step, log}, {int: [low, high], step, log}, {choice:
    [...]} or {cases: {name: value}}; each with `when` if it depends on others."""
    goal: Goal | None = None
    """Measure that ranks trials."""
    goals: tuple[Goal, ...] = ()
    """Several measures instead of `goal`; the result is the Pareto set, the trials that no other trial dominates."""
    constraints: tuple[Constraint, ...] = ()
    """Bounds that the best trial must satisfy."""
    sampler: SearchSampler = SearchSampler()
    """Sampler that proposes a trial's values."""
    pruner: Pruner = NoPruner()
    """Rule that stops trials early."""
    trials: int = Field(ge=1)
    """Total number of trials, including those of earlier calls, without confirmations."""
    seeds_per_trial: int = Field(0, ge=0)
    """Number of seeds of a trial, from the first of the experiment's seeds on. 0 means all."""
    budget: Budget = Budget()
    """Other limits of the search."""
    confirm: Confirmation | None = None
    """How the best trial is confirmed. Without it the best trial is only a candidate, and nothing is claimed about
    it."""
    warm_start: WarmStart = WarmStart()
    """Results from elsewhere that the sampler learns from."""
    parallel: int = execution(1, ge=1)
    """Concurrent trials on this machine. With 1 the same study always proposes the same trials."""
    on_failure: Literal["record", "stop"] = "record"
    """After a failed trial: record it and continue, or stop the study."""

    @model_validator(mode="after")
    def _one_way_to_say_goals(self) -> Self:
        if self.goal is None and not self.goals:
            hint = "give the measure that ranks trials as goal, or several as goals"
            raise IssueError(
                Issue("missing", ("goal",), allowed="the fields " + ", ".join(Goal.model_fields), hint=hint)
            )
        if self.goal is not None and self.goals:
            raise IssueError(
                Issue("conflicts with goal", ("goals",), hint="move the goal into goals, or leave goals out")
            )
        return self

    @model_validator(mode="after")
    def _learns_from_others(self) -> Self:
        if self.name in self.warm_start.studies:
            index = self.warm_start.studies.index(self.name)
            hint = "its own trials count anyway"
            raise IssueError(Issue("is this study itself", ("warm_start", "studies", index), self.name, hint=hint))
        return self

    @property
    def targets(self) -> tuple[Goal, ...]:
        """Goals, from `goal` or `goals`."""
        return self.goals or ((self.goal,) if self.goal else ())

    @property
    def rungs(self) -> tuple[int, ...]:
        """Steps at which the pruner evaluates a trial; empty without a pruner."""
        return () if isinstance(self.pruner, NoPruner) else self.pruner.rungs
