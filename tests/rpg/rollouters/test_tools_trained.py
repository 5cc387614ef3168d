"""Training with a tool: the record, replay, resume, streams and ranks, with a random policy that calls often.

The policy has five tokens. A 1 begins a call and = ends it, so it calls the calculator with 0s and 1s; the answer is
given as 0...=, with tokens that it has no word for as padding.
"""

import json
import signal
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.home.home import Home
from pipelines.replay.objectives import alternatives
from pipelines.replay.run import replay_run
from specs.reading.recorded import recorded_spec
from storage import Store
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.tiny_run import STEADY, TOKENS, finish, make_run, rows, start, train

ROLLOUTER: dict[str, Any] = {
    "type": "tools",
    "tools": ["calculator"],
    "format": {"type": "tags", "call": "1{argument}=", "answer": "0{answer}="},
    "max_turns": 3,
    "answer_tokens": 6,
}
TOOLS: dict[str, Any] = {"rollouter": ROLLOUTER, "max_response_length": 20}
BY_PLACE = itemgetter("step", "rollout_id", "position")


@pytest.fixture(scope="module")
def home(inputs: Path) -> Home:
    home = Home(inputs / "home")
    run = make_run(inputs, home.run("calls"), rollout=TOOLS)
    named = {"run_id": run.name, "experiment": "tiny", "name": run.name, "seed": 0}
    (run / "run.json").write_text(json.dumps(named))
    train(run)
    return home


def test_turns_are_recorded_as_rows(home: Home) -> None:
    with Store.open(home.root) as store:
        turns = store.query(
            "SELECT sampled, tool, count(*), count(tool), count(seconds), sum(num_tokens)::INT"
            " FROM turns GROUP BY ALL ORDER BY ALL"
        ).rows
        given, sampled = turns
        assert given[:2] == (False, "calculator")
        assert given[2] == given[3] == given[4] > 20
        assert sampled[:2] == (True, None)
        tokens = store.query("SELECT sampled, count(*) FROM tokens GROUP BY ALL ORDER BY ALL").rows
        assert tokens == [(False, given[5]), (True, sampled[5])]
        texts = store.query(
            "SELECT string_agg(text, '' ORDER BY turn) = any_value(response) FROM turns JOIN rollouts "
            "USING (run_id, step, rollout_id) WHERE NOT contains(text, '<') GROUP BY run_id, step, rollout_id"
        ).rows
        assert texts


def test_metrics_count_turns_and_calls(home: Home) -> None:
    run_dir = home.run("calls")
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    for step in range(1, 7):
        turns = [row for row in rows(run_dir, "turns") if row["step"] == step]
        tokens = [row for row in rows(run_dir, "tokens") if row["step"] == step]
        called = [turn for turn in turns if turn["tool"]]
        assert metrics[step, "turns/mean"] == pytest.approx(sum(turn["sampled"] for turn in turns) / 32)
        assert metrics[step, "calls/mean"] == pytest.approx(len(called) / 32)
        assert metrics[step, "calls/error_fraction"] == pytest.approx(
            sum(turn["error"] is not None for turn in called) / max(1, len(called))
        )
        given = sum(not token["sampled"] for token in tokens)
        assert metrics[step, "given_fraction"] == pytest.approx(given / len(tokens))


def test_logprobs_are_those_behind_all_that_stands_before_a_turn(home: Home, inputs: Path) -> None:
    assert logprobs_behind_all_before(home.run("calls"), inputs / "base", tolerance=1e-4) > 10


def logprobs_behind_all_before(run_dir: Path, base: Path, *, tolerance: float) -> int:
    """Holds the sampler's logprobs in the first step against a pass over all that stands before each token. Returns the
    number of tokens that stand behind given ones."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows(run_dir, "tokens"), key=BY_PLACE):
        if row["step"] == 1:
            tokens.setdefault(row["rollout_id"], []).append(row)
    later = 0
    for rollout in rows(run_dir, "rollouts"):
        if rollout["step"] != 1:
            continue
        prompt = [TOKENS.index(character) for character in rollout["prompt"]]
        mine = tokens[rollout["rollout_id"]]
        ids = torch.tensor([prompt + [token["token_id"] for token in mine]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        was_given = False
        for token, expected in zip(mine, logprobs, strict=True):
            if token["sampled"]:
                later += was_given
                assert token["rollout_logprob"] == pytest.approx(expected[token["token_id"]].item(), abs=tolerance)
            was_given = was_given or not token["sampled"]
    return later


def test_a_replay_gives_back_what_training_recorded(home: Home) -> None:
    spec = recorded_spec(home.run("calls"))
    replayed = replay_run(home, "calls", alternatives(spec, [""]))[0].as_json()
    assert replayed["reproduced"]["holds"]
    assert replayed["reproduced"]["loss"] < 1e-6


@pytest.mark.more
def test_a_run_that_is_killed_in_the_middle_of_a_response_goes_on_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rollout": {**TOOLS, "max_staleness": 1}, "training": {"steps": 8}}
    whole, killed = (make_run(inputs, tmp_path / name / "run", **changes) for name in ("whole", "killed"))
    train(whole)
    process = start([sys.executable, "-m", "rpg.train", str(killed)])
    wait_for_step(process, killed, 5, saved=True)  # the batch of a later step is being sampled
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    assert "resumes after step" in train(killed)
    same_rows(killed, whole)
    last = "weights/step-000008/model.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes()
    said = [
        {(row["step"], row["rollout_id"], row["turn"]): row["text"] for row in rows(run, "turns")}
        for run in (whole, killed)
    ]
    assert said[0] == said[1]


def tokens_of(run_dir: Path, step: int = 1) -> list[tuple[Any, ...]]:
    """A step's tokens, with their prompts."""
    asked = {row["rollout_id"]: row["prompt_id"] for row in rows(run_dir, "rollouts") if row["step"] == step}
    first = sorted((row for row in rows(run_dir, "tokens") if row["step"] == step), key=BY_PLACE)
    return [(asked[row["rollout_id"]], row["rollout_id"], row["token_id"], row["sampled"]) for row in first]


