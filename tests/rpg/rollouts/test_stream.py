"""Dynamic sampling as a stream: it keeps the groups that rounds keep, whatever ends first, and resumes exactly."""

import math
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.launchers.local import local_command
from rpg.rollouters import OnResponse, Rollout, Rollouter, RolloutGroup, Sampling, SeededPrompt
from rpg.rollouts.stream import Admission
from rpg.types import Problem, Turn
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.rollouts.test_refill import refill, sampling_from
from tests.rpg.tiny_run import finish, free_port, make_inputs, make_run, rows, start, train

STEPS = 8
KILLED_AFTER = 5
"""A step whose end proves that a checkpoint is there: the one of step 4 is begun when that of step 2 is done."""
LENGTHS = {"max_response_length": 24}
"""Longer than the decoding steps between two admissions, so that groups begin while others are under way."""
TRAINING: dict[str, Any] = {"steps": STEPS, "group_size": 4, "checkpoint": {"every_steps": 2, "keep_last": 9}}


def streaming(**more: Any) -> dict[str, Any]:
    return {**LENGTHS, "dynamic_sampling": {"max_batches": 4, "refill": "stream"}, **more}


def new_run(inputs: Path, where: Path, **rollout: Any) -> Path:
    return make_run(inputs, where, training=TRAINING, rollout={**LENGTHS, **rollout})


@settings(max_examples=200, deadline=None)
@given(
    stream=st.lists(st.booleans(), min_size=40, max_size=40),
    groups=st.integers(1, 5),
    rounds=st.integers(2, 5),
    oversampling=st.sampled_from([1.0, 1.5, 2.0, 8.0]),
    luck=st.randoms(use_true_random=False),
)
def test_a_stream_takes_the_prompts_that_rounds_take_in_whatever_order_they_end(
    stream: list[bool], groups: int, rounds: int, oversampling: float, luck: random.Random
) -> None:
    calls: list[tuple[int, int]] = []
    refill(sampling_from(stream, calls), groups=groups, max_batches=rounds)
    admission = Admission(groups=groups, max_batches=rounds, oversampling=oversampling)
    begun, ended = admission.judge({}), 0
    under_way: set[int] = set()
    while begun is not None:
        under_way |= set(range(len(under_way) + ended, begun))
        assert len(under_way) <= math.ceil(oversampling * groups)
        assert under_way, "the stream waits for nothing"
        ending = luck.sample(sorted(under_way), luck.randint(1, len(under_way)))
        under_way -= set(ending)
        ended += len(ending)
        begun = admission.judge({place: stream[place] for place in ending})
    assert admission.needed == sum(calls[-1])


def test_a_group_begins_only_in_the_place_of_another_without_oversampling() -> None:
    admission = Admission(groups=3, max_batches=9, oversampling=1)
    assert admission.judge({}) == 3
    assert admission.judge({2: True, 0: True}) == 3
    assert admission.judge({1: False}) == 4
    assert admission.judge({3: False}) == 5
    assert admission.judge({4: True}) is None
    assert admission.needed == 5


def test_a_straggler_before_the_last_group_is_waited_for_and_one_behind_it_is_not() -> None:
    admission = Admission(groups=2, max_batches=9, oversampling=2)
    assert admission.judge({}) == 4
    assert admission.judge({1: True, 2: True}) == 4, "prompt 0 may vary too, and comes first"
    assert admission.judge({0: False}) is None, "prompt 3 is not needed"
    assert admission.needed == 3


