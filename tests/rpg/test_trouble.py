"""Trouble in the middle of a run: its end, its message and cause, and the checkpoint to resume from."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from waiting import wait_for

from pipelines.launchers.local import local_command
from pipelines.running import failures
from rpg.data import metadata
from rpg.samplers.out_of_memory import SamplerOutOfMemoryError, memory_of_sampler
from rpg.samplers.vllm.dedicated import EngineProcessError
from specs.machine.exit_cause import RETRIED, cause_of
from specs.schema.rollout import Rollout, TransformersRollout, VllmRollout
from tests.rpg.rollouts.test_staleness import TRAINING, same_training, waiting
from tests.rpg.tiny_run import PROBLEMS, finish, free_port, make_run, rows, start
from tests.rpg.troubled_runs import LONG_SECONDS

pytestmark = pytest.mark.more

AHEAD = {"max_staleness": 2}
HANGS = {"0=": "for ever"}
NO_ROOM = (
    "the sampler ran out of memory; lower rollout.max_concurrent or training.microbatch_tokens:"
    " no room for the responses"
)
PACKAGES = Path(__file__).with_name("hanging_package")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """The package with the reward that hangs is installed here too, where specs are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGES))
        yield


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by the trouble that they met, and one that sampled ahead as they did and met none."""
    where = tmp_path_factory.mktemp("troubled")
    names = ("none", "failing", "stopped", "set_back")
    found = {name: make_run(inputs, where / name / "run", training=TRAINING, rollout=AHEAD) for name in names}
    found["stale"] = make_run(inputs, where / "stale/run", rollout={"engine": "vllm"})
    (found["stale"] / "cancel").touch()
    refilled = {"dynamic_sampling": {"max_batches": 2}}
    found["sleeping"] = make_run(
        inputs, where / "sleeping/run", training={"steps": 3, "group_size": 2}, rollout=refilled
    )
    found["hanging"] = hanging_run(inputs, where / "hanging", HANGS)
    found["raising"] = hanging_run(inputs, where / "raising", dict.fromkeys(PROBLEMS, "raises"))
    troubles = {name: (name,) for name in ("none", "set_back")} | {
        "failing": ("failing", "none"),
        "stopped": ("cancelled", "terminated", "none"),
        "stale": ("none", "stale"),
        "hanging": ("none",),
        "raising": ("none",),
        "sleeping": ("sleeping",),
    }
    starts = [f"{trouble}:{found[name]}" for name, met in troubles.items() for trouble in met]
    finish(start([sys.executable, "-m", "tests.rpg.troubled_runs", *starts], with_package()))
    return found


def ending(run_dir: Path, trouble: str) -> tuple[int, str]:
    """Returns the exit code of a run's start, and its output."""
    return int((run_dir / f"{trouble}.code").read_text()), (run_dir / f"{trouble}.txt").read_text()


def note(exits: Path, rank: int = 0) -> dict[str, Any]:
    """Returns a rank's record of its end."""
    return dict(json.loads((exits / f"rank-{rank:05}.json").read_text()))


def rows_of_attempt(run_dir: Path, attempt: int, table: str) -> list[dict[str, Any]]:
    """All that a start recorded."""
    files = sorted((run_dir / "segments" / table).glob(f"a{attempt:04}-*.parquet"))
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def hanging_run(inputs: Path, where: Path, hangs: dict[str, str], **training: Any) -> Path:
    """A run whose scorer hangs on the responses to some prompts, two to each."""
    table = pq.read_table(inputs / "data/train.parquet")
    (where / "data").mkdir(parents=True)
    (where / "pids").mkdir()
    (where / "base").symlink_to(inputs / "base")
    entries = [
        {"answer": row["answer"], "hangs": hangs.get(row["prompt"], ""), "pids": str(where / "pids")}
        for row in table.to_pylist()
    ]
    scored = [metadata.dump({"entry": entry}) for entry in entries]
    at = table.schema.get_field_index("metadata")
    pq.write_table(table.set_column(at, "metadata", pa.array(scored)), where / "data/train.parquet")
    return make_run(
        where,
        where / "run",
        reward={"type": "hangs", "timeout_seconds": 0.3},
        training={"steps": 2, "group_size": 2, **training},
    )


def with_package() -> dict[str, str]:
    """An environment in which the package with the reward that hangs is installed."""
    return {"PYTHONPATH": os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])}


def scorers(run_dir: Path) -> list[int]:
    """Ids of the scorer's processes so far."""
    return [int(path.name) for path in (run_dir.parent / "pids").iterdir()]


def test_a_reward_that_hangs_costs_its_responses_and_leaves_no_process(runs: dict[str, Path]) -> None:
    run_dir = runs["hanging"]
    assert ending(run_dir, "none")[0] == 0
    errors = {prompt: set() for prompt in HANGS}
    for row in (recorded := rows(run_dir, "rollouts")):
        if row["prompt"] in HANGS:
            errors[row["prompt"]].add((row["reward"], row["reward_error"]))
        else:
            assert row["reward_error"] is None
            assert row["reward"] == (row["response"][:1] == row["prompt"][:1])
    assert len(recorded) == 2 * 4 * 2
    assert {row["reward"] for row in recorded} == {0.0, 1.0}
    assert errors == {"0=": {(0.0, "no verdict after 0.3 s")}}
    failed = [row["message"] for row in rows(run_dir, "events") if row["kind"] == "reward_failed"]
    assert failed == ["2 of 8 responses: no verdict after 0.3 s"]
    assert scorers(run_dir)
    assert not any(map(psutil.pid_exists, scorers(run_dir)))


