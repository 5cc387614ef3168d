"""Comparison of runs or groups of seeds: the differences of their specs, and their results, with intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
from pipelines.report.answer.costs import costs_of
from pipelines.report.answer.equal_drift import gains_at_equal_drift
from pipelines.report.answer.whole import incomplete
from pipelines.report.diagnosis import DIAGNOSED, findings_over, not_scored, nothing_to_learn
from pipelines.report.endings import FinalMetric, LiteratureComparison, compare_with_literature, final_metrics, notes_of
from pipelines.report.evidence import Group, Run
from storage import Store

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Groups of seeds side by side. Each group is compared with the first."""

    groups: tuple[Group, ...]
    spec: dict[str, list[Any]]
    """Fields that differ: path -> one value per group."""
    answers: tuple[Answer, ...]
    """Conclusions on accuracy, on each evaluation set."""
    outcomes: tuple[Outcome, ...]
    """Accuracy on the evaluation sets."""
    other_measures: tuple[Outcome, ...]
    """pass@k and maj@k on the evaluation sets."""
    costs: tuple[Answer, ...]
    """Conclusions on drift, and on each set that is scored by likelihood."""
    equal_drift: tuple[Answer, ...]
    """Conclusions on accuracy where all runs are equally far from the policy before training, by evaluation set."""
    literature: tuple[LiteratureComparison, ...]
    """Accuracies beside published figures."""
    measures: tuple[FinalMetric, ...]
    """Training metrics."""
    notes: tuple[str, ...]
    """Limits of the figures, such as groups without a learning signal and experiments with missing runs."""
    diagnosis: tuple[tuple[str, str], ...]
    """(sentence, remedy) of each problem of the runs."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; a missing interval has NaN ends."""
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
            "key": self.groups[0].key,
            "groups": groups,
            "spec": self.spec,
            "answer": headline(self.answers),
            "verdicts": [answer.to_json() for answer in self.answers],
            "accuracy": [asdict(outcome) for outcome in self.outcomes],
            "measures": [asdict(outcome) for outcome in self.other_measures],
            "costs": _with_outcomes(self.costs),
            "equal_drift": _with_outcomes(self.equal_drift),
            "literature": [asdict(figure) for figure in self.literature],
            "metrics": [asdict(measure) for measure in self.measures],
            "notes": list(self.notes),
            "diagnosis": [{"sentence": sentence, "remedy": remedy} for sentence, remedy in self.diagnosis],
        }


def compare(home: Home, names: Sequence[str]) -> RunComparison:
    """Compares runs and experiments. Each cell of an experiment's matrix is a separate group.

    Raises:
        RpgError: a name matches nothing, or several runs.
    """
    groups = evidence.distinct(home, [(name, evidence.find_groups(home, name)) for name in names])
    run_ids = [run.run_id for group in groups for run in group.runs]
    confidence = confidence_of(groups)
    with Store.open(home.root) as store:
        evaluated, graded = evidence.accuracies(store, run_ids), evidence.graded(store, run_ids)
        experiments = [name for name in names if is_experiment(home, name)]
        found = answers_of(home, store, groups, experiments, evaluated, graded)
        others = answers_of_other_measures(store, groups, found, confidence=confidence)
        costs = costs_of(store, groups, confidence=confidence)
        equal_drift = gains_at_equal_drift(store, groups, evaluated, costs, confidence=confidence, graded=graded)
        literature = compare_with_literature(home, store, groups)
        curves = evidence.metric_curves(store, run_ids, DIAGNOSED)
        failed = not_scored(store, groups)
    first = [group.runs[0] for group in groups]
    train = all(run.trains for group in groups for run in group.runs)
    specs = [run.settings if train else _of_measuring(run.spec) for run in first]
    spec = evidence.differences([own | code for own, code in zip(specs, _code_of(first), strict=True)])
    if not train:
        spec = {path: values for path, values in spec.items() if _measures(path)}
    metrics = final_metrics(groups, curves, confidence=confidence)
    missing = [f"{name}: {sentence}" for name in names if (sentence := incomplete(home, name))]
    silent = nothing_to_learn(groups, curves)
    notes = [*notes_of(literature), silent, failed, *missing]
    return RunComparison(
        groups=tuple(groups),
        spec=spec,
        answers=tuple(found),
        outcomes=tuple(outcomes_of(found)),
        other_measures=tuple(outcomes_of(others)),
        costs=tuple(costs),
        equal_drift=tuple(equal_drift),
        literature=tuple(literature),
        measures=tuple(metrics),
        notes=tuple(note for note in notes if note),
        diagnosis=tuple(findings_over([run for group in groups for run in group.runs], curves, silent)),
    )


def _with_outcomes(found: Sequence[Answer]) -> list[dict[str, Any]]:
    """Returns answers with their measures and outcomes as plain data."""
    return [
        {"measure": each.measure, **each.to_json(), "outcomes": [asdict(outcome) for outcome in each.outcomes]}
        for each in found
    ]


def _code_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the code of each run's stages, if it differs for any stage: the results numbers, and the difference from
    the release."""
    stages = [run.read("plan.json").get("stages", {}) for run in runs]
    shared = [name for name in stages[0] if name != "report" and all(name in each for each in stages)]
    names = {stage: sorted({name for each in stages for name in each[stage].get("code", {})}) for stage in shared}
    return [
        {
            "code": {
                stage: {name: each[stage].get("code", {}).get(name, "as released") for name in found}
                for stage, found in names.items()
            },
            "results": {stage: each[stage]["results"] for stage in shared},
        }
        for each in stages
    ]


def _of_measuring(spec: "Experiment") -> dict[str, Any]:
    """Returns the spec with only the part of `rollout` that evaluation uses; see `fingerprint.evaluate_identity`."""
    longest = spec.evaluation.max_response_length or spec.rollout.max_response_length
    evaluation = spec.evaluation.model_dump(mode="json") | {"max_response_length": longest}
    rollout = spec.rollout.model_dump(mode="json", include={"engine", "rollouter"})
    return spec.model_dump(mode="json") | {"rollout": rollout, "evaluation": evaluation}


def _measures(path: str) -> bool:
    """Returns whether a field belongs to the measurement, or is a short name of the training."""
    section = path.partition(".")[0]
    measuring = section in ("model", "data", "reward", "rollout", "evaluation") and not path.startswith(_OF_TRAINING)
    return measuring or section == "code" or path in ("objective.type", "training.steps")


_OF_TRAINING = ("data.train", "data.overlap", "evaluation.checkpoints", "evaluation.every_steps")
