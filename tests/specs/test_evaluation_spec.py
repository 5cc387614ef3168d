"""An evaluation's file: its runs, its errors, and the absence of training fields in its runs."""

import json
from pathlib import Path

import pytest
from spec_text import message, warnings, write

from specs.document import Document, expand
from specs.errors import Issue, SpecError
from specs.loader import load_document, load_evaluation, load_study
from specs.model_evaluation import EvaluatedRun, MeasuredModel

GOOD = """\
name: as-they-are
models:
  - path: Qwen/Qwen3-4B-Base
    prompt: {type: template, template: "Q: {prompt}"}
  - {run: small-s0-1234, checkpoint: best, name: ours}
sampling:
  - {name: greedy, temperature: 0, samples_per_problem: 1}
  - {name: sampled}
data:
  evaluation:
    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 50, seed: 1000}
  prompt: {type: chat}
reward: {type: exact_match}
evaluation: {samples_per_problem: 16}
ranks: 2
"""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def in_a_home(model: EvaluatedRun) -> str:
    """Weights as a home finds them: a directory with a model."""
    if model.run != "small-s0-1234":
        raise SpecError(Issue("there is no such run", ("run",), model.run))
    weights = Path("weights").absolute()
    weights.mkdir(exist_ok=True)
    (weights / "config.json").write_text("{}")
    return str(weights)


def load(text: str, *overrides: str) -> Document:
    return load_evaluation(write(text), overrides, weights_of=in_a_home)


def test_each_model_with_each_sampling_setting_is_a_run():
    cells = expand(load(GOOD))
    assert [cell.label for cell in cells] == [
        "Qwen3-4B-Base, greedy",
        "Qwen3-4B-Base, sampled",
        "ours, greedy",
        "ours, sampled",
    ]
    runs = [cell.experiment for cell in cells]
    assert [run.evaluation.temperature for run in runs] == [0, 1, 0, 1]
    assert [run.evaluation.samples_per_problem for run in runs] == [1, 16, 1, 16]
    assert [run.data.prompt.type for run in runs] == ["template", "template", "chat", "chat"]
    assert [run.model.path for run in runs[1:3]] == ["Qwen/Qwen3-4B-Base", str(Path("weights").absolute())]
    assert {run.training.ranks for run in runs} == {2}


def test_a_run_says_nothing_of_training_and_is_read_again():
    document = load(GOOD)
    again = Document.from_json(json.loads(json.dumps(document.to_json())))
    assert [cell.experiment for cell in expand(again)] == [cell.experiment for cell in expand(document)]
    run = expand(again)[0].experiment
    assert isinstance(run, MeasuredModel)
    plain = run.model_dump(mode="json")
    assert not {"objective", "advantage", "reference", "warm_up", "seeds"} & set(plain)
    assert plain["training"] == {"ranks": 2}
    assert "train" not in plain["data"]
    assert not {"checkpoints", "every_steps"} & set(plain["evaluation"])
    assert MeasuredModel.model_validate(plain) == run


def test_what_is_wrong_is_told_at_its_line():
    assert "spec.yaml:4: models.0.prompt.template: must be text" in wrong('"Q: {prompt}"', "3")
    unknown = wrong("{run: small-s0-1234, ", "{run: large-s0, ")
    assert "spec.yaml:5: models.1.run: there is no such run" in unknown
    assert "given: large-s0" in unknown
    twice = wrong("{name: sampled}", "{name: greedy}")
    assert "spec.yaml:8: sampling.1.name: the name is taken" in twice
    assert "spec.yaml:9: data.evaluation: missing" in wrong(
        "  evaluation:\n    - {name: held_out,", "  x: \n    - {name: h,"
    )
    assert "spec.yaml:7: sampling.0.temperature: must be at least 0" in wrong("temperature: 0,", "temperature: -1,")
    gone = wrong("Qwen/Qwen3-4B-Base", "./nowhere")
    assert "spec.yaml:3: model.path: no such model directory" in gone
    chosen = wrong("{samples_per_problem: 16}", "{datasets: [other]}")
    assert "spec.yaml:14: evaluation.datasets.0: no such evaluation set" in chosen


def wrong(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    with pytest.raises(SpecError) as caught:
        load(GOOD.replace(old, new))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("objective: {type: rpg}", "leave it out: an evaluation trains nothing"),
        ("model: {path: x}", "an evaluation lists its models under `models`"),
        ("seeds: [0, 1]", "an evaluation has one seed, for sampling: `evaluation.seed`"),
    ],
)
def test_a_key_of_training_is_refused_with_what_to_do(key, hint):
    said = message(f"{GOOD}{key}\n")
    assert "unknown field" in said
    assert hint in said


def test_knobs_that_cannot_act_are_warned_of():
    text = GOOD.replace("  - {run: small-s0-1234, checkpoint: best, name: ours}\n", "")
    assert warnings(text) == "0 warnings"
    said = warnings(f"{text}rollout: {{temperature: 0.6}}\n".replace("problem: 16}", "problem: 16, every_steps: 5}"))
    assert "rollout.temperature: temperature has no effect" in said
    assert "leave temperature out, or write it under evaluation" in said
    assert "evaluation.every_steps: every_steps has no effect" in said


def test_the_same_model_twice_is_refused_by_its_names():
    ours = "  - {run: small-s0-1234, checkpoint: best, name: ours}\n"
    twice = wrong(ours, f"  - {{run: small-s0-1234, checkpoint: best}}\n{ours}")
    assert "spec.yaml:6: models.2: the same weights as small-s0-1234 best" in twice
    Path("weights").mkdir(exist_ok=True)
    copied = wrong(ours, f"{ours}  - {{name: copy, path: weights}}\n")
    assert "spec.yaml:6: models.2: the same weights as ours" in copied


def test_checkpoints_that_turn_out_to_be_one_share_a_row_under_both_names():
    ours = "  - {run: small-s0-1234, checkpoint: best, name: ours}\n"
    table = "{source: x, datasets: [held_out], rows: {ours: [[0.4, 0.4]], small-s0-1234 last: [[0.4, 0.4]]}}"
    both = GOOD.replace(ours, f"{ours}  - {{run: small-s0-1234, checkpoint: last}}\n")
    document = load(both.replace("problem: 16}", f"problem: 16, literature: [{table}]}}"))
    labels = [cell.label for cell in expand(document)]
    assert labels[2:] == ["ours = small-s0-1234 last, greedy", "ours = small-s0-1234 last, sampled"]
    (warning,) = document.warnings
    assert (warning.line, warning.message) == (6, "the same checkpoint as ours")
    assert warning.hint == "it is measured once and shown in one row, `ours = small-s0-1234 last`"
    assert load(GOOD).warnings == ()


def test_each_verb_names_the_one_for_a_file_of_another_kind():
    file = write(GOOD)
    for load_another in (load_document, load_study):
        with pytest.raises(SpecError, match=r"an evaluation of models as they are, not an? (experiment|study)"):
            load_another(file)
    with pytest.raises(SpecError, match="this is an experiment, not an evaluation"):
        load_evaluation(write("name: x\n"), weights_of=in_a_home)


def test_what_a_stage_finds_wrong_is_told_at_the_line_of_its_model():
    document = load(GOOD)
    first, *_, last = (cell.values for cell in expand(document))
    places = [(last, ("model", "path")), (last, ("evaluation", "seed")), (first, ("evaluation", "temperature"))]
    assert [document.locate(Issue("", path), values).line for values, path in places] == [5, 14, 7]
