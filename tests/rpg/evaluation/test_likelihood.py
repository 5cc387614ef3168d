"""Accuracy of multiple choice and bits per byte of texts, against plain transformers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rpg.stage
from specs.errors import Issue, SpecError
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import SPEC, make_inputs

QUESTIONS = [
    {"prompt": "0=", "choices": ["0", "11", "101"], "answer": 2},
    {"prompt": "1=", "choices": ["1", "00"], "answer": "00"},
    {"prompt": "01=", "choices": ["0", "1=1"], "answer": "A"},
    {"prompt": "", "choices": ["01", "1"], "answer": 0},
    {"prompt": "110=0", "choices": ["1", "0"], "answer": "B"},
]
TEXT = "0110=1001=0101=111=0=01=10=1100101=1=0011=101"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a file of questions, a text, and the data stage's result for sets of both."""
    directory = tmp_path_factory.mktemp("likelihood")
    make_inputs(directory)
    (directory / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (directory / "text.txt").write_text(TEXT)
    (directory / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXT.split("=1")))
    return directory


def sets(directory: Path, **of_questions: Any) -> list[dict[str, Any]]:
    questions = {"source": "multiple_choice", "name": "questions", "path": str(directory / "questions.jsonl")}
    text = {"source": "text", "name": "text", "path": str(directory / "text.txt"), "piece": 8}
    texts = {"source": "text", "name": "texts", "path": str(directory / "texts.jsonl")}
    return [questions | of_questions, text, texts | {"window": 4}]


