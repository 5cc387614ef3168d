"""`rpg certify` as a user calls it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.planning import certificates
from rpg.objectives import divergence, regularized
from specs import SpecError

QUICKSTART = ROOT / "specs" / "experiments" / "quickstart.yaml"


@pytest.mark.more
def test_every_objective_is_certified_with_its_claim() -> None:
    result = CliRunner().invoke(app, ["certify"])
    assert result.exit_code == 0
    assert "RPG, clipped value (eq. 4.1)" in result.stdout
    assert "182 of 182 claims hold; 6 objectives claim nothing." in result.stdout
    assert "RPG, kl top_k: summed over the reference's likeliest tokens, differentiable, to_go level" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("grpo k3  ")]
    assert "never" in line
    assert "forward token, none" in line
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_objectives_of_a_spec_are_certified_each_once() -> None:
    arguments = ["certify", str(QUICKSTART), "--set", "seeds=[0,1,2]", "--set", "objective.level=sequence", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    (found,) = json.loads(result.stdout)
    assert found["objective"]["level"] == "sequence"
    assert found["claim"] == "on_policy"
    assert found["holds"]


def test_the_objectives_of_a_matrix_are_certified_by_its_labels() -> None:
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART.with_name("kl-weighting.yaml"))])
    assert result.exit_code == 0
    rows = {line[:31].strip(): line[31:].split() for line in result.stdout.splitlines()}
    assert rows["GRPO as published"][:2] == ["never", "25"]
    assert rows["Corrected GRPO"][:2] == ["on", "exact"]
    assert rows["RPG unnormalised reverse"][:2] == ["on", "exact"]
    assert "5 of 5 claims hold; 1 objective claims nothing." in result.stdout


def test_keys_that_a_certificate_does_not_cover_stand_under_its_objective() -> None:
    changed = ["--set", "training.entropy_coef=0.01", "--set", "rollout.top_p=0.9"]
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART), *changed])
    assert result.exit_code == 0
    assert "  not covered: rollout.top_p 0.9, training.entropy_coef 0.01" in result.stdout.splitlines()
    (found,) = json.loads(CliRunner().invoke(app, ["certify", str(QUICKSTART), *changed, "--json"]).stdout)
    assert found["not_covered"] == {"rollout.top_p": 0.9, "training.entropy_coef": 0.01}
    assert "not covered: " not in CliRunner().invoke(app, ["certify", str(QUICKSTART)]).stdout


def test_runs_of_one_objective_that_differ_in_keys_not_covered_are_listed_each_by_its_keys() -> None:
    varied = ["--set", "matrix={product: {training.entropy_coef: [0, 0.01, 0.02]}}"]
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART), *varied])
    assert result.exit_code == 0, result.output
    listed = [line.strip() for line in result.stdout.splitlines() if "not covered:" in line]
    assert listed == ["not covered: training.entropy_coef 0.01", "not covered: training.entropy_coef 0.02"]


def test_an_objective_that_schedules_change_is_certified_at_their_points_and_in_the_middle_of_ramps() -> None:
    arguments = ["--set", "objective.clip.low={schedule: [[1, 0.1], [9, 0.3], [12, 0.2]], between: cosine}"]
    arguments += ["--set", "objective.kl_coef={schedule: [[1, 0], [4, 0.1]]}"]
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART), *arguments])
    assert result.exit_code == 0
    names = [line.strip() for line in result.stdout.splitlines() if " at step " in line]
    assert [name.rpartition(" ")[2] for name in names] == ["1", "4", "5", "9", "10", "12"]
    assert "6 of 6 claims hold" in result.stdout
    objectives = json.loads(CliRunner().invoke(app, ["certify", str(QUICKSTART), *arguments, "--json"]).stdout)
    assert [found["objective"]["kl_coef"] for found in objectives] == [0, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert [found["objective"]["clip"]["low"] for found in objectives] == pytest.approx(
        [0.1, 0.1617, 0.2, 0.3, 0.275, 0.2], abs=1e-4
    )


def test_a_weight_that_is_wrong_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = divergence.unnormalized_reverse_weight
    wrong = {**divergence.WEIGHTS, "unnormalized_reverse": lambda w, q: 1.001 * right(w, q)}
    monkeypatch.setattr(regularized, "WEIGHTS", wrong)
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART)])
    assert result.exit_code == 1
    assert "CLAIM FAILS: said to be exact on policy, but its gradient is 0." in result.stdout
    assert "0 of 1 claims hold" in result.stdout
    other = CliRunner().invoke(app, ["certify", str(QUICKSTART), "--set", "objective.divergence=reverse"])
    assert other.exit_code == 0


def test_an_override_without_a_spec_is_refused() -> None:
    result = CliRunner().invoke(app, ["certify", "--set", "objective.kl_coef=1"])
    assert result.exit_code == 2
    assert "name the spec file" in result.output


FORMULA = """\
extends: {quickstart}
objective:
  type: formula
  parameters: {{beta: 0.1}}
  weight: w*A - beta*w*log(r)
  claim: {claim}
