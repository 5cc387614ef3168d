"""Certificates as a table for people, in 100 columns."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rpg.certificate.catalogue import label, objective
from rpg.certificate.certificate import Certificate, GradientFinding
from rpg.certificate.reading import listed, of_partial
from specs.schema.objective import Objective

PREAMBLE = """\
The expected gradient of each objective against the exact gradient of what it claims to optimise, by
enumeration of every response of {cases} small policies in float64. Errors are relative, of the worst
case; exact: at most {tolerance:.0e}. The divergence weighs as much as the reward (kl_coef 1), and the
reference is a third policy. Advantages are rewards minus their mean; the effects of a scale,
whitening, top_p or a correction for the engine are not included. Keys of a spec that a certificate
does not cover are listed under its objective.

claim      when it is said to be exact: always; on: while the policy is the sampler; never
on, off    the error on policy, off policy; cos: of the angle between the gradients, off policy
KL part    what the divergence's part is the gradient of, on policy, off policy: KL of each token
           or of the whole response, or none that has a name
whole      on policy, how far that part is from the gradient of the KL of whole responses
variance   of the gradient of one response, on policy and off policy
"""
TURNS = {
    "outcome": """\
Responses have several turns: an environment gives tokens between them, drawn with chances of its
own, and rewards turns. A turn answers for the rewards of the whole response.
""",
    "turn": """\
Responses have several turns: an environment gives tokens between them, drawn with chances of its
own, and rewards turns. A turn answers for its own reward and those that follow it.
""",
}
COLUMNS = ("objective", "claim", "on", "off", "cos", "KL part", "whole", "variance")
WIDTHS = (31, 6, 5, 5, 5, 19, 5, 10)
SHORT = {
    "nothing": "nothing",
    "reverse KL of each token": "reverse token",
    "forward KL of each token": "forward token",
    "reverse KL of the response": "reverse whole",
    "forward KL of the response": "forward whole",
    "minus the forward KL of each token": "minus forward",
    "Jensen-Shannon divergence of each token": "JS token",
    "Jensen-Shannon divergence of the response": "JS whole",
    "": "none",
}
Row = tuple[str, Certificate]


def catalogue_table(certificates: Mapping[str, Sequence[Row]]) -> str:
    """Formats certificates as headings, rows and a last line that says whether all claims hold. `certificates`: heading
    -> (name, certificate)."""
    everything = [certificate for rows in certificates.values() for _, certificate in rows]
    lines = [PREAMBLE.format(cases=everything[0].num_cases, tolerance=everything[0].tolerance)]
    lines += [TURNS[turns] for turns in dict.fromkeys(each.turns for each in everything) if turns != "one"]
    for heading, rows in certificates.items():
        lines += [heading, *table(rows), ""]
    failed = sum(not certificate.holds for certificate in everything)
    claims = sum(certificate.claim != "never" for certificate in everything)
    silent = len(everything) - claims
    claim = "objective claims" if silent == 1 else "objectives claim"
    lines.append(f"{claims - failed} of {claims} claims hold; {silent} {claim} nothing.")
    return "\n".join(lines)


def weight_page(title: str, certificates: Mapping[str, Sequence[Row]]) -> str:
    """Returns a page with a chart for each objective: its weight over the ratio, for advantages of 1 and -1."""
    from pipelines.report.charts import line, line_chart
    from pipelines.report.page import render
    from rpg.certificate.certificate import weight_curves

    charts = {
        f"{heading}: {name}": weight_curves(objective(certificate.objective))
        for heading, rows in certificates.items()
        for name, certificate in rows
    }
    sections = []
    for name, curves in charts.items():
        lines = [line(points, label, color) for color, (label, points) in enumerate(curves.items())]
        sections.append(line_chart(lines, title=name, x_label="w"))
    legend = [(label, color) for color, label in enumerate(next(iter(charts.values()), {}))]
    return render("weights.html", title=title, charts=sections, legend=legend)


def by_kind(heading: str, objectives: Sequence[Objective]) -> dict[str, list[tuple[str, Objective]]]:
    """Splits a heading of the catalogue by the properties that all its rows share, so that the rows' names are
    short."""
    kinds: dict[str, list[tuple[str, Objective]]] = {}
    for shared, items in groupby(objectives, key=_shared):
        full = ", ".join([heading, *shared])
        kinds.setdefault(full, []).extend((_name(item, shared), item) for item in items)
    return kinds


def by_step(name: str, certificates: Mapping[int, Certificate]) -> list[Row]:
    """Returns the rows of one objective; if it changes over training, one row for each certified step."""
    many = len(certificates) > 1
    return [(f"{name} at step {step}" if many else name, each) for step, each in certificates.items()]


def table(rows: Sequence[Row]) -> list[str]:
    """Returns lines of at most 100 columns."""
    return [_line(COLUMNS), *(line for name, certificate in rows for line in _lines(name, certificate))]


def _lines(name: str, certificate: Certificate) -> list[str]:
    on_policy, off_policy = certificate.finding("on_policy", "apart"), certificate.finding("off_policy", "apart")
    whole = on_policy.divergence_error.get("sequence")
    cells = (
        certificate.claim.replace("on_policy", "on"),
        _error(on_policy.error, certificate.tolerance),
        _error(off_policy.error, certificate.tolerance),
        f"{off_policy.cosine:.2f}",
        _parts(on_policy, off_policy),
        "" if whole is None else _error(whole, certificate.tolerance),
        f"{on_policy.variance:.2f} {off_policy.variance:.2f}",
    )
    long = [name] if len(name) > WIDTHS[0] else []
    lines = [*long, _line(("" if long else name, *cells))]
    left_out, moved = listed(certificate.not_covered), listed(certificate.closed_loops)
    notes = [f"not covered: {left_out}"] if left_out else []
    if certificate.partial:
        notes.append(of_partial(asdict(certificate.partial), certificate.tolerance))
    for note in notes:
        lines += textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="  ")
    if moved:
        lines += [f"  enumerated at the start of closed loops: {moved}"]
    return lines if certificate.holds else [*lines, _failure(certificate)]


def _failure(certificate: Certificate) -> str:
    policies = {"always": ("on_policy", "off_policy"), "on_policy": ("on_policy",), "never": ()}[certificate.claim]
    worst = max((finding.error for finding in certificate.findings if finding.policy in policies), default=0.0)
    when = certificate.claim.replace("_", " ")
    return f"  CLAIM FAILS: said to be exact {when}, but its gradient is {100 * worst:.2g} % off"


def _error(error: float, tolerance: float) -> str:
    return "exact" if error <= tolerance else f"{100 * error:.0f} %"


def _parts(on_policy: GradientFinding, off_policy: GradientFinding) -> str:
    """Returns the quantity that the divergence's part is the gradient of, named once if it is the same on policy and
    off policy."""
    if not on_policy.divergence_error:
        return ""
    parts = [SHORT[finding.divergence_gradient_of] for finding in (on_policy, off_policy)]
    return ", ".join(dict.fromkeys(parts))


def _shared(objective: Objective) -> tuple[str, ...]:
    values = objective.model_dump(mode="json")
    return (values["estimator"], f"{values['level']} level") if values["type"] == "rpg" else ()


def _name(objective: Objective, shared: Sequence[Any]) -> str:
    return str(objective.model_dump()["divergence"]) if shared else label(objective)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
