"""An environment of two turns, of an installed package: its text is context, and sampled tokens are trained on.

After its first answer the policy is asked "0=", two tokens that the environment gives; then it answers again.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from places import PACKAGES
from transformers import AutoModelForCausalLM

from pipelines.home.home import Home
from pipelines.replay.gradients import Moment
from pipelines.replay.objectives import alternatives
from pipelines.replay.run import RunReplay, replay_run
from rpg.batches.batch import StepRollouts
from rpg.checkpoints.pieces import StateCopy
from rpg.evaluation.stage import evaluate
from rpg.metrics import rollout_metrics
from rpg.rollouters import Rollout, RolloutGroup, Sampling, SeededPrompt, Turn
from rpg.rollouters.rollouter import check_rollouts
from rpg.rollouters.scoring import Scoring
from rpg.rollouts.ahead import WAITING, QueuedBatch, load_waiting, plain_waiting
from rpg.types import Problem
from specs.reading.recorded import recorded_spec
from specs.schema.experiment import Experiment
from storage import Store
from tests.rpg.batches.test_batch import example, two_turns
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.tiny_run import PROBLEMS, SPEC, TOKENS, finish, make_run, rows, start, train

pytestmark = pytest.mark.more

GIVEN = [TOKENS.index("0"), TOKENS.index("=")]
TWO_TURNS: dict[str, Any] = {"rollouter": {"type": "check_again", "question": "0="}, "max_response_length": 12}
AHEAD: dict[str, Any] = {
    "rollout": {**TWO_TURNS, "max_staleness": 1},
    "training": {"steps": 8, "checkpoint": {"every_steps": 2}},
}
IN_THE_REWARD = {"type": "reinforce_plus_plus", "kl_coef": 0.1}
"""Takes the divergence off the reward, token by token, and whitens advantages over all tokens."""
POLICY_COLUMNS = ("logprob", "old_logprob", "rollout_logprob", "ref_logprob", "ratio", "clipped", "entropy")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """The package with the environment is installed, here and for the trainers that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGES))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH")))))
        yield


@pytest.fixture(scope="module")
def home(inputs: Path) -> Home:
    """With the runs `turns` and, under an objective with its divergence in the reward, `in-the-reward`."""
    home = Home(inputs / "home")
    objectives: dict[str, dict[str, Any]] = {"turns": {}, "in-the-reward": IN_THE_REWARD}
    runs = [
        make_run(inputs, home.run(name), rollout=TWO_TURNS, objective=objective)
        for name, objective in objectives.items()
    ]
    for run in runs:
        named = {"run_id": run.name, "experiment": "tiny", "name": run.name, "seed": 0}
        (run / "run.json").write_text(json.dumps(named))
        train(run)
    return home


