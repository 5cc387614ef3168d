"""The vLLM engine: its traps, and the state of a shared process that it must not change."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rpg.samplers.sentinel import LogprobsFn, Probe, Sentinel, StaleEngineError
from rpg.samplers.transformers.sampler import model_logprobs
from rpg.samplers.vllm.sampler import VllmSampler
from specs.errors import SpecError
from tests.rpg.tiny_engine import EOS, every_rollout, fresh_logprobs, moved, open_engine, qwen3, sampling
from tests.rpg.tiny_run import group_of

PROBE = Probe(token_ids=(5, 7, 3, 4, 9, 2, EOS), prompt_length=1)
LONG_PROMPT = [2 + i * i % 10 for i in range(200)]
"""Longer than a block of vLLM's prefix cache, which on a CPU holds 128 positions."""


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    qwen3().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(weights_dir: Path) -> Iterator[VllmSampler]:
    pytest.importorskip("vllm", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "1")  # a user's, with which vLLM does not start
        sampler = open_engine("vllm", weights_dir, max_length=240)
        assert isinstance(sampler, VllmSampler)
        yield sampler
        sampler.close()


def learner_of(model: PreTrainedModel) -> LogprobsFn:
    def logprobs(token_ids: Sequence[int], prompt_length: int) -> list[float]:
        return model_logprobs(model, token_ids, prompt_length=prompt_length)

    return logprobs


@pytest.mark.more
@pytest.mark.vllm
def test_vllms_own_reload_leaves_the_head_stale_and_the_sentinel_says_so(engine: VllmSampler) -> None:
    learner = moved(qwen3())

    engine._reload(learner.named_parameters())

    with pytest.raises(StaleEngineError, match=r"differ by [0-9.]+ nats"):
        Sentinel(PROBE, tolerance=0.05).check(engine, learner_of(learner))
    engine.load_weights(learner.named_parameters(), policy_version=1)
    assert Sentinel(PROBE, tolerance=0.05).check(engine, learner_of(learner)) < 1e-5


@pytest.mark.vllm
def test_a_learner_that_went_on_alone_is_noticed(engine: VllmSampler) -> None:
    engine.load_weights(qwen3().named_parameters(), policy_version=1)

    with pytest.raises(StaleEngineError):
        Sentinel(PROBE, tolerance=0.05).check(engine, learner_of(moved(qwen3())))


@pytest.mark.vllm
def test_a_prompt_cached_under_old_weights_is_computed_again(engine: VllmSampler) -> None:
    engine.load_weights(qwen3().named_parameters(), policy_version=1)
    engine.generate([LONG_PROMPT], group_size=2, sampling=sampling(), seeds=[1])
    learner = moved(qwen3())

    engine.load_weights(learner.named_parameters(), policy_version=2)

    groups = engine.generate([LONG_PROMPT], group_size=2, sampling=sampling(), seeds=[1])
    for prompt, rollout in every_rollout(groups):
        fresh = fresh_logprobs(learner, prompt, rollout.response_ids, sampling())
        assert torch.tensor(rollout.rollout_logprobs).sub(fresh).abs().max() < 1e-4


@pytest.mark.vllm
def test_the_process_keeps_its_random_states_and_its_threads(engine: VllmSampler) -> None:
    weights = list(qwen3().named_parameters())
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python, numpy, torch_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    engine.generate([[5, 6, 7]], group_size=2, sampling=sampling(), seeds=[1])
    engine.load_weights(weights, policy_version=3)

    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.set_num_threads is set_num_threads
    assert "skip" not in set_num_threads.__name__
    assert torch.get_num_threads() == threads


@pytest.mark.vllm
def test_an_engine_starts_whatever_the_users_shell_says_of_split_groups(engine: VllmSampler) -> None:
    assert os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] == "0"
    assert engine.generate([[5, 7]], group_size=1, sampling=sampling(2), seeds=[3])


@pytest.mark.vllm
def test_a_temperature_for_given_tokens_is_refused(engine: VllmSampler) -> None:
    with pytest.raises(ValueError, match=r"only at temperature 1, not 0\.5"):
        engine.logprobs([5, 6, 7], prompt_length=1, temperature=0.5)


def test_without_vllm_the_spec_is_told_what_to_install(weights_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specs.schema.rollout.find_spec", lambda _: None)

    with pytest.raises(SpecError) as caught:
        open_engine("vllm", weights_dir)

    [problem] = caught.value.issues
    assert problem.path == ("rollout", "engine")
    assert problem.message == "vLLM is not installed"
    assert "rpg-experiments[vllm]" in problem.hint


@pytest.mark.vllm
def test_a_model_that_vllm_does_not_run_is_the_specs_mistake(tmp_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    qwen3(head_dim=8).save_pretrained(tmp_path / "small_heads")
    qwen3().save_pretrained(tmp_path / "short_context")

    with pytest.raises(SpecError) as head_size:
        open_engine("vllm", tmp_path / "small_heads")
    with pytest.raises(SpecError) as context:
        open_engine("vllm", tmp_path / "short_context", max_length=2000)

    [problem] = head_size.value.issues
    assert (problem.path, problem.given) == (("rollout", "engine"), "head_dim 8")
    assert problem.message == "vLLM on a CPU has no attention for the model's head size"
    [problem] = context.value.issues
    assert problem.path == ("rollout",)
    assert problem.message == "vLLM does not start with this model and these settings"
    assert "User-specified max_model_len (2000) is greater" in problem.hint


RANK = """
import sys, pathlib, torch
from rpg.processes import ranks
ranks.join("cpu")
from tests.rpg.tiny_engine import every_rollout, open_engine, sampling
rank = torch.distributed.get_rank()
engine = open_engine("vllm", pathlib.Path(sys.argv[1]))
groups = engine.generate([[5 + rank, 7]] * (1 + rank), group_size=2, sampling=sampling(8), seeds=[3, 4][: 1 + rank])
engine.close()
total = torch.tensor([float(sum(len(r.response_ids) for _, r in every_rollout(groups)))])
torch.distributed.all_reduce(total)
assert len(groups) == 1 + rank and total.item() > 6
print("rank done")
"""


@pytest.mark.vllm
@pytest.mark.long
def test_two_ranks_have_an_engine_each_and_keep_their_process_group(weights_dir: Path) -> None:
    command = [sys.executable, "-c", RANK, str(weights_dir)]
    ranks = [
        subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        for environment in group_of(2)
    ]
    try:
        assert [process.communicate(timeout=240)[0].splitlines()[-1] for process in ranks] == ["rank done"] * 2
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.more
@pytest.mark.vllm
def test_an_engine_that_slept_wakes_its_weights_alone_for_new_ones_and_whole_to_sample(
    engine: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int | list[str] | None] = []
    monkeypatch.setattr(engine._llm, "sleep", lambda level: said.append(level))  # a CPU has no sleep
    monkeypatch.setattr(engine._llm, "wake_up", lambda tags=None: said.append(tags))
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, sleeps=True))

    def sample() -> None:
        engine.generate([[5, 7, 3]], group_size=1, sampling=sampling(4), seeds=[1])

    sample()
    sample()
    assert not said, "a step may call it several times"
    engine.sleep()
    assert said == [2]
    with pytest.raises(RuntimeError, match="has received no weights since"):
        sample()
    engine.load_weights(qwen3().named_parameters(), policy_version=engine.policy_version + 1)
    assert said == [2, ["weights"]]
    sample()
    assert said == [2, ["weights"], None]
