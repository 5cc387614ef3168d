"""Answers from recorded scores: outcomes with their intervals, and the verdict on comparable groups."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pipelines.home.home import Home
from pipelines.report import evidence
from pipelines.report.answer.looks import earlier_looks
from pipelines.report.answer.outcome import ACCURACY, SCORE, Answer, Outcome, clusters_of, outcomes_of
from pipelines.report.answer.scores import BySteps, Level, Scale, Table, Tables, by_scale, score_tables
from pipelines.report.answer.wording import headline_of_one, not_compared, not_whole, nothing_compared
from pipelines.report.evidence import Group
from pipelines.report.statistics import Verdict, gain_interval, mean_interval, spread_of, verdict
from rpg.statistics.apart import seed_apart
from rpg.statistics.variance import spread_with_failures
from storage import Store


def answers(
    groups: Sequence[Group],
    evaluated: Mapping[str, BySteps],
    *,
    measure: str = ACCURACY,
    confidence: float = 0.95,
    looks: Sequence[float] = (),
    clusters: Mapping[str, Mapping[str, str]] | None = None,
    chosen: Mapping[str, Collection[str]] | None = None,
    graded: evidence.Graded | None = None,
    together: bool = False,
    first: str = "",
    scale: Scale | None = None,
) -> list[Answer]:
    """Returns an answer for each dataset with results, in the given order; two answers if only some runs have a graded
    reward.

    Args:
        groups: tables compare the others with the first one, unless `first` names another.
        evaluated: dataset -> run_id -> step -> scores, see `evidence.accuracies` and `evidence.other_measures`.
        measure: the measure of the scores.
        confidence: level of the intervals; those of differences hold jointly.
        looks: numbers of seeds of earlier interim analyses.
        clusters: dataset -> problem -> its cluster.
        chosen: label of a group -> datasets on which its model was selected: there it is shown and not compared.
        graded: the runs with a graded reward, see `evidence.graded`.
        together: whether the claims hold jointly over all datasets, or on each separately.
        first: label of the group with which tables compare the others. Without results of that group there is no
            comparison.
        scale: scale of a measure that is neither a share of right answers nor a reward; None for these.
    """
    first = first or groups[0].label
    scales = {
        dataset: [(scale, runs)] if scale else by_scale(runs, (graded or {}).get(dataset, {}))
        for dataset, runs in evaluated.items()
    }
    num_sets = sum(map(len, scales.values())) if together else 1
    found = []
    for dataset, of_dataset in evaluated.items():
        for of_runs, by_run in scales[dataset]:
            level = Level(confidence, tuple(looks), (clusters or {}).get(dataset), of_runs, num_sets)
            of_measure = [
                group
                for group in groups
                if set(group.run_ids) & set(by_run) or (len(by_run) == len(of_dataset) and _measured_on(group, dataset))
            ]
            tables = score_tables(of_measure, by_run, level) if of_measure else None
            if tables and tables.of_group:
                flattered = {label for label, names in (chosen or {}).items() if dataset in names}
                name = measure if of_runs.shares or scale else SCORE
                answer = _answer(dataset, name, of_measure, tables, level, flattered, first)
                at = level.at(tables.most_seeds)
                found.append(replace(answer, level=at, num_sets=num_sets, clusters=level.clusters or {}))
    return found


def answers_of(
    home: Home,
    store: Store,
    groups: Sequence[Group],
    names: Sequence[str],
    evaluated: Mapping[str, BySteps] | None = None,
    graded: evidence.Graded | None = None,
) -> list[Answer]:
    """Returns the answers on accuracy, at the confidence level of the runs' spec. If training used a mixture of sets,
    the claims hold jointly over the evaluation sets, and the headline names each set.

    Args:
        names: names of the requested experiments, whose earlier answers count; empty for single runs.
        evaluated: result of `evidence.accuracies`, if it is already read.
        graded: result of `evidence.graded`, if it is already read.
    """
    runs = [run for group in groups for run in group.runs]
    if evaluated is None:
        evaluated = evidence.accuracies(store, [run.run_id for run in runs])
    looks = sorted({look for name in names for look in earlier_looks(home, name)})
    clusters = evidence.clusters(store, [run.run_id for run in runs])
    return answers(
        groups,
        evaluated,
        confidence=confidence_of(groups),
        looks=looks,
        clusters=clusters,
        chosen=evidence.chosen_by(store, groups),
        graded=evidence.graded(store, [run.run_id for run in runs]) if graded is None else graded,
        together=any(len(run.spec.data.train) > 1 for run in runs),
    )


def confidence_of(groups: Sequence[Group]) -> float:
    """Returns the confidence level in the first run's spec."""
    return groups[0].runs[0].spec.evaluation.confidence


