"""A taskset and a harness of `verifiers`, in an environment of its own, train over the endpoint as they are.

RPG_VERIFIERS_PYTHON names the interpreter of an environment with `verifiers` 0.4 and `uv`.
"""

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import ROOT

from tests.rpg.tiny_run import make_inputs, make_run, rows, train

PYTHON = os.environ.get("RPG_VERIFIERS_PYTHON", "")
TASKSETS = Path(__file__).with_name("verifiers_taskset")


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="RPG_VERIFIERS_PYTHON names no interpreter with verifiers")
def test_a_taskset_of_verifiers_trains_over_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = re.search(r"```python\n(import json\n.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert page
    program = tmp_path / "task.py"
    program.write_text(page[1].replace("sums_taskset", "bits_taskset"))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    make_inputs(tmp_path)
    tasks = [
        {"problem_id": f"p{task}", "prompt": f"{task:02b}=", "answer": "1.0", "dataset": "train", "metadata": metadata}
        for task in range(4)
        for metadata in [f'{{"task": {task}}}']
    ]
    pq.write_table(pa.Table.from_pylist(tasks), tmp_path / "data/train.parquet")
    rollouter: dict[str, Any] = {
        "type": "agent",
        "program": {
            "type": "command",
            "command": [PYTHON, "{file}"],
            "file": str(program),
            "sealed": False,
            "environment": ["SSL_CERT_FILE"],  # with which uv fetches what the harness needs
        },
        "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "answer": "returned",
        "programs_at_once": 2,
    }
    run = make_run(
        tmp_path,
        tmp_path / "run",
        rollout={"rollouter": rollouter, "max_response_length": 8},
        training={"steps": 1, "prompts_per_step": 4, "group_size": 2, "minibatches": 1},
    )
    train(run)
    answers = {row["rollout_id"]: row for row in rows(run, "rollouts")}
    turns = rows(run, "turns")
    assert len(answers) == 8
    assert {turn["error"] for turn in turns} == {None}
    assert all(turn["sampled"] for turn in turns), "the harness asks what the prompt asks"
    for turn in turns:
        said = turn["text"].replace("<eos>", "").replace("<pad>", "").strip()[:1]
        asked = answers[turn["rollout_id"]]
        assert asked["reward"] == float(said == asked["prompt"][0])