class Twice(Rollouter):
    """An environment that knows nothing of streams: each response is the prompt twice."""

    def generate(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: Any,  # noqa: ARG002
        tokenizer: Any,  # noqa: ARG002
        *,
        group_size: int,
        sampling: Sampling,  # noqa: ARG002
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        groups = []
        for index, prompt in enumerate(prompts):
            rollout = Rollout((Turn(prompt.token_ids * 2, (0.0,) * 2 * len(prompt.token_ids)),), "stop")
            groups.append(RolloutGroup(prompt.token_ids, (rollout,) * group_size, 0))
            for member in range(group_size if on_response and prompt.seed != 13 else 0):
                cast("OnResponse", on_response)(index * group_size + member, rollout)
        return groups


def stream_twice(admissions: list[int | None], seeds: Sequence[int]) -> dict[int, Rollout]:
    told: dict[int, Rollout] = {}
    prompts = [SeededPrompt(Problem(f"p{seed}", "", "", "train"), (seed,), seed) for seed in seeds]
    answers = iter(admissions)
    tokens = Twice(type="twice").stream(
        prompts,
        cast("Any", None),
        cast("Any", None),
        group_size=2,
        sampling=Sampling(1.0, 1.0, 8),
        admit=lambda: next(answers),
        on_response=told.__setitem__,
    )
    assert tokens == 0
    return told


def test_an_environment_that_knows_nothing_of_streams_samples_what_is_admitted_call_by_call() -> None:
    told = stream_twice([2, 2, 3, None], seeds=[5, 6, 7, 8])
    assert {index: rollout.response_ids for index, rollout in told.items()} == {
        index: ([5, 6, 7][index // 2],) * 2 for index in range(6)
    }


def test_an_environment_that_does_not_tell_of_a_response_is_told_which() -> None:
    with pytest.raises(ValueError, match="the rollouter did not call on_response for response 4"):
        stream_twice([2, 4, None], seeds=[5, 6, 13, 8])


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uninterrupted runs: in rounds, and as streams by their staleness."""
    where = tmp_path_factory.mktemp("whole")
    runs = {
        "rounds": new_run(inputs, where / "rounds" / "run", dynamic_sampling={"max_batches": 4}),
        "0": new_run(inputs, where / "0" / "run", **streaming()),
        "1": new_run(inputs, where / "1" / "run", **streaming(max_staleness=1)),
    }
    for run_dir in runs.values():
        train(run_dir)
    return runs


def sampled(run_dir: Path) -> list[tuple[Any, ...]]:
    fields = ("step", "rollout_id", "group_id", "prompt_id", "response", "reward")
    return sorted(tuple(row[field] for field in fields) for row in rows(run_dir, "rollouts"))


def figures(run_dir: Path) -> dict[tuple[int, str], float]:
    return {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}


@pytest.mark.more
def test_a_run_that_streams_trains_on_the_groups_of_one_in_rounds(whole: dict[str, Path]) -> None:
    assert sampled(whole["0"]) == sampled(whole["rounds"])
    rounds, stream = figures(whole["rounds"]), figures(whole["0"])
    counted = [key for key in rounds if key[1].startswith("dynamic_sampling/") and "surplus" not in key[1]]
    assert len(counted) == 5 * STEPS
    assert all(rounds[key] == stream[key] for key in counted)
    surplus = "dynamic_sampling/surplus_tokens"
    assert all(rounds[step, surplus] == 0 for step in range(1, STEPS + 1))
    assert any(stream[step, surplus] > 0 for step in range(1, STEPS + 1))
    taken = Counter(rounds[step, "dynamic_sampling/batches"] for step in range(1, STEPS + 1))
    assert max(taken) > 1, "groups were replaced"


@pytest.mark.long
def test_killed_streams_that_go_on_are_the_uninterrupted_ones_bit_for_bit(
    inputs: Path, tmp_path: Path, whole: dict[str, Path]
) -> None:
    killed = {
        staleness: new_run(inputs, tmp_path / staleness / "run", **streaming(max_staleness=int(staleness)))
        for staleness in ("0", "1")
    }
    for run_dir in killed.values():
        kill(run_dir)
    for staleness, run_dir in killed.items():
        train(run_dir)
        assert len(list((run_dir / "attempts").glob("*.json"))) == 2
        same_end(run_dir, whole[staleness])


def kill(run_dir: Path) -> None:
    process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
    wait_for_step(process, run_dir, KILLED_AFTER, saved=True)
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)


def same_end(run_dir: Path, other: Path) -> None:
    """Final weights and optimizer, and every row, are equal in every bit."""
    from safetensors.numpy import load_file

    state = Path("checkpoints") / f"step-{STEPS:06}" / "learner-rank00000.safetensors"
    mine, theirs = (load_file(run / state) for run in (run_dir, other))
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine | theirs)
    same_rows(run_dir, other)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("engine", [{"max_staleness": 0}, {"max_staleness": 1}, {"placement": "dedicated"}], ids=str)
def test_a_killed_stream_with_vllm_goes_on_bit_for_bit(tmp_path: Path, engine: dict[str, Any]) -> None:
    make_inputs(tmp_path, head_dim=32)
    rollout = streaming(engine="vllm", cpu_cache_gib=0.25, **engine)
    straight, killed = (new_run(tmp_path, tmp_path / name / "run", **rollout) for name in ("straight", "killed"))
    train(straight)
    kill(killed)
    train(killed)
    same_end(killed, straight)


@pytest.mark.long
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_two_ranks_stream_the_groups_of_one(
    inputs: Path, tmp_path: Path, whole: dict[str, Path], staleness: str
) -> None:
    training = {**TRAINING, "steps": 1, "ranks": 2}
    run_dir = make_run(
        inputs, tmp_path / "two" / "run", training=training, rollout=streaming(max_staleness=int(staleness))
    )
    finish(start(local_command(run_dir, 2, free_port()), {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}))
    assert sampled(run_dir) == [row for row in sampled(whole[staleness]) if row[0] == 1]
    one, two = figures(whole[staleness]), figures(run_dir)
    names = [name for step, name in one if step == 1 and name.startswith("dynamic_sampling/")]
    assert len(names) == 6
    assert all(one[1, name] == two[1, name] for name in names)
