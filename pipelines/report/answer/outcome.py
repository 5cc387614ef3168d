"""Outcomes of groups on each dataset, and conclusions about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.report.statistics import THESE_WEIGHTS, Interval, Verdict
from rpg.statistics.apart import SeedApart

ACCURACY = "accuracy"
SCORE = "score"
"""The measure of graded rewards, in their own units. All other measures are shares."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of training one group, on one dataset."""

    label: str
    dataset: str
    measure: str
    """ACCURACY, SCORE, pass@k, maj@k, a measure of drift, or the metric of a set that is scored by likelihood."""
    after: Interval
    """The measure at `step`. Failed seeds count with its worst value, if it has one."""
    before: Interval | None
    """Accuracy of the base model; None if it was not evaluated."""
    gain: Interval | None
    """after - before, paired by problem and seed. None if there is no `before`, if a seed failed, or if several have
    not ended."""
    against_first: Interval | None
    """after minus the first group's after, as in the verdict. None for the first group itself, and if the two cannot be
    compared."""
    num_seeds: int
    """Number of seeds, failed ones included."""
    num_problems: int
    step: int
    """Step of the evaluation. If groups are compared, the last step that all of them have."""
    num_failed: int = 0
    as_is: bool = False
    """Whether the models were only measured: nothing was trained, and their weights differ."""
    differs: bool = False
    """Whether the verdict distinguishes the group from the first one."""
    apart: SeedApart | None = None
    """The seed whose gain is far from the other seeds' gains; without gains, the seed whose measure is far from the
    others'.
    """
    chosen: bool = False
    """Whether the group's model was selected on these problems, so that the figure is biased upward."""
    is_share: bool = True
    """Whether the measure is a share, which is shown in percent and points. Other measures are shown in their own
    units."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcomes on one dataset, and conclusions about them."""

    dataset: str
    measure: str
    outcomes: tuple[Outcome, ...]
    verdict: Verdict | None
    """Verdict on the groups; None for a single group, or if they cannot be compared."""
    sentences: tuple[str, ...]
    """The headline, sentence by sentence."""
    level: float = 0.95
    """Confidence level of the intervals of gains and differences."""
    num_sets: int = 1
    """Number of evaluation sets over which the claims hold jointly: all sets of a mixture, else only this one."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Problem -> its cluster, for problems that share a cluster."""

    @property
    def text(self) -> str:
        """The headline."""
        return " ".join(self.sentences)

    @property
    def claims(self) -> bool:
        """Whether the answer reports a difference between groups."""
        return self.verdict is not None and bool(self.verdict.differences)

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        differences = self.verdict.differences if self.verdict else ()
        return {
            "dataset": self.dataset,
            "best": self.verdict.best if self.verdict else None,
            "differences": [
                {"better": better, "worse": worse, "value": gap.value, "low": gap.low, "high": gap.high}
                for better, worse, gap in differences
            ],
            "text": self.text,
        }


def outcomes_of(found: Sequence[Answer]) -> list[Outcome]:
    """Returns the outcomes on all datasets."""
    return [outcome for answer in found for outcome in answer.outcomes]


def clusters_of(found: Sequence[Answer]) -> dict[str, Mapping[str, str]]:
    """Returns the cluster of each problem, by dataset and problem."""
    return {answer.dataset: answer.clusters for answer in found}


def headline(found: Sequence[Answer]) -> str:
    """Returns the answer in a few sentences: about the first dataset, or about each evaluation set of a mixture."""
    if not found:
        return "Nothing has been evaluated yet."
    told = found if found[0].num_sets > 1 else found[:1]
    return " ".join(dict.fromkeys(sentence for answer in told for sentence in answer.sentences))


def only_these_weights(results: Sequence[Outcome]) -> bool:
    """Returns whether models were trained with only one seed each, so that the intervals say nothing about training in
    general."""
    return all(outcome.after.holds_for == THESE_WEIGHTS and not outcome.as_is for outcome in results)
