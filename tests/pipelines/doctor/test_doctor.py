"""`rpg doctor` distinguishes broken requirements from mere information."""

import json

import pytest
from live import SPEC
from typer.testing import CliRunner

from pipelines.cli import app
from specs.machine.gpu_slots import leased


def examined(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"], env=environment)
    return result.exit_code, {finding["name"]: finding for finding in json.loads(result.stdout)}


def test_a_working_installation_exits_0_and_a_dashboard_that_is_down_is_only_a_note(tmp_path):
    code, findings = examined(RPG_HOME=str(tmp_path), RPG_PROFILE="")
    assert code == 0
    assert findings["torch"]["status"] == "ok"
    assert findings["dashboard"]["status"] == "note"
    assert findings["records"]["message"].startswith("0 runs")
    sandbox = findings["sandbox"]
    assert sandbox["status"] == "note" or "memory is limited by process" in sandbox["message"]


def test_a_profile_that_does_not_answer_is_broken_and_exits_1(tmp_path):
    code, findings = examined(RPG_HOME=str(tmp_path), RPG_PROFILE="http://127.0.0.1:9")
    assert code == 1
    assert findings["profile"]["status"] == "broken"
    assert "no Prefect server answers at http://127.0.0.1:9/api" in findings["profile"]["message"]


def test_a_crashed_run_is_named(tmp_path):
    state = tmp_path / "runs" / "tiny-s0-1" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"status": "running", "pid": 4194303, "pid_started": "boot:1"}')
    _, findings = examined(RPG_HOME=str(tmp_path), RPG_PROFILE="")
    assert findings["crashed runs"]["message"] == "tiny-s0-1; `rpg resume` continues with one"


@pytest.mark.parametrize("package", ["prefect", "duckdb"])
def test_a_missing_package_is_broken(tmp_path, package, monkeypatch):
    from importlib import metadata

    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    code, findings = examined(RPG_HOME=str(tmp_path), RPG_PROFILE="")
    assert code == 1
    assert findings[package]["message"] == "not installed"


def test_tools_and_users_of_a_spec_are_asked_and_each_has_a_line(tmp_path):
    path = tmp_path / "spec.yaml"

    def told(rollouter: str) -> tuple[int, list[tuple[str, str, str]]]:
        path.write_text(SPEC.replace("rollout: {", f"rollout: {{rollouter: {rollouter}, "))
        environment = {"RPG_HOME": str(tmp_path / "home"), "RPG_PROFILE": ""}
        result = CliRunner().invoke(app, ["doctor", str(path), "--json"], env=environment)
        lines = [tuple(each.values()) for each in json.loads(result.stdout)]
        return result.exit_code, [line for line in lines if line[0] in ("tool", "user")]

    lines = "{type: mcp, command: [no-such-program-here]}"
    code, found = told(f"{{type: tools, answer_tokens: 2, tools: [calculator, {lines}]}}")
    assert code == 1
    assert found == [
        ("tool", "ok", "calculator: answers"),
        ("tool", "broken", "mcp: there is no such program: no-such-program-here"),
    ]
    user = "{type: model, model: m, instruction: Ask., endpoint: 'http://127.0.0.1:9/v1'}"
    code, found = told(f"{{type: conversation, words_tokens: 2, words: '{{words}}', user: {user}}}")
    assert code == 1
    assert found == [("user", "broken", "model: http://127.0.0.1:9/v1 does not answer (ConnectError)")]


def test_a_cluster_of_a_spec_that_does_not_answer_is_broken(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "spec.yaml").write_text(SPEC + "launcher: {type: ray}\n")
    environment = {"RPG_HOME": str(tmp_path / "home"), "RPG_PROFILE": "", "RPG_SLOTS": "5"}
    monkeypatch.setenv("RPG_SLOT_DIR", str(tmp_path))
    with leased(1, "run-a", waiting=None, available=["5"]):
        code, findings = examined(str(tmp_path / "spec.yaml"), "--set", "launcher.address=127.0.0.1:1", **environment)
    assert code == 1
    assert findings["ray cluster"]["status"] == "broken"
    assert findings["gpu slots"]["message"].startswith("1: 5; 5 is held by run-a")
