"""Certificates of the formulas of specs, before training: enumerated once, then found by the formula's content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specs.errors import Issue, read_issue
from specs.schema.objective import FormulaObjective, PackagedObjective

if TYPE_CHECKING:
    from pipelines.planning.plan import RunPlan
    from specs.schema.experiment import Experiment
    from specs.study_document import StudyDocument


_CODE = tuple(f"rpg.certificate.{name}" for name in ("certificate", "finite", "reading"))
"""Entry modules of an enumeration and its description."""
_DECIDING = ("objective", "advantage.credit", "rollout.rollouter")
"""Fields of a spec that decide its certificate."""


@dataclass(frozen=True, slots=True)
class Certified:
    """The result of enumerating a spec's objective."""

    lines: tuple[str, ...]
    """One line a certificate: the objective's, or one for each step at which schedules change it."""
    issues: tuple[Issue, ...]
    """False claims, or a formula that is not finite; paths lead into the spec."""


def certified(experiment: Experiment) -> Certified:
    """Returns the certificate of an objective that is a formula or from a package; empty for other objectives.

    The first call imports torch. The result is kept by the formula and the code that enumerates it.
    """
    from specs.machine.files import DiskError, read_json, write_json

    if not isinstance(experiment.objective, (FormulaObjective, PackagedObjective)):
        return Certified((), ())
    note = _note(experiment)
    if note and (known := read_json(note)):
        return Certified(tuple(known["lines"]), tuple(map(read_issue, known["issues"])))
    found = _enumerated(experiment)
    with suppress(OSError, DiskError):  # the next call enumerates again
        if note:
            write_json(note, {"lines": found.lines, "issues": [asdict(issue) for issue in found.issues]})
    return found


def refused_candidates(study: StudyDocument) -> list[Issue]:
    """Returns the candidates, and the ends of ranges, with which a formula's claim is false or the formula is not
    finite, each at its parameter."""
    is_own = isinstance(study.experiment.experiment.objective, (FormulaObjective, PackagedObjective))
    may_be_own = is_own or not study.study.parameters.keys().isdisjoint(("objective", "objective.type"))
    return study.refused(lambda experiment: certified(experiment).issues, _DECIDING) if may_be_own else []


def _note(experiment: Experiment) -> Path | None:
    """Returns the file of the certificate, named by everything that it follows from."""
    from importlib.metadata import version

    from pipelines.planning.code import Code
    from specs.machine.own_cache import place_to_save_time

    code = [Code().digest(*_CODE), version("torch")]
    digest = hashlib.sha256(json.dumps([_certified_by(experiment), code], sort_keys=True).encode()).hexdigest()
    return place_to_save_time("planning", "certificates", f"{digest[:32]}.json")


def _enumerated(experiment: Experiment) -> Certified:
    from specs.machine.parent import before_torch

    before_torch()
    from rpg.certificate.certificate import certify_experiment
    from rpg.certificate.finite import refused
    from rpg.certificate.reading import in_a_line

    if issue := refused(experiment.objective):
        return Certified((), (issue,))
    records = {step: certificate.as_json() for step, certificate in certify_experiment(experiment).items()}
    lines = {step: in_a_line(record) for step, record in records.items()}
    told = [f"at step {step}: {line}" if len(lines) > 1 else line for step, line in lines.items()]
    unknown = [each for record in records.values() for each in record["findings"] if not math.isfinite(each["error"])]
    if unknown:
        hint = "keep every part finite, for example with clip()"
        issue = Issue("the objective is not finite in an enumerated case", ("objective",), hint=hint)
        return Certified(tuple(told), (issue,))
    false = [lines[step] for step, record in records.items() if not record["holds"]]
    hint = "correct the formula or the claim, or write claim: none; `rpg certify` shows the whole certificate"
    issues = [Issue("the claim is false", ("objective", "claim"), line, hint=hint) for line in false[:1]]
    return Certified(tuple(told), tuple(issues))


def certified_runs(runs: Iterable[RunPlan]) -> list[tuple[RunPlan, Certified]]:
    """Returns the certificate of each distinct formula, with the first run that has it."""
    trained = [run for run in runs if run.experiment.trains]
    distinct = {repr(_certified_by(run.experiment)): run for run in reversed(trained)}
    return [(run, certified(run.experiment)) for run in reversed(distinct.values())]


def _certified_by(experiment: Experiment) -> list[Any]:
    """Returns the parts of a spec that decide its certificate. A package's code counts: it may be edited in place."""
    from pipelines.planning.code import Code

    packaged = isinstance(experiment.objective, PackagedObjective)
    code = Code().of_stage("train", experiment) if packaged else {}
    objective, advantage, rollouter = experiment.objective, experiment.advantage, experiment.rollout.rollouter
    return [objective.identity(), advantage.credit, rollouter.gives_tokens, code]


def certificate_lines(runs: Iterable[RunPlan]) -> list[str]:
    """Returns a line for each certificate of the runs' formulas, with the name of the run if there are several."""
    found = [(run, line) for run, certificate in certified_runs(runs) for line in certificate.lines]
    several = len({run.run_id for run, _ in found}) > 1
    return [f"{run.name}: {line}" if several else line for run, line in found]
