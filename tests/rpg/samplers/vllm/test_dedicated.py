"""An engine in a process of its own: in a training run, when it goes stale, and when it ends."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from waiting import is_gone, wait_for

from rpg.samplers import open_sampler
from rpg.samplers.sampling_ranks import own_samplers
from rpg.samplers.vllm.dedicated import DedicatedSampler, EngineProcessError
from rpg.samplers.vllm.engine import EngineSettings
from rpg.samplers.vllm.opening import transfer_to_engines
from rpg.samplers.vllm.placement import engine_gpus
from rpg.samplers.vllm.sharing import GuestSampler
from specs.errors import SpecError
from specs.machine.exit_cause import cause_of
from specs.schema.rollout import VllmRollout
from tests.rpg.tiny_engine import (
    EOS,
    MAX_LENGTH,
    PROMPT,
    PROMPTS,
    every_rollout,
    fresh_logprobs,
    moved,
    on_cpu,
    open_engine,
    qwen3,
    sampling,
    save,
)
from tests.rpg.tiny_run import finish, listeners, make_inputs, make_run, rows, start

STALE_AFTER_STEP_3 = """
import pathlib, sys
from rpg import train
from rpg.samplers.vllm.weight_transfer import SafetensorsTransfer
whole = SafetensorsTransfer.send
def send(self, weights, policy_version):
    if policy_version == 3:  # the engine is told that it has new weights, and is given those that it had
        weights = self.before
    else:
        weights = self.before = [(name, weight.clone()) for name, weight in weights]
    whole(self, weights, policy_version)
