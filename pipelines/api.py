"""The Python API: `load` a spec, plan it, run it here or submit it to a server, and read the results.

Everything goes through the same stages and cache as the command line, under RPG_HOME.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from pipelines.home.home import Home
from pipelines.jobs import load as jobs
from specs.document import Document
from specs.errors import Issue, RpgError, SpecError, render
from specs.loader import Kind, Spec, kind_of
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest
from specs.schema.study import Study
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    import pandas as pd

    from pipelines.planning.plan import Plan
    from pipelines.report.answer import Answer
    from pipelines.report.charts import Chart
    from pipelines.report.evidence import Group
    from pipelines.report.statistics import Verdict
    from pipelines.studies.answers.results import StudyRecord

_GOES_ON = "the finished work is saved; the same call continues from here"


class RunError(RpgError):
    """Error raised if at least one run failed. `Job.outcome` has the results of the others."""


_FIGURES = ("before", "after", "gain", "against_first", "value", "low", "high")
"""Columns of a table that hold figures, and beginnings of the names of those that hold their intervals."""


def load(
    spec: Spec,
    *,
    set: Mapping[str, Any] | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> "Job":
    """Reads an experiment, a study or an evaluation of existing models.

    Args:
        spec: a file, or a mapping with the content of such a file; its paths are relative to the working directory.
        set: path -> value, applied to the spec as `--set` does: `{"training.steps": 10}`.
        rewards: name -> function that scores responses, for the spec's `reward: {type: NAME}`. The function and its
            dependencies are written to a file, which then serves as a reward of type python.
    Raises:
        SpecError: every error, each with its file and line, or, in a mapping, with the path of its key.
    """
    return Job(jobs.load(spec, set or {}, Home.from_environment(), rewards), kind_of(spec))


def _nearest_series(name: str, known: Collection[str]) -> str:
    """Returns a hint at the metric that a name means, the mean first; empty if none is close."""
    return f"did you mean `{name}/mean`?" if f"{name}/mean" in known else nearest(name, known)


class _Told:
    """Base class whose error for an unknown attribute lists the attributes that exist."""

    if not TYPE_CHECKING:  # to a type checker an unknown attribute is an error

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__} has no attribute {name!r}"
            if name.startswith("_"):  # asked for by Python, pandas and notebooks
                raise AttributeError(message)
            known = sorted(each for each in dir(self) if not each.startswith("_"))
            hint = nearest(name, known)
            raise AttributeError(f"{message}; there are: {', '.join(known)}{hint and f'; {hint}'}")


@dataclass(frozen=True, repr=False)
class Job(_Told):
    """An experiment, a study or an evaluation, ready to be planned and run."""

    document: Document | StudyDocument
    """The spec as read and checked."""
    kind: Kind

    @property
    def name(self) -> str:
        """Returns the spec's name."""
        return self._spec.name

    @property
    def question(self) -> str:
        """Returns the spec's question."""
        return self._spec.question

    @property
    def _spec(self) -> Experiment | Study:
        return self.document.study if isinstance(self.document, StudyDocument) else self.document.experiment

    def plan(self) -> "JobPlan":
        """Returns the plan, as `rpg plan` does: stages to run, finished stages, and the reasons. Changes nothing.

        Raises:
            SpecError: the data or the model that the spec names is wrong.
        """
        from pipelines.jobs.plan import findings, runs_document
        from pipelines.planning.plan import make_plan

        home = Home.from_environment()
        plan = make_plan(runs_document(self.document), home)
        errors, warnings = findings(self.document, plan, home)
        if errors:
            raise SpecError(*errors)
        return JobPlan(self.document, plan, tuple(warnings))

    def run(self, parallel: int | Literal["auto"] = 1, progress: bool = True) -> "Outcome":
        """Runs the job here, as `rpg run`, `rpg study run` and `rpg evaluate` do; finished work is reused.

        Ctrl-C, or the stop button of a notebook, saves the work in progress and raises KeyboardInterrupt: the same call
        resumes from there. Call it in the main thread.

        Args:
            parallel: runs (trials, for a study) at a time; auto: as many as the free GPU slots allow.
            progress: whether to report progress on stderr.
        Raises:
            RunError: a run failed; the others were still run.
            SpecError: the data or the model that the spec names is wrong.
        """
        home = Home.from_environment()
        if isinstance(self.document, StudyDocument):
            self._run_study(self.document, home, parallel, progress)
        else:
            self._run(self.document, home, parallel, progress)
        return self.outcome()

    def _run(self, document: Document, home: Home, parallel: int | str, progress: bool) -> None:
        from pipelines.jobs.execute import run_here

        outcomes = run_here(document, home, parallel=str(parallel), quiet=not progress)
        if any(outcome.interrupted for outcome in outcomes):
            raise KeyboardInterrupt(_GOES_ON)
        bad = [outcome for outcome in outcomes if outcome.status != "finished"]
        if bad:
            listed = "\n".join(f"  {each.run.run_id} {each.status}: {each.error or 'see its log'}" for each in bad)
            raise RunError(f"{len(bad)} of {len(outcomes)} runs did not finish\n{listed}")

    def _run_study(self, document: StudyDocument, home: Home, parallel: int | str, progress: bool) -> None:
        from pipelines.jobs.execute import run_study_here
        from pipelines.studies.answers.report import write_study_report
        from pipelines.studies.answers.results import StudyRecord
        from pipelines.studies.trials import StudyInterruptedError

        try:
            at_once = 0 if parallel == "auto" else int(parallel)
            record = StudyRecord.of(run_study_here(document, home, at_once, quiet=not progress))
        except StudyInterruptedError:
            raise KeyboardInterrupt(_GOES_ON) from None
        write_study_report(home, record.name)
        if not record.finished:
            reasons = "".join(f"\n  trial {each.number}: {each.reason}" for each in record.trials[:5])
            raise RunError(f"no trial of the study finished{reasons}")

    def submit(self, profile: str | None = None) -> "Submissions":
        """Submits the job to the workers of a Prefect server, as `rpg submit` does.

        Args:
            profile: an API's URL or the name of a Prefect profile; None: RPG_PROFILE, else the server that `rpg up`
            started.
        Raises:
            SpecError: the server does not exist, or it refuses.
        """
        import os

        from pipelines.jobs.submit import submit, submit_study

        home, profile = Home.from_environment(), os.environ.get("RPG_PROFILE", "") if profile is None else profile
        if isinstance(self.document, StudyDocument):
            return Submissions((self.name, link) for link in submit_study(self.document, home, profile))
        return Submissions((each.run_id, each.link) for each in submit(self.document, home, profile))

    def outcome(self) -> "Outcome":
        """Returns the recorded results so far.

        Raises:
            RpgError: no run has started.
        """
        home = Home.from_environment()
        if isinstance(self.document, StudyDocument):
            return Outcome(home, self.document.study.name, self.question, ())
        from pipelines.planning.plan import make_plan

        return Outcome(home, self.name, self.question, tuple(run.run_id for run in make_plan(self.document, home).runs))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}: {self.question}>" if self.question else f"<{self.kind} {self.name}>"


