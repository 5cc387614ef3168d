"""The data of runs for a report or a comparison: identity from the run directory, rows from the store."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.home.home import Home
from pipelines.home.runs import find_run, is_study, status_of
from pipelines.home.versions import is_experiment, runs_of, split_name
from pipelines.report.tokens import conversation
from rpg.evaluation.measures import majority_at_k, pass_at_k, sizes
from specs.errors import Issue, SpecError
from specs.machine.files import read_json
from specs.metrics import CHARTED
from specs.records import EVALUATION
from storage import Store
from storage.provenance import provenance_rows

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment

JsonObject = dict[str, Any]
Scores = dict[str, float]
"""Problem id -> score: the share of right answers, or the mean score if the reward is graded."""
Graded = Mapping[str, Mapping[str, float | None]]
"""Dataset -> run with a graded reward -> least possible value that the reward declares, or None."""
Curve = NDArray[np.float64]
"""A metric of one run, [steps, 2]: step and value, ordered by step."""
Curves = Mapping[str, Mapping[str, Curve]]
"""Name of the metric -> run id -> curve."""
DRAWN = tuple(metric.name for metric in CHARTED)
"""Metrics that reports draw and compare."""
LARGEST = 1e75
"""Largest figure that reports compute with. Its fourth power, which variances of variances need, is still finite.
Recorded figures come from single precision, which ends at 3e38."""
TROUBLE = (
    "guard_warned",
    "guard_stopped",
    "rolled_back",
    "updates_skipped",
    "attempt_failed",
    "failed",
    "reward_failed",
)
"""Kinds of events that a reader of a report must know of."""
MOST_TROUBLE = 20
_MOST_NAMESAKES = 50
"""Largest number of runs with the same name whose specs are compared. The newest are chosen."""
_MOST_VALUES = 3
"""Largest number of differing values that are listed."""
_TROUBLE_QUERY = """
    SELECT run_id, step, kind, message, recorded_at FROM events
    WHERE list_contains($runs, run_id) AND list_contains($kinds, kind) ORDER BY recorded_at, step LIMIT $most
"""
_SAMPLED = 3
"""Number of responses with the highest scores that a page shows, and of those with the lowest."""
_SAMPLES = """
    WITH last AS (
        SELECT dataset, run_id, step, problem_id, sample, score FROM evaluation_samples
        WHERE list_contains($runs, run_id) QUALIFY step = max(step) OVER ()
    ),
    of_problem AS (
        SELECT *, row_number() OVER (problem ORDER BY score DESC, run_id, sample) AS highest,
               row_number() OVER (problem ORDER BY score, run_id, sample) AS lowest
        FROM last WINDOW problem AS (PARTITION BY dataset, problem_id)
    )
    SELECT run_id, dataset, step, problem_id, sample,
           row_number() OVER (ORDER BY highest, score DESC, md5(problem_id)) AS best,
           row_number() OVER (ORDER BY lowest, score, md5(problem_id)) AS worst
    FROM of_problem QUALIFY least(best, worst) <= $count
