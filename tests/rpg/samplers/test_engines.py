"""Several engines of a rank: they sample the tokens of a single one, all get new weights, and a stale one is caught."""

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rpg.samplers.sentinel import Probe, Sentinel, StaleEngineError
from rpg.samplers.transformers.engine import EngineSampler
from rpg.samplers.transformers.sampler import TransformersSampler, model_logprobs
from rpg.samplers.vllm import engine_process
from rpg.samplers.vllm.dedicated import DedicatedSampler, EngineProcessError
from rpg.types import Rollout
from tests.rpg.tiny_engine import EOS, MAX_LENGTH, PAD, PROMPT, PROMPTS, every_rollout, moved, qwen3, sampling, save
from tests.rpg.tiny_run import STEADY, make_inputs, make_run, rows, train

ONE_AT_A_TIME = threading.Lock()
PROBE = Probe(tuple(PROMPTS[4]), prompt_length=1)


@dataclass
class Opens:
    """Settings of engines that are opened in threads of this process."""

    weights_dir: Path
    max_length: int = MAX_LENGTH
    device_type: str = "cpu"
    transfer: str = ""

    sampler: str = f"{__name__}:opened"


def opened(_: Opens) -> EngineSampler:
    with ONE_AT_A_TIME:  # the weights are drawn from the process's generator
        model = qwen3()
    return EngineSampler(model, eos_id=EOS, pad_id=PAD, max_concurrent=8, max_length=MAX_LENGTH)


class InThread:
    """An engine's process, played by a thread."""

    sender_address = ""

    def __init__(self) -> None:
        self.connection, self.there = multiprocessing.Pipe()
        self.thread = threading.Thread(target=engine_process.serve, args=(self.there,), daemon=True)
        self.thread.start()

    def has_ended(self) -> bool:
        return False

    def end_error(self, method: str) -> EngineProcessError:
        return EngineProcessError(f"ended in {method}")

    def close(self) -> None:
        self.connection.close()
        self.thread.join(30)


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    save(qwen3(), directory)
    return directory


@pytest.fixture
def three(weights_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DedicatedSampler]:
    monkeypatch.setattr(engine_process.os, "_exit", lambda _: None)
    settings: Any = Opens(weights_dir)
    sampler = DedicatedSampler(settings, [InThread() for _ in range(3)])
    yield sampler
    sampler.close()


def one(model: PreTrainedModel) -> TransformersSampler:
    return TransformersSampler(model, eos_id=EOS, pad_id=PAD, max_concurrent=8, max_length=MAX_LENGTH)


def test_three_engines_sample_what_one_would_in_the_order_of_the_prompts(three: DedicatedSampler) -> None:
    drawn: dict[str, Any] = {"group_size": 3, "sampling": sampling(16), "seeds": range(5)}
    told: dict[int, Rollout] = {}
    groups = three.generate(PROMPTS, **drawn, on_response=told.__setitem__)
    alone = one(qwen3()).generate(PROMPTS, **drawn)
    for mine, theirs in zip(every_rollout(groups), every_rollout(alone), strict=True):
        assert (mine[0], mine[1].response_ids) == (theirs[0], theirs[1].response_ids)
        assert mine[1].rollout_logprobs == pytest.approx(theirs[1].rollout_logprobs, abs=1e-5)
    assert [told[index] for index in range(15)] == [rollout for _, rollout in every_rollout(groups)]


def test_new_weights_reach_every_engine_and_one_that_kept_old_ones_is_caught(
    three: DedicatedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, sentinel = moved(qwen3()), Sentinel(PROBE, tolerance=1e-3)

    def learner(token_ids: Any, prompt_length: int) -> list[float]:
        return model_logprobs(update, token_ids, prompt_length=prompt_length)

    three.load_weights(update.named_parameters(), policy_version=1)
    assert sentinel.check(three, learner) < 1e-4
    loads, load = iter([True, False, True]), EngineSampler.load_directory

    def skipped(self: EngineSampler, weights_dir: str, *, policy_version: int) -> None:
        if next(loads):
            load(self, weights_dir, policy_version=policy_version)

    monkeypatch.setattr(EngineSampler, "load_directory", skipped)
    update = moved(update)
    three.load_weights(update.named_parameters(), policy_version=2)
    with pytest.raises(StaleEngineError, match="does not hold the learner's weights"):
        sentinel.check(three, learner)


def test_what_an_engine_refuses_leaves_all_ready_for_the_next_call(three: DedicatedSampler) -> None:
    with pytest.raises(ValueError, match="prompt 3 has 0 tokens"):
        three.generate([PROMPT, PROMPT, PROMPT, []], group_size=1, sampling=sampling(2), seeds=range(4))
    assert len(three.generate([PROMPT], group_size=1, sampling=sampling(2), seeds=[0])) == 1


@pytest.mark.more
def test_the_tokens_of_a_run_do_not_depend_on_the_number_of_engines(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    runs = {}
    for engines, ranks in ((0, 1), (1, 1), (3, 1), (3, 2), (1, 2)):
        runs[engines, ranks] = make_run(
            tmp_path,
            tmp_path / f"engines-{engines}-{ranks}" / "run",
            training={"steps": 3, "ranks": ranks, "optimizer": STEADY},
            rollout={"engines": engines},
        )
        train(runs[engines, ranks], ranks=ranks)
    plain = rows(runs.pop((0, 1)), "rollouts")
    assert len(plain) == 3 * 4 * 8
    for number, run in runs.items():
        sampled = {row["rollout_id"]: (row["response"], row["policy_version"]) for row in rows(run, "rollouts")}
        assert sampled == {row["rollout_id"]: (row["response"], row["policy_version"]) for row in plain}, number
        names = {row["name"] for row in rows(run, "metrics")}
        assert "sentinel/difference" in names
