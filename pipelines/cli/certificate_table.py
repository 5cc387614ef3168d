"""Certificates as a table that a person reads."""

from collections.abc import Mapping, Sequence

from rpg.objectives.catalogue import label
from rpg.objectives.certificate import Certificate, Finding
from specs.schema.objective import Objective

PREAMBLE = """\
The expected gradient of each objective against the exact gradient of what it claims to optimise, by enumeration of
every response of {cases} small policies in float64. Errors are relative, the worst case counts; exact: at most
{tolerance:.0e}. The divergence weighs as much as the reward (kl_coef 1), and the reference is a third policy.

claim          exact always, on policy (where the policy is the sampler) or never
gradient of    what the divergence's part of the loss is the gradient of, on policy and off it
whole KL       on policy, how far that part is from the gradient of the KL of whole responses
variance       of the gradient of one response, on policy and off it
"""
COLUMNS = (
    "objective",
    "claim",
    "on policy",
    "off policy",
    "cosine",
    "gradient of, on",
    "gradient of, off",
    "whole KL",
    "variance",
)
WIDTHS = (44, 9, 9, 10, 6, 19, 19, 8, 11)


def table(certificates: Mapping[str, Sequence[Certificate]], objectives: Mapping[str, Sequence[Objective]]) -> str:
    """Headings, rows and a last line that says whether all claims hold."""
    everything = [certificate for items in certificates.values() for certificate in items]
    lines = [PREAMBLE.format(cases=everything[0].num_cases, tolerance=everything[0].tolerance)]
    for heading, items in certificates.items():
        lines += [heading, _row(COLUMNS)]
        lines += [row(item, objective) for item, objective in zip(items, objectives[heading], strict=True)]
        lines.append("")
    wrong = sum(not certificate.holds for certificate in everything)
    claims = sum(certificate.claim != "never" for certificate in everything)
    lines.append(f"{claims - wrong} of {claims} claims hold; {len(everything) - claims} objectives claim nothing.")
    return "\n".join(lines)


def row(certificate: Certificate, objective: Objective) -> str:
    """One objective."""
    on_policy, off_policy = certificate.finding("on_policy", "apart"), certificate.finding("off_policy", "apart")
    return _row(
        (
            label(objective),
            certificate.claim.replace("_", " "),
            _error(on_policy.error, certificate.tolerance),
            _error(off_policy.error, certificate.tolerance),
            f"{off_policy.cosine:.2f}",
            _part(on_policy),
            _part(off_policy),
            _error(on_policy.divergence_error["sequence"], certificate.tolerance) if on_policy.divergence_error else "",
            f"{on_policy.variance:.2f} {off_policy.variance:.2f}" + ("" if certificate.holds else "  CLAIM FAILS"),
        )
    )


def _error(error: float, tolerance: float) -> str:
    return "exact" if error <= tolerance else f"{100 * error:.0f} %"


def _part(finding: Finding) -> str:
    if finding.divergence_gradient_of or not finding.divergence_error:
        return finding.divergence_gradient_of.replace(" of each token", "/token").replace(
            " of the response", "/response"
        )
    return f"none, {100 * finding.divergence_error['token']:.0f} % off"


def _row(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
