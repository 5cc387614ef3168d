"""The look at data and model in a fork."""

import json
from pathlib import Path

import pytest

from pipelines.processes import forking
from pipelines.running.look import look_in_fork
from rpg.preflight import examine
from specs.loader import load_experiment

SPEC = """\
name: looked-at
model: {source: scratch, model_type: MODEL, config: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  intermediate_size: 64}}
data:
  train: [{source: jsonl, path: train.jsonl, columns: {answer: answer}}]
  evaluation: [{source: jsonl, path: held_out.jsonl, name: held_out, columns: {answer: answer}}]
  max_prompt_length: 16
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training: {steps: 3, prompts_per_step: 4, group_size: 2, minibatches: 2}
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    monkeypatch.setattr(forking, "_ACCELERATORS", ())


def rows(first: int, last: int) -> str:
    return "".join(
        json.dumps({"prompt": f"{number} and one?", "answer": "odd"}) + "\n" for number in range(first, last)
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "train", "held_out", "kinds"),
    [
        ("llama", "\n", rows(0, 20), {"errors"}),
        ("lama", rows(0, 20), rows(20, 40), {"errors"}),
        (
            "llama",
            json.dumps({"prompt": "long " * 90, "answer": "odd"}) + "\n" + rows(0, 9),
            rows(20, 40),
            {"warnings"},
        ),
    ],
    ids=["no data", "no such model", "long prompts"],
)
def test_a_fork_finds_what_this_process_would(tmp_path: Path, model, train, held_out, kinds) -> None:
    (tmp_path / "train.jsonl").write_text(train)
    (tmp_path / "held_out.jsonl").write_text(held_out)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", model))
    experiment = load_experiment(tmp_path / "spec.yaml")
    found = look_in_fork(experiment, model=True)
    assert found == examine(experiment)
    assert {kind for kind in ("errors", "absent", "warnings") if getattr(found, kind)} == kinds


def test_without_room_for_its_files_there_is_no_look_in_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text(rows(0, 20))
    (tmp_path / "held_out.jsonl").write_text(rows(20, 40))
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", "llama"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert look_in_fork(load_experiment(tmp_path / "spec.yaml"), model=False) is None
