"""The pages: the table of experiments, studies and runs, and the report of each. Pages are rendered again after a
change."""

import threading
from collections.abc import Callable
from pathlib import Path

from pipelines.home.home import Home
from pipelines.home.versions import looks_of
from pipelines.remote.record_files import read_listings
from pipelines.report import write_experiment_report, write_run_report
from pipelines.report.answer import note_looks, seeds_ended
from pipelines.report.answer.whole import answered
from pipelines.report.evidence import experiment_groups, told_apart
from pipelines.report.page import render
from pipelines.studies.answers.report import write_study_report
from specs.errors import RpgError
from specs.machine.files import read_json
from specs.machine.scratch import Scratch
from storage import Store

_EXPERIMENTS = """
    SELECT name, question, count(run_id) AS num_runs, list_sort(list_distinct(list(status))) AS statuses, created_at
    FROM experiments LEFT JOIN (SELECT experiment AS name, run_id, status FROM runs) USING (name)
    GROUP BY name, question, created_at ORDER BY created_at DESC NULLS LAST, name
"""
_STUDIES = "SELECT name, question, status, num_trials, trials_wanted, created_at FROM studies ORDER BY name"
_RUNS = """
    SELECT s.run_id, s.experiment, s.name, s.status, s.step, s.steps, s.reward_last,
           CASE WHEN s.evaluated_step > 0 THEN s.accuracy_before END AS accuracy_before,
           s.accuracy_after, CASE WHEN s.evaluated_step > 0 THEN s.score_before END AS score_before, s.score_after,
           r.started_at, s.seconds, r.reason
    FROM run_summary AS s JOIN runs AS r USING (run_id) ORDER BY r.created_at DESC NULLS LAST, s.run_id
"""
KINDS: dict[str, Callable[[Home, str, Path], Path]] = {
    "runs": write_run_report,
    "experiments": write_experiment_report,
    "studies": write_study_report,
}
"""Kinds of units that have a page, each with the function that writes it."""
_UNSEEN = ("leases", "logs")
"""Directories of a run that its report does not use."""


class UnknownPageError(Exception):
    """Error for a name that is not on record."""


class Pages:
    """Renderer of a home's pages. Threads may share it. It renders one page at a time."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._scratch = Scratch(home.root, "pages")
        self._cache = self._scratch.path
        self._versions: dict[str, str] = {}
        """Digest of the input of each unit's page in the cache."""
        self._answers: dict[str, tuple[str, str]] = {}
        """Experiment -> digest of the answer's input, and the answer."""
        self._turn = threading.Lock()

    def close(self) -> None:
        """Removes the cached pages."""
        self._scratch.remove()

    def index(self) -> str:
        """Returns the table of everything recorded."""
        with Store.open(self._home.root) as store:
            tables = {
                name: store.query(query).table.to_pylist()
                for name, query in (("experiments", _EXPERIMENTS), ("studies", _STUDIES), ("runs", _RUNS))
            }
            apart = told_apart(self._home, store)
            for row in tables["experiments"]:
                row["answer"] = self._answer(store, row["name"])
        for row in tables["runs"]:
            row["name"] = ", ".join(filter(None, [row["name"], apart.get(row["run_id"])]))
        return render("record.html", home=self._home.root.name, **tables)

    def _answer(self, store: Store, name: str) -> str:
        """Returns the answer of an experiment if all its runs have ended, or if the answer was shown before. Otherwise
        returns how many runs have not ended, because a new answer would be a further interim analysis."""
        version = self._version(f"experiments/{name}")
        if self._answers.get(name, ("",))[0] != version:
            try:
                groups = experiment_groups(self._home, name)
            except RpgError:
                text = "no run has begun"
            else:
                live = sum(run.status in ("pending", "running") for group in groups for run in group.runs)
                is_new = seeds_ended(groups) > 1 and seeds_ended(groups) not in looks_of(self._home, name)
                text = f"{live} of {sum(len(group.runs) for group in groups)} runs have not ended"
                if not (live and is_new):
                    text = answered(self._home, store, name, groups)[0]
                    note_looks(self._home, [name])
            self._answers[name] = version, text
        return self._answers[name][1]

    def report(self, kind: str, name: str) -> str:
        """Returns the report page of a run, an experiment or a study, from the present record.

        Args:
            kind: one of `KINDS`.
        Raises:
            UnknownPageError: there is no record of that name.
            RpgError: there is nothing to show yet; the message names the missing part.
        """
        unit = f"{kind}/{name}"
        with self._turn:
            version = self._version(unit)
            page = self._cache / kind / f"{name}.html"
            if self._versions.get(unit) != version:
                KINDS[kind](self._home, name, page)
                self._versions[unit] = version
                if kind == "experiments":
                    note_looks(self._home, [name])
            return page.read_text(encoding="utf-8")

    def _version(self, unit: str) -> str:
        """Returns a digest of the input of a unit's page. Raises UnknownPageError if the home has no such unit."""
        kind, _, name = unit.partition("/")
        shown = [unit]
        if kind == "experiments":
            recorded = read_json(self._home.experiment(name) / "experiment.json")
            shown += [f"runs/{run_id}" for run_id in recorded.get("runs", [])]
        listings = read_listings(self._home.root, shown)
        if unit not in listings:
            raise UnknownPageError(unit)
        return "".join(listings[part].without(_UNSEEN).digest for part in shown if part in listings)