@pytest.mark.more
def test_a_stream_gives_the_tokens_of_rounds(inputs: Path, tmp_path: Path) -> None:
    refills = [{**TOOLS, "dynamic_sampling": {"refill": refill}} for refill in ("rounds", "stream")]
    runs = [
        make_run(inputs, tmp_path / str(number), rollout=rollout, training={"steps": 1})
        for number, rollout in enumerate(refills)
    ]
    for run in runs:
        train(run)
    assert tokens_of(runs[0]) == tokens_of(runs[1])
    assert any(not sampled for *_, sampled in tokens_of(runs[0]))


def test_two_ranks_give_the_tokens_of_one(home: Home, inputs: Path, tmp_path: Path) -> None:
    two = make_run(inputs, tmp_path / "two", rollout=TOOLS, training={"steps": 1, "ranks": 2})
    train(two, ranks=2)
    assert tokens_of(two) == tokens_of(home.run("calls"))
    turns = [
        sorted((row["rollout_id"], row["turn"], row["text"]) for row in rows(run, "turns") if row["step"] == 1)
        for run in (two, home.run("calls"))
    ]
    assert turns[0] == turns[1]


def test_turns_answer_for_their_returns_and_a_replay_agrees(inputs: Path) -> None:
    home = Home(inputs / "home-of-turns")
    rewarded = {**TOOLS, "rollouter": {**ROLLOUTER, "rewards": {"call": 0.5, "error": -0.25}}}
    run = make_run(inputs, home.run("turns"), rollout=rewarded, advantage={"credit": "turn"}, training={"steps": 2})
    (run / "run.json").write_text(json.dumps({"run_id": run.name, "experiment": "tiny", "name": run.name, "seed": 0}))
    train(run)
    with Store.open(home.root) as store:
        sums = "SELECT step, rollout_id, sum(reward) AS earned FROM turns WHERE sampled GROUP BY ALL"
        (earned,) = store.query(f"SELECT avg(earned) FROM ({sums}) WHERE step = 1").rows[0]
        (metric,) = store.query("SELECT value FROM metrics WHERE name = 'turn_reward/mean' AND step = 1").rows[0]
        answered = store.query(
            "SELECT t.reward, n.error IS NULL AS fine FROM turns t JOIN turns n"
            " ON (t.step, t.rollout_id, t.turn + 1) = (n.step, n.rollout_id, n.turn) WHERE t.sampled AND NOT n.sampled"
        ).rows
    assert metric == pytest.approx(earned)
    assert earned != 0
    assert {reward for reward, fine in answered if fine} == {0.5}
    spec = recorded_spec(run)
    replayed = replay_run(home, "turns", alternatives(spec, [""]))[0].as_json()
    assert replayed["reproduced"]["holds"]
    assert replayed["reproduced"]["loss"] < 1e-6


@pytest.mark.more
def test_turns_answer_for_their_returns_over_two_ranks_as_over_one(inputs: Path, tmp_path: Path) -> None:
    rollout = {**TOOLS, "rollouter": {**ROLLOUTER, "rewards": {"call": 0.5, "error": -0.25}}}
    training = {"steps": 2, "optimizer": STEADY}
    one, two = (
        make_run(
            inputs,
            tmp_path / str(ranks),
            rollout=rollout,
            advantage={"credit": "turn"},
            training={**training, "ranks": ranks},
        )
        for ranks in (1, 2)
    )
    train(one)
    train(two, ranks=2)
    for step in (1, 2):
        assert tokens_of(one, step) == tokens_of(two, step)
    for table, names in (("rollouts", ("reward", "advantage")), ("turns", ("reward",)), ("tokens", ("logprob",))):
        place = ("step", "rollout_id", *{"turns": ("turn",), "tokens": ("position",)}.get(table, ()))
        found = [sorted(rows(run, table), key=itemgetter(*place)) for run in (one, two)]
        for name in names:
            alone, shared = ([row[name] for row in its_rows] for its_rows in found)
            assert any(alone)
            assert alone == [None if value is None else pytest.approx(value, abs=1e-5) for value in shared], name