"""
_TEXTS = """
    SELECT run_id, dataset, step, problem_id, sample, prompt, response, answer, extracted, score, correct, num_tokens,
           finish_reason, turns
    FROM evaluation_samples
    SEMI JOIN (SELECT unnest($runs) AS run_id, unnest($datasets) AS dataset, unnest($steps) AS step,
                      unnest($problems) AS problem_id, unnest($samples) AS sample)
    USING (run_id, dataset, step, problem_id, sample)
    WHERE list_contains($runs, run_id) AND list_contains($problems, problem_id)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run's identity and state."""

    run_id: str
    name: str
    experiment: str
    question: str
    seed: int | None
    """The run's seed; None if nothing was trained."""
    values: JsonObject
    """The matrix cell."""
    created_at: str
    status: str
    spec: "Experiment"
    stages: JsonObject
    """Fingerprint, status, cached, started_at, ended_at and reason, by stage."""
    path: Path

    @property
    def trains(self) -> bool:
        """Whether a policy was trained. False if a model was only measured."""
        return self.spec.trains

    @property
    def off_policy(self) -> dict[str, int]:
        """Returns the number of updates in a batch, and the steps by which a rollout's policy may be older than the
        learner's."""
        updates = self.spec.training.minibatches * self.spec.training.epochs
        return {"updates": updates, "max_staleness": self.spec.rollout.max_staleness}

    @property
    def settings(self) -> JsonObject:
        """The spec as plain data."""
        return self.spec.model_dump(mode="json")

    @property
    def has_ended(self) -> bool:
        """Whether the run counts as an outcome: it has finished, or is executing its last stage, the report."""
        evaluation = self.stages.get("evaluate", {}).get("status")
        return self.status == "finished" or (self.status == "running" and evaluation == "finished")

    def read(self, name: str) -> JsonObject:
        """Returns a JSON file of the run's directory; empty if it is missing."""
        return read_json(self.path / name)

    def provenance(self, home: Home) -> list[JsonObject]:
        """Returns the run's rows of the table `provenance`."""
        return provenance_rows(home.root, self.path)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ only in the seed."""

    label: str
    """What distinguishes it from the other groups: `0.28`."""
    runs: tuple[Run, ...]
    key: str = ""
    """The fields whose values are the labels of all groups, for the header above them: `clip.high`. Empty if the labels
    are names."""

    @property
    def named(self) -> str:
        """The label with its field, for a place without the header: `clip.high 0.28`; a word alone."""
        return with_key(self.key, self.label)

    @property
    def run_ids(self) -> list[str]:
        """Run ids in the order of the seeds."""
        return [run.run_id for run in self.runs]


def find_groups(home: Home, name: str) -> list[Group]:
    """Returns the groups of seeds of a study, an experiment (NAME, NAME@VERSION), or a run by its id or an unambiguous
    part of it.

    A study's trials are an experiment of its name: such a name means the study.

    Raises:
        RpgError: the name matches nothing, or several runs.
    """
    if is_study(home, name):
        return study_groups(home, name)
    if is_experiment(home, name):
        return experiment_groups(home, name)
    run = load_run(home, find_run(home, name))
    return [Group(f"{run.experiment} {run.name}".strip(), (run,))]


def distinct(home: Home, found: Sequence[tuple[str, Sequence[Group]]]) -> list[Group]:
    """Returns the groups of several names, with labels that show what differs: values, seeds, experiments.

    Args:
        found: names of experiments, studies and runs, each with its groups.
    """
    groups = [group for _, of_name in found for group in of_name]
    of_runs = [not (is_study(home, name) or is_experiment(home, name)) for name, _ in found]
    if all(of_runs) and len(groups) > 1:
        groups = _of_single_runs(groups)
    elif len(found) > 1:
        keys = {group.key for group in groups} if all(len(of_name) > 1 for _, of_name in found) else {""}
        key = min(keys) if len(keys) == 1 else ""
        groups = []
        for is_run, (name, of_name) in zip(of_runs, found, strict=True):
            if is_run:
                groups += of_name
            elif len(of_name) == 1:
                groups.append(Group(name, of_name[0].runs))
            else:
                labels = [group.label if key else group.named for group in of_name]
                pairs = zip(labels, of_name, strict=True)
                groups += [Group(f"{name}: {label}", group.runs, key) for label, group in pairs]
    counts = Counter(group.label for group in groups)
    if len(counts) == len(groups):
        return groups
    values = differing({group.run_ids[0]: group.runs[0].settings for group in groups})
    named = [values.get(group.run_ids[0]) or group.run_ids[0] for group in groups]
    if len(counts) > 1:
        named = [f"{group.label} ({value})" for group, value in zip(groups, named, strict=True)]
    named = named if len(set(named)) == len(named) else [group.run_ids[0] for group in groups]
    return [
        group if counts[group.label] == 1 else Group(label, group.runs, group.key)
        for group, label in zip(groups, named, strict=True)
    ]


def _of_single_runs(groups: Sequence[Group]) -> list[Group]:
    runs = [group.runs[0] for group in groups]
    cells = [
        {"experiment": run.experiment, **run.values, **({} if run.seed is None else {"seed": f"seed {run.seed}"})}
        for run in runs
    ]
    key, labels = cell_labels(cells)
    names = [name for name in key.split(", ") if name not in ("experiment", "seed")]
    return [Group(label, group.runs, ", ".join(names)) for label, group in zip(labels, groups, strict=True)]


def experiment_groups(home: Home, name: str) -> list[Group]:
    """Returns the runs of an experiment's version, one group for each cell of its matrix, in the matrix's order.

    A run whose spec the schema rejects is left out, and `whole.incomplete` reports it.

    Args:
        name: NAME for the version that was executed last, or NAME@VERSION.
    Raises:
        RpgError: the experiment has no readable runs, or no such version.
    """
    experiment, _ = split_name(name)
    recorded = read_json(home.experiment(experiment) / "experiment.json")
    cells, unreadable = dict[str, list[Run]](), list[SpecError]()
    for run_id in runs_of(home, name):
        if _is_recorded(home, run_id):
            try:
                run = load_run(home, run_id)
            except SpecError as error:
                unreadable.append(error)
            else:
                cells.setdefault(json.dumps(run.values, sort_keys=True), []).append(run)
    labels = recorded.get("labels", {})
    key, values = cell_labels([runs[0].values for runs in cells.values()])
    groups = [
        Group(labels.get(runs[0].run_id) or value or name, tuple(runs), "" if labels else key)
        for value, runs in zip(values, cells.values(), strict=True)
    ]
    if not groups and unreadable:
        raise unreadable[0]
    if not groups:
        raise SpecError(Issue(f"experiment {name!r} has no runs yet", given=name, hint="`rpg run` it first"))
    return groups


def study_groups(home: Home, name: str) -> list[Group]:
    """Returns a group of seeds for each trial of a study that has runs, in the order of the trials.

    Raises:
        SpecError: no trial has begun.
    """
    groups = []
    for trial in read_json(home.study(name) / "study.json").get("trials", []):
        runs = [load_run(home, run_id) for run_id in trial.get("run_ids") or () if _is_recorded(home, run_id)]
        if runs:
            label = f"trial {trial['number']}" + (" (baseline)" if trial.get("baseline") else "")
            groups.append(Group(label, tuple(runs)))
    if not groups:
        raise SpecError(Issue(f"study {name!r} has no runs yet", given=name, hint="`rpg study run` it first"))
    return groups


def _is_recorded(home: Home, run_id: str) -> bool:
    return (home.run(run_id) / "run.json").is_file()


def load_run(home: Home, run_id: str) -> Run:
    """Returns a run's identity, spec and state, from its directory. Raises SpecError if the schema rejects its spec."""
    from specs.reading.recorded import recorded_spec  # not at the top: the schema is slow to load

    path = home.run(run_id)
    known, state = read_json(path / "run.json"), read_json(path / "state.json")
    return Run(
        run_id=run_id,
        name=known.get("name", ""),
        experiment=known.get("experiment", ""),
        question=known.get("question", ""),
        seed=None if known.get("kind") == EVALUATION else known.get("seed", 0),
        values=known.get("values", {}),
        created_at=known.get("created_at", ""),
        status=status_of(home, run_id),
        spec=recorded_spec(path),
        stages=state.get("stages", {}),
        path=path,
    )


