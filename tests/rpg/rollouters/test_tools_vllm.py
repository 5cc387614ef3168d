"""Training with a tool beside a vLLM engine: the context of a turn, and repeated samples."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rpg.rollouters.test_tools_trained import TOOLS, logprobs_behind_all_before, tokens_of
from tests.rpg.tiny_run import make_inputs, make_run, rows, train

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.mark.long
def test_turns_are_sampled_by_vllm_behind_all_that_stands_before_them_and_again_the_same(tmp_path: Path) -> None:
    make_inputs(tmp_path, head_dim=32)
    changes = {"rollout": {**TOOLS, "engine": "vllm"}, "training": {"steps": 2}}
    first, again = (make_run(tmp_path, tmp_path / name, **changes) for name in ("first", "again"))
    train(first)
    train(again)
    for row in rows(first, "tokens"):
        if row["sampled"]:
            assert abs(row["rollout_logprob"] - row["old_logprob"]) < 1e-3
    assert logprobs_behind_all_before(first, tmp_path / "base", tolerance=1e-3) > 10
    assert {(row["step"], row["policy_version"]) for row in rows(first, "rollouts")} == {(1, 0), (2, 1)}
    for step in (1, 2):
        assert tokens_of(first, step) == tokens_of(again, step)
        assert any(not sampled for *_, sampled in tokens_of(first, step))