def test_a_reward_that_fails_on_the_first_step_ends_the_run_with_its_exception(runs: dict[str, Path]) -> None:
    run_dir = runs["raising"]
    code, said = ending(run_dir, "none")
    reward = PACKAGES / "rpg_hangs/__init__.py"
    line = reward.read_text().splitlines().index('            raise KeyError("no such entry")') + 1
    why = f"the reward failed on 8 of 8 responses: KeyError: 'no such entry' ({reward}:{line})"
    assert code == 1
    assert f"train: {why}\n" in said
    assert "Traceback" not in said
    assert note(run_dir / "none.exits") == {"cause": "reward_failed", "message": why, "microbatch_tokens": 0}
    assert rows(run_dir, "events")[-1]["message"] == why
    assert not list((run_dir / "checkpoints").glob("step-*"))


def test_a_reward_that_fails_on_some_responses_is_in_the_metrics_and_the_progress_line(runs: dict[str, Path]) -> None:
    shares = [row["value"] for row in rows(runs["hanging"], "metrics") if row["name"] == "reward/error_fraction"]
    assert sorted(shares) == [0.0, 0.25]
    assert "  not scored: 2 of 8 responses: no verdict after 0.3 s\n" in ending(runs["hanging"], "none")[1]


def test_a_reward_that_fails_ends_every_rank(inputs: Path, tmp_path: Path) -> None:
    run_dir = hanging_run(inputs, tmp_path / "raising", dict.fromkeys(PROBLEMS, "raises"), ranks=2)
    said = finish(start(local_command(run_dir, 2, free_port()), with_package()), expect=1, seconds=120)
    causes = [note(run_dir / "exits", rank)["cause"] for rank in range(2)]
    assert causes == ["reward_failed"] * 2
    assert failures.early_exit(1, said, run_dir, killed_for_memory=False).cause == "reward_failed"
    assert "reward_failed" not in RETRIED
    assert "reward_away" in RETRIED


def test_an_engine_sleeps_once_a_step_and_has_new_weights_before_it_samples_again(runs: dict[str, Path]) -> None:
    code, said = ending(runs["sleeping"], "sleeping")
    assert code == 0, said
    calls = [int(line) for line in (runs["sleeping"] / "slept").read_text().split()]
    assert len(calls) == 3 < calls[-1], "steps, and calls in which it sampled"


def test_what_goes_wrong_in_sampling_ahead_ends_the_run_with_its_own_words(runs: dict[str, Path]) -> None:
    code, said = ending(runs["failing"], "failing")
    noted = note(runs["failing"] / "failing.exits")
    assert code == 1
    assert f"train: {NO_ROOM}\n" in said
    assert "Traceback" not in said
    assert (noted["cause"], noted["message"]) == ("sampler_out_of_memory", NO_ROOM)


@pytest.mark.parametrize(
    ("rollout", "device", "keys"),
    [
        (TransformersRollout(), "cpu", "rollout.max_concurrent"),
        (TransformersRollout(max_staleness=1), "cuda", "rollout.max_concurrent or training.microbatch_tokens"),
        (VllmRollout(), "cpu", "rollout.max_concurrent or rollout.cpu_cache_gib"),
        (
            VllmRollout(placement="dedicated", max_staleness=1),
            "cuda",
            "rollout.max_concurrent or rollout.memory_fraction",
        ),
    ],
)
def test_a_sampler_out_of_memory_names_the_keys_of_its_engine(rollout: Rollout, device: str, keys: str) -> None:
    with pytest.raises(SamplerOutOfMemoryError) as raised, memory_of_sampler(rollout, torch.device(device)):
        raise EngineProcessError("the engine's process failed in generate:\nTraceback\nMemoryError: no room\n")
    assert str(raised.value) == f"the sampler ran out of memory; lower {keys}: MemoryError: no room"
    assert cause_of(RuntimeError(f"rank 1: SamplerOutOfMemoryError: {raised.value}")) == "sampler_out_of_memory"


def test_other_trouble_of_a_sampler_keeps_its_name() -> None:
    with pytest.raises(EngineProcessError, match="is gone"), memory_of_sampler(VllmRollout(), torch.device("cpu")):
        raise EngineProcessError("the process is gone")


def test_a_run_ends_once_a_batch_to_come_has_failed_and_goes_on_from_the_checkpoint_before(
    runs: dict[str, Path],
) -> None:
    """Batch 6 is sampled while step 4 trains; the checkpoint that is due after step 6 would need it."""
    first = {row["step"] for row in rows_of_attempt(runs["failing"], 1, "metrics")}
    assert first == {1, 2, 3, 4}, "the step meanwhile is on record"
    assert {row["step"] for row in rows_of_attempt(runs["failing"], 2, "metrics")} == {4, 5, 6, 7, 8}
    same_training(runs["failing"], runs["none"])


