"""`rpg evaluate`: models as they are, and a run's checkpoint, measured and put side by side like runs."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import SPEC, Lab
from recorded_home import change_spec, record_run, write

from pipelines.cli import main
from pipelines.home.home import Home
from pipelines.launchers import write_launch
from pipelines.planning.plan import make_plan
from pipelines.planning.weights import most_accurate, weights_in
from pipelines.report.compare import compare
from pipelines.running.run import register_experiment, register_runs
from specs.errors import SpecError
from specs.loader import load_evaluation
from specs.model_evaluation import EvaluatedRun
from storage import Store

Call = Callable[..., tuple[int, str, str]]

TINY = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}"
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


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Lab]:
    """An empty home, and beside the spec of a tiny run the file that measures it."""
    lab = Lab(tmp_path / "home", tmp_path / "tiny.yaml")
    lab.spec.write_text(SPEC)
    lab.spec.with_name("models.yaml").write_text(FILE)
    yield lab
    lab.clean_up()


@pytest.mark.long
def test_two_models_on_two_sets_are_measured_compared_and_reported(bare: Lab) -> None:
    lab, file = bare, bare.spec.with_name("models.yaml")
    trained = lab.rpg("run", str(lab.spec), overrides=("training.steps=2", "warm_up.steps=2"), timeout=600)
    assert trained.code == 0, trained.err
    measured = lab.rpg("evaluate", str(file), timeout=600)
    assert measured.code == 0, measured.err
    assert re.search(r"trained  other  accuracy 0\.\d{3} \[.*\]  against the first", measured.out)
    for word in ("seed", "steps", "after", "learn"):
        assert word not in measured.out

    with Store.open(lab.root) as store:
        runs = store.query("SELECT run_id, name, status, objective FROM runs WHERE experiment = 'side-by-side'").rows
        accuracies = store.query(
            "SELECT name, dataset, value, num_problems FROM evaluations JOIN runs USING (run_id)"
            " WHERE experiment = 'side-by-side' AND metric = 'mean@2' AND evaluations.step = 0"
        ).rows
        samples = store.query(
            "SELECT name, dataset, avg(correct::DOUBLE) FROM evaluation_samples JOIN runs USING (run_id)"
            " WHERE experiment = 'side-by-side' GROUP BY ALL"
        ).rows
        ranked = store.query(
            "SELECT rank FROM leaderboard WHERE experiment = 'side-by-side' AND metric = 'mean@2'"
        ).rows
        nothing = store.query("SELECT 1 FROM metrics JOIN runs USING (run_id) WHERE experiment = 'side-by-side'")
        at_the_end = store.query(
            "SELECT value FROM evaluations JOIN runs USING (run_id)"
            " WHERE experiment = 'tiny' AND metric = 'mean@2' AND evaluations.step = 2"
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
    of_training = ("before training", "after training", "Training<", "gain, points", ">train<", "train fingerprint")
    for word in of_training:
        assert word not in page
    beside = lab.rpg("compare", "side-by-side", "tiny")
    assert beside.code == 0, beside.err

    again = lab.rpg("evaluate", str(file), "--json")
    answer = json.loads(again.out)
    assert [run["status"] for run in answer["runs"]] == ["finished"] * 2
    assert again.err.count("cached") == 8
    assert {(each["label"], each["dataset"]): each["after"]["value"] for each in answer["accuracy"]} == by_set


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("evaluate", "models.yaml:7: models.1.run: there is no run `tiny`"),
        ("plan", "models.yaml:7: models.1.run: there is no run `tiny`"),
        ("validate", "models.yaml:7: models.1.run: there is no run `tiny`"),
        ("submit", "models.yaml:7: models.1.run: there is no run `tiny`"),
        ("run", "hint: `rpg evaluate models.yaml`"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(verb, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RPG_HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["rpg", verb, "models.yaml"])
    Path("models.yaml").write_text(FILE)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / ".rpg").exists()


def test_a_runs_weights_are_found_by_step_and_as_the_last_and_the_best(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run_id = record_run(home, "sums-s0-12345678", steps=60, before=0.4, after=0.5, on_the_way={20: 0.9, 40: 0.6})
    exported = [export(home, run_id, step) for step in (20, 40, 60)]
    write(home.run(run_id) / "train.json", {"fingerprint": "f" * 64, "steps": 60, "files": {}})
    write(
        home.run(run_id) / "plan.json",
        {"stages": {"train": {"fingerprint": "f" * 64}, "base": {"fingerprint": "b" * 64}}},
    )
    found = {
        checkpoint: weights_in(home)(EvaluatedRun(run="1234", checkpoint=checkpoint))
        for checkpoint in ("last", "best", 40, 0)
    }
    assert found == {
        "last": str(exported[2]),
        "best": str(exported[0]),
        40: str(exported[1]),
        0: str(home.artifact("base", "b" * 64)),
    }
    assert most_accurate(home, run_id, (40, 60)) == 40
    change_spec(home, run_id, {"training": {"checkpoint": {"keep_best": {"accuracy_on": "another set"}}}})
    assert most_accurate(home, run_id, (20, 40, 60)) is None
    with pytest.raises(
        SpecError, match=r"(?s)checkpoint: .* has no weights of that step.*allowed: last, best, 0, 20, 40, 60"
    ):
        weights_in(home)(EvaluatedRun(run=run_id, checkpoint=30))
    (home.run(run_id) / "train.json").unlink()
    with pytest.raises(SpecError, match=f"{run_id} has not finished training"):
        weights_in(home)(EvaluatedRun(run=run_id))
    write(home.run(run_id) / "plan.json", {"stages": {"evaluate": {"fingerprint": "e" * 64}}})
    with pytest.raises(SpecError, match=r"run: .* has trained nothing"):
        weights_in(home)(EvaluatedRun(run=run_id))


@pytest.mark.more
def test_an_evaluation_is_shown_and_exported_as_one(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.setenv("RPG_HOME", str(home.root))
    file = tmp_path / "models.yaml"
    trained = "  - {name: trained, run: tiny, checkpoint: last}\n"
    file.write_text(FILE.replace(trained, "sampling: [{name: greedy, temperature: 0}, {name: sampled}]\nranks: 2\n"))
    document = load_evaluation(file)
    greedy, sampled = make_plan(document, home).runs
    register_experiment(home, document, (greedy, sampled))
    register_runs(home, document, [greedy, sampled], durable=False)

    shown = call("show", greedy.run_id, "--all")[1]
    assert "Launch" not in shown
    # Nothing was trained, so there is no seed of training; a version before this one wrote 0 into the run's directory.
    assert json.loads(call("show", greedy.run_id, "--json")[1])["seed"] is None
    assert [run["seed"] for run in json.loads(call("plan", str(file), "--json")[1])["runs"]] == [None, None]
    with Store.open(home.root) as store:
        assert store.query("SELECT DISTINCT seed FROM run_summary").rows == [(None,)]
    reason = f"{greedy.run_id} only evaluates a model; sinks receive records of training\n"
    assert call("sync", greedy.run_id) == (0, "", reason)
    write_launch(home.run(greedy.run_id), "local", environment={}, stage="evaluate", ranks=2)
    assert re.search(
        r"^Launch\n  launcher +local\n.*\n  ranks +2$", call("show", greedy.run_id, "--all")[1], re.MULTILINE
    )

    exported = tmp_path / "exported"
    assert call("export", greedy.run_id, str(exported))[0] == 0
    told = "evaluation side-by-side: 1 run (chance, greedy) on held_out, other"
    assert call("validate", str(exported / "spec.yaml")) == (0, f"{exported}/spec.yaml: {told}\n", "")
    (again,) = make_plan(load_evaluation(exported / "spec.yaml"), home).runs
    assert (again.run_id, again.experiment) == (greedy.run_id, greedy.experiment)
    read = (exported / "README.md").read_text()
    assert "`rpg evaluate` takes this file" in read
    assert f"`{greedy.run_id}`, pending" in read, "it has no seed"


def export(home: Home, run_id: str, step: int) -> Path:
    weights = home.run(run_id) / "weights" / f"step-{step:06}"
    weights.mkdir(parents=True)
    return weights