"""
TRUE, FALSE = (f"{{divergence: {each}, kl_coef: beta, exact: always}}" for each in ("reverse", "forward"))


@pytest.fixture
def formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))

    def write(claim: str) -> str:
        file = tmp_path / "formula.yaml"
        file.write_text(FORMULA.format(quickstart=QUICKSTART, claim=claim))
        return str(file)

    return write


def refusal(*arguments: str) -> str:
    """Returns the message of a command that ends with a SpecError, for which `rpg` exits with 2."""
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, SpecError)
    return str(error)


def test_a_plan_says_what_a_formula_has_the_gradient_of_and_enumerates_it_once(
    formula: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "claim   exact always: the gradient of expected reward less the reverse KL of each token"
    result = CliRunner().invoke(app, ["plan", formula(TRUE)])
    assert result.exit_code == 0, result.output
    assert line in result.stdout
    monkeypatch.setattr(certificates, "_enumerated", lambda _experiment: pytest.fail("it is known by its content"))
    assert line in CliRunner().invoke(app, ["plan", formula(TRUE)]).stdout


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_false_claim_is_refused_before_anything_runs(verb: str, formula: Callable[[str], str]) -> None:
    file = formula(FALSE)
    told = refusal(verb, file)
    assert f"{file}:6: objective.claim: the claim is false" in told
    assert "off the gradient of expected reward less the forward KL of each token" in told
    assert "its divergence has the gradient of the reverse KL of each token" in told
    assert "write claim: none" in told


def test_an_objective_without_a_claim_is_planned_and_said_to_have_none(formula: Callable[[str], str]) -> None:
    result = CliRunner().invoke(app, ["plan", formula("none")])
    assert result.exit_code == 0
    assert "claim   no claim: on policy up to " in result.stdout


def test_a_formula_that_is_not_finite_is_refused_at_its_column(formula: Callable[[str], str]) -> None:
    file = formula("none")
    for verb in ("plan", "certify"):
        told = refusal(verb, file, "--set", "objective.weight=w*A/A")
        assert "objective.weight: the formula's value is not finite" in told
        assert "given: A = 0" in told


@pytest.mark.more
def test_a_formula_is_certified_beside_the_built_in_objectives_that_claim_the_same(
    formula: Callable[[str], str], tmp_path: Path
) -> None:
    page = tmp_path / "weights.html"
    result = CliRunner().invoke(app, ["certify", formula(TRUE), "--plot", str(page)])
    assert result.exit_code == 0, result.output
    rows = {line[:31].strip(): line[31:].split() for line in result.stdout.splitlines()}
    assert rows["formula token"][:4] == ["always", "exact", "exact", "1.00"]
    assert rows["grpo k3 weighted"][:2] == ["on", "exact"]
    assert "Built-in objectives that claim the same" in result.stdout
    assert page.read_text().count('<figure class="chart"') >= 5
    assert max(map(len, result.stdout.splitlines())) <= 100
    wrong = CliRunner().invoke(app, ["certify", formula(FALSE)])
    assert wrong.exit_code == 2
    assert "CLAIM FAILS" in wrong.stdout