@pytest.mark.parametrize(("how", "step", "cause"), [("cancelled", 2, "stopped"), ("terminated", 6, "preempted")])
def test_a_run_stops_once_a_long_batch_that_is_sampled_ahead_is_there(
    runs: dict[str, Path], how: str, step: int, cause: str
) -> None:
    run_dir = runs["stopped"]
    assert ending(run_dir, how)[0] == 143
    assert f"stopped after step {step}, as requested; its state is saved" in ending(run_dir, how)[1]
    assert waiting(run_dir, step) == [step + 1, step + 2]
    taken = (run_dir / f"{how}.code").stat().st_mtime - (run_dir / f"{how}.met").stat().st_mtime
    assert LONG_SECONDS <= taken < LONG_SECONDS + 20
    assert note(run_dir / f"{how}.exits")["cause"] == cause


def test_a_run_that_was_stopped_over_a_batch_goes_on_as_if_it_was_not(runs: dict[str, Path]) -> None:
    assert ending(runs["stopped"], "none")[0] == 0
    same_training(runs["stopped"], runs["none"])


def test_a_run_is_set_back_to_its_newest_whole_checkpoint_and_comes_to_the_same_end(runs: dict[str, Path]) -> None:
    run_dir = runs["set_back"]
    before, not_found, found = json.loads((run_dir / "set_back.json").read_text())
    at_7 = {"step": 7, "updates": 14, "skipped_in_a_row": 0, "policy_version": 7, "loaded": 7}
    assert before == {**at_7, "checkpoints": [3, 6, 7], "recorded": [*range(1, 8)], "attempts": 1}
    assert not_found == {**before, "found": 0}
    at_3 = {"step": 3, "updates": 6, "skipped_in_a_row": 0, "policy_version": 3, "loaded": 3}
    assert found == {**at_3, "checkpoints": [3], "recorded": [1, 2, 3], "attempts": 2, "found": 3}
    broken = "step-000006 is broken (trainer.json has 2 bytes instead of "
    assert broken in ending(run_dir, "set_back")[1]
    same_training(run_dir, runs["none"])


def test_an_engine_that_is_stale_when_a_run_goes_on_ends_it_with_a_message(runs: dict[str, Path]) -> None:
    run_dir = runs["stale"]
    assert ending(run_dir, "none")[0] == 143
    code, said = ending(run_dir, "stale")
    assert code == 1
    assert "train: after load 1 the sampler does not hold the learner's weights: logprobs of the probe" in said
    assert "Traceback" not in said
    assert note(run_dir / "stale.exits")["message"] in said
    assert [(row["step"], row["kind"]) for row in rows(run_dir, "events")][-2:] == [(1, "resumed"), (1, "failed")]


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_goes_wrong_in_sampling_on_one_rank_ends_all(inputs: Path, tmp_path: Path, staleness: int) -> None:
    run_dir = make_run(inputs, tmp_path / "run", training={"ranks": 2}, rollout={"max_staleness": staleness})
    module = {"rpg.train": "tests.rpg.troubled_runs", str(run_dir): f"failing:{run_dir}"}
    command = [module.get(word, word) for word in local_command(run_dir, 2, free_port())]
    said = finish(start(command), expect=1, seconds=120)
    no_room = NO_ROOM if staleness else NO_ROOM.replace(" or training.microbatch_tokens", "")
    assert note(run_dir / "exits", rank=1)["message"] == no_room
    found = failures.early_exit(1, said, run_dir, killed_for_memory=False)
    assert found.cause == "sampler_out_of_memory"
    assert found.message == f"rank 1 could not make its share of the rollouts: SamplerOutOfMemoryError: {no_room}"
    assert max(row["step"] for row in rows(run_dir, "metrics")) == 5


@pytest.mark.long
def test_a_scorer_that_hears_no_signal_is_killed_and_the_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    run_dir = hanging_run(inputs, tmp_path / "deaf", {"0=": "deaf to signals"})
    finish(start([sys.executable, "-m", "rpg.train", str(run_dir)], with_package()))
    errors = [row["reward_error"] for row in rows(run_dir, "rollouts") if row["prompt"] == "0="]
    assert errors == ["no verdict after 0.3 s; the scorer was killed"] * 2
    assert len(scorers(run_dir)) > 2
    assert not any(map(psutil.pid_exists, scorers(run_dir)))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_ended_over_scorers_that_hang_leaves_none(
    inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = hanging_run(inputs, tmp_path / "ended", {"0=": "deaf to signals"})
    process = start([sys.executable, "-m", "rpg.train", str(run_dir)], with_package())
    wait_for(lambda: bool(scorers(run_dir)))
    process.send_signal(number)
    finish(process, expect=143 if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(map(psutil.pid_exists, scorers(run_dir))))
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-000001"] * (number == 15)
