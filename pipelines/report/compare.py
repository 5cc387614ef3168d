"""Two or more runs or groups of seeds side by side: where their specs differ, and what came out, with intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.home.home import Home
from pipelines.home.versions import is_experiment
from pipelines.report import evidence
from pipelines.report.answer import (
    Answer,
    Outcome,
    answers_of,
    answers_of_other_measures,
    confidence_of,
    headline,
    outcomes_of,
)
from pipelines.report.endings import Beside, FinalMetric, beside_literature, final_metrics, notes_of
from pipelines.report.evidence import Group
from pipelines.report.signal import incomplete, nothing_to_learn
from storage import Store


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Groups of seeds side by side; the others are compared with the first."""

    groups: tuple[Group, ...]
    spec: dict[str, list[Any]]
    """Fields that differ: path -> one value per group."""
    answers: tuple[Answer, ...]
    """What may be said of accuracy, on each evaluation set."""
    outcomes: tuple[Outcome, ...]
    """Accuracy on the evaluation sets."""
    other_measures: tuple[Outcome, ...]
    """pass@k and maj@k on the evaluation sets."""
    literature: tuple[Beside, ...]
    """Accuracies beside those that others report."""
    measures: tuple[FinalMetric, ...]
    """Training metrics."""
    notes: tuple[str, ...]
    """What the figures do not say: groups that had nothing to learn from, experiments of which runs are missing."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; where there is no interval its ends are NaN."""
        groups = [
            {
                "label": group.label,
                "runs": group.run_ids,
                "seeds": [run.seed for run in group.runs],
                "states": [run.status for run in group.runs],
            }
            for group in self.groups
        ]
        return {
            "groups": groups,
            "spec": self.spec,
            "answer": headline(self.answers),
            "verdicts": [answer.to_json() for answer in self.answers],
            "accuracy": [asdict(outcome) for outcome in self.outcomes],
            "measures": [asdict(outcome) for outcome in self.other_measures],
            "literature": [asdict(figure) for figure in self.literature],
            "metrics": [asdict(measure) for measure in self.measures],
            "notes": list(self.notes),
        }


def compare(home: Home, names: Sequence[str]) -> RunComparison:
    """Compares runs and experiments; each cell of an experiment's matrix is a group of its own.

    Raises:
        RpgError: a name stands for nothing, or for several runs.
    """
    groups = _distinct([group for name in names for group in evidence.find_groups(home, name)])
    run_ids = [run.run_id for group in groups for run in group.runs]
    confidence = confidence_of(groups)
    with Store.open(home.root) as store:
        found = answers_of(home, store, groups, [name for name in names if is_experiment(home, name)])
        others = answers_of_other_measures(store, groups, found, confidence=confidence)
        literature = beside_literature(home, store, groups)
        curves = evidence.metric_curves(store, run_ids)
    spec = evidence.differences([group.runs[0].spec for group in groups])
    if not all(run.trains for group in groups for run in group.runs):
        spec = {path: values for path, values in spec.items() if _measures(path)}
    metrics = final_metrics(groups, curves, confidence=confidence)
    missing = [f"{name}: {sentence}" for name in names if (sentence := incomplete(home, name))]
    notes = [*notes_of(literature), nothing_to_learn(groups, curves), *missing]
    return RunComparison(
        groups=tuple(groups),
        spec=spec,
        answers=tuple(found),
        outcomes=tuple(outcomes_of(found)),
        other_measures=tuple(outcomes_of(others)),
        literature=tuple(literature),
        measures=tuple(metrics),
        notes=tuple(note for note in notes if note),
    )


def _measures(path: str) -> bool:
    """Whether a field says what is measured and how; or, in a word, what was trained."""
    section = path.partition(".")[0]
    measuring = section in ("model", "data", "reward", "rollout", "evaluation") and not path.startswith(_OF_TRAINING)
    return measuring or path in ("objective.type", "training.steps")


_OF_TRAINING = ("data.train", "data.overlap", "evaluation.checkpoints", "evaluation.every_steps")


def _distinct(groups: Sequence[Group]) -> list[Group]:
    """The groups with labels that tell them apart."""
    labels = [group.label for group in groups]
    return [
        group
        if labels.count(group.label) == 1
        else Group(f"{group.runs[0].experiment}: {group.label}" if _apart(groups) else group.run_ids[0], group.runs)
        for group in groups
    ]


def _apart(groups: Sequence[Group]) -> bool:
    return len({(group.runs[0].experiment, group.label) for group in groups}) == len(groups)
