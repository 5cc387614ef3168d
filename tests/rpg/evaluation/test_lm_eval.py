"""Tasks of lm-eval: its own numbers, without its own model, and no code of a task file."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_likelihood import QUESTIONS, TEXT, measured

from rpg.data.sources.lm_eval import LmEvalSource
from specs.errors import Issue, SpecError
from tests.rpg.tiny_run import make_inputs

pytest.importorskip("lm_eval")
CHOICES = """\
task: quiz
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ROLLING = """\
include: base.yaml
task: prose
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
"""
BASE = """\
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    make_inputs(directory)
    tasks = directory / "tasks"
    tasks.mkdir()
    right = {"A": 0, "B": 1, "00": 1}
    asked = [each | {"answer": right.get(each["answer"], each["answer"])} for each in QUESTIONS if each["prompt"]]
    (tasks / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (tasks / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (TEXT, TEXT[:20], "01=1 10")))
    for name, text in (("quiz", CHOICES), ("prose", ROLLING), ("base", BASE)):
        (tasks / f"{name}.yaml").write_text(text)
    return directory


def own_results(directory: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What lm-eval finds with its own model for transformers."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = directory / "tasks"
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    monkeypatch.chdir(tasks)  # lm-eval looks for data files there
    loaded = manager.load([task])
    model = HFLM(pretrained=str(directory / "base"), device="cpu", dtype="float32", batch_size=2)
    found: Any = evaluator.evaluate(model, loaded, bootstrap_iters=0)
    return {
        name.partition(",")[0]: value
        for name, value in found["results"][task].items()
        if name.endswith(",none") and isinstance(value, float) and "stderr" not in name
    }


@pytest.mark.filterwarnings("default")  # lm-eval gives some
@pytest.mark.parametrize(
    ("task", "metrics"),
    [("quiz", {"acc", "acc_norm"}), ("prose", {"word_perplexity", "byte_perplexity", "bits_per_byte"})],
)
def test_a_task_has_lm_evals_own_numbers(
    directory: Path, tmp_path: Path, task: str, metrics: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"source": "lm_eval", "task": task, "path": str(directory / "tasks"), "name": task}
    rows = measured(directory, tmp_path, [source])
    own = own_results(directory, task, monkeypatch)
    assert set(own) == metrics
    assert {metric: rows[task, metric]["value"] for metric in metrics} == pytest.approx(own, rel=1e-5)
    for metric in metrics:
        assert rows[task, metric]["ci_low"] <= rows[task, metric]["value"] <= rows[task, metric]["ci_high"]


def refusal(directory: Path, tmp_path: Path, text: str) -> Issue:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(text)
    (tmp_path / "tasks" / "base.yaml").write_text("process_docs: !function code.run\n")
    with pytest.raises(SpecError) as caught:
        measured(
            directory,
            tmp_path,
            [{"source": "lm_eval", "task": "mine", "path": str(tmp_path / "tasks"), "name": "mine"}],
        )
    (issue,) = caught.value.issues
    assert issue.path == ("data", "evaluation", 0, "task")
    return issue


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: mine\nprocess_docs: !function code.run\n", "mine.yaml, line 2: the task file imports code"),
        ("task: mine\ninclude: base.yaml\n", "base.yaml, line 1: the task file imports code"),
        (
            "task: mine\nmetric_list: [{metric: x, hf_evaluate: true}]\n",
            "mine.yaml: `hf_evaluate` runs code from elsewhere",
        ),
        ('task: mine\ndoc_to_text: "{{ x.__class__ }}"\n', "mine.yaml: a template reaches into Python objects"),
        (
            "task: mine\nmetric_list: [{metric: ./metric}]\n",
            "mine.yaml: lm-eval has no such metric, and would run code of that name from elsewhere",
        ),
        (
            CHOICES.replace("task: quiz", "task: mine"),  # its data file is not there
            "mine.yaml: lm-eval cannot create requests from it",
        ),
        ("task: mine\noutput_type: generate_until\n", "mine.yaml: tasks of this output type are not measured"),
        ("task: other\noutput_type: generate_until\n", "no such task"),
    ],
)
def test_a_task_that_runs_code_or_generates_is_refused(
    directory: Path, tmp_path: Path, text: str, message: str
) -> None:
    assert refusal(directory, tmp_path, text).message == message


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("'{{ (choices | attr(\"\\x5f\\x5fclass\\x5f\\x5f\")).mro() }}'", "SecurityError"),
        ('"{{ question }}"', "UndefinedError: 'question' is undefined"),
    ],
)
def test_a_template_that_fails_is_refused_before_training(directory: Path, template: str, reason: str) -> None:
    wrong = CHOICES.replace("task: quiz", "task: wrong").replace('"{{prompt}}"', template)
    (directory / "tasks" / "wrong.yaml").write_text(wrong)
    with pytest.raises(SpecError) as caught:
        list(LmEvalSource(source="lm_eval", task="wrong", path=str(directory / "tasks")).read())
    (issue,) = caught.value.issues
    assert issue.message == "wrong.yaml: lm-eval cannot create requests from it"
    assert reason in issue.given
