"""Drift from the policy before training: against plain transformers, and its intervals by simulation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rpg.stage
from rpg.evaluation.drift import DriftSample, drift_figures, drift_measures
from rpg.types import Problem
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import PROBLEMS, SPEC, make_inputs, make_run, rows, train

EVALUATED = {"samples_per_problem": 4, "seed": 3}
DATA = SPEC["data"] | {"evaluation": [{"source": "parquet", "name": "held_out", "path": "train.parquet"}]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and data with an evaluation set; `moved` is another policy."""
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    table = pq.read_table(directory / "data" / "train.parquet").to_pylist()
    held_out = [row | {"dataset": "held_out"} for row in table]
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(held_out), directory / "data" / "evaluation.parquet")
    model = AutoModelForCausalLM.from_pretrained(directory / "base")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory / "moved")
    AutoTokenizer.from_pretrained(directory / "base").save_pretrained(directory / "moved")
    return directory


def evaluate(inputs: Path, directory: Path, **evaluation: Any) -> Path:
    """Runs the evaluate stage on the base model and on `moved`, as the policy of step 5, in this process."""
    run = directory / "run"
    (run / "weights").mkdir(parents=True)
    (run / "weights" / "step-000005").symlink_to(inputs / "moved")
    (run / "train.json").write_text(json.dumps({"weights": {"5": "weights/step-000005"}}))
    spec = SPEC | {"data": DATA, "evaluation": EVALUATED | evaluation, "resources": {"device": "cpu", "threads": 1}}
    rpg.stage.run(
        {
            "stage": "evaluate",
            "spec": Experiment.model_validate(spec).model_dump(mode="json"),
            "inputs": {"data": str(inputs / "data"), "base": str(inputs / "base"), "run": str(run)},
            "out": str(directory / "evaluate"),
            "run_id": "r1",
            "fingerprint": "f" * 64,
        }
    )
    return directory / "evaluate" / "segments"


def response_logprob(model: Any, prompt: list[int], response: list[int]) -> float:
    """Logprob of a response by plain transformers, nats."""
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, *response]])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + place - 1, token]) for place, token in enumerate(response))


