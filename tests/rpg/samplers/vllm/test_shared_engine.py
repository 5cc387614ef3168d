"""One dedicated engine for two ranks: it samples the same as for one rank, both train and evaluate, and a kill changes
nothing."""

import json
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from pipelines.launchers.local import local_command
from specs.machine.exit_cause import USER_ERROR
from tests.rpg.checkpoints.test_resume import recorded, same_rows, wait_for_step
from tests.rpg.test_pause import DATA, EVALUATION, SAMPLES, evaluated, metrics, new_run, set_inputs
from tests.rpg.test_pause import inputs as inputs  # the fixture: model, problems, an evaluation set
from tests.rpg.tiny_run import finish, free_port, group_of, make_inputs, make_run, rows, start, train

STEPS = 6
KILLED_AFTER = 5
"""A step whose end proves that a checkpoint is there: the one of step 4 is begun when that of step 2 is done."""
TRAINING = {"steps": STEPS, "group_size": 4, "checkpoint": {"every_steps": 2, "keep_last": 9}}
STREAM = {"max_response_length": 24, "dynamic_sampling": {"max_batches": 4, "refill": "stream"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": ({"zero_stage": 3}, {}),
    "streaming-ahead": ({}, {**STREAM, "max_staleness": 1}),
}
"""What differs in the training and in the rollout section. At ZeRO 3 each weight is gathered by both ranks, one of
which has no engine to send it to."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@dataclass(frozen=True)
class Runs:
    """Uninterrupted runs of a case."""

    case: str
    alone: Path
    """One rank with an engine."""
    shared: Path
    """Two ranks with one engine."""

    @property
    def same_policy(self) -> int:
        """Steps that were sampled under the base model, and so under one policy by both."""
        return 1 + int(CASES[self.case][1].get("max_staleness", 0))


def make(inputs: Path, path: Path, case: str, *, ranks: int = 2) -> Path:
    training, rollout = CASES[case]
    engine = {"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25, "ranks_per_engine": 2}
    return new_run(
        inputs,
        path,
        training={**TRAINING, **training, "ranks": ranks},
        rollout={**engine, **rollout},
        data=DATA,
        evaluation={**EVALUATION, "every_steps": 2},
    )


def train_together(run_dir: Path) -> None:
    finish(start(local_command(run_dir, 2, free_port())))


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    where = tmp_path_factory.mktemp("whole")
    alone = make(inputs, where / "alone" / "run", request.param, ranks=1)
    train(alone)
    shared = make(inputs, where / "shared" / "run", request.param)
    train_together(shared)
    return Runs(request.param, alone, shared)


def test_the_engine_samples_for_two_ranks_what_it_samples_for_one(runs: Runs) -> None:
    for table, fields in (("rollouts", ("response", "reward")), ("tokens", ("token_id", "rollout_logprob"))):
        one, two = recorded(runs.alone, table), recorded(runs.shared, table)
        first = {key for key in one if key[0] <= runs.same_policy}
        assert first == {key for key in two if key[0] <= runs.same_policy}
        assert first
        for key in first:
            assert [two[key][name] for name in fields] == [one[key][name] for name in fields], key
    alone, shared = metrics(runs.alone), metrics(runs.shared)
    for name in ("reward/mean", "grad_norm", "ratio/mean"):
        assert np.isclose(alone[1, name], shared[1, name], rtol=1e-4, atol=1e-7), name


def test_both_ranks_train_on_a_part_of_what_the_one_samples(runs: Runs) -> None:
    for step in range(1, STEPS + 1):
        shares = sorted((runs.shared / "segments" / "tokens").glob(f"*-s{step:06}-*-r*of0002-*.parquet"))
        assert len(shares) == 2
        assert all(pq.read_metadata(path).num_rows for path in shares)


def test_both_ranks_know_how_far_the_engine_is_from_the_learner(runs: Runs) -> None:
    differences = [row["value"] for row in rows(runs.shared, "metrics") if row["name"] == "sentinel/difference"]
    assert len(differences) == STEPS
    assert 0 < max(differences) < 1e-4


def test_the_engine_answers_each_evaluation_problem_once(runs: Runs) -> None:
    assert evaluated(runs.alone) == evaluated(runs.shared) == dict.fromkeys((2, 4), 5 * SAMPLES)


def test_a_run_that_is_killed_and_goes_on_is_the_uninterrupted_one_bit_for_bit(
    runs: Runs, inputs: Path, tmp_path: Path
) -> None:
    run_dir = make(inputs, tmp_path / "killed" / "run", runs.case)
    process = start(local_command(run_dir, 2, free_port()))
    wait_for_step(process, run_dir, KILLED_AFTER, saved=True)
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum("rpg.samplers.vllm.engine_process" in child.cmdline() for child in children) == 1
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=60)[1], "what belongs to a killed run ends with it"
    train_together(run_dir)
    assert len(list((run_dir / "attempts").glob("*.json"))) == 2
    for rank in range(2):
        state = Path("checkpoints") / f"step-{STEPS:06}" / f"learner-rank{rank:05}.safetensors"
        mine, theirs = (load_file(run / state) for run in (run_dir, runs.shared))
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine | theirs)
    same_rows(run_dir, runs.shared)


def test_a_run_goes_on_with_one_rank_as_if_there_had_never_been_two(runs: Runs, inputs: Path, tmp_path: Path) -> None:
    run_dir = make(inputs, tmp_path / "fewer" / "run", runs.case)
    set_inputs(run_dir, until=3)
    train_together(run_dir)
    set_inputs(run_dir, until=0)
    train(run_dir)
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [0, 3]
    changed, straight = (recorded(run, "rollouts") for run in (run_dir, runs.alone))
    assert len(changed) == len(rows(run_dir, "rollouts")), "doubled"
    assert changed.keys() == straight.keys()
    for key in [key for key in straight if key[0] <= 4]:  # later policies follow from sums in another order
        assert [changed[key][name] for name in ("response", "reward", "policy_version")] == [
            straight[key][name] for name in ("response", "reward", "policy_version")
        ]


def test_all_ranks_say_why_their_engine_does_not_start(tmp_path: Path) -> None:
    make_inputs(tmp_path, head_dim=8)
    run_dir = make_run(
        tmp_path,
        tmp_path / "run",
        training={"ranks": 2},
        rollout={"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25, "ranks_per_engine": 2},
    )
    program = [sys.executable, "-m", "rpg.train", str(run_dir)]
    processes = [start(program, environment | {"LOCAL_SIZE": "2"}) for environment in group_of(2)]
    for output in [finish(process, expect=USER_ERROR) for process in processes]:
        assert "train: " in output
        assert "vLLM on a CPU has no attention for the model's head size" in output
        assert "Traceback" not in output
