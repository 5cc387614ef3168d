"""A run's description for its recipients, as Markdown: answer, lineage, certificate, spec."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipelines.exchange.spec_file import spec_text
from pipelines.home.home import Home
from pipelines.home.versions import is_experiment, runs_of, versions_in
from pipelines.report import evidence
from pipelines.report.answer import (
    Outcome,
    answers_of,
    change,
    headline,
    note_looks,
    outcomes_of,
    with_interval,
)
from pipelines.report.evidence import Group, Run
from pipelines.report.experiment import certificate_in_words
from pipelines.report.statistics import Interval
from pipelines.terminal.cells import markdown_cell
from rpg.statistics.wording import CHOSEN
from specs.machine.files import read_json
from specs.schema.data import Source
from storage import Store
from storage.provenance import input_manifest

_MADE_WITH = {"code": "code", "package": "package", "lock": "installed packages", "certificate": "certificate"}
"""Kinds of provenance that the lineage lists, each with its label there."""


@dataclass(frozen=True, slots=True)
class Account:
    """The description of a run, or of its model after a step."""

    run: Run
    step: int
    """Step of the described weights. 0 describes the run as a whole."""
    answer: str
    outcomes: tuple[Outcome, ...]
    of_experiment: str
    """The answer over all seeds and cells that were run with this run; empty if it was run alone."""
    lineage: tuple[tuple[str, str], ...]
    """Name and value of each input that determines the result."""
    certificates: tuple[tuple[str, Mapping[str, Any]], ...]
    """Pairs (first training step for which the certificate holds, certificate). If the step is empty, it holds
    throughout."""
    spec: str
    """YAML."""

    @property
    def measure(self) -> str:
        """Returns the measure of the outcomes."""
        return " or ".join(dict.fromkeys(outcome.measure for outcome in self.outcomes))


def account_of(home: Home, run_id: str, *, step: int = 0) -> Account:
    """Reads the data for a run's description.

    Args:
        step: step of the exported weights; later evaluations are left out. 0: the whole run.
    """
    run = evidence.load_run(home, run_id)
    groups = [Group(run.name or run_id, (run,))]
    with Store.open(home.root) as store:
        evaluated = {
            dataset: {run_id: {at: scores for at, scores in by_run[run_id].items() if not step or at <= step}}
            for dataset, by_run in evidence.accuracies(store, [run_id]).items()
        }
        found = answers_of(home, store, groups, [], evaluated)
        flattered = _chosen_on(store, run_id, step)
        of_experiment = _answer_of_experiment(home, store, run)
    certificate = run.read("certificate.json")
    steps: dict[str, Any] = certificate.get("steps", {"": certificate} if certificate else {})
    return Account(
        run,
        step,
        " ".join([headline(found), *flattered]),
        tuple(outcomes_of(found)),
        of_experiment,
        tuple(_lineage(home, run)),
        tuple((step, certificate_in_words(each, run)) for step, each in steps.items()),
        spec_text(run.path),
    )


def _chosen_on(store: Store, run_id: str, step: int) -> list[str]:
    """Returns a sentence that says so if the exported weights were chosen by their accuracy."""
    sets = (
        "SELECT dataset, metric FROM accuracy_curves"
        " WHERE run_id = ? AND step = ? AND is_best AND NOT is_last ORDER BY 1"
    )
    return [
        f"The {'score' if metric.startswith('score@') else 'accuracy'} on {name} is {CHOSEN}."
        for name, metric in store.query(sets, (run_id, step)).rows
    ]


def render(template: str, account: Account, **values: Any) -> str:
    """Renders a template of this directory for a run.

    Args:
        template: its file's name.
        values: further values that the template needs.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = _figure
    environment.filters["change"] = change
    environment.filters["cell"] = markdown_cell
    return environment.get_template(template).render(account=account, run=account.run, **values)


def _answer_of_experiment(home: Home, store: Store, run: Run) -> str:
    """Returns the headline of the experiment's version that has the run, if that version has other runs too."""
    if not is_experiment(home, run.experiment):
        return ""
    record = read_json(home.experiment(run.experiment) / "experiment.json")
    versions = [version.number for version in versions_in(record) if run.run_id in version.runs]
    name = f"{run.experiment}@{versions[-1]}" if versions else run.experiment
    if len(runs_of(home, name)) < 2:
        return ""
    groups = evidence.experiment_groups(home, name)
    answer = headline(answers_of(home, store, groups, [name]))
    note_looks(home, [name])
    counted = sum(one.has_ended or one.status == "failed" for group in groups for one in group.runs)
    if counted < 2:
        return ""
    return f"{answer} (Runs: {counted}; settings: {len(groups)}.)"


def _lineage(home: Home, run: Run) -> Iterator[tuple[str, str]]:
    model = run.spec.model
    if model.source == "pretrained":
        yield "base model", f"{model.path}, revision {model.revision}"
    else:
        yield "base model", f"made from scratch: {model.model_type}, seed {model.seed}"
    if run.spec.warm_up:
        yield "warm-up", f"{run.spec.warm_up.steps} supervised steps at most"
    for at, source in run.spec.sets():
        yield f"{at[1]} data", ", ".join(str(value) for value in _naming(source))
    for stage, suffix in (("base", ".safetensors"), ("data", ".parquet")):
        for name, entry in sorted(input_manifest(home.root, run.path, stage).get("files", {}).items()):
            if name.endswith(suffix):
                yield f"{stage} {name}", f"SHA-256 `{entry['sha256'] if isinstance(entry, dict) else entry}`"
    rows = [row for row in run.provenance(home) if row["kind"] in _MADE_WITH and row["value"]]
    last = max((row["attempt"] for row in rows if "attempt" in row), default=0)
    for row in rows:
        if row.get("attempt", last) == last:
            yield f"{_MADE_WITH[row['kind']]} {row['name']}", str(row["value"])
    for stage in ("data", "base", "train", "evaluate"):
        if fingerprint := run.stages.get(stage, {}).get("fingerprint"):
            yield f"fingerprint of {stage}", f"`{fingerprint}`"


def _naming(source: Source) -> Iterator[Any]:
    """Yields those fields of a data source that identify its data."""
    for key in ("source", "name", "path", "task", "split", "revision"):
        if value := getattr(source, key, ""):
            yield value


def _figure(interval: Interval | None, *, share: bool) -> str:
    """Formats an interval: `45.2 % [41.0, 49.3]` for a share, `0.45 [0.41, 0.49]` for a score."""
    return "-" if interval is None else with_interval(interval, share=share)
