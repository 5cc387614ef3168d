"""`rpg evaluate`: models as they are, and a run's checkpoint, measured and put side by side like runs."""

import json
import re

import pytest
from live import Lab

from pipelines.report.compare import compare
from storage import Store

TINY = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 16, max_position_embeddings: 64}"
SETS = "config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
FILE = f"""\
name: side-by-side
question: Does the trained model beat chance?
models:
  - name: chance
    source: scratch
    config: {TINY}
  - {{name: trained, run: tiny, checkpoint: last}}
data:
  evaluation:
    - {{name: held_out, source: reasoning_gym, task: chain_sum, size: 10, seed: 900000, {SETS}}}
    - {{name: other, source: reasoning_gym, task: chain_sum, size: 10, seed: 950000, {SETS}}}
  prompt: {{type: template, template: "{{metadata.expression}} ="}}
  max_prompt_length: 16
reward: {{type: exact_match}}
evaluation: {{samples_per_problem: 2, max_response_length: 4}}
"""


@pytest.mark.long
def test_two_models_on_two_sets_are_measured_compared_and_reported(lab: Lab) -> None:
    trained = lab.rpg("run", str(lab.spec))
    assert trained.code == 0, trained.err
    file = lab.spec.with_name("models.yaml")
    file.write_text(FILE)
    measured = lab.rpg("evaluate", str(file))
    assert measured.code == 0, measured.err
    assert re.search(r"trained  other  accuracy 0\.\d{3} \[.*\]  against the first", measured.out)
    for word in ("seed", "steps", "after", "learn"):
        assert word not in measured.out

    with Store.open(lab.root) as store:
        runs = store.query("SELECT run_id, name, status, objective FROM runs WHERE experiment = 'side-by-side'").rows
        accuracies = store.query(
            "SELECT name, dataset, value, num_problems FROM evaluations JOIN runs USING (run_id)"
            " WHERE experiment = 'side-by-side' AND metric = 'mean@2' AND step = 0"
        ).rows
        samples = store.query(
            "SELECT name, dataset, avg(correct::DOUBLE) FROM evaluation_samples JOIN runs USING (run_id)"
            " WHERE experiment = 'side-by-side' GROUP BY ALL"
        ).rows
        ranked = store.query(
            "SELECT rank FROM leaderboard WHERE experiment = 'side-by-side' AND metric = 'mean@2'"
        ).rows
        nothing = store.query("SELECT 1 FROM metrics SEMI JOIN runs USING (run_id) WHERE experiment = 'side-by-side'")
        at_the_end = store.query(
            "SELECT value FROM evaluations JOIN runs USING (run_id)"
            " WHERE experiment = 'tiny' AND metric = 'mean@2' AND step = 6"
        ).rows
    assert sorted((name, status, objective) for _, name, status, objective in runs) == [
        ("chance", "finished", None),
        ("trained", "finished", None),
    ]
    assert len(accuracies) == len(ranked) == 4
    assert not nothing.rows
    by_set = {(name, dataset): value for name, dataset, value, _ in accuracies}
    assert by_set == pytest.approx({(name, dataset): value for name, dataset, value in samples})
    # The run's own evaluation asked the same weights the same problems with the same seed.
    assert by_set["trained", "held_out"] == at_the_end[0][0]

    compared = compare(lab.home, ["side-by-side"])
    assert {(each.label, each.dataset): each.after.value for each in compared.outcomes} == pytest.approx(by_set)
    page = (lab.root / "experiments/side-by-side/report.html").read_text()
    for model in ("chance", "trained"):
        assert f"<td>{model}</td><td>other</td>" in page
    for word in ("before training", "after training", "Training<", "gain, points", "<th>train"):
        assert word not in page
    beside = lab.rpg("compare", "side-by-side", "tiny")
    assert beside.code == 0, beside.err

    again = lab.rpg("evaluate", str(file), "--json")
    answer = json.loads(again.out)
    assert [run["status"] for run in answer["runs"]] == ["finished"] * 2
    assert again.err.count("cached") == 8
    assert {(each["label"], each["dataset"]): each["after"]["value"] for each in answer["accuracy"]} == by_set


def test_what_is_not_there_is_named_before_anything_runs(lab: Lab) -> None:
    file = lab.spec.with_name("models.yaml")
    file.write_text(FILE)
    for verb in ("evaluate", "plan", "validate"):
        refused = lab.rpg(verb, str(file))
        assert refused.code == 2
        assert "models.yaml:7: models.1.run: there is no run `tiny`" in refused.err
    wrong = lab.rpg("run", str(file))
    assert wrong.code == 2
    assert f"hint: `rpg evaluate {file}`" in wrong.err
    assert not (lab.root / "runs").exists()
