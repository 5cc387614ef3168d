"""Outcomes of groups on each dataset, and what may be said of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.report.statistics import THESE_WEIGHTS, Interval, Verdict
from rpg.statistics.apart import SeedApart

ACCURACY = "accuracy"
SCORE = "score"
"""The measure of graded rewards, in their own units; all others are shares."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of training one group, on one dataset."""

    label: str
    dataset: str
    measure: str
    """ACCURACY, SCORE, pass@k or maj@k."""
    after: Interval
    """The measure at `step`, failed seeds at its worst value, if it has one."""
    before: Interval | None
    """Accuracy of the base model; None where it was not evaluated."""
    gain: Interval | None
    """after - before, paired by problem and seed; None too where a seed failed, and where several have not ended."""
    against_first: Interval | None
    """after minus that of the first group, as the verdict has it; None for the first group itself, and where the two
    cannot be compared."""
    num_seeds: int
    """Seeds that failed, among `num_seeds`."""
    num_problems: int
    step: int
    """At which it was evaluated: where groups are compared, the last that all have."""
    num_failed: int = 0
    as_is: bool = False
    """Whether models were measured as they are: nothing was trained, and the weights differ."""
    differs: bool = False
    """Whether the verdict tells it from the first group."""
    apart: SeedApart | None = None
    """The seed whose gain, or whose measure where there is no gain, stands apart from the others'."""
    chosen: bool = False
    """Its model was chosen on these problems, so that the figure flatters it."""

    @property
    def is_share(self) -> bool:
        """Whether the measure is a share, shown in percent and points; a score is shown in its own units."""
        return self.measure != SCORE


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcomes on one dataset, and what may be said of them."""

    dataset: str
    measure: str
    outcomes: tuple[Outcome, ...]
    verdict: Verdict | None
    """Verdict on the groups; None where there is one alone, or where they cannot be compared."""
    sentences: tuple[str, ...]
    """The headline, sentence by sentence."""
    level: float = 0.95
    """Confidence of the intervals of gains and differences."""
    num_sets: int = 1
    """Evaluation sets over which what is claimed holds together: those of a mixture, else this one alone."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Problem -> the cluster it belongs to, of those that share one."""

    @property
    def text(self) -> str:
        """The headline."""
        return " ".join(self.sentences)

    @property
    def claims(self) -> bool:
        """Whether groups are told apart."""
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
    """Outcomes on all datasets."""
    return [outcome for answer in found for outcome in answer.outcomes]


def clusters_of(found: Sequence[Answer]) -> dict[str, Mapping[str, str]]:
    """Dataset -> problem -> the cluster it belongs to."""
    return {answer.dataset: answer.clusters for answer in found}


def headline(found: Sequence[Answer]) -> str:
    """Returns the answer in a few sentences: about the first dataset, or about each that a mixture is measured on."""
    if not found:
        return "Nothing has been evaluated yet."
    told = found if found[0].num_sets > 1 else found[:1]
    return " ".join(dict.fromkeys(sentence for answer in told for sentence in answer.sentences))


def only_these_weights(results: Sequence[Outcome]) -> bool:
    """Returns whether all intervals come from one seed each, so that they tell nothing of training, which there was."""
    return all(outcome.after.holds_for == THESE_WEIGHTS and not outcome.as_is for outcome in results)
