"""Training with an agent: the trained tokens and their contexts, the record, replay, resume and ranks.

The program asks twice. Of the policy's five tokens it takes a 1 as a reason to rewrite its history.
"""

import json
import os
import signal
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PACKAGES
from transformers import AutoModelForCausalLM

from pipelines.home.home import Home
from pipelines.replay.objectives import alternatives
from pipelines.replay.run import replay_run
from specs.reading.recorded import recorded_spec
from storage import Store
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.rollouters.test_tools_trained import tokens_of
from tests.rpg.tiny_run import TOKENS, finish, make_run, rows, start, train

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ROLLOUTER: dict[str, Any] = {
    "type": "agent",
    "program": "second_thoughts",
    "template": TEMPLATE,
    "max_turns": 3,
    "turn_tokens": 5,
}
AGENT: dict[str, Any] = {"rollouter": ROLLOUTER, "max_response_length": 20}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the tests are on the path here and in every process that a test starts."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))


def a_run(inputs: Path, home: Home, **changes: Any) -> Path:
    run = make_run(inputs, home.run("asked"), rollout=AGENT, **changes)
    (run / "run.json").write_text(json.dumps({"run_id": run.name, "experiment": "tiny", "name": run.name, "seed": 0}))
    train(run)
    return run


@pytest.mark.more
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_each_token_is_trained_on_behind_what_it_was_sampled_behind(
    inputs: Path, tmp_path: Path, packing: bool
) -> None:
    home = Home(tmp_path / "home")
    run = a_run(inputs, home, training={"steps": 1, "packing": packing})
    model = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32)
    tokens: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows(run, "tokens"), key=itemgetter("step", "rollout_id", "position")):
        if row["step"] == 1:
            tokens.setdefault(row["rollout_id"], []).append(row)
    turns: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows(run, "turns"), key=itemgetter("step", "rollout_id", "turn")):
        if row["step"] == 1:
            turns.setdefault(row["rollout_id"], []).append(row)
    behind_new = behind_old = 0
    for rollout in rows(run, "rollouts"):
        if rollout["step"] != 1:
            continue
        context = [TOKENS.index(character) for character in rollout["prompt"]]
        left, restarted = iter(tokens[rollout["rollout_id"]]), False
        for turn in turns[rollout["rollout_id"]]:
            mine = [next(left) for _ in range(turn["num_tokens"])]
            ids = [token["token_id"] for token in mine]
            if turn["restart"]:
                context, restarted = [], True
            if turn["sampled"]:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
                expected = torch.log_softmax(logits, -1)
                for token, logprobs in zip(mine, expected, strict=True):
                    logprob = logprobs[token["token_id"]].item()
                    assert token["rollout_logprob"] == pytest.approx(logprob, abs=1e-4)
                    assert token["old_logprob"] == pytest.approx(logprob, abs=1e-4)
                behind_new += restarted
                behind_old += not restarted and turn["turn"] > 0
            context += ids
        assert next(left, None) is None
    assert behind_new > 3
    assert behind_old > 3
    spec = recorded_spec(run)
    with Store.open(home.root) as store:
        assert store.query("SELECT count(*) FROM turns WHERE restart AND step = 1").rows == [(behind_new,)]
    replayed = replay_run(home, "asked", alternatives(spec, [""]))[0].as_json()
    assert replayed["reproduced"]["holds"]
    assert replayed["reproduced"]["loss"] < 1e-6


@pytest.mark.long
def test_a_run_whose_programs_go_in_step_goes_on_bit_for_bit_after_a_kill(inputs: Path, tmp_path: Path) -> None:
    in_step = {**AGENT, "rollouter": {**ROLLOUTER, "in_step": True}}
    changes: dict[str, Any] = {"rollout": {**in_step, "max_staleness": 1}, "training": {"steps": 5}}
    whole, killed = (make_run(inputs, tmp_path / name / "run", **changes) for name in ("whole", "killed"))
    train(whole)
    process = start([sys.executable, "-m", "rpg.train", str(killed)])
    wait_for_step(process, killed, 3, saved=True)  # the batch of a later step is being sampled
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    assert "resumes after step" in train(killed)
    same_rows(killed, whole)
    said = [
        {(row["step"], row["rollout_id"], row["turn"]): (row["text"], row["restart"]) for row in rows(run, "turns")}
        for run in (whole, killed)
    ]
    assert said[0] == said[1]


@pytest.mark.long
def test_two_ranks_give_the_tokens_of_one(inputs: Path, tmp_path: Path) -> None:
    one, two = (
        make_run(inputs, tmp_path / str(ranks), rollout=AGENT, training={"steps": 1, "ranks": ranks})
        for ranks in (1, 2)
    )
    train(one)
    train(two, ranks=2)
    assert tokens_of(two) == tokens_of(one)
    restarts = [{(row["rollout_id"], row["turn"]): row["restart"] for row in rows(run, "turns")} for run in (one, two)]
    assert restarts[0] == restarts[1]
    assert any(restarts[0].values())


@pytest.mark.more
def test_a_policy_learns_to_call_for_what_its_agent_can_do(inputs: Path, tmp_path: Path) -> None:
    rollouter = {**ROLLOUTER, "program": "helpful", "answer": "returned", "max_turns": 2}
    training = {"steps": 12, "optimizer": {"learning_rate": 0.02}, "checkpoint": {"every_steps": 12}}
    run = make_run(
        inputs,
        tmp_path / "run",
        rollout={**AGENT, "rollouter": rollouter},
        training=training,
        objective={"kl_coef": 0.0},
    )
    train(run)
    (first, _), (last, calls) = (share_right(run, step) for step in (1, 12))
    assert first < 0.5
    assert last > 0.8
    assert calls > 0.7, "the answers are the agent's"


def share_right(run: Path, step: int) -> tuple[float, float]:
    """Mean reward of a step, and share of its responses that call."""
    responses = [row for row in rows(run, "rollouts") if row["step"] == step]
    calls = sum(row["response"].startswith("1") for row in responses)
    return sum(row["reward"] for row in responses) / len(responses), calls / len(responses)