def accuracies(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, dict[int, Scores]]]:
    """Returns scores by dataset, run, step and problem, from all samples of the current evaluations. A score is the
    share of right answers, or the mean score if the reward is graded."""
    rows = store.query(
        "SELECT dataset, run_id, step, problem_id, avg(coalesce(correct::DOUBLE, score)) FROM evaluation_samples "
        "WHERE list_contains(?, run_id) GROUP BY ALL ORDER BY ALL",
        [list(run_ids)],
    ).rows
    scores: dict[str, dict[str, dict[int, Scores]]] = {}
    for dataset, run_id, step, problem, share in rows:
        scores.setdefault(dataset, {}).setdefault(run_id, {}).setdefault(step, {})[problem] = share
    return scores


def graded(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Returns the evaluations with a graded reward: dataset -> run -> least possible value that the reward declares."""
    rows = store.query(
        "SELECT DISTINCT dataset, run_id, worst FROM evaluations WHERE list_contains(?, run_id) "
        "AND metric LIKE 'score@%' ORDER BY ALL",
        [list(run_ids)],
    ).rows
    found: dict[str, dict[str, float | None]] = {}
    for dataset, run_id, worst in rows:
        found.setdefault(dataset, {})[run_id] = worst
    return found


def clusters(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the clusters of problems, by dataset and problem. Problems that share nothing are left out."""
    rows = store.query(
        "SELECT DISTINCT dataset, problem_id, cluster FROM evaluation_samples "
        "WHERE list_contains(?, run_id) AND cluster IS NOT NULL",
        [list(run_ids)],
    ).rows
    found: dict[str, dict[str, str]] = {}
    for dataset, problem, cluster in rows:
        found.setdefault(dataset, {})[problem] = cluster
    return found


def chosen_by(store: Store, groups: Sequence[Group]) -> dict[str, set[str]]:
    """Returns the models that were only measured and that had been selected on evaluation sets: label -> sets on which
    no step of the model's training was more accurate and some steps were less accurate. The last step does not count as
    selected."""
    found: dict[str, set[str]] = {}
    for group in groups:
        path = Path(getattr(group.runs[0].spec.model, "path", ""))  # a generated model has no path
        if group.runs[0].trains or path.parent.name != "weights":
            continue
        sets = "SELECT dataset FROM accuracy_curves WHERE run_id = ? AND step = ? AND is_best AND NOT is_last"
        step = int(path.name.removeprefix("step-"))
        if names := {name for (name,) in store.query(sets, (path.parent.parent.name, step)).rows}:
            found[group.label] = names
    return found


def other_measures(
    store: Store, runs: Sequence[Run], steps: Collection[int]
) -> dict[str, dict[str, dict[str, dict[int, Scores]]]]:
    """Returns each problem's pass@k and maj@k for k above 1, by measure, dataset, run, step and problem, from all
    samples.

    Args:
        steps: steps of the wanted checkpoints.
    """
    seeds = {run.run_id: run.spec.evaluation.seed for run in runs}
    rows = store.query(
        "SELECT dataset, run_id, step, problem_id, list(correct ORDER BY sample), list(extracted ORDER BY sample) "
        "FROM evaluation_samples WHERE list_contains(?, run_id) AND list_contains(?, step) AND correct IS NOT NULL "
        "GROUP BY ALL ORDER BY ALL",
        [list(seeds), list(steps)],
    ).rows
    scores: dict[str, dict[str, dict[str, dict[int, Scores]]]] = {}
    for dataset, run_id, step, problem, correct, votes in rows:
        for measure, score in _pass_and_majority(tuple(correct), _numbered(votes), seeds[run_id]).items():
            by_run = scores.setdefault(measure, {}).setdefault(dataset, {})
            by_run.setdefault(run_id, {}).setdefault(step, {})[problem] = score
    return scores


def _numbered(votes: Sequence[str | None]) -> tuple[int | None, ...]:
    """Numbers the answers in the order of their first votes. Equal answers have equal numbers; None stays None."""
    numbers: dict[str, int] = {}
    return tuple(None if vote is None else numbers.setdefault(vote, len(numbers)) for vote in votes)


@lru_cache(maxsize=10_000)
def _pass_and_majority(correct: tuple[bool, ...], votes: tuple[int | None, ...], seed: int) -> dict[str, float]:
    """Returns pass@k and maj@k of one problem. Results are cached, because many problems have the same pattern of
    answers."""
    table, larger = np.array([correct]), [k for k in sizes(len(correct)) if k > 1]
    scores = {f"pass@{k}": float(pass_at_k(table, k)[0]) for k in larger}
    return scores | {f"maj@{k}": float(majority_at_k(table, [votes], k, seed=seed)[0]) for k in larger}


def metric_curves(store: Store, run_ids: Sequence[str], names: Sequence[str] = DRAWN) -> Curves:
    """Returns metrics by step. A value that is not finite, or beyond `LARGEST`, is NaN."""
    table = store.query(
        "SELECT name, run_id, list(step::DOUBLE ORDER BY step) AS steps, list(value ORDER BY step) AS curve "
        "FROM metrics WHERE list_contains(?, run_id) AND list_contains(?, name) GROUP BY name, run_id",
        [list(run_ids), list(names)],
    ).arrow()
    curves: dict[str, dict[str, Curve]] = {}
    columns = (table.column(name) for name in ("name", "run_id", "steps", "curve"))
    for name, run_id, steps, values in zip(*columns, strict=True):
        curve = np.column_stack([column.values.to_numpy(zero_copy_only=False) for column in (steps, values)])
        curve[~(np.abs(curve) <= LARGEST)] = np.nan
        curves.setdefault(name.as_py(), {})[run_id.as_py()] = curve
    return curves


def sample_responses(store: Store, run_ids: Sequence[str]) -> tuple[list[JsonObject], list[JsonObject]]:
    """Returns the responses of the last evaluated checkpoint with the highest and the lowest scores, of different
    problems if there are enough. Their `turns` are as a page shows them, and empty in an environment with a single
    turn."""
    chosen = store.query(_SAMPLES, {"runs": list(run_ids), "count": _SAMPLED}).rows
    if not chosen:
        return [], []
    keys = [row[:5] for row in chosen]
    # The texts are read separately, only for these: those of all samples may be gigabytes.
    names = ("runs", "datasets", "steps", "problems", "samples")
    result = store.query(_TEXTS, dict(zip(names, map(list, zip(*keys, strict=True)), strict=True)))
    texts = {row[:5]: dict(zip(result.columns, row, strict=True)) for row in result.rows}
    for row in texts.values():
        row["turns"] = conversation(json.loads(row["turns"] or "[]"))
    best, worst = ([(row[place], texts[row[:5]]) for row in chosen if row[place] <= _SAMPLED] for place in (5, 6))
    best.sort(key=lambda ranked: ranked[0])
    worst.sort(key=lambda ranked: ranked[0])
    return [text for _, text in best], [text for _, text in worst]


def trouble_of(store: Store, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the first events of the kinds in TROUBLE, oldest first."""
    asked = {"runs": list(run_ids), "kinds": list(TROUBLE), "most": MOST_TROUBLE}
    events: list[dict[str, Any]] = store.query(_TROUBLE_QUERY, asked).table.to_pylist()
    return events


def flatten(tree: Any, path: str = "") -> JsonObject:
    """Returns a nested mapping as {dotted path: leaf}; lists of plain values are leaves.

    Example:
        >>> flatten({"clip": {"low": 0.2}, "seeds": [0, 1]})
        {'clip.low': 0.2, 'seeds': [0, 1]}
    """
    if isinstance(tree, Mapping) and tree:
        branches: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        branches = enumerate(tree)
    else:
        return {path: tree}
    leaves: JsonObject = {}
    for key, branch in branches:
        leaves |= flatten(branch, f"{path}.{key}" if path else str(key))
    return leaves


def differences(
    specs: Sequence[JsonObject], *, ignore: Sequence[str] = ("name", "question", "seeds")
) -> dict[str, list[Any]]:
    """Returns the fields in which specs differ, by path: one value per spec, None if a spec has no such field.

    Published figures in a spec are not settings.
    """
    flat = [flatten(spec) for spec in specs]
    paths = dict.fromkeys(path for leaves in flat for path in leaves)
    settings = [path for path in paths if path not in ignore and not path.startswith("evaluation.literature")]
    rows = {path: [leaves.get(path) for leaves in flat] for path in settings}
    return {path: values for path, values in rows.items() if any(value != values[0] for value in values)}


def told_apart(home: Home, store: Store) -> dict[str, str]:
    """Returns, for each run, the values that distinguish it from other runs with the same name and experiment:
    `training.steps 100`. Runs with a unique name are left out."""
    query = "SELECT list(run_id ORDER BY created_at, run_id) FROM runs GROUP BY experiment, name HAVING count(*) > 1"
    from specs.reading.recorded import recorded_spec, unreadable

    found: dict[str, str] = {}
    for (run_ids,) in store.query(query).rows:
        specs: dict[str, JsonObject] = {}
        for run_id in run_ids[-_MOST_NAMESAKES:]:
            if why := unreadable(home.run(run_id)):
                found[run_id] = f"its spec cannot be read: {why[0]}"
            else:
                specs[run_id] = recorded_spec(home.run(run_id)).model_dump(mode="json")
        found |= differing(specs)
    return found


def differing(specs: Mapping[str, JsonObject]) -> dict[str, str]:
    """Returns, for each spec, its first values that differ from those of the others; empty if only the seed differs."""
    rows = differences(list(specs.values()))
    more = f" and {len(rows) - _MOST_VALUES} more" if len(rows) > _MOST_VALUES else ""
    shown = list(rows.items())[:_MOST_VALUES]
    return {
        name: ", ".join(f"{path} {show(values[place])}" for path, values in shown) + more
        for place, name in enumerate(specs if rows else ())
    }


def cell_labels(cells: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Returns the names of the fields in which a matrix's cells differ, and for each cell its values there:
    `divergence, kl_coef` and `forward, 0.01`.

    If it would not be clear which field a value is of, no names are returned, and each label has them.
    """
    leaves = [
        {leaf: item for path, value in values.items() for leaf, item in flatten(value, path).items()}
        for values in cells
    ]
    distinct = {json.dumps(values, sort_keys=True) for values in leaves}
    paths = list(dict.fromkeys(path for values in leaves for path in values))
    varied = [path for path in paths if len(distinct) == 1 or len({show(each.get(path, "")) for each in leaves}) > 1]
    names, present = short_names(varied), [[path for path in varied if path in values] for values in leaves]
    labels = [", ".join(show(values[path]) for path in own) for own, values in zip(present, leaves, strict=True)]
    if len(set(labels)) == len(distinct) and all(own == varied[: len(own)] for own in present):
        return ", ".join(names.values()), labels
    return "", [
        ", ".join(f"{names[path]} {show(values[path])}" for path in own)
        for own, values in zip(present, leaves, strict=True)
    ]


def with_key(key: str, label: str) -> str:
    """Returns a label with the names of its fields before its values: `sums: clip.high 0.28`; a word alone, unless it
    says nothing without them."""
    name, colon, value = label.rpartition(": ")
    is_word = value.replace("_", "").isalpha() and value not in ("none", "true", "false")
    return label if is_word else f"{name}{colon}{f'{key} {value}'.lstrip()}"


def short_names(paths: Collection[str]) -> dict[str, str]:
    """Returns each path without its section: `clip.high`. Returns whole paths if two of the short ones would be
    equal."""
    names = {path: path.partition(".")[2] or path for path in paths}
    return names if len(set(names.values())) == len(names) else {path: path for path in paths}


def show(value: Any) -> str:
    """Returns a spec value in a few characters."""
    if isinstance(value, Mapping):
        return "/".join(show(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def seconds(stage: Mapping[str, Any]) -> float:
    """Returns the duration of a stage in seconds; NaN if it has not ended."""
    started, ended = stage.get("started_at"), stage.get("ended_at")
    if not started or not ended:
        return math.nan
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
