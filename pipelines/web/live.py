"""The live page: the curves of runs, overlaid while they train, and the answer so far.

The page asks for new steps at intervals that follow from the cost of an answer: the server spends at most 1 % of a CPU
on a page. It reads the record alone.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.home.home import Home
from pipelines.home.runs import is_run, is_study, status_of, study_runs
from pipelines.home.versions import is_experiment, looks_of, runs_of, split_name
from pipelines.report.answer import confidence_of, note_looks, seeds_ended
from pipelines.report.answer.whole import answered
from pipelines.report.charts import Chart, line, line_layers
from pipelines.report.endings import LEAST_SEEDS
from pipelines.report.evidence import LARGEST, Group, distinct, find_groups
from pipelines.report.page import render
from pipelines.report.statistics import level
from pipelines.studies.answers.answer import answer as answer_of_study
from pipelines.studies.answers.results import read_study
from rpg.statistics.factors import student
from specs.errors import RpgError
from specs.machine.files import read_json
from specs.metrics import BY_NAME, METRICS
from storage import Store
from storage.growth import new_rows
from storage.segments import BadSegmentError

AXES = {"steps": "", "tokens": "response_length/mean", "time": "time/step"}
"""The x axes. Each is the sum of a metric over the steps so far."""
_FIRST = ("reward/mean", "kl/reverse", "entropy", "response_length/mean", "grad_norm", "clip_fraction/high")
"""Metrics that a page shows, with the accuracy, unless others are chosen; see `_is_answer`."""
_LIVE = ("pending", "running")
_SHARE = 0.01
"""Largest share of a CPU that the answers to one page take."""
_LEAST_SECONDS, _MOST_SECONDS, _ENDED_SECONDS = 2.0, 60.0, 30.0
"""Bounds of the time between two requests of a page, and this time if no run is live."""
_DIGITS = 6
_EVALUATED = " on "
"""Text between the measure and the set in the name of an evaluation. No metric's name contains it."""
_MOST_SEEDS = 64
"""Number of seeds from which on the factor of Student's interval is treated as constant."""
_NAMES = "SELECT DISTINCT name FROM metrics WHERE list_contains(?, run_id)"
_ATTEMPTS = "SELECT run_id, max(attempt) FROM attempts WHERE list_contains(?, run_id) GROUP BY run_id"
_CURVES = """
    SELECT name, run_id, list(step ORDER BY step) AS steps, list(value ORDER BY step) AS curve
    FROM metrics JOIN (SELECT unnest($runs) AS run_id, unnest($since) AS since) USING (run_id)
    WHERE list_contains($runs, run_id) AND list_contains($names, name) AND step >= since
    GROUP BY name, run_id
"""
_EVALUATIONS = """
    SELECT run_id, metric || ' on ' || dataset, list(step ORDER BY step), list(value ORDER BY step)
    FROM evaluations WHERE list_contains(?, run_id) GROUP BY ALL ORDER BY ALL
"""


@dataclass(frozen=True, slots=True)
class State:
    """Digests of a run's state."""

    about: str
    """Digest of the run's status, its attempts and the evaluations after training."""
    rows: str
    """Digest of the list of files with the run's steps."""


@dataclass(frozen=True, slots=True)
class Known:
    """The part of a run that a page has."""

    state: str
    rows: str
    """The digests of `State` when it was read."""
    attempt: int
    step: int
    """The last step that was sent; -1 if none was."""


_NOTHING = Known("", "", -1, -1)


@dataclass(frozen=True, slots=True)
class Question:
    """A page's question."""

    names: tuple[str, ...]
    """Experiments (NAME or NAME@VERSION), studies and runs."""
    metrics: tuple[str, ...] = ()
    """Metrics to send. Empty means those that a page shows at first."""
    axis: str = "steps"
    """A key of AXES."""
    known: Mapping[str, Known] = field(default_factory=dict)
    look: bool = False
    """Whether to show the answer even if that is a further interim analysis."""

    @property
    def columns(self) -> list[str]:
        """Returns the metrics that are read: those that are shown, and that of the axis."""
        return list(dict.fromkeys([*(self.metrics or _FIRST), *filter(None, [AXES[self.axis]])]))

    @classmethod
    def of(cls, body: bytes) -> "Question":
        """Reads a request. Raises ValueError or another error of a wrong form."""
        asked = json.loads(body)
        given = dict(asked.get("known", {})).items()
        known = {run_id: Known(str(state), str(rows), int(at), int(step)) for run_id, (state, rows, at, step) in given}
        axis = asked.get("x", "steps")
        if axis not in AXES:
            raise ValueError(axis)
        names, metrics = (tuple(map(str, asked.get(key, ()))) for key in ("of", "metrics"))
        "".join(names).encode()  # half a character is a ValueError
        return cls(names, metrics, axis, known, bool(asked.get("look")))


