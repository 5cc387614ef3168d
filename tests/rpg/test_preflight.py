"""The check of a spec's data and models: it finds errors that would end a stage or a rank minutes later."""

import json
import socket
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import FrameType

import pytest

from rpg.base.stage import make
from rpg.preflight import HUB_SECONDS, Findings, examine
from specs.loader import load_experiment

SPEC = """\
name: looked-at
model: {source: scratch, model_type: llama, config: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  intermediate_size: 64}}
data:
  train: [{source: jsonl, path: train.jsonl, columns: {answer: answer}}]
  evaluation: [{source: jsonl, path: held_out.jsonl, name: held_out, columns: {answer: answer}}]
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training: {steps: 3, prompts_per_step: 4, group_size: 2, minibatches: 2}
"""


def rows(first: int, last: int) -> str:
    return "".join(
        json.dumps({"prompt": f"What is the sum of {number} and {number + 1}, in words?", "answer": "odd"}) + "\n"
        for number in range(first, last)
    )


def looked_at(directory: Path, train: str, held_out: str, *overrides: str) -> Findings:
    (directory / "train.jsonl").write_text(train)
    (directory / "held_out.jsonl").write_text(held_out)
    (directory / "spec.yaml").write_text(SPEC)
    return examine(load_experiment(directory / "spec.yaml", overrides))


def test_sets_that_differ_and_modules_that_there_are_give_no_finding(tmp_path: Path) -> None:
    lora = "training.lora={rank: 2, target_modules: [q_proj, down_proj]}"
    assert looked_at(tmp_path, rows(0, 20), rows(20, 40), lora) == Findings()


@pytest.mark.parametrize("source", ["scratch", "pretrained"])
def test_the_model_is_read_once_by_the_stage_that_makes_it(tmp_path: Path, source: str) -> None:
    overrides = []
    if source == "pretrained":
        made = tmp_path / "made"
        made.mkdir()
        looked_at(tmp_path, rows(0, 20), rows(20, 40))
        make(load_experiment(tmp_path / "spec.yaml"), None, made)
        overrides = [f"model={{source: pretrained, path: {made}}}"]
    entered: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _arg: object) -> None:
        """Counts calls into a module of ours from another one."""
        called = frame.f_globals.get("__name__", "")
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back else ""
        if event == "call" and {called[:4], caller[:4]} == {"rpg."} and caller != called:
            entered[called] += 1
            entered[f"{called}.{frame.f_code.co_name}"] += 1

    looked_at(tmp_path, rows(0, 20), rows(20, 40), *overrides)  # imports
    sys.setprofile(count)
    try:
        found = looked_at(tmp_path, rows(0, 20), rows(20, 40), *overrides)
    finally:
        sys.setprofile(None)
    assert not found.errors
    assert (entered["rpg.base.stage"], entered["rpg.base.check"]) == (1, 1)
    for reading in ("config_of", "tokenizer_of", "settings_with_code", "special_tokens"):
        assert entered[f"rpg.pretrained.{reading}"] == (source == "pretrained"), reading


def test_target_modules_of_adapters_are_held_against_the_model(tmp_path: Path) -> None:
    lora = "training.lora={rank: 2, target_modules: [q_proj, c_attn]}"
    (error,) = looked_at(tmp_path, rows(0, 20), rows(20, 40), lora).errors
    assert (error.message, error.given) == ("the model has no such linear module", "c_attn")
    assert error.path == ("training", "lora", "target_modules", 1)
    assert error.allowed == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_heads_that_ranks_cannot_share_out_are_found(tmp_path: Path) -> None:
    shared = ("training.ranks=3", "training.sequence_parallel_size=3")
    (error,) = looked_at(tmp_path, rows(0, 20), rows(20, 40), *shared).errors
    assert error.path == ("training", "sequence_parallel_size")
    assert error.allowed == "1, 2, 4"


def test_an_empty_file_is_found(tmp_path: Path) -> None:
    (error,) = looked_at(tmp_path, "\n", rows(0, 20)).errors
    assert (error.message, error.path) == ("the set has no problems", ("data", "train", 0))


@pytest.mark.parametrize("overlap", ["error", "drop"])
def test_sets_that_overlap_wholly_are_told_to_differ(tmp_path: Path, overlap: str) -> None:
    """To drop the shared problems would leave none."""
    (error,) = looked_at(tmp_path, rows(5, 20), rows(0, 20), f"data.overlap={overlap}").errors
    assert error.message == "no training problem is left: all 15 are in the evaluation sets too"
    assert error.hint == "give training and evaluation sets that differ"


def test_an_overlap_in_part_is_an_error_only_where_it_is_not_dropped(tmp_path: Path) -> None:
    (error,) = looked_at(tmp_path, rows(5, 25), rows(0, 20)).errors
    assert error.message == "15 of 20 training problems are in the evaluation sets too"
    assert error.hint.startswith("write `data.overlap: drop`")
    assert looked_at(tmp_path, rows(5, 25), rows(0, 20), "data.overlap=drop") == Findings()


def test_what_would_have_to_be_fetched_is_named_while_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    findings = looked_at(tmp_path, "", rows(0, 20), *OF_THE_HUB)
    assert [(issue.path, issue.given) for issue in findings.absent] == [
        (("model", "path"), "nobody/model"),
        (("data", "train", 0, "path"), "nobody/data"),
    ]
    assert findings.errors == []


def test_a_model_that_can_only_be_a_directory_is_not_looked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = "model={source: pretrained, path: teacher/weights/step-000010}"
    (issue,) = looked_at(tmp_path, "", rows(0, 20), model).absent
    assert (issue.message, issue.path) == ("no such model directory", ("model", "path"))


def test_a_published_set_that_is_not_here_is_named_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (issue,) = looked_at(tmp_path, "", rows(0, 20), "data.evaluation=[{source: suite, name: aime24}]").absent
    assert (issue.path, issue.given) == (("data", "evaluation", 0, "name"), "aime24")


OF_THE_HUB = ("model={source: pretrained, path: nobody/model}", "data.train=[{source: hub, path: nobody/data}]")


@pytest.mark.more
@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_what_would_have_to_be_fetched_is_named_within_seconds_where_the_hub_cannot_be_reached(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not silent:
            server.close()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        began = time.monotonic()
        findings = looked_at(tmp_path, "", rows(0, 20), *OF_THE_HUB)
    assert time.monotonic() - began < HUB_SECONDS + 10  # the imports of a cold machine
    assert [issue.message for issue in findings.absent] == [
        f"the {what} is not on this machine, and the Hub ({address}) does not answer" for what in ("model", "dataset")
    ]


def test_what_can_be_fetched_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which refuses: it is there
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert looked_at(tmp_path, "", rows(0, 20), *OF_THE_HUB).absent == []
        server.shutdown()