def measured(directory: Path, out: Path, evaluation: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs the data and evaluate stages on the base model in this process; returns the measures by set and metric."""
    train = [{"source": "products", "size": 4}]
    spec = SPEC | {
        "data": {"train": train, "evaluation": evaluation},
        "evaluation": {"checkpoints": "final"},
        "resources": {"device": "cpu", "threads": 1},
    }
    resolved = Experiment.model_validate(spec).model_dump(mode="json")
    run = out / "run"
    (run / "weights").mkdir(parents=True)
    (run / "weights" / "step-000005").symlink_to(directory / "base")
    (run / "train.json").write_text(json.dumps({"weights": {"5": "weights/step-000005"}}))
    rpg.stage.run({"stage": "data", "spec": resolved, "out": str(out / "data")})
    inputs = {"data": str(out / "data"), "base": str(directory / "base"), "run": str(run)}
    known = {"run_id": "r1", "fingerprint": "f" * 64, "out": str(out / "evaluate")}
    rpg.stage.run({"stage": "evaluate", "spec": resolved, "inputs": inputs, **known})
    rows = pq.read_table(out / "evaluate" / "segments" / "evaluations").to_pylist()
    return {(row["dataset"], row["metric"]): row for row in rows}


def logprobs(directory: Path, ids: list[int]) -> np.ndarray:
    """Logprob of each token after the first by plain transformers, nats."""
    model = AutoModelForCausalLM.from_pretrained(directory / "base")
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("per", ["byte", "token", "choice"])
def test_a_question_is_right_if_the_right_choice_is_likeliest(directory: Path, tmp_path: Path, per: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory / "base")
    right = []
    for question in QUESTIONS:
        prompt = tokenizer(question["prompt"])["input_ids"] or [tokenizer.eos_token_id]
        scores = []
        for choice in question["choices"]:
            ids = tokenizer(choice)["input_ids"]
            total = float(logprobs(directory, [*prompt, *ids])[len(prompt) - 1 :].sum())
            scores.append(total / {"byte": len(choice.encode()), "token": len(ids), "choice": 1}[per])
        answers = {"A": 0, "B": 1, "00": 1}
        right.append(int(np.argmax(scores)) == answers.get(question["answer"], question["answer"]))
    found = measured(directory, tmp_path, sets(directory, per=per)[:1])
    row = found["questions", "accuracy"]
    assert row["value"] == pytest.approx(np.mean(right))
    assert row["ci_low"] < row["value"] < row["ci_high"] or np.mean(right) in (0, 1)
    assert (row["num_problems"], row["samples_per_problem"], row["step"]) == (5, 1, 5)
    items = pq.read_table(tmp_path / "evaluate" / "segments" / "evaluation_scores").to_pylist()
    assert [item["value"] for item in items] == [float(each) for each in right]
    assert [item["answer"] for item in items] == ["101", "00", "0", "01", "0"]


def test_bits_per_byte_equal_those_of_plain_transformers(directory: Path, tmp_path: Path) -> None:
    found = measured(directory, tmp_path, sets(directory)[1:])
    tokenizer = AutoTokenizer.from_pretrained(directory / "base")
    first = tokenizer.eos_token_id
    # The model's context is 32 tokens: a window has its first token from the one before.
    ids, bits = [first, *tokenizer(TEXT)["input_ids"]], 0.0
    for begin in range(0, len(ids) - 1, 31):
        bits -= logprobs(directory, ids[begin : begin + 32]).sum() / math.log(2)
    row = found["text", "bits_per_byte"]
    assert row["value"] == pytest.approx(bits / len(TEXT), abs=1e-5)
    assert row["ci_low"] < row["value"] < row["ci_high"]
    items = pq.read_table(tmp_path / "evaluate" / "segments" / "evaluation_scores").to_pylist()
    pieces = [item for item in items if item["dataset"] == "text"]
    assert "".join(item["text"] for item in pieces) == TEXT
    assert sum(item["value"] * item["num_bytes"] for item in pieces) == pytest.approx(bits, abs=1e-4)
    texts, bits, size = TEXT.split("=1"), 0.0, 0
    for text in texts:
        ids = [first, *tokenizer(text)["input_ids"]]
        size += len(text)
        for begin in range(0, len(ids) - 1, 3):
            bits -= logprobs(directory, ids[begin : begin + 4]).sum() / math.log(2)
    row = found["texts", "bits_per_byte"]
    assert (row["value"], row["num_problems"]) == (pytest.approx(bits / size, abs=1e-5), len(texts))


def wrong(directory: Path, tmp_path: Path, line: dict[str, Any], **settings: Any) -> Issue:
    """The error of the data stage for a file with one question that is right and one line more."""
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [QUESTIONS[0], line])))
    given = sets(directory, path=str(tmp_path / "bad.jsonl"), **settings)[:1]
    with pytest.raises(SpecError) as caught:
        measured(directory, tmp_path / "out", given)
    (issue,) = caught.value.issues
    return issue


@pytest.mark.parametrize(
    ("line", "message", "given", "allowed"),
    [
        (
            {"prompt": "0=", "choices": ["0", "1"]},
            "bad.jsonl, line 2 has no column `answer`",
            "answer",
            "prompt, choices",
        ),
        (
            {"prompt": "0=", "choices": ["0", "1"], "answer": 2},
            "bad.jsonl, line 2: `answer` is not the answer of a question",
            "2",
            "the text of a choice, a number from 0 to 1, or a letter from A",
        ),
        (
            {"prompt": "0=", "choices": ["0"], "answer": 0},
            "bad.jsonl, line 2: `choices` is not the choices of a question",
            "['0']",
            "a list of two or more different texts, none of them empty",
        ),
        (
            {"prompt": ["0="], "choices": ["0", "1"], "answer": 0},
            "bad.jsonl, line 2: `prompt` is not the prompt of a question",
            "['0=']",
            "a text",
        ),
    ],
)
def test_a_line_that_is_no_question_is_named(
    directory: Path, tmp_path: Path, line: dict[str, Any], message: str, given: str, allowed: str
) -> None:
    issue = wrong(directory, tmp_path, line)
    assert (issue.message, issue.given, issue.allowed) == (message, given, allowed)
    assert issue.path[:3] == ("data", "evaluation", 0)


def test_a_question_that_the_context_cannot_hold_is_named(directory: Path, tmp_path: Path) -> None:
    issue = wrong(directory, tmp_path, {"prompt": "01" * 16, "choices": ["0", "1"], "answer": 0})
    assert issue.message == "a question of `questions` and one of its choices are longer than the model's context"
    assert issue.allowed == "at most 32 tokens"