class Live:
    """Source of the data for live pages, from a home's record. Threads may share it. It answers one request at a
    time."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._turn = threading.Lock()
        self._groups: dict[tuple[str, ...], tuple[object, list[Group]]] = {}
        self._answers: dict[str, tuple[object, str]] = {}
        """Name -> the state of its runs, and the answer in that state."""

    def current(self) -> list[str]:
        """Returns the experiments with runs that are live; the newest one if no run is live; empty for an
        empty home."""
        query = """
            SELECT experiment, count(*) FILTER (status IN ('pending', 'running')) AS live FROM runs
            WHERE experiment IS NOT NULL GROUP BY experiment ORDER BY max(created_at) DESC, experiment
        """
        with Store.open(self._home.root) as store:
            rows = store.query(query).rows
        return [name for name, live in rows if live] or [name for name, _ in rows[:1]]

    def page(self, names: Sequence[str]) -> str:
        """Returns the page of these experiments, studies and runs. Raises RpgError if a name matches nothing."""
        groups = self._groups_of(tuple(names))
        confidence = confidence_of(groups) if groups else 0.95
        about = {
            "of": list(names),
            "first": _FIRST,
            "axes": AXES,
            "factors": [student(count - 1, confidence) for count in range(2, _MOST_SEEDS)],
            "leastSeeds": LEAST_SEEDS,
            "metrics": {
                metric.name: {"heading": metric.heading, "bounds": [_plain(metric.least), _plain(metric.most)]}
                for metric in METRICS
            },
        }
        return render("live.html", names=names, about=about, chart=_template(), confidence=confidence)

    def changes(self, wanted: Question) -> dict[str, Any]:
        """Returns the changes since the state that the page knows, and the seconds after which it may ask again.

        Raises:
            RpgError: a name matches nothing.
        """
        with self._turn:
            begun = time.process_time()
            groups = self._groups_of(wanted.names)
            statuses = {run_id: status_of(self._home, run_id) for group in groups for run_id in group.run_ids}
            states = {run_id: _state_of(self._home, run_id, status) for run_id, status in statuses.items()}
            sent = self._changed(wanted, states, statuses)
            if sent:
                sent |= {"key": groups[0].key if groups else "", "groups": [_shown(each, statuses) for each in groups]}
            is_live = any(status in _LIVE for status in statuses.values())
            spent = (time.process_time() - begun) / _SHARE if wanted.known else 0.0  # the first question comes once
            least = _LEAST_SECONDS if is_live else _ENDED_SECONDS
            return sent | {"wait": round(min(max(spent, least), _MOST_SECONDS), 1)}

    def _changed(self, wanted: Question, states: Mapping[str, State], statuses: Mapping[str, str]) -> dict[str, Any]:
        """Returns the new rows, and the answer if it may have changed. A run that has only made more steps is read from
        its own files, other runs through the store."""
        grown, others, names = dict[str, Any](), list[str](), set[str]()
        for run_id, state in states.items():
            known = wanted.known.get(run_id)
            if known is None or known.state != state.about:
                others.append(run_id)
            elif known.rows != state.rows:
                try:
                    grown[run_id], of_run = _grown(self._home, run_id, wanted, state)
                    names |= of_run
                except (BadSegmentError, FileNotFoundError):
                    others.append(run_id)
        if not others and not wanted.look:
            return {"runs": grown, "recorded": _ordered(names)} if grown else {}
        with Store.open(self._home.root) as store:
            sent = _rows(store, wanted, others, states)
            sent["runs"] |= grown
            return sent | {"answer": self._answer(store, wanted, statuses)}

    def _groups_of(self, names: tuple[str, ...]) -> list[Group]:
        """Returns the groups of seeds, read again if runs were added."""
        stamp = [_written_at(self._home, name) for name in names]
        if self._groups.get(names, (None,))[0] != stamp:
            found = [(name, self._groups_under(name)) for name in names]
            self._groups[names] = stamp, distinct(self._home, found)
        return self._groups[names][1]

    def _groups_under(self, name: str) -> list[Group]:
        """Returns the groups of one name; empty for an experiment or a study of which no run has begun."""
        try:
            of_study, of_experiment = is_study(self._home, name), is_experiment(self._home, name)
            runs = study_runs(self._home, name) if of_study else runs_of(self._home, name) if of_experiment else []
            if (of_study or of_experiment) and not any(is_run(self._home, run_id) for run_id in runs):
                return []
            return find_groups(self._home, name)
        except (OSError, ValueError) as error:  # no file has such a name
            raise RpgError(f"nothing is recorded under {name[:80]!r}") from error

    def _answer(self, store: Store, wanted: Question, statuses: Mapping[str, str]) -> dict[str, Any]:
        """Returns the answer so far, or the cost of seeing it; both empty for a selection of runs."""
        name, *others = wanted.names
        if others or not statuses or not (is_study(self._home, name) or is_experiment(self._home, name)):
            return {"text": "", "note": "", "asks": False}
        state = sorted(
            (run_id, read_json(self._home.run(run_id) / "state.json").get("evaluation")) for run_id in statuses
        )
        stamp = [sorted(statuses.items()), state, _time_of(self._home.root / "studies" / name / "study.json")]
        if is_study(self._home, name):
            if self._answers.get(name, (None,))[0] != stamp:
                self._answers[name] = stamp, answer_of_study(self._home, read_study(self._home, name)).sentence
            return {"text": self._answers[name][1], "note": "", "asks": False}
        return self._answer_of_experiment(store, name, wanted, stamp, any(s in _LIVE for s in statuses.values()))

    def _answer_of_experiment(
        self, store: Store, name: str, wanted: Question, stamp: object, is_live: bool
    ) -> dict[str, Any]:
        """Returns the answer of an experiment. While runs are live, it is shown only on request, or if it was shown
        before with as many seeds: each further interim analysis uses a share of the error that all of them together may
        have."""
        groups = find_groups(self._home, name)
        num_seeds, looks = seeds_ended(groups), looks_of(self._home, name)
        earlier = len({look for look in looks if 1 < look < num_seeds})
        confidence = confidence_of(groups)
        now, later = (f"{100 * level(confidence, number):.3g} %" for number in (earlier, earlier + 1))
        if is_live and num_seeds > 1 and num_seeds not in looks and not wanted.look:
            note = (
                f"{num_seeds:g} seeds have ended. Their answer holds at {now}. After it is shown, a later one,"
                f" with more seeds, holds at {later} instead of {now}."
            )
            return {"text": "", "note": note, "asks": True}
        note_looks(self._home, [name])
        if self._answers.get(name, (None,))[0] != stamp:
            self._answers[name] = stamp, answered(self._home, store, name, groups)[0]
        note = f"Intervals hold at {now}; after another look, with more seeds, at {later}." if num_seeds > 1 else ""
        return {"text": self._answers[name][1], "note": note, "asks": False}


def _rows(store: Store, wanted: Question, run_ids: Sequence[str], states: Mapping[str, State]) -> dict[str, Any]:
    """Returns the new rows of runs, and the names of what can be shown."""
    recorded = {name for (name,) in store.query(_NAMES, [list(states)]).rows}
    attempts = dict(store.query(_ATTEMPTS, [list(run_ids)]).rows)
    runs: dict[str, dict[str, Any]] = {}
    for run_id in run_ids:
        attempt, before = attempts.get(run_id, 0), wanted.known.get(run_id, _NOTHING)
        whole, state = before.attempt != attempt, states[run_id]
        known = [state.about, state.rows, attempt, -1 if whole else before.step]
        runs[run_id] = {"whole": whole, "curves": {}, "known": known}
    values = {"runs": list(run_ids), "since": [run["known"][3] for run in runs.values()], "names": wanted.columns}
    table = store.query(_CURVES, values).arrow()
    columns = (table.column(name) for name in ("name", "run_id", "steps", "curve"))
    for name, run_id, steps, curve in zip(*columns, strict=True):
        x, y = (part.values.to_numpy(zero_copy_only=False) for part in (steps, curve))
        of_run = runs[run_id.as_py()]
        of_run["curves"][name.as_py()] = {"x": _steps(x), "y": _short(y)}
        of_run["known"][3] = max(of_run["known"][3], int(x[-1]))
    for run_id, name, steps, curve in store.query(_EVALUATIONS, [list(run_ids)]).rows:
        recorded.add(name)
        runs[run_id]["curves"][name] = {"x": steps, "y": _short(np.array(curve, dtype=float)), "whole": True}
    return {"runs": runs, "recorded": _ordered(recorded)}


def _grown(home: Home, run_id: str, wanted: Question, state: State) -> tuple[dict[str, Any], set[str]]:
    """Returns the new rows of a run that has made more steps, in the same attempt, since it was read, and the names of
    all metrics in them.

    Raises:
        BadSegmentError, FileNotFoundError: see `new_rows`.
    """
    before = wanted.known[run_id]
    curves: dict[str, Any] = {}
    # The last step is sent again: some of its rows may have been written later.
    rows = new_rows(home.root, run_id, "metrics", before.attempt, before.step)
    names = set(rows["name"].unique().to_pylist())
    for name in names.intersection(wanted.columns):
        of_name = rows.filter(pc.equal(rows["name"], name)).sort_by("step")
        curves[name] = {"x": _steps(of_name["step"].to_numpy()), "y": _short(of_name["value"].to_numpy())}
    last = pc.max(rows["step"]).as_py() or before.step
    for row in new_rows(home.root, run_id, "evaluations", before.attempt, 0).sort_by("step").to_pylist():
        names.add(name := f"{row['metric']}{_EVALUATED}{row['dataset']}")
        curve = curves.setdefault(name, {"x": [], "y": []})
        curve["x"].append(row["step"])
        curve["y"] += _short(np.array([row["value"]]))
    return {"whole": False, "curves": curves, "known": [state.about, state.rows, before.attempt, last]}, names


def _ordered(names: Iterable[str]) -> list[str]:
    """Returns the names of evaluations, then those of metrics in the order of `METRICS`. Unknown metrics come last."""
    order = {name: place for place, name in enumerate(BY_NAME)}
    return sorted(names, key=lambda name: (_EVALUATED not in name, order.get(name, len(order)), name))


def _shown(group: Group, statuses: Mapping[str, str]) -> dict[str, Any]:
    """Returns a group as the page shows it."""
    runs = [
        {"id": run.run_id, "seed": run.seed, "status": statuses[run.run_id], "responses": _responses(run.settings)}
        for run in group.runs
    ]
    steps = group.runs[0].spec.training.steps if group.runs[0].trains else 0
    return {"label": group.label, "runs": runs, "steps": steps}


def _responses(settings: Mapping[str, Any]) -> int:
    """Returns the responses of a step."""
    training = settings.get("training") or {}
    return int(training.get("prompts_per_step", 0)) * int(training.get("group_size", 0))


def _steps(steps: NDArray[np.int64]) -> int | list[int]:
    """Returns the first of the steps if they are consecutive, else their list."""
    first, last = int(steps[0]), int(steps[-1])
    return first if last - first == len(steps) - 1 else steps.tolist()


def _short(values: NDArray[np.float64]) -> list[float | None]:
    """Returns values with six digits. A value that is not finite, or too large to compute with, becomes None."""
    known = np.abs(values) <= LARGEST
    sizes = np.where(known & (values != 0), np.abs(values), 1.0)
    scale = 10.0 ** np.clip(_DIGITS - 1 - np.floor(np.log10(sizes)), -300, 300)
    rounded = np.round(np.where(known, values, 0.0) * scale) / scale
    return [value if is_known else None for value, is_known in zip(rounded.tolist(), known.tolist(), strict=True)]


def _plain(bound: float) -> float | None:
    return bound if np.isfinite(bound) else None


def _template() -> Chart:
    """Returns a chart without data. The page fills a copy of it for each metric."""
    ends = {"domainMin": {"expr": "x0"}, "domainMax": {"expr": "x1"}, "nice": False, "zero": False}
    layers = line_layers([line([(0, 0)], bands=[([0], [0])])])
    for each in layers:
        each["mark"]["clip"] = True
    return Chart(
        "",
        layers,
        {"lines": []},
        x={"title": "step", "scale": ends, "axis": {"format": "~s"}},
        y={"scale": {"zero": False, "nice": True}},
    )


def _state_of(home: Home, run_id: str, status: str) -> State:
    run = home.run(run_id)
    about = "-".join([*map(_time_of, (run / "attempts", run / "evaluate", run / "concurrent")), status])
    return State(about, "-".join(_time_of(run / "segments" / table) for table in ("metrics", "evaluations")))


def _written_at(home: Home, name: str) -> tuple[str, ...]:
    """Returns when the list of an experiment's or a study's runs last changed, and which of them have begun."""
    files: Iterable[Path] = ()
    with suppress(ValueError):
        bare = split_name(name)[0]
        files = (home.experiment(bare) / "experiment.json", home.study(bare) / "study.json")
    return (*map(_time_of, files), _time_of(home.root / "runs"))


def _time_of(path: Path) -> str:
    try:
        return f"{path.stat().st_mtime_ns:x}"
    except (OSError, ValueError):  # it does not exist, or no file has such a name
        return ""