SafetensorsTransfer.send = send
sys.exit(train.main(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.long
@pytest.mark.vllm
def test_a_run_trains_with_a_dedicated_engine_and_stops_at_the_step_at_which_it_is_stale(tmp_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    make_inputs(tmp_path, head_dim=32)
    run_dir = make_run(
        tmp_path,
        tmp_path / "run",
        training={"steps": 5, "optimizer": {"learning_rate": 0.03}, "schedule": {"type": "constant"}},
        rollout={"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25},
    )

    output = finish(start([sys.executable, "-c", STALE_AFTER_STEP_3, str(run_dir)]), expect=1)

    stale = (
        r"after load 3 the sampler does not hold the learner's weights: logprobs of the probe differ by [0-9.]+ nats"
    )
    assert re.search(stale + r", allowed 0\.05 \(rollout\.sentinel_tolerance\)", output), output
    assert "Traceback" not in output
    assert {(row["step"], row["policy_version"]) for row in rows(run_dir, "rollouts")} == {(1, 0), (2, 1)}
    tokens = rows(run_dir, "tokens")
    assert {row["step"] for row in tokens} == {1, 2}
    for row in tokens:
        assert abs(row["rollout_logprob"] - row["old_logprob"]) < 1e-3, "each step was sampled with the weights before"
    [failure] = [row for row in rows(run_dir, "events") if row["kind"] == "failed"]
    assert "does not hold the learner's weights" in failure["message"]


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    save(qwen3(), directory)
    return directory


@pytest.fixture
def engine(weights_dir: Path) -> Iterator[DedicatedSampler]:
    pytest.importorskip("vllm", exc_type=ImportError)
    sampler = open_engine("dedicated", weights_dir)
    assert isinstance(sampler, DedicatedSampler)
    yield sampler
    sampler.close()


@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.vllm
@pytest.mark.long
def test_an_engine_that_is_killed_fails_the_call_with_the_signal(engine: DedicatedSampler) -> None:
    engine.generate([PROMPT], group_size=1, sampling=sampling(), seeds=[1])
    child = psutil.Process(engine._processes[0].child.pid)
    assert {address for address, _ in listeners(child)} == {"127.0.0.1"}
    for number in (signal.SIGINT, signal.SIGTERM):  # these mean the trainer, which wants to end its step
        child.send_signal(number)
    engine.generate([PROMPT], group_size=1, sampling=sampling(), seeds=[1])

    child.suspend()  # so that it ends with a call that it has not read: the connection is then reset
    threading.Timer(0.5, child.kill).start()

    with pytest.raises(EngineProcessError, match="the engine's process ended by signal 9 in generate") as killed:
        engine.generate([PROMPT], group_size=1, sampling=sampling(), seeds=[1])
    assert cause_of(killed.value) == "other", "an engine ended, not a peer"
    with pytest.raises(EngineProcessError, match="ended by signal 9 in load_directory"):
        engine.load_weights(qwen3().named_parameters(), policy_version=1)


ORPHAN = """
import pathlib, sys
from tests.rpg.tiny_engine import open_engine
engine = open_engine("dedicated", pathlib.Path(sys.argv[1]))
print(engine._processes[0].child.pid, flush=True)
input()
"""


@pytest.mark.vllm
@pytest.mark.long
def test_the_engine_ends_with_a_trainer_that_is_killed(weights_dir: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    command = [sys.executable, "-c", ORPHAN, str(weights_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        child = psutil.Process(int(trainer.stdout.readline()))
        trainer.kill()
    wait_for(lambda: is_gone(child.pid), what="the engine's end")


@pytest.mark.vllm
@pytest.mark.long
def test_what_the_engine_refuses_is_raised_here(tmp_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    save(qwen3(head_dim=8), tmp_path)

    with pytest.raises(SpecError) as caught:
        open_engine("dedicated", tmp_path)

    [problem] = caught.value.issues
    assert (problem.path, problem.given) == (("rollout", "engine"), "head_dim 8")


@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.vllm
@pytest.mark.long
def test_weights_are_spread_over_two_processes_that_a_signal_to_stop_does_not_end_before_the_engine(
    weights_dir: Path,
) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    spec = {"engine": "vllm", "placement": "dedicated", "cpu_cache_gib": 0.25, "max_concurrent": 64}
    rollout = VllmRollout.model_validate(spec | {"tensor_parallel_size": 2})
    update = moved(qwen3())
    sampler = open_sampler(rollout, on_cpu(weights_dir))
    assert isinstance(sampler, DedicatedSampler)
    engine = psutil.Process(sampler._processes[0].child.pid)
    try:
        workers = [child for child in engine.children() if "resource_tracker" not in " ".join(child.cmdline())]
        assert len(workers) == 2
        assert {address for address, _ in listeners(engine)} == {"127.0.0.1"}
        for process in (engine, *workers):
            for number in (signal.SIGINT, signal.SIGTERM):
                process.send_signal(number)
        sampler.load_weights(update.named_parameters(), policy_version=1)
        groups = sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
        for worker in workers:
            worker.suspend()  # as one that waits in an exchange with another GPU: it cannot end by itself
        engine.kill()
        assert not psutil.wait_procs(workers, timeout=30)[1]
    finally:
        sampler.close()
    for prompt, drawn in every_rollout(groups):
        fresh = fresh_logprobs(update, prompt, drawn.response_ids, sampling())
        assert torch.tensor(drawn.rollout_logprobs).sub(fresh).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("fields", "environment", "expected"),
    [
        ({}, {}, ("1",)),
        ({}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, ("3",)),
        ({"tensor_parallel_size": 2}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, ("4", "5")),
        ({"engine_gpus": [7, 6]}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, ("6",)),
        ({"engine_gpus": [0]}, {}, ("0",)),
        ({}, {"RPG_GPUS": "GPU-a,GPU-b", "CUDA_VISIBLE_DEVICES": "GPU-a"}, ("GPU-b",)),
        ({"engine_gpus": [0]}, {"RPG_GPUS": "GPU-a", "CUDA_VISIBLE_DEVICES": "GPU-a"}, ("GPU-a",)),
        ({}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ("7",)),
        ({"ranks_per_engine": 4, "tensor_parallel_size": 2}, {"LOCAL_RANK": "4", "LOCAL_SIZE": "8"}, ("10", "11")),
        ({"ranks_per_engine": 4}, {"LOCAL_RANK": "5", "LOCAL_SIZE": "8"}, ()),
        ({"engines": 6}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, ("5", "6", "7")),
        ({"engines": 3, "tensor_parallel_size": 2}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, ("6", "7")),
        ({"engines": 2, "engine_gpus": [4, 7]}, {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, ("4", "7")),
        ({"ranks_per_engine": 2}, {"LOCAL_RANK": "2", "LOCAL_SIZE": "3"}, ("4",)),
    ],
)
def test_each_rank_has_the_gpus_of_its_engines(
    fields: dict[str, object], environment: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    place_rank(monkeypatch, environment)

    assert tuple(gpu for engine in engine_gpus(dedicated(**fields)).values() for gpu in engine) == expected


def place_rank(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Makes this process a rank of which the launcher says no more than this."""
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RPG_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def dedicated(**fields: object) -> VllmRollout:
    return VllmRollout.model_validate({"engine": "vllm", "placement": "dedicated", **fields})


def test_the_first_of_the_ranks_that_share_an_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place_rank(monkeypatch, {"LOCAL_SIZE": "5"})

    def holders(**fields: object) -> list[int]:
        held = []
        for rank in range(5):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            held += [rank] * len(own_samplers(dedicated(**fields)))
        return held

    assert holders(ranks_per_engine=2) == [0, 2, 4]
    assert holders(ranks_per_engine=8) == [0]
    assert holders() == [0, 1, 2, 3, 4]
    assert holders(engines=2) == [0, 2]
    assert holders(engines=7) == [0, 0, 1, 2, 2, 3, 4]


def test_a_guest_takes_part_until_a_stream_ends_and_samples_nothing(tmp_path: Path) -> None:
    guest = GuestSampler(EngineSettings(tmp_path, (EOS,), "cpu", MAX_LENGTH, max_concurrent=4))
    answers = iter([0, 4, 4, None])
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            gathered.append(name)
            yield name, torch.zeros(1)

    drawn: dict[str, object] = {"group_size": 2, "sampling": sampling(), "seeds": []}
    assert guest.stream([], admit=lambda: next(answers), on_response=None, **drawn) == 0
    assert next(answers, "all were asked for") == "all were asked for"
    assert guest.generate([], **drawn) == []
    guest.load_weights(weights(), policy_version=3)
    assert (gathered, guest.policy_version) == (["a", "b"], 3)


PAIRS = {"ranks_per_engine": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "nccl"),
        ({"engine_gpus": [0, 1, 2, 3]}, "ipc"),
        ({"engine_gpus": [1, 0, 3, 2]}, "nccl"),
        ({**PAIRS, "engine_gpus": [0, 1, 2, 3]}, "ipc"),
        ({**PAIRS, "engine_gpus": [2, 3, 0, 1]}, "nccl"),
        ({"ranks_per_engine": 2, "engine_gpus": [1, 2]}, "ipc"),
        ({"ranks_per_engine": 8}, "nccl"),
    ],
)
def test_an_engine_on_gpus_of_its_own_ranks_reads_their_memory(
    fields: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_rank(monkeypatch, {"LOCAL_RANK": "3", "LOCAL_SIZE": "4"})

    assert transfer_to_engines(dedicated(**fields)) == expected


@pytest.mark.parametrize("fields", [{"engine_gpus": [0, 1, 2, 7]}, {**PAIRS, "engine_gpus": [0, 4, 2, 3]}])
def test_engines_that_would_be_reached_in_two_ways_are_the_specs_mistake(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    place_rank(monkeypatch, {"LOCAL_RANK": "0", "LOCAL_SIZE": "4"})

    with pytest.raises(SpecError, match="mixes GPUs of the ranks that the engines serve with other GPUs") as caught:
        engine_gpus(dedicated(**fields))

    assert caught.value.issues[0].path == ("rollout", "engine_gpus")


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 0.4),
        ({"placement": "dedicated"}, 0.9),
        ({"placement": "dedicated", "engine_gpus": [0]}, 0.4),
        ({"placement": "dedicated", "memory_fraction": 0.5}, 0.5),
    ],
)
def test_an_engine_takes_nearly_all_of_a_gpu_that_no_learner_needs(fields: dict[str, object], share: float) -> None:
    assert VllmRollout.model_validate({"engine": "vllm", **fields}).memory_share == share


def test_too_few_gpus_are_the_specs_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "2")
    rollout = VllmRollout(engine="vllm", placement="dedicated", engine_gpus=(2,))

    with pytest.raises(SpecError, match="too few GPUs for the engines") as caught:
        engine_gpus(rollout)

    assert caught.value.issues[0].given == "1 GPUs for 2 engines of 1"
