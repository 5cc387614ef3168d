"""Formulas of objectives in specs: their trees, and each mistake at its line and column."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from specs import SpecError, load_experiment, parse_objective
from specs.loader import load_any, load_document
from specs.schema.formula import MAX_TEXT, FormulaError, parse_formula
from specs.schema.objective import FormulaObjective
from specs.schema.schedule import at_step, schedules_in
from specs.study_document import StudyDocument

FORMULA: dict[str, Any] = {
    "type": "formula",
    "parameters": {"beta": 1e-3, "low": 0.2, "high": {"schedule": [[1, 0.2], [3, 0.4]], "between": "linear"}},
    "weight": "where(A > 0 and w < 1 + high or A <= 0 and w > 1 - low, w*A - beta*w*log(r), 0)",
    "clipped": "(A > 0 and w >= 1 + high) or (A <= 0 and w <= 1 - low)",
    "claim": {"divergence": "unnormalized_reverse", "kl_coef": "beta", "exact": "on_policy"},
}
SPEC = """\
extends: {starter}
name: formula
objective:
  type: formula
  parameters: {{beta: 0.1}}
{formula}
  claim: none
"""


def made(**changes: Any) -> FormulaObjective:
    objective = parse_objective({**FORMULA, **changes})
    assert isinstance(objective, FormulaObjective)
    return objective


def mistake(text: str, *parameters: str, **wanted: bool) -> tuple[str, int, str]:
    with pytest.raises(FormulaError) as caught:
        parse_formula(text, parameters, **wanted)
    issue = caught.value.issue
    return issue.message, issue.column, issue.hint


def test_an_objective_knows_what_its_formulas_read() -> None:
    assert made().symbols == {"A", "w", "r"}
    assert made().needs_reference
    assert not made(weight="w*A", claim="none").needs_reference
    assert made(weight="w*A*p_old/p_engine + H*R", claim="none").symbols == {"w", "A", "p_old", "p_engine", "H", "R"}


def test_numbers_of_a_formula_may_be_schedules() -> None:
    assert [path for path, _ in schedules_in(made())] == [("parameters", "high")]
    assert at_step(made(), 2).parameters == {"beta": 1e-3, "low": 0.2, "high": pytest.approx(0.3)}


def test_a_chain_of_comparisons_is_all_of_them_and_equal_operations_are_equal() -> None:
    chain = parse_formula("0.8 <= w < 2", condition=True)
    assert (chain.operation, [each.operation for each in chain.arguments]) == ("and", ["less_equal", "less"])
    assert parse_formula("w*A + w*A").arguments[0] == parse_formula("w*A + w*A").arguments[1]
    assert parse_formula("\n  w\n  * A\n") == parse_formula("w*A")
    assert parse_formula("where(w > 1and A > 0, w, 0)") == parse_formula("where(w > 1 and A > 0, w, 0)")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("w*A - beta*log(rr)", ("unknown symbol", 16, "did you mean `r`?")),
        ("w*a", ("unknown symbol", 3, "did you mean `A`?")),
        ("w*A*bta", ("unknown symbol", 5, "did you mean `beta`?")),
        ("w*gamma_7", ("unknown symbol", 3, "define a number of your own under `parameters`")),
        ("log*A", ("unknown symbol", 1, "`log` is a function: write log(...)")),
        ("w*wher(A > 0, 1, 2)", ("unknown function", 3, "did you mean `where`?")),
        ("min(w)", ("`min` takes another number of arguments", 1, "")),
        ("A > 0", ("must be a number", 1, "where(condition, a, b) turns it into a number")),
        ("where(w, 1, 2)", ("must be a condition, such as w > 1", 7, "compare it, as in w > 1")),
        ("w if A > 0 else 0", ("not part of a formula", 1, "write where(condition, a, b)")),
        ("w^2", ("a character that is not part of a formula", 2, "write a power as x**2")),
        ("w*A # - beta", ("a character that is not part of a formula", 5, "")),
        ("w*(A", ("not an expression", 3, "the parentheses do not match")),
        ("w = 1", ("not an expression", 3, "a comparison is written ==")),
        ("clip(w, low=1, 2)", ("not an expression", 17, "a comparison is written ==")),
        ("w*A, 2", ("not part of a formula", 1, "")),
        ("2w*A", ("not an expression", 1, "a product is written with *, as in 2*w")),
        ("w A", ("not an expression", 3, "a product is written with *, as in 2*w")),
        ("w*1e-3 +", ("not an expression", 8, "")),
        ("w(A)", ("unknown function", 1, "a product is written with *")),
        ("2(w)", ("not part of a formula", 1, "only a function takes arguments; a product is written with *")),
        ("clip(w, low=0, high=1)", ("not part of a formula", 1, "arguments have no names, as in clip(w, 0.8, 1.2)")),
        ("where(!(A > 0), 1, 2)", ("not an expression", 7, "write `not`")),
        ("where(A =< 0, 1, 2)", ("not an expression", 9, "write <=")),
        ("where(A > 0 && w > 1, 1, 2)", ("a character that is not part of a formula", 13, "write `and`")),
        ("w*A \N{MINUS SIGN} w", ("a character that is not part of a formula", 5, "write -")),
        (
            "w*\N{GREEK SMALL LETTER BETA}",
            ("a character that is not part of a formula", 3, "write its name, as in beta"),
        ),
        ("(" * 300 + "w" + ")" * 300, ("the formula is too large", 201, "")),
        ("w.real", ("not part of a formula", 1, "")),
        ("w*1e999", ("the number is too large", 3, "")),
        ("w*True", ("not part of a formula", 3, "")),
        (" ", ("the formula is empty", 1, "")),
        ("w" * (MAX_TEXT + 1), ("the formula is too long", 1, "")),
        ("-" * 100 + "w", ("the formula is too large", 42, "")),
        ("+".join(["w"] * 400), ("the formula is too large", 1, "")),
    ],
)
def test_a_mistake_has_its_column_and_what_to_do(text: str, found: tuple[str, int, str]) -> None:
    assert mistake(text, "beta") == found


def test_sums_over_a_response_need_tokens() -> None:
    for text in ("to_go(log(r))", "response_mean(w)", "w*position"):
        assert "has no meaning at the level of whole responses" in mistake(text, of_responses=True)[0]
        assert parse_formula(text)
    with pytest.raises(SpecError, match="`to_go` has no meaning"):
        made(level="sequence", weight="to_go(w)")


@pytest.mark.parametrize(
    ("formula", "place", "shown"),
    [
        ("  weight: w*A - beta*w*log(rr)", "spec.yaml:6:28", "6 |   weight: w*A - beta*w*log(rr)"),
        ('  weight: "w*A -  beta*w*log(rr)"', "spec.yaml:6:30", "log(rr)"),
        ("  weight: >\n    w*A\n    - beta*w*log(rr)", "spec.yaml:8:18", "8 |     - beta*w*log(rr)"),
        ("  weight: |\n    w*A\n      - beta*w*log(rr)", "spec.yaml:8:20", "8 |       - beta*w*log(rr)"),
        ("  weight: w*A\n    - beta*w*log(rr)", "spec.yaml:7:18", "7 |     - beta*w*log(rr)"),
    ],
)
def test_a_mistake_in_a_file_is_at_its_line_and_column(formula: str, place: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC.format(starter=ROOT / "specs/experiments/starter.yaml", formula=formula))
    with pytest.raises(SpecError) as caught:
        load_experiment(file)
    text = str(caught.value)
    assert f"{place}: objective.weight: unknown symbol" in text
    assert shown in text
    assert "did you mean `r`?" in text


def test_an_empty_formula_is_at_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC.format(starter=ROOT / "specs/experiments/starter.yaml", formula="  weight: ' '"))
    with pytest.raises(SpecError, match=r"spec\.yaml:6: objective\.weight: the formula is empty"):
        load_experiment(file)


def test_every_mistake_of_an_objective_is_said_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        made(weight="w*AA", clipped="w >", parameters={"beta": -1, "w": 2, "1a": 3})
    assert [".".join(map(str, issue.path)) for issue in caught.value.issues] == [
        "objective.parameters.w",
        "objective.parameters.1a",
        "objective.weight",
        "objective.clipped",
        "objective.parameters.beta",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "-w*A"}, "objective.weight: give either weight or loss"),
        ({"weight": ""}, "objective: give either weight or loss"),
        ({"claim": "nothing"}, "allowed: none, or the fields divergence, exact, kl_coef"),
        ({"claim": {"divergence": "reverse", "exact": "always"}}, "claim.kl_coef: the divergence has no weight"),
        ({"claim": {"kl_coef": 1, "exact": "always"}}, "claim.kl_coef: kl_coef has no effect"),
        ({"claim": {"divergence": "reverse", "kl_coef": "bta", "exact": "always"}}, "no such parameter"),
        ({"claim": {"divergence": "reverse", "kl_coef": "beta", "exact": "never"}}, "allowed: always, on_policy"),
        ({"parameters": {"beta": "1"}}, "objective.parameters.beta: must be a number"),
    ],
)
def test_what_an_objective_says_must_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        made(**changes)
    assert message in str(caught.value)


STUDY = """\
name: numbers
question: Which weight of the divergence is best?
experiment: {gallery}
parameters:
  objective.parameters.beta: {{float: [1e-3, 1.0], log: true}}
