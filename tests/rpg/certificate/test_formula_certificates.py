"""Certificates of formulas: exact claims, divergences, other engines, and infinite values."""

from typing import Any

import pytest

from rpg.certificate.certificate import Certificate, certify, weight_curves
from rpg.certificate.finite import not_finite, refused
from rpg.certificate.reading import in_a_line, in_words
from specs import parse_objective
from specs.schema.objective import FormulaObjective


def objective(text: str, *, key: str = "weight", **settings: Any) -> FormulaObjective:
    made = parse_objective({"type": "formula", key: text, "claim": "none", **settings})
    assert isinstance(made, FormulaObjective)
    return made


def claiming(text: str, divergence: str, exact: str, *, kl_coef: str | float = "beta", **settings: Any) -> Certificate:
    claim = {"divergence": divergence, "kl_coef": kl_coef, "exact": exact}
    parameters = {"beta": 0.01} if "beta" in text else {}
    return certify(objective(text, claim=claim, parameters=parameters, **settings))


@pytest.mark.parametrize(
    ("text", "divergence"),
    [
        ("w*A - beta*w*log(r)", "unnormalized_reverse"),
        ("w*A - beta*w*(log(r) + 1)", "reverse"),
        ("w*A + beta*q", "forward"),
        ("w*A - beta*(w - q)", "unnormalized_forward"),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_each_divergence_is_exact_on_and_off_policy_at_its_level_and_no_other(
    text: str, divergence: str, level: str
) -> None:
    certificate = claiming(text, divergence, "always", level=level)
    assert certificate.holds
    assert max(finding.error for finding in certificate.findings) <= 1e-10
    direction = divergence.removeprefix("unnormalized_")
    of = "of each token" if level == "token" else "of the response"
    assert certificate.finding("off_policy", "apart").divergence_gradient_of == f"{direction} KL {of}"
    opposite = "forward" if direction == "reverse" else "reverse"
    wrong = claiming(text, opposite, "on_policy", level=level)
    assert not wrong.holds
    line = in_a_line(wrong.as_json())
    assert line.startswith("said to be exact on policy and is not: up to ")
    assert f"less the {opposite} KL of" in line
    assert line.endswith(f"; its divergence has the gradient of the {direction} KL {of}")


def test_from_itself_on_a_token_answers_for_the_divergence_of_the_whole_response_on_policy() -> None:
    to_go = claiming("w*(A - beta*to_go(log(r)))", "reverse", "on_policy", level="to_go")
    assert to_go.holds
    assert to_go.finding("on_policy", "apart").divergence_gradient_of == "reverse KL of the response"
    assert not claiming("w*(A - beta*log(r))", "reverse", "on_policy", level="to_go").holds
    forward = "w*A + beta*exp(response_sum(log(q)) - to_go(log(q)) + log(q))"
    assert claiming(forward, "forward", "on_policy", level="to_go").holds


def test_a_claim_that_holds_for_some_weights_of_the_divergence_is_false() -> None:
    clip = "where(beta < 0.5, 0.9*w*A, w*A) - beta*w*log(r)"  # the certificate's own weight is 1
    assert not claiming(clip, "reverse", "on_policy").holds
    assert claiming("w*A - 0.2*w*log(r)", "reverse", "always", kl_coef=0.2).holds
    assert not claiming("w*A - 0.2*w*log(r)", "reverse", "always", kl_coef=0.3).holds


def test_where_the_engines_probability_occurs_the_responses_are_an_engines_of_its_own() -> None:
    weighed = objective("w*p_old/p_engine*A", claim={"exact": "always"})
    assert certify(weighed).holds
    whole = objective("w*p_old/p_engine*A", claim={"exact": "always"}, level="sequence")
    assert certify(whole).holds
    forgotten = certify(objective("w*A + 0*p_engine", claim={"exact": "on_policy"}))
    assert not forgotten.holds
    assert forgotten.finding("on_policy", "apart").error > 0.1


def test_a_baseline_by_entropy_or_reward_changes_the_variance_alone() -> None:
    plain, shifted = certify(objective("w*A")), certify(objective("w*(A + H)", claim={"exact": "always"}))
    assert shifted.holds
    assert shifted.finding("on_policy", "apart").variance > plain.finding("on_policy", "apart").variance
    assert certify(objective("w*R", claim={"exact": "always"})).holds
    assert not certify(objective("w*A*R", claim={"exact": "on_policy"})).holds


def test_an_objective_without_a_claim_says_how_far_it_is_off() -> None:
    certificate = certify(objective("w*A - 0.5*w*log(r)"))
    assert certificate.holds
    line = in_a_line(certificate.as_json())
    assert line.startswith("no claim: on policy up to ")
    assert "the gradient of expected reward of each token" in line


def test_a_run_without_a_claim_is_told_what_its_gradient_is_all_the_same() -> None:
    exact, other = (certify(objective(text)).as_json() for text in ("min(w, 1)*A", "w*A*abs(A)"))
    assert in_words(exact, updates=2)["meaning"].startswith(
        "This run's objective claims nothing. On average its gradient is exactly that of expected reward of each token"
    )
    assert "does not claim to: on average it is up to " in in_words(other, updates=2)["meaning"]


@pytest.mark.parametrize(
    ("text", "key", "column", "what"),
    [
        ("w*A/A", "weight", 1, "value"),
        ("where(A > 0, w*A, log(1 - w))", "loss", 19, "value"),
        ("sqrt(w - w)", "loss", 1, "gradient"),
        ("w*A + w**20", "weight", 7, "value"),
        ("10**400*w", "weight", 1, "value"),
        ("w*A/H", "weight", 1, "value"),
        ("w*A + exp(exp(exp(w)))*exp(60)**12", "weight", 7, "value"),
    ],
)
def test_what_is_not_finite_is_refused_at_its_place(text: str, key: str, column: int, what: str) -> None:
    issue = not_finite(objective(text, key=key))
    assert issue.message == f"the formula's {what} is not finite"
    assert (issue.path, issue.column) == ((key,), column)
    assert "log(w) = " in issue.given


@pytest.mark.parametrize("text", ["w*A - w*log(r)", "w*(1/r - 1 + log(r))", "w/q", "exp(exp(w))", "position/length*w"])
def test_what_stays_finite_is_taken(text: str) -> None:
    assert refused(objective(text)) is None
    assert refused(objective(text, key="loss")) is None


def test_a_formula_is_looked_at_at_each_point_of_its_schedules_and_must_have_a_gradient() -> None:
    rising = {"bound": {"schedule": [[1, 1.0], [5, 0.0]], "between": "linear"}}
    issue = refused(objective("w*A/bound", parameters=rising))
    assert issue.path == ("objective", "weight")
    still = refused(objective("sg(w)*A", key="loss"))
    assert still.message == "the formula has no gradient"


def test_a_chart_has_the_weight_over_the_ratio_for_either_sign() -> None:
    curves = weight_curves(objective("where(A > 0 and w > 1.5, 0, w*A)"))
    positive, negative = ({round(w, 2): m for w, m in curves[f"A = {sign}"]} for sign in (1, -1))
    assert (positive[1.2], positive[2.0]) == (pytest.approx(1.2), 0)
    assert (negative[1.2], negative[2.0]) == (pytest.approx(-1.2), pytest.approx(-2))


def test_a_gradient_that_is_not_a_number_in_one_case_is_no_exact_one() -> None:
    """At its own coefficient the root is of 0, and its slope is infinite."""
    certificate = claiming("w*A - beta*w*log(r) + 0*log(3.5 - length)", "unnormalized_reverse", "always")
    assert not certificate.holds


def test_the_marks_of_the_clip_do_not_move_the_place_of_what_is_not_finite() -> None:
    made = objective("-sqrt(abs(log(w)))*A", key="loss", clipped="w > 1 and log(A) < 0")
    issue = refused(made)
    assert (issue.within, issue.column <= len(issue.within)) == (made.loss, True)


@pytest.mark.parametrize(
    "text", ["where(w < 10, w*A, 0)", "min(w, 5)*A", "where(p < 1e-3, 0, 1)*w*A", "w*A - beta*w*clip(log(r), -5, 5)"]
)
def test_a_clip_that_acts_on_policies_far_apart_alone_makes_no_exact_gradient(text: str) -> None:
    if "beta" in text:
        assert not claiming(text, "unnormalized_reverse", "always").holds
    else:
        assert not certify(objective(text, claim={"exact": "always"})).holds
        assert certify(objective("w*A", claim={"exact": "always"})).holds


def test_probabilities_are_tried_up_to_one_and_no_further() -> None:
    assert refused(objective("w*A/(1 - p)")) is not None
    assert refused(objective("w*A/(1.1 - p) + sqrt(1 - p_engine)*A*w")) is None


@pytest.mark.parametrize(("text", "key"), [("w*A*0", "weight"), ("-sign(w)*A", "loss")])
def test_a_formula_whose_gradient_is_zero_everywhere_is_refused(text: str, key: str) -> None:
    issue = refused(objective(text, key=key))
    assert issue.message == "the formula has no gradient"