@dataclass(frozen=True, repr=False)
class JobPlan(_Told):
    """The work of a call: which stages would run, which are finished, and why. `print` shows it as `rpg plan` does."""

    document: Document | StudyDocument
    plan: "Plan"
    """Runs and stages; for a study, those of its experiment."""
    warnings: "tuple[Issue, ...]"

    @property
    def data(self) -> dict[str, Any]:
        """Returns the plan in the form of `rpg plan --json`."""
        from pipelines.jobs.plan import plan_data

        return plan_data(self.document, self.plan, Home.from_environment())

    def __str__(self) -> str:
        from pipelines.jobs.plan import print_plan
        from pipelines.terminal.console import SafeConsole

        text = StringIO()
        console = SafeConsole(text, soft_wrap=True, width=160, force_jupyter=False)
        print_plan(self.document, self.plan, Home.from_environment(), console)
        told = render(self.warnings, noun="warning") if self.warnings else ""
        return text.getvalue() + told

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Submissions(list[tuple[str, str]]):
    """Pairs (run, URL of its dashboard page), one for each flow run that a worker will execute."""

    def _repr_html_(self) -> str:
        rows = "".join(f'<li>{escape(name)} <a href="{escape(link)}">{escape(link)}</a></li>' for name, link in self)
        return f"<ul>{rows}</ul>"