goal: {{dataset: held_out, metric: mean@8, direction: maximize}}
sampler: {sampler}
trials: 8
"""


@pytest.mark.parametrize("sampler", ["{type: auto, seed: 0}", "{type: noisy_gp, seed: 0}"])
def test_a_study_searches_the_numbers_of_a_formula(sampler: str, tmp_path: Path) -> None:
    file, gallery = tmp_path / "study.yaml", tmp_path / "spec.yaml"
    quickstart = ROOT / "specs/experiments/quickstart.yaml"
    text = SPEC.format(starter=quickstart, formula="  weight: w*A - beta*w*log(r)")
    gallery.write_text(text.replace("{beta: 0.1}", "{beta: 0.1, gamma: 2}"))
    file.write_text(STUDY.format(gallery=gallery, sampler=sampler))
    document = load_any(file)
    assert isinstance(document, StudyDocument)
    trial = document.trial({"objective.parameters.beta": 0.5}).experiment.objective
    assert isinstance(trial, FormulaObjective)
    assert trial.parameters == {"beta": 0.5, "gamma": 2}
    (warning,) = load_document(gallery).warnings
    assert (warning.path, warning.message) == (("objective", "parameters", "gamma"), "no formula reads it")


def test_an_objective_without_a_claim_is_told_to_make_one() -> None:
    with pytest.raises(SpecError, match=r"objective\.claim: missing"):
        parse_objective({key: value for key, value in FORMULA.items() if key != "claim"})


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=60), st.text("wrqA019.+-*/()<>=, andorint_minlogexp", max_size=80)), st.booleans())
def test_any_text_is_a_formula_or_one_mistake_within_it(text: str, condition: bool) -> None:
    try:
        parse_formula(text, condition=condition)
    except FormulaError as error:
        column = error.issue.column
    else:
        column = 1
    assert 1 <= column <= max(len(text), 1)


def test_a_comparison_chained_within_itself_counts_each_time_that_it_is_computed() -> None:
    text = "w"
    for _ in range(18):
        text = f"where(0 < {text} < 2, 1, 0)"
    assert mistake(f"{text}*w*A")[0] == "the formula is too large"


def test_a_text_that_ends_too_early_is_named_at_its_end() -> None:
    assert mistake("w*A +")[1] == 5
