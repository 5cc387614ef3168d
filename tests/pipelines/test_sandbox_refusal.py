"""Where bubblewrap is missing or may not create namespaces, a reward that runs a response's text is refused."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import specs
from pipelines.cli import app, main
from rpg.rewards import open_scorer
from rpg.sandbox import Limits, Program, Sandbox, SandboxError, bubblewrap, room
from specs.errors import SpecError
from specs.loader import load_experiment
from specs.schema.reward import Reward

STARTER = (Path(specs.__file__).parent / "experiments" / "starter.yaml").read_text("utf-8")
REWARD = "reward: {type: reasoning_gym}  # or"
NOT_INSTALLED = "bubblewrap is not installed"
NOT_ALLOWED = "bubblewrap may not make namespaces (bwrap: No permissions to create new namespace)"


@pytest.fixture(params=[NOT_INSTALLED, NOT_ALLOWED])
def lack(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Why this machine can seal nothing."""
    programs = tmp_path / "programs"
    programs.mkdir()
    if request.param == NOT_ALLOWED:  # what bubblewrap says where the kernel forbids it
        program = programs / "bwrap"
        program.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{programs}")
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(STARTER.replace("reward: {type: exact_match}  # or", REWARD))
    bubblewrap._way.cache_clear()
    bubblewrap._scratch.cache_clear()
    room.missing.cache_clear()
    yield request.param
    bubblewrap._way.cache_clear()
    bubblewrap._scratch.cache_clear()
    room.missing.cache_clear()


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_it_is_refused_before_anything_runs(
    verb: str, lack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rpg", verb, "spec.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    message = "reward: reasoning_gym may execute text of a response, so it scores only in a sandbox"
    assert f"spec.yaml:57: {message}: {lack}" in said
    assert "install bubblewrap" in said if lack == NOT_INSTALLED else "allow unprivileged user namespaces" in said
    assert not Path(os.environ["RPG_HOME"], "runs").exists()


PYTHON = "rollout={max_response_length: 32, rollouter: {type: tools, tools: [calculator, python], answer_tokens: 8}}"
OWN = "data.train.0.reward={type: reasoning_gym}"


@pytest.mark.parametrize(
    ("changed", "place", "what"),
    [
        (PYTHON, "--set rollout={", "the tool `python` runs code that the policy writes, so it needs a sandbox"),
        (
            OWN,
            "--set data.train.0.reward",
            "reasoning_gym may execute text of a response, so it scores only in a sandbox",
        ),
    ],
    ids=["tool", "reward of a set"],
)
def test_a_tool_and_a_sets_own_reward_are_refused_where_they_are_written(
    changed: str, place: str, what: str, lack: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("spec.yaml").write_text(STARTER)
    monkeypatch.setattr(sys, "argv", ["rpg", "plan", "spec.yaml", "--set", changed])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    (line,) = [line for line in said.splitlines() if lack in line]
    assert line.startswith(place)
    assert what in line


@pytest.mark.usefixtures("lack")
def test_the_machine_that_is_to_score_refuses_it() -> None:
    terms = [{"reward": {"type": "exact_match"}}, {"reward": {"type": "reasoning_gym"}}]
    for reward in ({"type": "reasoning_gym"}, {"type": "weighted_sum", "terms": terms}, {"type": "code"}):
        with pytest.raises(SpecError, match=r"(reasoning_gym|code) may execute text of a response"):
            open_scorer(Reward.model_validate(reward))


def test_no_program_is_ever_run_bare(lack: str) -> None:
    with Sandbox(Limits()) as sandbox, pytest.raises(SandboxError) as refused:
        sandbox.run(Program("open('written', 'w')"))
    assert str(refused.value).startswith(lack)
    assert not Path("written").exists()


@pytest.mark.usefixtures("lack")
def test_a_trainer_refuses_it_before_it_loads_anything(tmp_path: Path) -> None:
    from rpg.components import open_components
    from rpg.recording.run_directory import RunDirectory

    spec = load_experiment("spec.yaml")
    with (
        pytest.raises(SpecError, match="reasoning_gym may execute text of a response"),
        open_components(RunDirectory(tmp_path / "no run"), spec, torch.device("cpu")),
    ):
        pass


@pytest.mark.usefixtures("lack")
def test_rewards_that_run_nothing_score_without_a_sandbox() -> None:
    from rpg.types import Problem

    problem = Problem("p", "?", "1/2", "d")
    with open_scorer(Reward.model_validate({"type": "math_verify"})) as scorer:
        assert scorer.score([problem], ["it is 0.5"])[0].correct


def test_doctor_says_what_to_do(lack: str) -> None:
    for arguments, status in ([[], "note"], [["spec.yaml"], "broken"]):
        result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
        finding = next(each for each in json.loads(result.stdout) if each["name"] == "sandbox")
        assert finding["status"] == status
        assert finding["message"].startswith(lack)
