"""`rpg certify` as a user calls it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from rpg.objectives import certificate

QUICKSTART = Path(__file__).parents[2] / "specs" / "experiments" / "quickstart.yaml"


def test_every_objective_is_certified_with_its_claim() -> None:
    result = CliRunner().invoke(app, ["certify"])
    assert result.exit_code == 0
    assert "89 of 89 claims hold; 6 objectives claim nothing." in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("grpo k3 in the loss  ")]
    assert "never" in line
    assert "forward KL/token" in line


def test_the_objectives_of_a_spec_are_certified_each_once() -> None:
    arguments = ["certify", str(QUICKSTART), "--set", "seeds=[0,1,2]", "--set", "objective.level=sequence", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    (found,) = json.loads(result.stdout)
    assert found["objective"]["level"] == "sequence"
    assert found["claim"] == "on_policy"
    assert found["holds"]


def test_a_claim_that_fails_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = certificate.certify
    monkeypatch.setattr(certificate, "certify", lambda item: replace(honest(item), holds=False))
    result = CliRunner().invoke(app, ["certify", str(QUICKSTART)])
    assert result.exit_code == 1
    assert "CLAIM FAILS" in result.stdout
