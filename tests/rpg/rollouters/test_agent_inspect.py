"""A solver of Inspect, in an environment of its own, trains over the endpoint as it is.

RPG_INSPECT_PYTHON names the interpreter of an environment with `inspect_ai` and `openai`.
"""

import os
import re
from pathlib import Path

import pytest
from places import ROOT

from tests.rpg.rollouters.agent_elsewhere import rollouter
from tests.rpg.tiny_run import make_run, rows, train

PYTHON = os.environ.get("RPG_INSPECT_PYTHON", "")


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="RPG_INSPECT_PYTHON names no interpreter with inspect_ai")
def test_a_solver_of_inspect_trains_over_the_endpoint(inputs: Path, tmp_path: Path) -> None:
    page = re.search(r"## Solvers of Inspect.*?```python\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert page
    (tmp_path / "task.py").write_text(page[1])
    run = make_run(
        inputs,
        tmp_path / "run",
        rollout={
            "rollouter": rollouter(PYTHON, tmp_path / "task.py", turn_tokens=4),
            "max_response_length": 20,
        },
        training={"steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatches": 1},
    )
    train(run)
    turns = rows(run, "turns")
    assert {turn["error"] for turn in turns} == {None}
    for rollout in rows(run, "rollouts"):
        own = [turn for turn in turns if turn["rollout_id"] == rollout["rollout_id"]]
        assert [turn["sampled"] for turn in own] == [True, False, True]
        assert "0=" in own[1]["text"]
        assert not any(turn["restart"] for turn in own), "the history goes on"
