"""Describes a recorded certificate for people: its meaning for a run, with divergences named as in the spec."""

import json
from collections.abc import Mapping
from typing import Any


def in_words(certificate: Mapping[str, Any], *, updates: int, max_staleness: int = 0) -> dict[str, Any]:
    """Returns the certificate with `meaning`: a sentence or two about its consequences for a run, and the keys not
    covered.

    Policies are normalised, so an unnormalised divergence equals the normalised one, in value and gradient. Enumeration
    therefore names the normalised one; here it gets the spec's name.

    Args:
        updates: optimizer updates per step of the run.
        max_staleness: largest staleness of its responses, in steps.
    """
    unnormalized = is_unnormalized(certificate["objective"])
    named = of_unnormalized

    findings = [
        {**finding, "divergence_gradient_of": named(finding["divergence_gradient_of"])} if unnormalized else finding
        for finding in certificate["findings"]
    ]
    claimed = named(certificate["claimed"]) if unnormalized else certificate["claimed"]
    worded = {**certificate, "findings": findings, "claimed": claimed}
    meaning = _meaning(worded, updates, max_staleness)
    if partial := certificate.get("partial"):
        meaning += f" {of_partial(partial, certificate['tolerance'])}"
    if moved := listed(certificate.get("closed_loops", {})):
        meaning += f" A closed loop changes {moved}: the certificate holds for these initial values."
    if left_out := listed(certificate.get("not_covered", {})):
        meaning += f" The certificate does not cover what these keys of the spec do to the gradient: {left_out}."
    return worded | {"meaning": meaning}


def is_unnormalized(objective: Mapping[str, Any]) -> bool:
    """Returns whether the divergence of a recorded objective is an unnormalized one."""
    claim = objective.get("claim")
    named = claim.get("divergence") if isinstance(claim, Mapping) else objective.get("divergence")
    return str(named).startswith("unnormalized_")


def of_unnormalized(text: str) -> str:
    """Returns a text about a normalized divergence, with the divergence's name replaced by that of the unnormalized
    one."""
    return text.replace("reverse KL", "unnormalized reverse KL").replace("forward KL", "unnormalized forward KL")


def in_a_line(certificate: Mapping[str, Any]) -> str:
    """Returns a one-line summary of a certificate.

    Example:
        >>> finding = {"policy": "on_policy", "error": 0.4}
        >>> of = {"claim": "never", "claimed": "expected reward of each token", "tolerance": 1e-10, "objective": {}}
        >>> in_a_line({**of, "findings": [finding, {**finding, "policy": "off_policy"}], "holds": True})
        'no claim: on policy up to 40 % off the gradient of expected reward of each token, off policy up to 40 % off'
    """
    claimed = certificate["claimed"]
    if is_unnormalized(certificate["objective"]):
        claimed = of_unnormalized(claimed)
    on_policy, off_policy = (off(certificate, policy) for policy in ("on_policy", "off_policy"))
    match certificate["claim"], certificate["holds"]:
        case "never", _:
            where = "exactly" if on_policy == "exact" else on_policy
            return f"no claim: on policy {where} the gradient of {claimed}, off policy {off_policy}"
        case "always", True:
            return f"exact always: the gradient of {claimed}"
        case "on_policy", True:
            return f"exact on policy: the gradient of {claimed}; off policy {off_policy}"
        case claim, _:
            when = str(claim).replace("_", " ")
            where = on_policy if claim == "on_policy" else off(certificate, "on_policy", "off_policy")
            apart = [finding for finding in certificate["findings"] if finding.get("reference") == "apart"]
            parts = {finding.get("divergence_gradient_of") or "" for finding in apart}
            part = ""
            if len(parts) == 1 and (named := parts.pop()):
                none = named == "nothing"
                part = "; no divergence is in it" if none else f"; its divergence has the gradient of the {named}"
            return f"said to be exact {when} and is not: {where} the gradient of {claimed}{part}"


def listed(values: Mapping[str, Any]) -> str:
    """Returns keys of a spec with their values on one line; empty without keys.

    Example:
        >>> listed({"rollout.top_p": 0.9, "data.order": {"type": "difficulty"}})
        'rollout.top_p 0.9, data.order {"type": "difficulty"}'
    """
    texts = {path: value if isinstance(value, str) else json.dumps(value) for path, value in values.items()}
    return ", ".join(f"{path} {text}" for path, text in texts.items())


def _meaning(certificate: Mapping[str, Any], updates: int, max_staleness: int) -> str:
    claimed, claim = certificate["claimed"], certificate["claim"]
    on_policy, off_policy = (off(certificate, policy) for policy in ("on_policy", "off_policy"))
    if not certificate["holds"]:
        return f"This run's objective does not have the gradient that it claims, that of {claimed}: do not rely on it."
    if claim == "always":
        return f"In this run every update has on average exactly the gradient of {claimed}."
    if claim == "never" and on_policy == "exact":
        return (
            f"This run's objective claims nothing. On average its gradient is exactly that of {claimed} in the first "
            f"update of a step, and {off_policy} in later ones."
        )
    if claim == "never":
        return (
            f"This run's objective does not have the gradient of {claimed} and does not claim to: on average it is "
            f"{on_policy} in the first update of a step and {off_policy} in later ones. It may train well all the same."
        )
    if max_staleness:
        return (
            f"In this run responses are up to {max_staleness} steps old: the gradient is near that of {claimed}, and "
            f"{off_policy} where the policy has moved far. That is what bounding the ratio costs, for less variance."
        )
    if updates == 1:
        return f"In this run every update is on policy, so that on average it has exactly the gradient of {claimed}."
    return (
        f"In this run the first of the {updates} updates of a step has on average exactly the gradient of {claimed}. "
        f"The later ones are near it, and {off_policy} where the policy has moved far: what bounding the ratio costs, "
        "for less variance."
    )


def of_partial(partial: Mapping[str, float], tolerance: float) -> str:
    """Describes the effect of `rollout.partial` on the gradient.

    Example:
        >>> lengths = {"mean_length": 2.5, "short_length": 1.3}
        >>> of_partial({"error": 0.2, "short_error": 0.8, **lengths}, 1e-10)[:70]
        'rollout.partial: if a newer policy continues a response, the gra'
    """
    return (
        "rollout.partial: if a newer policy continues a response, the gradient is"
        f" {_off(partial['error'], tolerance)}. Groups that end first are trained on first: a bias towards short"
        " responses in the first steps, and the longest of the last steps are never trained on. Responses that end"
        f" before the change ({partial['short_length']:.1f} tokens in the mean, of {partial['mean_length']:.1f}) have a"
        f" gradient that is {_off(partial['short_error'], tolerance)}."
    )


def off(certificate: Mapping[str, Any], *policies: str) -> str:
    """Returns `exact`, or how far the gradient is off in the worst enumerated case."""
    worst = max(finding["error"] for finding in certificate["findings"] if finding["policy"] in policies)
    return _off(worst, certificate["tolerance"])


def _off(worst: float, tolerance: float) -> str:
    share = f"{100 * worst:.0f}" if worst >= 0.01 else f"{100 * worst:.1g}"
    return "exact" if worst <= tolerance else f"up to {share} % off"