def by_response(run_dir: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each response's row, and those of its tokens in order."""
    tokens: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows(run_dir, "tokens"):
        tokens.setdefault((row["step"], row["rollout_id"]), []).append(row)
    return [(rollout, tokens[rollout["step"], rollout["rollout_id"]]) for rollout in rows(run_dir, "rollouts")]


def test_given_tokens_are_recorded_and_nothing_is_known_of_them(home: Home) -> None:
    for rollout, tokens in by_response(home.run("turns")):
        first = next(place for place, token in enumerate(tokens) if not token["sampled"])
        assert 1 <= first <= 5, "the first answer has at most half of the room that the question leaves"
        assert [place for place, token in enumerate(tokens) if not token["sampled"]] == [first, first + 1]
        assert [token["token_id"] for token in tokens[first : first + 2]] == GIVEN
        assert first + 3 <= len(tokens) <= 12
        assert [token["position"] for token in tokens] == list(range(len(tokens)))
        assert rollout["num_tokens"] == len(tokens) - 2
        for token in tokens:
            assert all((token[name] is not None) == token["sampled"] for name in POLICY_COLUMNS)


def test_sql_tells_given_tokens_from_sampled_ones(home: Home) -> None:
    counts = ", ".join(f"count({name})" for name in POLICY_COLUMNS)
    query = f"select sampled, count(*), {counts} from tokens where run_id = 'turns' group by sampled order by sampled"
    with Store.open(home.root) as store:
        given, sampled = store.query(query).rows
    responses = len(rows(home.run("turns"), "rollouts"))
    assert given == (False, 2 * responses, *[0] * 7)
    assert sampled[0]
    assert sampled[1:] == (sampled[1],) * 8


def test_the_second_answer_is_scored_and_the_whole_response_is_recorded(home: Home) -> None:
    problems = {f"p{index}": problem for index, problem in enumerate(PROBLEMS)}
    for rollout, tokens in by_response(home.run("turns")):
        words = [TOKENS[token["token_id"]] if token["token_id"] > 1 else "" for token in tokens]
        second = max(place for place, token in enumerate(tokens) if not token["sampled"]) + 1
        assert rollout["response"] == "".join(words)
        assert rollout["reward"] == float("".join(words[second:]) == problems[rollout["prompt_id"]][0])
        assert (rollout["finish_reason"] == "stop") == (tokens[-1]["token_id"] == TOKENS.index("<eos>"))
    assert {rollout["reward"] for rollout in rows(home.run("turns"), "rollouts")} == {0.0, 1.0}


def test_lengths_and_denominators_count_what_was_sampled(home: Home) -> None:
    run_dir = home.run("turns")
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    for step in range(1, 7):
        counts = [rollout["num_tokens"] for rollout in rows(run_dir, "rollouts") if rollout["step"] == step]
        assert metrics[step, "response_length/mean"] == pytest.approx(np.mean(counts))
        assert metrics[step, "response_length/max"] == max(counts)
        entropies = [row["entropy"] for row in rows(run_dir, "tokens") if row["step"] == step and row["sampled"]]
        assert metrics[step, "entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_logprobs_are_those_of_sampled_tokens_behind_all_that_stands_before_them(home: Home, inputs: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32)
    for rollout, tokens in by_response(home.run("turns"))[:32]:
        assert rollout["step"] == 1
        prompt = [TOKENS.index(character) for character in rollout["prompt"]]
        ids = torch.tensor([prompt + [token["token_id"] for token in tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        for token, expected in zip(tokens, logprobs, strict=True):
            if token["sampled"]:
                assert token["rollout_logprob"] == pytest.approx(expected[token["token_id"]].item(), abs=1e-4)
                assert token["old_logprob"] == pytest.approx(expected[token["token_id"]].item(), abs=1e-4)


def replay(home: Home, run: str, objective: str = "", **options: Any) -> RunReplay:
    spec = recorded_spec(home.run(run))
    return replay_run(home, run, alternatives(spec, [objective]), **options)[0]


@pytest.mark.parametrize("run", ["turns", "in-the-reward"])
def test_a_replay_gives_back_what_training_recorded(home: Home, run: str) -> None:
    replayed = replay(home, run, gradients=Moment.start).as_json()
    (gradient,) = replayed["gradients"]
    assert gradient["step"] == 5
    assert gradient["logprob_change"] < 1e-5, "behind the same prompts and given tokens"
    assert replayed["reproduced"]["holds"]
    assert replayed["reproduced"]["loss"] < 1e-6
    assert len(replayed["steps"]) == 6
    sampled = sum(rollout["num_tokens"] for rollout in rows(home.run(run), "rollouts"))
    assert sum(entry["tokens"] for entry in replayed["steps"]) == sampled
    other = replay(home, run, "{type: grpo}").as_json()
    places = {(row["step"], row["rollout_id"], row["position"]): row for row in rows(home.run(run), "tokens")}
    for token in other["furthest"]:
        place = places[token["step"], token["rollout_id"], token["position"]]
        assert place["sampled"]
        assert place["token_id"] == token["token_id"]


@pytest.mark.long
def test_two_ranks_sample_and_learn_the_same(home: Home, inputs: Path, tmp_path: Path) -> None:
    two = make_run(inputs, tmp_path / "two", rollout=TWO_TURNS, training={"steps": 1, "ranks": 2})
    train(two, ranks=2)
    one = home.run("turns")
    by_place = itemgetter("rollout_id", "position")  # each rank writes the rows of the responses that it holds
    responses = [sorted((row for row in rows(run, "tokens") if row["step"] == 1), key=by_place) for run in (one, two)]
    for mine, other in zip(*responses, strict=True):
        for name in ("rollout_id", "position", "token_id", "sampled"):
            assert mine[name] == other[name]
    metrics = [{(row["step"], row["name"]): row["value"] for row in rows(run, "metrics")} for run in (one, two)]
    for name in ("reward/mean", "loss", "grad_norm", "entropy", "weight/variance", "response_length/mean"):
        assert metrics[0][1, name] == pytest.approx(metrics[1][1, name], rel=1e-4, abs=1e-7), name


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_bit_for_bit_with_given_tokens_in_the_batches_that_wait(
    inputs: Path, tmp_path: Path
) -> None:
    whole, killed = (make_run(inputs, tmp_path / name / "run", **AHEAD) for name in ("whole", "killed"))
    train(whole)
    process = start([sys.executable, "-m", "rpg.train", str(killed)])
    wait_for_step(process, killed, 5, saved=True)
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    assert "resumes after step" in train(killed)
    same_rows(killed, whole)
    for file in ("checkpoints/step-000008/learner-rank00000.safetensors", "weights/step-000008/model.safetensors"):
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file


def test_checkpoints_are_measured_in_the_environment_that_they_are_trained_in(inputs: Path, tmp_path: Path) -> None:
    table = pq.read_table(inputs / "data" / "train.parquet")
    data = tmp_path / "data"
    data.mkdir()
    held_out = table.set_column(table.column_names.index("dataset"), "dataset", [["held_out"] * len(table)])
    pq.write_table(held_out, data / "evaluation.parquet")
    source = {"source": "parquet", "name": "held_out", "path": "held_out.parquet"}
    spec = Experiment.model_validate(
        SPEC
        | {
            "rollout": TWO_TURNS,
            "data": {**SPEC["data"], "evaluation": [source]},
            "evaluation": {"samples_per_problem": 4, "temperature": 1.0},
        }
    )
    out = tmp_path / "out"
    out.mkdir()
    evaluate(spec, {"data": data, "base": inputs / "base"}, out, run_id="run", fingerprint="f" * 64)
    [path] = (out / "segments" / "evaluation_samples").glob("*.parquet")
    samples = pq.read_table(path).to_pylist()
    assert len(samples) == 4 * len(PROBLEMS)
    for sample in samples:
        assert 2 <= sample["num_tokens"] <= 10, "the two that were given are not counted"
        scored = sample["extracted"] or ""
        assert sample["response"].endswith(f"0={scored}")
        assert sample["correct"] == (scored == sample["answer"])
        turns = json.loads(sample["turns"])
        assert [turn["turn"] for turn in turns] == list(range(len(turns)))
        assert [turn["sampled"] for turn in turns][-1:] == [True]
        assert sum(turn["num_tokens"] for turn in turns if turn["sampled"]) == sample["num_tokens"]
        assert any(not turn["sampled"] for turn in turns)


def test_metrics_of_a_batch_leave_given_tokens_out() -> None:
    assert rollout_metrics(two_turns())["response_length/mean"] == 2
    assert rollout_metrics(two_turns())["response_length/max"] == 3


@pytest.mark.parametrize("step", [example(), two_turns()], ids=["all_sampled", "some_given"])
def test_a_checkpoint_keeps_which_tokens_of_a_batch_that_waits_were_given(tmp_path: Path, step: StepRollouts) -> None:
    copy = StateCopy()
    copy.values(WAITING, plain_waiting([QueuedBatch(3, step, position=7)]))
    copy.write(tmp_path)
    [waiting] = load_waiting(tmp_path)
    for field in fields(StepRollouts):
        before, after = getattr(step, field.name), getattr(waiting.rollouts, field.name)
        assert str(before) == str(after), field.name
        assert getattr(before, "dtype", None) == getattr(after, "dtype", None), field.name


def test_a_response_that_nobody_told_of_is_named() -> None:
    nothing = cast("Any", None)
    scoring = Scoring(nothing, nothing, [Problem("p0", "0=", "0", "train")], group_size=1, reward_at=nothing)
    with pytest.raises(ValueError, match="did not call on_response for response 0"):
        scoring.texts()


def test_turns_and_rollouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens have 1 logprobs"):
        Turn((3, 4), (-0.1,))
    with pytest.raises(ValueError, match="a turn has at least one token"):
        Turn(())
    with pytest.raises(ValueError, match="at least one sampled turn"):
        Rollout((Turn((3, 4)),), "stop")


def test_a_rollouter_that_returns_something_else_is_told_what() -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=4)
    prompts = [SeededPrompt(Problem("p0", "0=", "0", "train"), (2, 4), seed=1)]
    short = Rollout((Turn((3,), (-0.1,)), Turn((2, 4)), Turn((3,), (-0.1,))), "stop")
    check_rollouts([RolloutGroup((2, 4), (short, short), 0)], prompts, group_size=2, sampling=sampling)
    with pytest.raises(ValueError, match="1 groups that are not those of the 1 prompts"):
        check_rollouts([RolloutGroup((2,), (short,), 0)], prompts, group_size=1, sampling=sampling)
    with pytest.raises(ValueError, match="1 rollouts to prompt 0, not 2"):
        check_rollouts([RolloutGroup((2, 4), (short,), 0)], prompts, group_size=2, sampling=sampling)
    long = Rollout((*short.turns, Turn((4,))), "stop")
    with pytest.raises(ValueError, match="a response of 5 tokens to prompt 0, given tokens included; at most 4"):
        check_rollouts([RolloutGroup((2, 4), (long,), 0)], prompts, group_size=1, sampling=sampling)