def answers_of_other_measures(
    store: Store,
    groups: Sequence[Group],
    found: Sequence[Answer],
    *,
    confidence: float = 0.95,
) -> list[Answer]:
    """Returns the answers on pass@k and maj@k for the checkpoints whose accuracy is known. The intervals are computed
    like those of accuracy, from each problem's score.

    A group with fewer samples of a problem than a measure needs is left out of it.
    """
    steps = {0, *(outcome.step for outcome in outcomes_of(found))}
    runs = [run for group in groups for run in group.runs]
    evaluated = evidence.other_measures(store, runs, steps)
    chosen: dict[str, set[str]] = {}
    for outcome in outcomes_of(found):
        if outcome.chosen:
            chosen.setdefault(outcome.label, set()).add(outcome.dataset)
    known, clusters, answered = {outcome.label for outcome in outcomes_of(found)}, clusters_of(found), list[Answer]()
    for measure, scores in evaluated.items():
        having = {run_id for by_run in scores.values() for run_id in by_run}
        part = [group for group in groups if group.label not in known or having & {run.run_id for run in group.runs}]
        answered += answers(
            part,
            scores,
            measure=measure,
            confidence=confidence,
            clusters=clusters,
            chosen=chosen,
            first=groups[0].label,
        )
    return answered


def _measured_on(group: Group, dataset: str) -> bool:
    """Returns whether the dataset is a planned evaluation set of a group without results. A set without a name in the
    spec matches any dataset."""
    named = {source.name for run in group.runs for source in run.spec.data.evaluation}
    return not named or dataset in named or not all(named)


def _answer(
    dataset: str,
    measure: str,
    groups: Sequence[Group],
    tables: Tables,
    level: Level,
    flattered: Collection[str],
    first: str,
) -> Answer:
    as_is = not any(run.trains for group in groups for run in group.runs)
    results = [
        replace(outcome, as_is=as_is, chosen=outcome.label in flattered)
        for outcome in _outcomes(dataset, measure, tables.of_group, level)
    ]
    if len(results) == 1:
        return Answer(dataset, measure, tuple(results), None, tuple(headline_of_one(results[0], groups, level)))
    known = tables.of_group.items() if tables.shared else ()
    whole = [label for label, table in tables.of_group.items() if not table.num_failed or level.scale.worst is not None]
    lost = [outcome for outcome in results if outcome.label not in whole]
    held = {label: table for label, table in known if table.counted and label not in flattered and label in whole}
    if len(held) < 2:
        return Answer(dataset, measure, tuple(results), None, tuple(nothing_compared(dataset, results, groups, lost)))
    problems = next(iter(held.values())).problems
    arms, clusters = {label: table.after for label, table in held.items()}, level.of(problems)
    worst, kind = (
        level.scale.worst or 0.0,
        {
            "shares": level.scale.shares,
            "higher_is_better": level.scale.higher_is_better,
        },
    )
    said = verdict(arms, level.looks, level.of_claims, clusters, worst, trained=not as_is, **kind)
    against = said
    if not as_is and all(len(table.after) == 1 and not table.num_failed for table in held.values()):
        against = verdict(arms, (), level.of_claims, clusters, trained=False, **kind)
    if first in held:
        results = [_against(outcome, first, said, against) if outcome.label in held else outcome for outcome in results]
    step = next((table.step for table in held.values() if table.step), 0)
    what = f"On {dataset}" if measure in (ACCURACY, SCORE) else f"{measure.capitalize()} on {dataset}"
    where = what + f" at step {step}" * bool(step) + f", by {groups[0].key}" * bool(groups[0].key)
    sentences = (f"{where}: {said.text}", *not_compared(results, lost), *not_whole(groups))
    return Answer(dataset, measure, tuple(results), said, sentences)


def _against(outcome: Outcome, first: str, said: Verdict, intervals: Verdict) -> Outcome:
    """Returns the outcome with its difference from the first group. `intervals`: verdict with the intervals of all
    differences, including groups that `said` leaves out."""
    if outcome.label == first:
        return outcome
    interval = intervals.over(outcome.label, first)
    return replace(outcome, against_first=interval, differs=said.tells(outcome.label, first))


def _outcomes(dataset: str, measure: str, tables: Mapping[str, Table], level: Level) -> list[Outcome]:
    """Returns the groups' outcomes, by label. The variance between seeds is pooled over the groups without a failed
    seed."""
    whole = [table for table in tables.values() if not table.num_failed]
    seeds = spread_of([table.after for table in whole])
    worst = level.scale.worst
    reach = max((table.reach(worst) for table in tables.values()), default=0.0) or (
        1.0 if level.scale.shares else math.nan
    )
    most = max(len(table.after) for table in tables.values())
    gains = spread_of([table.after - table.before for table in whole if table.before is not None])
    results = []
    for label, table in tables.items():
        count, lost, clusters = len(table.after), table.num_failed, level.of(table.problems)
        counted, before = table.counted_with(worst), table.before
        spread = spread_with_failures(counted, lost, reach) if lost and worst is not None else None if lost else seeds
        after = mean_interval(counted, spread=spread, clusters=clusters, **level.known)
        results.append(
            Outcome(
                label=label,
                dataset=dataset,
                measure=measure,
                after=after,
                before=None if before is None else mean_interval(before, clusters=clusters, **level.known),
                gain=None
                if before is None or lost or not (table.counted or count == 1)
                else gain_interval(
                    before,
                    table.after,
                    spread=gains,
                    clusters=clusters,
                    **level.known | {"confidence": level.at(most)},
                ),
                against_first=None,
                num_seeds=count,
                num_problems=len(table.problems),
                step=table.step,
                num_failed=lost,
                is_share=level.scale.shares,
                apart=None if lost else seed_apart(table.after if before is None else table.after - before),
            )
        )
    return results
