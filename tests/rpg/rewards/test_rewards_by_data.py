"""Each set of problems scored by its own reward, in real training and evaluation: on one rank and two, in rounds and
streamed, after a kill, with its own terms and its own penalty on length."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stage_jobs import SPEC, run_stage

from rpg.recording.segments import schema_of
from specs.loader import load_evaluation
from specs.records import EvaluationSampleRow
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.tiny_run import finish, make_run, rows, start, train

EXACT = {"type": "exact_match"}
TWICE: dict[str, Any] = {
    "type": "weighted_sum",
    "terms": [
        {"name": "right", "reward": EXACT, "weight": 2.0},
        {"name": "rule", "reward": {"type": "math_dapo"}, "weight": 0.25},
    ],
    "overlong": {"buffer": 4, "penalty": 0.5},
}
"""2 if a response is right; -0.25 always, since none says Answer:; up to -0.5 for more than four tokens."""
DATA: dict[str, Any] = {
    "train": [
        {"source": "parquet", "name": "once", "path": "train.parquet"},
        {"source": "parquet", "name": "twice", "path": "train.parquet", "reward": TWICE},
    ]
}


@pytest.fixture(scope="module")
def mixed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny problems as two sets, of which the second has a reward of its own."""
    directory = tmp_path_factory.mktemp("mixed")
    (directory / "base").symlink_to(inputs / "base")
    table = pq.read_table(inputs / "data" / "train.parquet")
    (directory / "data").mkdir()
    names = pa.array(["once"] * 4 + ["twice"] * 4)
    place = table.schema.get_field_index("dataset")
    pq.write_table(table.set_column(place, "dataset", names), directory / "data" / "train.parquet")
    sets = [{"source": f"data.train.{index}", "problems": 4} for index in range(2)]
    (directory / "data" / "summary.json").write_text(json.dumps({"train": {"sets": sets}}))
    return directory


@pytest.fixture(scope="module")
def alone(mixed: Path) -> Path:
    run = make_run(mixed, mixed / "alone", data=DATA, rollout={"max_staleness": 1})
    train(run)
    return run


def of_set(row: dict[str, Any]) -> str:
    return "once" if row["prompt_id"] in {"p0", "p1", "p2", "p3"} else "twice"


def worth(row: dict[str, Any]) -> float:
    """Returns the score by the reward of the response's set."""
    if of_set(row) == "once":
        return float(row["correct"])
    return 2.0 * row["correct"] - 0.25 - 0.5 * max(0, row["num_tokens"] - 4) / 4


def scored(run: Path) -> list[tuple[Any, ...]]:
    """Returns the first step's responses and their rewards."""
    names = ("rollout_id", "prompt_id", "response", "reward", "reward_terms")
    return sorted(tuple(row[name] for name in names) for row in rows(run, "rollouts") if row["step"] == 1)


@pytest.mark.more
def test_each_response_is_scored_by_the_reward_of_its_set(alone: Path) -> None:
    responses = rows(alone, "rollouts")
    assert [row["reward"] for row in responses] == pytest.approx([worth(row) for row in responses])
    met = {(of_set(row), row["correct"], row["num_tokens"] > 4) for row in responses}
    assert len(met) == 6, "of both sets wrong ones, short and long, and right ones, which are short"
    assert {(of_set(row), row["reward_terms"] is None) for row in responses} == {("once", True), ("twice", False)}


def test_metrics_have_the_mean_of_each_set_and_of_its_terms(alone: Path) -> None:
    responses = rows(alone, "rollouts")
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(alone, "metrics")}
    for step in range(1, 7):
        for name in ("once", "twice"):
            given = [row["reward"] for row in responses if row["step"] == step and of_set(row) == name]
            expected = pytest.approx(sum(given) / len(given)) if given else None
            assert metrics.get((step, f"reward/mean/{name}")) == expected
        assert metrics.get((step, "reward/rule/mean/twice"), -1.0) == -1.0
        assert (step, "reward/rule/mean/once") not in metrics


@pytest.mark.more
def test_two_ranks_score_as_one(mixed: Path, tmp_path: Path) -> None:
    runs = [
        make_run(mixed, tmp_path / str(ranks), data=DATA, training={"steps": 1, "ranks": ranks}) for ranks in (1, 2)
    ]
    train(runs[0])
    train(runs[1], ranks=2)
    assert scored(runs[0]) == scored(runs[1])
    assert {of_set(row) for row in rows(runs[1], "rollouts")} == {"once", "twice"}
    of_sets = [
        {row["name"]: row["value"] for row in rows(run, "metrics") if row["name"].startswith("reward/")} for run in runs
    ]
    assert of_sets[0] == pytest.approx(of_sets[1])


@pytest.mark.more
@pytest.mark.parametrize("rewards", [pytest.param("summed", marks=pytest.mark.long), "normalized_each"])
def test_a_stream_keeps_the_groups_and_scores_of_rounds(mixed: Path, tmp_path: Path, rewards: str) -> None:
    refills = [{"dynamic_sampling": {"refill": refill, "max_batches": 4}} for refill in ("rounds", "stream")]
    runs = [
        make_run(
            mixed,
            tmp_path / str(number),
            data=DATA,
            rollout=rollout,
            advantage={"baseline": "group_mean", "rewards": rewards},
            training={"steps": 1},
        )
        for number, rollout in enumerate(refills)
    ]
    for run in runs:
        train(run)
    assert scored(runs[0]) == scored(runs[1])


@pytest.mark.more
def test_a_killed_run_goes_on_with_the_scores_that_wait(mixed: Path, alone: Path, tmp_path: Path) -> None:
    killed = make_run(mixed, tmp_path / "alone", data=DATA, rollout={"max_staleness": 1})
    process = start([sys.executable, "-m", "rpg.train", str(killed)])
    wait_for_step(process, killed, 3, saved=True)  # the batch of a later step waits, scored, in the checkpoint
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    assert "resumes after step" in train(killed)
    same_rows(killed, alone)


MODELS = """\
name: measured
models: [{source: scratch, config: %s}]
data:
  evaluation:
    - {source: reasoning_gym, name: held_out, task: chain_sum, size: 6, seed: 7, config: {max_digits: 1}}
    - {source: reasoning_gym, name: by_rule, task: chain_sum, size: 6, seed: 8, config: {max_digits: 1},
       reward: {type: math_dapo}}
  prompt: {type: template, template: "{metadata.expression} ="}
  max_prompt_length: 24
reward: {type: exact_match}
evaluation: {samples_per_problem: 2, max_response_length: 6}
"""


def test_rpg_evaluate_scores_each_set_by_its_own_reward(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODELS % json.dumps(SPEC["model"]["config"]))
    spec = json.loads(load_evaluation(file).experiment.model_dump_json())
    made = {"data": run_stage("data", tmp_path, spec)}
    made["base"] = run_stage("base", tmp_path, spec, data=made["data"].out)
    left = run_stage("evaluate", tmp_path, spec, **{name: result.out for name, result in made.items()})
    assert [result.code for result in (*made.values(), left)] == [0, 0, 0], left.log
    samples = pq.read_table(left.out / "segments" / "evaluation_samples", schema=schema_of(EvaluationSampleRow))
    scores = {(row["dataset"], row["score"]) for row in samples.to_pylist() if not row["correct"]}
    assert scores == {("held_out", 0.0), ("by_rule", -1.0)}
