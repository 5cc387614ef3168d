"""Tasksets and a harness of `verifiers`, in an environment of its own, train over the endpoint as they are.

RPG_VERIFIERS_PYTHON names the interpreter of an environment with `verifiers[ta]` 0.4 and `uv`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from places import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpg.base.tokenization import make_tokenizer
from specs.schema.model import ByteTokenizer
from tests.rpg.rollouters.agent_elsewhere import rollouter
from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start, train

PYTHON = os.environ.get("RPG_VERIFIERS_PYTHON", "")
UV = ("SSL_CERT_FILE",)
"""Variables with which uv fetches the harness's packages."""
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
        {
            "problem_id": f"p{task}",
            "prompt": f"{task:02b}=",
            "answer": "1.0",
            "dataset": "train",
            "metadata": f'{{"task": {task}}}',
            "shown": ["task"],
        }
        for task in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(tasks), tmp_path / "data/train.parquet")
    section = rollouter(PYTHON, program, environment=UV)
    run = make_run(
        tmp_path,
        tmp_path / "run",
        rollout={"rollouter": section, "max_response_length": 8},
        training={"steps": 1, "prompts_per_step": 4, "group_size": 2, "minibatches": 1},
    )
    train(run)
    answers = {row["rollout_id"]: row for row in rows(run, "rollouts")}
    turns = rows(run, "turns")
    assert len(answers) == 8
    assert {turn["error"] for turn in turns} == {None}
    assert all(turn["sampled"] for turn in turns), "the harness asks the prompt's question"
    for turn in turns:
        said = turn["text"].replace("<eos>", "").replace("<pad>", "").strip()[:1]
        asked = answers[turn["rollout_id"]]
        assert asked["reward"] == float(said == asked["prompt"][0])


GAME = """
[env.taskset]
id = "textarena"
game = "Hangman-v0"
[env.player.harness]
id = "null"
[env.player.runtime]
type = "subprocess"
"""
"""Hangman, a taskset that comes with `verifiers`: an engine plays the user."""

WORDS = """
import importlib.util, re, sys
from pathlib import Path

folder = Path(importlib.util.find_spec("textarena").origin).parent / "envs/utils/data"
spelled = (line.partition("/")[0] for line in (folder / "en_US.dic").read_text(errors="replace").splitlines())
words = "\\n".join(word for word in spelled if re.fullmatch("[a-z]{4,6}", word))
for name in ("en", "en-basic"):
    Path(sys.argv[1], name).write_text(words)
"""
"""Lists of words as nltk has them, from those that textarena ships: what it would fetch is not needed."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PYTHON, reason="RPG_VERIFIERS_PYTHON names no interpreter with verifiers")
def test_a_game_that_comes_with_verifiers_is_played_over_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "nltk/corpora/words"
    lists.mkdir(parents=True)
    subprocess.run([PYTHON, "-c", WORDS, str(lists)], check=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    (tmp_path / "game.toml").write_text(GAME)
    page = re.search(r"```python\n(import json\n.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert page
    named = re.sub(r'\*\("--env.agent.*\n', "", page[1]).replace(
        '"sums_taskset"', f'"@", {str(tmp_path / "game.toml")!r}'
    )
    assert "--env" not in named
    (tmp_path / "task.py").write_text(named)
    make_talker(tmp_path)
    section = rollouter(PYTHON, tmp_path / "task.py", environment=(*UV, "NLTK_DATA"), turn_tokens=4, max_turns=20)
    run = make_run(
        tmp_path,
        tmp_path / "run",
        rollout={"rollouter": section, "max_response_length": 6000},
        training={"steps": 1, "prompts_per_step": 1, "group_size": 2, "minibatches": 1, "microbatch_tokens": 8000},
    )
    finish(start([sys.executable, "-m", "rpg.train", str(run)]), seconds=1200)
    turns = rows(run, "turns")
    assert {turn["error"] for turn in turns} == {None}
    for rollout in rows(run, "rollouts"):
        own = [turn for turn in turns if turn["rollout_id"] == rollout["rollout_id"]]
        assert "You are playing Hangman" in own[0]["text"]
        assert sum(turn["sampled"] for turn in own) > 1, "the engine answers a move"
        assert rollout["reward_error"] is None


def make_talker(directory: Path) -> None:
    """Fills `base` with a model of bytes that has room for the rules of a game, and `data` with one task."""
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    tokenizer.save_pretrained(directory / "base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **ends)).save_pretrained(
        directory / "base"
    )
    task = {
        "problem_id": "p",
        "prompt": "play",
        "answer": "1.0",
        "dataset": "train",
        "metadata": json.dumps({"task": 3}),
        "shown": ["task"],
    }
    (directory / "data").mkdir()
    pq.write_table(pa.Table.from_pylist([task]), directory / "data/train.parquet")