@dataclass(frozen=True)
class JobRun(_Told):
    """The record of one run of a job."""

    run_id: str
    name: str
    seed: int | None
    """None if nothing is trained, or if the run has not started."""
    values: dict[str, Any]
    """Values of the matrix fields in this run; for a study's trial, its parameters."""
    status: str
    """finished, failed, cancelled, running, pending or crashed; planned if the run has not started."""
    reason: str
    """Reason why the run failed or was cancelled."""


@dataclass(frozen=True, repr=False)
class Outcome(_Told):
    """Results of a job, read from the record at the first access."""

    home: Home
    name: str
    question: str
    run_ids: tuple[str, ...]
    """The job's runs; empty for a study."""

    @cached_property
    def runs(self) -> list[JobRun]:
        """Returns the job's runs, in the order of the plan; a study's runs in the order of its trials."""
        if not self.run_ids:
            return [self._run(run_id, dict(trial.params)) for trial in self._study.trials for run_id in trial.run_ids]
        return [self._run(run_id) for run_id in self.run_ids]

    @cached_property
    def verdict(self) -> "Verdict":
        """Returns the conclusions that the data support: `.best`, `.differences` and `.text`. One group
        of seeds has only `.text`."""
        from dataclasses import replace

        from pipelines.report.statistics import Verdict

        text, said = self._said()
        return replace(said, text=text) if said else Verdict(None, (), text, (), {})

    def table(self) -> "pd.DataFrame":
        """Returns the figures: one row for each group of seeds on each evaluation set; for a study, one row per
        trial."""
        import pandas as pd

        if not self.run_ids:
            rows = [
                {
                    "trial": trial.number,
                    "state": trial.state,
                    "baseline": trial.baseline,
                    "value": trial.value,
                    "low": trial.interval.low if trial.interval else None,
                    "high": trial.interval.high if trial.interval else None,
                    **trial.params,
                }
                for trial in self._study.trials
            ]
        else:
            from pipelines.report.answer import outcomes_of
            from pipelines.report.answer.rows import outcome_rows

            rows = outcome_rows(outcomes_of(self._answered[1]))
        frame = pd.DataFrame(rows)
        # Numbers with NaN, also in a column of which all are missing.
        return frame.astype({name: float for name in frame if str(name).startswith(_FIGURES)})

    def metrics(self, *names: str) -> "pd.DataFrame":
        """Returns the metrics of training as rows: run_id, seed, the matrix fields' values, step, name, value,
        recorded_at.

        Args:
            names: names of the metrics; empty means all.
        Raises:
            RpgError: a name is that of no metric that was recorded.
        """
        from storage import Store

        query = """
            SELECT run_id, step, name, value, recorded_at FROM metrics
            WHERE list_contains(?, run_id) ORDER BY run_id, step, name
        """
        runs = {run.run_id: run for run in self.runs}
        with Store.open(self.home.root) as store:
            frame = store.query(query, [list(runs)]).df()
        recorded = list(frame["name"].unique())
        if unknown := [name for name in names if name not in recorded]:
            hint = _nearest_series(unknown[0], recorded)
            raise RpgError(
                f"no metric {unknown[0]!r} is recorded; there are: {', '.join(recorded)}{hint and f'; {hint}'}"
            )
        frame = frame[frame["name"].isin(names)] if names else frame
        varied = dict.fromkeys(path for run in runs.values() for path in run.values)
        of_run = {"seed": lambda run: run.seed} | {path: lambda run, path=path: run.values.get(path) for path in varied}
        for place, (column, value) in enumerate(of_run.items(), start=1):
            frame.insert(place, column, [value(runs[run_id]) for run_id in frame["run_id"]])
        return frame.reset_index(drop=True)

    def history(self, *names: str) -> "pd.DataFrame":
        """Returns the metrics of training, a row for each step of each run and a column for each metric.

        Args:
            names: names of the metrics; empty means all.
        Raises:
            RpgError: a name is that of no metric that was recorded.
        """
        frame = self.metrics(*names)
        of_run = frame.drop(columns=["step", "name", "value", "recorded_at"]).drop_duplicates("run_id")
        wide = frame.pivot(index=["run_id", "step"], columns="name", values="value").rename_axis(columns=None)
        return of_run.merge(wide.reset_index(), on="run_id")

    def figure(self, name: str) -> "Chart":
        """Returns one figure by its name: `reward/mean`, `accuracy/held_out`; see `figures`."""
        if name not in self.figures:
            hint = _nearest_series(name, self.figures)
            there = f"there are: {', '.join(self.figures)}"
            raise RpgError(f"there is no figure {name!r}; {there}{hint and f'; {hint}'}")
        return self.figures[name]

    @cached_property
    def figures(self) -> "dict[str, Chart]":
        """Returns all figures by name, including those of constant metrics."""
        from pipelines.report.evidence import study_groups
        from pipelines.report.figures import figures_of
        from pipelines.studies.answers.pictures import study_figures

        if not self.run_ids:
            runs = figures_of(self.home, study_groups(self.home, self.name), [], constant=True)
            return study_figures(self.home, self._study) | runs
        return figures_of(self.home, self._groups, [self._version], constant=True)

    @cached_property
    def _study(self) -> "StudyRecord":
        from pipelines.studies.answers.results import read_study

        return read_study(self.home, self.name)

    @cached_property
    def _version(self) -> str:
        """Returns NAME@VERSION of the experiment's version that has the job's runs; NAME if no version has them."""
        from pipelines.home.versions import versions_in
        from specs.machine.files import read_json

        for version in versions_in(read_json(self.home.experiment(self.name) / "experiment.json")):
            if set(self.run_ids) <= set(version.runs):
                return f"{self.name}@{version.number}"
        return self.name

    @cached_property
    def _groups(self) -> "list[Group]":
        from pipelines.report.evidence import Group, experiment_groups

        if not any((self.home.run(run_id) / "run.json").is_file() for run_id in self.run_ids):
            raise RpgError(f"{self.name} has not been run yet with these values: `job.run()`, or `job.submit()`")
        groups = []
        for group in experiment_groups(self.home, self._version):
            if runs := tuple(run for run in group.runs if run.run_id in self.run_ids):
                label = self.name if group.label == self._version else group.label
                groups.append(Group(label, runs, group.key))
        return groups

    @cached_property
    def _answered(self) -> "tuple[str, list[Answer]]":
        from pipelines.report.answer.whole import answered
        from storage import Store

        with Store.open(self.home.root) as store:
            return answered(self.home, store, self._version, self._groups)

    def _said(self) -> "tuple[str, Verdict | None]":
        """Returns the answer in words and the verdict behind it, if there is one."""
        if not self.run_ids:
            from pipelines.studies.answers.answer import answer, confirmed

            of_arms = confirmed(self.home, self._study).verdict if self._study.measured else None
            return answer(self.home, self._study).sentence, of_arms
        text, found = self._answered
        return text, next((answer.verdict for answer in found if answer.verdict), None)

    def _run(self, run_id: str, values: dict[str, Any] | None = None) -> JobRun:
        from pipelines.report.evidence import load_run

        if not (self.home.run(run_id) / "run.json").is_file():
            return JobRun(run_id, run_id, None, values or {}, "planned", "")
        run = load_run(self.home, run_id)
        reason = str(run.read("state.json").get("reason") or "")
        return JobRun(run_id, run.name, run.seed, run.values if values is None else values, run.status, reason)

    def __repr__(self) -> str:
        return f"{self.name}: {self.verdict.text}"

    def _repr_html_(self) -> str:
        curves = [figure for name, figure in self.figures.items() if name in ("reward/mean", "history")]
        drawn = "".join(figure.svg("page") for figure in curves[:1])
        return f"<p><b>{escape(self.question)}</b></p><p>{escape(self.verdict.text)}</p>{self.table().to_html()}{drawn}"
