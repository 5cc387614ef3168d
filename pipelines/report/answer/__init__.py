"""The answer: accuracy before and after training, pooled over seeds, with intervals, and conclusions about groups.

Measurements at the same step are compared. A seed whose run failed counts with the measure's worst value. A run that
has not ended, or was stopped, is no outcome yet: it is named and not counted. `verdict` decides and says which group is
best and which groups differ; tables mark the same differences and no others.
"""

from pipelines.report.answer.answers import answers, answers_of, answers_of_other_measures, confidence_of
from pipelines.report.answer.curve import Accuracy, accuracies_by_step, left_behind
from pipelines.report.answer.looks import note_looks, seeds_ended
from pipelines.report.answer.outcome import (
    SCORE,
    Answer,
    Outcome,
    clusters_of,
    headline,
    only_these_weights,
    outcomes_of,
)
from pipelines.report.answer.scores import BySteps
from pipelines.report.answer.wording import (
    change,
    digits_of,
    figure,
    figure_and_interval,
    percent,
    points,
    with_interval,
)

__all__ = [
    "SCORE",
    "Accuracy",
    "Answer",
    "BySteps",
    "Outcome",
    "accuracies_by_step",
    "answers",
    "answers_of",
    "answers_of_other_measures",
    "change",
    "clusters_of",
    "confidence_of",
    "digits_of",
    "figure",
    "figure_and_interval",
    "headline",
    "left_behind",
    "note_looks",
    "only_these_weights",
    "outcomes_of",
    "percent",
    "points",
    "seeds_ended",
    "with_interval",
]
