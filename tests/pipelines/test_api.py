"""The Python API: a spec from a file or a mapping, its plan, its runs and their results."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from documentation import blocks
from live import SPEC, Lab
from PIL import Image
from places import ROOT
from ruamel.yaml import YAML

from pipelines import load
from pipelines.exchange.reward_file import source_of
from specs.errors import RpgError, SpecError
from tests.storage.recording import RecordedRun, write_json

Call = Callable[..., tuple[int, str, str]]
WORDS = re.compile(r"[a-z]+", re.IGNORECASE)


@pytest.fixture
def spec() -> dict[str, Any]:
    """The tiny experiment as a mapping."""
    found: dict[str, Any] = YAML(typ="safe").load(SPEC)
    return found


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def issues_of(spec: Any, **given: Any) -> list[str]:
    with pytest.raises(SpecError) as refused:
        load(spec, **given)
    return str(refused.value).splitlines()


def test_a_mapping_and_a_file_that_say_the_same_are_the_same_experiment(spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    from_file, from_mapping = load("tiny.yaml", set={"training.steps": 3}), load(spec, set={"training.steps": 3})
    assert from_file.document.experiment == from_mapping.document.experiment  # type: ignore[union-attr]
    assert from_file.plan().data == from_mapping.plan().data
    assert (from_mapping.kind, from_mapping.name) == ("experiment", "tiny")


def test_a_plan_is_that_of_the_command_line(spec: dict[str, Any], tmp_path: Path, call: Call) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    plan = load(spec).plan()
    _, out, _ = call("plan", "tiny.yaml", "--json")
    assert plan.data == json.loads(out)
    assert "evaluate  RUN" in str(plan)
    assert plan._repr_html_().startswith("<pre>tiny")


def test_what_is_wrong_with_a_mapping_is_told_at_the_path_of_its_key(spec: dict[str, Any]) -> None:
    spec["objective"]["kl_ceof"] = 1
    spec["training"]["steps"] = -1
    told = issues_of(spec)
    assert "training.steps: must be at least 1" in told
    assert told[0] == "objective.kl_ceof: unknown field"
    assert "  hint: did you mean `kl_coef`?" in told


def test_what_is_wrong_with_set_is_told_as_of_the_command_line(spec: dict[str, Any]) -> None:
    assert issues_of(spec, set={"training.stepz": 3})[0] == "--set training.stepz=3: training.stepz: unknown field"
    assert issues_of(spec, set={"training.steps": 0})[0] == "--set training.steps=0: training.steps: must be at least 1"


def test_what_no_file_can_say_is_refused_at_its_key(spec: dict[str, Any]) -> None:
    spec["training"]["steps"] = {1, 2}
    assert issues_of(spec)[0] == "training.steps: a set cannot be a value of a spec"


def test_numbers_and_paths_of_python_are_taken_as_a_file_would_say_them(tmp_path: Path) -> None:
    import numpy as np

    (tmp_path / "tiny.yaml").write_text(SPEC)
    job = load(
        {"extends": Path("tiny.yaml")}, set={"training.steps": np.int64(4), "objective.kl_coef": np.float32(0.5)}
    )
    experiment = job.document.experiment
    assert (experiment.training.steps, experiment.objective.kl_coef) == (4, 0.5)  # type: ignore[union-attr]


def test_a_study_as_a_mapping_names_the_file_of_its_experiment(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    study = {
        "name": "rates",
        "experiment": "tiny.yaml",
        "goal": {"dataset": "held_out", "metric": "mean@2"},
        "trials": 4,
        "parameters": {"training.optimizer.learning_rate": {"float": [1.0e-5, 1.0e-3], "log": True}},
    }
    job = load(study)
    assert job.kind == "study"
    assert job.plan().data["trials"] == 4
    assert issues_of(study | {"trials": 0})[0] == "trials: must be at least 1"


@pytest.mark.more
def test_an_outcome_has_verdict_runs_table_and_figures(root: Path, spec: dict[str, Any]) -> None:
    job = load(spec, set={"seeds": [0, 1]})
    with pytest.raises(RpgError, match=r"tiny has not been run yet with these values"):
        job.outcome().table()
    for seed, run in enumerate(job.plan().plan.runs):
        recorded = RecordedRun(root, run.run_id, seed=seed, experiment="tiny")
        recorded.start(1)
        recorded.steps(1, 2, reward=0.2)
        recorded.steps(3, 3, reward=0.6)
        recorded.evaluate()
    (root / "experiments" / "tiny").mkdir(parents=True)
    (root / "experiments" / "tiny" / "experiment.json").write_text(
        json.dumps({"runs": [run.run_id for run in job.plan().plan.runs]})
    )
    outcome = job.outcome()
    assert outcome.verdict.text
    assert [run.seed for run in outcome.runs] == [0, 1]
    assert outcome.table()["dataset"].tolist() == ["sums"]
    assert {str(kind) for kind in outcome.table().filter(like="gain").dtypes} == {"float64"}, "missing ones too"
    assert {"reward/mean", "accuracy/sums"} <= outcome.figures.keys()
    with pytest.raises(RpgError, match=r"there is no figure 'rewards'; there are: .*reward/mean"):
        outcome.figure("rewards")
    assert "<svg" in outcome._repr_html_()
    assert [row["step"] for row in outcome.figure("reward/mean").rows()][:3] == [1.0, 2.0, 3.0]
    assert repr(outcome.figure("reward/mean")) == "<chart reward/mean: Reward, mean of a step>"


def test_an_outcome_gives_its_metrics_as_rows_and_as_columns(root: Path, spec: dict[str, Any]) -> None:
    job = load(spec, set={"seeds": [0, 1], "matrix.product": {"objective.kl_coef": [0.0, 0.1]}})
    runs = job.plan().plan.runs
    for run in runs:
        recorded = RecordedRun(root, run.run_id, seed=run.seed, experiment="tiny")
        write_json(
            recorded.path / "run.json", json.loads((recorded.path / "run.json").read_text()) | {"values": run.values}
        )
        recorded.start(1)
        recorded.steps(1, 3, reward=0.2 + run.seed)
    outcome = job.outcome()
    rows = outcome.metrics("reward/mean")
    assert list(rows) == ["run_id", "seed", "objective.kl_coef", "step", "name", "value", "recorded_at"]
    assert len(rows) == 4 * 3
    assert rows.groupby("seed")["value"].mean().tolist() == pytest.approx([0.2, 1.2])
    wide = outcome.history()
    assert list(wide)[:4] == ["run_id", "seed", "objective.kl_coef", "step"]
    assert {"reward/mean", "entropy"} <= set(wide)
    assert wide[wide["run_id"] == runs[1].run_id]["step"].tolist() == [1, 2, 3]
    assert list(outcome.history("entropy")) == ["run_id", "seed", "objective.kl_coef", "step", "entropy"]
    with pytest.raises(
        RpgError, match=r"no metric 'reward/maen' is recorded; there are: .*; did you mean `reward/mean`\?"
    ):
        outcome.history("reward/maen")
    with pytest.raises(RpgError, match=r"; did you mean `reward/mean`\?"):
        outcome.metrics("reward")
    with pytest.raises(AttributeError, match=r"JobRun has no attribute 'id'; there are: name, reason, run_id, seed"):
        _ = outcome.runs[0].id  # type: ignore[attr-defined]


def test_an_outcome_that_has_nothing_yet_has_no_rows(spec: dict[str, Any]) -> None:
    outcome = load(spec).outcome()
    assert [run.status for run in outcome.runs] == ["planned"]
    assert len(outcome.metrics()) == len(outcome.history()) == 0


def test_an_unknown_attribute_is_answered_with_those_that_there_are(spec: dict[str, Any]) -> None:
    job = load(spec)
    with pytest.raises(AttributeError, match=r"Outcome has no attribute 'figur'; there are: figure, .*; did you mean"):
        _ = job.outcome().figur  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError, match=r"Job has no attribute 'results'; there are: document, kind, name, outcome"
    ):
        _ = job.results  # type: ignore[attr-defined]
    assert not hasattr(job.outcome(), "_repr_png_")


def test_a_metric_that_never_changes_has_a_figure_too(root: Path, spec: dict[str, Any]) -> None:
    job = load(spec)
    (run,) = job.plan().plan.runs
    recorded = RecordedRun(root, run.run_id, seed=0, experiment="tiny")
    recorded.start(1)
    recorded.steps(1, 3, reward=0.0)
    write_json(root / "experiments" / "tiny" / "experiment.json", {"runs": [run.run_id]})
    figure = job.outcome().figure("reward/mean")
    assert [row["value"] for row in figure.rows()] == [0.0, 0.0, 0.0]
    assert figure.svg().count("<svg") == 1


def test_a_figure_is_written_at_a_papers_widths(tmp_path: Path) -> None:
    from pipelines.report.charts import light_colors, line, line_chart
    from pipelines.report.figures import save_figures

    lines = [line([(1, 0.1), (2, 0.4)], label="first <a>"), line([(1, 0.2)], label="second", color=1)]
    chart = line_chart(lines, title="Mean & reward", name="reward/mean")
    names = [path.name for path in save_figures([chart], tmp_path / "figures")]
    drawn = [f"reward-mean{wide}.{kind}" for wide in ("", "-wide") for kind in ("svg", "pdf", "png")]
    assert names == [*drawn, "reward-mean.csv"]
    assert (tmp_path / "figures" / names[-1]).read_text().splitlines() == [
        "line,step,value",
        *("first <a>,1.0,0.1", "first <a>,2.0,0.4", "second,1.0,0.2"),
    ]
    svg = (tmp_path / "figures" / "reward-mean.svg").read_text()
    root = ElementTree.fromstring(svg)
    assert (root.get("width"), root.get("aria-label")) == ("312", "Mean & reward"), "3.25 inches"
    written = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Mean & reward", "step", "first <a>", "second"} <= written
    assert light_colors()["--c1"] in svg
    assert "var(" not in svg
    pdf = (tmp_path / "figures" / "reward-mean.pdf").read_bytes()
    assert re.search(rb"MediaBox \[0 0 23[34]", pdf)
    assert b"/Type3" not in pdf, "publishers refuse such fonts"
    with Image.open(tmp_path / "figures" / "reward-mean.png") as image:
        assert image.width == pytest.approx(3.25 * 300, abs=2)
    with pytest.raises(ValueError, match=r"a figure is saved as \.svg, \.pdf, \.png, not as 'a\.gif'"):
        chart.save(tmp_path / "a.gif")


LONGEST = 5


def words(text: str) -> list[str]:
    return WORDS.findall(text)


def short(response: str, answer: str) -> float:
    return float(len(words(response)) <= LONGEST and answer in response)


def test_a_function_becomes_a_file_with_what_it_uses(spec: dict[str, Any]) -> None:
    spec["reward"] = {"type": "mine"}
    reward = load(spec, rewards={"mine": short}).document.experiment.reward  # type: ignore[union-attr]
    names: dict[str, Any] = {}
    exec(Path(reward.path).read_text(), names)  # type: ignore[attr-defined]
    assert names["short"]("it is 42", "42") == 1.0
    assert names["short"]("one two three four five six 42", "42") == 0.0
    assert reward.function == "short"  # type: ignore[attr-defined]


def test_a_function_that_cannot_be_a_file_is_refused(spec: dict[str, Any]) -> None:
    seen = {object()}

    def counted(response: str) -> float:
        return float(len(seen) + len(response))

    assert issues_of(spec, rewards={"mine": counted})[0] == (
        "rewards.mine: cannot be written to a file: it uses seen, a set"
    )
    assert "it is a lambda" in issues_of(spec, rewards={"mine": lambda response: len(response)})[0]
    assert issues_of(spec, rewards={"mine": short})[:2] == [
        "rewards.mine: no reward of the spec is 'mine'",
        "  hint: reward: {type: mine}",
    ]


def test_a_functions_file_needs_nothing_of_the_program_around_it() -> None:
    text = source_of("mine", short)  # type: ignore[arg-type]
    assert text.startswith("import re")
    assert "LONGEST = 5" in text
    assert "Path" not in text


def test_importing_the_door_is_light() -> None:
    heavy = "torch prefect duckdb optuna transformers pandas matplotlib vl_convert"
    program = f"import sys; import pipelines; assert not set('{heavy}'.split()) & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    program = f"import sys; from pipelines import load; assert not set('{heavy}'.split()) & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.long
def test_a_script_and_the_command_line_share_stages_and_record(lab: Lab, tmp_path: Path) -> None:
    """What a script has run, with a reward of its own, the command line knows, and takes as done."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from pipelines import load\n"
        f"def near(completions, answer, **columns):\n"
        f"    return [float(text == right) for text, right in zip(completions, answer)]\n"
        f"job = load({str(lab.spec)!r}, set={{'training.steps': 2, 'reward': {{'type': 'mine'}}}},"
        f" rewards={{'mine': near}})\n"
        f"outcome = job.run(progress=False)\n"
        f"print(outcome.runs[0].run_id, job.document.experiment.reward.path, outcome.verdict.text)\n"
        f"assert [run.status for run in job.run().runs] == ['finished']\n"
    )
    environment = os.environ | {"RPG_HOME": str(lab.root), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run_id, file, text = done.stdout.split(maxsplit=2)
    assert "not new training runs" in text
    assert "train     cached" in done.stderr
    reward = f"reward={{type: python, path: {file}, function: near}}"
    again = lab.rpg("run", str(lab.spec), overrides=("training.steps=2", reward))
    assert again.code == 0, again.err
    assert f"{run_id}  seed 0" in again.err
    assert "train     cached" in again.err
    Path(file).write_text(Path(file).read_text() + "\n# other\n")
    planned = lab.rpg("plan", str(lab.spec), overrides=("training.steps=2", reward))
    assert "reward.code" in planned.out


KERNEL_SPEC = {"training.steps": 400, "training.checkpoint.every_steps": 500}


@pytest.mark.long
def test_a_notebook_shows_progress_and_its_stop_button_saves(lab: Lab) -> None:
    """A real kernel: a cell that runs is interrupted after its first steps, and what it has done is on record."""
    from notebook import Notebook

    with Notebook(lab.root) as notebook:
        shown = notebook.cell(f"from pipelines import load\njob = load({str(lab.spec)!r}, set={KERNEL_SPEC})\njob")
        assert "<experiment tiny" in shown
        shown = notebook.cell("job.run()", interrupt_at="  train  step ")
        assert "KeyboardInterrupt" in shown
        assert "the finished work is saved; the same call continues from here" in shown
        assert "never awaited" not in shown
        shown = notebook.cell("print([(run.status, run.reason) for run in job.outcome().runs])")
        assert "('cancelled'" in shown
        assert "RESUME" in notebook.cell("print(job.plan())")


@pytest.mark.more
def test_the_notebook_pages_cells_run_in_a_kernel(root: Path, tmp_path: Path) -> None:
    from notebook import Notebook

    (tmp_path / "specs").symlink_to(ROOT / "specs")
    run = RecordedRun(root, "quickstart-s0-aaaa1111", experiment="quickstart")
    run.start(1)
    run.steps(1, 3)
    page = [block for block in blocks() if block.page.name == "notebooks.md" and block.language == "python"]
    shown = {}
    with Notebook(root) as notebook:
        for block in page:
            if not block.not_run:
                shown[block.text] = notebook.cell(block.text)
    assert len(shown) >= 4
    assert not [text for text in shown.values() if "Traceback" in text or "Error: " in text]
    asked = next(text for code, text in shown.items() if "open_record" in code)
    assert asked.startswith("[(1, 0.5), (2, 0.5), (3, 0.5)]")
    assert "reward: double" in asked
    assert "clip_fraction" in next(text for code, text in shown.items() if "nlargest" in code)


def test_a_job_is_handed_to_no_server_where_there_is_none(spec: dict[str, Any]) -> None:
    with pytest.raises(RpgError, match="rpg up"):
        load(spec).submit()


@pytest.mark.long
def test_the_ten_variants_of_the_page_run(tmp_path: Path) -> None:
    page = "\n".join(block.text for block in blocks() if block.page.name == "scripts.md" and block.language == "python")
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "page.py").write_text(page)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reward.pdf").exists()


def test_a_studys_outcome_is_read_from_its_record(root: Path) -> None:
    from recorded_study import study, trial

    from pipelines.api import Outcome
    from pipelines.home.home import Home

    trials = [trial(number, value=0.4 + 0.01 * number) for number in range(3)]
    write_json(root / "studies" / "clips" / "study.json", study(trials))
    outcome = Outcome(Home(root), "clips", "Which clip?", ())
    assert outcome.table()["value"].tolist() == pytest.approx([0.4, 0.41, 0.42])
    assert str(outcome.table()["low"].dtype) == "float64"
    assert outcome.verdict.text