def test_drift_equals_a_computation_by_plain_transformers(inputs: Path, tmp_path: Path) -> None:
    segments = evaluate(inputs, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    models = {name: AutoModelForCausalLM.from_pretrained(inputs / name) for name in ("base", "moved")}
    drift = pq.read_table(segments / "drift_samples").to_pylist()
    assert len(drift) == 2 * 4 * len(PROBLEMS)
    texts = {
        (row["step"], row["problem_id"], row["sample"]): row
        for row in pq.read_table(segments / "evaluation_samples").to_pylist()
    }
    read = 0
    for row in drift:
        sampled = texts[5 if row["direction"] == "reverse" else 0, row["problem_id"], row["sample"]]
        end = [tokenizer.eos_token_id] if sampled["finish_reason"] == "stop" else []
        response = tokenizer(sampled["response"])["input_ids"] + end
        assert row["num_tokens"] == sampled["num_tokens"]
        if len(response) == row["num_tokens"]:  # otherwise the policy sampled <pad>, which the text lacks
            read += 1
            prompt = tokenizer(sampled["prompt"])["input_ids"]
            for column, model in (("logprob", "moved"), ("initial_logprob", "base")):
                assert row[column] == pytest.approx(response_logprob(models[model], prompt, response), abs=1e-5)
    assert read > 10
    measured = pq.read_table(segments / "evaluations").to_pylist()
    found = {row["metric"]: row for row in measured if row["step"] == 5 and row["metric"].startswith("drift/")}
    for direction, sign in (("reverse", 1), ("forward", -1)):
        own = [row for row in drift if row["direction"] == direction]
        total = sign * sum(row["logprob"] - row["initial_logprob"] for row in own)
        assert found[f"drift/{direction}"]["value"] == pytest.approx(total / sum(row["num_tokens"] for row in own))
        assert found[f"drift/{direction}_response"]["value"] == pytest.approx(total / len(own))
        assert total > 0, "the policies differ"
    assert all(row["ci_low"] < row["value"] < row["ci_high"] for row in found.values())
    before = [row for row in measured if row["step"] == 0 and row["metric"].startswith("drift/")]
    assert [(row["value"], row["ci_low"], row["ci_high"]) for row in before] == [(0, 0, 0)] * 4


def test_greedy_answers_are_not_the_responses_that_drift_is_measured_on(inputs: Path, tmp_path: Path) -> None:
    own = pq.read_table(evaluate(inputs, tmp_path / "sampled") / "drift_samples")
    greedy = evaluate(inputs, tmp_path / "greedy", temperature=0.0, checkpoints="final")
    # The same seeds draw the same responses, though no answer is one and the base model does not answer.
    assert pq.read_table(greedy / "drift_samples").equals(own)
    assert {row["step"] for row in pq.read_table(greedy / "evaluations").to_pylist()} == {5}


def test_drift_is_not_measured_where_the_spec_says_so(inputs: Path, tmp_path: Path) -> None:
    segments = evaluate(inputs, tmp_path, drift=False)
    assert not (segments / "drift_samples").exists()
    assert not [row for row in pq.read_table(segments / "evaluations").to_pylist() if "drift" in row["metric"]]


@pytest.mark.more
@pytest.mark.parametrize("source", ["snapshot", "initial", "behaviour"])
def test_training_measures_the_drift_that_the_evaluate_stage_measures(
    inputs: Path, tmp_path: Path, source: str
) -> None:
    update = {"update": {"every_steps": 1}} if source == "snapshot" else {"update": None}
    run_dir = make_run(
        inputs,
        tmp_path / "run",
        data=DATA,
        reference={"source": source, **update},
        training={"steps": 2, "export_every_steps": 1},
        evaluation=EVALUATED | {"every_steps": 1, "checkpoints": "all"},
    )
    known = json.loads((run_dir / "inputs.json").read_text())
    (run_dir / "inputs.json").write_text(json.dumps(known | {"evaluation": "e" * 64}))
    train(run_dir)
    during = [row for row in rows(run_dir, "drift_samples") if row["step"] == 1]
    spec = json.loads((run_dir / "spec.json").read_text())
    rpg.stage.run(
        {
            "stage": "evaluate",
            "spec": spec,
            "inputs": {"data": str(inputs / "data"), "base": str(inputs / "base"), "run": str(run_dir)},
            "out": str(tmp_path / "evaluate"),
            "run_id": "r1",
            "fingerprint": "f" * 64,
        }
    )
    after = pq.read_table(tmp_path / "evaluate" / "segments" / "drift_samples").to_pylist()
    key = ("direction", "problem_id", "sample", "num_tokens")
    assert {tuple(row[name] for name in key) for row in during} == {
        tuple(row[name] for name in key) for row in after if row["step"] == 1
    }
    values = {tuple(row[name] for name in key): (row["logprob"], row["initial_logprob"]) for row in during}
    for row in after:
        if row["step"] == 1:
            assert values[tuple(row[name] for name in key)] == pytest.approx(
                (row["logprob"], row["initial_logprob"]), abs=1e-4
            )
    assert any(abs(policy - initial) > 1e-3 for policy, initial in values.values())


def test_drift_over_all_sets_is_the_sum_over_all_tokens() -> None:
    sampled = [("a", 2, -1.0, -3.0), ("b", 6, -5.0, -4.0)]
    samples = [
        DriftSample(Problem("p", "", "", dataset), 0, direction, tokens, policy, initial)
        for dataset, tokens, policy, initial in sampled
        for direction in ("reverse", "forward")
    ]
    # (2 - 1) nats over 8 tokens and 2 responses; the forward direction has the other sign.
    assert drift_figures(samples) == {
        "drift/reverse": 0.125, "drift/reverse_response": 0.5,
        "drift/forward": -0.125, "drift/forward_response": -0.5,
    }  # fmt: skip
    assert drift_figures([]) == {}


@pytest.mark.more
def test_a_closed_loop_follows_drift_at_evaluations(inputs: Path, tmp_path: Path) -> None:
    run_dir = make_run(
        inputs,
        tmp_path / "run",
        data=DATA,
        objective={"kl_coef": {"target": 5.0, "of": "drift/reverse", "start": 0.1}},
        training={"steps": 4},
        evaluation=EVALUATED | {"every_steps": 2},
    )
    known = json.loads((run_dir / "inputs.json").read_text())
    (run_dir / "inputs.json").write_text(json.dumps(known | {"evaluation": "e" * 64}))
    train(run_dir)
    chosen = [row["value"] for row in rows(run_dir, "metrics") if row["name"] == "kl_coef"]
    # Drift is far below the target: after step 2 the weight falls, and only there.
    assert chosen[0] == chosen[1] == 0.1
    assert chosen[2] == chosen[3] < 0.1


@pytest.mark.long
def test_the_intervals_of_drift_cover_as_often_as_they_say() -> None:
    """Responses of geometric length whose tokens' log-ratios have a mean that differs between problems."""
    draw, tries, problems, samples = np.random.default_rng(0), 2_000, 40, 4
    stop, shift = 0.15, 0.3
    covered = dict.fromkeys(("drift/reverse", "drift/reverse_response"), 0)
    for _ in range(tries):
        found = []
        for number in range(problems):
            # The policy's logit exceeds that of the policy before training by a shift of the problem's own: a token's
            # log-ratio is normal with mean d^2 / 2 and variance d^2, as of two normal distributions d apart.
            apart = shift * draw.chisquare(3) / 3
            for sample in range(samples):
                length = min(int(draw.geometric(stop)), 24)
                ratio = draw.normal(length * apart**2 / 2, apart * length**0.5)
                problem = Problem(f"p{number}", "", "", "set")
                found.append(DriftSample(problem, sample, "reverse", length, ratio, 0.0))
        lengths = np.minimum(np.arange(1, 2_000), 24)
        mean_length = float((lengths * stop * (1 - stop) ** np.arange(1_999)).sum())
        per_token = shift**2 * (1 + 2 / 3) / 2  # E[(chi2_3 / 3)^2] = 1 + 2 / 3
        truth = {"drift/reverse": per_token, "drift/reverse_response": per_token * mean_length}
        for measure in drift_measures(found, confidence=0.95):
            covered[measure.metric] += measure.ci_low <= truth[measure.metric] <= measure.ci_high
    assert all(0.92 <= count / tries <= 0.98 for count in covered.values()), covered
